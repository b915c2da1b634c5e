"""The norm of gradients that lie on different meshes, and clipping by it."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate


@dataclass(frozen=True)
class _LocalGradient:
    """The part of one gradient on this rank, and how many ranks hold the same part."""

    tensor: Tensor
    copies: int


def _local_gradients(parameters: Iterable[Tensor]) -> list[_LocalGradient]:
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    gradients = []
    for parameter in parameters:
        grad = parameter.grad
        if grad is None:
            continue
        if isinstance(grad, DTensor):
            # Both meshes cover all ranks, so the ranks that hold the same shard differ in replicated dimensions only.
            replicated = (i for i, placement in enumerate(grad.placements) if isinstance(placement, Replicate))
            gradients.append(_LocalGradient(grad.to_local(), math.prod(grad.device_mesh.size(i) for i in replicated)))
        else:
            gradients.append(_LocalGradient(grad, world_size))
    return gradients


def _norm(gradients: list[_LocalGradient], device: torch.device) -> Tensor:
    total = torch.zeros((), dtype=torch.float32, device=device)
    by_copies: dict[int, list[Tensor]] = {}
    for gradient in gradients:
        if gradient.tensor.numel():
            by_copies.setdefault(gradient.copies, []).append(gradient.tensor)
    for copies, tensors in by_copies.items():
        squares = torch.stack([n.float() for n in torch._foreach_norm(tensors, 2, dtype=torch.float32)]).square().sum()
        # Each shard is counted once over all ranks: it is summed `copies` times below, hence divided by `copies` here.
        total += squares.to(device) / copies
    if dist.is_initialized():
        # One number for all meshes. Every rank takes part, also one without gradients.
        dist.all_reduce(total)
    return total.sqrt()


def gradient_norm(parameters: Iterable[Tensor], device: torch.device) -> Tensor:
    """Compute the 2-norm of all gradients as if the model were whole. Collective over all ranks.

    Args:
        parameters: Parameters sharded over any of the meshes of one layout, or plain ones with equal gradients on all
            ranks; those without a gradient are left out.
        device: Device of the collective.

    Returns:
        A float32 scalar, the same bits on every rank.
    """
    return _norm(_local_gradients(parameters), device)


@torch.no_grad()
def clip_gradients_by_norm(parameters: Iterable[Tensor], max_norm: float, device: torch.device) -> Tensor:
    """Scale all gradients down, in place, so that their common 2-norm is at most ``max_norm``. Collective.

    Args:
        parameters: As for :func:`gradient_norm`.
        max_norm: The largest norm that is left alone.
        device: Device of the collective.

    Returns:
        The norm before clipping, a float32 scalar, the same bits on every rank.
    """
    gradients = _local_gradients(parameters)
    norm = _norm(gradients, device)
    # The same coefficient as torch.nn.utils.clip_grad_norm_, epsilon included, so that one process gives the same step.
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    tensors = [gradient.tensor for gradient in gradients if gradient.tensor.numel()]
    if tensors:
        torch._foreach_mul_(tensors, scale.to(tensors[0].device))
    return norm


@torch.no_grad()
def clip_gradients_by_value(parameters: Iterable[Tensor], max_value: float) -> None:
    """Clamp every element of every gradient to ``[-max_value, max_value]``, in place. No communication."""
    tensors = [gradient.tensor for gradient in _local_gradients(parameters) if gradient.tensor.numel()]
    if tensors:
        torch._foreach_clamp_min_(tensors, -max_value)
        torch._foreach_clamp_max_(tensors, max_value)
