"""A model that is in training, on any number of ranks, as a folder in the format of the Hugging Face hub.

Where the format has tensors of its own for each expert, every rank writes those of its experts. All others are gathered
one after the other, and the rank that has the file writes them. No rank ever holds more than is converted at once.
"""

import contextlib
import os
import tempfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_moe.checkpoint.damage import Ranks, listed
from lightning_moe.checkpoint.hub_plan import Entry, Group, HubPlan, differences
from lightning_moe.checkpoint.hub_write import (
    Files,
    HubFolder,
    Part,
    copy_tokenizer,
    divide,
    file_names,
    find_tokenizer,
    parse_size,
    write_configs,
    write_index,
)
from lightning_moe.checkpoint.network import check_no_adapters, find_network, meta_twin
from lightning_moe.files import wait_for_folder
from lightning_moe.parallel.apply import reshard


def save_pretrained(
    module: nn.Module,
    output: str | os.PathLike[str],
    *,
    name: str | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    tokenizer: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
) -> None:
    """Write the network in a module in the format of the Hugging Face hub, sharded or not. Collective.

    The folder has to be on a file system that all ranks share. It is there only once it is whole.

    Args:
        module: A LightningModule, or any other module, with one model of Transformers inside.
        output: The folder to write.
        name: The model's name in the module, where it holds several.
        dtype: Floating-point weights are cast to it; default: they are written as they are.
        max_shard_size: Bytes of a file at most, also as ``"5GB"``.
        tokenizer: A folder with a tokenizer, or a ``tokenizer.json``, to copy.
        overwrite: Replace a model that ``output`` holds, once the new one is whole.

    Raises:
        FileExistsError: If ``output`` exists and may not be replaced.
        FileNotFoundError: If the tokenizer does not exist.
        NotImplementedError: If the model is adapted by PEFT, or Transformers cannot convert it in pieces.
        OSError: If there is no space or no permission.
        ValueError: If an option has a value that is not allowed, or the module does not hold one such model.
    """
    ranks = all_ranks()
    what = f"writing {os.fspath(output)}"
    with contextlib.ExitStack() as stack:
        folder: HubFolder | None = None
        with ranks.failing_together(what):
            max_bytes = parse_size(max_shard_size)
            network, twin = network_and_twin(module, name)
            tokens = find_tokenizer(tokenizer)
            if ranks.rank == 0:
                folder = stack.enter_context(HubFolder(Path(output), overwrite))
        place = Path(ranks.from_first(None if folder is None else str(folder.partial)))
        live = _Live(network, twin, dtype, max_bytes, ranks, what)
        with ranks.failing_together(what):
            if folder is not None:
                folder.check_space(live.plan.nbytes)
                write_configs(place, twin, live.plan.dtype)
                copy_tokenizer(place, tokens)
        live.write(place)
        with ranks.failing_together(what):
            if folder is not None:
                live.check_files(place)
                write_index(place, live.parts, sum(parameter.numel() for parameter in twin.parameters()))
                folder.finish()


def check_can_be_saved(
    module: nn.Module, *, name: str | None = None, dtype: torch.dtype | None = None, max_shard_size: int | str = "5GB"
) -> None:
    """Do all of :func:`save_pretrained` that can fail but for reading and writing weights. Collective.

    Raises:
        NotImplementedError: If the model is adapted by PEFT, or Transformers cannot convert it in pieces.
        ValueError: If an option has a value that is not allowed, or the module does not hold one such model.
    """
    ranks = all_ranks()
    what = "HubCheckpoint"
    with ranks.failing_together(what):
        network, twin = network_and_twin(module, name)
    live = _Live(network, twin, dtype, parse_size(max_shard_size), ranks, what)
    with ranks.failing_together(what), tempfile.TemporaryDirectory() as folder:
        write_configs(Path(folder), twin, live.plan.dtype)


def network_and_twin(module: nn.Module, name: str | None = None) -> tuple[Any, Any]:
    """Find the one model of Transformers in a module, and build one like it on the meta device. No communication.

    Raises:
        NotImplementedError: If it is adapted by PEFT.
        ValueError: If there is not exactly one.
    """
    found = find_network(module, name)
    check_no_adapters((key for key, _ in found.model.named_parameters()), found.name or type(module).__name__)
    return found.model, meta_twin(found.model)


