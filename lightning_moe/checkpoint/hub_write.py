"""A folder in the format of the Hugging Face hub, written tensor by tensor, and there only once it is whole.

A safetensors file is a header with the place of each tensor, then the tensors. The header follows from shapes alone, so
that it is written first, and each tensor goes to its place when it comes.
"""

import contextlib
import copy
import errno
import json
import os
import re
import shutil
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from lightning_moe.checkpoint.damage import listed
from lightning_moe.checkpoint.hub_plan import Entry
from lightning_moe.files import remove_path, replace_path, sync_folder
from lightning_moe.optional import require

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
CONFIG, GENERATION = "config.json", "generation_config.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "chat_template.jinja",
    "chat_template.json",
)
_TEMPLATES = "additional_chat_templates"
_OURS = re.compile(rf"model(-\d+-of-\d+)?\.safetensors|{re.escape(INDEX)}|\.gitattributes")

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_ALIGNMENT = 8


def parse_size(size: int | str, option: str = "max_shard_size") -> int:
    """Turn a size such as ``"5GB"`` (5e9 bytes) or ``"500MiB"`` into bytes.

    Args:
        size: A number of bytes, or a number with one of the units KB, MB, GB, TB, KiB, MiB and GiB.
        option: The option that it was given to, for the message.

    Raises:
        ValueError: If it is not a positive size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", str(size).strip())
    unit = None if match is None else _UNITS.get(match[2].upper())
    nbytes = 0 if match is None or unit is None else int(float(match[1]) * unit)
    if isinstance(size, bool) or nbytes < 1:
        raise ValueError(
            f"{option}={size!r} must be a positive size in bytes, or with a unit, such as '5GB' or '500MiB'"
        )
    return nbytes


def size_of(nbytes: int) -> str:
    """Say a number of bytes with three digits and a unit, for example ``"1.23 GB"``."""
    for unit in ("B", "KB", "MB", "GB"):
        if nbytes < 999.5 * _UNITS[unit]:
            return f"{nbytes / _UNITS[unit]:.3g} {unit}"
    return f"{nbytes / _UNITS['TB']:.3g} TB"


class SafetensorsFile:
    """A file that tensors are written to in any order.

    Args:
        path: Where it is written.
        entries: Every tensor that it will hold.

    Raises:
        OSError: If it cannot be created.
        ValueError: If a tensor has a dtype that the format does not know.
    """

    def __init__(self, path: Path, entries: Sequence[Entry]) -> None:
        # The largest items first, so that every tensor begins at a multiple of its item size.
        ordered = sorted(entries, key=lambda entry: -entry.dtype.itemsize)
        self._missing: dict[str, tuple[Entry, int]] = {}
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for entry in ordered:
            if entry.dtype not in _DTYPES:
                raise ValueError(f"{entry.name}: safetensors files cannot hold {entry.dtype}")
            header[entry.name] = {
                "dtype": _DTYPES[entry.dtype],
                "shape": list(entry.shape),
                "data_offsets": [end, end + entry.nbytes],
            }
            self._missing[entry.name] = (entry, end)
            end += entry.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        self.size = 8 + len(text) + end
        self._start = 8 + len(text)
        self._file = path.open("xb")
        try:
            self._file.write(struct.pack("<Q", len(text)) + text)
        except BaseException:
            self._file.close()
            raise

    def write(self, name: str, tensor: Tensor) -> None:
        """Write one of the tensors, from any device.

        Raises:
            OSError: If it cannot be written.
            ValueError: If the file has no place for it, or one of another shape or dtype.
        """
        entry, offset = self._missing.pop(name)
        if (tuple(tensor.shape), tensor.dtype) != (entry.shape, entry.dtype):
            raise ValueError(
                f"{name} is {list(tensor.shape)} {tensor.dtype}, its place is for {list(entry.shape)} {entry.dtype}"
            )
        if entry.nbytes:
            self._file.seek(self._start + offset)
            data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
            self._file.write(data)

    def close(self) -> None:
        """Make sure that the file is on the disk.

        Raises:
            RuntimeError: If a tensor was not written.
        """
        try:
            if self._missing:
                raise RuntimeError(f"{self._file.name} lacks {listed(list(self._missing))}")
            self._file.flush()
            os.fsync(self._file.fileno())
        finally:
            self._file.close()

    def abandon(self) -> None:
        """Close the file as it is."""
        with contextlib.suppress(OSError):
            self._file.close()


@dataclass(frozen=True)
class Part:
    """One of the files of a folder.

    Attributes:
        entries: The tensors that it holds.
        rank: The rank that writes it.
    """

    entries: tuple[Entry, ...]
    rank: int = 0


def divide(entries: Iterable[Entry], max_bytes: int, rank: int = 0) -> list[Part]:
    """Divide tensors into files, in their order.

    Args:
        entries: The tensors.
        max_bytes: The most bytes of tensors in a file; a larger tensor has one for itself.
        rank: The rank that writes the files.
    """
    files: list[list[Entry]] = []
    size = 0
    for entry in entries:
        if not files or size + entry.nbytes > max_bytes:
            files.append([])
            size = 0
        files[-1].append(entry)
        size += entry.nbytes
    return [Part(tuple(file), rank) for file in files]


def file_names(count: int) -> list[str]:
    """The names of the files of a folder."""
    if count == 1:
        return [WEIGHTS]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


class Files:
    """The files of one rank, open until all their tensors are written.

    Args:
        folder: Where they lie.
        parts: All files of the folder.
        rank: Those with this rank are written.
    """

    def __init__(self, folder: Path, parts: Sequence[Part], rank: int = 0) -> None:
        self._open: dict[str, SafetensorsFile] = {}
        self._left: dict[int, int] = {}
        self._folder = folder
        self._parts = {
            entry.name: (name, part)
            for name, part in zip(file_names(len(parts)), parts, strict=True)
            if part.rank == rank
            for entry in part.entries
        }

    def __contains__(self, name: object) -> bool:
        return name in self._parts

    def write(self, name: str, tensor: Tensor) -> None:
        """Write a tensor to its file, which is opened for the first and closed after the last."""
        file_name, part = self._parts[name]
        if id(part) not in self._left:
            self._left[id(part)] = len(part.entries)
            self._open[file_name] = SafetensorsFile(self._folder / file_name, part.entries)
        self._open[file_name].write(name, tensor)
        self._left[id(part)] -= 1
        if not self._left[id(part)]:
            self._open.pop(file_name).close()

    def close(self) -> None:
        """Close what is open.

        Raises:
            RuntimeError: If a tensor was not written.
        """
        while self._open:
            self._open.popitem()[1].close()

    def abandon(self) -> None:
        """Close what is open, as it is."""
        while self._open:
            self._open.popitem()[1].abandon()


class HubFolder:
    """A folder that has another name until it is whole; a context manager that removes it where that does not happen.

    Args:
        output: The folder to write.
        overwrite: Replace a folder of that name that holds a model, once the new one is whole.
        option: What the user calls the folder, for the messages.

    Raises:
        FileExistsError: If there is something of that name that may not be replaced.
        NotADirectoryError: If it would lie in a file.
        PermissionError: If it cannot be created.
    """

    def __init__(self, output: Path, overwrite: bool = False, option: str = "output") -> None:
        self.output = Path(os.path.abspath(output.expanduser()))
        self.partial = self.output.with_name(f".{self.output.name}.partial")
        self._option = option
        self._made: list[Path] = []
        self._check(overwrite)

    def _check(self, overwrite: bool) -> None:
        named = f"{self._option} {self.output}"
        if self.output.is_symlink() or (self.output.exists() and not self.output.is_dir()):
            raise FileExistsError(f"{named} exists and is no folder; give another one, or remove it")
        there = sorted(path.name for path in self.output.iterdir()) if self.output.exists() else []
        if there and not overwrite:
            raise FileExistsError(
                f"{named} exists and is not empty (it holds {listed(there)}); give another one, or add --overwrite to"
                " replace it once the new one is whole"
            )
        strange = [name for name in there if not _belongs(self.output / name)]
        if strange:
            raise FileExistsError(
                f"{named} holds {listed(strange)} beside a model, which --overwrite would remove; give another folder"
            )
        if there and CONFIG not in there:
            raise FileExistsError(f"{named} holds no {CONFIG}, so it is no model to overwrite; give another folder")
        parent = next(path for path in self.output.parents if path.exists())
        if not parent.is_dir():
            raise NotADirectoryError(f"{named} would lie in {parent}, which is a file")
        if not os.access(parent, os.W_OK | os.X_OK):
            raise PermissionError(f"{named} cannot be written: no permission to create anything in {parent}")

    def check_space(self, nbytes: int) -> None:
        """Check that there is space for the weights.

        Raises:
            OSError: If there is not.
        """
        parent = next(path for path in self.output.parents if path.exists())
        free = shutil.disk_usage(parent).free
        if nbytes > free:
            raise OSError(
                errno.ENOSPC,
                f"no space left for {self._option} {self.output}: its weights take {size_of(nbytes)}, and"
                f" {size_of(free)} are free",
            )

    def __enter__(self) -> Self:
        self._made = [path for path in self.output.parents if not path.exists()]
        self.partial.parent.mkdir(parents=True, exist_ok=True)
        remove_path(self.partial)  # of a run that was killed
        self.partial.mkdir()
        return self

    def __exit__(self, *error: object) -> None:
        remove_path(self.partial)
        for path in self._made:
            with contextlib.suppress(OSError):  # it holds the folder now, or something else
                path.rmdir()

    def finish(self) -> None:
        """Give the folder its name."""
        for path in (*self.partial.rglob("*"), self.partial):
            _sync(path)
        replace_path(self.partial, self.output)


def write_index(folder: Path, parts: Sequence[Part], parameters: int) -> None:
    """Write which file holds which tensor, where there are several.

    Args:
        folder: The folder.
        parts: Its files.
        parameters: Number of parameters of the network.
    """
    if len(parts) == 1:
        return
    weight_map = {
        entry.name: name for name, part in zip(file_names(len(parts)), parts, strict=True) for entry in part.entries
    }
    size = sum(entry.nbytes for part in parts for entry in part.entries)
    index = {"metadata": {"total_parameters": parameters, "total_size": size}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def write_configs(folder: Path, network: Any, dtype: torch.dtype) -> None:
    """Write ``config.json``, the generation config, and the source of a network that is not one of Transformers' own.

    Args:
        folder: The folder.
        network: The network, on any device.
        dtype: The dtype of its weights.
    """
    config = plain_config(network.config)
    config.dtype = str(dtype).removeprefix("torch.")
    config.architectures = [original_class(network).__name__]
    if network.is_remote_code():
        utils: Any = require("transformers", "the Hugging Face format").dynamic_module_utils
        utils.custom_object_save(network, str(folder), config=config)
    config.save_pretrained(str(folder))
    if network.can_generate() and network.generation_config is not None:
        network.generation_config.save_pretrained(str(folder))


def plain_config(config: Any) -> Any:
    """Copy a configuration, without what the strategy has made of it and without a quantization of former weights."""
    config = copy.deepcopy(config)
    for part in config_parts(config):
        part._experts_implementation_internal = None
        part.__dict__.pop("quantization_config", None)
    return config


def config_parts(config: Any) -> list[Any]:
    """A configuration and those of the networks inside, as far as it has them as parts of its own."""
    parts = [getattr(config, name, None) for name in type(config).sub_configs]
    return [config, *(inner for part in parts if part is not None for inner in config_parts(part))]


def original_class(network: Any) -> Any:
    """The class of a network as it was before FSDP2 put its own in front."""
    from torch.distributed.fsdp import FSDPModule

    cls = type(network)
    return cls.__mro__[2] if issubclass(cls, FSDPModule) and cls.__mro__[1] is FSDPModule else cls


def tokenizer_files(tokenizer: Path) -> list[Path]:
    """List the files of a tokenizer.

    Args:
        tokenizer: A folder that may hold more than them, or a ``tokenizer.json``.
    """
    if tokenizer.is_file():
        return [tokenizer]
    there = [tokenizer / name for name in (*TOKENIZER_FILES, _TEMPLATES)]
    return [path for path in there if path.exists()]


def find_tokenizer(tokenizer: Any, *others: Any) -> Path | None:
    """Find out where a tokenizer's files are.

    Args:
        tokenizer: The place that was named, if one was.
        others: Places, or ``None``, of which the first is taken that has some.

    Raises:
        FileNotFoundError: If the place that was named does not exist.
        ValueError: If it has none.
    """
    if tokenizer is not None:
        path = Path(tokenizer).expanduser()
        if not path.exists():
            raise FileNotFoundError(f"tokenizer {path} does not exist; give a folder or a tokenizer.json")
        if not tokenizer_files(path) or (path.is_file() and path.suffix != ".json"):
            raise ValueError(f"tokenizer {path} holds no tokenizer's files; give a folder or a tokenizer.json")
        return path
    places = (Path(other).expanduser() for other in others if other is not None)
    return next((path for path in places if path.exists() and tokenizer_files(path)), None)


def copy_tokenizer(folder: Path, tokenizer: Path | None) -> None:
    """Copy the files of a tokenizer; see :func:`tokenizer_files`."""
    if tokenizer is None:
        return
    for path in tokenizer_files(tokenizer):
        if path.is_dir():
            shutil.copytree(path, folder / path.name)
        else:
            shutil.copyfile(path, folder / ("tokenizer.json" if tokenizer.is_file() else path.name))


def _belongs(path: Path) -> bool:
    """Whether a file or folder is one that a model in the hub format has."""
    if path.is_dir():
        return path.name == _TEMPLATES
    if path.suffix == ".py":  # the source of a network that is not one of Transformers' own
        return path.stem in _modules_of(path.parent / CONFIG)
    return path.name in (CONFIG, GENERATION, *TOKENIZER_FILES) or _OURS.fullmatch(path.name) is not None


def _modules_of(config: Path) -> set[str]:
    """Names of the modules whose classes a ``config.json`` names."""
    try:
        named = json.loads(config.read_text(encoding="utf-8"))["auto_map"].values()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return set()
    return {str(name).partition(".")[0] for name in named}


def _sync(path: Path) -> None:
    if path.is_dir():
        sync_folder(path)
        return
    with path.open("rb") as file:
        os.fsync(file.fileno())
