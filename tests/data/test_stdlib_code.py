import sysconfig
from pathlib import Path

import pytest
import torch

from lightning_moe.data import ResumableLoader, StdlibCode


def loaded(**options):
    data = StdlibCode(**options)
    data.setup("fit")
    return data


def text(dataset):
    return bytes(dataset.tokens.tolist())


def test_files_are_the_sorted_sources_of_the_standard_library():
    files = StdlibCode().files()
    root = Path(sysconfig.get_paths()["stdlib"])
    relative = [file.relative_to(root).as_posix() for file in files]
    assert relative == sorted(relative)
    assert {"argparse.py", "json/decoder.py", "asyncio/tasks.py"} <= set(relative)
    assert all(file.suffix == ".py" for file in files)
    parts = {part for name in relative for part in name.split("/")[:-1]}
    assert not parts & {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


def test_the_librarys_own_tests_are_an_option():
    assert set(StdlibCode(include_tests=True).files()) >= set(StdlibCode().files())


def test_everything_is_there_once_and_training_and_validation_share_no_file():
    data = loaded()
    train, val = data._datasets
    documents = {side: text(part).split(b"\0") for side, part in (("train", train), ("val", val))}
    assert documents["train"].pop() == documents["val"].pop() == b""  # every document ends with a zero byte
    sources = sorted(file.read_bytes() for file in data.files())
    joined = b"\0".join(source for source in sources)
    assert sum(map(len, documents["train"] + documents["val"])) <= len(joined)
    assert sorted(documents["train"] + documents["val"]) == sorted(
        part for source in sources for part in source.split(b"\0")
    )
    argparse = (Path(sysconfig.get_paths()["stdlib"]) / "argparse.py").read_bytes()
    assert (argparse in documents["train"]) != (argparse in documents["val"])
    share = len(val.tokens) / (len(val.tokens) + len(train.tokens))
    assert 0.015 < share < 0.025


def test_validation_is_the_same_for_the_same_seed_only():
    first, again, other = (loaded(max_bytes=300_000, seed=seed)._datasets[1] for seed in (0, 0, 1))
    assert torch.equal(first.tokens, again.tokens)
    assert not torch.equal(first.tokens, other.tokens)


def test_max_bytes_is_kept_to():
    data = loaded(max_bytes=100_000, val_fraction=0.1)
    train, val = data._datasets
    together = text(train) + text(val)
    assert len(together) - together.count(b"\0") == 100_000
    assert 0 < len(val.tokens) < len(train.tokens)


def test_batches():
    data = loaded(sequence_length=32, batch_size=3, max_bytes=100_000)
    assert data.vocab_size == 256
    assert isinstance(data.train_dataloader(), ResumableLoader)
    for loader in (data.train_dataloader(), data.val_dataloader()):
        batch = next(iter(loader))
        assert batch["input_ids"].shape == batch["labels"].shape == (3, 32)
        assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64
        assert torch.equal(batch["input_ids"][:, 1:], batch["labels"][:, :-1])
        assert 0 <= int(batch["input_ids"].min()) <= int(batch["labels"].max()) < 256


def test_a_small_part_is_enough_for_the_default_options():
    data = loaded(max_bytes=200_000)
    assert len(data.val_dataloader()) > 0
    assert len(data.train_dataloader()) > 50


def test_no_validation():
    data = loaded(max_bytes=50_000, val_fraction=0)
    assert data.val_dataloader() == []
    assert len(text(data._datasets[0])) > 50_000


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"max_bytes": 0}, "max_bytes=0; it has to be 1 or more"),
        ({"sequence_length": 0}, "sequence_length=0"),
        ({"batch_size": -1}, "batch_size=-1"),
    ],
)
def test_options_out_of_range(options, named):
    with pytest.raises(ValueError, match=named):
        StdlibCode(**options)


def test_too_few_bytes():
    with pytest.raises(ValueError, match=r"val_fraction=0\.02.*Raise max_bytes"):
        loaded(max_bytes=100)  # one file, cut
    with pytest.raises(ValueError, match="sequence_length=1000 needs at least 1001 tokens"):
        loaded(max_bytes=100, sequence_length=1000, val_fraction=0)


def test_a_python_without_sources(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(FileNotFoundError, match=r"no \.py files"):
        StdlibCode().files()
