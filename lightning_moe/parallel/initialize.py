"""Weights that are the same on every rank before they are cut up: built from one seed, or copied from rank 0.

Modules on the meta device are materialised and initialised whole, one unit at a time, and cut up right after. So the
weights do not depend on the layout, no two experts are equal, and the model never exists whole.
"""

import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


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
    with torch.no_grad():
        mine = torch.stack([tensor.sum(dtype=torch.float64).to(device) for _, tensor in named])
    first = mine.clone()
    dist.broadcast(first, src=0)
    # NaN differs from itself, so a tensor with NaN is copied; that is harmless.
    differs = (mine != first).int()
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


def materialize(unit: nn.Module, model: nn.Module, device: torch.device, *, skip: set[int]) -> None:
    """Give real, initialised tensors to the parts of a unit that are on the meta device.

    Args:
        unit: The module to materialise.
        model: The model that holds it; a Transformers model inside initialises its own submodules.
        device: Where the tensors go.
        skip: Identities of submodules that are done already, with all that is inside.

    Raises:
        ValueError: If a module with tensors on the meta device has no way to initialise them.
    """
    modules = [module for module in _post_order(unit, skip) if _on_meta(module)]
    owners = _initializers(model) if modules else {}
    replaced: dict[int, tuple[Tensor, Tensor]] = {}
    for module in modules:
        _to_nan(module, device, replaced)
    with torch.no_grad():
        for module in modules:
            _initialize(module, owners.get(id(module)))


def _initialize(module: nn.Module, owner: nn.Module | None) -> None:
    """Initialise the module's own tensors; what is still NaN after that was forgotten."""
    if owner is not None:
        owner._init_weights(module)  # type: ignore[operator]
    if _uninitialized(module) and callable(getattr(module, "reset_parameters", None)):
        module.reset_parameters()  # type: ignore[operator]
    forgotten = _uninitialized(module)
    if forgotten:
        raise ValueError(
            f"{type(module).__name__} was built on the meta device, and nothing initialises its {', '.join(forgotten)};"
            " give it a reset_parameters() that does, or build it on a real device"
        )


def _uninitialized(module: nn.Module) -> list[str]:
    own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    return [name for name, tensor in own if tensor.is_floating_point() and bool(tensor.isnan().any())]


def _post_order(module: nn.Module, skip: set[int], seen: set[int] | None = None) -> Iterator[nn.Module]:
    """Children before parents, each module once."""
    seen = set() if seen is None else seen
    if id(module) in skip or id(module) in seen:
        return
    seen.add(id(module))
    for child in module.children():
        yield from _post_order(child, skip, seen)
    yield module


def _on_meta(module: nn.Module) -> bool:
    own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return any(tensor.is_meta for tensor in own)


def _to_nan(module: nn.Module, device: torch.device, replaced: dict[int, tuple[Tensor, Tensor]]) -> None:
    """Replace the module's own meta tensors by NaN (integers by 0); one that two modules share stays shared.

    ``replaced`` keeps the old tensor too, so that its identity is not given to another one meanwhile.
    """

    def real(tensor: Tensor) -> Tensor:
        if id(tensor) not in replaced:
            fill = float("nan") if tensor.is_floating_point() else 0
            new: Tensor = torch.full_like(tensor, fill, device=device)
            if isinstance(tensor, nn.Parameter):
                new = nn.Parameter(new, requires_grad=tensor.requires_grad)
            replaced[id(tensor)] = (tensor, new)
        return replaced[id(tensor)][1]

    own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    for name, tensor in own:
        if tensor.is_meta:
            setattr(module, name, real(tensor))


def _initializers(model: nn.Module) -> dict[int, nn.Module]:
    """For each module the innermost model around it that initialises its submodules by ``_init_weights``."""
    owners: dict[int, nn.Module] = {}
    for module in model.modules():
        if callable(getattr(module, "_init_weights", None)):
            # Outer models come first and are overwritten by those inside them.
            owners.update((id(inner), module) for inner in module.modules())
    return owners
