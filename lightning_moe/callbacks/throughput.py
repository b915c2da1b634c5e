"""Tokens and FLOPs a second, peak memory and step time, measured over all ranks."""

import contextlib
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from typing_extensions import override

from lightning_moe.callbacks.step_clock import StepClock
from lightning_moe.flops import CONVENTION, transformer_flops_per_token


class ThroughputMonitor(Callback):
    """Logs how fast training is, to every logger and to the progress bar.

    A window is the steps between two logging steps of the Trainer. Of each window it logs

    * ``tps_per_gpu``: tokens a second and rank: the mean over ranks of the tokens, padding included, divided by the
      time of the slowest rank;
    * ``tflops_per_gpu``: that times the FLOPs of the model a token, by the convention of :mod:`lightning_moe.flops`;
    * ``step_time_s``: seconds of an optimizer step: the median over the window, the maximum over ranks;
    * ``peak_memory_gib``: the maximum over ranks of the allocated CUDA memory since the start of the process, or of the
      resident memory of the process where there is no CUDA.

    The time holds everything from one step to the next, loading data included, but not validation and not the saving of
    checkpoints. The device is waited for once a window, not once a step, and the ranks exchange one small vector.

    Tokens are counted in batches that are a tensor of integers or map ``input_ids`` (or ``labels``) to one; a
    LightningModule with another kind of batch defines ``batch_tokens(batch) -> int``. FLOPs come from the module's
    ``flops_per_token(sequence_length) -> float`` (and its convention from a text ``flops_convention``) or, where it has
    none, from the configuration of a Transformers model inside it. What cannot be known is left out and said once.

    Args:
        warmup_steps: Optimizer steps after the start that belong to no window.
        log_every_n_steps: Optimizer steps of a window; default: the Trainer's ``log_every_n_steps``.

    Raises:
        ValueError: If an option has a value that is not allowed.
    """

    def __init__(self, warmup_steps: int = 2, log_every_n_steps: int | None = None) -> None:
        if warmup_steps < 0:
            raise ValueError(f"warmup_steps={warmup_steps} must be 0 or more")
        if log_every_n_steps is not None and log_every_n_steps < 1:
            raise ValueError(f"log_every_n_steps={log_every_n_steps} must be 1 or more, or None for the Trainer's")
        self.warmup_steps = warmup_steps
        self.log_every_n_steps = log_every_n_steps
        self._clock: StepClock | None = None
        self._restore: Callable[[], None] | None = None
        self._steps_to_skip = 0
        self._in_step = False
        self._window = _Counts()
        self._unreported = 0.0  # tokens of this rank since the ranks last added theirs up
        self._tokens_seen = 0
        self._world_size = 1
        self._flops: dict[int, float | None] = {}
        self._said: set[str] = set()

    @property
    def tokens_seen(self) -> int:
        """Tokens that all ranks have trained on since step 0, resumed runs included.

        Exact at the end of a window; between, this rank's tokens stand for those of the others.
        """
        unreported = 0.0 if math.isnan(self._unreported) else self._unreported
        return self._tokens_seen + round(unreported) * self._world_size

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"tokens_seen": self.tokens_seen}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._tokens_seen = state_dict["tokens_seen"]
        self._unreported = 0.0

    # When the clock runs

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._world_size = trainer.world_size
        self._steps_to_skip = self.warmup_steps
        self._window = _Counts()
        self._in_step = False
        self._flops = {}
        self._clock = StepClock(trainer.strategy.root_device)
        self._restore = _exclude_saving(trainer, self._clock)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._stop()

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._clock is not None and trainer.state.fn == TrainerFn.FITTING:
            # Between two steps the span since the last one holds the start of validation's own workers.
            self._clock.pause(discard=not self._in_step)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._clock is not None and trainer.state.fn == TrainerFn.FITTING:
            self._clock.resume()

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._in_step = True

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        tokens, length = self._count(pl_module, batch)
        self._window.add(tokens, length)
        self._unreported += tokens
        if self._clock is None or trainer.fit_loop._should_accumulate():
            return
        self._in_step = False
        self._clock.end_step()
        if self._steps_to_skip > 0:
            self._steps_to_skip -= 1
            self._clock.forget()
            self._window = _Counts()
        every = self.log_every_n_steps or trainer.log_every_n_steps  # type: ignore[attr-defined]
        # The counter that Lightning's own logging goes by; it is behind by the step that ends now.
        if every and (trainer.fit_loop.epoch_loop._batches_that_stepped + 1) % every == 0:
            self._end_window(trainer, pl_module)

    def _stop(self) -> None:
        if self._restore is not None:
            self._restore()
        self._clock = self._restore = None

    # What a window holds

    def _end_window(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self._clock is not None
        steps = self._clock.take()
        device = trainer.strategy.root_device
        mine = [
            self._window.tokens,
            self._window.tokens_times_length,
            sum(steps),
            statistics.median(steps) if steps else math.nan,
            _peak_memory_gib(device),
            self._unreported,
        ]
        # Sums of tokens do not fit float32; MPS, where there is one rank, has no float64.
        dtype = torch.float32 if device.type == "mps" else torch.float64
        # Every rank fills its row and the sum over ranks is the whole table: a gather in one reduction.
        table = torch.zeros(trainer.world_size, len(mine), dtype=dtype, device=device)
        table[trainer.global_rank] = torch.tensor(mine, dtype=dtype)
        ranks = trainer.strategy.reduce(table, reduce_op="sum").tolist()
        tokens, weighted, seconds, median, memory, unreported = zip(*ranks, strict=True)
        if not math.isnan(sum(unreported)):
            self._tokens_seen += round(sum(unreported))
        self._unreported = 0.0
        self._window = _Counts()
        metrics = {"step_time_s": max(median), "peak_memory_gib": max(memory)}
        if sum(tokens) > 0 and max(seconds) > 0:  # not if a rank could not count: the sum is NaN then
            # Each rank has worked for as long as the slowest, which all wait for.
            metrics["tps_per_gpu"] = sum(tokens) / len(tokens) / max(seconds)
            # Attention costs grow linearly with the length, so the mean length, weighted by tokens, gives their mean.
            flops = self._flops_per_token(pl_module, round(sum(weighted) / sum(tokens)))
            if flops is not None:
                metrics["tflops_per_gpu"] = metrics["tps_per_gpu"] * flops / 1e12
        if steps:
            _publish(trainer, {name: value for name, value in metrics.items() if not math.isnan(value)})

    def _count(self, pl_module: LightningModule, batch: Any) -> tuple[float, int]:
        """Return the tokens of a batch, NaN if unknown, and their sequence length, 0 if unknown."""
        found = batch
        if isinstance(batch, Mapping):
            found = next((batch[name] for name in ("input_ids", "labels") if name in batch), None)
        is_tokens = isinstance(found, Tensor) and not (found.is_floating_point() or found.dtype == torch.bool)
        length = found.shape[-1] if isinstance(found, Tensor) and is_tokens and found.ndim else 0
        if callable(counter := getattr(pl_module, "batch_tokens", None)):
            return float(counter(batch)), length
        if isinstance(found, Tensor) and is_tokens:
            return float(found.numel()), length
        self._say(
            "tokens",
            f"ThroughputMonitor cannot count the tokens of a batch of type {type(batch).__name__}, so tps_per_gpu and"
            " tflops_per_gpu are left out: let the batch be a tensor of integers, or map 'input_ids' to one, or define"
            f" batch_tokens(batch) -> int on {type(pl_module).__name__}",
        )
        return math.nan, 0

    def _flops_per_token(self, pl_module: LightningModule, length: int) -> float | None:
        if length not in self._flops:
            self._flops[length] = self._find_flops(pl_module, length)
        return self._flops[length]

    def _find_flops(self, pl_module: LightningModule, length: int) -> float | None:
        if length < 1:
            self._say(
                "flops", "ThroughputMonitor leaves tflops_per_gpu out: the batches do not tell the sequence length"
            )
            return None
        own = getattr(pl_module, "flops_per_token", None)
        try:
            if callable(own):
                flops = float(own(length))
                convention = getattr(pl_module, "flops_convention", f"by {type(pl_module).__name__}.flops_per_token")
            else:
                flops = transformer_flops_per_token(_transformer_config(pl_module), length).total
                convention = CONVENTION
        except ValueError as error:
            self._say(
                "flops",
                f"ThroughputMonitor leaves tflops_per_gpu out: {error}. Define"
                f" flops_per_token(sequence_length) -> float on {type(pl_module).__name__}",
            )
            return None
        if "convention" not in self._said:
            self._said.add("convention")
            scale, unit = (1e9, "GFLOP") if flops >= 1e9 else (1e6, "MFLOP")
            rank_zero_info(
                f"tflops_per_gpu counts {flops / scale:.4g} {unit} a token at length {length} (forward and backward;"
                f" {convention})"
            )
        return flops

    def _say(self, topic: str, message: str) -> None:
        if topic not in self._said:
            self._said.add(topic)
            rank_zero_warn(message)


class _Counts:
    """Tokens of this rank in a window."""

    def __init__(self) -> None:
        self.tokens = 0.0
        self.tokens_times_length = 0.0

    def add(self, tokens: float, length: int) -> None:
        self.tokens += tokens
        self.tokens_times_length += tokens * length


def _transformer_config(module: torch.nn.Module) -> Any:
    for submodule in module.modules():
        config = getattr(submodule, "config", None)
        if hasattr(config, "hidden_size"):
            return config
    raise ValueError("no module has the configuration of a Transformers model")


def _peak_memory_gib(device: torch.device) -> float:
    """Return the highest memory of this process so far, NaN where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    try:
        import resource
    except ImportError:  # Windows
        return math.nan
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**30 if sys.platform == "darwin" else peak / 2**20  # bytes there, KiB on Linux


def _publish(trainer: Trainer, metrics: dict[str, float]) -> None:
    """Log at the step of the training loop, and show the values until the next window.

    Not by ``self.log``: that copies each value to the device, and reads it back in every step for the progress bar.
    """
    connector = trainer._logger_connector
    values = {name: torch.tensor(value, dtype=torch.float64) for name, value in metrics.items()}  # on the host
    connector.log_metrics(dict(values))
    connector._callback_metrics.update(values)
    connector._progress_bar_metrics.update(metrics)


def _exclude_saving(trainer: Trainer, clock: StepClock) -> Callable[[], None]:
    """Pause the clock while a checkpoint is saved; return what undoes that.

    Lightning has a hook for callbacks in the middle of saving, but none at its beginning and none at its end.
    """
    save = trainer.save_checkpoint

    @contextlib.contextmanager
    def paused() -> Iterator[None]:
        clock.pause()
        try:
            yield
        finally:
            clock.resume()

    def save_checkpoint(*args: Any, **kwargs: Any) -> None:
        with paused():
            save(*args, **kwargs)

    def restore() -> None:
        if trainer.__dict__.get("save_checkpoint") is save_checkpoint:
            del trainer.__dict__["save_checkpoint"]
            if getattr(trainer, "save_checkpoint", None) != save:
                trainer.save_checkpoint = save  # type: ignore[method-assign]

    trainer.save_checkpoint = save_checkpoint  # type: ignore[method-assign]
    return restore
