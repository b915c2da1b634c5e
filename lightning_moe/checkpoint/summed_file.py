"""A file that is on the disk when it is closed, with the checksums of its parts."""

import errno
import os
from pathlib import Path
from typing import IO, Any, Self

from lightning_moe.checkpoint.damage import checksum_of

_FULL = {errno.ENOSPC, errno.EDQUOT}


class SummedFile:
    """A file that is written from its beginning to its end, and takes the checksum of each part.

    At the end of its context it is written through to the disk. What the system says of a full disk or the like is
    raised there, also where ``torch.save`` puts an error of its own in its place.

    Args:
        path: The file, which is overwritten.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] = open(path, "wb")  # noqa: SIM115
        self._error: OSError | None = None
        self._checksum = 0
        self._length = 0

    def write(self, data: Any) -> int:
        """Write bytes; return how many."""
        self._checksum = checksum_of(data, self._checksum)
        self._length += memoryview(data).nbytes
        try:
            return self._file.write(data)
        except OSError as error:
            self._error = error
            raise

    def flush(self) -> None:
        """Nothing: what is written is flushed at the end."""

    def end_part(self) -> tuple[int, int]:
        """Length in bytes and checksum of what was written since the last call."""
        part = self._length, self._checksum
        self._length = self._checksum = 0
        return part

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            with self._file:
                if kind is None:
                    self._file.flush()
                    os.fsync(self._file.fileno())
        except OSError as error:  # of what was written last, or of what a full disk could not take
            self._error = self._error or error
        if self._error is not None:
            advice = "; free some space, or save elsewhere" if self._error.errno in _FULL else ""
            raise OSError(self._error.errno, f"{self._error.strerror}{advice}", str(self._path)) from None
