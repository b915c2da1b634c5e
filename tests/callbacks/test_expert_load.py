"""The load of experts as it is logged, against counts that the tests make of the routers' choices themselves."""

import io
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_moe.callbacks import ExpertLoadMonitor
from lightning_moe.callbacks.heat_map import heat_map
from lightning_moe.dispatch.all_to_all import AllToAllDispatcher
from lightning_moe.nn import GroupedExperts
from tests import tiny
from tests.callbacks.test_throughput import Records
from tests.harness import run_ranks, run_ranks_expecting_error
from tests.test_strategy import rank_and_world

LAYERS = [f"net.model.layers.{layer}.mlp.experts" for layer in (0, 1)]


def logged(records: Records) -> dict[int, dict[str, float]]:
    """What the monitor logged, by step."""
    rows = {
        step: {name: float(value) for name, value in row.items() if name.startswith("experts/")}
        for step, row in records.rows.items()
    }
    return {step: row for step, row in rows.items() if row}


# A model whose routers choose for themselves


def fit_model(options: dict[str, Any]) -> tuple[dict[int, dict[str, float]], dict[str, list[Tensor]], dict[str, float]]:
    """What was logged, what the routers chose in each training step, and ``trainer.callback_metrics``."""
    rank, world = rank_and_world()
    pl.seed_everything(0, verbose=False)
    module = tiny.TinyLM()
    chosen: dict[str, list[Tensor]] = {name: [] for name in LAYERS}

    def keep(name: str) -> Callable[..., None]:
        def hook(experts: torch.nn.Module, args: Any, kwargs: Any) -> None:
            again = torch._C._current_graph_task_id() != -1
            if experts.training and not again:
                chosen[name].append(next(a for a in (*args, *kwargs.values()) if not a.is_floating_point()).clone())

        return hook

    for name in LAYERS:
        module.get_submodule(name).register_forward_pre_hook(keep(name), with_kwargs=True)
    records = Records()
    trainer = tiny.trainer(
        tiny.moe_ep(dispatcher=AllToAllDispatcher(deduplicate=False), **options),
        devices=world,
        max_steps=6,
        val_check_interval=1,
        logger=records,
        callbacks=[ExpertLoadMonitor(every_n_steps=3)],
    )
    trainer.fit(module, *(tiny.loader(tiny.tokens(6), rank, world) for _ in range(2)))
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("experts/")}
    return logged(records), chosen, metrics


def expected(chosen: list[list[list[int]]], ep: int, steps: int) -> dict[str, float]:
    """The metrics of one layer, of the experts that each rank chose in each forward of a window."""
    everything = [expert for rank in chosen for forward in rank for expert in forward]
    counts = [everything.count(expert) for expert in range(8)]
    shares = [count / len(everything) for count in counts]
    per_rank = 8 // ep
    rows, sent = [0] * len(chosen), 0
    for rank, forwards in enumerate(chosen):
        for forward in forwards:
            for expert in forward:
                owner = rank // ep * ep + expert // per_rank
                rows[owner] += 1
                sent += owner != rank
    return {
        "load_imbalance": max(counts) / (len(everything) / 8),
        "dead_experts": counts.count(0) / 8,
        "router_entropy": -sum(share * math.log2(share) for share in shares if share) / 3,
        "rank_imbalance": max(rows) / (len(everything) / len(chosen)),
        "rows_sent": sent / len(chosen) / steps,
        # 32 float32 numbers and a weight
        "bytes_sent": sent / len(chosen) / steps * (32 * 4 + 4),
    }


@pytest.mark.parametrize(
    ("world", "ep", "options"), [(2, 2, {}), (2, 2, {"activation_checkpointing": "full"}), (4, 2, {})]
)
def test_logs_what_the_routers_chose(world: int, ep: int, options: dict[str, Any]) -> None:
    ranks = run_ranks(fit_model, world, {"expert_parallel_size": ep, **options})
    rows = ranks[0][0]
    assert set(rows) == {2, 5}, "at the last step of each window"
    for step, row in rows.items():
        by_layer = []
        for name in LAYERS:
            chosen = [[index.flatten().tolist() for index in kept[name][step - 2 : step + 1]] for _, kept, _ in ranks]
            want = expected(chosen, ep, steps=3)
            if options:  # the rows of recomputed forwards travel, too
                want |= {key: 2 * want[key] for key in ("rows_sent", "bytes_sent")}
            got = {key.rpartition("/")[2]: value for key, value in row.items() if f"/{name}/" in key}
            assert got == pytest.approx(want, rel=1e-6)
            by_layer.append(want)
        summary = {key: sum(layer[key] for layer in by_layer) / 2 for key in by_layer[0]}
        summary |= {key: 2 * summary[key] for key in ("rows_sent", "bytes_sent")}
        summary["load_imbalance_max"] = max(layer["load_imbalance"] for layer in by_layer)
        assert {key: value for key, value in row.items() if key.count("/") == 1} == pytest.approx(
            {f"experts/{key}": value for key, value in summary.items()}, rel=1e-6
        )
    for _, _, seen in ranks:
        assert seen == {key: value for key, value in rows[5].items() if key.count("/") == 1}, "the same on every rank"


