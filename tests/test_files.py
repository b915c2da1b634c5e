"""What takes the place of something else is there whole, or what was there before is."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_moe import files
from lightning_moe.checkpoint import in_place
from lightning_moe.files import aside_of, repair, replace_link, replace_path

CALLS = ("replace", "rename", "unlink", "rmdir", "fsync")


class Killed(BaseException):
    pass


def killed_at(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Let the process "die" before its ``count``-th call to the system."""
    left = [count]

    def dying(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return call(*args, **kwargs)

        return called

    for name in CALLS:
        monkeypatch.setattr(os, name, dying(getattr(os, name)))
    monkeypatch.setattr(files, "_exchange", dying(files._exchange))


def make(path: Path, kind: str, content: str) -> None:
    if kind == "folder":
        path.mkdir()
        for name in ("manifest.json", "meta.pt", "__0_0.distcp"):
            (path / name).write_text(content)
    elif kind == "link":
        place = path.with_name(f"{content}-elsewhere")
        place.write_text(content)
        path.symlink_to(place.name)
    elif kind == "file":
        path.write_text(content)


def content_of(path: Path) -> str:
    if path.is_dir():
        found = {(path / name).read_text() for name in ("manifest.json", "meta.pt", "__0_0.distcp")}
        assert len(found) == 1, found
        return found.pop()
    return path.read_text()


@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "aside"])
@pytest.mark.parametrize("new", ["file", "folder", "link"])
@pytest.mark.parametrize("old", ["file", "folder", "link"])
def test_a_kill_at_any_call_leaves_the_old_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, exchange: bool
) -> None:
    if exchange and not can_exchange(tmp_path):
        pytest.skip("this file system cannot exchange two names")
    for count in range(40):
        folder = tmp_path / str(count)
        folder.mkdir()
        target, source = folder / "last.ckpt", folder / "last.ckpt.partial"
        make(target, old, "old")
        make(source, new, "new")
        with monkeypatch.context() as patch:
            if not exchange:
                patch.setattr(files, "_exchange", lambda *_: False)
            killed_at(patch, count)
            try:
                replace_path(source, target)
                finished = True
            except Killed:
                finished = False
        if exchange:
            assert target.exists(), "with an exchange there is no moment without one"
        # What Lightning looks for as the last checkpoint.
        whole = [path for path in folder.iterdir() if path.name.startswith("last") and path.suffix == ".ckpt"]
        assert whole
        in_place.clean(folder)
        assert content_of(target) == ("new" if finished else content_of(target))
        assert not aside_of(target).exists()
        left = {path.name for path in folder.iterdir()} - {"last.ckpt"}
        assert left <= {"old-elsewhere", "new-elsewhere", "last.ckpt.partial"}
        assert not source.is_dir()
        if finished:
            assert not source.exists()
            return
    raise AssertionError("it took more calls than expected")


def can_exchange(folder: Path) -> bool:
    one, other = folder / "one", folder / "other"
    one.mkdir()
    other.mkdir()
    return files._exchange(one, other)


def test_a_former_one_beside_comes_back(tmp_path: Path) -> None:
    target = tmp_path / "last.ckpt"
    make(aside_of(target), "folder", "old")
    assert repair(target)
    assert content_of(target) == "old"
    assert not repair(target)


def test_a_link_moves_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = tmp_path / "last.ckpt"
    for name in ("a.ckpt", "b.ckpt"):
        make(tmp_path / name, "folder", name)
    replace_link(link, tmp_path / "a.ckpt")
    for count in range(10):
        with monkeypatch.context() as patch:
            killed_at(patch, count)
            try:
                replace_link(link, tmp_path / "b.ckpt")
                finished = True
            except Killed:
                finished = False
        assert os.readlink(link) in ("a.ckpt", "b.ckpt")
        assert content_of(link) == os.readlink(link)
        if finished:
            assert os.readlink(link) == "b.ckpt"
            return
        replace_link(link, tmp_path / "a.ckpt")


def test_what_a_user_has_put_into_the_folder_moves_along(tmp_path: Path) -> None:
    target = tmp_path / "a.ckpt"
    make(target, "folder", "old")
    (target / "notes.txt").write_text("keep me")
    unfinished = in_place.Unfinished(target)
    for name in ("meta.pt", "__0_0.distcp"):
        (unfinished.path / name).write_text("new")
    unfinished.finish(b"new")
    unfinished.put_in_place()
    assert content_of(target) == "new"
    assert (target / "notes.txt").read_text() == "keep me"
    assert [path.name for path in tmp_path.iterdir()] == ["a.ckpt"]
