"""What is sharded together: the top-level modules, the blocks inside them, the experts and routers inside those."""

from collections.abc import Iterator, Sequence

from torch import nn

from lightning_moe.experts import FoundExperts
from lightning_moe.experts.peft import innermost


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
        Names and modules, in the order of the model; no block lies inside another or shares a parameter with one.

    Raises:
        ValueError: If no module of a class that the user named exists, or two experts modules share their weights.
    """
    _check_not_tied(experts)
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
    return _without_shared(list(_outermost("", model, chosen)))


def _check_not_tied(experts: Sequence[FoundExperts]) -> None:
    """Refuse experts modules that share weights: each is sharded by itself, and they would part at the first step."""
    owner: dict[int, str] = {}
    for found in experts:
        for parameter in found.module.parameters():
            other = owner.setdefault(id(parameter), found.name)
            if other != found.name:
                raise ValueError(
                    f"the experts modules {other!r} and {found.name!r} share their weights, which strategy='moe_ep'"
                    " cannot keep tied; give each its own, or call one module in both places"
                )


def _without_shared(blocks: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """Leave out blocks that hold a parameter of another block: only what is around both can gather it."""
    holders: dict[int, set[int]] = {}
    for _, block in blocks:
        for parameter in block.parameters():
            holders.setdefault(id(parameter), set()).add(id(block))
    sharing = {block for blocks_of_one in holders.values() if len(blocks_of_one) > 1 for block in blocks_of_one}
    return [(name, block) for name, block in blocks if id(block) not in sharing]


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
        siblings = [] if found.parent is None else found.parent.children()
        routers += [m for m in siblings if innermost(m) is not found.module and _routes(m, found.num_choices)]
    return routers


def _routes(module: nn.Module, num_experts: int) -> bool:
    """Whether a module is a router: little more than one matrix with a row an expert, its own or a child's."""
    module = innermost(module)  # what PEFT adds to a router does not count
    owners = (module, *module.children())
    rows = [p for owner in owners for p in owner.parameters(recurse=False) if p.ndim == 2 and p.shape[0] == num_experts]
    # A shared expert whose width is the number of experts has two or three such matrices.
    return bool(rows) and sum(p.numel() for p in module.parameters()) < 2 * rows[0].numel()


def check_no_hidden_experts(
    model: nn.Module, experts: Sequence[FoundExperts], block_classes: Sequence[str] | None
) -> None:
    """Refuse a list of modules that looks like experts but is not registered.

    Each rank would use those that its own tokens choose, and FSDP2 would add up the gradients of different experts or
    wait for ranks that do not come.

    Raises:
        ValueError: If a list or dictionary of modules of one class lies beside a matrix with as many rows; the message
            says how to register it, or to name the class in ``block_classes`` where it is not one of experts.
    """
    known = {id(inner) for found in experts for inner in found.module.modules()} | {id(f.module) for f in experts}
    for parent_name, parent in model.named_modules():
        if innermost(parent) is not parent:
            continue  # PEFT keeps the factors of several adapters in dictionaries
        for name, child in parent.named_children():
            if not isinstance(child, nn.ModuleList | nn.ModuleDict) or id(child) in known or len(child) < 2:
                continue
            entries = list(child.children())
            classes = {type(entry).__name__ for entry in entries}
            if len(classes) > 1 or classes & set(block_classes or ()) or next(child.parameters(), None) is None:
                continue
            if any(id(inner) in known for inner in child.modules()):
                continue
            router = [n for n, m in parent.named_children() if m is not child and _routes(m, len(child))]
            if router:
                (entry,) = classes
                raise ValueError(
                    f"{parent_name or type(model).__name__}: {name!r} is {len(child)} modules of class {entry} beside"
                    f" {router[0]!r} with as many rows, which looks like experts and their router. Ranks that choose"
                    " different ones would add up gradients of different experts, or hang. If the class that holds"
                    f" {name!r} is called as experts(hidden_states, top_k_index, top_k_weights), teach it:"
                    f" lightning_moe.register_experts(ThatClass, ExpertsSpec(modules={name!r})). If these are not"
                    f" experts, name their class: block_classes=[{entry!r}]"
                )
