"""A checkpoint on its way: a folder ``NAME.partial`` that becomes ``NAME`` when it is whole."""

import contextlib
import errno
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from lightning_moe.checkpoint.damage import CheckpointError, listed
from lightning_moe.checkpoint.manifest import MANIFEST
from lightning_moe.files import aside_of, is_aside, remove_path, repair, replace_path, sync_folder, target_of_aside

SUFFIX = ".partial"
FILE = "checkpoint.pt"  # a checkpoint in a single file, while it is unfinished
_OURS = re.compile(
    rf"__\d+_\d+\.distcp|\.metadata|\.metadata\.tmp|meta\.pt|{re.escape(MANIFEST)}|{re.escape(FILE)}|\.nfs[0-9a-f]+"
)
_ZIP = b"PK\x03\x04"  # what torch.save writes begins so
_WAIT_FOR_LOCK_S = 10.0


def unfinished_path(target: Path) -> Path:
    """Where a checkpoint lies until it is whole. What has such a name may be deleted at any time."""
    # Lightning takes whatever has hpc_ckpt_ in its name for a whole checkpoint, the highest number for the newest.
    name = target.name.replace("hpc_ckpt_", "hpc-ckpt-")
    return target.with_name(f"{name}{SUFFIX}")


class Unfinished:
    """The folder of an unfinished checkpoint, on the rank that puts it in place.

    It holds a lock while it lives, so that another run that cleans up leaves it alone.

    Args:
        target: The path of the checkpoint.

    Raises:
        OSError: If the folder cannot be made.
        CheckpointError: If something that is no checkpoint is at the target, or another run is saving there.
    """

    def __init__(self, target: Path) -> None:
        self.target = target
        self.path = unfinished_path(target)
        self._descriptor: int | None = None
        target.parent.mkdir(parents=True, exist_ok=True)
        clean(target.parent)
        check_target(target)
        self._clear()
        self.path.mkdir()
        self._descriptor = os.open(self.path / MANIFEST, os.O_RDWR | os.O_CREAT, 0o666)
        _lock(self._descriptor)

    def _clear(self) -> None:
        if not os.path.lexists(self.path):
            return
        if not is_ours(self.path):
            raise CheckpointError(
                f"{self.path} is in the way of saving {self.target}: it is no unfinished checkpoint; move it away"
            )
        deadline = time.monotonic() + _WAIT_FOR_LOCK_S  # a run that was killed may take a moment to be gone
        while in_use(self.path):
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"another run is saving {self.target} now: {self.path} is locked; save elsewhere, or end that run"
                )
            time.sleep(0.1)
        _make_way(self.path)

    def finish(self, manifest: bytes) -> None:
        """Write the manifest, the last file, and write the folder through to the disk."""
        assert self._descriptor is not None
        os.truncate(self._descriptor, 0)
        with open(self._descriptor, "wb", closefd=False) as file:  # by another one, closing would end the lock
            file.write(manifest)
            file.flush()
            os.fsync(self._descriptor)
        sync_folder(self.path)

    def put_in_place(self, file: str | None = None) -> None:
        """Let the checkpoint take the place of the one of before, in one step.

        Args:
            file: The file in the folder that is the checkpoint; ``None`` for the folder itself.
        """
        if file is None:
            replace_path(self.path, self.target, keep=_extras(self.target))
            self.close()
        else:
            replace_path(self.path / file, self.target)
            self.close()
            with contextlib.suppress(OSError):
                remove_path(self.path)

    def discard(self) -> None:
        """Delete what was written, unless it is in place."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                remove_path(self.path)
            self.close()

    def close(self) -> None:
        """Let go of the lock."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def check_target(target: Path) -> None:
    """Check that a checkpoint may take a path.

    Raises:
        CheckpointError: If a folder is there that is no checkpoint, or something that is neither file nor folder.
    """
    if target.is_symlink() or not target.exists() or target.is_file():
        return
    if not target.is_dir():
        raise CheckpointError(f"{target} is neither a file nor a folder; no checkpoint can be saved there")
    present = {entry.name for entry in target.iterdir()}
    if present and not present & {".metadata", "meta.pt", MANIFEST}:
        raise CheckpointError(
            f"{target} is a folder, but no checkpoint: it holds {listed(present)}, which saving there would delete;"
            " choose another path"
        )


def is_ours(path: Path) -> bool:
    """Whether something holds nothing but what an unfinished or a replaced checkpoint may hold."""
    if path.is_symlink():
        return True
    if path.is_file():
        with open(path, "rb") as file:
            return file.read(len(_ZIP)) == _ZIP
    return path.is_dir() and all(_OURS.fullmatch(entry.name) for entry in path.iterdir())


def in_use(path: Path) -> bool | None:
    """Whether a process writes an unfinished checkpoint now; ``None`` where files cannot be locked."""
    if path.is_symlink() or not path.is_dir():
        return False
    try:
        descriptor = os.open(path / MANIFEST, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        locked = _lock(descriptor)
        return None if locked is None else not locked
    finally:
        os.close(descriptor)


def clean(folder: Path) -> None:
    """Finish what a process that was killed has begun: delete unfinished checkpoints, bring former ones back."""
    for path in list(_entries(folder)):
        with contextlib.suppress(OSError):  # another rank or run does the same, or it is not ours
            if is_aside(path) and not repair(target_of_aside(path)) and (is_ours(path) or path.is_file()):
                os.rename(path, trash := unfinished_path(target_of_aside(path)))
                remove_path(trash)
            elif path.name.endswith(SUFFIX) and is_ours(path) and in_use(path) is False:
                remove_path(path)


def remove(target: Path) -> None:
    """Delete a checkpoint, so that no half-deleted one bears its name."""
    trash = unfinished_path(target)
    for path in (target, aside_of(target)):
        if os.path.lexists(path):
            _make_way(trash)
            os.rename(path, trash)
            sync_folder(target.parent)
            with contextlib.suppress(OSError):  # the next save tries again
                remove_path(trash)


def _make_way(path: Path) -> None:
    """Delete what was left behind; where it cannot be deleted now, give it another name that says that it may be."""
    try:
        remove_path(path)
    except OSError:
        os.rename(path, path.with_name(f"{path.name.removesuffix(SUFFIX)}.{time.time_ns()}{SUFFIX}"))


def _entries(folder: Path) -> Iterator[Path]:
    with os.scandir(folder) as entries:
        for entry in entries:
            path = Path(entry.path)
            if entry.name.endswith(SUFFIX) or is_aside(path):
                yield path


def _extras(target: Path) -> list[str]:
    if target.is_symlink() or not target.is_dir():
        return []
    return [entry.name for entry in target.iterdir() if not _OURS.fullmatch(entry.name)]


def _lock(descriptor: int) -> bool | None:
    """Lock a file for this process; ``False`` if another has locked it, ``None`` where files cannot be locked.

    Locks of this kind belong to a process, not to its children, and hold on most network file systems as well.
    """
    if sys.platform == "win32":
        return None
    import fcntl

    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EAGAIN, errno.EACCES) else None
    return True
