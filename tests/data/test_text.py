import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer

from lightning_moe.data import TextData
from lightning_moe.data.text import find_files
from tests.harness import ROOT, in_subprocess, run_ranks

DOCUMENTS = [f"document {number}: " + "the quick brown fox, naïve café ☃. " * (2 + number % 3) for number in range(24)]


@pytest.fixture
def corpus(tmp_path):
    """A function that writes the documents in a format and returns their path."""

    def write(kind, documents=DOCUMENTS, name="corpus", column="text"):
        folder = tmp_path / name
        folder.mkdir()
        if kind == "txt":
            for number, document in enumerate(documents):
                (folder / f"{number:03}.txt").write_text(document, encoding="utf-8")
        elif kind == "jsonl":
            lines = [json.dumps({"id": number, column: document}) for number, document in enumerate(documents)]
            (folder / "part.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        else:
            datasets = pytest.importorskip("datasets")
            datasets.Dataset.from_dict({column: list(documents)}).to_parquet(str(folder / "part.parquet"))
        return str(folder)

    return write


@pytest.fixture
def make(tmp_path):
    """A function that makes the data module, with a cache of the test's own."""

    def make(path, prepare=True, **options):
        options = {"sequence_length": 16, "batch_size": 2, "val_fraction": 0.2, **options}
        data = TextData(path, cache_dir=str(tmp_path / "cache"), **options)
        if prepare:
            data.prepare_data()
            data.setup("fit")
        return data

    return make


@pytest.fixture
def tokenizer_file(tmp_path):
    """A small byte-pair tokenizer of the tokenizers library, with a token to end documents."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<end>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(DOCUMENTS, trainer)
    tokenizer.enable_truncation(4)  # has to be switched off again: documents are not cut
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path / "tokenizer.json")


@pytest.fixture
def tokenizer_folder(tmp_path, tokenizer_file):
    """A function that saves that tokenizer as one of Transformers."""
    transformers = pytest.importorskip("transformers")

    def save(**tokens):
        folder = tmp_path / f"tokenizer-{len(tokens)}"
        transformers.PreTrainedTokenizerFast(tokenizer_file=tokenizer_file, **tokens).save_pretrained(folder)
        return str(folder)

    return save


def streams(data):
    train, val = data._datasets
    return train.tokens.tolist(), val.tokens.tolist() if val else []


def byte_documents(stream):
    parts = bytes(stream).split(b"\0")
    assert parts.pop() == b""
    return [part.decode("utf-8") for part in parts]


def all_documents(data):
    return sorted(document for stream in streams(data) for document in byte_documents(stream))


# ---------------------------------------------------------------------------------------------- formats


@pytest.mark.parametrize("kind", ["txt", "jsonl", "parquet"])
def test_every_format_gives_every_document_once(corpus, make, kind):
    data = make(corpus(kind))
    train, val = map(byte_documents, streams(data))
    assert sorted(train + val) == sorted(DOCUMENTS)
    assert not set(train) & set(val)
    assert len(val) >= 2
    assert data.vocab_size == 256
    assert data._datasets[0].tokens.dtype == torch.uint8


def test_formats_are_split_alike(corpus, make):
    splits = [streams(make(corpus(kind, name=kind))) for kind in ("txt", "jsonl", "parquet")]
    assert splits[0] == splits[1] == splits[2]


def test_batches(corpus, make):
    data = make(corpus("jsonl"))
    train, _ = streams(data)
    assert data._datasets[0][1]["input_ids"].tolist() == train[16:32]
    assert data._datasets[0][1]["labels"].tolist() == train[17:33]
    for loader in (data.train_dataloader(), data.val_dataloader()):
        batch = next(iter(loader))
        assert batch["input_ids"].shape == batch["labels"].shape == (2, 16)
        assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64


@pytest.mark.parametrize(
    ("sample_by", "expected"),
    [
        ("document", ["one\ntwo\n\nthree\n"]),
        ("paragraph", ["one\ntwo", "three"]),
        ("line", ["one", "two", "three"]),
    ],
)
def test_what_a_document_of_a_text_file_is(tmp_path, make, sample_by, expected):
    file = tmp_path / "book.txt"
    file.write_text("one\ntwo\n\nthree\n")
    data = make(str(file), sample_by=sample_by, sequence_length=2, val_fraction=0)
    assert [document.strip("\n") for document in byte_documents(streams(data)[0])] == [
        document.strip("\n") for document in expected
    ]


def test_another_column(corpus, make):
    data = make(corpus("jsonl", column="body"), text_column="body")
    assert all_documents(data) == sorted(DOCUMENTS)


@pytest.mark.parametrize("val_fraction", [0.2, 0])
def test_files_to_validate_on(corpus, make, val_fraction):
    others = [document.upper() for document in DOCUMENTS[:5]]
    data = make(corpus("jsonl"), val_path=corpus("parquet", others, "others"), val_fraction=val_fraction)
    train, val = map(byte_documents, streams(data))
    assert train == DOCUMENTS
    assert val == others


def test_no_validation(corpus, make):
    data = make(corpus("jsonl"), val_fraction=0)
    assert byte_documents(streams(data)[0]) == DOCUMENTS
    assert data.val_dataloader() == []


def test_seed_draws_the_documents_to_validate_on(corpus, make):
    path = corpus("jsonl")
    splits = [streams(make(path, seed=seed)) for seed in (0, 0, 1)]
    assert splits[0] == splits[1] != splits[2]


# ---------------------------------------------------------------------------------------------- tokenizers


def check_tokens(data, tokenizer_file, end):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(tokenizer_file)
    tokenizer.no_truncation()
    documents = []
    for stream in streams(data):
        assert stream[-1] == end
        text = tokenizer.decode(stream, skip_special_tokens=False)
        documents += text.split("<end>")[:-1]
    assert sorted(documents) == sorted(DOCUMENTS)
    assert data._datasets[0].tokens.dtype == torch.int32
    assert data.vocab_size == tokenizer.get_vocab_size() == 300
    length = sum(len(tokenizer.encode(document).ids) + 1 for document in DOCUMENTS)
    assert sum(map(len, streams(data))) == length


def test_tokenizer_json(corpus, make, tokenizer_file):
    data = make(corpus("jsonl"), tokenizer=tokenizer_file, separator_token="<end>")
    check_tokens(data, tokenizer_file, end=0)


def test_folder_of_a_transformers_tokenizer(corpus, make, tokenizer_file, tokenizer_folder):
    data = make(corpus("txt"), tokenizer=tokenizer_folder(eos_token="<end>"))
    check_tokens(data, tokenizer_file, end=0)


def test_separator_of_a_transformers_tokenizer(corpus, make, tokenizer_file, tokenizer_folder):
    data = make(corpus("txt"), tokenizer=tokenizer_folder(), separator_token="<end>")
    check_tokens(data, tokenizer_file, end=0)
    other = make(corpus("txt", name="other"), tokenizer=tokenizer_folder(), separator_token="!")
    assert streams(other)[0][-1] == other.encoder.separator != 0


def test_tokenizer_without_an_end(tokenizer_file, tokenizer_folder, corpus, make):
    path = corpus("jsonl")
    for tokenizer in (tokenizer_file, tokenizer_folder()):
        with pytest.raises(ValueError, match=r"has no end-of-sequence token.*Set separator_token"):
            make(path, tokenizer=tokenizer)
        with pytest.raises(ValueError, match=r"separator_token='<stop>' is not one of the 300 tokens"):
            make(path, tokenizer=tokenizer, separator_token="<stop>")


def test_bad_tokenizers(tmp_path, corpus, make):
    path = corpus("jsonl")
    with pytest.raises(FileNotFoundError, match=r"tokenizer='gpt2' does not exist\. Allowed: 'bytes', the folder"):
        make(path, tokenizer="gpt2")
    (tmp_path / "vocab.model").write_text("")
    with pytest.raises(ValueError, match=r"vocab\.model' is a file that does not end in \.json"):
        make(path, tokenizer=str(tmp_path / "vocab.model"))
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(ValueError, match=r"broken\.json' could not be read by the tokenizers library"):
        make(path, tokenizer=str(tmp_path / "broken.json"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty' could not be read by transformers"):
        make(path, tokenizer=str(tmp_path / "empty"))
    with pytest.raises(ValueError, match="bytes are always ended by a zero byte"):
        make(path, separator_token="<end>")


# ---------------------------------------------------------------------------------------------- paths


def test_files_of_a_folder_a_pattern_and_a_list(tmp_path):
    for name in ("b.txt", "a.txt", "deep/c.txt", "deep/notes.md", "odd[1].txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)

    def names(value):
        return [file.relative_to(tmp_path).as_posix() for file in find_files("path", value)]

    assert names(str(tmp_path)) == ["a.txt", "b.txt", "deep/c.txt", "odd[1].txt"]
    assert names(str(tmp_path / "*.txt")) == ["a.txt", "b.txt", "odd[1].txt"]
    assert names(str(tmp_path / "**" / "*.txt")) == ["a.txt", "b.txt", "deep/c.txt", "odd[1].txt"]
    assert names([str(tmp_path / "b.txt"), str(tmp_path / "a.txt")]) == ["b.txt", "a.txt"]
    assert names([str(tmp_path / "b.txt"), str(tmp_path)]) == ["b.txt", "a.txt", "deep/c.txt", "odd[1].txt"]
    assert names(str(tmp_path / "odd[1].txt")) == ["odd[1].txt"]


def test_names_that_look_like_patterns_are_read(tmp_path, make):
    folder = tmp_path / ".hidden" / "odd[1]*"
    folder.mkdir(parents=True)
    (folder / "what?.txt").write_text("some text")
    (folder / "link.txt").symlink_to(folder / "what?.txt")
    data = make([str(folder / "what?.txt"), str(folder / "link.txt")], val_fraction=0, sequence_length=4)
    assert byte_documents(streams(data)[0]) == ["some text", "some text"]


@pytest.mark.parametrize("option", ["path", "val_path"])
def test_missing_path(tmp_path, corpus, make, option):
    missing = str(tmp_path / "missing.txt")
    expected = rf"{option}='.*missing\.txt' does not exist\. Allowed: an existing file, folder or glob pattern"
    with pytest.raises(FileNotFoundError, match=expected):
        TextData(**{"path": corpus("jsonl"), option: missing})
    with pytest.raises(FileNotFoundError, match="names no file"):
        TextData(**{"path": corpus("jsonl", name="again"), option: []})


def test_kinds_of_files(tmp_path, corpus):
    (tmp_path / "notes.md").write_text("text")
    with pytest.raises(ValueError, match=r"unknown extension '\.md'\. Allowed: \.txt, \.jsonl, \.json, \.parquet"):
        TextData(str(tmp_path / "notes.md"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"is a folder without \.txt, \.jsonl"):
        TextData(str(tmp_path / "empty"))
    with pytest.raises(ValueError, match=r"several kinds: \.jsonl, \.txt"):
        TextData([corpus("txt", name="texts"), corpus("jsonl", name="rows")])


def test_validating_on_training_files_is_an_error(corpus):
    path = corpus("txt")
    with pytest.raises(ValueError, match=r"val_path=.*share .*003\.txt"):
        TextData(path, val_path=str(Path(path) / "003.txt"))


# ---------------------------------------------------------------------------------------------- content


def test_a_column_that_is_not_there(corpus, make):
    with pytest.raises(ValueError, match=r"text_column='content' is not a column of path=.*there are: id, text"):
        make(corpus("jsonl"), text_column="content")


def test_a_column_that_is_no_text(corpus, make):
    with pytest.raises(ValueError, match=r"text_column='id' of path holds int64; it has to hold strings"):
        make(corpus("jsonl"), text_column="id")


def test_a_row_without_text(corpus, make):
    with pytest.raises(ValueError, match=r"row 2 of path=.* has no text in text_column='text'"):
        make(corpus("jsonl", ["a", "b", None, "c"]))


def test_files_that_cannot_be_read(tmp_path, make):
    (tmp_path / "bad.jsonl").write_text("{not json")
    with pytest.raises(ValueError, match=r"path='.*bad\.jsonl': the datasets package could not read"):
        make(str(tmp_path / "bad.jsonl"))
    (tmp_path / "latin.txt").write_bytes("naïve".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin\.txt'.*UnicodeDecodeError.*Allowed: UTF-8"):
        make(str(tmp_path / "latin.txt"))


def test_one_document_cannot_be_split(tmp_path, make):
    (tmp_path / "book.txt").write_text("words " * 1000)
    with pytest.raises(ValueError, match=r"val_fraction=0\.2.*there is one in all.*val_path.*sample_by='paragraph'"):
        make(str(tmp_path / "book.txt"))


def test_empty_documents_leave_no_separator(corpus, make):
    data = make(corpus("jsonl", ["some text", "", "more text"]), val_fraction=0, sequence_length=4)
    assert byte_documents(streams(data)[0]) == ["some text", "more text"]


def test_too_little_text(corpus, make):
    others = corpus("jsonl", ["short"], name="others")
    with pytest.raises(ValueError, match=r"sequence_length=16 needs at least 17 tokens.*there are 6"):
        make(others, val_fraction=0)
    with pytest.raises(ValueError, match=r"val_path='.*others' leaves 6 tokens to validate on, fewer than the 17"):
        make(corpus("jsonl"), val_path=others)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"sample_by": "word"}, "sample_by='word'; allowed: 'document', 'paragraph', 'line'"),
        ({"sample_by": "line"}, r"sample_by='line' is for \.txt files"),
        ({"batch_size": 0}, "batch_size=0"),
    ],
)
def test_options_out_of_range(corpus, options, named):
    with pytest.raises(ValueError, match=named):
        TextData(corpus("jsonl"), **options)


def test_text_files_have_no_columns(corpus):
    with pytest.raises(ValueError, match="text_column='body' is for files with columns"):
        TextData(corpus("txt"), text_column="body")


# ---------------------------------------------------------------------------------------------- cache


def test_text_is_tokenized_once(corpus, make):
    path = corpus("jsonl")
    first = make(path)
    files = {file: file.stat().st_mtime_ns for file in first.cache_dir.rglob("*.npy")}
    assert sorted(file.name for file in files) == ["train.npy", "val.npy"]
    second = make(path, batch_size=1, sequence_length=8)
    assert {file: file.stat().st_mtime_ns for file in first.cache_dir.rglob("*.npy")} == files
    assert streams(second) == streams(first)
    assert [entry.name for entry in first.cache_dir.iterdir()] == [first.cache_entry.name]
    assert not list(first.cache_dir.rglob("*.arrow"))


def test_what_changes_the_tokens_is_tokenized_again(corpus, make, tokenizer_file):
    path = corpus("jsonl")
    variants = [
        make(path),
        make(path, seed=1),
        make(path, val_fraction=0.4),
        make(path, tokenizer=tokenizer_file, separator_token="<end>"),
        make(path, tokenizer=tokenizer_file, separator_token="!"),
    ]
    assert len({data.cache_entry for data in variants}) == len(variants)
    file = Path(path) / "part.jsonl"
    before = file.stat()
    file.write_text(file.read_text().replace("quick", "sloth"))  # as long as before
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert "sloth" in bytes(streams(make(path))[0]).decode()


def test_a_run_that_is_cut_off_leaves_nothing_that_counts(corpus, make, monkeypatch):
    path = corpus("jsonl")
    data = make(path, prepare=False)
    encode, calls = data.encoder.encode, []

    def fail(texts):
        if calls:
            raise KeyboardInterrupt
        calls.append(texts)
        return encode(texts)

    monkeypatch.setattr(data.encoder, "encode", fail)
    monkeypatch.setattr("lightning_moe.data.text._ROWS", 4)
    with pytest.raises(KeyboardInterrupt):
        data.prepare_data()
    assert list(data.cache_dir.iterdir()) == []
    with pytest.raises(RuntimeError, match=r"is not tokenized in .*cache: call prepare_data\(\) first"):
        data.setup("fit")
    assert all_documents(make(path)) == sorted(DOCUMENTS)


def test_default_cache_is_the_users(corpus, monkeypatch, tmp_path):
    path = corpus("jsonl")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert TextData(path).cache_dir == tmp_path / "xdg" / "lightning_moe"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert TextData(path).cache_dir == tmp_path / "home" / ".cache" / "lightning_moe"


def test_datasets_is_asked_for_by_name(corpus, make, monkeypatch):
    import lightning_moe.data.text as module

    def missing(name, purpose):
        raise ModuleNotFoundError(f"{purpose} needs the package {name!r}")

    monkeypatch.setattr(module, "require", missing)
    with pytest.raises(ModuleNotFoundError, match="TextData needs the package 'datasets'"):
        make(corpus("jsonl"))


def test_importing_the_package_does_not_import_datasets():
    done = in_subprocess(
        [sys.executable, "-c", "import sys, lightning_moe.data; print('datasets' in sys.modules)"], cwd=ROOT
    )
    assert done.stdout.strip() == "False", done.stderr


# ---------------------------------------------------------------------------------------------- training


class Recorder(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.rows = []

    def training_step(self, batch, batch_idx):
        self.rows.append(batch["input_ids"].tolist())
        return self.layer(torch.ones(1, 1)).mean()

    def validation_step(self, batch, batch_idx):
        return None

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _fit(path, cache, strategy, devices, batch_size, ckpt_path=None, **options):
    trainer = Trainer(
        accelerator="cpu",
        strategy=strategy,
        devices=devices,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    module = Recorder()
    data = TextData(path, sequence_length=16, batch_size=batch_size, val_fraction=0.2, cache_dir=cache)
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
    return module.rows, trainer


def _fit_and_save(path, cache, checkpoint):
    rows, trainer = _fit(path, cache, "ddp", 2, 2, max_steps=5)
    trainer.save_checkpoint(checkpoint)
    return rows


def test_two_ranks_read_different_text_and_one_continues(corpus, tmp_path):
    path, cache = corpus("jsonl"), str(tmp_path / "cache")
    ranks = run_ranks(_fit_and_save, 2, path, cache, str(tmp_path / "saved.ckpt"))
    assert [len(rows) for rows in ranks] == [5, 5]
    alone, _ = _fit(path, cache, "auto", 1, 4, max_steps=12)
    for step in range(5):
        assert sorted(ranks[0][step] + ranks[1][step]) == sorted(alone[step])
    resumed, _ = _fit(path, cache, "auto", 1, 4, max_steps=12, ckpt_path=str(tmp_path / "saved.ckpt"))
    assert resumed == alone[5:]
    seen = [tuple(row) for rows in alone for row in rows]
    assert len(np.unique(np.asarray(seen), axis=0)) > len(seen) // 2
