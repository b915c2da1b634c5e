"""Dataloaders of unknown length, which the ranks read in lockstep.

Every rank must enter every collective of every step, so the ranks agree before each batch on whether all of them have
one.
"""

import contextlib
import copy
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.distributed import ProcessGroup
from typing_extensions import override

from lightning_moe.parallel.watch import Watch
from lightning_moe.wrapped_loader import WrappedLoader

# What a rank has of a batch, as bits, so that one reduction tells which of them occur.
_HAS, _NONE, _FAILED = 1, 2, 4


@dataclass
class Together:
    """What the passes over a dataloader have in common.

    Attributes:
        trainer: The trainer.
        stage: What the dataloader is for.
        sized: Whether it tells a length.
        group: The ranks, for collectives of tensors of the CPU.
        watch: Names a rank that does not come.
        may_wait: In a prediction: whether a pass may wait for the others now, given the pass. ``None`` in other stages.
        warned_in_epoch: Where a warning was given last.
    """

    trainer: "pl.Trainer"
    stage: RunningStage
    sized: bool
    group: ProcessGroup
    watch: Watch
    may_wait: Callable[[Any], bool] | None = None
    warned_in_epoch: int = -1

    @property
    def name(self) -> str:
        """What to call the dataloader in messages."""
        return f"{self.stage.dataloader_prefix} dataloader"

    @property
    def loop(self) -> Any:
        """Lightning's loop over the dataloader."""
        if self.stage == RunningStage.TRAINING:
            return self.trainer.fit_loop
        if self.stage == RunningStage.TESTING:
            return self.trainer.test_loop
        if self.stage == RunningStage.PREDICTING:
            return self.trainer.predict_loop
        fitting = self.trainer.state.fn == TrainerFn.FITTING
        return self.trainer.fit_loop.epoch_loop.val_loop if fitting else self.trainer.validate_loop


