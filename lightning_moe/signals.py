"""Signals of a scheduler, on which all ranks act together and between two steps.

Lightning's own handlers exchange data with the other ranks, or save a checkpoint, wherever the signal finds this rank:
in the middle of a step, whose exchanges the other ranks wait for, or on one rank alone. Here a handler takes a note.
The ranks compare their notes before each training batch, and do what Lightning would do before they fetch the batch.
"""

import signal
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

_REQUEUE_SIGNAL = getattr(signal, "SIGUSR1", 0)  # for what Lightning logs; SLURM may be told to send another one
_TERMINATE, _REQUEUE = 1, 2  # bits, so that one reduction tells what any rank was sent


class Signals:
    """What this rank was sent, and what it knows of the others."""

    def __init__(self) -> None:
        self._notes = 0
        self._asked: tuple[dist.Work, Tensor] | None = None
        self._group: tuple[Any, dist.ProcessGroup] | None = None
        self._requeue: Callable[[], None] | None = None  # until it is done

    def open(self, timeout: timedelta | None) -> None:
        """Make the ranks' group: before code of the user runs, which may end one of them. Collective.

        Args:
            timeout: How long a rank waits for the others.
        """
        world = dist.group.WORLD
        if dist.is_initialized() and dist.get_world_size() > 1 and (self._group is None or self._group[0] is not world):
            self._group = (world, dist.new_group(backend="gloo", timeout=timeout))

    def start(self, trainer: "pl.Trainer") -> None:
        """Take the place of Lightning's handlers, which it puts back at the end.

        Args:
            trainer: The trainer, which has registered them.
        """
        connector: Any = trainer._signal_connector
        self._notes, self._asked = 0, None
        self._requeue = partial(connector._slurm_sigusr_handler_fn, _REQUEUE_SIGNAL, None)
        for number in signal.valid_signals():
            handlers = getattr(signal.getsignal(number), "signal_handlers", None)
            if isinstance(handlers, list):
                handlers[:] = [self._instead_of(handler, connector, trainer) for handler in handlers]

    def before_batch(self, trainer: "pl.Trainer") -> None:
        """Act on what some rank was sent before the batch before last. Collective.

        Raises:
            SIGTERMException: On every rank, if one of them was sent SIGTERM.
        """
        notes = self._compare()
        if notes & _REQUEUE and self._requeue is not None:
            requeue, self._requeue = self._requeue, None
            requeue()
        if notes & _TERMINATE:
            self._asked = None
            trainer._signal_connector.received_sigterm = True
            raise SIGTERMException()

    def _compare(self) -> int:
        """What the ranks had noted when this was called last; the answer is on its way while a step is computed."""
        if self._group is None or not dist.is_initialized():
            return self._notes
        asked, notes = self._asked, torch.tensor([self._notes])
        self._asked = (dist.all_reduce(notes, op=dist.ReduceOp.BOR, group=self._group[1], async_op=True), notes)
        if asked is None:
            return 0
        work, answer = asked
        work.wait()
        return int(answer.item())

    def _instead_of(self, handler: Any, connector: Any, trainer: "pl.Trainer") -> Any:
        if handler == connector._sigterm_notifier_fn:
            return lambda number, frame: self._note_terminate(trainer, number)
        if handler == connector._slurm_sigusr_handler_fn:
            return lambda number, frame: self._note(_REQUEUE)
        return handler

    def _note_terminate(self, trainer: "pl.Trainer", number: int) -> None:
        launcher: Any = trainer.strategy.launcher
        if launcher is not None and not self._notes & _TERMINATE:
            launcher.kill(number)  # the ranks that this process has started
        self._note(_TERMINATE)

    def _note(self, note: int) -> None:
        self._notes |= note
