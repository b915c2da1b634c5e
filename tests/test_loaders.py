"""Ranks whose dataloaders hold different numbers of batches, which nobody knows in advance."""

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, Sampler

from lightning_moe.nn import MoE
from tests import tiny
from tests.harness import run_ranks, run_ranks_expecting_error
from tests.test_strategy import rank_and_world

TIMEOUT = 180


def batch(rank: int, number: int) -> Tensor:
    """``[2, 8]``: other rows for each rank and number, which can be read from the first column."""
    rows = torch.randn(2, 8, generator=torch.Generator().manual_seed(1000 * rank + number))
    rows[:, 0] = rank + number / 100
    return rows


def number_of(rows: Tensor) -> int:
    return round(100 * (float(rows[0, 0]) % 1))


class Stream(IterableDataset):
    def __init__(self, count: int, rank: int | None = None, fail_at: int | None = None) -> None:
        self.count, self.rank, self.fail_at = count, rank_and_world()[0] if rank is None else rank, fail_at

    def __iter__(self) -> Iterator[Tensor]:
        for number in range(self.count):
            if number == self.fail_at:
                raise OSError("shard 7 is broken")
            yield batch(self.rank, number)


def stream(count: int, **options: Any) -> DataLoader:
    return DataLoader(Stream(count, **options), batch_size=None)


def sized(count: int, rank: int | None = None) -> DataLoader:
    rank = rank_and_world()[0] if rank is None else rank
    return DataLoader([batch(rank, number) for number in range(count)], batch_size=None)


