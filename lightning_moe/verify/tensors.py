"""Named tensors in a file each rank appends to, and that is read without loading it whole."""

import json
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import torch
from torch import Tensor

from lightning_moe.verify.plan import write_json

_ALIGNMENT = 16  # bytes; a view in another dtype must begin at a multiple of its size


class TensorWriter:
    """Writes tensors one by one, so that no more than one has to be in memory.

    Args:
        folder: Where the file goes.
        kind: What the tensors are; names the file.
        rank: The rank that writes; names the file too.
    """

    def __init__(self, folder: Path, kind: str, rank: int) -> None:
        self._path = folder / f"{kind}-{rank}"
        self._file: BinaryIO = self._path.with_suffix(".bin").open("wb")
        self._index: dict[str, tuple[str, list[int], int]] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Append a tensor of any shape, dtype and device."""
        data = tensor.detach().cpu().contiguous().reshape(-1)
        self._file.write(b"\0" * (-self._file.tell() % _ALIGNMENT))
        self._index[name] = (str(data.dtype).removeprefix("torch."), list(tensor.shape), self._file.tell())
        if data.numel():
            self._file.write(data.view(torch.uint8).numpy().data)

    def close(self) -> None:
        """Finish the file; it cannot be read before."""
        self._file.close()
        write_json(self._path.with_suffix(".json"), self._index)

    def __enter__(self) -> "TensorWriter":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class Tensors:
    """The tensors of one kind that the ranks of a run have written.

    Args:
        folder: That of the run.
        kind: What they are.
    """

    def __init__(self, folder: Path, kind: str) -> None:
        self._places: dict[str, tuple[Tensor | None, str, list[int], int]] = {}
        for index in sorted(folder.glob(f"{kind}-*.json")):
            file = index.with_suffix(".bin")
            size = file.stat().st_size
            content = torch.from_file(str(file), size=size, dtype=torch.uint8) if size else None
            for name, (dtype, shape, offset) in json.loads(index.read_text()).items():
                self._places.setdefault(name, (content, dtype, shape, offset))

    def names(self) -> list[str]:
        """Their names, in the order of writing."""
        return list(self._places)

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def __getitem__(self, name: str) -> Tensor:
        content, dtype_name, shape, offset = self._places[name]
        dtype = getattr(torch, dtype_name)
        count = torch.Size(shape).numel()
        if content is None or not count:
            return torch.empty(shape, dtype=dtype)
        return content[offset : offset + count * dtype.itemsize].view(dtype).view(shape)
