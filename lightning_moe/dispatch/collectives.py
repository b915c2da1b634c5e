"""The all-to-all of rows: as an operator that tracing can see, or sent off while this rank goes on."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _resolve_process_group

from lightning_moe.in_flight import InFlight, arrived

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


def start_all_to_all_rows(
    rows: Tensor, receive: list[int], send: list[int], group: ProcessGroup, asynchronous: bool
) -> InFlight[Tensor]:
    """The same, but this rank can go on while the rows travel.

    Args:
        rows: ``[sum(send), ...]``, sorted by destination.
        receive: Rows that come from each rank.
        send: Rows that go to each rank.
        group: The ranks.
        asynchronous: ``False`` waits here.
    """
    if not asynchronous:
        return arrived(all_to_all_rows(rows, receive, send, group))
    received = rows.new_empty((sum(receive), *rows.shape[1:]))
    rows = rows.contiguous()
    work = dist.all_to_all_single(received, rows, receive, send, group=group, async_op=True)
    assert work is not None

    def finish() -> Tensor:
        work.wait()
        return received

    return InFlight(finish)


def exchange_tables(table: Tensor, group: ProcessGroup) -> tuple[list[Any], list[Any], Tensor]:
    """Tell each rank a row of numbers for each of several calls. The one wait for the host of all of them.

    Args:
        table: ``[N, ranks, W]`` int64: for each call what each rank is told.
        group: The ranks.

    Returns:
        ``table`` as lists, what the ranks have told this one as lists, and the latter as a tensor ``[N, ranks, W]``.
    """
    by_rank = table.transpose(0, 1).contiguous()
    each = [1] * by_rank.shape[0]
    told = all_to_all_rows(by_rank, each, each, group).transpose(0, 1)
    sent_host, told_host = torch.stack((table, told)).tolist()
    return sent_host, told_host, told
