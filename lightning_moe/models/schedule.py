"""How the learning rate goes over the steps of a run."""

import math
from collections.abc import Callable
from typing import Literal, get_args

Schedule = Literal["cosine", "constant"]


def check_schedule(schedule: str, warmup_steps: int, min_lr_ratio: float) -> None:
    """Check the options of :func:`learning_rate_factor`.

    Raises:
        ValueError: If one of them has a value that is not allowed.
    """
    if schedule not in get_args(Schedule):
        raise ValueError(f"schedule={schedule!r} must be one of {', '.join(map(repr, get_args(Schedule)))}")
    if warmup_steps < 0:
        raise ValueError(f"warmup_steps={warmup_steps} must be 0 or more")
    if not 0 <= min_lr_ratio <= 1:
        raise ValueError(f"min_lr_ratio={min_lr_ratio} must be between 0 and 1: it is a share of the learning rate")


def learning_rate_factor(
    step: int, total_steps: Callable[[], int], warmup_steps: int, schedule: Schedule, min_lr_ratio: float
) -> float:
    """Return what the learning rate is multiplied by in one step.

    It rises linearly from ``1 / (warmup_steps + 1)`` and is 1 in step ``warmup_steps``. From there on it stays, or it
    falls along half a cosine to ``min_lr_ratio`` at ``total_steps`` and stays there.

    Args:
        step: Optimizer steps made so far.
        total_steps: Gives the length of the run. It is called in each step of the decay, so that a run that is resumed
            with another length follows the new one, and never earlier: the length may depend on data that is not loaded
            while the optimizer is built.
        warmup_steps: Steps below the full learning rate.
        schedule: ``"cosine"`` or ``"constant"``.
        min_lr_ratio: The share of the learning rate that is left at the end.
    """
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    if schedule == "constant" or step == warmup_steps:
        return 1.0
    # A run no longer than its warm-up has no decay to be in the middle of.
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps() - warmup_steps))
    return min_lr_ratio + (1.0 - min_lr_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress))
