"""Checkpoints in a single file, as plain Lightning writes and reads them.

The file is a ZIP archive, and as such has a CRC-32 of every tensor, which ``torch.load`` does not look at.
"""

import struct
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor

from lightning_moe.checkpoint.damage import CheckpointError, Ranks
from lightning_moe.checkpoint.manifest import FORMAT, written_by
from lightning_moe.checkpoint.summed_file import SummedFile
from lightning_moe.checkpoint.unpickle import load_safely

_KEY = "lightning_moe_file"
_LOCAL_HEADER = struct.Struct("<26xHH")  # of a ZIP entry: the lengths of its name and of the extra field that follows
_BLOCK = 1 << 20


def write_file(path: Path, checkpoint: dict[str, Any]) -> None:
    """Write a checkpoint through to the disk.

    Args:
        path: The file.
        checkpoint: What Lightning keeps, with ``state_dict`` and ``optimizer_states``.
    """
    content = {**checkpoint, _KEY: {"format": FORMAT, "versions": written_by()}}
    with SummedFile(path) as file:
        torch.save(content, cast(IO[bytes], file))


def read_file(path: Path, ranks: Ranks, weights_only: bool | None = None) -> dict[str, Any]:
    """Read a checkpoint whose bytes all fit their checksums. Collective.

    Args:
        path: The file.
        ranks: The ranks that read it. Rank 0 looks at the checksums.
        weights_only: ``False`` to unpickle whatever is there, from a source that you trust.

    Returns:
        What Lightning keeps; tensors are on the CPU and in the file until they are used.

    Raises:
        CheckpointError: On every rank, if the file is no checkpoint, damaged, or of a newer version.
        OSError: On every rank, if it cannot be read.
    """
    with ranks.failing_together(f"reading {path}"):
        if not zipfile.is_zipfile(path):
            kind = "is cut off" if _begins_as_zip(path) else "is no checkpoint: it is no file of torch.save"
            raise CheckpointError(f"{path} {kind}; use another checkpoint")
        if ranks.rank == 0:
            verify_file(path)
    checkpoint: dict[str, Any] = {}
    with ranks.failing_together(f"reading {path}"):
        content = load_safely(path, weights_only, mmap=True)
        if not isinstance(content, dict) or not isinstance(content.get("state_dict"), Mapping):
            raise CheckpointError(f"{path} is no checkpoint of a Trainer: it has no 'state_dict'")
        wrote = content.pop(_KEY, {"format": FORMAT})
        if wrote["format"] > FORMAT:
            raise CheckpointError(
                f"{path} was written by lightning-moe {wrote['versions']['lightning-moe']} in checkpoint format"
                f" {wrote['format']}, and this version reads formats up to {FORMAT}; upgrade lightning-moe"
            )
        checkpoint.update(content)
    return checkpoint


def verify_file(path: Path) -> None:
    """Compare every byte of a single-file checkpoint with its checksum.

    Raises:
        CheckpointError: Naming the damaged tensor.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                if not _fits(archive, entry):
                    held = _tensor_at(path, entry)
                    raise CheckpointError(
                        f"{path} is damaged: the bytes of {held} do not fit their checksum; use another checkpoint"
                    )
    except (zipfile.BadZipFile, EOFError, NotImplementedError, struct.error) as error:
        raise CheckpointError(f"{path} is damaged ({error}); use another checkpoint") from error


def _begins_as_zip(path: Path) -> bool:
    with open(path, "rb") as file:
        return file.read(4) == b"PK\x03\x04"


def _fits(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bool:
    try:
        with archive.open(entry) as file:
            while file.read(_BLOCK):
                pass
    except zipfile.BadZipFile:
        return False
    return True


def _tensor_at(path: Path, entry: zipfile.ZipInfo) -> str:
    """Which tensor an entry of the archive holds; its own name, if it cannot be known."""
    try:
        with open(path, "rb") as file:
            file.seek(entry.header_offset)
            start = entry.header_offset + 30 + sum(_LOCAL_HEADER.unpack(file.read(30)))
        content = torch.load(path, map_location="meta", weights_only=True)
        names = [name for name, tensor in _named(content) if _offset(tensor) == start]
    except Exception:  # the file is damaged: whatever names the place better than nothing is good enough
        names = []
    return ", ".join(names) or entry.filename


def _offset(tensor: Tensor) -> int | None:
    return getattr(tensor.untyped_storage(), "_checkpoint_offset", None)


def _named(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _named(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for place, item in enumerate(value):
            yield from _named(item, f"{name}.{place}")
