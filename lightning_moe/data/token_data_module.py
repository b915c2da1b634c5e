"""What the data modules of packed tokens share: checks of their options, the split by document, and the loaders."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_moe.data.packing import PackedTokens, ResumableLoader, ResumableSampler


class TokenDataModule(LightningDataModule, ABC):
    """A data module over two flat streams of tokens, one to train on and one to validate on.

    Batches are dicts of ``input_ids`` and ``labels``, both ``[batch_size, sequence_length]`` int64, where a label is
    the token after its position. Every rank reads other windows, the same number of whole batches on each. Test and
    prediction read what validation reads.
    A subclass supplies the streams.

    Args:
        sequence_length: Tokens of a window.
        batch_size: Windows of a batch, on each rank.
        val_fraction: Share of the text to validate on, in whole documents, at least one; 0 for no validation.
        seed: Draws the documents to validate on and the order of every epoch; 0 or more.
        num_workers: Processes that read ahead, on each rank; 0 reads in the training process.

    Raises:
        ValueError: If an option is out of its range.
    """

    def __init__(self, sequence_length: int, batch_size: int, val_fraction: float, seed: int, num_workers: int) -> None:
        super().__init__()
        _check_at_least("sequence_length", sequence_length, 1)
        _check_at_least("batch_size", batch_size, 1)
        _check_at_least("seed", seed, 0)
        _check_at_least("num_workers", num_workers, 0)
        if not 0 <= val_fraction < 1:
            raise ValueError(f"val_fraction={val_fraction}; allowed: 0 (no validation) up to, but not including, 1")
        self.sequence_length = sequence_length
        self.batch_size = batch_size
        self.val_fraction = val_fraction
        self.seed = seed
        self.num_workers = num_workers
        self._datasets: tuple[PackedTokens, PackedTokens | None] | None = None

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """One more than the largest token id there can be."""

    @abstractmethod
    def load_datasets(self) -> tuple[PackedTokens, PackedTokens | None]:
        """Read the windows to train on and those to validate on, the latter ``None`` for no validation."""

    @property
    def val_option(self) -> str:
        """The option that decides how much there is to validate on, with its value, for error messages."""
        return f"val_fraction={self.val_fraction}"

    @override
    def setup(self, stage: str) -> None:
        if self._datasets is None:
            self._datasets = self.load_datasets()

    @override
    def train_dataloader(self) -> DataLoader:
        dataset = self._loaded()[0]
        layout = self._layout()
        self._check_step(dataset, layout, "the training data has", "Give more data")
        if self._overfits():
            return self._plain_loader(dataset)
        sampler = ResumableSampler(dataset, seed=self.seed, **layout)
        return ResumableLoader(dataset, self.batch_size, sampler, trainer=self.trainer, **self._loader_options())

    @override
    def val_dataloader(self) -> DataLoader | list[DataLoader]:
        dataset = self._loaded()[1]
        if dataset is None:
            return []
        layout = self._layout()
        self._check_step(dataset, layout, f"{self.val_option} leaves", "Hold out more text")
        if self._overfits():
            return self._plain_loader(dataset)
        sampler = ResumableSampler(dataset, shuffle=False, **layout)
        return DataLoader(dataset, self.batch_size, sampler=sampler, drop_last=True, **self._loader_options())

    @override
    def test_dataloader(self) -> DataLoader | list[DataLoader]:
        return self.val_dataloader()

    @override
    def predict_dataloader(self) -> DataLoader | list[DataLoader]:
        return self.val_dataloader()

    def check_validation_tokens(self, count: int) -> None:
        """Check that there is enough to validate on.

        Args:
            count: How many tokens there are.

        Raises:
            ValueError: If they do not fill one window.
        """
        if count < self.sequence_length + 1:
            raise ValueError(
                f"{self.val_option} leaves {count} tokens to validate on, fewer than the {self.sequence_length + 1} of "
                f"one window of sequence_length={self.sequence_length} and its last label. Hold out more text, or "
                "lower sequence_length"
            )

    def _loaded(self) -> tuple[PackedTokens, PackedTokens | None]:
        if self._datasets is None:
            raise RuntimeError(f"{type(self).__name__} has no data yet: call setup('fit') first; a Trainer does")
        return self._datasets

    def _check_step(self, dataset: PackedTokens, layout: dict[str, Any], source: str, advice: str) -> None:
        """Check that there is a batch for every rank."""
        needed = self.batch_size * layout["num_replicas"]
        if len(dataset) < needed:
            raise ValueError(
                f"{source} {len(dataset)} windows of sequence_length={self.sequence_length}, and batch_size="
                f"{self.batch_size} on {layout['num_replicas']} ranks takes {needed} windows a step. {advice}, or lower"
                " batch_size or sequence_length"
            )

    def _layout(self) -> dict[str, Any]:
        """How many ranks read different data and which of them this is, as the strategy has it."""
        kwargs = self.trainer.distributed_sampler_kwargs if self.trainer is not None else None
        return kwargs or {"num_replicas": 1, "rank": 0}

    def _overfits(self) -> bool:
        return self.trainer is not None and self.trainer.overfit_batches > 0  # type: ignore[attr-defined]

    def _plain_loader(self, dataset: PackedTokens) -> DataLoader:
        # overfit_batches: Lightning puts a sampler of its own in place, which repeats the first batches
        return DataLoader(dataset, self.batch_size, shuffle=False, drop_last=True, **self._loader_options())

    def _loader_options(self) -> dict[str, Any]:
        return {
            "num_workers": self.num_workers,
            "persistent_workers": self.num_workers > 0,
            "pin_memory": torch.cuda.is_available(),
        }


def split_documents(sizes: Sequence[int], val_fraction: float, seed: int, advice: str) -> np.ndarray:
    """Draw whole documents to validate on, until they hold the wanted share of the text.

    A document that would bring them over that share is passed over; if none fits, the smallest one is taken.

    Args:
        sizes: The size of each document, in any unit.
        val_fraction: Share of the text to draw, at least one document; 0 draws none.
        seed: The same seed draws the same documents.
        advice: What a user can do where there are too few documents, as the end of the error message.

    Returns:
        Boolean, one for each document: whether it is one to validate on.

    Raises:
        ValueError: If there are not two documents, one to train on and one to validate on.
    """
    validation = np.zeros(len(sizes), dtype=bool)
    if val_fraction == 0:
        return validation
    if len(sizes) < 2:
        raise ValueError(
            f"val_fraction={val_fraction} takes at least one whole document to validate on, and there is "
            f"{'one' if sizes else 'none'} in all. {advice}"
        )
    left = val_fraction * sum(sizes)
    for index in np.random.default_rng(seed).permutation(len(sizes)):
        if sizes[index] <= left:
            validation[index] = True
            left -= sizes[index]
    if not validation.any():
        validation[int(np.argmin(sizes))] = True
    return validation


def _check_at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{name}={value}; it has to be {least} or more")
