"""The state of an optimizer by the names of the parameters, whole or as shards.

``Optimizer.state_dict`` counts parameters in the order of the optimizer, which another layout, another process or
another version of ``configure_optimizers`` need not share. Names are the same everywhere. Unlike
``torch.distributed.checkpoint.state_dict`` nothing here takes a step of the optimizer to find out what its state is:
that would count as a step, and move the parameters of optimizers that choose their own step size.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


@dataclass(frozen=True)
class TensorFacts:
    """What is known of a saved tensor before it is read.

    Attributes:
        shape: Its shape.
        dtype: Its dtype.
    """

    shape: torch.Size
    dtype: torch.dtype


_HELD = (Tensor, TensorFacts, Mapping, list, tuple)


def parameter_names(module: nn.Module) -> dict[nn.Parameter, str]:
    """Map parameters to their names, without those of wrappers (``torch.compile``); a shared one has its first name."""
    return {parameter: clean_name(name) for name, parameter in module.named_parameters()}


def clean_name(name: str) -> str:
    """Take the names of wrappers out of the name of a parameter."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def named_optimizer_state(module: nn.Module, optimizer: Optimizer, whole: bool) -> dict[str, Any]:
    """Collect the state of an optimizer, moved to the CPU. Collective.

    On the CPU the tensors of shards are those of the optimizer, not copies.

    Args:
        module: The model, sharded.
        optimizer: Its optimizer.
        whole: Gather whole tensors on rank 0, and count parameters as plain PyTorch does; else shards (``DTensor``) by
            the name of the parameter.

    Returns:
        ``state`` and ``param_groups`` as ``Optimizer.state_dict`` has them, and what else it may have. With ``whole``
        it is empty on other ranks than 0. ``local`` lists the entries that the optimizer keeps as plain tensors of this
        rank's shard.

    Raises:
        RuntimeError: On every rank, if the optimizer keeps something that differs between the ranks and is not the
            shard of a parameter.
    """
    names = parameter_names(module)
    packed = optimizer.state_dict()
    if "state" not in packed or "param_groups" not in packed:
        raise RuntimeError(
            f"{type(optimizer).__name__}.state_dict() has no 'state' and 'param_groups', so its state cannot be told"
            " apart by parameter and saved; derive it from torch.optim.Optimizer"
        )
    by_id = _by_id(optimizer, packed, names)
    local: set[str] = set()
    state: dict[str, Any] = {}
    for key, values in packed["state"].items():
        if key not in by_id:
            raise RuntimeError(
                f"{type(optimizer).__name__} has a state under {key!r}, which is none of its parameters, so no other"
                " layout could use it; keep it in the state of a parameter or in param_groups"
            )
        name, parameter = by_id[key]
        state[name] = {str(k): _shard(v, parameter, str(k), local) for k, v in values.items()}
    orders = gathered([[by_id[i][0] for i in group["params"]] for group in packed["param_groups"]])
    _check_equal(optimizer, state)
    groups = [
        {**{k: v for k, v in group.items() if k not in ("params", "param_names")}, "params": merged(order)}
        for group, order in zip(packed["param_groups"], zip(*orders, strict=True), strict=True)
    ]
    rest = {key: value for key, value in packed.items() if key not in ("state", "param_groups")}
    if not whole:
        state = {name: map_leaves(values, _to_cpu) for name, values in state.items()}
        return {**rest, "state": state, "param_groups": groups, **({"local": sorted(local)} if local else {})}
    position = {name: index for index, name in enumerate(name for group in groups for name in group["params"])}
    gathered_state = {position[name]: map_leaves(state[name], _gathered_whole) for name in state}
    if dist.is_initialized() and dist.get_rank() != 0:
        return {}
    for group in groups:
        group["param_names"] = group["params"]  # as torch.optim has them for named_parameters(); it does not need them
        group["params"] = [position[name] for name in group["params"]]
    whole_state = {**rest, "state": gathered_state, "param_groups": groups}
    return {**whole_state, "local": sorted(local)} if local else whole_state


