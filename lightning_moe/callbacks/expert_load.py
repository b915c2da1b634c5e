"""How evenly the routers load the experts and their ranks, logged from counts that the layers keep."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from typing_extensions import override

from lightning_moe.callbacks.heat_map import heat_map
from lightning_moe.metrics import DeadExperts, DroppedTokens, ExpertLoad, LoadImbalance, RouterEntropy, RowsPerRank
from lightning_moe.parallel import RoutedExperts, already_sharded


class ExpertLoadMonitor(Callback):
    """Logs how evenly the routers load the experts of a model under ``strategy="moe_ep"``, to every logger.

    A window is ``every_n_steps`` optimizer steps. Of the training forwards in it, those that recompute repeats and
    those of validation left out, it logs for each experts module ``experts/<module>/...``:

    * ``load_imbalance``: the choices for the busiest expert over the mean: 1 is even;
    * ``dead_experts``: the share of the experts that nobody chose;
    * ``router_entropy``: of the load over the experts: 1 is even, 0 is one expert alone;
    * ``rank_imbalance``: the choices for the busiest rank, which all wait for, over the mean of the ranks;
    * ``dropped_share``: the share of the choices that ``max_rows_per_rank`` has dropped; without that option left out;
    * ``rows_sent`` and ``bytes_sent``: what a rank sends to others in the forwards of a step, the mean over the ranks;
      as much comes back. Repeated forwards count here: their rows travel, too. 0 where the dispatcher does not count.

    The first four are over all ranks, before any choice is dropped. ``experts/...`` without a module are the means over
    the modules, sums for rows and bytes, and ``experts/load_imbalance_max`` is that of the worst module. These are in
    ``trainer.callback_metrics``, too.

    The layers count on the device. The ranks exchange their counts in one reduction a window, which is also the one
    time that the host waits for the device.

    Args:
        every_n_steps: Optimizer steps of a window.
        heat_map_every_n_steps: Draw the load of the window that ends, modules by experts, as an image for TensorBoard
            loggers; a multiple of ``every_n_steps``, ``None`` for no image.
        warn_dead_after: Windows in a row that an expert gets no token before that is a warning, ``None`` for none.
        warn_rank_imbalance: A ``rank_imbalance`` above this is a warning, ``None`` for none.

    Raises:
        ValueError: If an option has a value that is not allowed.
    """

    def __init__(
        self,
        every_n_steps: int = 50,
        heat_map_every_n_steps: int | None = None,
        warn_dead_after: int | None = 5,
        warn_rank_imbalance: float | None = 4.0,
    ) -> None:
        if every_n_steps < 1:
            raise ValueError(f"every_n_steps={every_n_steps} must be 1 or more")
        if heat_map_every_n_steps is not None and (
            heat_map_every_n_steps < 1 or heat_map_every_n_steps % every_n_steps
        ):
            raise ValueError(
                f"heat_map_every_n_steps={heat_map_every_n_steps} must be a multiple of every_n_steps={every_n_steps},"
                " or None for no image"
            )
        if warn_dead_after is not None and warn_dead_after < 1:
            raise ValueError(f"warn_dead_after={warn_dead_after} must be 1 or more, or None for no warning")
        if warn_rank_imbalance is not None and not warn_rank_imbalance > 1:
            raise ValueError(
                f"warn_rank_imbalance={warn_rank_imbalance} must be above 1, the even load, or None for no warning"
            )
        self.every_n_steps = every_n_steps
        self.heat_map_every_n_steps = heat_map_every_n_steps
        self.warn_dead_after = warn_dead_after
        self.warn_rank_imbalance = warn_rank_imbalance
        self._counters: _Counters | None = None
        self._steps = 0
        self._windows_dead: list[Tensor] = []
        self._said: set[str] = set()

    # When it counts

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        sharded = already_sharded(pl_module)
        if sharded is None:
            raise ValueError(
                "ExpertLoadMonitor reads the counts of strategy='moe_ep', but the Trainer's strategy is"
                f" {type(trainer.strategy).__name__}; set Trainer(strategy='moe_ep'), or use the metrics of"
                " lightning_moe.metrics with the router's choices"
            )
        tensorboard = any(isinstance(logger, TensorBoardLogger) for logger in trainer.loggers)
        if self.heat_map_every_n_steps and not tensorboard and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            raise ValueError(
                f"heat_map_every_n_steps={self.heat_map_every_n_steps} draws for a TensorBoardLogger, and the Trainer"
                " has none; add one, or set heat_map_every_n_steps=None"
            )
        self._counters = None
        if not sharded.experts:
            self._say("experts", f"ExpertLoadMonitor logs nothing: {type(pl_module).__name__} has no experts")
            return
        self._counters = _Counters(sharded.experts, sharded.layout.expert, trainer)
        self._steps = 0
        self._windows_dead = [
            torch.zeros(experts.dispatcher.num_experts, dtype=torch.int64) for experts in sharded.experts
        ]

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._counters = None

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._counters = None

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._counters is not None and trainer.state.fn == TrainerFn.FITTING:
            self._counters.pause()

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._counters is not None and trainer.state.fn == TrainerFn.FITTING:
            self._counters.resume()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._counters is None or trainer.fit_loop._should_accumulate():
            return
        self._steps += 1
        # The counter that Lightning's own logging goes by; it is behind by the step that ends now.
        step = trainer.fit_loop.epoch_loop._batches_that_stepped
        if (step + 1) % self.every_n_steps == 0:
            self._end_window(trainer, self._counters.take(), step)

    # What a window holds

    def _end_window(self, trainer: Trainer, layers: Sequence["_Layer"], step: int) -> None:
        by_layer = [layer.metrics(self._steps) for layer in layers]
        self._steps = 0
        metrics = {
            f"experts/{layer.name}/{name}": value
            for layer, values in zip(layers, by_layer, strict=True)
            for name, value in values.items()
        }
        summary = _summary([values for values in by_layer if "load_imbalance" in values] or by_layer)
        connector = trainer._logger_connector
        # On the host, and not by self.log, which would copy each value to the device.
        connector.log_metrics({name: torch.tensor(value) for name, value in {**metrics, **summary}.items()})
        connector._callback_metrics.update({name: torch.tensor(value) for name, value in summary.items()})
        if self.heat_map_every_n_steps and (step + 1) % self.heat_map_every_n_steps == 0 and trainer.is_global_zero:
            picture = heat_map([layer.load for layer in layers])
            for logger in trainer.loggers:
                if isinstance(logger, TensorBoardLogger):
                    logger.experiment.add_image("experts/load", picture, step, dataformats="HWC")
        self._warn(layers, by_layer)

    def _warn(self, layers: Sequence["_Layer"], by_layer: Sequence[dict[str, float]]) -> None:
        for place, (layer, values) in enumerate(zip(layers, by_layer, strict=True)):
            if "load_imbalance" not in values:
                continue  # it was not called
            self._windows_dead[place] = (self._windows_dead[place] + 1) * (layer.load == 0)
            dead = self._windows_dead[place] >= (self.warn_dead_after or math.inf)
            names = [str(expert) for expert in dead.nonzero().flatten().tolist()]
            if names:
                more = f" and {len(names) - 8} more" if len(names) > 8 else ""
                self._say(
                    "dead",
                    f"{layer.name}: experts {', '.join(names[:8])}{more} got no token in {self.warn_dead_after} windows"
                    f" of {self.every_n_steps} steps in a row; a load-balancing loss or an expert bias keeps experts"
                    " in use. Said once, for the first module",
                )
            if self.warn_rank_imbalance is not None and values["rank_imbalance"] > self.warn_rank_imbalance:
                self._say(
                    "rank",
                    f"{layer.name}: the routers chose experts of one rank {values['rank_imbalance']:.1f} times as often"
                    f" as those of a rank on average (warn_rank_imbalance={self.warn_rank_imbalance}); the others wait"
                    " for it, and it needs the memory. A load-balancing loss or an expert bias evens the load, and the"
                    " strategy's max_rows_per_rank bounds it. Said once, for the first module",
                )

    def _say(self, topic: str, message: str) -> None:
        if topic not in self._said:
            self._said.add(topic)
            rank_zero_warn(message)


@dataclass(frozen=True)
class _Layer:
    """The counts of one experts module in a window.

    Attributes:
        name: Name of the module.
        group_loads: ``[groups, E]`` int64 choices of each expert, by the groups of ranks that hold all experts once.
        ranks_per_group: Expert-parallel ranks.
        dropped: Choices that were dropped; ``None`` where the layer does not count them.
        rows_sent: Rows that each rank has sent.
        bytes_sent: Their bytes.
    """

    name: str
    group_loads: Tensor
    ranks_per_group: int
    dropped: int | None
    rows_sent: list[int]
    bytes_sent: list[int]

    @property
    def load(self) -> Tensor:
        """``[E]`` int64 over all ranks."""
        return self.group_loads.sum(0)

    def metrics(self, steps: int) -> dict[str, float]:
        """What is logged of it; without a forward in the window nothing of its load."""
        load, num_experts = self.load, self.group_loads.shape[1]
        # A step's worth, of one rank
        shares = steps * len(self.rows_sent)
        sent = {"rows_sent": sum(self.rows_sent) / shares, "bytes_sent": sum(self.bytes_sent) / shares}
        if not load.sum():
            return sent
        kinds: dict[str, type[ExpertLoad]] = {
            "load_imbalance": LoadImbalance,
            "dead_experts": DeadExperts,
            "router_entropy": RouterEntropy,
        }
        values = {name: _value(kind(num_experts, sync_on_compute=False), load) for name, kind in kinds.items()}
        rows = [self._rows_of_ranks(group) for group in self.group_loads]
        values["rank_imbalance"] = float(torch.cat(rows).max() / torch.cat(rows).double().mean())
        if self.dropped is not None:
            values["dropped_share"] = _value(DroppedTokens(sync_on_compute=False), self.dropped, load.sum())
        return {**values, **sent}

    def _rows_of_ranks(self, group_load: Tensor) -> Tensor:
        metric = RowsPerRank(len(group_load), self.ranks_per_group, sync_on_compute=False)
        metric.update(group_load)
        return metric.compute()


def _value(metric: ExpertLoad | DroppedTokens, *counts: Any) -> float:
    metric.update(*counts)
    return float(metric.compute())


def _summary(by_layer: Sequence[dict[str, float]]) -> dict[str, float]:
    """The layers as one: sums of what is sent, means of the rest."""
    summary = {}
    for name in by_layer[0]:
        values = [layer[name] for layer in by_layer]
        summary[f"experts/{name}"] = sum(values) if name.endswith("_sent") else statistics.fmean(values)
        if name == "load_imbalance":
            summary["experts/load_imbalance_max"] = max(values)
    return summary


class _Counters:
    """What the layers of this rank have counted since the last reading.

    Args:
        experts: The layers, the same on every rank.
        ranks_per_group: Expert-parallel ranks; groups are of consecutive ranks.
        trainer: Which rank this is, and of how many.
    """

    # Of each rank: choices dropped, rows and bytes sent
    _OF_RANK = 3

    def __init__(self, experts: Sequence[RoutedExperts], ranks_per_group: int, trainer: Trainer) -> None:
        self._experts = experts
        self._ranks_per_group = ranks_per_group
        self._rank, self._world = trainer.global_rank, trainer.world_size
        self._device = trainer.strategy.root_device
        self._counted = self._on_device()
        self._sent = self._on_host()
        self._paused_at: Tensor | None = None

    def pause(self) -> None:
        """Leave out what is sent from now on. The layers themselves count training alone."""
        self._paused_at = self._on_host()

    def resume(self) -> None:
        """Go on."""
        if self._paused_at is not None:
            self._sent += self._on_host() - self._paused_at
            self._paused_at = None

    def take(self) -> list[_Layer]:
        """Return the counts of all ranks and begin anew. Collective; waits for the device."""
        counted, sent = self._on_device(), self._on_host()
        since = [now - before for now, before in zip(counted, self._counted, strict=True)]
        sent_since = sent - self._sent
        self._counted, self._sent = counted, sent
        *loads, dropped = since
        # Each group fills its row, each rank its own, and the sum over the ranks is all of both: one reduction.
        groups, width = self._world // self._ranks_per_group, sum(map(len, loads))
        group_loads = torch.zeros(groups, width, dtype=torch.int64, device=self._device)
        group_loads[self._rank // self._ranks_per_group] = torch.cat(loads)
        of_ranks = torch.zeros(self._world, len(self._experts), self._OF_RANK, dtype=torch.int64, device=self._device)
        of_ranks[self._rank, :, 0] = dropped
        of_ranks[self._rank, :, 1:] = sent_since.to(self._device)
        table = torch.cat((group_loads.flatten(), of_ranks.flatten()))
        if self._world > 1:
            dist.all_reduce(table)
        table = table.cpu()
        group_loads, of_ranks = table[: groups * width].view(groups, width), table[groups * width :].view_as(of_ranks)
        return [
            _Layer(
                name=experts.name,
                group_loads=load,
                ranks_per_group=self._ranks_per_group,
                dropped=int(dropped.sum()) if experts.budget is not None else None,
                rows_sent=rows_sent.tolist(),
                bytes_sent=bytes_sent.tolist(),
            )
            for experts, load, (dropped, rows_sent, bytes_sent) in zip(
                self._experts,
                group_loads.split([len(load) for load in loads], dim=1),
                of_ranks.permute(1, 2, 0),
                strict=True,
            )
        ]

    def _on_device(self) -> list[Tensor]:
        """Copies of each layer's load so far, and of what all have dropped."""
        zero = torch.zeros((), dtype=torch.int64, device=self._device)
        loads = [
            zero.expand(experts.dispatcher.num_experts) if experts.load is None else experts.load.clone()
            for experts in self._experts
        ]
        dropped = [zero if experts.dropped is None else experts.dropped for experts in self._experts]
        return [*loads, torch.stack(dropped)]

    def _on_host(self) -> Tensor:
        """``[layers, 2]`` rows and bytes sent so far."""
        sent = [(experts.dispatcher.rows_sent, experts.dispatcher.bytes_sent) for experts in self._experts]
        return torch.tensor(sent, dtype=torch.int64)
