"""Weights that are the same on every rank before they are cut up: built from one seed, or copied from rank 0.

Modules on the meta device are materialised and initialised whole, one unit at a time, and cut up right after. So the
weights do not depend on the layout, no two experts are equal, and the model never exists whole. Those that come from
somewhere else (:func:`expect`) stay on the meta device until they are cut, and are then filled part by part.
"""

import zlib
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_EXPECTED = "_lightning_moe_expected_weights"


class ExpectedWeights(Protocol):
    """Weights that are put into a module once it is sharded."""

    def waiting(self) -> Iterable[Tensor]:
        """The module's tensors on the meta device that :meth:`fill` will make; all others are initialised."""

    def fill(self, device: torch.device) -> Any:
        """Make this rank's part of them. Collective."""


def expect(module: nn.Module, weights: ExpectedWeights) -> None:
    """Let a module on the meta device wait for weights: the strategy shards it, and then has it filled.

    Args:
        module: The module, the same on every rank.
        weights: What fills it, after what was given before.
    """
    object.__setattr__(module, _EXPECTED, [*vars(module).get(_EXPECTED, ()), weights])


def take_expected(model: nn.Module) -> list[ExpectedWeights]:
    """Return what the modules of a model wait for, and forget it."""
    taken: list[ExpectedWeights] = []
    for module in model.modules():
        if _EXPECTED in vars(module):
            taken += getattr(module, _EXPECTED)
            object.__delattr__(module, _EXPECTED)
    return taken


@contextmanager
def shared_random_state(device: torch.device) -> Iterator[None]:
    """Give every rank the random numbers of rank 0 inside, and its own state back after. Collective."""
    seed = torch.randint(2**62, (1,)).to(device)
    if dist.is_initialized():
        dist.broadcast(seed, src=0)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(int(seed.item()))
        yield


