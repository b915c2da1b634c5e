"""What is sharded together: the top-level modules, the blocks inside them, the experts and routers inside those."""

from collections.abc import Iterator, Sequence

from torch import nn

from lightning_moe.experts import FoundExperts


def find_roots(lightning_module: nn.Module) -> list[tuple[str, nn.Module]]:
    """List the top-level modules of a LightningModule, each of which is called by itself.

    ``training_step`` is not the forward of the LightningModule, so the hooks of FSDP2 belong on its children.
    Containers have no forward of their own; their entries count instead.

    Raises:
        ValueError: If the LightningModule holds a parameter directly, or two top-level modules share one: FSDP2 could
            not gather it when it is needed.
    """
    own = [name for name, _ in lightning_module.named_parameters(recurse=False)]
    if own:
        raise ValueError(
            f"{type(lightning_module).__name__} holds the parameters {', '.join(map(repr, own))} directly; FSDP2"
            " gathers weights when the module that holds them is called: move them into a submodule with a forward"
        )
    roots = list(_roots("", lightning_module))
    owner: dict[int, str] = {}
    for name, root in roots:
        for parameter in root.parameters():
            other = owner.setdefault(id(parameter), name)
            if other != name:
                raise ValueError(
                    f"{other!r} and {name!r} of {type(lightning_module).__name__} share a parameter; modules with tied"
                    " weights must be inside one submodule, so that they are sharded together"
                )
    return roots


def _roots(prefix: str, parent: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, child in parent.named_children():
        if next(child.parameters(), None) is None:
            continue
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _roots(f"{prefix}{name}.", child)
        else:
            yield f"{prefix}{name}", child


def find_blocks(
    model: nn.Module, experts: Sequence[FoundExperts], block_classes: Sequence[str] | None = None
) -> list[tuple[str, nn.Module]]:
    """Find the repeated blocks of a model, each of which is sharded as one unit.

    Args:
        model: The model.
        experts: Its experts modules.
        block_classes: Class names of the blocks, where the user names them. Otherwise blocks are the entries of the
            longest ``ModuleList`` that holds experts (that holds parameters, in a model without experts), and every
            module of a class that the model itself lists in ``_no_split_modules``, as Transformers models do.

    Returns:
        Names and modules, in the order of the model; no block lies inside another.

    Raises:
        ValueError: If no module of a class that the user named exists.
    """
    if block_classes is not None:
        named = set(block_classes)
        missing = named - {type(module).__name__ for module in model.modules()}
        if missing:
            present = sorted({type(m).__name__ for m in model.modules() if next(m.parameters(), None) is not None})
            raise ValueError(
                f"block_classes={list(block_classes)!r}: the model has no module of class {', '.join(sorted(missing))};"
                f" its classes with parameters are {', '.join(present)}"
            )
    else:
        named = {
            name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or () if name
        }
    chosen = {id(module) for module in model.modules() if type(module).__name__ in named}
    if block_classes is None:
        chosen |= {id(module) for module in _longest_list(model, experts)}
    return list(_outermost("", model, chosen))


def _longest_list(model: nn.Module, experts: Sequence[FoundExperts]) -> list[nn.Module]:
    of_experts = {id(found.module) for found in experts}

    def holds_experts(entry: nn.Module) -> bool:
        return any(id(module) in of_experts for module in entry.modules() if module is not entry)

    def holds_parameters(entry: nn.Module) -> bool:
        return next(entry.parameters(), None) is not None

    wanted = holds_experts if of_experts else holds_parameters
    lists = [list(m) for m in model.modules() if isinstance(m, nn.ModuleList) and any(wanted(entry) for entry in m)]
    return max(lists, key=len, default=[])


def _outermost(prefix: str, parent: nn.Module, chosen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    for name, child in parent.named_children():
        # A container has no forward that could gather its weights: what is in it belongs to what is around it.
        if id(child) in chosen and not isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield f"{prefix}{name}", child
        else:
            yield from _outermost(f"{prefix}{name}.", child, chosen)


def find_routers(model: nn.Module, experts: Sequence[FoundExperts]) -> list[nn.Module]:
    """Find the routers of a model: the siblings of an experts module with a matrix of one row an expert.

    Args:
        model: The model.
        experts: Its experts modules.

    Returns:
        The modules that compute router logits.
    """
    routers = []
    for found in experts:
        parent = model.get_submodule(found.name.rpartition(".")[0])
        for sibling in parent.children():
            if sibling is not found.module and any(
                parameter.ndim == 2 and parameter.shape[0] == found.num_experts
                for parameter in sibling.parameters(recurse=False)
            ):
                routers.append(sibling)
    return routers
