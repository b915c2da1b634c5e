"""Language modelling on the user's own text files."""

import glob
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Literal

import numpy as np
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from lightning_moe.data.packing import PackedTokens
from lightning_moe.data.token_cache import (
    TokenWriter,
    cache_key,
    create_entry,
    default_cache_dir,
    file_facts,
    token_count,
)
from lightning_moe.data.token_data_module import TokenDataModule, split_documents
from lightning_moe.data.tokenizer import load_encoder
from lightning_moe.optional import require

_KINDS = {".txt": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}
_FORMAT = 1
_ROWS = 64  # rows of a batch: few, because a document may be a whole book


class TextData(TokenDataModule):
    """Text files, tokenized once into a cache and packed into windows.

    A document is a whole ``.txt`` file (see ``sample_by``) or a row of a ``.jsonl`` or ``.parquet`` file; a separator
    token ends each. Files are read by the ``datasets`` package, which has to be installed.

    Args:
        path: A file, a folder (searched through all levels), a glob pattern, or a list of these. All files have to be
            of one kind: ``.txt``, ``.jsonl``/``.json`` or ``.parquet``.
        sequence_length: Tokens of a window.
        batch_size: Windows of a batch, on each rank.
        val_fraction: Share of the text to validate on, in whole documents, at least one; 0 for no validation. Takes
            no part where ``val_path`` is given.
        val_path: Other files to validate on, in the same form as ``path``.
        seed: Draws the documents to validate on and the order of every epoch; 0 or more.
        num_workers: Processes that read ahead, on each rank; 0 reads in the training process.
        text_column: The column of ``.jsonl`` and ``.parquet`` files that holds the text.
        tokenizer: ``"bytes"`` (vocabulary 256), the local folder of a Transformers tokenizer, or a ``tokenizer.json``
            of the tokenizers library.
        separator_token: The token that ends each document; default: the tokenizer's end-of-sequence token, a zero
            byte for ``"bytes"``.
        sample_by: What a document of a ``.txt`` file is: the whole file, a paragraph (between blank lines) or a line.
        cache_dir: Where the token files are kept; default: ``lightning_moe`` in the user's cache folder.

    Raises:
        FileNotFoundError: If ``path``, ``val_path`` or ``tokenizer`` does not exist.
        ValueError: If an option is out of its range, or the files are of a kind that cannot be read.
    """

    def __init__(
        self,
        path: str | list[str],
        sequence_length: int = 256,
        batch_size: int = 8,
        val_fraction: float = 0.02,
        val_path: str | list[str] | None = None,
        seed: int = 0,
        num_workers: int = 0,
        text_column: str = "text",
        tokenizer: str = "bytes",
        separator_token: str | None = None,
        sample_by: Literal["document", "paragraph", "line"] = "document",
        cache_dir: str | None = None,
    ) -> None:
        super().__init__(sequence_length, batch_size, val_fraction, seed, num_workers)
        self.files = find_files("path", path)
        self.val_files = find_files("val_path", val_path) if val_path is not None else []
        shared = {file.resolve() for file in self.files} & {file.resolve() for file in self.val_files}
        if shared:
            raise ValueError(
                f"val_path={val_path!r} and path={path!r} share {', '.join(sorted(map(str, shared)))}. "
                "Leave these out of one of them"
            )
        if sample_by not in ("document", "paragraph", "line"):
            raise ValueError(f"sample_by={sample_by!r}; allowed: 'document', 'paragraph', 'line'")
        has_rows = _KINDS[self.files[0].suffix] != "text"
        if sample_by != "document" and has_rows:
            raise ValueError(
                f"sample_by={sample_by!r} is for .txt files; a document of {self.files[0].name} is a row. Leave it out"
            )
        if text_column != "text" and not has_rows:
            raise ValueError(
                f"text_column={text_column!r} is for files with columns; {self.files[0].name} has none. Leave it out"
            )
        self.path = path
        self.val_path = val_path
        self.text_column = text_column
        self.tokenizer = tokenizer
        self.separator_token = separator_token
        self.sample_by = sample_by
        self.cache_dir = Path(cache_dir).expanduser() if cache_dir is not None else default_cache_dir()
        self.encoder = load_encoder(tokenizer, separator_token)

    @property
    @override
    def vocab_size(self) -> int:
        return self.encoder.vocab_size

    @property
    @override
    def val_option(self) -> str:
        return super().val_option if self.val_path is None else f"val_path={self.val_path!r}"

    @property
    def cache_entry(self) -> Path:
        """The folder of the token files for these files and options."""
        tokenizer = Path(self.tokenizer).expanduser()
        parts = sorted(tokenizer.rglob("*")) if tokenizer.is_dir() else [tokenizer]
        facts = {
            "format": _FORMAT,
            "files": file_facts(self.files),
            "val_files": file_facts(self.val_files),
            "val_fraction": self.val_fraction if self.val_path is None else None,
            "seed": self.seed if self.val_path is None else None,
            "text_column": self.text_column,
            "sample_by": self.sample_by,
            "tokenizer": "bytes" if self.tokenizer == "bytes" else file_facts(part for part in parts if part.is_file()),
            "separator_token": self.separator_token,
        }
        return self.cache_dir / cache_key(facts)

    @override
    def prepare_data(self) -> None:
        create_entry(self.cache_entry, self._write)

    @override
    def load_datasets(self) -> tuple[PackedTokens, PackedTokens | None]:
        entry = self.cache_entry
        if not entry.exists():
            raise RuntimeError(
                f"path={self.path!r} is not tokenized in {self.cache_dir}: call prepare_data() first; a Trainer does. "
                "If one did, the files have changed since, or cache_dir is not the same on every node"
            )
        train = PackedTokens.from_file(entry / "train.npy", self.sequence_length)
        if not self.val_files and self.val_fraction == 0:
            return train, None
        self.check_validation_tokens(token_count(entry / "val.npy"))
        return train, PackedTokens.from_file(entry / "val.npy", self.sequence_length)

    def _write(self, folder: Path) -> None:
        """Tokenize everything into ``train.npy`` and ``val.npy``."""
        documents = self._read("path", self.files, folder / "arrow")
        sizes = self._sizes("path", documents)
        advice = "Give more documents, a val_path, val_fraction=0 for no validation"
        advice += ", or sample_by='paragraph'" if self.files[0].suffix == ".txt" else ""
        fraction = self.val_fraction if self.val_path is None else 0.0
        validation = split_documents(sizes, fraction, self.seed, advice)
        with ExitStack() as stack:
            train = stack.enter_context(closing(TokenWriter(folder / "train.npy", self.encoder.dtype)))
            val = stack.enter_context(closing(TokenWriter(folder / "val.npy", self.encoder.dtype)))
            for tokens, held_out in zip(self._encode(documents), validation, strict=True):
                (val if held_out else train).append(tokens)
            if self.val_files:
                others = self._read("val_path", self.val_files, folder / "arrow")
                self._sizes("val_path", others)
                for tokens in self._encode(others):
                    val.append(tokens)
        shutil.rmtree(folder / "arrow", ignore_errors=True)
        rank_zero_info(
            f"Tokenized {len(documents)} documents of {len(self.files)} files: {train.length} tokens to train on, "
            f"{val.length} to validate on, kept in {self.cache_dir}"
        )

    def _read(self, option: str, files: list[Path], arrow: Path) -> Any:
        """The rows of the files as a ``datasets.Dataset`` whose text column is checked."""
        datasets = require("datasets", "TextData")
        kind = _KINDS[files[0].suffix]
        options = {"sample_by": self.sample_by} if kind == "text" else {}
        names = [glob.escape(str(file)) for file in files]  # datasets takes them for patterns
        try:
            rows = datasets.load_dataset(kind, data_files=names, split="train", cache_dir=str(arrow), **options)
        except Exception as error:
            reason = error.__cause__ or error
            raise ValueError(
                f"{option}={getattr(self, option)!r}: the datasets package could not read these files as {kind} "
                f"({type(reason).__name__}: {reason}). Allowed: UTF-8 .txt, .jsonl or .json with one object a row, and "
                ".parquet, with the same columns in all files"
            ) from error
        column = "text" if kind == "text" else self.text_column
        if column not in rows.column_names:
            raise ValueError(
                f"text_column={column!r} is not a column of {option}={getattr(self, option)!r}; the columns there are: "
                f"{', '.join(rows.column_names)}"
            )
        dtype = getattr(rows.features[column], "dtype", str(rows.features[column]))
        if dtype not in ("string", "large_string"):
            raise ValueError(f"text_column={column!r} of {option} holds {dtype}; it has to hold strings")
        return rows.select_columns([column])

    def _sizes(self, option: str, rows: Any) -> list[int]:
        """The characters of each row's text.

        Raises:
            ValueError: If a row has none.
        """
        column, sizes = rows.column_names[0], list[int]()
        for batch in rows.iter(batch_size=_ROWS):
            for text in batch[column]:
                if text is None:
                    raise ValueError(
                        f"row {len(sizes)} of {option}={getattr(self, option)!r} has no text in "
                        f"text_column={column!r}. Remove such rows"
                    )
                sizes.append(len(text))
        return sizes

    def _encode(self, rows: Any) -> Iterator[np.ndarray]:
        """The tokens of each row with the separator; none for an empty row."""
        end = np.asarray([self.encoder.separator], dtype=self.encoder.dtype)
        for batch in rows.iter(batch_size=_ROWS):
            for tokens in self.encoder.encode(batch[rows.column_names[0]]):
                yield np.concatenate([tokens, end]) if len(tokens) else tokens