def all_ranks() -> Ranks:
    """The ranks of the default process group, or this process alone."""
    if not (dist.is_available() and dist.is_initialized()):
        return Ranks()
    return Ranks(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)


@dataclass(frozen=True)
class _Rows:
    """Rows of stacked experts that a rank holds.

    Attributes:
        first: The first of them.
        count: How many.
        writes: Whether the rank is the one that writes them, and not a replica.
    """

    first: int
    count: int
    writes: bool


@dataclass(frozen=True)
class _Task:
    """What becomes of a group of tensors.

    Attributes:
        group: The group.
        holders: The ranks that hold its tensors, ``None`` for all.
        rows: What each rank has, where every rank writes its own.
    """

    group: Group
    holders: tuple[int, ...] | None = None
    rows: tuple[_Rows, ...] = ()


class _Live:
    """The tensors of a network that is spread over ranks, and who writes them. Collective, as are all methods."""

    def __init__(
        self, network: nn.Module, twin: Any, dtype: torch.dtype | None, max_bytes: int, ranks: Ranks, what: str
    ) -> None:
        self.ranks = ranks
        self._what = what
        reshard(network)
        self._state = {key: value for key, value in network.state_dict().items() if isinstance(value, Tensor)}
        listing = {key: (tuple(value.shape), value.dtype) for key, value in self._state.items()}
        everyone = self._listings(listing)
        together = {key: facts for of_rank in everyone for key, facts in of_rank.items()}
        with ranks.failing_together(what):
            wrong = differences(twin, {key: shape for key, (shape, _) in together.items()})
            if wrong:
                raise ValueError(
                    f"{type(twin).__name__} is not what its configuration says, so that it could not be loaded:"
                    f" {'; '.join(wrong)}"
                )
            self.plan = HubPlan(twin, {key: stored for key, (_, stored) in together.items()}, dtype)
        self._tasks = self._divide_work(everyone, max_bytes)
        self.parts = self._files(max_bytes)

    def _listings(self, listing: dict[str, Any]) -> list[dict[str, Any]]:
        """What each rank holds; mostly all the same, which is found out by a number."""
        numbers = self.ranks.gather(zlib.crc32(repr(listing).encode()))
        if len(set(numbers)) == 1:
            return [listing]
        return self.ranks.gather(listing)

    def _divide_work(self, everyone: Sequence[dict[str, Any]], max_bytes: int) -> list[_Task]:
        small = self.plan.nbytes <= max_bytes
        own = {group.keys[0]: _rows(self._state.get(group.keys[0])) for group in self.plan.groups if group.rows}
        everyones_rows = self.ranks.gather({} if small else {key: rows for key, rows in own.items() if rows})
        tasks = []
        with self.ranks.failing_together(self._what):
            for group in self.plan.groups:
                rows = tuple(of_rank.get(group.keys[0]) for of_rank in everyones_rows)
                if group.rows and all(rows) and _are_all(rows, group.rows):
                    tasks.append(_Task(group, rows=rows))
                else:
                    tasks.append(_Task(group, _holders(group, everyone)))
        return tasks

    def _files(self, max_bytes: int) -> list[Part]:
        """Who writes which file: those of gathered tensors in turn, each rank's own by itself."""
        shared: list[Entry] = []
        own: dict[int, list[Entry]] = {}
        for task in self._tasks:
            if task.holders is not None:
                own.setdefault(min(task.holders), []).extend(task.group.entries)
            elif not task.rows:
                shared += task.group.entries
            for rank, rows in enumerate(task.rows):
                if rows.writes and rows.count:
                    own.setdefault(rank, []).extend(task.group.entries_of(rows.first, rows.count))
        parts = [
            Part(part.entries, number % self.ranks.world_size) for number, part in enumerate(divide(shared, max_bytes))
        ]
        return parts + [part for rank in sorted(own) for part in divide(own[rank], max_bytes, rank)]

    def write(self, folder: Path) -> None:
        """Write the files of all ranks.

        Raises:
            OSError: On every rank, if one of them cannot write.
        """
        with self.ranks.failing_together(self._what):
            _wait_for(folder)
        files = Files(folder, self.parts, self.ranks.rank)
        # A rank that cannot write goes on taking part, so that the others do not wait for it.
        failed: Exception | None = None
        try:
            for task in self._tasks:
                first, tensors = self._tensors(task)
                mine = bool(tensors) and (bool(task.rows) or any(e.name in files for e in task.group.entries))
                if failed is None and mine:
                    try:
                        self._write_one(files, task.group, tensors, first)
                    except Exception as error:
                        failed = error
                del tensors
            with self.ranks.failing_together(self._what):
                if failed is not None:
                    raise failed
                files.close()
        finally:
            files.abandon()

    def _tensors(self, task: _Task) -> tuple[int, dict[str, Tensor]]:
        """This rank's rows of a task with the number of the first, or the whole tensors where it gets them."""
        if task.rows:
            rows = task.rows[self.ranks.rank]
            (key,) = task.group.keys
            local = self._state[key].to_local()  # type: ignore[attr-defined]
            return rows.first, {key: local} if rows.writes and rows.count else {}
        if task.holders is not None and self.ranks.rank not in task.holders:
            return 0, {}
        return 0, {key: _whole(self._state[key]) for key in task.group.keys}

    def _write_one(self, files: Files, group: Group, tensors: dict[str, Tensor], first: int) -> None:
        for name, tensor in self.plan.convert(group, tensors, first):
            if name in files:
                files.write(name, tensor)

    def check_files(self, folder: Path) -> None:
        """Check on rank 0 that it sees the files of all ranks. No communication.

        Raises:
            FileNotFoundError: If it does not.
        """
        lost = [name for name in file_names(len(self.parts)) if not (folder / name).is_file()]
        if lost:
            raise FileNotFoundError(
                f"{folder} lacks {listed(lost)}, which other ranks wrote: give a folder on a file system that all ranks"
                " share"
            )


