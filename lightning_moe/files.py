"""Files and folders that take the place of others, so that at every moment one of the two is there whole."""

import contextlib
import ctypes
import errno
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
# Not only ENOSYS: network file systems answer EINVAL, sandboxes EPERM.
_NOT_HERE = {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM, errno.ENOTTY}
_ASIDE = "-being-replaced"


def replace_path(source: Path, target: Path, keep: Sequence[str] = ()) -> None:
    """Move a file or folder to where another may lie, and delete that one.

    The directory is written through to the disk. Where the system can exchange two names, a process that is killed
    leaves either the new or the former one at ``target``. Where it cannot, and one of the two is a folder, there is a
    moment in which the former one lies beside, as :func:`aside_of` names it; :func:`repair` brings it back.

    Args:
        source: What to move, in the same file system. Afterwards nothing is there, or what could not be deleted.
        target: Where to; a symbolic link is replaced itself, not what it points to.
        keep: Names in the folder that is at the target, which are moved into the new one.
    """
    try:
        os.replace(source, target)  # onto nothing or an empty folder, or a file onto a file
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.EISDIR, errno.ENOTDIR) or not _exists(target):
            raise
        if not _exchange(source, target):
            _move_aside(source, target)
    for name in keep:
        os.rename(source / name, target / name)
    sync_folder(target.parent)
    with contextlib.suppress(OSError):  # a network file system keeps files that a process has open
        remove_path(source)


def aside_of(target: Path) -> Path:
    """Where the former one lies while a new one takes its place.

    The name begins and ends like that of the target, so that what looks for ``last*.ckpt`` finds it as well.
    """
    return target.with_name(f"{target.stem}{_ASIDE}{target.suffix}")


def is_aside(path: Path) -> bool:
    """Whether a name is one that :func:`aside_of` gives."""
    return path.stem.endswith(_ASIDE)


def repair(target: Path) -> bool:
    """Bring the former one back where a process was killed while it put a new one in place.

    Returns:
        Whether there was something to bring back.
    """
    aside = aside_of(target)
    if _exists(target) or not _exists(aside):
        return False
    os.rename(aside, target)
    sync_folder(target.parent)
    return True


def target_of_aside(path: Path) -> Path:
    """The name that was to be replaced, from that of :func:`aside_of`."""
    return path.with_name(f"{path.stem.removesuffix(_ASIDE)}{path.suffix}")


def replace_link(link: Path, target: Path) -> None:
    """Let a symbolic link point to a file or folder, at every moment to the former or the new one.

    Args:
        link: The link; a file, folder or link that is there already is replaced.
        target: What it points to, by a relative path.
    """
    fresh = link.with_name(f"{link.name}.partial")
    remove_path(fresh)
    os.symlink(os.path.relpath(target, link.parent), fresh)
    replace_path(fresh, link)


def remove_path(path: Path) -> None:
    """Delete a file, folder or link, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync_folder(path: Path) -> None:
    """Write the names in a folder through to the disk."""
    if sys.platform == "win32":  # folders cannot be opened there
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems refuse, and need it not
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def wait_for_folder(path: Path, seconds: float = 30.0) -> bool:
    """Wait until a folder that another rank has made is there for this one: network file systems show it late.

    Returns:
        Whether it is.
    """
    end = time.monotonic() + seconds
    while not path.is_dir():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def _exists(path: Path) -> bool:
    return os.path.lexists(path)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names in one step; ``False`` where the system or the file system cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if sys.platform == "linux" else None
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _NOT_HERE:
        return False
    raise OSError(number, os.strerror(number), str(one), None, str(other))


def _move_aside(source: Path, target: Path) -> None:
    aside = aside_of(target)
    remove_path(aside)
    os.rename(target, aside)
    os.rename(source, target)
    sync_folder(target.parent)
    os.rename(aside, source)  # by a name that says that it may be deleted, before it is half deleted
