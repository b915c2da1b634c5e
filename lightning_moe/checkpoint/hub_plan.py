"""What the tensors of a network are called in the format of the Hugging Face hub, and how to get there piece by piece.

Transformers turns a whole state dict into that format at once. Here the network is asked for the names and shapes on
the meta device, where they cost nothing, and for which of its tensors have to be converted together: mostly each for
itself. So a writer knows every file's layout before it reads the first weight, and holds one tensor at a time.
"""

import importlib
import math
import re
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_moe.checkpoint.damage import listed
from lightning_moe.float32 import kept_in_float32
from lightning_moe.optional import require

# The dtype in which a network is built on the meta device.
BUILT_IN = torch.bfloat16
# Bytes of stacked experts that are converted at once.
_PIECE = 1 << 28


class Entry(NamedTuple):
    """A tensor of the hub format.

    Attributes:
        name: Its name there.
        shape: Its shape.
        dtype: Its dtype.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Group:
    """Tensors of the network that are converted together.

    Attributes:
        keys: Their names in the network.
        entries: What becomes of them, in the order of the hub's names.
        rows: Number of experts where ``keys`` is one tensor ``[E, ...]`` of stacked experts, and each expert becomes
            tensors of its own: then any rows can be converted alone. 0 elsewhere.
        position: Which part of an entry's name is the number of the expert, where ``rows`` is not 0.
    """

    keys: tuple[str, ...]
    entries: tuple[Entry, ...]
    rows: int = 0
    position: int = 0

    def entries_of(self, first: int, count: int) -> list[Entry]:
        """The entries of some rows of a group that has rows."""
        wanted = range(first, first + count)
        return [entry for entry in self.entries if int(entry.name.split(".")[self.position]) in wanted]


class HubPlan:
    """The way from a network's tensors to the hub format.

    Args:
        network: A model of Transformers, built on the meta device in ``BUILT_IN``.
        dtypes: The dtype of each tensor that there is, by its name in the network.
        dtype: What floating-point tensors are cast to, ``None`` to leave them. What the model wants in float32 whatever
            the dtype of the rest is float32, as when Transformers loads it in that dtype.

    Raises:
        NotImplementedError: If Transformers cannot convert the network's tensors in pieces.
    """

    def __init__(self, network: Any, dtypes: Mapping[str, torch.dtype], dtype: torch.dtype | None = None) -> None:
        self.network = network
        self.tied = tied_names(network)
        self._dtypes = dict(dtypes)
        if dtype is not None:
            kept = _kept(network, dtype)
            cast = {key for key, stored in dtypes.items() if stored.is_floating_point}
            self._dtypes |= {key: torch.float32 if key in kept else dtype for key in cast}
        state = {
            key: torch.empty(tensor.shape, dtype=self._dtypes[key], device="meta")
            for key, tensor in saved_tensors(network).items()
        }
        with _listed_once(network):
            self.groups = _groups(network, state)

    @cached_property
    def nbytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(entry.nbytes for group in self.groups for entry in group.entries)

    @cached_property
    def dtype(self) -> torch.dtype:
        """The floating-point dtype that most bytes have, which is that of the network as a whole."""
        sizes: dict[torch.dtype, int] = {}
        for group in self.groups:
            for entry in group.entries:
                if entry.dtype.is_floating_point:
                    sizes[entry.dtype] = sizes.get(entry.dtype, 0) + entry.nbytes
        return max(sizes, key=lambda dtype: sizes[dtype], default=torch.float32)

    def convert(self, group: Group, tensors: Mapping[str, Tensor], first: int = 0) -> Iterator[tuple[str, Tensor]]:
        """Convert the tensors of one group, of stacked experts a few at a time.

        Args:
            group: One of ``groups``.
            tensors: Its tensors, by their names in the network; of a group with rows some of the rows will do.
            first: Number of the first of these rows.

        Yields:
            Name and value of each tensor of the hub format; that of the next is made when it is asked for.
        """
        if not group.rows:
            yield from self._converted(tensors)
            return
        ((key, stacked),) = tensors.items()
        row = max(1, stacked.numel() // max(1, stacked.shape[0])) * max(1, self._dtypes[key].itemsize)
        step = max(1, _PIECE // row)
        for start in range(0, stacked.shape[0], step):
            for name, tensor in self._converted({key: stacked[start : start + step]}):
                yield _renumbered(name, group.position, first + start), tensor

    def _converted(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        made = _revert(self.network, {key: tensor.detach().to(self._dtypes[key]) for key, tensor in tensors.items()})
        while made:
            yield made.popitem()


def saved_tensors(network: nn.Module) -> dict[str, Tensor]:
    """List the tensors of a network that are saved: those of its state dict, each of tied ones once."""
    network_: Any = network
    ignored = set(getattr(network_, "_keys_to_ignore_on_save", None) or ())
    tied = tied_names(network)
    return {k: v for k, v in network.state_dict().items() if k not in ignored and k not in tied}


def tied_names(network: nn.Module) -> dict[str, str]:
    """Find names of a network's state dict that stand for a tensor with another name.

    Returns:
        For each name that Transformers leaves out the one under which the tensor is saved.
    """
    network_: Any = network
    names: dict[int, list[str]] = {}
    for name, tensor in network.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
    targets = set(getattr(network_, "all_tied_weights_keys", None) or ())
    left_out = {}
    for same in names.values():
        if len(same) > 1:
            sources = [name for name in same if name not in targets]
            kept = sources[0] if sources else same[0]
            left_out.update({name: kept for name in same if name != kept})
    return left_out


def differences(network: nn.Module, stored: Mapping[str, Sequence[int]]) -> list[str]:
    """Compare the tensors that a network needs with those that there are.

    Args:
        network: The network, on the meta device.
        stored: The shapes that there are, by name in the network.

    Returns:
        One line each for missing tensors, for those that the network does not have, and for other shapes; none where
        all is right. Names that are tied to others may be missing.
    """
    wanted = {key: tuple(tensor.shape) for key, tensor in network.state_dict().items()}
    needed = saved_tensors(network)
    missing = [key for key in needed if key not in stored]
    unknown = [key for key in stored if key not in wanted]
    shapes = [
        f"{key} {list(stored[key])} instead of {list(wanted[key])}"
        for key in wanted
        if key in stored and tuple(stored[key]) != wanted[key]
    ]
    lines = []
    if missing:
        lines.append(f"{len(missing)} of the network's {len(needed)} tensors are missing: {listed(missing)}")
    if unknown:
        lines.append(f"{len(unknown)} tensors are not the network's: {listed(unknown)}")
    if shapes:
        lines.append(f"{len(shapes)} tensors have another shape: {listed(shapes)}")
    return lines


def _kept(network: nn.Module, dtype: torch.dtype) -> set[str]:
    """Names of what is float32 when Transformers loads the network in a dtype."""
    kept = kept_in_float32(network)
    kept |= {name for name, tensor in network.state_dict().items() if tensor.dtype == torch.float32}
    patterns = getattr(network, "_keep_in_fp32_modules", None)
    if dtype == torch.float16 and patterns:
        wanted = re.compile("|".join(f"(?:{pattern.replace('*', '.*')})" for pattern in patterns))
        kept |= {name for name in network.state_dict() if wanted.search(name)}
    return kept


def _revert(network: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    require("transformers", "the Hugging Face format")
    loading: Any = importlib.import_module("transformers.core_model_loading")
    return loading.revert_weight_conversion(network, dict(tensors))


@contextmanager
def _listed_once(network: nn.Module) -> Generator[None, None, None]:
    """Let a network remember its submodules: for each conversion Transformers goes through all of them."""
    submodules = list(network.named_modules())

    def named_modules(*args: Any, **kwargs: Any) -> Iterator[Any]:
        return type(network).named_modules(network, *args, **kwargs) if args or kwargs else iter(submodules)

    network.named_modules = named_modules  # type: ignore[method-assign]
    try:
        yield
    finally:
        del network.named_modules


def _groups(network: Any, state: dict[str, Tensor]) -> tuple[Group, ...]:
    whole = _revert(network, state)
    names, alone = _sources(network, state)
    found, covered = [], set()
    for keys in [*_joined(state, names), *_by_layer(alone)]:
        made = _revert(network, {key: state[key] for key in keys})
        covered |= set(made)
        found.append(_with_rows(network, state, Group(tuple(keys), _entries(made))))
    entries = {entry.name: entry for group in found for entry in group.entries}
    if covered != set(whole) or any(entries[name] != entry for name, entry in _named(whole).items()):
        raise NotImplementedError(
            f"Transformers {require('transformers', 'the Hugging Face format').__version__} converts the tensors of"
            f" {type(network).__name__} to the Hugging Face format in a way that cannot be taken apart:"
            f" {listed(covered ^ set(whole))} come out only of all of them together"
        )
    order = {name: position for position, name in enumerate(whole)}
    return tuple(sorted(found, key=lambda group: order[group.entries[0].name]))


def _sources(network: Any, state: Mapping[str, Tensor]) -> tuple[dict[str, list[str]], list[str]]:
    """For each name of the hub format the tensors that it is made of, and the tensors that cannot be asked alone."""
    names: dict[str, list[str]] = {}
    alone = []
    for key, tensor in state.items():
        try:
            made = _revert(network, {key: tensor})
        except Exception:  # whatever an operation raises that needs several tensors and gets one
            alone.append(key)
            continue
        for name in made:
            names.setdefault(name, []).append(key)
    return names, alone


def _joined(state: Iterable[str], names: Mapping[str, list[str]]) -> list[list[str]]:
    """Join tensors that make one tensor together."""
    group_of: dict[str, list[str]] = {}
    for keys in names.values():
        joined: list[str] = []
        for key in keys:
            joined += [other for other in group_of.get(key, [key]) if other not in joined]
        for key in joined:
            group_of[key] = joined
    groups = {id(group): group for group in group_of.values()}
    order = {key: position for position, key in enumerate(state)}
    return [sorted(group, key=lambda key: order[key]) for group in groups.values()]


def _by_layer(keys: Iterable[str]) -> list[list[str]]:
    """Join tensors of one layer: those with equal names up to the last number."""
    layers: dict[str, list[str]] = {}
    for key in keys:
        layers.setdefault((re.match(r".*\.\d+\.", key) or [""])[0], []).append(key)
    return list(layers.values())


def _named(tensors: Mapping[str, Tensor]) -> dict[str, Entry]:
    return {name: Entry(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def _entries(tensors: Mapping[str, Tensor]) -> tuple[Entry, ...]:
    return tuple(_named(tensors).values())


def _with_rows(network: Any, state: Mapping[str, Tensor], group: Group) -> Group:
    """Find out whether the rows of a tensor become tensors of their own, and where their names have the number."""
    stacked = state[group.keys[0]]
    if len(group.keys) > 1 or stacked.ndim < 2 or stacked.shape[0] < 2 or len(group.entries) % stacked.shape[0]:
        return group
    rows = stacked.shape[0]
    try:
        one = _named(_revert(network, {group.keys[0]: stacked[:1]}))
    except Exception:  # an operation that needs all rows
        return group
    if len(one) * rows != len(group.entries):
        return group
    parts = next(iter(one)).split(".")
    for position in (at for at, part in enumerate(parts) if part == "0"):
        made = {
            Entry(_renumbered(name, position, row), entry.shape, entry.dtype)
            for name, entry in one.items()
            if name.split(".")[position : position + 1] == ["0"]
            for row in range(rows)
        }
        if made == set(group.entries):
            return Group(group.keys, group.entries, rows, position)
    return group


def _renumbered(name: str, position: int, by: int) -> str:
    parts = name.split(".")
    parts[position] = str(int(parts[position]) + by)
    return ".".join(parts)