def names_by_position(module: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """The names in each group of an optimizer, in its order, also of parameters that other ranks hold. Collective."""
    names = parameter_names(module)
    orders = gathered([[names[p] for p in group["params"]] for group in optimizer.param_groups])
    return [merged(order) for order in zip(*orders, strict=True)]


def by_name(saved: Mapping[str, Any], positions: Sequence[Sequence[str]], what: str, ours: bool) -> dict[str, Any]:
    """Turn the state of a plain optimizer, which counts its parameters, into one by name.

    Args:
        saved: ``Optimizer.state_dict()`` of a run whose optimizer has its parameters in the same order.
        positions: The names in each group of the present optimizer.
        what: What is loaded, for the message.
        ours: Whether its names are those of the model, as :func:`named_optimizer_state` has them.

    Raises:
        ValueError: If there are no names, and the groups have other sizes.
    """
    groups = saved["param_groups"]
    keys = [key for group in groups for key in group["params"]]
    if all(isinstance(key, str) for key in keys):
        return dict(saved)
    if all("param_names" in group for group in groups):
        named = [[clean_name(name) for name in group["param_names"]] for group in groups]
        known = {name for group in positions for name in group}
        # The names of others are relative to whatever module the user asked for them.
        if ours or known.issuperset(name for group in named for name in group):
            positions = named
    sizes, present = [len(group["params"]) for group in groups], [len(group) for group in positions]
    if sizes != present:
        raise ValueError(
            f"{what} has parameter groups of {sizes} parameters without names, and now the optimizer has groups of"
            f" {present}, so which state belongs to which parameter is not known; build the optimizer in"
            " configure_optimizers() as the saved run did"
        )
    name_of = dict(zip(keys, (name for group in positions for name in group), strict=True))
    state = {name_of.get(key, str(key)): values for key, values in saved["state"].items()}
    named_groups = [
        {**{k: v for k, v in group.items() if k != "param_names"}, "params": [name_of[key] for key in group["params"]]}
        for group in groups
    ]
    return {**saved, "state": state, "param_groups": named_groups}


def empty_state(
    module: nn.Module, optimizer: Optimizer, saved: Mapping[str, Any], device: torch.device
) -> dict[str, dict[str, Any]]:
    """Make room for the state of this rank's parameters.

    Args:
        module: The model, sharded.
        optimizer: Its optimizer.
        saved: By name what was saved, with :class:`TensorFacts` in place of tensors.
        device: The device of this rank.

    Returns:
        For each name that this rank and the saved state have: shards for tensors that are as large as the parameter,
        whole tensors for others, ``None`` for anything else.
    """
    present = {p for group in optimizer.param_groups for p in group["params"]}
    found = {}
    for parameter, name in parameter_names(module).items():
        if parameter in present and name in saved:

            def room(facts: Any, parameter: nn.Parameter = parameter) -> Any:
                if not isinstance(facts, TensorFacts):
                    return None
                if facts.shape == parameter.shape and isinstance(parameter, DTensor):
                    return torch.empty_like(parameter.detach(), dtype=facts.dtype)
                return torch.empty(facts.shape, dtype=facts.dtype, device=device if len(facts.shape) else "cpu")

            found[name] = map_leaves(saved[name], room)
    return found


def load_named_optimizer_state(
    module: nn.Module,
    optimizer: Optimizer,
    saved: Mapping[str, Any],
    positions: Sequence[Sequence[str]],
    what: str,
    strict: bool = True,
) -> None:
    """Give an optimizer the state that was saved, through its own ``load_state_dict``.

    Args:
        module: The model, sharded.
        optimizer: Its optimizer.
        saved: As :func:`named_optimizer_state` returns it, with shards of this layout.
        positions: What :func:`names_by_position` returns.
        what: What is loaded, for messages.
        strict: Whether the optimizer must have the parameters that the saved one had.

    Raises:
        ValueError: If the groups of the optimizer are not those of the saved one; the message names a parameter.
    """
    names = parameter_names(module)
    group_of = {name: group for group in saved["param_groups"] for name in group["params"]}
    local = set(saved.get("local", ()))
    packed = optimizer.state_dict()
    by_id = _by_id(optimizer, packed, names)
    groups = []
    for group in packed["param_groups"]:
        own = [by_id[i][0] for i in group["params"]]
        groups.append({**_options(group, own, group_of, what, strict), "params": group["params"]})
    present = {name for names_of_group in positions for name in names_of_group}
    if strict and (gone := sorted(set(group_of) - present)):
        raise ValueError(
            f"{what} has {gone[0]!r}{_more(gone)}, which the optimizer has not now. Give the optimizer the parameters"
            " that the saved run gave it, or set strict_loading=False in the LightningModule to leave them out"
        )
    ids = {name: key for key, (name, _) in by_id.items()}
    state = {
        ids[name]: {key: _unwrap(value) if key in local else value for key, value in values.items()}
        for name, values in saved["state"].items()
        if name in ids
    }
    rest = {key: value for key, value in saved.items() if key not in ("state", "param_groups", "local")}
    optimizer.load_state_dict({**packed, **rest, "state": state, "param_groups": groups})


def gathered(value: Any) -> list[Any]:
    """A value of every rank, in their order. Collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def merged(orders: Sequence[Sequence[str]]) -> list[str]:
    """Put together the names of all ranks, each of which has some of them in the one order that they all have.

    Experts that are modules of their own exist on one rank each, those of the first rank before those of the next.
    """
    first = list(orders[0])
    if all(list(order) == first for order in orders):
        return first
    everywhere = set(first).intersection(*orders)
    result: list[str] = []
    seen: set[str] = set()
    parts = [list(_parts(order, everywhere)) for order in orders]
    for part in zip(*parts, strict=True):
        for names in part:
            result += [name for name in names if name not in seen]
            seen.update(names)
    return result


def _parts(order: Sequence[str], everywhere: set[str]) -> Iterator[list[str]]:
    """Cut an order before each name that every rank has."""
    part: list[str] = []
    for name in order:
        if name in everywhere:
            yield part
            part = []
        part.append(name)
    yield part


def _by_id(
    optimizer: Optimizer, packed: Mapping[str, Any], names: Mapping[nn.Parameter, str]
) -> dict[int, tuple[str, nn.Parameter]]:
    ids = [key for group in packed["param_groups"] for key in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {key: (names[parameter], parameter) for key, parameter in zip(ids, parameters, strict=True)}


def _options(
    group: Mapping[str, Any], own: Sequence[str], group_of: Mapping[str, Mapping[str, Any]], what: str, strict: bool
) -> dict[str, Any]:
    """The hyperparameters of a group: the saved ones, and what is new."""
    present = {key: value for key, value in group.items() if key != "params"}
    unknown = [name for name in own if name not in group_of]
    if unknown and strict:
        raise ValueError(
            f"{what} knows nothing of {unknown[0]!r}{_more(unknown)}, which the optimizer has now. Give the optimizer"
            " the parameters that the saved run gave it, or set strict_loading=False in the LightningModule to begin"
            " without a state for new ones"
        )
    options: dict[str, Any] | None = None
    for name in own:
        if name in group_of:
            found = {key: value for key, value in group_of[name].items() if key != "params"}
            if options is not None and found != options:
                raise ValueError(
                    f"{what} has {own[0]!r} and {name!r} in parameter groups with different options, and now they are"
                    " in one; build the groups in configure_optimizers() as the saved run did"
                )
            options = found
    if options is None:
        return present
    if "initial_lr" in present and "initial_lr" not in options and "lr" in options:
        # A schedule that the saved run did not have has set the learning rate already.
        options["lr"] = present["lr"]
    return {**present, **options}


def _more(names: Sequence[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def _shard(value: Any, parameter: nn.Parameter, key: str, local: set[str]) -> Any:
    """What is saved of an entry: the shard of a tensor as large as the parameter, everything else whole."""
    if isinstance(value, DTensor):
        return value if value.shape == parameter.shape and not _partial(value) else value.full_tensor()
    if not isinstance(value, Tensor) or not isinstance(parameter, DTensor) or value.ndim == 0:
        return value
    if value.shape != parameter.to_local().shape:
        return value
    local.add(key)
    return DTensor.from_local(
        value,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def shard_like(value: Any, like: Tensor, local: bool = False) -> Any:
    """Cut out of a whole tensor what this rank holds of a tensor of the same shape; anything else stays as it is.

    Args:
        value: The whole tensor.
        like: The parameter or buffer that it belongs to.
        local: Return this rank's part as a plain tensor, else as a ``DTensor`` like the other one.
    """
    if not isinstance(value, Tensor) or not isinstance(like, DTensor) or value.shape != like.shape:
        return value
    mine = torch.empty_like(like.to_local().detach(), dtype=value.dtype)
    for chunk in like.__create_chunk_list__():  # as torch.distributed.checkpoint asks
        if mine.numel():
            mine.copy_(value[tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))])
    if local:
        return mine
    return DTensor.from_local(
        mine, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def _partial(tensor: DTensor) -> bool:
    return any(placement.is_partial() for placement in tensor.placements)


def _unwrap(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def _to_cpu(value: Any) -> Any:
    return value.to("cpu") if isinstance(value, Tensor) else value


def _gathered_whole(value: Any) -> Any:
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return _to_cpu(value)


def map_leaves(value: Any, function: Callable[[Any], Any]) -> Any:
    """Apply a function to what dictionaries, lists and tuples hold, however deep."""
    if isinstance(value, Mapping):
        return {key: map_leaves(inner, function) for key, inner in value.items()}
    if isinstance(value, list | tuple) and any(isinstance(inner, _HELD) for inner in value):
        return [map_leaves(inner, function) for inner in value]
    return function(value)


def _check_equal(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Find what is neither a shard nor the same everywhere: one rank's copy would stand for all. Collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    mine = {}
    for name, values in state.items():
        for key, value in values.items() if isinstance(values, Mapping) else [("", values)]:
            if not isinstance(value, DTensor):
                mine[f"{name}: {key}"] = digest(value)
    seen: dict[str, str] = {}
    for found in gathered(mine):
        for key, value in found.items():
            if seen.setdefault(key, value) != value:
                raise RuntimeError(
                    f"{type(optimizer).__name__} keeps something else on every rank ({key}), and it is not as large as"
                    " the rank's shard of the parameter, so no other layout could use it; the state of such an"
                    " optimizer cannot be saved from more than one rank"
                )


def digest(value: Any) -> str:
    """A short hash of tensors and plain values, however deep."""
    found = hashlib.sha256()

    def add(part: Any) -> None:
        if isinstance(part, DTensor):
            part = part.to_local()
        if isinstance(part, Tensor):
            found.update(f"{part.dtype}{tuple(part.shape)}".encode())
            found.update(part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            found.update(repr(part).encode())

    map_leaves(value, add)
    return found.hexdigest()
