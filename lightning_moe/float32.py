"""Weights that a model wants in float32 whatever the precision of the rest."""

import inspect
import re
from collections.abc import Collection, Iterator

from torch import nn


def kept_in_float32(model: nn.Module) -> set[str]:
    """List the parameters and buffers that models of Transformers keep in float32 (``_keep_in_fp32_modules_strict``).

    Args:
        model: A module with any number of such models inside.

    Returns:
        Qualified names in ``model``.
    """
    kept: set[str] = set()
    for prefix, module in model.named_modules():
        patterns = [entry for entry in getattr(module, "_keep_in_fp32_modules_strict", None) or () if entry]
        if not patterns:
            continue
        # As the library matches them: anywhere in the name, with * for anything.
        wanted = re.compile("|".join(f"(?:{pattern.replace('*', '.*')})" for pattern in patterns))
        tensors = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
        kept |= {f"{prefix}.{name}" if prefix else name for name, _ in tensors if wanted.search(name)}
    return kept


def float32_units(model: nn.Module, apart: Collection[nn.Module]) -> tuple[list[nn.Module], set[str]]:
    """Find the modules that have to be sharded by themselves, so that their weights can be float32.

    A unit of FSDP2 has one dtype, and its weights are there while its forward runs. A module that others only read
    weights of has no such time.

    Args:
        model: The model.
        apart: Modules that have a dtype of their own anyway, with what is inside: routers and experts.

    Returns:
        The modules, innermost first, and the names of kept parameters for which it cannot be done.
    """
    elsewhere = {id(inner) for module in apart for inner in module.modules()}
    names: dict[str, list[str]] = {}
    kept = kept_in_float32(model)
    for name, _ in model.named_parameters(remove_duplicate=False):
        if name in kept:
            names.setdefault(name.rpartition(".")[0], []).append(name)
    units, impossible = [], set()
    for owner in sorted(names, key=lambda name: -name.count(".")):
        module = model.get_submodule(owner)
        if id(module) in elsewhere:
            continue
        own = [name for name, _ in module.named_parameters(recurse=False)]
        whole = all(f"{owner}.{name}" in kept for name in own)
        if whole and not _is_read(model, owner) and not any(_is_read(model, f"{owner}.{c}") for c, _ in called(module)):
            units.append(module)
        else:
            impossible.update(names[owner])
    return units, impossible


def called(parent: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The children with parameters; of a container, which has no forward of its own, its entries."""
    for name, child in parent.named_children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from called(child, f"{prefix}{name}.")
        elif next(child.parameters(), None) is not None:
            yield f"{prefix}{name}", child


def _is_read(model: nn.Module, name: str) -> bool:
    """Whether the code around a module reads its parameters instead of calling it."""
    around, _, child = name.rpartition(".")
    module = model.get_submodule(name)
    own = "|".join(parameter for parameter, _ in module.named_parameters(recurse=False))
    if not own or child.isdigit():
        return False
    while around:
        try:
            source = inspect.getsource(type(model.get_submodule(around)))
        except (OSError, TypeError):
            source = ""
        if re.search(rf"\b{child}\.(?:{own})\b", source):
            return True
        around = around.rpartition(".")[0]
    return False
