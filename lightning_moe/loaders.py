"""Ranks with different numbers of batches: every rank must enter every collective of every step.

Numbers that are known are compared before the first step. Where a loader does not tell its length, or where an iterable
dataset may be wrong about it, the ranks agree before each batch on whether all of them have one.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import has_iterable_dataset, sized_len
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.trainer.states import RunningStage
from torch.distributed import ProcessGroup

from lightning_moe.checkpoint.position import Resumption, wrap
from lightning_moe.lockstep import LockstepLoader, StatefulLockstepLoader, Together, current_pass
from lightning_moe.parallel.watch import Watch

_LIMITS = {
    RunningStage.TRAINING: "limit_train_batches",
    RunningStage.VALIDATING: "limit_val_batches",
    RunningStage.SANITY_CHECKING: "limit_val_batches",
    RunningStage.TESTING: "limit_test_batches",
    RunningStage.PREDICTING: "limit_predict_batches",
}


class EvenLoaders:
    """Keeps the ranks at the same number of steps, whatever their dataloaders hold.

    Training, validation and test end together when the first rank has no batch left. In prediction, where nothing may
    be lost, a rank that has finished repeats its last batch for the collectives of the others.

    Args:
        watch: Names a rank that does not come to an agreement.
        resumption: What training dataloaders need to go on where they stood.
        before_batch: Called before each batch to train on is fetched.
    """

    def __init__(self, watch: Watch, resumption: Resumption, before_batch: Callable[["pl.Trainer"], None]) -> None:
        self._watch = watch
        self._resumption = resumption
        self._before_batch = before_batch
        self._default_group: ProcessGroup | None = None
        self._groups: list[ProcessGroup] = []
        self._queue = _PredictQueue()

    def process(
        self, dataloader: object, trainer: "pl.Trainer", device: torch.device, timeout: timedelta | None
    ) -> object:
        """Check a dataloader against those of the other ranks, and wrap it where it has to be read in step. Collective.

        Args:
            dataloader: What this rank iterates over.
            trainer: The trainer, for the stage and its ``limit_..._batches``.
            device: Device of the collective.
            timeout: How long a rank waits for the others to have read a batch.

        Returns:
            The dataloader; in training one whose position can be restored; an :class:`LockstepLoader` around it where
            it has to be read in step. The same kind on every rank.

        Raises:
            ValueError: On every rank, if the lengths are known and the ranks would not take the same number of steps.
        """
        stage = trainer.state.stage
        if stage not in _LIMITS:
            return dataloader
        # Dataloaders of a prediction may be in use at the same time on different ranks; others are in turn.
        index = len(trainer.predict_loop.max_batches) if stage == RunningStage.PREDICTING else 0
        if index == 0:
            self._queue.start([])
        if stage == RunningStage.TRAINING:
            ranks = dist.get_world_size() if dist.is_initialized() else 1
            dataloader = wrap(dataloader, trainer, self._resumption, device, ranks, self._before_batch)
        length = sized_len(dataloader)
        lengths = gather_int(-1 if length is None else length, device)
        known = -1 not in lengths
        if known:
            _check_lengths(lengths, stage, getattr(trainer, _LIMITS[stage]))
        uncertain = any(gather_int(int(has_iterable_dataset(dataloader)), device))  # its __len__ may be wrong
        if len(lengths) == 1 or (known and not uncertain):
            return dataloader
        group = self._group(index, timeout)
        may_wait = self._queue.may_wait if stage == RunningStage.PREDICTING else None
        stateful = hasattr(dataloader, "state_dict") and hasattr(dataloader, "load_state_dict")
        cls = StatefulLockstepLoader if stateful and stage == RunningStage.TRAINING else LockstepLoader
        return cls(dataloader, Together(trainer, stage, known, group, self._watch, may_wait))

    def _group(self, index: int, timeout: timedelta | None) -> ProcessGroup:
        """Return a group of all ranks of our own: a flag in the memory of a GPU would make the host wait for it."""
        if self._default_group is not dist.group.WORLD:
            self._default_group, self._groups = dist.group.WORLD, []
        while len(self._groups) <= index:
            self._groups.append(dist.new_group(backend="gloo", timeout=timeout))
        return self._groups[index]

    def start_prediction(self, trainer: "pl.Trainer", device: torch.device) -> None:
        """Find out how many steps the others take of each dataloader with a length. Collective.

        Raises:
            ValueError: On every rank, if a rank would have to repeat a batch that ``predict_step`` fetches itself.
        """
        loop = trainer.predict_loop
        assert loop._combined_loader is not None
        uneven, parts = False, list[Callable[[], _Part]]()
        for loader, number in zip(loop._combined_loader.flattened, loop.max_batches, strict=True):
            if isinstance(loader, LockstepLoader):
                uneven = True
                parts.append(partial(current_pass, loader))
            else:
                numbers = gather_int(int(number), device)
                uneven |= len(set(numbers)) > 1
                parts.append(partial(_same, _Counted(int(number), max(numbers) - int(number))))
        if uneven and isinstance(loop._data_fetcher, _DataLoaderIterDataFetcher):
            raise ValueError(
                "predict_step(dataloader_iter) fetches its own batches, so that the strategy cannot repeat one on ranks"
                " with fewer batches than others; write predict_step(batch, batch_idx), or give every rank a dataloader"
                " of the same length"
            )
        self._queue.start(parts)

    def end_predict_step(self, repeat: Callable[[], Any]) -> None:
        """Stay with the ranks that have more batches. Called after each step of a prediction.

        Args:
            repeat: Runs the step again; its result is thrown away.
        """
        self._queue.end_step(repeat)


def _check_lengths(lengths: list[int], stage: RunningStage, limit: int | float) -> None:
    if isinstance(limit, int):
        lengths = [min(length, limit) for length in lengths]
    uneven = min(lengths) == 0 < max(lengths) if stage == RunningStage.PREDICTING else len(set(lengths)) > 1
    if uneven:
        name = stage.dataloader_prefix
        raise ValueError(
            f"the {name} dataloader has {', '.join(map(str, lengths))} batches on rank 0 to {len(lengths) - 1};"
            " the ranks exchange tokens at every step, so each needs the same number"
            f" (in prediction: at least one). Set drop_last=True, Trainer({_LIMITS[stage]}={min(lengths) or 1}), or let"
            " Lightning divide the data (use_distributed_sampler=True)"
        )


class _Part(Protocol):
    """The steps of one dataloader in a prediction."""

    @property
    def empty(self) -> bool:
        """Whether it is known to have no batch on this rank."""

    def end_step(self) -> bool:
        """Count a step of this rank; return whether it was the last."""

    def more_elsewhere(self) -> bool:
        """Whether another rank takes one more step, after the last of this one. Collective."""

    def check_empty(self) -> None:
        """Find out whether it is empty on every rank. Collective."""


class _Counted:
    """Steps whose numbers are known."""

    def __init__(self, left: int, extra: int) -> None:
        self.left, self.extra = left, extra
        self.empty = left == 0

    def end_step(self) -> bool:
        self.left -= 1
        return self.left == 0

    def more_elsewhere(self) -> bool:
        self.extra -= 1
        return self.extra >= 0

    def check_empty(self) -> None:
        pass  # the numbers were compared before


def _same(part: _Part) -> _Part:
    return part


class _PredictQueue:
    """The dataloaders of a prediction of which this rank has not taken all steps."""

    def __init__(self) -> None:
        self._left: list[Callable[[], _Part]] = []

    def start(self, parts: Sequence[Callable[[], _Part]]) -> None:
        self._left = list(parts)

    def may_wait(self, part: _Part) -> bool:
        """Whether the steps of all dataloaders before it are taken.

        Lightning fetches a batch ahead. A rank that waited for the first batch of a dataloader while the others wait
        for its last steps of the one before would wait for ever.
        """
        return not self._left or self._left[0]() is part

    def end_step(self, repeat: Callable[[], Any]) -> None:
        self._drop_empty()
        if self._left and (part := self._left[0]()).end_step():
            while part.more_elsewhere():
                repeat()
            self._left.pop(0)
            self._drop_empty()

    def _drop_empty(self) -> None:
        while self._left and (part := self._left[0]()).empty:
            part.check_empty()
            self._left.pop(0)


def gather_int(value: int, device: torch.device) -> list[int]:
    """Return the value of every rank, in their order. Collective."""
    if not dist.is_initialized():
        return [value]
    values = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(values, torch.tensor([value], device=device))
    return [int(v.item()) for v in values]