def copy_from_rank_zero(model: nn.Module, device: torch.device) -> None:
    """Make parameters and buffers equal on all ranks, as DDP does, where they are not. Collective.

    Ranks compare one checksum a tensor first, so that equal models, the usual case, cost next to nothing.

    Args:
        model: A model that is not sharded yet; tensors on the meta device are left alone.
        device: The device of the process group's collectives.

    Raises:
        RuntimeError: On every rank, if the ranks have built different models.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    named = [
        (name, tensor)
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if not tensor.is_meta and not isinstance(tensor, DTensor)
    ]
    _check_same_structure(named)
    if not named:
        return
    mine = torch.stack([_fingerprint(tensor).to(device) for _, tensor in named])
    first = mine.clone()
    dist.broadcast(first, src=0)
    differs = (mine != first).any(dim=1).int()
    dist.all_reduce(differs, op=dist.ReduceOp.MAX)
    to_copy = [item for item, flag in zip(named, differs.tolist(), strict=True) if flag]
    if not to_copy:
        return
    rank_zero_warn(
        f"{len(to_copy)} of {len(named)} tensors differ between ranks ({to_copy[0][0]}, ...): every rank now has those"
        " of rank 0. Call seed_everything(...) before building the model to have them equal from the start."
    )
    for _, tensor in to_copy:
        value = tensor.detach().to(device)
        dist.broadcast(value, src=0)
        tensor.data.copy_(value)


_CHUNK = 1 << 22
_PRIME = 2_654_435_761


@torch.no_grad()
def _fingerprint(tensor: Tensor) -> Tensor:
    """Two int64 numbers that differ for tensors with other bits, or the same bits in another order.

    Sums of integers, wrapped around, do not depend on the number of threads that add them up; sums of floats do.
    """
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).detach().contiguous().reshape(-1)
    bits = flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
    result = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for start in range(0, bits.numel(), _CHUNK):
        values = bits[start : start + _CHUNK].long()
        positions = torch.arange(start + 1, start + 1 + values.numel(), device=tensor.device)
        result += torch.stack([values.sum(), (values * (positions * _PRIME % (1 << 31))).sum()])
    return result


def _check_same_structure(named: Iterable[tuple[str, Tensor]]) -> None:
    text = ";".join(f"{name}{tuple(tensor.shape)}{tensor.dtype}" for name, tensor in named)
    checksums: list[int | None] = [None] * dist.get_world_size()
    dist.all_gather_object(checksums, zlib.crc32(text.encode()))
    different = [rank for rank, checksum in enumerate(checksums) if checksum != checksums[0]]
    if different:
        raise RuntimeError(
            f"the model of rank {', '.join(map(str, different))} has other parameters or shapes than that of rank 0;"
            " every rank must build the same LightningModule"
        )


def materialize(
    unit: nn.Module,
    model: nn.Module,
    device: torch.device,
    *,
    skip: set[int],
    leave: Collection[int] = (),
) -> None:
    """Give real, initialised tensors to the parts of a unit that are on the meta device.

    Each module with such parts inside is initialised after its children, as a model is when it is built: by the
    ``_init_weights`` of the Transformers model around it, else by its own ``reset_parameters``.

    Args:
        unit: The module to materialise.
        model: The model that holds it.
        device: Where the tensors go.
        skip: Identities of submodules that are done already, with all that is inside.
        leave: Identities of tensors that stay on the meta device.

    Raises:
        ValueError: If a tensor has been on the meta device and nothing initialises it.
    """
    modules = list(_post_order(unit, skip))
    created = _replace_meta(modules, device, leave)
    if not created:
        return
    owners = initializers(model)
    with torch.no_grad():
        for module in _to_initialize(modules, {id(module) for module, _, _ in created}, skip):
            owner = owners.get(id(module))
            if owner is not None and not getattr(module, "initializes_itself", False):
                owner._init_weights(module)  # type: ignore[operator]
            else:
                _reset_parameters(module)
        for module, name, version in created:
            if _forgotten(module, name, version):  # the model around it does not know this kind of module
                _reset_parameters(module)
    forgotten = [(module, name) for module, name, version in created if _forgotten(module, name, version)]
    if forgotten:
        module, name = forgotten[0]
        raise ValueError(
            f"{type(module).__name__} was built on the meta device, and nothing initialises its {name}; give it a"
            " reset_parameters() that does, or build it on a real device"
        )


def _to_initialize(modules: list[nn.Module], created: set[int], skip: set[int]) -> list[nn.Module]:
    """Modules, children first, that have something new inside.

    One around units that are done would initialise those again: it is left out unless it has new tensors of its own.
    """
    chosen = []
    for module in modules:
        inside = {id(inner) for inner in module.modules()}
        if id(module) in created or (inside & created and not inside & skip):
            chosen.append(module)
    return chosen


def _reset_parameters(module: nn.Module) -> None:
    for name in ("reset_parameters", "_reset_parameters"):  # nn.MultiheadAttention has the latter
        reset = getattr(module, name, None)
        if callable(reset):
            reset()
            return


def _forgotten(module: nn.Module, name: str, version: int) -> bool:
    """Whether nothing has written a new tensor: floats are NaN then, others are at their first version."""
    tensor = getattr(module, name)
    return bool(tensor.isnan().any()) if tensor.is_floating_point() else tensor._version == version


def _post_order(module: nn.Module, skip: set[int], seen: set[int] | None = None) -> Iterator[nn.Module]:
    """Children before parents, each module once."""
    seen = set() if seen is None else seen
    if id(module) in skip or id(module) in seen:
        return
    seen.add(id(module))
    for child in module.children():
        yield from _post_order(child, skip, seen)
    yield module


def _replace_meta(
    modules: list[nn.Module], device: torch.device, leave: Collection[int]
) -> list[tuple[nn.Module, str, int]]:
    """Replace the modules' own meta tensors by NaN (0 where there is none); one that two modules share stays shared.

    Returns:
        Module, name and version of each new tensor.
    """
    # Keeps the old tensor too, so that its identity is not given to another one meanwhile.
    replaced: dict[int, tuple[Tensor, Tensor]] = {}
    created = []
    for module in modules:
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            if not tensor.is_meta or id(tensor) in leave:
                continue
            if id(tensor) not in replaced:
                fill = float("nan") if tensor.is_floating_point() else 0
                new: Tensor = torch.full_like(tensor, fill, device=device)
                if isinstance(tensor, nn.Parameter):
                    new = nn.Parameter(new, requires_grad=tensor.requires_grad)
                replaced[id(tensor)] = (tensor, new)
            new = replaced[id(tensor)][1]
            setattr(module, name, new)
            created.append((module, name, new._version))
    return created


def initializers(model: nn.Module) -> dict[int, nn.Module]:
    """For each module the innermost model around it that initialises its submodules by ``_init_weights``."""
    owners: dict[int, nn.Module] = {}
    for module in model.modules():
        if callable(getattr(module, "_init_weights", None)):
            # Outer models come first and are overwritten by those inside them.
            owners.update((id(inner), module) for inner in module.modules())
    return owners
