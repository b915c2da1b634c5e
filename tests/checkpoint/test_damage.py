"""A checkpoint that is damaged, another's or none is an error on every rank, before anything is loaded."""

import json
import os
import pickle
import resource
import shutil
import signal
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_moe.checkpoint import CheckpointError, SavedFolder
from lightning_moe.checkpoint.manifest import MANIFEST, _text, checksum_of
from tests.checkpoint.stepping import Stepping, stepping_trainer
from tests.harness import run_ranks
from tests.test_strategy import rank_and_world


class Other(Stepping):
    """The same but for its hidden size, a layer less and a layer more."""

    def __init__(self) -> None:
        super().__init__(hidden=8)
        self.moe.extra = nn.Linear(2, 2)
        del self.inner
        self.before = nn.Linear(4, 4)
        for layer in (self.moe.extra, self.before):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return self.moe(self.before(batch)).sum()


class Secret:
    """What a hyperparameter may be."""


class Keeps(pl.Callback):
    def state_dict(self) -> dict[str, Any]:
        return {"kept": Secret()}


class Evil:
    def __reduce__(self) -> Any:
        return (os.mkdir, (os.environ["EVIL"],))


# Damage


def flip(path: Path, place: int) -> None:
    with open(path, "r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 0x10]))


def place_of(folder: Path, tensor: str) -> tuple[str, int]:
    """File and place of the first byte of the values of a part of a tensor."""
    for file, parts in json.loads((folder / MANIFEST).read_text())["files"].items():
        start = 0
        for name, length, _ in parts:
            if name == tensor and file.startswith("__1_"):
                return file, start + length // 2
            start += length
    raise AssertionError(tensor)


def flip_tensor(folder: Path) -> None:
    file, place = place_of(folder, "model.moe.experts.gate_up_proj")
    flip(folder / file, place)


def truncate(path: Path, by: int) -> None:
    os.truncate(path, path.stat().st_size - by)


def newer(folder: Path) -> None:
    content = json.loads((folder / MANIFEST).read_text())
    content.pop("crc32")
    content.update(format=7, versions={"lightning-moe": "9.1"})
    (folder / MANIFEST).write_bytes(_text({**content, "crc32": checksum_of(_text(content))}))


def without_manifest(then: Callable[[Path], None]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / MANIFEST).unlink()
        then(folder)

    return damage


def lose_expert(folder: Path) -> None:
    """A folder in which one rank's experts were never written, as other systems make them."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    del metadata.state_dict_metadata["model.moe.experts.gate_up_proj"].chunks[-1]
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def evil_metadata(folder: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(Evil()))


def evil_value(folder: Path) -> None:
    """A value among the tensors, such as a learning rate, that runs code when it is unpickled."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    index = next(index for index in metadata.storage_data if index.fqn.endswith(".lr"))
    stored = metadata.storage_data[index]
    torch.save(Evil(), folder / "__9_0.distcp")
    stored.relative_path, stored.offset = "__9_0.distcp", 0
    stored.length = (folder / "__9_0.distcp").stat().st_size
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def flip_in_file(path: Path) -> None:
    """Flip a byte of the largest tensor of the file."""
    with zipfile.ZipFile(path) as archive:
        entry = max(archive.infolist(), key=lambda entry: entry.file_size)
    with open(path, "rb") as file:
        file.seek(entry.header_offset + 26)
        start = entry.header_offset + 30 + sum(struct.unpack("<HH", file.read(4)))
    flip(path, start + entry.file_size // 2)


# name -> (what it is made from, how it is damaged, what the message says, which error)
Damage = tuple[str, Callable[[Path], Any], list[str], type[Exception]]
CASES: dict[str, Damage] = {
    "cut": (
        "a",
        lambda p: os.truncate(p / "__1_0.distcp", 999),
        ["__1_0.distcp", "bytes instead of", "model.moe"],
        CheckpointError,
    ),
    "flipped": ("a", flip_tensor, ["__1_0.distcp", "model.moe.experts.gate_up_proj", "checksum"], CheckpointError),
    "shard missing": (
        "a",
        lambda p: (p / "__1_0.distcp").unlink(),
        ["__1_0.distcp is missing", "moe"],
        CheckpointError,
    ),
    "metadata missing": ("a", lambda p: (p / ".metadata").unlink(), [".metadata is missing"], CheckpointError),
    "meta.pt missing": ("a", lambda p: (p / "meta.pt").unlink(), ["meta.pt is missing"], CheckpointError),
    "meta.pt flipped": ("a", lambda p: flip(p / "meta.pt", 700), ["meta.pt is damaged"], CheckpointError),
    "metadata flipped": ("a", lambda p: flip(p / ".metadata", 99), [".metadata is damaged"], CheckpointError),
    "manifest flipped": ("a", lambda p: flip(p / MANIFEST, 300), ["manifest.json is damaged"], CheckpointError),
    "manifest cut": ("a", lambda p: truncate(p / MANIFEST, 30), ["manifest.json is damaged"], CheckpointError),
    "manifest empty": ("a", lambda p: os.truncate(p / MANIFEST, 0), ["manifest.json is damaged"], CheckpointError),
    "newer": ("a", newer, ["lightning-moe 9.1", "format 7", "upgrade"], CheckpointError),
    "no manifest, cut": (
        "a",
        without_manifest(lambda p: os.truncate(p / "__1_0.distcp", 999)),
        ["__1_0.distcp is cut off", "model.moe"],
        CheckpointError,
    ),
    "no manifest, shard missing": (
        "a",
        without_manifest(lambda p: (p / "__1_0.distcp").unlink()),
        ["__1_0.distcp is missing", "moe"],
        CheckpointError,
    ),
    "expert missing": (
        "a",
        without_manifest(lose_expert),
        ["lacks a part of model.moe.experts.gate_up_proj", "rows"],
        CheckpointError,
    ),
    "evil metadata": ("a", without_manifest(evil_metadata), [".metadata", "mkdir"], CheckpointError),
    "evil value": ("a", without_manifest(evil_value), [".lr", "mkdir"], CheckpointError),
    "other model": (
        "other",
        lambda p: None,
        ["Other", "missing (inner.", "unexpected (before.", "of another shape (moe.experts.", "(4, 16, 4)"],
        CheckpointError,
    ),
    "secret": ("secret", lambda p: None, ["test_damage.Secret", "add_safe_globals", "ignore="], CheckpointError),
    "nothing": ("", lambda p: None, ["no checkpoint is there"], FileNotFoundError),
    "empty folder": ("", lambda p: p.mkdir(), ["no checkpoint: it holds nothing"], CheckpointError),
    "other folder": (
        "",
        lambda p: ((p / "b.ckpt").mkdir(parents=True), (p / "b.ckpt/.metadata").touch()),
        ["no checkpoint: it holds b.ckpt", "did you mean", "other folder/b.ckpt?"],
        CheckpointError,
    ),
    "text": ("", lambda p: p.write_text("hello" * 99), ["no checkpoint", "torch.save"], CheckpointError),
    "file cut": ("file", lambda p: truncate(p, 500), ["is cut off"], CheckpointError),
    "file flipped": ("file", flip_in_file, ["state_dict.moe.experts.", "checksum"], CheckpointError),
    "file of other model": ("other file", lambda p: None, ["missing (inner.", "unexpected (before."], CheckpointError),
    "secret file": ("secret file", lambda p: None, ["test_damage.Secret", "add_safe_globals"], CheckpointError),
    "tensor file": ("", lambda p: torch.save(torch.ones(3), p), ["no checkpoint of a Trainer"], CheckpointError),
}


def save_and_load_all(folder: Path) -> dict[str, tuple[str, str]]:
    rank, world = rank_and_world()
    os.environ["EVIL"] = str(folder / "evil")

    def trained(module: Stepping, name: str, callbacks: Any = (), **options: Any) -> pl.Trainer:
        trainer = stepping_trainer(None, world, callbacks, max_steps=1, **options)
        trainer.fit(module)
        if name:
            trainer.save_checkpoint(folder / "origin" / name)
        return trainer

    for kind, options in (("", {}), (" file", {"save_distributed_checkpoint": False})):
        trained(Stepping(512), "a" if not kind else "file", **options)
        trained(Other(), f"other{kind}", **options)
        trained(Stepping(512), f"secret{kind}", [Keeps()], **options)
    module = Stepping(512)
    trainer = trained(module, "")
    if rank == 0:
        for name, (origin, damage, *_) in CASES.items():
            if origin:
                whole = folder / "origin" / origin
                (shutil.copytree if whole.is_dir() else shutil.copy)(whole, folder / name)
            damage(folder / name)
    trainer.strategy.barrier()
    errors = {}
    for name in CASES:
        try:
            trainer.strategy.load_checkpoint(folder / name)
            errors[name] = ("nothing", "")
        except Exception as error:
            errors[name] = (type(error).__name__, str(error))
        module.check(1)
    assert not (folder / "evil").exists(), "code of a checkpoint ran"
    for whole in ("a", "file"):
        trainer.strategy.load_checkpoint(folder / "origin" / whole)
        module.check(1)
    return errors


def test_every_rank_names_the_damage_and_loads_nothing(tmp_path: Path) -> None:
    results = run_ranks(save_and_load_all, 2, tmp_path, timeout=200)
    for name, (_, _, words, kind) in CASES.items():
        for rank, errors in enumerate(results):
            found, message = errors[name]
            assert found == kind.__name__, f"{name} on rank {rank}: {found}: {message}"
            assert all(word in message for word in words), f"{name} on rank {rank}: {message}"


# One process reads a folder without a Trainer


def test_one_process_reads_a_folder(tmp_path: Path) -> None:
    state = {"model": {"w": torch.arange(6.0).view(2, 3)}, "lr": 0.5}
    save_alone(tmp_path / "a", state)
    saved = SavedFolder(tmp_path / "a")
    saved.verify()
    assert saved.tensors["model.w"].shape == (2, 3)
    room: dict[str, Any] = {"model": {"w": torch.zeros(2, 3, dtype=torch.float64)}, "lr": None}
    saved.read(room)
    assert torch.equal(room["model"]["w"], state["model"]["w"].double())
    assert room["lr"] == 0.5
    assert saved.read_meta() == {"epoch": 3}
    with pytest.raises(CheckpointError, match=r"lacks model\.x"):
        saved.read({"model": {"x": torch.zeros(1)}})


def save_alone(path: Path, state: dict[str, Any]) -> None:
    import io

    from lightning_moe.checkpoint.damage import Ranks
    from lightning_moe.checkpoint.folder import Origin, write_folder
    from lightning_moe.checkpoint.in_place import Unfinished

    meta = io.BytesIO()
    torch.save({"epoch": 3}, meta)
    unfinished = Unfinished(path)
    write_folder(unfinished.path, state, meta.getvalue(), Origin("Model", {}), Ranks(), unfinished)
    unfinished.put_in_place()


def test_every_flipped_byte_is_found(tmp_path: Path) -> None:
    save_alone(tmp_path / "a", {"model": {"w": torch.arange(4.0)}, "lr": 0.5})
    for file in sorted((tmp_path / "a").iterdir()):
        content = file.read_bytes()
        for place in range(0, len(content), max(1, len(content) // 150)):
            flip(file, place)
            with pytest.raises(CheckpointError, match=file.name.replace(".", r"\.")):
                SavedFolder(tmp_path / "a").verify()
            file.write_bytes(content)
    SavedFolder(tmp_path / "a").verify()


# Saving where it cannot


def save_badly(folder: Path) -> dict[str, tuple[str, str]]:
    rank, world = rank_and_world()
    found: dict[str, tuple[str, str]] = {}
    for kind, distributed in (("folder", True), ("file", False)):
        trainer = stepping_trainer(None, world, max_steps=1, save_distributed_checkpoint=distributed)
        module = Stepping(hidden=4096)
        trainer.fit(module)
        kept = folder / f"{kind}.ckpt"
        trainer.save_checkpoint(kept)

        def attempt(name: str, path: Path, kind: str = kind, trainer: pl.Trainer = trainer) -> None:
            try:
                trainer.save_checkpoint(path)
                found[f"{kind} {name}"] = ("nothing", "")
            except Exception as error:
                found[f"{kind} {name}"] = (type(error).__name__, str(error))

        # A disk that is full on one rank: the system's own error when a file grows over the limit.
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        if rank == world - 1 or not distributed:
            resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
        attempt("full", kept)
        trainer.strategy.barrier()
        assert not Path(f"{kept}.partial").exists(), "what was written in vain still takes up the space"
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        if os.geteuid() == 0:
            os.seteuid(65534)
        attempt("not allowed", folder / "closed" / f"{kind}.ckpt")
        if os.getuid() == 0:
            os.seteuid(0)
        attempt("users", folder / "users")
        attempt("pipe", folder / "pipe")
        attempt("under a file", folder / "text" / "a.ckpt")
        attempt("in the way", folder / "taken.ckpt")
        trainer.strategy.barrier()
        trainer.strategy.load_checkpoint(kept)
        module.check(1)
    return found


def test_a_save_that_cannot_be_made_leaves_everything_as_it_was(tmp_path_factory: pytest.TempPathFactory) -> None:
    import tempfile

    folder = Path(tempfile.mkdtemp(prefix="saves-"))  # others must be able to enter it
    try:
        folder.chmod(0o755)
        (folder / "closed").mkdir(mode=0o555)
        (folder / "users").mkdir()
        (folder / "users" / "thesis.tex").write_text("years of work")
        os.mkfifo(folder / "pipe")
        (folder / "text").write_text("")
        (folder / "taken.ckpt.partial").mkdir()
        (folder / "taken.ckpt.partial" / "download.bin").write_text("half of it")
        words = {
            "full": ["File too large"],
            "not allowed": ["Permission denied", "closed"],
            "users": ["users is a folder, but no checkpoint", "thesis.tex"],
            "pipe": ["neither a file nor a folder"],
            "under a file": ["text"],
            "in the way": ["taken.ckpt.partial is in the way"],
        }
        for errors in run_ranks(save_badly, 2, folder, timeout=120):
            for kind in ("folder", "file"):
                for name, expected in words.items():
                    message = errors[f"{kind} {name}"][1]
                    assert all(word in message for word in expected), f"{kind} {name}: {errors[f'{kind} {name}']}"
        assert (folder / "users" / "thesis.tex").read_text() == "years of work"
        assert (folder / "taken.ckpt.partial" / "download.bin").exists()
        names = {path.name for path in folder.iterdir()}
        assert names == {"closed", "users", "pipe", "text", "taken.ckpt.partial", "folder.ckpt", "file.ckpt"}
    finally:
        shutil.rmtree(folder)


class Hyper(Stepping):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.save_hyperparameters()


def test_hyperparameters_that_cannot_be_read_again_are_told_at_the_save(tmp_path: Path) -> None:
    trainer = stepping_trainer(None, 1, max_steps=1)
    trainer.fit(Hyper(Secret()))
    with pytest.warns(UserWarning, match=r"cannot be loaded as it is.*test_damage\.Secret.*add_safe_globals"):
        trainer.save_checkpoint(tmp_path / "a.ckpt")
    with torch.serialization.safe_globals([Secret]):
        trainer.strategy.load_checkpoint(tmp_path / "a.ckpt")
    trainer = stepping_trainer(None, 1, max_steps=1)
    trainer.fit(Hyper({"folder": tmp_path, "sizes": (1, 2)}))
    trainer.save_checkpoint(tmp_path / "b.ckpt")
    loaded = trainer.strategy.load_checkpoint(tmp_path / "b.ckpt")
    assert loaded["hyper_parameters"]["value"] == {"folder": tmp_path, "sizes": (1, 2)}
