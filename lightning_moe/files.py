"""Files and folders that take the place of others."""

import shutil
from pathlib import Path


def replace_path(source: Path, target: Path) -> None:
    """Move a file or folder to where another may lie."""
    old = target.with_name(f"{target.name}.old")
    _remove(old)
    if target.exists() or target.is_symlink():
        target.rename(old)
    source.rename(target)
    _remove(old)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif path.exists() or path.is_symlink():
        path.unlink()
