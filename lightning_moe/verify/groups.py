"""To which part of a model a parameter belongs."""

from torch import nn

from lightning_moe.experts import find_experts
from lightning_moe.parallel.structure import find_routers

GROUPS = ("embeddings", "attention", "router", "experts", "shared experts", "norms", "other")


def parameter_groups(model: nn.Module) -> dict[str, str]:
    """Say for each parameter which of :data:`GROUPS` it belongs to.

    Experts and routers are found by what they are, embeddings by type; norms, attention, and the shared experts beside
    the others by what they are called.

    Args:
        model: A model that is whole.

    Returns:
        Parameter name to group.
    """
    experts = find_experts(model)
    known: dict[int, str] = {}
    for found in experts:
        for name, child in () if found.parent is None else found.parent.named_children():
            if "shared" in f"{name} {type(child).__name__}".lower():
                known[id(child)] = "shared experts"
    known.update((id(router), "router") for router in find_routers(model, experts))
    known.update((id(found.module), "experts") for found in experts)
    groups: dict[str, str] = {}
    _visit(model, "", "", "other", known, groups)
    return groups


def _visit(
    module: nn.Module, prefix: str, name: str, around: str, known: dict[int, str], groups: dict[str, str]
) -> None:
    group = around if around in ("experts", "router") else _group(module, name, known) or around
    for parameter, _ in module.named_parameters(recurse=False):
        groups[f"{prefix}{parameter}"] = group
    for child_name, child in module.named_children():
        _visit(child, f"{prefix}{child_name}.", child_name, group, known, groups)


def _group(module: nn.Module, name: str, known: dict[int, str]) -> str | None:
    """The group that a module gives to what is in it, ``None`` for that of the module around it."""
    of_class, marked = type(module).__name__.lower(), known.get(id(module))
    if marked in ("experts", "router"):
        return marked
    if isinstance(module, nn.Embedding) or "embedding" in of_class:
        return "embeddings"
    if "norm" in of_class:
        return "norms"
    holds_experts = any(id(inner) in known for inner in module.modules() if inner is not module)
    if not holds_experts and ("attention" in of_class or "attn" in of_class or "attn" in name.lower()):
        return "attention"
    return None if holds_experts else marked