# A model that chooses what the test tells it


class Fixed(pl.LightningModule):
    """Its batches name the experts."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = GroupedExperts(4, 8, 8)
        self.other = GroupedExperts(2, 8, 8)  # a layer that is never called in training
        self.hidden = torch.nn.Linear(1, 8)

    def training_step(self, index: Tensor, batch_idx: int) -> Tensor:
        hidden = self.hidden(torch.ones(index.shape[1], 1))
        return self.experts(hidden, index[0], torch.ones(index[0].shape)).sum()

    def validation_step(self, index: Tensor, batch_idx: int) -> None:
        self.training_step(index, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def choices(*steps: list[int]) -> DataLoader:
    """A step's choices as ``[tokens, 1]``, the same on every rank."""
    return DataLoader(torch.tensor(steps).unsqueeze(2), batch_size=1)


A, B = [0, 0, 0, 1], [2, 3, 2, 3]


def fixed(
    monitor: ExpertLoadMonitor | None, data: list[DataLoader], fits: int = 1, strategy: Any = None, **options: Any
) -> dict[str, Any]:
    """What was logged, and the reductions and warnings of some fits."""
    _, world = rank_and_world()
    records, module, reductions = Records(), Fixed(), 0
    logger = options.pop("logger", records)
    original = dist.all_reduce

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal reductions
        reductions += 1
        return original(*args, **kwargs)

    dist.all_reduce = counted
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(fits):
            trainer = tiny.trainer(
                strategy or tiny.moe_ep(expert_parallel_size=2),
                devices=world,
                max_epochs=1,
                logger=logger,
                callbacks=[monitor] if monitor else [],
                **options,
            )
            trainer.fit(module, *data)
    dist.all_reduce = original
    said = [str(w.message) for w in caught if "experts" in str(w.message) or "routers" in str(w.message)]
    return {"rows": logged(records), "reductions": reductions, "warnings": said}


def windows() -> dict[str, dict[str, Any]]:
    """Several runs in one pair of processes."""
    data = choices(A, A, B, B, A, B)
    return {
        "by two": fixed(ExpertLoadMonitor(2), [data]),
        "without": fixed(None, [data]),
        "validation": fixed(ExpertLoadMonitor(2), [data, choices(B, B)], val_check_interval=1),
        "accumulated": fixed(ExpertLoadMonitor(1), [data], accumulate_grad_batches=2),
        "two fits": fixed(ExpertLoadMonitor(4), [choices(A, A, A, B)], fits=2),
        "odd end": fixed(ExpertLoadMonitor(4), [data]),
    }


def test_windows_hold_what_happened_in_them() -> None:
    first, second = run_ranks(windows, 2)
    key = "experts/experts"
    rows = first["by two"]["rows"]
    assert set(rows) == {1, 3, 5}
    # A: three of four choices for expert 0, all for rank 0. B: half for each of experts 2 and 3, all for rank 1.
    for step, imbalance, dead in ((1, 3.0, 0.5), (3, 2.0, 0.5), (5, 1.5, 0.0)):
        assert rows[step][f"{key}/load_imbalance"] == imbalance
        assert rows[step][f"{key}/dead_experts"] == dead
    assert [row[f"{key}/rank_imbalance"] for row in rows.values()] == [2.0, 2.0, 1.0]
    # In each step one of the two ranks sends its four choices to the other.
    assert {row[f"{key}/rows_sent"] for row in rows.values()} == {2.0}
    never_called = {name for row in rows.values() for name in row if "/other/" in name}
    assert never_called == {"experts/other/rows_sent", "experts/other/bytes_sent"}
    assert all("dropped" not in name for row in rows.values() for name in row), "without a budget nothing is dropped"
    assert rows[1]["experts/load_imbalance"] == 3.0, "a layer that is not called is in no mean"

    assert first["validation"]["rows"] == rows
    assert first["by two"]["reductions"] - first["without"]["reductions"] == 3, "one reduction a window, no more"
    accumulated = first["accumulated"]["rows"]
    assert [row[f"{key}/load_imbalance"] for row in accumulated.values()] == [3.0, 2.0, 1.5]
    assert {row[f"{key}/rows_sent"] for row in accumulated.values()} == {4.0}, "of a step, not of a batch"
    assert first["two fits"]["rows"][3][f"{key}/load_imbalance"] == 9 / 4, "the second fit begins anew"
    assert set(first["odd end"]["rows"]) == {3}
    assert {name: run["rows"] for name, run in second.items()} == {name: run["rows"] for name, run in first.items()}


