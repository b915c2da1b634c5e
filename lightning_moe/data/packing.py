"""Windows of one flat stream of tokens, and a loader that continues where a checkpoint left off.

The order of an epoch is one list of windows for all ranks. A step takes the next ``batch_size * num_replicas`` of them,
so what a run has consumed is always a beginning of that list, whatever the number of ranks: one number is the whole
state, it is the same on every rank, and a run continues from it on another number of ranks.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler
from typing_extensions import override

from lightning_moe.checkpoint.progress import align_fit_loop, unfinished_batches

_DTYPES = (torch.uint8, torch.int32, torch.int64)
_SLICE = 1 << 16


class PackedTokens(Dataset[dict[str, Tensor]]):
    """Windows of ``sequence_length`` tokens, one after the other, without padding.

    Item ``i`` is ``{"input_ids": tokens[i*L : i*L+L], "labels": tokens[i*L+1 : i*L+L+1]}``, both int64 of shape
    ``[L]``: the label of a position is the token after it. There are ``(N - 1) // L`` items for ``N`` tokens.

    Args:
        tokens: The flat tokens, shape ``[N]``, uint8, int32 or int64; may be a view of a memory-mapped file.
        sequence_length: ``L``, in tokens.

    Raises:
        TypeError: If ``tokens`` has another dtype.
        ValueError: If ``tokens`` is not flat, or too short for one window.
    """

    def __init__(self, tokens: Tensor, sequence_length: int) -> None:
        if tokens.dtype not in _DTYPES:
            allowed = ", ".join(str(dtype) for dtype in _DTYPES)
            raise TypeError(f"tokens has dtype {tokens.dtype}; allowed: {allowed}. Convert it first")
        if tokens.dim() != 1:
            raise ValueError(f"tokens has shape {list(tokens.shape)}; it has to be flat, [N]: call tokens.flatten()")
        if sequence_length < 1:
            raise ValueError(f"sequence_length={sequence_length}; it has to be 1 or more")
        if len(tokens) < sequence_length + 1:
            raise ValueError(
                f"sequence_length={sequence_length} needs at least {sequence_length + 1} tokens (the last label is the "
                f"token after the window) and there are {len(tokens)}; allowed here: 1 to {len(tokens) - 1}. "
                "Lower sequence_length or give more data"
            )
        self.tokens = tokens
        self.sequence_length = sequence_length
        self._path: Path | None = None

    @classmethod
    def from_file(cls, path: str | Path, sequence_length: int) -> "PackedTokens":
        """Map a flat ``.npy`` file of tokens into memory; a loader's worker maps the file again instead of copying it.

        Args:
            path: A ``.npy`` file with one dimension and dtype uint8, int32 or int64.
            sequence_length: As in the class.
        """
        dataset = cls(_map(path), sequence_length)
        dataset._path = Path(path)
        return dataset

    def __len__(self) -> int:
        # N - 1 tokens have a next token; each window uses L of them
        return (len(self.tokens) - 1) // self.sequence_length

    @override
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = index * self.sequence_length
        window = self.tokens[start : start + self.sequence_length + 1].to(torch.int64, copy=True)
        return {"input_ids": window[:-1].clone(), "labels": window[1:]}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "tokens": None} if self._path else self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._path:
            self.tokens = _map(self._path)


class ResumableSampler(DistributedSampler[int]):
    """A distributed sampler whose epoch can begin in its middle.

    All ranks agree on one order of the dataset, drawn from ``(seed, epoch)``, and rank ``r`` of ``R`` takes every
    ``R``-th index from place ``start + r``. Nothing is repeated: the last ``len(dataset) % R`` places of the order are
    left out of the epoch (another epoch leaves out others), so every rank gets the same number of items.

    It is a :class:`torch.utils.data.distributed.DistributedSampler`, so Lightning leaves it in place.

    Args:
        dataset: What is sampled; only its length is used.
        num_replicas: How many ranks read different data; default: those of the default process group, else 1.
        rank: Which of them this is; default: the rank in the default process group, else 0.
        shuffle: Whether the order is drawn or is ``0, 1, 2, ...``.
        seed: 0 or more; the same on every rank.

    Attributes:
        start: How many places of the order, over all ranks, the next iteration leaves out. An iteration that begins
            takes it and sets it back to 0; so does :meth:`set_epoch` with another epoch. ``len()`` does not depend on
            it: Lightning counts a resumed epoch from its first batch.

    Raises:
        ValueError: If ``seed`` is negative or ``rank`` is not below ``num_replicas``.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        if seed < 0:
            raise ValueError(f"seed={seed}; it has to be 0 or more")
        in_group = dist.is_available() and dist.is_initialized()
        if num_replicas is None:
            num_replicas = dist.get_world_size() if in_group else 1
        if rank is None:
            rank = dist.get_rank() if in_group else 0
        super().__init__(dataset, num_replicas=num_replicas, rank=rank, shuffle=shuffle, seed=seed, drop_last=True)
        self.start = 0

    @override
    def __iter__(self) -> Iterator[int]:
        start, self.start = self.start, 0
        order = self._order()[start:]
        whole = len(order) - len(order) % self.num_replicas
        for part in order[self.rank : whole : self.num_replicas].split(_SLICE):
            yield from part.tolist()

    @override
    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next iteration. The position is kept if this is the epoch it belongs to.

        Args:
            epoch: 0 or more.
        """
        if epoch != self.epoch:
            self.start = 0
        super().set_epoch(epoch)

    def _order(self) -> Tensor:
        length = len(self.dataset)  # type: ignore[arg-type]
        if not self.shuffle:
            return torch.arange(length)
        # hashed, not added: seed + epoch would give seed 0 in epoch 1 the order of seed 1 in epoch 0
        mixed = np.random.SeedSequence([self.seed, self.epoch]).generate_state(1, np.uint64)[0]
        generator = torch.Generator().manual_seed(int(mixed) >> 1)
        return torch.randperm(length, generator=generator)


class ResumableLoader(DataLoader[Any]):
    """A loader of whole batches whose position goes into Lightning's checkpoints.

    Lightning's fit loop saves :meth:`state_dict` of any loader that has one, on rank 0, and hands it to every rank when
    a run resumes within an epoch; the loader then yields the batches that are left of that epoch, while ``len()``
    stays that of a whole epoch. Batches count when they are handed out, so those that workers have fetched ahead
    are not lost.

    Without a Trainer: ``loader.load_state_dict(state)``, then ``loader.sampler.set_epoch(epoch)`` and iterate, from
    ``epoch = state["epoch"]`` on. Any other epoch begins at its first batch.

    Args:
        dataset: A map-style dataset with a length.
        batch_size: Items of a batch, on each rank.
        sampler: The order and this rank's part of it.
        trainer: Where given, its counters of batches and epochs are brought in line with the position on resume.
            Lightning's own are right for the same number of ranks and a checkpoint saved after a batch; this also
            covers another number of ranks or batch size, a step that an exception cut off, and runs limited by
            ``max_steps`` that were saved at the end of an epoch.
        **kwargs: As for :class:`torch.utils.data.DataLoader`, except ``shuffle``, ``drop_last`` and ``batch_sampler``.

    Raises:
        TypeError: If ``sampler`` is not a :class:`ResumableSampler`.
        ValueError: If an option is given that the sampler settles.
    """

    sampler: ResumableSampler

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        sampler: ResumableSampler,
        trainer: Trainer | None = None,
        **kwargs: Any,
    ) -> None:
        if not isinstance(sampler, ResumableSampler):
            raise TypeError(
                f"sampler is a {type(sampler).__name__}; ResumableLoader takes a ResumableSampler. If this comes from "
                "Trainer(overfit_batches=...), which replaces samplers, hand the Trainer a plain DataLoader"
            )
        for name in ("shuffle", "drop_last", "batch_sampler"):
            if kwargs.pop(name, None):
                raise ValueError(f"ResumableLoader does not take {name}: its sampler settles the order; leave it out")
        # Seeds of workers are drawn when an iterator is made, which a resumed run does at another time than an unbroken
        # one: so not from the generator that the model draws from.
        kwargs.setdefault("generator", torch.Generator())
        super().__init__(dataset, batch_size=batch_size, sampler=sampler, drop_last=True, **kwargs)
        self._trainer = trainer
        self._epoch_of_pass: int | None = None
        self._items = 0

    @property
    def items_per_step(self) -> int:
        """Items that one batch on every rank takes from the epoch's order: ``batch_size * num_replicas``."""
        assert self.batch_size is not None
        return self.batch_size * self.sampler.num_replicas

    @override
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        # A generator, so that nothing is fetched before the first batch is asked for: Lightning makes the iterator
        # before it calls set_epoch, and workers would fetch ahead from the order of the wrong epoch.
        self._items = self.sampler.start
        self._epoch_of_pass = self.sampler.epoch
        for batch in super().__iter__():
            self._items += self.items_per_step
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """The position, the same on every rank.

        Returns:
            ``epoch``; ``items``, how many items all ranks together have consumed of it; ``items_per_step``; and what
            the position depends on: ``dataset_items``, ``seed`` and ``shuffle``.
        """
        in_pass = self._epoch_of_pass == self.sampler.epoch
        return {
            "epoch": self.sampler.epoch,
            "items": self._items if in_pass else self.sampler.start,
            "items_per_step": self.items_per_step,
            **self._order_facts(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at a saved position; the next iteration of its epoch yields what is left of it.

        A position that is not a whole number of steps of this layout is rounded down to one, which is logged.

        Args:
            state_dict: What :meth:`state_dict` returned, on any number of ranks and with any batch size.

        Raises:
            ValueError: If the position lies within an epoch and the dataset or its order is another one now.
        """
        items = state_dict["items"]
        if 0 < items <= state_dict["dataset_items"] - state_dict["items_per_step"]:
            self._check_order(state_dict)
        trainer = self._trainer if self._trainer is not None and self._trainer.fit_loop.restarting else None
        if trainer is not None and items > 0:
            items -= unfinished_batches(trainer) * state_dict["items_per_step"]
        steps = min(items // self.items_per_step, len(self))
        if trainer is not None:
            steps = align_fit_loop(trainer, steps, len(self))
        start = steps * self.items_per_step
        if start < items and steps < len(self):
            rank_zero_info(
                f"The checkpoint's position, {items} items into epoch {state_dict['epoch']}, is not a whole number of "
                f"steps of {self.items_per_step} items (batch_size={self.batch_size} on {self.sampler.num_replicas} "
                f"ranks): continuing at {start}, so {items - start} items are seen again."
            )
        self.sampler.set_epoch(state_dict["epoch"])
        self.sampler.start = start
        self._epoch_of_pass = None

    def _order_facts(self) -> dict[str, Any]:
        return {
            "dataset_items": len(self.dataset),  # type: ignore[arg-type]
            "seed": self.sampler.seed,
            "shuffle": self.sampler.shuffle,
        }

    def _check_order(self, state_dict: dict[str, Any]) -> None:
        for name, now in self._order_facts().items():
            if state_dict[name] != now:
                raise ValueError(
                    f"the checkpoint lies in the middle of epoch {state_dict['epoch']} of data with "
                    f"{name}={state_dict[name]}, and now it is {now}, so the place to continue at does not exist. "
                    "Use the data, sequence_length, split and seed of the interrupted run, or begin a new run from its "
                    "weights (without ckpt_path)"
                )


def _map(path: str | Path) -> Tensor:
    # copy-on-write: torch warns about read-only memory, and nothing reaches the file
    return torch.from_numpy(np.load(path, mmap_mode="c"))
