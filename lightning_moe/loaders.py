"""Ranks with different numbers of batches: every rank must enter every collective of every step."""

from collections.abc import Sized

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import RunningStage

_LIMITS = {
    RunningStage.TRAINING: "limit_train_batches",
    RunningStage.VALIDATING: "limit_val_batches",
    RunningStage.SANITY_CHECKING: "limit_val_batches",
    RunningStage.TESTING: "limit_test_batches",
    RunningStage.PREDICTING: "limit_predict_batches",
}


def check_lengths(dataloader: object, trainer: "pl.Trainer", device: torch.device) -> None:
    """Find out before the first step whether all ranks have as many batches. Collective for loaders with a length.

    In prediction, where Lightning gives some ranks one sample less, numbers may differ, but no rank may have none.

    Args:
        dataloader: What this rank iterates over; one without a length is not checked.
        trainer: The trainer, for the stage and its ``limit_..._batches``.
        device: Device of the collective.

    Raises:
        ValueError: On every rank, if they would not take the same number of steps.
    """
    stage = trainer.state.stage
    if stage not in _LIMITS or not isinstance(dataloader, Sized):
        return
    try:
        length = len(dataloader)
    except TypeError:  # a DataLoader over an iterable dataset has __len__, which raises
        length = -1
    lengths = gather_int(length, device)
    if -1 in lengths:
        return
    limit = getattr(trainer, _LIMITS[stage])
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


def gather_int(value: int, device: torch.device) -> list[int]:
    """Return the value of every rank, in their order. Collective."""
    if not dist.is_initialized():
        return [value]
    values = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(values, torch.tensor([value], device=device))
    return [int(v.item()) for v in values]
