"""An interrupted and resumed run sees the batches that an unbroken one sees, through Lightning's own checkpoints."""

import logging
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_moe.data import PackedTokens
from lightning_moe.data.token_data_module import TokenDataModule
from tests.harness import run_ranks

LENGTH = 4


class Counted(TokenDataModule):
    """Tokens 0, 1, 2, ...: the first token of a window says which window it is."""

    def __init__(self, windows=20, batch_size=4, num_workers=0, seed=0):
        super().__init__(LENGTH, batch_size, 0.0, seed, num_workers)
        self.windows = windows

    @property
    def vocab_size(self):
        return self.windows * LENGTH + 1

    def load_datasets(self):
        data = PackedTokens(torch.arange(self.windows * LENGTH + 1), LENGTH)
        return data, data


class Recorder(LightningModule):
    def __init__(self, fail_at=None):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.batches = []
        self.places = []
        self.validated_after = []
        self.fail_at = fail_at

    def training_step(self, batch, batch_idx):
        if len(self.batches) == self.fail_at:
            raise RuntimeError("cut off")
        self.batches.append([int(row[0]) // LENGTH for row in batch["input_ids"]])
        self.places.append((self.trainer.current_epoch, batch_idx))
        return self.layer(torch.ones(1, 1)).mean()

    def validation_step(self, batch, batch_idx):
        if batch_idx == 0:
            self.validated_after.append(len(self.batches))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SaveOnce(Callback):
    """Saves one checkpoint at a hook, the first time that so many batches have been seen."""

    def __init__(self, path, hook, after):
        self.path = path
        self.after = after
        self.saved_after = None
        setattr(self, hook, self._save)

    def _save(self, trainer, module, *_):
        if len(module.batches) >= self.after and self.saved_after is None and not trainer.sanity_checking:
            self.saved_after = len(module.batches)
            trainer.save_checkpoint(self.path)


def fit(data, ckpt_path=None, callbacks=(), module=None, **options):
    torch.set_num_threads(1)
    module = module or Recorder()
    options = {"accelerator": "cpu", "devices": 1, "limit_val_batches": 0, "num_sanity_val_steps": 0, **options}
    trainer = Trainer(
        logger=False,
        enable_checkpointing=any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
        **options,
    )
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
    return module


def flat(batches):
    return [window for batch in batches for window in batch]


EPOCHS = {"max_epochs": 4}
STEPS = {"max_epochs": -1, "max_steps": 18}
VALIDATED = {"limit_val_batches": 1}
TWICE = {"limit_val_batches": 1, "val_check_interval": 2}
MOMENTS = [
    ("on_train_batch_end", 1),
    ("on_train_batch_end", 7),
    ("on_train_batch_end", 5),  # the last batch of the first epoch
    ("on_train_epoch_end", 5),
    ("on_train_epoch_start", 5),
    ("on_train_batch_start", 7),  # fetched, not trained on
]


@pytest.mark.parametrize(("hook", "after"), MOMENTS, ids=lambda value: str(value))
@pytest.mark.parametrize("limits", [EPOCHS, STEPS], ids=["epochs", "steps"])
@pytest.mark.parametrize("more", [{}, {"limit_train_batches": 4}, VALIDATED, TWICE], ids=["", "limit", "val", "val2"])
def test_a_resumed_run_sees_the_batches_of_an_unbroken_one(tmp_path, hook, after, limits, more):
    options = {**limits, **more}
    unbroken = fit(Counted(), **options)
    save = SaveOnce(tmp_path / "saved.ckpt", hook, after)
    fit(Counted(), callbacks=[save], **options)
    resumed = fit(Counted(), ckpt_path=save.path, **options)

    assert len(unbroken.batches) > save.saved_after
    assert resumed.batches == unbroken.batches[save.saved_after :]
    assert resumed.places == unbroken.places[save.saved_after :]
    after_saving = [count - save.saved_after for count in unbroken.validated_after if count > save.saved_after]
    assert [count for count in resumed.validated_after if count > 0] == after_saving


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("after", [5, 7])
def test_workers_do_not_change_what_is_seen(tmp_path, num_workers, after):
    unbroken = fit(Counted(), **EPOCHS)
    save = SaveOnce(tmp_path / "saved.ckpt", "on_train_batch_end", after)
    first = fit(Counted(num_workers=num_workers), callbacks=[save], max_epochs=2)
    resumed = fit(Counted(num_workers=num_workers), ckpt_path=save.path, **EPOCHS)
    assert first.batches == unbroken.batches[:10]
    assert resumed.batches == unbroken.batches[after:]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_run_that_ended_with_an_epoch_goes_on_with_the_next(tmp_path, num_workers):
    checkpoints = ModelCheckpoint(dirpath=tmp_path, filename="ended")
    fit(Counted(num_workers=num_workers), callbacks=[checkpoints], max_epochs=2)
    resumed = fit(Counted(num_workers=num_workers), ckpt_path=tmp_path / "ended.ckpt", **EPOCHS)
    assert resumed.batches == fit(Counted(), **EPOCHS).batches[10:]


def test_a_run_that_max_steps_ended_within_an_epoch_goes_on_there(tmp_path):
    unbroken = fit(Counted(), **STEPS)
    checkpoints = ModelCheckpoint(dirpath=tmp_path, filename="ended")  # saves when the epoch ends, here after 2 of 5
    fit(Counted(), callbacks=[checkpoints], max_epochs=-1, max_steps=7)
    resumed = fit(Counted(), ckpt_path=tmp_path / "ended.ckpt", **STEPS)
    assert resumed.batches == unbroken.batches[7:]
    assert resumed.places == unbroken.places[7:]


@pytest.mark.parametrize("fail_at", [2, 4, 7])
def test_the_batch_whose_step_was_cut_off_comes_again(tmp_path, fail_at):
    unbroken = fit(Counted(), max_epochs=3)
    checkpoints = ModelCheckpoint(dirpath=tmp_path, filename="cut", save_on_exception=True, every_n_epochs=100)
    with pytest.raises(RuntimeError, match="cut off"):
        fit(Counted(), callbacks=[checkpoints], module=Recorder(fail_at), max_epochs=3)
    resumed = fit(Counted(), ckpt_path=tmp_path / "cut.ckpt", max_epochs=3)
    assert resumed.batches == unbroken.batches[fail_at:]


@pytest.mark.parametrize("limits", [{"max_epochs": 3}, {"max_epochs": -1, "max_steps": 1000}], ids=["epochs", "steps"])
@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4), (4, 3)])
@pytest.mark.parametrize(
    ("hook", "epochs_done"), [("on_train_batch_end", 0.5), ("on_train_batch_end", 1), ("on_train_epoch_end", 1)]
)
def test_another_batch_size_neither_leaves_out_nor_repeats(tmp_path, limits, before, after, hook, epochs_done):
    windows, wanted = 48, 48 * 3
    saved_at = int(windows * epochs_done) // before
    save = SaveOnce(tmp_path / "saved.ckpt", hook, saved_at)
    first = fit(Counted(windows, before), callbacks=[save], max_epochs=-1, max_steps=saved_at + 1)
    limits = (
        {**limits, "max_steps": saved_at + (wanted - saved_at * before) // after} if "max_steps" in limits else limits
    )
    resumed = fit(Counted(windows, after), ckpt_path=save.path, **limits, **VALIDATED)

    seen = flat(first.batches[:saved_at] + resumed.batches)
    assert len(seen) == wanted
    for epoch in range(3):
        assert sorted(seen[epoch * windows : (epoch + 1) * windows]) == list(range(windows))
    ends = [(epoch * windows - saved_at * before) // after for epoch in (1, 2, 3)]
    assert [count for count in resumed.validated_after if count > 0] == [end for end in ends if end > 0]


def test_rounding_is_said_through_a_trainer_too(tmp_path, caplog):
    save = SaveOnce(tmp_path / "saved.ckpt", "on_train_batch_end", 3)
    first = fit(Counted(windows=24, batch_size=3), callbacks=[save], max_epochs=1)
    with caplog.at_level(logging.INFO):
        resumed = fit(Counted(windows=24, batch_size=4), ckpt_path=save.path, max_epochs=1)
    assert "9 items into epoch 0" in caplog.text
    assert "continuing at 8" in caplog.text
    assert flat(resumed.batches) == flat(first.batches)[8:]
    assert [place[1] for place in resumed.places] == [2, 3, 4, 5]


def test_other_data_in_the_middle_of_an_epoch_is_an_error(tmp_path):
    save = SaveOnce(tmp_path / "saved.ckpt", "on_train_batch_end", 2)
    fit(Counted(), callbacks=[save], max_epochs=1)
    with pytest.raises(ValueError, match=r"dataset_items=20, and now it is 24"):
        fit(Counted(windows=24), ckpt_path=save.path, max_epochs=2)


def test_lightning_does_not_warn_that_the_loader_cannot_resume(tmp_path, recwarn):
    save = SaveOnce(tmp_path / "saved.ckpt", "on_train_batch_end", 2)
    fit(Counted(), callbacks=[save], max_epochs=1)
    fit(Counted(), ckpt_path=save.path, max_epochs=1)
    assert not [warning for warning in recwarn if "not resumable" in str(warning.message)]


def _fit_on_ranks(path, ckpt_path, saved_at, max_epochs):
    save = [SaveOnce(path, "on_train_batch_end", saved_at)] if path else []
    module = fit(
        Counted(windows=48, batch_size=2),
        ckpt_path=ckpt_path,
        callbacks=save,
        max_epochs=max_epochs,
        strategy="ddp",
        devices=2,
    )
    return module.batches


def test_two_ranks_then_one_then_two(tmp_path: Path):
    unbroken = run_ranks(_fit_on_ranks, 2, None, None, 0, 2)
    assert [len(batches) for batches in unbroken] == [24, 24]  # 48 windows / (2 a batch * 2 ranks), twice
    for epoch in range(2):
        windows = flat(batch for batches in unbroken for batch in batches[epoch * 12 : (epoch + 1) * 12])
        assert sorted(windows) == list(range(48))

    two = run_ranks(_fit_on_ranks, 2, tmp_path / "two.ckpt", None, 3, 1)
    assert two == [batches[:12] for batches in unbroken]
    again = run_ranks(_fit_on_ranks, 2, None, tmp_path / "two.ckpt", 0, 2)
    assert again == [batches[3:] for batches in unbroken]

    save = SaveOnce(tmp_path / "one.ckpt", "on_train_batch_end", 10)
    one = fit(Counted(windows=48, batch_size=2), ckpt_path=tmp_path / "two.ckpt", callbacks=[save], max_epochs=2)
    seen = flat(batch for batches in two for batch in batches[:3])
    assert sorted(seen + flat(one.batches[:18])) == list(range(48))  # 48 - 3*2*2 = 36 windows, 18 batches of 2
    assert len(one.batches) == 18 + 24

    back = run_ranks(_fit_on_ranks, 2, None, tmp_path / "one.ckpt", 0, 2)
    seen += flat(one.batches[:10])
    rest = flat(batch for batches in back for batch in batches[:4])  # 48 - 12 - 20 = 16 windows, 4 steps of 4
    assert sorted(seen + rest) == list(range(48))
    assert [batches[4:] for batches in back] == [batches[12:] for batches in unbroken]
