"""The weights in a checkpoint of Lightning, read one tensor at a time: a folder that all ranks wrote, or one file."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from typing_extensions import override

from lightning_moe.checkpoint.damage import CheckpointError, Ranks, checksum_of
from lightning_moe.checkpoint.folder import SavedFolder
from lightning_moe.checkpoint.manifest import Part, TensorInfo
from lightning_moe.checkpoint.single_file import read_file

# This package's name for the weights, and that of Lightning's ModelParallelStrategy.
_WEIGHTS = ("model", "state_dict")
_BLOCK = 16 << 20


class StoredWeights(ABC):
    """The weights of a LightningModule in a checkpoint.

    Attributes:
        path: The checkpoint.
        tensors: What it holds, by the names of the LightningModule's state dict.
        meta: What else Lightning put there: ``hyper_parameters`` and the like.
    """

    path: Path
    tensors: dict[str, TensorInfo]
    meta: Mapping[str, Any]

    @abstractmethod
    def read(self, name: str) -> Tensor:
        """Read a whole tensor into the memory of the host, and compare its bytes with their checksum if there is one.

        Raises:
            CheckpointError: If they do not fit.
        """


def open_checkpoint(path: Path) -> StoredWeights:
    """Open a checkpoint of Lightning. Tensors are read later, nothing is unpickled but plain values.

    Args:
        path: A folder that a distributed save wrote, or a file.

    Raises:
        FileNotFoundError: If there is nothing of that name.
        CheckpointError: If it is no checkpoint, is damaged, or holds objects that only unpickling could restore.
    """
    return _File(path) if path.is_file() else _Folder(path)


class _Folder(StoredWeights):
    def __init__(self, path: Path) -> None:
        self.path = path
        self._folder = SavedFolder(path)
        if self._folder.manifest is None:
            self._folder.verify()  # without checksums it is whether every file has its length, and is soon done
        self._keys = _weights(self._folder.metadata)
        if not self._keys:
            raise CheckpointError(f"{path} holds no weights of a LightningModule; was it written by a Trainer?")
        self.tensors = {name: self._folder.tensors[key] for name, key in self._keys.items()}
        self.meta = self._folder.read_meta()
        self._parts: dict[str, list[tuple[Path, int, Part]]] = {}
        for file, parts in ({} if self._folder.manifest is None else self._folder.manifest.files).items():
            start = 0
            for part in parts:
                self._parts.setdefault(part.name, []).append((path / file, start, part))
                start += part.length

    @override
    def read(self, name: str) -> Tensor:
        key, info = self._keys[name], self.tensors[name]
        for file, start, part in self._parts.get(key, ()):
            if _checksum(file, start, part.length) != part.checksum:
                raise CheckpointError(
                    f"{file} is damaged: the bytes of {name} do not fit their checksum; use another checkpoint"
                )
        target = torch.empty(info.shape, dtype=info.dtype)
        self._folder.read({key: target})
        return target


def _weights(metadata: Metadata) -> dict[str, str]:
    """The names of the folder's weights, by those of the LightningModule."""
    paths = metadata.planner_data or {}
    keys: dict[str, dict[str, str]] = {}
    for key, stored in metadata.state_dict_metadata.items():
        first, *rest = paths.get(key, (key,))
        if len(rest) == 1 and isinstance(stored, TensorStorageMetadata):
            keys.setdefault(first, {})[rest[0]] = key
    return next((keys[first] for first in _WEIGHTS if first in keys), {})


def _checksum(file: Path, start: int, length: int) -> int:
    value = 0
    with file.open("rb") as opened:
        opened.seek(start)
        while length > 0 and (block := opened.read(min(length, _BLOCK))):
            value = checksum_of(block, value)
            length -= len(block)
    return value


class _File(StoredWeights):
    def __init__(self, path: Path) -> None:
        self.path = path
        content = read_file(path, Ranks())
        weights = content.get("state_dict")
        if not isinstance(weights, Mapping) or not weights:
            raise CheckpointError(f"{path} is no checkpoint of Lightning: it has no state_dict")
        self._weights = dict(_tensors(weights.items()))
        self.tensors = {name: TensorInfo(tuple(t.shape), t.dtype) for name, t in self._weights.items()}
        self.meta = {key: value for key, value in content.items() if key != "state_dict"}

    @override
    def read(self, name: str) -> Tensor:
        return self._weights[name]


def _tensors(items: Iterable[tuple[str, Any]]) -> Iterable[tuple[str, Tensor]]:
    return ((name, value) for name, value in items if isinstance(value, Tensor))
