import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_moe.callbacks import ContinueTraining
from tests.models.tiny import causal_lm, loader, trainer


class Counter(LightningModule):
    """Remembers the batches that it trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen: list[int] = []
        self.validations = 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen.append(int(batch[0]))
        return (self.weight * batch).mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.validations += 1

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(
    root: Path, resume: bool = False, extra: int | None = None, every_n_steps: int | None = None, **options: Any
) -> tuple[Counter, Trainer]:
    save = ModelCheckpoint(dirpath=root, save_last=True, every_n_train_steps=every_n_steps, save_top_k=-1)
    callbacks: list[Callback] = [save, *([ContinueTraining(extra)] if extra else [])]
    run = trainer(root, enable_checkpointing=True, callbacks=callbacks, **options)
    module, data = Counter(), DataLoader(torch.arange(10.0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run.fit(module, data, DataLoader(torch.arange(1.0)), ckpt_path=str(root / "last.ckpt") if resume else None)
    return module, run


@pytest.mark.parametrize("steps", [5, 10, 13], ids=["inside an epoch", "end of an epoch", "inside the next epoch"])
@pytest.mark.parametrize("every_n_steps", [None, 1], ids=["saved at epoch end", "saved after steps"])
@pytest.mark.parametrize("validate", [0, 1], ids=["without validation", "with validation"])
def test_finished_run_goes_on_as_if_it_had_been_longer(
    steps: int, every_n_steps: int | None, validate: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"every_n_steps": every_n_steps, "limit_val_batches": validate}
    fit(tmp_path, max_steps=steps, **options)
    checkpoint = (tmp_path / "last.ckpt").read_bytes()
    plain, _ = fit(tmp_path, resume=True, max_steps=steps, **options)
    assert plain.seen == []  # without the callback nothing happens
    longer, longer_run = fit(tmp_path, resume=True, max_steps=steps + 4, **options)
    (tmp_path / "last.ckpt").write_bytes(checkpoint)
    with caplog.at_level("INFO"):
        module, run = fit(tmp_path, resume=True, extra=4, max_steps=steps, **options)
    assert run.global_step == longer_run.global_step == steps + 4
    assert module.seen == longer.seen
    assert len(module.seen) == 4
    assert module.validations == longer.validations
    assert caplog.text.count(f"training goes on for 4 steps, to step {steps + 4}") == 1


def test_goes_on_again_and_again(tmp_path: Path) -> None:
    fit(tmp_path, max_steps=5, every_n_steps=1)
    for end in (8, 11, 14):
        module, run = fit(tmp_path, resume=True, extra=3, max_steps=5, every_n_steps=1)
        assert run.global_step == end
        assert len(module.seen) == 3


def test_unfinished_run_ends_where_it_would(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(tmp_path, max_steps=5, every_n_steps=1)
    with caplog.at_level("INFO"):
        module, run = fit(tmp_path, resume=True, extra=4, max_steps=7, every_n_steps=1)
    assert run.global_step == 7
    assert len(module.seen) == 2
    assert "ContinueTraining" not in caplog.text


def test_fresh_run_is_not_touched(tmp_path: Path) -> None:
    module, run = fit(tmp_path, extra=4, max_steps=5)
    assert run.global_step == len(module.seen) == 5


def test_no_limit_of_steps(tmp_path: Path) -> None:
    fit(tmp_path, max_epochs=1)
    module, run = fit(tmp_path, resume=True, extra=4, max_epochs=2)
    assert run.max_steps == -1
    assert run.global_step == 20
    assert len(module.seen) == 10


@pytest.mark.parametrize("max_epochs", [None, -1])
def test_no_limit_of_epochs(max_epochs: int | None, tmp_path: Path) -> None:
    fit(tmp_path, max_steps=10, max_epochs=max_epochs)
    _, run = fit(tmp_path, resume=True, extra=25, max_steps=10, max_epochs=max_epochs)
    assert run.global_step == 35


def test_reached_limit_of_epochs_is_said(tmp_path: Path) -> None:
    fit(tmp_path, max_steps=10, max_epochs=1)
    save = ModelCheckpoint(dirpath=tmp_path, save_last=True)
    run = trainer(
        tmp_path, max_steps=10, max_epochs=1, enable_checkpointing=True, callbacks=[save, ContinueTraining(4)]
    )
    with pytest.warns(UserWarning, match=r"ContinueTraining cannot go on.*max_epochs=1"):
        run.fit(Counter(), DataLoader(torch.arange(10.0)), ckpt_path=str(tmp_path / "last.ckpt"))
    assert run.global_step == 10


def test_evaluating_a_finished_checkpoint_is_not_touched(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(tmp_path, max_steps=5, every_n_steps=1)
    run = trainer(tmp_path, max_steps=5, callbacks=[ContinueTraining(4)])
    with caplog.at_level("INFO"):
        run.validate(Counter(), DataLoader(torch.arange(2.0)), ckpt_path=str(tmp_path / "last.ckpt"), verbose=False)
    assert run.max_steps == 5
    assert "ContinueTraining" not in caplog.text


class Rates(Callback):
    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.rates.append(float(trainer.callback_metrics["lr"]))


@pytest.mark.parametrize("strategy", ["auto", "moe_ep"])
def test_language_model_follows_the_new_length(strategy: str, tmp_path: Path) -> None:
    path = str(tmp_path / "done.ckpt")

    def run(steps: int, checkpoint: str | None, *more: Callback) -> tuple[list[float], Trainer]:
        rates = Rates()
        made = trainer(tmp_path, max_steps=steps, strategy=strategy, callbacks=[rates, *more])
        made.fit(causal_lm(), loader(32, 2), ckpt_path=checkpoint)
        return rates.rates, made

    straight, _ = run(9, None)
    _, finished = run(4, None)
    finished.save_checkpoint(path)
    gone_on, _ = run(4, path, ContinueTraining(5))
    assert gone_on == pytest.approx(straight[4:])


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="extra_steps=0"):
        ContinueTraining(0)
