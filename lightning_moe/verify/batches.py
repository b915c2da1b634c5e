"""The batches that the ranks of the layout saw, once more for one process: joined, or one after the other."""

import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from lightning_moe.verify.compare import Record
from lightning_moe.verify.plan import batch_file


class MergeError(ValueError):
    """The batches of the ranks cannot be joined to one."""


def merge(batches: Sequence[Any], name: str = "batch") -> Any:
    """Join the batches of all ranks to that of one process.

    Args:
        batches: One of each rank, nested dictionaries, lists, tuples and dataclasses alike.
        name: How messages call them.

    Returns:
        The same structure: tensors and lists of strings one after the other along dimension 0, anything else as it is.

    Raises:
        MergeError: If the structures differ, or tensors in a dimension other than 0, or anything without a dimension 0
            in its value.
    """
    first = batches[0]
    kinds = {type(batch) for batch in batches}
    if len(kinds) > 1:
        raise MergeError(f"{name} is {' or '.join(sorted(kind.__name__ for kind in kinds))}, depending on the rank")
    if isinstance(first, Tensor) and first.ndim:
        return _merge_tensors(batches, name)
    if isinstance(first, Mapping):
        if any(batch.keys() != first.keys() for batch in batches):
            raise MergeError(f"{name} has other keys on some ranks")
        return _like(first, {key: merge([batch[key] for batch in batches], f"{name}[{key!r}]") for key in first})
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        merged = copy.copy(first)
        for field in dataclasses.fields(first):
            values = [getattr(batch, field.name) for batch in batches]
            object.__setattr__(merged, field.name, merge(values, f"{name}.{field.name}"))
        return merged
    if isinstance(first, list) and first and all(isinstance(text, str) for batch in batches for text in batch):
        return [text for batch in batches for text in batch]
    if isinstance(first, list | tuple):
        if any(len(batch) != len(first) for batch in batches):
            raise MergeError(f"{name} has {' or '.join(str(len(batch)) for batch in batches)} entries")
        parts = [merge(list(entries), f"{name}[{at}]") for at, entries in enumerate(zip(*batches, strict=True))]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    if not all(_equal(batch, first) for batch in batches):
        raise MergeError(f"{name} ({type(first).__name__}) has no dimension 0 and differs between ranks")
    return first


def _merge_tensors(tensors: Sequence[Tensor], name: str) -> Tensor:
    if len({(tensor.dtype, tensor.shape[1:]) for tensor in tensors}) > 1:
        shapes = ", ".join(f"{list(tensor.shape)} {tensor.dtype} on rank {r}" for r, tensor in enumerate(tensors))
        raise MergeError(f"{name} differs in more than its dimension 0: {shapes}")
    return torch.cat(list(tensors))


def _like(mapping: Mapping[Any, Any], content: dict[Any, Any]) -> Any:
    if type(mapping) is dict:
        return content
    merged: Any = copy.copy(mapping)
    try:
        for key, value in content.items():
            merged[key] = value
    except TypeError:  # it cannot be changed
        return content
    return merged


def _equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except (RuntimeError, ValueError, TypeError):
        return False


class Replay:
    """A dataloader of what the ranks of the layout saw, epoch by epoch, without a length.

    Args:
        folder: The temporary folder.
        trainer: Knows the epoch.
        layout: The record of the layout.
        by_rank: One rank after the other, else joined.
    """

    def __init__(self, folder: Path, trainer: Trainer, layout: Record, by_rank: bool) -> None:
        self._folder, self._trainer, self._layout, self._by_rank = folder, trainer, layout, by_rank

    def __iter__(self) -> Iterator[Any]:
        epoch, epochs = self._trainer.current_epoch, self._layout.epochs
        last = None
        for index in (index for index, of in enumerate(epochs) if of == epoch):
            parts = [self._load(index, rank) for rank in range(self._layout.ranks)]
            for last in parts if self._by_rank else [merge(parts)]:
                yield last
        if last is not None and epoch == epochs[-1] and not self._layout.epoch_ended:
            # Read ahead and never trained on; without it Lightning would take the epoch to be over, and step early.
            yield last

    def _load(self, index: int, rank: int) -> Any:
        # Written by the ranks of this comparison, with whatever classes the user's batches are made of.
        return torch.load(batch_file(self._folder, index, rank), weights_only=False, map_location="cpu")


class SizedReplay(Replay):
    """The same with the length that the loader had under the layout, on which a schedule may depend."""

    def __len__(self) -> int:
        length = self._layout.batches_per_epoch
        assert length is not None
        return length * (self._layout.ranks if self._by_rank else 1)
