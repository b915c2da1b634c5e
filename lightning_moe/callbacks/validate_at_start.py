"""A point at step 0 on the validation curve."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override


class ValidateAtStart(Callback):
    """Validates and logs once before the first training step, so that the curve shows where the run began.

    Lightning's sanity check runs validation too, but logs nothing. A resumed run is left alone.
    """

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loop: Any = trainer.fit_loop.epoch_loop.val_loop
        if trainer.global_step or not trainer.enable_validation:
            return
        # What the training loop does around its own validations.
        trainer.validating = True
        loop.run()
        trainer.training = True
