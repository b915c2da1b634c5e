"""Language modelling on text that every machine with Python has: the source code of its standard library."""

import os
import sysconfig
from pathlib import Path

import numpy as np
import torch
from typing_extensions import override

from lightning_moe.data.packing import PackedTokens
from lightning_moe.data.token_data_module import TokenDataModule, split_documents

_NEVER = frozenset({"site-packages", "dist-packages", "__pycache__"})
_TESTS = frozenset({"test", "tests", "idle_test"})


class StdlibCode(TokenDataModule):
    """Bytes of the running Python's own standard library, about ten million; nothing is downloaded.

    A token is a byte (vocabulary 256), a document is a ``.py`` file, and a zero byte ends each document.
    Another Python version is another data set.

    Args:
        sequence_length: Tokens of a window.
        batch_size: Windows of a batch, on each rank.
        val_fraction: Share of the bytes to validate on, in whole files, at least one; 0 for no validation.
        seed: Draws the files to validate on and the order of every epoch; 0 or more.
        num_workers: Processes that read ahead, on each rank; 0 reads in the training process.
        max_bytes: Take whole files, drawn by the seed, until there are this many bytes, and cut the last one; default:
            everything.
        include_tests: Whether the library's own tests are part of it, which are more than half of it where a Python
            has them.

    Raises:
        ValueError: If an option is out of its range.
    """

    def __init__(
        self,
        sequence_length: int = 256,
        batch_size: int = 8,
        val_fraction: float = 0.02,
        seed: int = 0,
        num_workers: int = 0,
        max_bytes: int | None = None,
        include_tests: bool = False,
    ) -> None:
        super().__init__(sequence_length, batch_size, val_fraction, seed, num_workers)
        if max_bytes is not None and max_bytes < 1:
            raise ValueError(f"max_bytes={max_bytes}; it has to be 1 or more, or left out for everything")
        self.max_bytes = max_bytes
        self.include_tests = include_tests

    @property
    @override
    def vocab_size(self) -> int:
        return 256

    @override
    def load_datasets(self) -> tuple[PackedTokens, PackedTokens | None]:
        documents = self._read()
        advice = "Raise max_bytes, or set val_fraction to 0 for no validation"
        validation = split_documents([len(text) for text in documents], self.val_fraction, self.seed, advice)
        train = _join([text for text, held_out in zip(documents, validation, strict=True) if not held_out])
        packed = PackedTokens(train, self.sequence_length)
        if not validation.any():
            return packed, None
        held_out = _join([text for text, held_out in zip(documents, validation, strict=True) if held_out])
        self.check_validation_tokens(len(held_out))
        return packed, PackedTokens(held_out, self.sequence_length)

    def files(self) -> list[Path]:
        """The files of the standard library that make up the data, in the order of their relative paths."""
        root = Path(sysconfig.get_paths()["stdlib"])
        skipped = _NEVER if self.include_tests else _NEVER | _TESTS
        found = []
        for folder, folders, names in os.walk(root):
            folders[:] = [name for name in folders if name not in skipped]
            found += [Path(folder, name) for name in names if name.endswith(".py")]
        if not found:
            raise FileNotFoundError(
                f"no .py files in {root}: this Python has no source code of its standard library. Use TextData instead"
            )
        return sorted(found, key=lambda path: path.relative_to(root).as_posix())

    def _read(self) -> list[bytes]:
        files = self.files()
        if self.max_bytes is None:
            return [path.read_bytes() for path in files]
        documents, left = [], self.max_bytes
        for index in np.random.default_rng(self.seed).permutation(len(files)):
            text = files[index].read_bytes()[:left]
            documents.append(text)
            left -= len(text)
            if left == 0:
                break
        return documents


def _join(documents: list[bytes]) -> torch.Tensor:
    joined = b"".join(text + b"\0" for text in documents)
    return torch.frombuffer(bytearray(joined), dtype=torch.uint8)
