"""Text to token ids: bytes, a Transformers tokenizer, or a ``tokenizer.json``, behind one face."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from typing_extensions import override

from lightning_moe.optional import require

_ALLOWED = "'bytes', the folder of a Transformers tokenizer, or a tokenizer.json file"


class Encoder(Protocol):
    """Turns documents into token ids.

    Attributes:
        vocab_size: One more than the largest id.
        separator: The id that ends each document.
        dtype: The smallest dtype of :class:`lightning_moe.data.PackedTokens` that holds every id.
    """

    vocab_size: int
    separator: int
    dtype: type[np.integer]

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text, shape ``[n]`` and this encoder's dtype, without the separator."""
        ...


class ByteEncoder(Encoder):
    """UTF-8 bytes, ended by a zero byte."""

    vocab_size = 256
    separator = 0
    dtype = np.uint8

    @override
    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode("utf-8"), dtype=np.uint8) for text in texts]


class TransformersEncoder(Encoder):
    """A tokenizer of Hugging Face Transformers from a local folder.

    Args:
        folder: What ``save_pretrained`` of the tokenizer wrote.
        separator_token: Ends each document; default: the tokenizer's end-of-sequence token.

    Raises:
        ModuleNotFoundError: If Transformers is not installed.
        ValueError: If the folder cannot be read, or there is no separator.
    """

    dtype = np.int32

    def __init__(self, folder: Path, separator_token: str | None) -> None:
        transformers = require("transformers", f"TextData(tokenizer={str(folder)!r})")
        try:
            self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except Exception as error:
            raise ValueError(
                f"tokenizer={str(folder)!r} could not be read by transformers.AutoTokenizer ({error}). "
                f"Allowed: {_ALLOWED}"
            ) from error
        vocabulary = self._tokenizer.get_vocab()
        self.vocab_size = max(vocabulary.values()) + 1
        self.separator = _separator(str(folder), vocabulary, separator_token, self._tokenizer.eos_token_id)

    @override
    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        ids = self._tokenizer(
            list(texts),
            add_special_tokens=False,
            truncation=False,
            padding=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )["input_ids"]
        return [np.asarray(document, dtype=self.dtype) for document in ids]


class TokenizersEncoder(Encoder):
    """A ``tokenizer.json`` of the ``tokenizers`` library.

    Args:
        file: The file.
        separator_token: Ends each document; such a file does not say which token does.

    Raises:
        ModuleNotFoundError: If tokenizers is not installed.
        ValueError: If the file cannot be read, or there is no separator.
    """

    dtype = np.int32

    def __init__(self, file: Path, separator_token: str | None) -> None:
        tokenizers = require("tokenizers", f"TextData(tokenizer={str(file)!r})")
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:
            raise ValueError(
                f"tokenizer={str(file)!r} could not be read by the tokenizers library ({error}). Allowed: {_ALLOWED}"
            ) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary = self._tokenizer.get_vocab()
        self.vocab_size = max(vocabulary.values()) + 1
        self.separator = _separator(str(file), vocabulary, separator_token, None)

    @override
    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        encoded = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [np.asarray(document.ids, dtype=self.dtype) for document in encoded]


def load_encoder(tokenizer: str, separator_token: str | None) -> Encoder:
    """Load what the options ``tokenizer`` and ``separator_token`` of ``TextData`` name.

    Args:
        tokenizer: ``"bytes"``, a folder or a ``.json`` file.
        separator_token: The token that ends each document; default: the end-of-sequence token.

    Raises:
        FileNotFoundError: If ``tokenizer`` is neither ``"bytes"`` nor a path that exists.
        ModuleNotFoundError: If the package that reads it is not installed.
        ValueError: If it cannot be read, has no separator, or bytes are given one.
    """
    if tokenizer == "bytes":
        if separator_token is not None:
            raise ValueError(
                f"separator_token={separator_token!r} with tokenizer='bytes': bytes are always ended by a zero byte. "
                "Leave separator_token out"
            )
        return ByteEncoder()
    path = Path(tokenizer).expanduser()
    if not path.exists():
        raise FileNotFoundError(f"tokenizer={tokenizer!r} does not exist. Allowed: {_ALLOWED}")
    if path.is_file() and path.suffix != ".json":
        raise ValueError(f"tokenizer={tokenizer!r} is a file that does not end in .json. Allowed: {_ALLOWED}")
    return TransformersEncoder(path, separator_token) if path.is_dir() else TokenizersEncoder(path, separator_token)


def _separator(name: str, vocabulary: dict[str, int], token: str | None, default: int | None) -> int:
    if token is not None:
        if token not in vocabulary:
            raise ValueError(
                f"separator_token={token!r} is not one of the {len(vocabulary)} tokens of tokenizer={name!r}. "
                "Give a token of its vocabulary, spelt as there"
            )
        return vocabulary[token]
    if default is None:
        raise ValueError(
            f"tokenizer={name!r} has no end-of-sequence token to put between documents. Set separator_token to a token "
            "of its vocabulary"
        )
    return default
