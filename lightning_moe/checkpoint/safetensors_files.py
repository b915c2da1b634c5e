"""What the safetensors files of a folder hold, and any part of a tensor in them without the rest.

A file is eight bytes with the length of a JSON header, the header, and the bytes of the tensors. Only headers are read
until a part of a tensor is asked for, and then only the bytes of that part: neither the page cache nor the memory of
this process sees the rest of the file.
"""

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.bin.index.json")

Window = tuple[tuple[int, int], ...]
"""Start and end of a part of a tensor, for each dimension."""

_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F4": "float4_e2m1fn_x2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "C64": "complex64",
}
_LONGEST_HEADER = 100_000_000
# Bytes that are copied at once where they cannot be read into their place, and below which whole rows are read rather
# than parts of them: a disk or a network file system delivers no less.
_PIECE, _SHORTEST_RUN = 1 << 24, 1 << 14


def whole_window(shape: Sequence[int]) -> Window:
    """The window that leaves nothing out."""
    return tuple((0, size) for size in shape)


def window_shape(window: Window) -> tuple[int, ...]:
    """The shape of what a window shows."""
    return tuple(stop - start for start, stop in window)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file.

    Attributes:
        name: Its name there.
        file: The file.
        dtype: Its dtype.
        shape: Its shape.
        start: Where its bytes start in the file.
        version: Size of the file in bytes and its time of change in nanoseconds, when the header was read.
    """

    name: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    version: tuple[int, int]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class StoredFolder:
    """The tensors in the safetensors files of a folder.

    Attributes:
        path: The folder.
        files: The files.
        tensors: The tensors by their name.
    """

    path: Path
    files: tuple[Path, ...]
    tensors: Mapping[str, StoredTensor]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @classmethod
    def open(cls, folder: str | Path) -> "StoredFolder":
        """Read the headers of a folder's files.

        Args:
            folder: A folder with ``model.safetensors``, or with ``model.safetensors.index.json`` and the files that it
                names.

        Raises:
            FileNotFoundError: If the folder, or a file that the index names, does not exist.
            ValueError: If there are no such files, or one of them is damaged; the message names the file and, where it
                is one tensor that is not whole, the tensor.
        """
        path = Path(folder)
        if not path.is_dir():
            what = "is a file, not a folder" if path.exists() else "does not exist"
            raise FileNotFoundError(
                f"{path} {what}; name a folder with safetensors files. Nothing is downloaded here: for a model of the"
                " Hugging Face hub run `hf download ORGANISATION/MODEL --local-dir FOLDER` first"
            )
        files, where = _files(path)
        tensors: dict[str, StoredTensor] = {}
        for file in files:
            for name, tensor in _header(file).items():
                if name in tensors and where.get(name) not in (file, tensors[name].file):
                    raise ValueError(f"{name!r} is in {tensors[name].file} and in {file}; remove one of the files")
                if name not in tensors or where.get(name) == file:
                    tensors[name] = tensor
        lost = [name for name in where if name not in tensors]
        if lost:
            raise ValueError(
                f"{path / INDEX} says that {where[lost[0]].name} holds {_some(lost)}, which it does not; the files"
                " belong to different saves, or the download was cut short"
            )
        return cls(path, tuple(files), tensors)


def _files(path: Path) -> tuple[list[Path], dict[str, Path]]:
    """The files with weights, and for each tensor that an index lists the file that it names."""
    if (path / SINGLE).is_file():
        return [path / SINGLE], {}
    indices = sorted(path.glob("*.safetensors.index.json"))
    index = path / INDEX if (path / INDEX) in indices else (indices[0] if len(indices) == 1 else None)
    if index is not None:
        where = {name: path / file for name, file in weight_map(index).items()}
        files = sorted(set(where.values()))
        absent = [file.name for file in files if not file.is_file()]
        if absent:
            raise FileNotFoundError(
                f"{path} lacks {len(absent)} of the {len(files)} files that {index.name} names, for example"
                f" {absent[0]}; was the download cut short?"
            )
        return files, where
    loose = sorted(path.glob("*.safetensors"))
    if len(loose) == 1:
        return loose, {}
    if loose:
        raise ValueError(
            f"{path} holds {len(loose)} safetensors files ({_some([file.name for file in loose])}) and no {INDEX} that"
            " says which belong together"
        )
    pickled = sorted(file.name for pattern in PICKLED for file in path.glob(pattern))
    if pickled:
        raise ValueError(
            f"{path} holds weights only as {_some(pickled)}, which are pickles: every rank would have to read all of"
            " them, and unpickling runs code that is in them. Convert them once, in one process:"
            f" AutoModelForCausalLM.from_pretrained({str(path)!r}).save_pretrained(NEW_FOLDER)"
        )
    raise ValueError(f"{path} holds no safetensors files ({SINGLE}, or {INDEX} with the files that it names)")


def weight_map(index: Path) -> dict[str, str]:
    """Read which file each tensor lies in.

    Args:
        index: A ``*.safetensors.index.json``.

    Raises:
        ValueError: If it is none; the message names it.
    """
    try:
        found = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{index} is no index of safetensors files: {type(error).__name__}: {error}") from error
    odd = not isinstance(found, dict) or any(
        not isinstance(file, str) or Path(file).name != file or file in ("", "..") for file in found.values()
    )
    if odd or not found:
        raise ValueError(f"{index}: weight_map must map names of tensors to names of files in its folder")
    return found


def _header(file: Path) -> dict[str, StoredTensor]:
    with file.open("rb") as stream:
        version = _version(stream)
        size, _ = version
        start = stream.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > min(size - 8, _LONGEST_HEADER):
            hint = "it is empty" if not size else "it was cut short, or is something else"
            if start == b"version ":
                hint = "it is a pointer of Git LFS: run `git lfs pull` in its folder"
            raise ValueError(f"{file} is no whole safetensors file: {hint}")
        text = stream.read(length)
    try:
        entries = json.loads(text, object_pairs_hook=_without_repetition)
        entries.pop("__metadata__", None)
        tensors = {name: _entry(name, file, entry, 8 + length, version) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise ValueError(f"{file} has a damaged header: {type(error).__name__}: {error}") from error
    for tensor in tensors.values():
        if tensor.start + tensor.nbytes > size:
            raise ValueError(
                f"{file} is cut short: {tensor.name!r} ends at byte {tensor.start + tensor.nbytes}, the file at byte"
                f" {size}; download or copy it again"
            )
    position = 8 + length
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.start, tensor.nbytes)):
        if tensor.start != position:
            raise ValueError(
                f"{file} has a damaged header: {tensor.name!r} begins at byte {tensor.start}, where byte {position} is"
                " due"
            )
        position += tensor.nbytes
    if position != size:
        raise ValueError(
            f"{file} has a damaged header: its tensors end at byte {position}, and the file at byte {size}"
        )
    return tensors


def _version(stream: Any) -> tuple[int, int]:
    found = os.fstat(stream.fileno())
    return found.st_size, found.st_mtime_ns


def _without_repetition(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _entry(name: str, file: Path, entry: Mapping[str, Any], offset: int, version: tuple[int, int]) -> StoredTensor:
    numbers = [*entry["shape"], *entry["data_offsets"]]
    if any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError(f"{name!r}: shape and data_offsets must be whole numbers from 0 up")
    known = _DTYPES.get(entry["dtype"])
    dtype = getattr(torch, known, None) if known else None
    if dtype is None:
        raise ValueError(f"{name!r} has the dtype {entry['dtype']}, which PyTorch {torch.__version__} does not know")
    start, stop = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if known == "float4_e2m1fn_x2":  # two values a byte, which PyTorch counts as one
        shape = (*shape[:-1], shape[-1] // 2)
    tensor = StoredTensor(name, file, dtype, shape, offset + start, version)
    if stop - start != tensor.nbytes:
        raise ValueError(f"{name!r} of shape {list(tensor.shape)} and {entry['dtype']} cannot be {stop - start} bytes")
    return tensor


class Reader:
    """Reads parts of tensors, and counts the bytes. A context manager: files stay open inside.

    Attributes:
        bytes_read: Bytes read from files until now, headers not counted.
    """

    def __init__(self) -> None:
        self.bytes_read = 0
        self._streams: dict[Path, FileIO] = {}

    def __enter__(self) -> "Reader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()

    def read(self, tensor: StoredTensor, window: Window, out: Tensor) -> None:
        """Read a part of a tensor.

        Args:
            tensor: The tensor.
            window: The part.
            out: Where it goes: a tensor of the window's shape, of any dtype, layout and device.

        Raises:
            OSError: If the file cannot be read any more; the message names it and the tensor.
        """
        if out.numel() == 0:
            return
        direct = out.device.type == "cpu" and out.is_contiguous() and out.dtype == tensor.dtype
        widened = _widened(tensor, window)
        if direct and widened is window:
            self._fill(tensor, window, out)
            return
        more = math.prod(window_shape(widened)) // out.numel()
        in_pieces(window, out, _PIECE // tensor.dtype.itemsize // more, partial(self._through, tensor))

    def _through(self, tensor: StoredTensor, window: Window, out: Tensor) -> None:
        """Read a small part, and copy it to where it goes."""
        read = _widened(tensor, window)
        piece = torch.empty(window_shape(read), dtype=tensor.dtype)
        self._fill(tensor, read, piece)
        for dim, ((start, stop), (first, _)) in enumerate(zip(window, read, strict=True)):
            piece = piece.narrow(dim, start - first, stop - start)
        out.copy_(piece)

    def _fill(self, tensor: StoredTensor, window: Window, out: Tensor) -> None:
        size = tensor.dtype.itemsize
        run, _ = _run(tensor.shape, window)
        memory = out.detach().as_strided((out.numel(),), (1,)).view(torch.uint8).numpy().data
        for number, first in enumerate(_firsts(tensor.shape, window)):
            self._into(tensor, tensor.start + first * size, memory[number * run * size : (number + 1) * run * size])

    def _into(self, tensor: StoredTensor, position: int, memory: memoryview) -> None:
        stream = self._streams.get(tensor.file)
        if stream is None:
            stream = self._streams[tensor.file] = FileIO(tensor.file)
            if _version(stream) != tensor.version:
                raise OSError(
                    f"{tensor.file} was replaced or changed after its header was read; start again when it is whole"
                )
        stream.seek(position)
        done = 0
        while done < len(memory):
            read = stream.readinto(memory[done:])
            if not read:
                raise OSError(f"{tensor.file} ends within {tensor.name!r}: it was changed while it was read")
            done += read
        self.bytes_read += done


def _widened(tensor: StoredTensor, window: Window) -> Window:
    """The window itself, or where its bytes lie in runs too short to be worth a call each, one with longer runs."""
    run, last = _run(tensor.shape, window)
    runs = math.prod(window_shape(window)) // max(run, 1)
    if runs <= 1 or run * tensor.dtype.itemsize >= _SHORTEST_RUN:
        return window
    return (*window[:last], (0, tensor.shape[last]), *window[last + 1 :])


def _run(shape: Sequence[int], window: Window) -> tuple[int, int]:
    """Elements of a window that lie together, and the last dimension in which it leaves something out (-1: none)."""
    run = 1
    for dim in reversed(range(len(shape))):
        start, stop = window[dim]
        run *= stop - start
        if stop - start != shape[dim]:
            return run, dim
    return run, -1


def _firsts(shape: Sequence[int], window: Window) -> list[int]:
    """Position of the first element of each run, in the order of the window."""
    _, last = _run(shape, window)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    firsts = [window[last][0] * strides[last] if last >= 0 else 0]
    for dim in reversed(range(max(last, 0))):
        start, stop = window[dim]
        firsts = [index * strides[dim] + first for index in range(start, stop) for first in firsts]
    return firsts


def in_pieces(window: Window, out: Tensor, elements: int, read: Callable[[Window, Tensor], None]) -> None:
    """Divide a window along its outer dimensions, and call ``read(part, place in out)`` for each part.

    Args:
        window: The window.
        out: Where it goes, of the window's shape.
        elements: The most that a part may have; a single row of the innermost dimension is not divided.
        read: What reads a part.
    """
    shape = window_shape(window)
    dim = next((dim for dim, size in enumerate(shape[:-1]) if size > 1), None)
    if dim is None or out.numel() <= elements:
        read(window, out)
        return
    rows = max(1, elements // math.prod(shape[dim + 1 :]))
    start, stop = window[dim]
    for first in range(start, stop, rows):
        last = min(first + rows, stop)
        part = (*window[:dim], (first, last), *window[dim + 1 :])
        in_pieces(part, out.narrow(dim, first - start, last - first), elements, read)


def _some(names: Sequence[str], most: int = 3) -> str:
    return ", ".join(map(repr, names[:most])) + (f" and {len(names) - most} more" if len(names) > most else "")
