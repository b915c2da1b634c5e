"""Distributed checkpoints: a folder into which every rank writes its shards, and from which any other layout reads.

The files are those of ``torch.distributed.checkpoint``, with Lightning's ``meta.pt`` beside, so that their tools read
them too, and a manifest with a checksum of every part.
"""

import io
import math
import os
import pickle
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from typing_extensions import override

from lightning_moe.checkpoint.compare import check_tensors
from lightning_moe.checkpoint.damage import CheckpointError, Ranks, checksums, listed
from lightning_moe.checkpoint.in_place import Unfinished
from lightning_moe.checkpoint.manifest import MANIFEST, Manifest, Part, TensorInfo, written_by
from lightning_moe.checkpoint.metadata import read_metadata
from lightning_moe.checkpoint.summed_file import SummedFile
from lightning_moe.checkpoint.unpickle import load_safely

METADATA = ".metadata"
META = "meta.pt"


@dataclass(frozen=True)
class Origin:
    """What a folder says of the run that wrote it.

    Args:
        model: Class of the LightningModule.
        layout: Sizes of the layout, by the names of the strategy's options.
    """

    model: str
    layout: dict[str, int]


def write_folder(
    folder: Path, state: dict[str, Any], meta: bytes, origin: Origin, ranks: Ranks, unfinished: Unfinished | None
) -> None:
    """Write a checkpoint into a folder that exists and is empty. Collective.

    Every file is written through to the disk before this returns. What is on an accelerator is copied to the CPU one
    tensor at a time.

    Args:
        folder: Where to.
        state: Nested dictionaries and lists of tensors, sharded or not, and of plain values. A tensor that is on
            several ranks is written by one of them.
        meta: What Lightning keeps beside, as the bytes of ``torch.save``; that of rank 0 is written.
        origin: Who writes it.
        ranks: The ranks that write.
        unfinished: The folder on rank 0, ``None`` elsewhere.

    Raises:
        OSError: On every rank, if one of them cannot write.
    """
    writer = _Writer(folder, meta, origin, unfinished)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(state, storage_writer=writer, process_group=ranks.group, no_dist=ranks.group is None)


