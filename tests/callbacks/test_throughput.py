import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_moe.callbacks import ThroughputMonitor
from lightning_moe.flops import transformer_flops_per_token
from tests.harness import run_ranks
from tests.models.tiny import causal_lm, config, loader, trainer

BATCH, LENGTH = 4, 32
METRICS = {"tps_per_gpu", "tflops_per_gpu", "step_time_s", "peak_memory_gib"}


class Records(Logger):
    """A logger that keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[int, dict[str, float]] = {}

    @property
    def name(self) -> str:
        return "records"

    @property
    def version(self) -> int:
        return 0

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        assert step is not None
        self.rows.setdefault(step, {}).update(metrics)

    def throughput(self) -> dict[int, dict[str, float]]:
        """What the monitor logged, by step."""
        return {step: row for step, row in self.rows.items() if "step_time_s" in row}


class Sleeper(LightningModule):
    """Steps that take a known time."""

    def __init__(self, seconds: Callable[[int], float] = lambda step: 0.02, validation: float = 0.0) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seconds, self.validation = seconds, validation

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        time.sleep(self.seconds(self.global_step))
        return self.weight.sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        time.sleep(self.validation)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Flopping(Sleeper):
    def flops_per_token(self, sequence_length: int) -> float:
        return 1e9 * sequence_length


class Slow(torch.utils.data.Dataset[Tensor]):
    def __init__(self, count: int, seconds: float = 0.0) -> None:
        self.count, self.seconds = count, seconds

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(self.seconds)
        return torch.zeros(LENGTH, dtype=torch.long)


def fit(
    root: Path, module: LightningModule, data: Any = None, **options: Any
) -> tuple[Records, ThroughputMonitor, Trainer]:
    monitor = options.pop("monitor", None) or ThroughputMonitor()
    validation = options.pop("validation", None)
    checkpoint = options.pop("ckpt_path", None)
    records = Records()
    callbacks = [monitor, *options.pop("callbacks", [])]
    run = trainer(
        root, **{"logger": records, "log_every_n_steps": 5, "max_steps": 10, **options, "callbacks": callbacks}
    )
    run.fit(module, data or DataLoader(Slow(200), BATCH), validation, ckpt_path=checkpoint)
    return records, monitor, run


def test_logs_speed_at_the_logging_steps(tmp_path: Path) -> None:
    records, monitor, run = fit(tmp_path, Flopping())
    found = records.throughput()
    assert list(found) == [4, 9]  # as Lightning numbers the fifth and the tenth step
    for row in found.values():
        assert row.keys() >= METRICS
        assert 0.02 <= row["step_time_s"] < 0.2
        assert BATCH * LENGTH / 0.2 < row["tps_per_gpu"] <= BATCH * LENGTH / 0.02
        assert row["tflops_per_gpu"] == pytest.approx(row["tps_per_gpu"] * 1e9 * LENGTH / 1e12)
        assert 0.05 < row["peak_memory_gib"] < 64
    assert monitor.tokens_seen == 10 * BATCH * LENGTH
    assert run.progress_bar_metrics["tps_per_gpu"] == pytest.approx(found[9]["tps_per_gpu"])
    assert run.callback_metrics.keys() >= METRICS


def test_first_steps_are_left_out(tmp_path: Path) -> None:
    records, monitor, _ = fit(tmp_path, Sleeper(lambda step: 1.0 if step == 0 else 0.02), max_steps=5)
    assert records.throughput()[4]["tps_per_gpu"] > BATCH * LENGTH / 0.2
    assert monitor.tokens_seen == 5 * BATCH * LENGTH
    module = Sleeper(lambda step: 1.0 if step == 0 else 0.02)
    records, _, _ = fit(tmp_path, module, max_steps=5, monitor=ThroughputMonitor(warmup_steps=0))
    assert records.throughput()[4]["tps_per_gpu"] < 5 * BATCH * LENGTH / 1.0


def test_window_of_nothing_but_warmup_logs_nothing(tmp_path: Path) -> None:
    records, _, _ = fit(tmp_path, Sleeper(), monitor=ThroughputMonitor(warmup_steps=5))
    assert list(records.throughput()) == [9]


def test_own_window(tmp_path: Path) -> None:
    monitor = ThroughputMonitor(log_every_n_steps=4)
    records, _, _ = fit(tmp_path, Sleeper(), monitor=monitor, max_steps=9, log_every_n_steps=100)
    assert list(records.throughput()) == [3, 7]


class SlowStream(torch.utils.data.IterableDataset[Tensor]):
    """Without a length, so that Lightning fetches the first batch before it says that validation starts."""

    def __iter__(self) -> Iterator[Tensor]:
        time.sleep(0.3)
        yield torch.zeros(LENGTH, dtype=torch.long)


class SlowIO(TorchCheckpointIO):
    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        time.sleep(0.3)
        super().save_checkpoint(*args, **kwargs)


def test_validation_and_saving_do_not_count(tmp_path: Path) -> None:
    module = Sleeper(validation=0.3)
    save = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=2, save_top_k=-1)
    options = {"val_check_interval": 3, "check_val_every_n_epoch": None, "enable_checkpointing": True}
    records, _, run = fit(
        tmp_path, module, validation=DataLoader(SlowStream()), callbacks=[save], plugins=[SlowIO()], **options
    )
    assert len(list(tmp_path.glob("*.ckpt"))) == 5
    for row in records.throughput().values():
        # A window is 3 or 5 steps of 0.02 s with a validation, its data and two checkpoints of 0.3 s each between.
        assert row["tps_per_gpu"] > BATCH * LENGTH / 0.1
        assert row["step_time_s"] < 0.1
    assert "save_checkpoint" not in vars(run)  # the Trainer is as it was


def test_loading_data_counts(tmp_path: Path) -> None:
    slow = DataLoader(Slow(200, seconds=0.02), BATCH)
    records, _, _ = fit(tmp_path, Sleeper(lambda step: 0.0), slow)
    for row in records.throughput().values():
        assert row["step_time_s"] >= 0.08
        assert row["tps_per_gpu"] <= BATCH * LENGTH / 0.08


def test_accumulated_batches_are_one_step(tmp_path: Path) -> None:
    records, monitor, _ = fit(tmp_path, Sleeper(), accumulate_grad_batches=3)
    assert len(records.throughput()) == 2
    for row in records.throughput().values():
        assert 0.06 <= row["step_time_s"] < 0.3
        assert BATCH * LENGTH / 0.1 < row["tps_per_gpu"] <= BATCH * LENGTH / 0.02
    assert monitor.tokens_seen == 3 * 10 * BATCH * LENGTH


def two_ranks(root: str) -> tuple[dict[int, dict[str, float]], int]:
    """Rank 1 has a quarter of the tokens and is slower."""
    import os

    rank = int(os.environ["RANK"])
    module = Sleeper(lambda step: 0.05 if rank else 0.0)
    data = DataLoader(Slow(200), 1 if rank else BATCH)
    records, monitor, _ = fit(Path(root), module, data, devices=2, strategy="ddp")
    return records.throughput() if rank == 0 else {}, monitor.tokens_seen


def test_ranks_are_added_up_and_the_slowest_counts(tmp_path: Path) -> None:
    (found, seen), (_, seen_by_other) = run_ranks(two_ranks, 2, str(tmp_path))
    mean_tokens = (BATCH + 1) * LENGTH / 2
    assert list(found) == [4, 9]
    for row in found.values():
        assert row["step_time_s"] >= 0.05
        assert mean_tokens / 0.2 < row["tps_per_gpu"] <= mean_tokens / 0.05
    assert seen == seen_by_other == 10 * (BATCH + 1) * LENGTH


@pytest.mark.parametrize("strategy", ["auto", "ddp", "moe_ep"])
def test_every_strategy(strategy: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        records, _, _ = fit(tmp_path, causal_lm(), loader(48, BATCH), strategy=strategy)
    row = records.throughput()[9]
    flops = transformer_flops_per_token(config(), 16).total
    assert caplog.text.count(f"tflops_per_gpu counts {flops / 1e6:.4g} MFLOP a token at length 16") == 1
    assert "causal half of attention" in caplog.text
    assert row["tflops_per_gpu"] == pytest.approx(row["tps_per_gpu"] * flops / 1e12)


class Foreign(Sleeper):
    """A network of Transformers inside a module that knows nothing of FLOPs."""

    def __init__(self) -> None:
        super().__init__(lambda step: 0.0)
        self.config = {"hidden_size": "not this one"}
        self.inner = torch.nn.Sequential(torch.nn.Linear(2, 2))
        self.inner[0].config = config()


def test_flops_from_the_configuration_of_a_submodule(tmp_path: Path) -> None:
    row = fit(tmp_path, Foreign())[0].throughput()[9]
    flops = transformer_flops_per_token(config(), LENGTH).total
    assert row["tflops_per_gpu"] == pytest.approx(row["tps_per_gpu"] * flops / 1e12)


def test_unknown_flops_are_left_out_and_said_once(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"leaves tflops_per_gpu out.*Define flops_per_token") as caught:
        records, _, _ = fit(tmp_path, Sleeper())
    assert sum("tflops_per_gpu" in str(warning.message) for warning in caught) == 1
    assert all(row.keys() & METRICS == METRICS - {"tflops_per_gpu"} for row in records.throughput().values())


class Pairs(torch.utils.data.Dataset[tuple[Tensor, int]]):
    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.zeros(3), 1


class Counting(Sleeper):
    def batch_tokens(self, batch: tuple[Tensor, Tensor]) -> int:
        return 10 * len(batch[1])


def test_other_batches(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"cannot count the tokens.*batch_tokens\(batch\) -> int on Sleeper") as caught:
        records, monitor, _ = fit(tmp_path, Sleeper(), DataLoader(Pairs(), BATCH))
    assert sum("cannot count" in str(warning.message) for warning in caught) == 1
    for row in records.throughput().values():
        assert row.keys() & METRICS == {"step_time_s", "peak_memory_gib"}
        assert row["step_time_s"] >= 0.02
    assert monitor.tokens_seen == 0

    records, monitor, _ = fit(tmp_path, Counting(), DataLoader(Pairs(), BATCH))
    assert all(0 < row["tps_per_gpu"] <= 10 * BATCH / 0.02 for row in records.throughput().values())
    assert monitor.tokens_seen == 10 * 10 * BATCH


@pytest.mark.parametrize(
    ("batch", "tokens"),
    [
        (torch.zeros(2, 8, dtype=torch.int32), 16),
        ({"labels": torch.zeros(3, 8, dtype=torch.long)}, 24),
        ({"input_ids": torch.zeros(3, 8, dtype=torch.long), "labels": torch.zeros(3, 1, dtype=torch.long)}, 24),
    ],
)
def test_kinds_of_batches(batch: Any, tokens: int, tmp_path: Path) -> None:
    data = DataLoader([batch] * 10, batch_size=None)
    _, monitor, _ = fit(tmp_path, Sleeper(lambda step: 0.0), data, max_steps=5)
    assert monitor.tokens_seen == 5 * tokens


def test_count_of_tokens_goes_on_after_a_resume(tmp_path: Path) -> None:
    _, _, run = fit(tmp_path, Sleeper(lambda step: 0.0), max_steps=7)  # in the middle of a window
    run.save_checkpoint(tmp_path / "at7.ckpt")
    module = Sleeper(lambda step: 0.0)
    records, monitor, _ = fit(tmp_path, module, max_steps=12, ckpt_path=str(tmp_path / "at7.ckpt"))
    assert monitor.tokens_seen == 12 * BATCH * LENGTH
    assert list(records.throughput()) == [9]


class Breaks(Callback):
    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        raise RuntimeError("on purpose")


def test_trainer_is_as_it_was_after_an_error(tmp_path: Path) -> None:
    run = trainer(tmp_path, max_steps=2, callbacks=[ThroughputMonitor(), Breaks()])
    with pytest.raises(RuntimeError, match="on purpose"):
        run.fit(Sleeper(), DataLoader(Slow(8), BATCH))
    assert "save_checkpoint" not in vars(run)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"warmup_steps": -1}, "warmup_steps=-1"), ({"log_every_n_steps": 0}, "log_every_n_steps=0")],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ThroughputMonitor(**options)


def test_figures_are_finite(tmp_path: Path) -> None:
    records, _, _ = fit(tmp_path, Flopping(lambda step: 0.0))
    for row in records.throughput().values():
        assert all(math.isfinite(value) for value in row.values())


@pytest.mark.gpu
def test_cuda_times_are_those_of_the_device(tmp_path: Path) -> None:
    class Busy(Sleeper):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            torch.cuda._sleep(50_000_000)  # cycles: tens of milliseconds, while the host runs ahead
            return self.weight.sum()

    records, _, _ = fit(tmp_path, Busy(), accelerator="cuda")
    for row in records.throughput().values():
        assert 0.01 < row["step_time_s"] < 0.2
        assert row["tps_per_gpu"] == pytest.approx(BATCH * LENGTH / row["step_time_s"], rel=0.2)
