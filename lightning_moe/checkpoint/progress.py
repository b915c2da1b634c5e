"""Lightning's counters of batches and epochs, brought in line with the position of the training data on resume.

Lightning restores the number of batches as each rank counted them and takes the epoch to be over after as many as the
loader has now. That is right for a checkpoint saved after a batch and resumed with as many ranks. Otherwise:

- on another number of ranks the count stands for another part of the epoch, which then ends too early or too late;
- with ``max_steps``, a checkpoint saved at the end of an epoch (``ModelCheckpoint`` without validation does so) resumes
  with the count of the epoch that ended, so the next one ends after one batch;
- with ``max_steps`` reached within an epoch, that epoch counts as over, and a run that is continued with more steps
  would leave out the rest of it;
- a batch whose step an exception cut off is not counted, but the loader has handed it out.

Only public attributes of the loops are touched.
"""

from typing import Any

from lightning.pytorch import Trainer


def unfinished_batches(trainer: Trainer) -> int:
    """How many batches the run had been handed when it was saved without finishing their step: 0 or 1."""
    batches: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    return batches.ready - batches.processed


def align_fit_loop(trainer: Trainer, steps: int, length: int) -> int:
    """Set the counters of a fit loop that is about to resume.

    Args:
        trainer: The Trainer, after it restored its loops and before the first batch.
        steps: Batches of the epoch that are done, counted as each rank counts them now.
        length: Batches of a whole epoch on each rank now.

    Returns:
        The batches after which the data continues: ``steps``, or the end of the epoch if the run had come to it.
    """
    loop = trainer.fit_loop
    epochs, batches = loop.epoch_progress, loop.epoch_loop.batch_progress
    current: Any = epochs.current
    if current.started < current.ready or (current.processed == current.ready and batches.is_last_batch):
        _begin_new_epoch(trainer)
        return steps
    if unfinished_batches(trainer):
        batches.is_last_batch = False
    elif batches.is_last_batch:
        steps = _epoch_length(trainer, length)
    elif current.processed == current.ready and steps > 0:
        _reopen_epoch(epochs)
    _shift(batches.current, steps - batches.current.processed)  # type: ignore[attr-defined]
    return steps


def _begin_new_epoch(trainer: Trainer) -> None:
    """The saved epoch was over, or the next one had no batch yet: resume as Lightning does without ``max_steps``."""
    loop = trainer.fit_loop
    for counter in (loop.epoch_progress.current, loop.epoch_progress.total):
        progress: Any = counter
        progress.ready = progress.started
        progress.completed = progress.processed
    loop.epoch_loop.restarting = False


def _reopen_epoch(epochs: Any) -> None:
    """The run stopped within an epoch, which Lightning then counts as processed: it is still to be finished."""
    for counter in (epochs.current, epochs.total):
        counter.processed -= 1
        counter.completed = counter.processed


def _shift(counter: Any, by: int) -> None:
    # all by the same, because their differences say at which point of a batch the checkpoint was saved
    for name in ("ready", "started", "processed", "completed"):
        setattr(counter, name, getattr(counter, name) + by)


def _epoch_length(trainer: Trainer, length: int) -> int:
    limit = trainer.limit_train_batches
    if isinstance(limit, int):
        return min(length, limit)
    return int(length * limit) if limit is not None else length