class SavedFolder:
    """A checkpoint folder, read as far as its lists of what is in it.

    Args:
        path: The folder.
        ranks: The ranks that read it together; by default this process alone.

    Attributes:
        path: The folder.
        manifest: What it says of itself; ``None`` for one that lightning-moe did not write.
        tensors: Shapes and dtypes by their names in the checkpoint, for example ``model.net.weight`` or
            ``optimizer_0.state.net.weight.exp_avg``.
        metadata: What ``torch.distributed.checkpoint`` says of it.

    Raises:
        CheckpointError: On every rank, if the folder is none of a checkpoint, or is of a newer version, or its lists
            are damaged.
        OSError: On every rank, if it cannot be read.
    """

    def __init__(self, path: str | os.PathLike[str], ranks: Ranks | None = None) -> None:
        self.path = Path(path)
        self.ranks = ranks or Ranks()
        with self.ranks.failing_together(f"reading {self.path}"):
            check_is_folder(self.path)
            self.manifest = Manifest.read(self.path) if (self.path / MANIFEST).exists() else None
            if self.manifest is not None:
                _check_files(self.path, self.manifest)
                _check_parts(self.path, METADATA, self.manifest.files[METADATA])
            self.metadata = read_metadata(self.path / METADATA)
            self.tensors = _tensors(self.metadata)
            _check_covered(self.path, self.metadata)

    def verify(self, without: str = "") -> None:
        """Compare every byte with its checksum; each rank reads a part of the files. Collective.

        Args:
            without: Leave out the tensors and values whose names begin with this, which are not going to be read.

        Raises:
            CheckpointError: On every rank, naming the damaged file and tensor.
        """
        with self.ranks.failing_together(f"reading {self.path}"):
            if self.manifest is None:
                _check_lengths(self.path, self.metadata)
                return
            shares = sorted(self.manifest.files.items(), key=lambda item: (_length(item[1]), item[0]), reverse=True)
            for name, parts in shares[self.ranks.rank :: self.ranks.world_size]:
                _check_parts(self.path, name, parts, without)

    def check(self, expected: Mapping[str, Iterable[int]], prefix: str, what: str = "", strict: bool = True) -> None:
        """Compare the names and shapes of tensors with those that are to be loaded. Collective.

        Args:
            expected: Shapes of the whole tensors that this rank has, by name.
            prefix: What their names begin with in the checkpoint, for example ``"model."``.
            what: What they belong to, for messages; default: the model.
            strict: Whether a tensor that only one side has is an error.

        Raises:
            CheckpointError: On every rank, naming the tensors that are missing, unexpected or of another shape.
        """
        found = {
            name.removeprefix(prefix): info.shape for name, info in self.tensors.items() if name.startswith(prefix)
        }
        written = "" if self.manifest is None else f", which {self.manifest.model} wrote"
        check_tensors(f"{self.path}{written}", expected, found, self.ranks, what or "the model", strict)

    def read(self, state: dict[str, Any], strict: bool = True) -> None:
        """Read into the tensors of a nested dictionary, whatever the layout that wrote them. Collective.

        Values that are no tensors are replaced. No pickle is read but with ``weights_only=True``.

        Args:
            state: As it was given to be saved, in the layout of now.
            strict: Whether a value that the checkpoint lacks is an error; else what is there stays.

        Raises:
            CheckpointError: On every rank, if a value is missing.
        """
        group = self.ranks.group
        with self.ranks.failing_together(f"reading {self.path}"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(
                state,
                storage_reader=_Reader(self.path, self.metadata),
                planner=_Planner(self.path, allow_partial_load=not strict),
                process_group=group,
                no_dist=group is None,
            )

    def read_meta(self, weights_only: bool | None = None) -> dict[str, Any]:
        """Read what Lightning keeps beside the tensors: loops, callbacks, hyperparameters.

        Args:
            weights_only: ``False`` to unpickle whatever is there, from a source that you trust.

        Raises:
            CheckpointError: On every rank, if it holds a class that is not allowed.
        """
        meta: dict[str, Any] = {}
        with self.ranks.failing_together(f"reading {self.path / META}"):
            meta.update(load_safely(self.path / META, weights_only))
        return meta


def is_folder(path: Path) -> bool:
    """Whether a path is a folder that a distributed checkpoint was written to."""
    return path.is_dir() and (path / METADATA).is_file()


def check_is_folder(path: Path) -> None:
    """Check that a path holds a distributed checkpoint.

    Raises:
        FileNotFoundError: If nothing is there.
        CheckpointError: If something else is there.
    """
    if not path.exists():
        raise FileNotFoundError(2, "no checkpoint is there", str(path))
    if not path.is_dir():
        raise CheckpointError(f"{path} is no distributed checkpoint: it is no folder")
    present = {entry.name for entry in path.iterdir()}
    if METADATA in present and META in present:
        return
    if MANIFEST in present:
        lost = METADATA if METADATA not in present else META
        raise CheckpointError(f"{path} is damaged: its file {lost} is missing; use another checkpoint")
    if METADATA in present:
        raise CheckpointError(
            f"{path} is a folder of torch.distributed.checkpoint, but not of a Trainer: its file {META} is missing"
        )
    inside = [entry for entry in present if (path / entry / METADATA).exists()]
    hint = f"; did you mean {path / min(inside)}?" if inside else ""
    raise CheckpointError(f"{path} is a folder, but no checkpoint: it holds {listed(present) or 'nothing'}{hint}")


def _tensors(metadata: Metadata) -> dict[str, TensorInfo]:
    return {
        name: TensorInfo(tuple(stored.size), stored.properties.dtype)
        for name, stored in metadata.state_dict_metadata.items()
        if isinstance(stored, TensorStorageMetadata)
    }


# Damage


def _length(parts: list[Part]) -> int:
    return sum(part.length for part in parts)


def _check_files(path: Path, manifest: Manifest) -> None:
    """Check that every file is there with its length."""
    for name, parts in manifest.files.items():
        expected = _length(parts)
        try:
            size = (path / name).stat().st_size
        except FileNotFoundError:
            held = listed({part.name for part in parts})
            raise CheckpointError(
                f"{path} is damaged: its file {name} is missing, with {held}; use another checkpoint"
            ) from None
        if size != expected:
            end = 0
            lost = set()
            for part in parts:
                end += part.length
                if end > size:
                    lost.add(part.name)
            where = f", which cuts off {listed(lost)}" if lost else ""
            raise CheckpointError(
                f"{path / name} is damaged: it has {size} bytes instead of {expected}{where}; use another checkpoint"
            )


def _check_parts(path: Path, name: str, parts: list[Part], without: str = "") -> None:
    skipped = [bool(without) and part.name.startswith(without) for part in parts]
    found = checksums(path / name, [part.length for part in parts], skipped)
    damaged = {part.name for part, checksum in zip(parts, found, strict=True) if checksum not in (None, part.checksum)}
    if damaged:
        raise CheckpointError(
            f"{path / name} is damaged: the bytes of {listed(damaged)} do not fit their checksum; use another"
            " checkpoint"
        )


def _check_covered(path: Path, metadata: Metadata) -> None:
    """Check that every part of every tensor was saved: what is missing would stay as it happens to be in memory."""
    for name, stored in metadata.state_dict_metadata.items():
        if not isinstance(stored, TensorStorageMetadata):
            continue
        parts = {tuple(chunk.offsets): tuple(chunk.sizes) for chunk in stored.chunks}
        if sum(map(math.prod, parts.values())) == math.prod(stored.size):
            continue
        rows = sorted({(offset[0], offset[0] + size[0]) for offset, size in parts.items() if offset})
        there = ", ".join(f"{start} to {end - 1}" for start, end in rows) or "none"
        raise CheckpointError(
            f"{path} is damaged: it lacks a part of {name} {tuple(stored.size)}, whose rows (experts, where they are"
            f" stacked) are there from {there}; use another checkpoint"
        )


def _check_lengths(path: Path, metadata: Metadata) -> None:
    """What can be checked where there are no checksums: that no file is missing or cut off."""
    names = {stored.relative_path for stored in metadata.storage_data.values()}
    sizes = {name: (path / name).stat().st_size if (path / name).exists() else None for name in names}
    lost: dict[str, set[str]] = {}
    for index, stored in metadata.storage_data.items():
        if stored.offset + stored.length > (sizes[stored.relative_path] or 0):
            lost.setdefault(stored.relative_path, set()).add(index.fqn)
    for name, held in sorted(lost.items()):
        state = "is missing" if sizes[name] is None else "is cut off"
        raise CheckpointError(f"{path / name} {state}, with {listed(held)}; use another checkpoint")


# Writing


@dataclass(frozen=True)
class _Written(WriteResult):
    """What was written, with its checksum; on its way to rank 0."""

    checksum: int


class _Writer(dcp.FileSystemWriter):
    """Writes the files of ``torch.distributed.checkpoint`` with checksums, and all that stands beside them.

    That package's own writer calls fsync before it flushes, so that the end of a file may still be lost.
    """

    def __init__(self, path: Path, meta: bytes, origin: Origin, unfinished: Unfinished | None) -> None:
        super().__init__(path)
        self._meta, self._origin, self._unfinished = meta, origin, unfinished

    @override
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results: list[WriteResult] = []
        if plan.items:
            name = f"{cast(Any, plan.storage_data).prefix}0.distcp"
            with SummedFile(Path(self.path) / name) as file:
                start = 0
                for item in plan.items:
                    data = planner.resolve_data(item)
                    if item.type == WriteItemType.BYTE_IO:
                        file.write(cast(io.BytesIO, data).getbuffer())
                    else:
                        torch.save(_alone_on_cpu(cast(Tensor, data)), cast(IO[bytes], file))
                    length, checksum = file.end_part()
                    results.append(_Written(item.index, length, _StorageInfo(name, start, length), checksum))
                    start += length
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    @override
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        assert self._unfinished is not None
        files: dict[str, list[Part]] = {}
        metadata.version = CURRENT_DCP_VERSION
        metadata.storage_meta = StorageMeta(save_id=self.save_id)  # without the path of now, which is another soon
        metadata.storage_data = {}
        for result in (result for of_rank in results for result in of_rank):
            metadata.storage_data[result.index] = result.storage_data
            parts = files.setdefault(result.storage_data.relative_path, [])
            parts.append(Part(result.index.fqn, result.size_in_bytes, cast(_Written, result).checksum))
        for name, content in ((META, self._meta), (METADATA, pickle.dumps(metadata))):
            with SummedFile(Path(self.path) / name) as file:
                file.write(content)
                files[name] = [Part(name, *file.end_part())]
        manifest = Manifest(self._origin.model, self._origin.layout, _tensors(metadata), files, written_by())
        self._unfinished.finish(manifest.dump())


def _alone_on_cpu(tensor: Tensor) -> Tensor:
    """A tensor on the CPU, and not as a view: the whole storage would be written."""
    tensor = tensor.detach().cpu()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


# Reading


class _Reader(dcp.FileSystemReader):
    """Reads with a metadata file that was unpickled safely already."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        super().__init__(path)
        self._read = metadata

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._read

    @override
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        # The files are read from the start on, whatever the order of the tensors.
        items = sorted(plan.items, key=lambda item: self.storage_data[item.storage_index].offset)
        return super().read_data(LoadPlan(items, plan.storage_data, plan.planner_data), planner)


class _Planner(dcp.DefaultLoadPlanner):
    """Names what is missing, and unpickles values with ``weights_only=True``."""

    def __init__(self, path: Path, allow_partial_load: bool) -> None:
        super().__init__(allow_partial_load=allow_partial_load)
        self._path = path

    @override
    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        stored = self.metadata.state_dict_metadata
        missing = {name for name in self.state_dict if name not in stored}
        if missing and not self.allow_partial_load:
            raise CheckpointError(f"{self._path} lacks {listed(missing)}; use a checkpoint of this model")
        return super().create_local_plan()

    @override
    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        from torch.distributed.checkpoint._nested_dict import set_element

        name = read_item.dest_index.fqn
        loaded = load_safely(value, weights_only=True, what=f"{name} in {self._path}")
        set_element(self.original_state_dict, self.mappings[name], loaded)
