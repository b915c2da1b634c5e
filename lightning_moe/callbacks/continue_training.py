"""Go on with a run that has reached its end."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import override


class ContinueTraining(Callback):
    """Trains on for some steps where a run is resumed from a checkpoint that stands at its end already.

    Lightning would stop at once, because ``max_steps`` is reached. With this callback the same command with
    ``--ckpt_path last`` goes on, again and again. Where the checkpoint is not at the end, nothing changes. A limit of
    ``max_epochs`` still holds.

    Args:
        extra_steps: Optimizer steps to go on for.

    Raises:
        ValueError: If ``extra_steps`` is not positive.
    """

    def __init__(self, extra_steps: int) -> None:
        if extra_steps < 1:
            raise ValueError(f"extra_steps={extra_steps} must be 1 or more")
        self.extra_steps = extra_steps

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn != TrainerFn.FITTING or trainer.max_steps == -1:
            return
        step = checkpoint["global_step"]
        if step < trainer.max_steps:
            return
        epochs = checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"]
        if trainer.max_epochs is not None and trainer.max_epochs != -1 and epochs >= trainer.max_epochs:
            rank_zero_warn(
                f"ContinueTraining cannot go on: the checkpoint has reached max_epochs={trainer.max_epochs} as well as"
                f" max_steps={trainer.max_steps}. Raise Trainer(max_epochs=...) or leave it out"
            )
            return
        end = step + self.extra_steps
        rank_zero_info(
            f"ContinueTraining: the checkpoint stands at step {step}, and max_steps={trainer.max_steps} is reached;"
            f" training goes on for {self.extra_steps} steps, to step {end}"
        )
        trainer.fit_loop.epoch_loop.max_steps = end