def dead_and_loaded() -> list[list[str]]:
    return [
        fixed(monitor, [choices(A, A, A, A, B, A)])["warnings"]
        for monitor in (
            ExpertLoadMonitor(1, warn_dead_after=4, warn_rank_imbalance=None),
            ExpertLoadMonitor(1, warn_dead_after=5, warn_rank_imbalance=1.9),
            ExpertLoadMonitor(1, warn_dead_after=None),
        )
    ]


def test_warns_once_of_experts_without_tokens_and_of_a_loaded_rank() -> None:
    first, second = run_ranks(dead_and_loaded, 2)
    (dead,), (loaded,), nothing = first
    assert dead.startswith("experts: experts 2, 3 got no token in 4 windows of 1 steps in a row")
    assert loaded.startswith("experts: the routers chose experts of one rank 2.0 times as often")
    assert nothing == []
    assert second == [[], [], []], "said by rank 0"


def drawn(folder: str) -> None:
    logger = TensorBoardLogger(folder, name="", version="")
    monitor = ExpertLoadMonitor(2, heat_map_every_n_steps=4)
    fixed(monitor, [choices(A, A, A, B, A, B, A, A)], logger=logger)


def test_draws_a_heat_map_for_tensorboard(tmp_path: Path) -> None:
    from PIL import Image
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_ranks(drawn, 2, str(tmp_path))
    events = EventAccumulator(str(tmp_path), size_guidance={"images": 0})
    events.Reload()
    images = events.Images("experts/load")
    assert [image.step for image in images] == [3, 7]
    assert [point.value for point in events.Scalars("experts/experts/load_imbalance")] == [3.0, 1.5, 1.5, 3.0]
    # Steps 2 and 3, an A and a B on each of two ranks
    picture = torch.from_numpy(heat_map([torch.tensor([6, 2, 4, 4]), torch.tensor([0, 0])]))
    found = torch.from_numpy(np.array(Image.open(io.BytesIO(images[0].encoded_image_string))))
    assert torch.equal(found, picture)


def test_colours_of_the_heat_map() -> None:
    picture = heat_map([torch.tensor([8, 4, 2, 2, 0, 8]), torch.tensor([0, 0, 0]), torch.tensor([5, 5])])
    size = picture.shape[0] // 3
    assert picture.shape == (3 * size, 6 * size, 3)
    assert picture.dtype == "uint8"
    cells = picture[::size, ::size].tolist()
    assert (picture == picture[::size, ::size].repeat(size, 0).repeat(size, 1)).all()
    red, white, blue, black, grey = [178, 24, 43], [247, 247, 247], [33, 102, 172], [0, 0, 0], [128, 128, 128]
    assert cells[0] == [red, white, blue, blue, black, red]
    assert cells[1] == [grey] * 6
    assert cells[2] == [white, white, grey, grey, grey, grey]


# What cannot work


class Dense(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, index: Tensor, batch_idx: int) -> Tensor:
        return self.layer(index.float()).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def without_experts() -> tuple[dict[int, dict[str, float]], list[str]]:
    records = Records()
    trainer = tiny.trainer(tiny.moe_ep(), max_steps=2, logger=records, callbacks=[ExpertLoadMonitor(1)])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Dense(), choices(A, B))
    return logged(records), [str(w.message) for w in caught]


def test_says_that_a_model_without_experts_has_nothing_to_log() -> None:
    ((rows, said),) = run_ranks(without_experts, 1)
    assert rows == {}
    assert "ExpertLoadMonitor logs nothing: Dense has no experts" in said


def without_tensorboard() -> None:
    fixed(ExpertLoadMonitor(1, heat_map_every_n_steps=1), [choices(A)])


def with_another_strategy() -> None:
    trainer = tiny.trainer("ddp", devices=2, max_steps=1, callbacks=[ExpertLoadMonitor()])
    trainer.fit(Fixed(), choices(A))


def test_what_cannot_be_logged_is_an_error_on_every_rank() -> None:
    errors = run_ranks_expecting_error(without_tensorboard, 2, timeout=60)
    assert all("heat_map_every_n_steps=1 draws for a TensorBoardLogger" in error for error in errors), errors
    errors = run_ranks_expecting_error(with_another_strategy, 2, timeout=60)
    assert all("strategy='moe_ep', but the Trainer's strategy is DDPStrategy" in error for error in errors), errors


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"every_n_steps": 0}, "every_n_steps=0 must be 1 or more"),
        ({"every_n_steps": 4, "heat_map_every_n_steps": 6}, "heat_map_every_n_steps=6 must be a multiple of every_n"),
        ({"heat_map_every_n_steps": 0}, "heat_map_every_n_steps=0 must be a multiple"),
        ({"warn_dead_after": 0}, "warn_dead_after=0 must be 1 or more"),
        ({"warn_rank_imbalance": 1.0}, "warn_rank_imbalance=1.0 must be above 1"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        ExpertLoadMonitor(**options)
