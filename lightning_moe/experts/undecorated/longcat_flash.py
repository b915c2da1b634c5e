"""LongCat-Flash: experts that compute nothing, beside others; the first weight has unused rows for them.

Choices of such an expert return the token itself: they stay where they are. ``gate_up_proj`` is ``[E + Z, 2I, H]`` and
``down_proj`` ``[E, H, I]``, and each is cut as its own shape says, because that is what a checkpoint on another layout
relies on. So the first weight of some experts lies on another rank than the second; it moves there for the forward,
and its gradient back. The unused rows never move.
"""

from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from lightning_moe.experts.spec import ExpertsSpec, local_weight
from lightning_moe.mesh import experts_per_rank


def describe(module: nn.Module, parent: nn.Module | None) -> ExpertsSpec | None:
    """Describe a ``LongcatFlashExperts``; ``None`` where it has no expert that computes."""
    experts: Any = module
    if experts.gate_up_proj is None:
        return None
    return ExpertsSpec(
        up="gate_up_proj",
        down="down_proj",
        activation=_gate,
        count=_count,
        choices=_choices,
        local=_local,
        even=True,
        install=_install,
    )


def _count(experts: Any) -> int:
    return experts.down_proj.shape[0]


def _choices(experts: Any) -> int:
    return experts.gate_up_proj.shape[0]


def _gate(experts: Any, rows: Tensor) -> Tensor:
    gate, up = rows.chunk(2, dim=-1)
    return experts.act_fn(gate) * up


def _install(module: Any, forward: Callable[..., Tensor]) -> None:
    module.forward = partial(_forward, _count(module), forward)


def _forward(
    num_experts: int, experts: Callable[..., Tensor], hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    identity = top_k_index >= num_experts
    routed = experts(hidden_states, top_k_index.masked_fill(identity, -1), top_k_weights)
    kept = hidden_states * (top_k_weights * identity).sum(dim=-1, keepdim=True)
    return routed + kept.to(hidden_states.dtype)


def _local(module: nn.Module, name: str) -> Tensor:
    weight, num_experts = getattr(module, name), _count(module)
    if not isinstance(weight, DTensor):
        return local_weight(module, name)[:num_experts]
    if weight.shape[0] == num_experts:
        return local_weight(module, name)
    group = weight.device_mesh.get_group()
    return _MoveRows.apply(local_weight(module, name), weight.shape[0], num_experts, group)


class _MoveRows(torch.autograd.Function):
    """Rows ``[:E]`` of a weight that is cut as ``[E + Z, ...]``, to where ``[E, ...]`` is cut; gradients back.

    Every rank of the group takes part in the forward and in the backward, which autograd runs after all that follows
    the first dispatch and before that dispatch: the collectives have one order on every rank.
    """

    @staticmethod
    def forward(ctx: Any, local: Tensor, num_rows: int, num_experts: int, group: ProcessGroup) -> Tensor:
        rank, ranks = group.rank(), group.size()
        have = _bounds(num_rows, ranks)[rank]
        want = _bounds(num_experts, ranks)[rank]
        send = [_overlap(have, other) for other in _bounds(num_experts, ranks)]
        receive = [_overlap(want, other) for other in _bounds(num_rows, ranks)]
        ctx.group, ctx.send, ctx.receive, ctx.rows = group, send, receive, local.shape[0]
        return _exchange(local[: sum(send)], receive, send, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        used = _exchange(grad, ctx.send, ctx.receive, ctx.group)
        whole = grad.new_zeros((ctx.rows, *grad.shape[1:]))
        whole[: used.shape[0]] = used
        return whole, None, None, None


def _bounds(num_rows: int, ranks: int) -> list[tuple[int, int]]:
    """First row and the one after the last of each rank."""
    ends = list(accumulate(experts_per_rank(num_rows, ranks)))
    return list(zip([0, *ends], ends, strict=False))


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> int:
    return max(0, min(one[1], other[1]) - max(one[0], other[0]))


def _exchange(rows: Tensor, receive: list[int], send: list[int], group: ProcessGroup) -> Tensor:
    received = rows.new_empty((sum(receive), *rows.shape[1:]))
    dist.all_to_all_single(received, rows.contiguous(), receive, send, group=group)
    return received