class Lockstep:
    """How far the ranks have come in one pass over a dataloader that they read together.

    Args:
        together: What is the same for each pass.
        limit: Batches that Lightning will ask for at most. In prediction it is exact; else it may ask for more.
        resumed: Whether it goes on in the middle of an epoch, where a rank may have nothing left.

    Attributes:
        handed: Batches that this rank has given to Lightning.
        fetched: Batches that it has read, at most one more.
        ended: Whether it has told Lightning that there are no more.
    """

    def __init__(self, together: Together, limit: float, resumed: bool) -> None:
        self.limit = limit
        self.handed = self.fetched = 0
        self.ended = False
        self._together, self._resumed = together, resumed
        self._stop = 0  # why this rank reads no more
        self._error: Exception | None = None
        self._announced = 0  # the last batch of which the others know
        self._occurs = _HAS  # what the ranks have of the batch that was agreed on last
        self._pending: tuple[dist.Work, Tensor] | None = None
        self._steps = self._repeats = 0

    def stop(self, error: Exception | None = None) -> None:
        """Note that this rank's dataloader gives no more batches."""
        self._stop, self._error = (_NONE, None) if error is None else (_FAILED, error)

    @property
    def exhausted(self) -> bool:
        """Whether this rank's dataloader has come to its end."""
        return self._stop == _NONE

    @property
    def stopped(self) -> bool:
        """Whether this rank's dataloader gives no more batches, for whatever reason."""
        return self._stop != 0

    def advance(self) -> bool:
        """Whether this rank takes the step of its next batch, for which it has tried to read it. Collective."""
        number = self.handed + 1
        may_wait = self._together.may_wait
        if may_wait is None or may_wait(self):
            self._agree(number)
        self.ended = self.fetched < number or (may_wait is None and bool(self._occurs & _NONE))
        if not self.ended:
            self.handed = number
        return not self.ended

    def announce(self) -> None:
        """Tell the others whether this rank has its next batch, without waiting for them."""
        if self._pending is None and self._announced == self.handed:
            self._announce()

    def _announce(self) -> None:
        self._announced += 1
        flag = torch.tensor([_HAS if self._announced <= self.fetched else self._stop])
        work = dist.all_reduce(flag, op=dist.ReduceOp.BOR, group=self._together.group, async_op=True)
        self._pending = (work, flag)

    def _settle(self) -> None:
        if self._pending is not None:
            work, flag = self._pending
            self._pending = None
            with self._together.watch.over(f"agreement on batch {self._announced - 1} of the {self._together.name}"):
                work.wait()
            self._occurs = int(flag.item())

    def _agree(self, number: int) -> None:
        """Find out what the ranks have of a batch, from 1."""
        while self._pending is not None or self._announced < number:
            if self._pending is None:
                self._announce()
            self._settle()
            self._check()

    def _check(self) -> None:
        """Look at what the ranks have of the batch that they have agreed on."""
        empty = self._announced == 1 and not self._resumed
        if self._occurs & _FAILED:
            self._raise_failure()
        elif self._occurs == _HAS | _NONE and (empty or self._together.may_wait is None):
            self._report_uneven(empty)

    def _report_uneven(self, empty: bool) -> None:
        name, told = self._together.name, self._tell_all()
        out = _ranks([rank for rank, (status, _) in enumerate(told) if status != _HAS])
        others = _ranks([rank for rank, (status, _) in enumerate(told) if status == _HAS])
        if empty:
            raise ValueError(
                f"the {name} has no batch at all on {out}, but has some on {others}; the ranks exchange tokens at every"
                " step, so each needs at least one batch"
            )
        epoch = self._together.trainer.current_epoch
        if self._together.warned_in_epoch != epoch:
            self._together.warned_in_epoch = epoch
            rank_zero_warn(
                f"the {name} ran out on {out} after {self._announced - 1} batches, so every rank stopped there (epoch"
                f" {epoch}); what {others} had left was not used. The ranks exchange tokens at every step: give each"
                " the same number of batches to use all of them"
            )

    def _raise_failure(self) -> None:
        told = self._tell_all()
        if told[dist.get_rank()][1] is not None:
            assert self._error is not None
            raise self._error
        failed = "; ".join(f"rank {rank}: {error}" for rank, (_, error) in enumerate(told) if error)
        raise RuntimeError(f"batch {self._announced - 1} of the {self._together.name} could not be read on {failed}")

    def _tell_all(self) -> list[tuple[int, str | None]]:
        """What each rank has of the batch that they have agreed on, and its error."""
        mine = _HAS if self._announced <= self.fetched else self._stop
        error = None if self._error is None or mine != _FAILED else f"{type(self._error).__name__}: {self._error}"
        told: list[tuple[int, str | None]] = [(0, None)] * dist.get_world_size()
        with self._together.watch.over(f"end of the {self._together.name}"):
            dist.all_gather_object(told, (mine, error), group=self._together.group)
        return told

    # As a part of a prediction

    @property
    def empty(self) -> bool:
        """Whether this rank is known to have no batch."""
        return self.stopped and self.fetched == 0

    def check_empty(self) -> None:
        """Find out whether no rank has a batch. Collective.

        Raises:
            ValueError: On every rank, if some rank has one.
        """
        self._agree(1)

    def end_step(self) -> bool:
        """Count a step of this rank; return whether it was the last."""
        self._steps += 1
        return self._steps == self.fetched and (self.stopped or self.fetched >= self.limit)

    def more_elsewhere(self) -> bool:
        """Whether another rank takes one more step, after the last of this one. Collective."""
        self._repeats += 1
        number = self.fetched + self._repeats
        if number > self.limit:
            return False
        self._agree(number)
        if not self._occurs & _HAS:
            return False
        if number < self.limit:
            self._announce()  # before the step, because the others ask for their next batch before theirs
        return True


class LockstepLoader(WrappedLoader):
    """A dataloader of unknown length that is read in step with those of the other ranks.

    It reads one batch ahead, and agrees with the other ranks before each batch on what they have. The agreement begins
    when the batch before is handed out, so that it costs no wait where the ranks are equally fast. Attributes are those
    of the dataloader.

    Args:
        loader: The dataloader of this rank.
        together: What the ranks share.
    """

    def __init__(self, loader: Any, together: Together) -> None:
        self._set(_loader=loader, _together=together, _lockstep=Lockstep(together, math.inf, resumed=False))

    def __len__(self) -> int:
        if not self._together.sized:
            raise TypeError(f"the length of this {type(self._loader).__name__} is not known on every rank")
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        self._set(_lockstep=Lockstep(self._together, self._limit(), resumed=False))
        return _Reading(self._loader, self._lockstep)

    def _limit(self) -> float:
        """How many batches Lightning will ask for; those that are read beyond would be lost for an endless stream."""
        loop = self._together.loop
        limit = math.inf
        if (combined := loop._combined_loader) is not None and combined.limits is not None:
            mine = (limit for loader, limit in zip(combined.flattened, combined.limits, strict=True) if loader is self)
            limit = next(mine, limit)
        if loop is self._together.trainer.fit_loop and loop.restarting:
            done = loop.epoch_loop.batch_progress.current.processed
            return limit - done if done < limit else limit
        return limit


