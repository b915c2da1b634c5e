"""Token streams kept in files, so that a corpus is tokenized once.

A cache entry is a folder named by a key; it appears in one rename when it is complete, so a run that is killed leaves
no half entry, and two nodes that write the same entry do not disturb each other.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np


def default_cache_dir() -> Path:
    """``lightning_moe`` in the user's cache folder: ``$XDG_CACHE_HOME``, or else ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "lightning_moe"


def file_facts(files: Iterable[Path]) -> list[tuple[str, int, int]]:
    """Path, size in bytes and time of change in nanoseconds of each file: what a cache entry depends on."""
    return [(str(file), (stat := file.stat()).st_size, stat.st_mtime_ns) for file in files]


def token_count(path: Path) -> int:
    """How many tokens a file of :class:`TokenWriter` holds.

    Args:
        path: The file.
    """
    with path.open("rb") as file:
        np.lib.format.read_magic(file)
        return np.lib.format.read_array_header_1_0(file)[0][0]


def cache_key(facts: dict[str, Any]) -> str:
    """A name for everything that a cache entry depends on.

    Args:
        facts: Anything that JSON can hold.
    """
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def create_entry(entry: Path, write: Callable[[Path], None]) -> None:
    """Fill a cache entry, unless it is there already.

    Args:
        entry: The folder of the entry.
        write: Puts the files into the folder that it is handed, which is then renamed.
    """
    if entry.exists():
        return
    entry.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f"{entry.name}.unfinished-", dir=entry.parent))
    try:
        write(unfinished)
        unfinished.chmod(0o755)
        try:
            unfinished.rename(entry)
        except OSError:
            if not entry.exists():  # otherwise another node has written the same entry meanwhile
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


class TokenWriter:
    """Writes a flat ``.npy`` file of a length that is not known before its end.

    Args:
        path: The file.
        dtype: Of the tokens.

    Attributes:
        length: Tokens written so far.
    """

    def __init__(self, path: Path, dtype: type[np.integer]) -> None:
        self.length = 0
        self._dtype = np.dtype(dtype)
        self._file: BinaryIO = path.open("wb")
        self._data_at = self._write_header()

    def append(self, tokens: np.ndarray) -> None:
        """Add tokens at the end.

        Args:
            tokens: Shape ``[n]``, of the writer's dtype.
        """
        self._file.write(np.ascontiguousarray(tokens, dtype=self._dtype).tobytes())
        self.length += len(tokens)

    def close(self) -> None:
        """Write the length into the file and close it."""
        with self._file:
            self._file.seek(0)
            # NumPy pads headers so that the first dimension can grow in place
            if self._write_header() != self._data_at:
                raise RuntimeError("NumPy wrote .npy headers of two sizes: the token file is broken. Please report it")

    def _write_header(self) -> int:
        descr = np.lib.format.dtype_to_descr(self._dtype)
        header = {"descr": descr, "fortran_order": False, "shape": (self.length,)}
        np.lib.format.write_array_header_1_0(self._file, header)
        return self._file.tell()
