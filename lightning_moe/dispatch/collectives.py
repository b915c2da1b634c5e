"""The all-to-all of rows as an operator of its own, so that recompute can keep its result and tracing can see it."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _resolve_process_group

# Below custom_op's own wrappers: a layer makes several calls, and each would cost more than the lookup of its group.
_LIBRARY = torch.library.Library("lightning_moe", "DEF")
_LIBRARY.define("all_to_all_rows(Tensor rows, SymInt[] receive, SymInt[] send, str group) -> Tensor")


@torch.library.impl(_LIBRARY, "all_to_all_rows", "CompositeExplicitAutograd")
def _exchange(rows: Tensor, receive: list[int], send: list[int], group: Any) -> Tensor:
    received = rows.new_empty((sum(receive), *rows.shape[1:]))
    dist.all_to_all_single(received, rows.contiguous(), receive, send, group=_resolve_process_group(group))
    return received


@torch.library.register_fake("lightning_moe::all_to_all_rows", lib=_LIBRARY)
def _fake_exchange(rows: Tensor, receive: list[int], send: list[int], group: str) -> Tensor:
    return rows.new_empty((sum(receive), *rows.shape[1:]))


def all_to_all_rows(rows: Tensor, receive: list[int], send: list[int], group: ProcessGroup) -> Tensor:
    """Send consecutive rows to each rank of a group and receive theirs. Collective; not differentiable.

    Args:
        rows: ``[sum(send), ...]``, sorted by destination.
        receive: Rows that come from each rank.
        send: Rows that go to each rank.
        group: The ranks.

    Returns:
        ``[sum(receive), ...]``, sorted by source.
    """
    return torch.ops.lightning_moe.all_to_all_rows(rows, receive, send, group.group_name)