def _wait_for(folder: Path) -> None:
    if not wait_for_folder(folder):
        raise FileNotFoundError(
            f"{folder}, which rank 0 has made, is not there for this rank: give a folder on a file system that all"
            " ranks share"
        )


def _whole(tensor: Tensor) -> Tensor:
    return cast(Any, tensor.detach()).full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def _rows(tensor: Tensor | None) -> _Rows | None:
    """The whole rows of dimension 0 that this rank has of a sharded tensor, ``None`` where it has other parts."""
    if not isinstance(tensor, DTensor) or not any(placement.is_shard() for placement in tensor.placements):
        return None
    chunks = tensor.__create_chunk_list__()
    local = tensor.to_local()
    if not local.numel() or not chunks:
        return _Rows(0, 0, False)
    offsets, sizes = chunks[0].offsets, chunks[0].sizes
    if len(chunks) > 1 or any(offsets[1:]) or tuple(sizes[1:]) != tuple(tensor.shape[1:]):
        return None
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    replica = any(at for at, placement in zip(coordinate, tensor.placements, strict=True) if placement.is_replicate())
    return _Rows(int(offsets[0]), int(sizes[0]), not replica)


def _are_all(rows: Sequence[_Rows | None], count: int) -> bool:
    """Whether what the ranks write is every row once."""
    spans = sorted((own.first, own.first + own.count) for own in rows if own is not None and own.writes and own.count)
    ends = [0, *(end for _, end in spans)]
    return [start for start, _ in spans] == ends[:-1] and ends[-1] == count


def _holders(group: Group, everyone: Sequence[dict[str, Any]]) -> tuple[int, ...] | None:
    """The ranks that hold the tensors of a group, ``None`` for all.

    Raises:
        NotImplementedError: If no rank holds all of them.
    """
    if len(everyone) == 1:
        return None
    of_key = [tuple(rank for rank, listing in enumerate(everyone) if key in listing) for key in group.keys]
    if len(set(of_key)) > 1:
        raise NotImplementedError(
            f"{listed(list(group.keys))} lie on different ranks, and the Hugging Face format has them in one tensor;"
            " save a distributed checkpoint, and run `lightning-moe export` on that"
        )
    return None if len(of_key[0]) == len(everyone) else of_key[0]
