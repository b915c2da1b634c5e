"""A save in the background: training goes on, and what holds for a save in the foreground holds as well."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from lightning_moe.checkpoint.summed_file import SummedFile
from tests.checkpoint.stepping import Stepping, stepping_trainer
from tests.harness import run_ranks
from tests.test_strategy import rank_and_world

ASYNC = {"save_asynchronously": True}


class Disk:
    """A disk that can be stopped, and be full."""

    def __init__(self) -> None:
        self.runs = threading.Event()
        self.runs.set()
        self.full = False

    @contextmanager
    def installed(self) -> Iterator["Disk"]:
        write = SummedFile.write

        def slow(file: SummedFile, data: Any) -> int:
            assert self.runs.wait(60), "nobody let the disk go on"
            if self.full:
                file._error = OSError(28, "No space left on device")
                raise file._error
            return write(file, data)

        SummedFile.write = slow  # type: ignore[method-assign]
        try:
            yield self
        finally:
            SummedFile.write = write  # type: ignore[method-assign]
            self.runs.set()


class At(pl.Callback):
    """Does something before each batch, which is after the callbacks of the batch before."""

    def __init__(self, **actions: Callable[[pl.Trainer], None]) -> None:
        self.actions = actions

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if action := self.actions.get(f"step{trainer.global_step}"):
            action(trainer)


def loaded(path: Path, step: int, world: int) -> None:
    """Load a checkpoint into a new model, which has to be what it was after ``step`` steps."""
    module = Stepping()
    stepping_trainer(None, world, max_steps=step + 1).fit(module, ckpt_path=path)
    assert module.resumed_at == step


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def save_while_training(folder: Path, distributed: bool) -> None:
    _, world = rank_and_world()
    first, second = folder / "first.ckpt", folder / "second.ckpt"

    def save_first(trainer: pl.Trainer) -> None:
        disk.runs.clear()
        trainer.save_checkpoint(first)  # returns while the disk stands still

    def not_there_yet(trainer: pl.Trainer) -> None:
        assert names(folder) == ["first.ckpt.partial"]
        trainer.strategy.barrier()  # no rank lets its disk go on before the others have looked
        threading.Timer(0.3, disk.runs.set).start()
        trainer.save_checkpoint(second)  # waits for the first
        assert first.exists()

    with Disk().installed() as disk:
        at = At(step2=save_first, step4=not_there_yet)
        trainer = stepping_trainer(None, world, [at], max_steps=8, save_distributed_checkpoint=distributed, **ASYNC)
        trainer.fit(Stepping())
    trainer.strategy.barrier()
    assert names(folder) == ["first.ckpt", "second.ckpt"], "the end of fit waits for the second"
    loaded(first, 2, world)
    loaded(second, 4, world)
    trainer.save_checkpoint(folder / "after.ckpt")  # there is no training to go on any more
    assert (folder / "after.ckpt").exists()


@pytest.mark.parametrize("distributed", [True, False])
def test_training_goes_on_and_the_copy_stays_as_it_was(tmp_path: Path, distributed: bool) -> None:
    run_ranks(save_while_training, 2, tmp_path, distributed, timeout=120)


def keep_the_former(folder: Path) -> None:
    _, world = rank_and_world()

    def former_is_there(trainer: pl.Trainer) -> None:
        # Step 2 is being written, and Lightning has asked to delete step 1 and to link to step 2.
        assert names(folder) == ["epoch=0-step=1.ckpt", "epoch=0-step=2.ckpt.partial", "last.ckpt"]
        assert os.readlink(folder / "last.ckpt") == "epoch=0-step=1.ckpt"
        trainer.strategy.barrier()
        disk.runs.set()

    with Disk().installed() as disk:

        def wait(trainer: pl.Trainer) -> None:
            trainer.strategy._checkpoints.finish()
            trainer.strategy.barrier()
            disk.runs.clear()

        at = At(step1=wait, step2=former_is_there)
        stepping_trainer(folder, world, [at], max_steps=3, save_last="link", **ASYNC).fit(Stepping())
    assert names(folder) == ["epoch=0-step=3.ckpt", "last.ckpt"]
    assert os.readlink(folder / "last.ckpt") == "epoch=0-step=3.ckpt"
    loaded(folder / "last.ckpt", 3, world)


def test_the_former_one_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    run_ranks(keep_the_former, 2, tmp_path, timeout=120)


def fail(folder: Path) -> None:
    rank, world = rank_and_world()

    class Breaks(Stepping):
        def __init__(self, at: int) -> None:
            super().__init__()
            self.at = at

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            if index == self.at:
                raise ValueError("broken")
            return super().training_step(batch, index)

    def fill(trainer: pl.Trainer) -> None:
        trainer.strategy._checkpoints.finish()
        trainer.strategy.barrier()
        disk.full = rank == world - 1

    def run(name: str, steps: int, break_at: int = -1, **actions: Any) -> BaseException | None:
        disk.full = False
        trainer = stepping_trainer(folder / name, world, [At(**actions)], max_steps=steps, save_last="link", **ASYNC)
        try:
            trainer.fit(Breaks(break_at))
        except Exception as error:
            return error
        finally:
            trainer.strategy.barrier()
        return None

    with Disk().installed() as disk:
        # At the next save, at the end, and beside an exception of the run's own.
        for name, steps, break_at in (("next", 9, -1), ("end", 2, -1), ("exception", 9, 2)):
            error = run(name, steps, break_at, step1=fill)
            told = "\n".join([str(error), *getattr(error, "__notes__", [])])
            assert "No space left" in told, f"{name}: {error!r}"
            assert "step=2.ckpt" in told, f"{name}: {error!r}"
            assert isinstance(error, ValueError if name == "exception" else OSError), f"{name}: {error!r}"
            assert names(folder / name) == ["epoch=0-step=1.ckpt", "last.ckpt"], f"{name}: {names(folder / name)}"
        disk.full = False
        assert isinstance(run("whole", 9, 3), ValueError)
    for name, step in (("next", 1), ("end", 1), ("exception", 1), ("whole", 3)):
        loaded(folder / name / "last.ckpt", step, world)


def test_an_error_in_the_background_is_raised_on_every_rank_and_deletes_nothing(tmp_path: Path) -> None:
    run_ranks(fail, 2, tmp_path, timeout=120)


def terminate(folder: Path) -> None:
    _, world = rank_and_world()

    def end(trainer: pl.Trainer) -> None:
        disk.runs.clear()
        trainer.save_checkpoint(folder / "a.ckpt")
        threading.Timer(0.5, disk.runs.set).start()
        os.kill(os.getpid(), signal.SIGTERM)

    with Disk().installed() as disk:
        trainer = stepping_trainer(None, world, [At(step2=end)], max_steps=9, **ASYNC)
        with pytest.raises(SIGTERMException):
            trainer.fit(Stepping())
    trainer.strategy.barrier()
    assert names(folder) == ["a.ckpt"]
    loaded(folder / "a.ckpt", 2, world)


def test_sigterm_lets_the_save_finish(tmp_path: Path) -> None:
    run_ranks(terminate, 2, tmp_path, timeout=120)


def save_twice(folder: Path) -> None:
    _, world = rank_and_world()
    callbacks = [ModelCheckpoint(folder, every_n_train_steps=1), ModelCheckpoint(folder, every_n_train_steps=2)]
    stepping_trainer(None, world, callbacks, max_steps=4, **ASYNC).fit(Stepping())
    kept = {Path(callback.best_model_path).name for callback in callbacks}
    assert kept == {"epoch=0-step=4.ckpt", "epoch=0-step=4-v1.ckpt"}
    assert set(names(folder)) == kept


def test_two_callbacks_do_not_take_one_name(tmp_path: Path) -> None:
    run_ranks(save_twice, 2, tmp_path, timeout=120)