class Endless(Sampler):
    """Tells no length."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count))


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), MoE(8, 8, 4, 2))
        self.losses: list[float] = []
        self.seen: list[list[int]] = []
        self.validated: list[int] = []

    def on_train_epoch_start(self) -> None:
        self.seen.append([])

    def loss(self, rows: Tensor) -> Tensor:
        return self.net(rows).square().mean()

    def training_step(self, rows: Any, index: int) -> Tensor:
        parts = [part for part in (rows.values() if isinstance(rows, dict) else [rows]) if part is not None]
        if not self.seen:  # resumed in an epoch
            self.seen.append([])
        self.seen[-1].append(number_of(parts[0]))
        loss = sum(self.loss(part) for part in parts)
        self.losses.append(float(self.trainer.strategy.reduce(loss.detach())))
        return loss

    def validation_step(self, rows: Tensor, index: int, dataloader_idx: int = 0) -> None:
        self.validated.append(number_of(rows))
        self.log("val_loss", self.loss(rows), sync_dist=True)

    def test_step(self, rows: Tensor, index: int) -> None:
        self.validation_step(rows, index)

    def predict_step(self, rows: Tensor, index: int, dataloader_idx: int = 0) -> Tensor:
        for _ in range(dataloader_idx + 1):  # ranks in different dataloaders would not meet
            out = self.net(rows)
        return torch.cat([rows[:, :1], out], dim=1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def build() -> Module:
    pl.seed_everything(0, verbose=False)
    return Module()


def trainer(**options: Any) -> pl.Trainer:
    _, world = rank_and_world()
    return tiny.trainer(tiny.moe_ep(expert_parallel_size=world), devices=world, **options)


def caught(function: Callable[[], Any]) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        result = function()
    return result, [str(w.message) for w in found if "ran out" in str(w.message)]


# Training, validation, test


def train_uneven(counts: list[int], options: dict[str, Any]) -> dict[str, Any]:
    rank, _ = rank_and_world()
    module = build()
    _, said = caught(lambda: trainer(max_epochs=2, **options).fit(module, stream(counts[rank])))
    epochs = [list(epoch) for epoch in module.seen]
    trainer(max_epochs=1).fit(module, sized(2))
    results = {}
    for stage in ("validate", "test"):
        module.validated.clear()
        run = getattr(trainer(), stage)
        metrics, warned = caught(lambda run=run: run(module, stream(counts[rank]), verbose=False))
        results[stage] = (list(module.validated), metrics[0]["val_loss"], warned)
    return {"epochs": epochs, "said": said, "losses": module.losses, "later": module.seen[2:], **results}


@pytest.mark.parametrize(
    ("counts", "options"),
    [([3, 5], {}), ([5, 3], {"limit_train_batches": 4}), ([4, 2, 3], {}), ([2, 6], {"accumulate_grad_batches": 2})],
)
def test_stages_end_together(counts: list[int], options: dict[str, Any]) -> None:
    ranks = run_ranks(train_uneven, len(counts), counts, options, timeout=TIMEOUT)
    shortest = list(range(min(counts)))
    for result in ranks:
        assert result["epochs"] == [shortest, shortest]
        assert result["later"] == [[0, 1]], "a later fit works"
        assert result["losses"] == ranks[0]["losses"]
        assert result["validate"][:2] == (shortest, ranks[0]["validate"][1])
        assert result["test"][:2] == (shortest, ranks[0]["test"][1])
    out = [rank for rank, count in enumerate(counts) if count == min(counts)]
    first = ranks[0]
    assert len(first["said"]) == 2, "once an epoch"
    for epoch, text in enumerate(first["said"]):
        assert f"the train dataloader ran out on rank {out[0]} after {min(counts)} batches" in text
        assert f"(epoch {epoch})" in text
        assert "had left was not used" in text
    assert "the val dataloader ran out on" in first["validate"][2][0]
    assert "the test dataloader ran out on" in first["test"][2][0]
    assert not any(result[key] for result in ranks[1:] for key in ("said",)), "said by rank 0 alone"


def train_with_validation(counts: list[int]) -> tuple[list[list[int]], list[int]]:
    rank, _ = rank_and_world()
    module = build()
    run = trainer(max_epochs=2, num_sanity_val_steps=1, check_val_every_n_epoch=1, val_check_interval=2)
    _, said = caught(lambda: run.fit(module, stream(counts[rank]), [stream(counts[1 - rank]), sized(1)]))
    return module.seen, module.validated, said


def test_validation_inside_training() -> None:
    first, second = run_ranks(train_with_validation, 2, [3, 5], timeout=TIMEOUT)
    assert first[:2] == second[:2]
    assert first[0] == [[0, 1, 2], [0, 1, 2]]
    assert first[1] == [0, 0] + 2 * [0, 1, 2, 0], "the sanity check, then one validation an epoch"
    assert sorted(text.split(" dataloader")[0] for text in first[2]) == ["the train", "the train", "the val", "the val"]


def train_equal(what: str, options: dict[str, Any]) -> tuple[list[float], list[str]]:
    rank, _ = rank_and_world()
    module = build()
    loaders: dict[str, Callable[[], Any]] = {
        "sized": lambda: sized(4),
        "iterable": lambda: stream(4),
        "workers": lambda: DataLoader(Stream(4), batch_size=None, num_workers=1),
        "sampler": lambda: DataLoader(
            torch.cat([batch(rank, number) for number in range(4)]), batch_size=2, sampler=Endless(8)
        ),
        "iterable that tells a length": lambda: DataLoader(Counted(4), batch_size=None),
        "some sized": lambda: sized(4) if rank else stream(4),
        "plain iterable": lambda: Plain(4),
    }
    _, said = caught(lambda: trainer(**options).fit(module, loaders[what]()))
    return module.losses, said


class Counted(Stream):
    def __len__(self) -> int:
        return 4


class Plain:
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Tensor]:
        return iter([batch(rank_and_world()[0], number) for number in range(self.count)])


def train_all_equal(options: dict[str, Any]) -> dict[str, tuple[list[float], list[str]]]:
    kinds = ["sized", "iterable", "sampler", "iterable that tells a length", "some sized", "plain iterable"]
    if "max_steps" in options:  # in a process that the harness forked, workers take seconds to end
        kinds.append("workers")
    return {kind: train_equal(kind, options) for kind in kinds}


@pytest.mark.parametrize(
    "options", [{"max_epochs": 2}, {"max_epochs": 2, "limit_train_batches": 3}, {"max_steps": 6}], ids=str
)
def test_equal_numbers_change_nothing(options: dict[str, Any]) -> None:
    ranks = run_ranks(train_all_equal, 2, options, timeout=TIMEOUT)
    steps = options.get("max_steps", 2 * options.get("limit_train_batches", 4))
    for results in ranks:
        losses = results["sized"][0]
        assert len(losses) == steps
        for kind, result in results.items():
            assert result == (losses, []), kind


def train_combined(mode: str) -> tuple[list[list[int]], list[float], list[str]]:
    rank, _ = rank_and_world()
    module = build()
    loaders = {"a": stream([5, 3][rank]), "b": stream([2, 4][rank]), "c": sized(4)}
    _, said = caught(lambda: trainer(max_epochs=2).fit(module, CombinedLoader(loaders, mode)))
    return module.seen, module.losses, said


@pytest.mark.parametrize(
    ("mode", "steps"), [("min_size", [0, 1]), ("max_size", [0, 1, 2, 3]), ("max_size_cycle", [0, 1, 2, 0])]
)
def test_combined_loaders(mode: str, steps: list[int]) -> None:
    """``a`` and ``b`` end after 3 and 2 batches on both ranks; ``c`` has 4."""
    first, second = run_ranks(train_combined, 2, mode, timeout=TIMEOUT)
    assert first[1] == second[1]
    if mode == "max_size_cycle":
        assert len(first[2]) == 4, "once for a and b an epoch, though b is begun again and again"
    if mode == "max_size":  # what has ended is None from then on
        assert len(first[1]) == 8
    else:
        assert first[0] == second[0] == [steps, steps]


class Tap:
    """An endless source that goes on where it was, such as a socket."""

    def __init__(self) -> None:
        self.number = 0

    def __iter__(self) -> "Tap":
        return self

    def __next__(self) -> Tensor:
        self.number += 1
        return batch(0, self.number - 1)


def train_endless() -> list[list[int]]:
    module = build()
    trainer(max_epochs=2, limit_train_batches=3).fit(module, Tap())
    return module.seen


def test_no_batch_of_an_endless_stream_is_lost_between_epochs() -> None:
    assert run_ranks(train_endless, 2, timeout=TIMEOUT) == [[[0, 1, 2], [3, 4, 5]]] * 2


# Errors


def fail_in(stage: str, kind: str, where: int) -> None:
    rank, _ = rank_and_world()
    module = build()
    broken = {"empty": lambda: stream(0 if rank else 3), "raises": lambda: stream(3, fail_at=2 if rank else None)}[kind]
    loaders = broken() if where == 0 else [stream(3 - 2 * rank), broken()]
    if stage == "fit":
        trainer(max_epochs=1).fit(module, loaders)
    else:
        getattr(trainer(), stage)(module, loaders)


def expect_failure(stage: str, kind: str, where: int) -> list[str]:
    errors = []
    try:
        fail_in(stage, kind, where)
    except Exception as error:
        errors.append(f"{type(error).__name__}: {error}")
    return errors


@pytest.mark.parametrize(
    ("stage", "where"), [("fit", 0), ("validate", 0), ("validate", 1), ("test", 0), ("predict", 0), ("predict", 1)]
)
def test_a_rank_without_any_batch(stage: str, where: int) -> None:
    errors = run_ranks_expecting_error(fail_in, 2, stage, "empty", where, timeout=TIMEOUT)
    assert len(set(errors)) == 1
    assert "dataloader has no batch at all on rank 1, but has some on rank 0" in errors[0]


@pytest.mark.parametrize(("stage", "where"), [("fit", 0), ("validate", 1), ("predict", 0), ("predict", 1)])
def test_a_dataset_that_raises_on_one_rank(stage: str, where: int) -> None:
    first, second = run_ranks_expecting_error(fail_in, 2, stage, "raises", where, timeout=TIMEOUT)
    assert second == "OSError: shard 7 is broken", "its own error"
    name = {"fit": "train", "validate": "val"}.get(stage, stage)
    assert f"batch 2 of the {name} dataloader could not be read on rank 1: OSError: shard 7 is broken" in first


def fail_then_go_on() -> tuple[list[str], list[list[int]]]:
    errors = [error for kind in ("raises", "empty") for error in expect_failure("fit", kind, 0)]
    errors += expect_failure("predict", "raises", 1)
    module = build()
    trainer(max_epochs=1).fit(module, stream(2))
    return errors, module.seen


def test_after_a_failure_of_the_data_the_ranks_can_go_on() -> None:
    for errors, seen in run_ranks(fail_then_go_on, 2, timeout=TIMEOUT):
        assert len(errors) == 3
        assert seen == [[0, 1]]


# Prediction


def predict(counts: list[list[int]], kinds: list[Callable[..., DataLoader]], options: dict[str, Any]) -> list[Any]:
    """``counts[loader][rank]`` batches; in one process, those of all ranks."""
    rank, world = rank_and_world()
    run = tiny.trainer(tiny.moe_ep(), devices=world, **options)
    loaders = []
    for numbers, kind in zip(counts, kinds, strict=True):
        if world > 1:
            loaders.append(kind(numbers[rank]))
        else:
            limit = options.get("limit_predict_batches", 99)
            rows = [batch(r, i) for r, count in enumerate(numbers) for i in range(min(count, limit))]
            loaders.append(DataLoader(rows, batch_size=None))
    run.limit_predict_batches = 1.0 if world == 1 else run.limit_predict_batches
    out = run.predict(build(), loaders)
    return out if len(loaders) > 1 else [out]


CASES: list[tuple[list[list[int]], list[Callable[..., DataLoader]], dict[str, Any]]] = [
    ([[1, 4]], [stream], {}),
    ([[3, 1]], [stream], {}),
    ([[3, 3]], [stream], {}),
    ([[3, 1], [1, 4]], [stream, stream], {}),
    ([[1, 3], [4, 1]], [stream, stream], {"limit_predict_batches": 3}),
    ([[1, 5]], [stream], {"limit_predict_batches": 3}),
    ([[1, 4], [2, 1], [3, 1], [1, 2]], [sized, stream, sized, stream], {}),
    ([[0, 0], [1, 3], [0, 0], [4, 2]], [stream, stream, stream, sized], {}),
    ([[0, 0], [1, 3], [0, 0], [2, 2]], [stream, sized, stream, stream], {"limit_predict_batches": 5}),
]


def predict_all(cases: list[Any]) -> list[list[Any]]:
    return [predict(*case) for case in cases]


def check_predictions(cases: list[Any], world: int) -> None:
    references = run_ranks(predict_all, 1, cases)[0]
    ranks = run_ranks(predict_all, world, cases, timeout=TIMEOUT)
    for number, (counts, _, options) in enumerate(cases):
        limit = options.get("limit_predict_batches", 99)
        for loader, numbers in enumerate(counts):
            mine = [ranks[rank][number][loader] for rank in range(world)]
            assert [len(out) for out in mine] == [min(n, limit) for n in numbers], f"case {number}"
            flat = [out for rank in mine for out in rank]
            reference = references[number][loader]
            assert len(flat) == len(reference)
            for ours, theirs in zip(flat, reference, strict=True):
                torch.testing.assert_close(ours, theirs, msg=f"case {number}")


def test_every_prediction_is_there_once() -> None:
    check_predictions(CASES, 2)


def test_predictions_of_three_ranks() -> None:
    check_predictions(
        [
            ([[1, 4, 2]], [stream], {}),
            ([[2, 1, 1], [1, 3, 2], [2, 2, 1]], [stream, sized, stream], {}),
            ([[2, 1, 5], [1, 3, 2]], [stream, stream], {"limit_predict_batches": 4}),
        ],
        3,
    )


class FetchesItself(Module):
    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        rows, index, _ = next(dataloader_iter)
        return super().training_step(rows, index)

    def predict_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        rows, _, _ = next(dataloader_iter)
        return self.net(rows)


def train_by_itself() -> list[list[int]]:
    module = FetchesItself()
    trainer(max_epochs=2).fit(module, stream(3 - rank_and_world()[0]))
    return module.seen


def test_a_step_that_fetches_its_batch_ends_together() -> None:
    assert run_ranks(train_by_itself, 2, timeout=TIMEOUT) == [[[0, 1], [0, 1]]] * 2


def predict_by_itself() -> None:
    trainer().predict(FetchesItself(), stream(2))


def test_a_step_that_fetches_its_batch_cannot_be_repeated() -> None:
    errors = run_ranks_expecting_error(predict_by_itself, 2, timeout=TIMEOUT)
    assert len(set(errors)) == 1
    assert "write predict_step(batch, batch_idx)" in errors[0]


# State


class Resumable:
    """A dataloader that can be saved, and tells no length."""

    def __init__(self, count: int) -> None:
        self.count, self.number, self.start = count, 0, 0

    def __iter__(self) -> Iterator[Tensor]:
        start, self.start = self.start, 0
        for number in range(start, self.count):
            self.number = number + 1
            yield batch(rank_and_world()[0], number)
        self.number = 0

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["number"]


class Save(pl.Callback):
    def __init__(self, path: str, step: int) -> None:
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)

    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if self.step == 0 and trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


def resume(path: str, step: int, counts: list[int], options: dict[str, Any]) -> tuple[Any, Any]:
    """``step`` 0 saves at the end of the first epoch."""
    rank, _ = rank_and_world()
    whole, resumed = build(), build()
    caught(lambda: trainer(max_epochs=2, callbacks=[Save(path, step)], **options).fit(whole, Resumable(counts[rank])))
    caught(lambda: trainer(max_epochs=2, **options).fit(resumed, Resumable(counts[rank]), ckpt_path=path))
    return (whole.seen, whole.losses), (resumed.seen, resumed.losses)


@pytest.mark.parametrize(
    ("step", "counts", "options"),
    [
        (1, [4, 4], {}),
        (3, [4, 4], {}),
        (6, [4, 4], {}),
        (2, [5, 5], {"limit_train_batches": 5}),
        (0, [4, 4], {}),
        (2, [5, 3], {}),
        (0, [5, 3], {}),
        (0, [3, 5], {}),
        (0, [4, 4], {"max_steps": 8}),  # only with max_steps does Lightning load what was saved at the end of an epoch
        (0, [5, 3], {"max_steps": 6}),
        (0, [3, 5], {"max_steps": 6}),
    ],
)
def test_resuming_reads_each_batch_once(tmp_path: Path, step: int, counts: list[int], options: dict[str, Any]) -> None:
    """Two batches are read ahead, one by Lightning and one by us, and none of them may be left out."""
    for (seen, losses), (again, continued) in run_ranks(
        resume, 2, str(tmp_path / "a.ckpt"), step, counts, options, timeout=TIMEOUT
    ):
        flat, rest = ([number for epoch in epochs for number in epoch] for epochs in (seen, again))
        done = step or min(counts)
        assert flat == 2 * list(range(min(counts)))
        assert rest == flat[done:]
        torch.testing.assert_close(continued, losses[done:])


# Attributes


def look() -> dict[str, Any]:
    module = build()
    pl.seed_everything(0, workers=True, verbose=False)
    seen: dict[str, Any] = {}

    class Epochs(Endless):
        def set_epoch(self, epoch: int) -> None:
            seen.setdefault("epochs", []).append(epoch)

    loader = DataLoader(torch.cat([batch(0, n) for n in range(3)]), batch_size=2, sampler=Epochs(6))
    run = trainer(max_epochs=2)
    run.fit(module, loader)
    wrapped = run.train_dataloader
    seen["same"] = wrapped.dataset is loader.dataset and wrapped.sampler is loader.sampler
    seen["batch_size"] = wrapped.batch_size
    seen["seeds workers"] = loader.worker_init_fn is not None
    try:
        len(wrapped)
    except TypeError as error:
        seen["length"] = str(error)
    return seen


def test_the_attributes_of_a_dataloader_are_reached() -> None:
    for seen in run_ranks(look, 2, timeout=TIMEOUT):
        assert seen["epochs"] == [0, 1]
        assert seen["same"]
        assert seen["batch_size"] == 2
        assert seen["seeds workers"], "what Lightning sets arrives at the dataloader"
        assert "length" in seen["length"]
