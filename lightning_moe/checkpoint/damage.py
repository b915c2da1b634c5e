"""What is wrong with a checkpoint, and errors that every rank raises alike."""

import builtins
import os
import zlib
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

_SHOWN = 5
_BLOCK = 16 << 20


class CheckpointError(RuntimeError):
    """A checkpoint cannot be loaded or saved; the message names the file, the tensor and what to do."""


@dataclass(frozen=True)
class Ranks:
    """The ranks that work on a checkpoint together; by default one process alone.

    Args:
        rank: This rank.
        world_size: How many there are.
        group: Their process group, for objects and tensors of the CPU; ``None`` for one process alone.
    """

    rank: int = 0
    world_size: int = 1
    group: dist.ProcessGroup | None = None

    def gather(self, mine: Any) -> list[Any]:
        """What each rank has, on every rank. Collective."""
        if self.group is None:
            return [mine]
        everyone: list[Any] = [None] * self.world_size
        dist.all_gather_object(everyone, mine, group=self.group)
        return everyone

    def from_first(self, mine: Any) -> Any:
        """What rank 0 has, on every rank. Collective."""
        if self.group is None:
            return mine
        holder = [mine]
        dist.broadcast_object_list(holder, src=0, group=self.group)
        return holder[0]

    @contextmanager
    def failing_together(self, what: str) -> Generator[None, None, None]:
        """Raise on every rank what one of them raises inside; otherwise the others would wait for it. Collective.

        Args:
            what: What is done inside, for example ``"saving last.ckpt"``.

        Raises:
            Exception: Of the same kind on every rank, with the message of the first rank that failed.
        """
        error: BaseException | None = None
        try:
            yield
        except CheckpointException as raised:  # what torch.distributed.checkpoint raises on every rank
            error = _cause(raised, what)
        except Exception as raised:
            error = raised
        reports = self.gather(None if error is None else _Report.of(error))
        if error is not None:
            raise error
        for rank, report in enumerate(reports):
            if report is not None:
                raise report.rebuilt(f"{what} failed on rank {rank}")


@dataclass(frozen=True)
class _Report:
    """An exception in plain values, which every rank can read whatever classes it knows."""

    kind: str
    message: str
    number: int | None = None
    filename: str | None = None

    @classmethod
    def of(cls, error: BaseException) -> "_Report":
        if isinstance(error, OSError) and error.errno is not None:
            filename = None if error.filename is None else str(error.filename)
            return cls("OSError", error.strerror or "", error.errno, filename)
        return cls(type(error).__name__, str(error))

    def rebuilt(self, context: str) -> Exception:
        if self.number is not None:
            return OSError(self.number, f"{context}: {self.message}", self.filename)
        known = CheckpointError if self.kind == "CheckpointError" else getattr(builtins, self.kind, None)
        text = f"{context}: {self.message}"
        if isinstance(known, type) and issubclass(known, Exception):
            try:
                return known(text)
            except TypeError:  # UnicodeDecodeError takes five arguments
                pass
        return RuntimeError(f"{context}: {self.kind}: {self.message}")


def _cause(error: CheckpointException, what: str) -> BaseException:
    """The first rank's own exception, which torch.distributed.checkpoint wraps in one that is no ``Exception``."""
    rank, (cause, _) = min(error.failures.items())
    if not isinstance(cause, Exception):  # Ctrl-C, which a Trainer knows what to do with
        return cause
    if isinstance(cause, OSError) and cause.errno is not None:
        return OSError(cause.errno, f"{what} failed on rank {rank}: {cause.strerror}", cause.filename)
    if isinstance(cause, CheckpointError):
        return cause
    failed = RuntimeError(f"{what} failed on rank {rank}: {type(cause).__name__}: {cause}")
    failed.__cause__ = cause
    return failed


def checksum_of(data: Any, start: int = 0) -> int:
    """The CRC-32 of bytes, which goes on from that of the bytes before.

    It finds every run of up to 32 damaged bits, and of other damage all but one in 2**32; it is against accidents, not
    against people. At about 4 GiB/s it is also the fastest that Python's standard library has.
    """
    return zlib.crc32(data, start)


def checksums(path: Any, lengths: Sequence[int], skipped: Sequence[bool]) -> Generator[int | None, None, None]:
    """The checksum of each of the consecutive parts of a file; ``None`` for those that are skipped.

    Args:
        path: The file.
        lengths: Of the parts, in bytes.
        skipped: Which of them are not read.
    """
    with open(path, "rb") as file:
        for length, skip in zip(lengths, skipped, strict=True):
            if skip:
                file.seek(length, os.SEEK_CUR)
                yield None
                continue
            value = 0
            while length > 0 and (block := file.read(min(length, _BLOCK))):
                value = checksum_of(block, value)
                length -= len(block)
            yield value


def listed(names: Sequence[str] | set[str]) -> str:
    """Some names for a message, with the number of those that are left out."""
    ordered = sorted(names)
    more = f" and {len(ordered) - _SHOWN} more" if len(ordered) > _SHOWN else ""
    return ", ".join(ordered[:_SHOWN]) + more