def find_files(option: str, value: str | list[str]) -> list[Path]:
    """The files that a path option names.

    Args:
        option: The option's name, for error messages.
        value: A file, a folder, a glob pattern, or a list of these.

    Returns:
        Absolute paths without repetition: the list's order, and sorted within a folder or pattern.

    Raises:
        FileNotFoundError: If one of them does not exist or holds no file of an allowed kind.
        ValueError: If a file is of another kind, or they are of several kinds.
    """
    values = [value] if isinstance(value, str) else list(value)
    files = [file for item in values for file in _find(option, str(item))]
    if not files:
        raise FileNotFoundError(f"{option}={value!r} names no file. Allowed: {_allowed_paths()}")
    kinds = sorted({file.suffix for file in files})
    if len({_KINDS[kind] for kind in kinds}) > 1:
        raise ValueError(
            f"{option}={value!r} holds files of several kinds: {', '.join(kinds)}. Give a pattern that leaves one "
            f"kind, for example '*{kinds[0]}'"
        )
    return list(dict.fromkeys(files))


def _find(option: str, item: str) -> list[Path]:
    path = Path(item).expanduser()
    if path.is_dir():
        found = sorted(file.absolute() for file in path.rglob("*") if file.is_file() and file.suffix in _KINDS)
        if not found:
            raise FileNotFoundError(f"{option}={item!r} is a folder without {_allowed_kinds()} files")
        return found
    if path.is_file():
        found = [path.absolute()]
    else:
        matches = glob.glob(str(path), recursive=True)
        found = sorted(Path(match).absolute() for match in matches if Path(match).is_file())
    if not found:
        raise FileNotFoundError(f"{option}={item!r} does not exist. Allowed: {_allowed_paths()}")
    for file in found:
        if file.suffix not in _KINDS:
            raise ValueError(
                f"{option}={item!r}: {file.name} has the unknown extension {file.suffix!r}. Allowed: {_allowed_kinds()}"
            )
    return found


def _allowed_kinds() -> str:
    return ", ".join(_KINDS)


def _allowed_paths() -> str:
    return f"an existing file, folder or glob pattern, or a list of these, of {_allowed_kinds()} files"
