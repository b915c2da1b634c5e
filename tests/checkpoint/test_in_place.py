"""Unfinished checkpoints: what is cleaned up, and what is left alone."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lightning_moe.checkpoint import CheckpointError, in_place
from lightning_moe.checkpoint.in_place import Unfinished, clean, remove, unfinished_path
from tests.test_files import Killed, content_of, killed_at, make

HOLD = """
import fcntl, sys
file = open(sys.argv[1], "r+b")
fcntl.lockf(file, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""


def test_an_unfinished_one_of_a_requeued_job_has_no_name_that_lightning_counts(tmp_path: Path) -> None:
    assert "hpc_ckpt_" not in unfinished_path(tmp_path / "hpc_ckpt_2.ckpt").name


@contextmanager
def held_by_another_process(file: Path) -> Iterator[None]:
    argv = [sys.executable, "-c", HOLD, str(file)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"locked\n"
            yield
        finally:
            process.kill()


def unfinished(path: Path) -> None:
    path.mkdir()
    for name in (".metadata", "__0_0.distcp", "__11_0.distcp", "manifest.json"):
        (path / name).write_text("half")


def test_leftovers_of_any_name_are_cleaned_at_the_next_save(tmp_path: Path) -> None:
    unfinished(tmp_path / "a.ckpt.partial")
    unfinished(tmp_path / "b.ckpt.partial")
    (tmp_path / "empty.partial").mkdir()
    (tmp_path / "last.ckpt.partial").symlink_to("a.ckpt")
    make(tmp_path / "c-being-replaced.ckpt", "folder", "old")
    make(tmp_path / "d.ckpt", "folder", "new")
    make(tmp_path / "d-being-replaced.ckpt", "folder", "old")
    Unfinished(tmp_path / "b.ckpt").discard()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.ckpt", "d.ckpt"]
    assert content_of(tmp_path / "c.ckpt") == "old", "nothing had come to take its place"
    assert content_of(tmp_path / "d.ckpt") == "new"


def test_what_others_have_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_place, "_WAIT_FOR_LOCK_S", 0.3)
    (tmp_path / "film.partial").write_text("half a film")
    (tmp_path / "films.partial").mkdir()
    (tmp_path / "films.partial" / "film").write_text("half a film")
    unfinished(tmp_path / "a.ckpt.partial")
    before = sorted(tmp_path.rglob("*"))
    with held_by_another_process(tmp_path / "a.ckpt.partial" / "manifest.json"):
        clean(tmp_path)
        assert sorted(tmp_path.rglob("*")) == before
        with pytest.raises(CheckpointError, match=r"another run is saving .*a\.ckpt now"):
            Unfinished(tmp_path / "a.ckpt")
    Unfinished(tmp_path / "a.ckpt").discard()
    assert not (tmp_path / "a.ckpt.partial").exists()
    for path in (tmp_path / "film", tmp_path / "films"):
        with pytest.raises(CheckpointError, match="in the way"):
            Unfinished(path)


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_no_half_deleted_checkpoint_bears_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    for count in range(40):
        target = tmp_path / str(count) / "a.ckpt"
        target.parent.mkdir()
        make(target, kind, "old")
        finished = killed(lambda target=target: remove(target), monkeypatch, count)
        if os.path.lexists(target):
            assert content_of(target) == "old"
            assert not finished
        clean(target.parent)
        left = {path.name for path in target.parent.iterdir()}
        assert left <= {"a.ckpt", "old-elsewhere", "a.ckpt.partial"}
        assert not (target.parent / "a.ckpt.partial").is_dir()
        if finished:
            assert left <= {"old-elsewhere"}
            return
    raise AssertionError("it took more calls than expected")


def test_what_cannot_be_deleted_does_not_end_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "a.ckpt"
    make(target, "folder", "old")
    new = Unfinished(target)
    for name in ("meta.pt", "__0_0.distcp"):
        (new.path / name).write_text("new")
    new.finish(b"new")
    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", lambda *_, **__: os.stat("/nothing"))  # as with a file that is open on NFS
        new.put_in_place()
        assert content_of(target) == "new"
        Unfinished(target).close()  # the next save of the same name is not kept from it
        remove(target)
        assert not target.exists()
    clean(tmp_path)
    assert not list(tmp_path.iterdir())


def killed(action: Callable[[], None], monkeypatch: pytest.MonkeyPatch, count: int) -> bool:
    with monkeypatch.context() as patch:
        killed_at(patch, count)
        try:
            action()
        except Killed:
            return False
    return True