def current_pass(loader: LockstepLoader) -> Lockstep:
    """How far the ranks have come in the pass over a dataloader that began last."""
    return loader._lockstep


class StatefulLockstepLoader(LockstepLoader):
    """One that can be saved: what was read ahead, here and by Lightning, is read again after a resume.

    It takes the state of the dataloader after each batch, for it cannot be had later. Where an epoch ended because
    another rank had no batch left, what is saved is an empty state: the next epoch begins like the first.
    """

    def __init__(self, loader: Any, together: Together) -> None:
        super().__init__(loader, together)
        self._set(_states={}, _loaded=None)  # states by the number of batches that were read

    @override
    def __iter__(self) -> Iterator[Any]:
        loaded = self._loaded
        self._set(_lockstep=Lockstep(self._together, self._limit(), resumed=loaded is not None))
        self._set(_states={}, _loaded=None)
        reading = _Reading(self._loader, self._lockstep, self._take)
        if loaded is not None:  # a generator has not taken it up yet
            self._states[0] = loaded
        return reading

    def _take(self) -> None:
        lockstep = self._lockstep
        # One more than there are for the state of an exhausted dataloader.
        self._states[lockstep.fetched + lockstep.exhausted] = copy.deepcopy(self._loader.state_dict())
        for old in [key for key in self._states if key < lockstep.fetched - 2]:  # one batch is ahead here, one there
            del self._states[old]

    def state_dict(self) -> dict[str, Any]:
        """The state of the dataloader after the last batch that was trained on."""
        lockstep = self._lockstep
        if not self._states:
            return self._loader.state_dict()
        if lockstep.ended:
            finished = lockstep.exhausted and lockstep.handed == lockstep.fetched
            return self._states[lockstep.fetched + 1] if finished else {}
        fetcher = self._together.trainer.fit_loop._data_fetcher
        return self._states[lockstep.handed - len(getattr(fetcher, "batches", ()))]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the dataloader go on from a state."""
        if state_dict:
            self._set(_states={}, _loaded=state_dict)
            self._loader.load_state_dict(state_dict)


class _Reading(Iterator[Any]):
    """One pass over the dataloader of this rank. Lightning alone holds it, so that its workers end when it lets go.

    Args:
        loader: The dataloader.
        lockstep: How far the ranks have come.
        take: Called after each batch that is read, and at the end.
    """

    def __init__(self, loader: Any, lockstep: Lockstep, take: Callable[[], None] | None = None) -> None:
        self._lockstep = lockstep
        self._take = take
        self._ahead: deque[Any] = deque()
        self._iterator: Iterator[Any] | None = None
        with self._failing_together():
            self._iterator = iter(loader)
            if take is not None:
                take()

    @override
    def __next__(self) -> Any:
        lockstep = self._lockstep
        if lockstep.ended:
            raise StopIteration
        if not self._ahead:
            self._fetch()
        if not lockstep.advance():
            self._iterator = None
            self._ahead.clear()
            raise StopIteration
        batch = self._ahead.popleft()
        if lockstep.handed < lockstep.limit:
            self._fetch()
            lockstep.announce()
        return batch

    def _fetch(self) -> None:
        if self._lockstep.stopped:
            return
        assert self._iterator is not None
        with self._failing_together():
            try:
                self._ahead.append(next(self._iterator))
                self._lockstep.fetched += 1
            except StopIteration:
                self._lockstep.stop()
            if self._take is not None:
                self._take()

    @contextlib.contextmanager
    def _failing_together(self) -> Iterator[None]:
        """Keep an exception of the dataloader until the ranks agree on the batch that it was for."""
        try:
            yield
        except Exception as error:
            self._lockstep.stop(error)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
