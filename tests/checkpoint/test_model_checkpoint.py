"""Lightning's own callbacks and calls that save and load, on two ranks."""

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import DataLoader

import lightning_moe
from tests import tiny
from tests.checkpoint.resuming import Model, Noisy
from tests.harness import RanksFailedError, run_ranks
from tests.test_strategy import rank_and_world

STEPS = {"max_epochs": -1, "limit_val_batches": 1, "val_check_interval": 3}


def train(
    callbacks: list[Callback], max_steps: int, seed: int = 0, ckpt_path: Any = None, **options: Any
) -> tuple[pl.Trainer, Model]:
    pl.seed_everything(seed, verbose=False)
    module = Model()
    options = {
        **STEPS,
        "max_steps": max_steps,
        "enable_checkpointing": any(isinstance(callback, Checkpoint) for callback in callbacks),
        "use_distributed_sampler": True,
        **options,
    }
    trainer = tiny.trainer(lightning_moe.ExpertParallelStrategy(), rank_and_world()[1], callbacks=callbacks, **options)
    trainer.fit(module, DataLoader(Noisy(), 2, shuffle=True), DataLoader(Noisy(4), 2), ckpt_path=ckpt_path)
    return trainer, module


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def save_top(folder: Path, last: bool | str) -> dict[str, Any]:
    def callback() -> ModelCheckpoint:
        return ModelCheckpoint(folder, "{step}", monitor="val_loss", save_top_k=2, save_last=last)  # type: ignore[arg-type]

    unbroken = train([ModelCheckpoint(folder / "other", monitor="val_loss", save_last=last)], 14)[1].losses  # type: ignore[arg-type]
    save = callback()
    trainer, _ = train([save], 9)
    trainer.strategy.barrier()
    found: dict[str, Any] = {
        "names": names(folder),
        "link": (folder / "last.ckpt").is_symlink(),
        "best": os.path.basename(save.best_model_path),
    }
    best = trainer.validate(ckpt_path="best", dataloaders=DataLoader(Noisy(4), 2), verbose=False)
    found["best loss"] = (save.best_model_score.item(), best[0]["val_loss"])  # type: ignore[union-attr]
    again = callback()
    _, module = train([again], 14, 5, "last")
    found |= {"resumed": module.losses, "unbroken": unbroken, "remembered": len(again.best_k_models)}
    return found


@pytest.mark.parametrize("last", [True, "link"])
def test_the_best_and_the_last(tmp_path: Path, last: bool | str) -> None:
    for found in run_ranks(save_top, 2, tmp_path, last):
        kept = [name for name in found["names"] if name.startswith("step")]
        assert len(kept) == 2
        assert set(found["names"]) == {*kept, "last.ckpt", "other"}, "nothing unfinished is left"
        assert found["link"] == (last == "link")
        assert found["best"] in kept
        # validation draws a random number, so that the same weights have another loss, but not by more than 1
        assert abs(found["best loss"][0] - found["best loss"][1]) < 1
        # Lightning saves the last one when it saves one of the best, at 3, 6 or 9 of 14 steps.
        assert len(found["resumed"]) in (5, 8, 11)
        assert found["resumed"] == found["unbroken"][-len(found["resumed"]) :]
        assert found["remembered"] == 2


def save_every(folder: Path) -> tuple[list[str], list[float], list[float]]:
    save = ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=-1)
    _, module = train([save], 9)
    _, resumed = train([], 9, 5, folder / "step=4.ckpt")
    return names(folder), module.losses[4:], resumed.losses


def test_every_few_steps(tmp_path: Path) -> None:
    for saved, unbroken, resumed in run_ranks(save_every, 2, tmp_path):
        assert saved == [f"step={step}.ckpt" for step in (2, 4, 6, 8)]
        assert resumed == unbroken


class Fails(Callback):
    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        if len(module.losses) == 4 and trainer.global_rank in self.ranks:
            raise OSError("the disk of the data is gone")


class Terminated(Callback):
    """Some ranks are sent SIGTERM after the third batch, wherever they are then."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.losses = 0

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        if len(module.losses) == 3 and trainer.global_rank in self.ranks:
            threading.Timer(0.01 * trainer.global_rank, os.kill, (os.getpid(), signal.SIGTERM)).start()

    def on_exception(self, trainer: pl.Trainer, module: Any, exception: BaseException) -> None:
        self.losses = len(module.losses)


SAVERS: dict[str, Callable[[Path], Callback]] = {
    "OnExceptionCheckpoint": lambda folder: OnExceptionCheckpoint(folder, "saved"),
    "ModelCheckpoint": lambda folder: ModelCheckpoint(
        folder, "saved", save_on_exception=True, every_n_train_steps=10**6, enable_version_counter=False
    ),
}


def saved_by(folder: Path, saver: str, callback: Callback) -> tuple[str, int]:
    """What ended the run, and after how many batches."""
    try:
        module = Model()
        train([SAVERS[saver](folder), callback], 40)
    except BaseException as error:
        return f"{type(error).__name__}: {error}", getattr(callback, "losses", 4)
    return "", len(module.losses)


def end_and_resume(folder: Path) -> dict[str, Any]:
    unbroken = train([], 40)[1].losses
    found: dict[str, Any] = {}
    for saver in SAVERS:
        for name, callback in {
            "exception": Fails((0, 1)),
            "SIGTERM to all": Terminated((0, 1)),
            "SIGTERM to rank 1": Terminated((1,)),
        }.items():
            place = folder / saver / name
            error, after = saved_by(place, saver, callback)
            _, module = train([], after + 3, 5, place / "saved.ckpt")
            found[f"{saver}, {name}"] = (error, module.losses, unbroken[after : after + 3])
    return found


def test_what_ends_a_run_is_saved_and_it_goes_on(tmp_path: Path) -> None:
    for found in run_ranks(end_and_resume, 2, tmp_path, timeout=180):
        for name, (error, resumed, unbroken) in found.items():
            assert error.startswith("OSError: the disk" if "exception" in name else SIGTERMException.__name__), name
            assert resumed == unbroken, name


def fail_alone(folder: Path) -> None:
    import lightning_moe.checkpoint.io as io

    io._WAIT_FOR_RANKS_S = 1.0
    train([OnExceptionCheckpoint(folder), Fails((1,))], 20)


def test_a_rank_that_fails_alone_does_not_wait_for_the_others_to_save(tmp_path: Path) -> None:
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(fail_alone, 2, tmp_path, timeout=60)
    assert "rank 1 of 2: CheckpointError: no checkpoint is saved of this exception" in str(caught.value)
    assert "OSError: the disk of the data is gone" in str(caught.value), "what the exception was"
    assert names(tmp_path) == []
