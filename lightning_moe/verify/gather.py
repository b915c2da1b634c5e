"""Tensors that are spread over the ranks, made whole one at a time."""

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


def whole_tensors(named: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Make tensors whole and give each to the first rank that has it. Collective; every rank has to go to the end.

    Args:
        named: Sharded, equal on all ranks, or on some ranks only (experts that are modules of their own); ranks that
            share a sharded one hold the same ones, in the same order.

    Yields:
        Name and whole tensor, of those that this rank is the first to have.
    """
    owners = first_ranks(named)
    rank = dist.get_rank() if dist.is_initialized() else 0
    for name, tensor in named.items():
        with torch.no_grad():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if owners[name] == rank:
            yield name, whole.detach()


def first_ranks(names: Mapping[str, Tensor]) -> dict[str, int]:
    """The lowest rank that has each name. Collective."""
    if not dist.is_initialized():
        return dict.fromkeys(names, 0)
    of_ranks: list[list[str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, list(names))
    owners: dict[str, int] = {}
    for rank, its in enumerate(of_ranks):
        for name in its or []:
            owners.setdefault(name, rank)
    return owners


def gradients(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The gradients that there are, with zeros where only other ranks have one of a sharded parameter. Collective."""
    present = {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}
    anywhere = first_ranks(present)
    found = {}
    for name, parameter in parameters.items():
        if name in present:
            found[name] = present[name]
        elif name in anywhere and isinstance(parameter, DTensor):
            found[name] = torch.zeros_like(parameter, requires_grad=False)
    return found
