"""The callback that leaves what a run did: its batches, losses, gradient norms, first gradients, change of weights."""

import inspect
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_moe.parallel import gradient_norm
from lightning_moe.strategy import ExpertParallelStrategy
from lightning_moe.verify.gather import gradients, whole_tensors
from lightning_moe.verify.groups import parameter_groups
from lightning_moe.verify.plan import batch_file, write_json
from lightning_moe.verify.randomness import random_parts, switch_off
from lightning_moe.verify.tensors import Tensors, TensorWriter

_OTHER_SEED = 20_011


@dataclass(frozen=True)
class Recording:
    """What a run records, and what it begins with.

    Attributes:
        folder: Where the record goes.
        steps: Optimizer steps until the run ends.
        batches: The temporary folder to leave the batches in, ``None`` for none.
        start: Folder of the run whose initial weights it takes; ``None`` to record its own.
        rounded: Move each of those weights by one rounding.
        reseeded: Draw other random numbers.
        no_dropout: Switch randomness in the forward off.
        notes: Lines for the report that are known before the run.
    """

    folder: Path
    steps: int
    batches: Path | None = None
    start: Path | None = None
    rounded: bool = False
    reseeded: bool = False
    no_dropout: bool = False
    notes: list[str] = field(default_factory=list)


class Recorder(Callback):
    """Records the first optimizer steps of a run and ends it.

    Args:
        recording: What to record.
    """

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._rank = 0
        self._epochs: list[int] = []  # of each batch
        self._pending: list[float] = []  # losses since the last step
        self._losses: list[float | None] = []  # of each step
        self._norms: list[float] = []
        self._optimizers: dict[int, str] = {}
        self._random: list[str] = []
        self._spacings: dict[str, float] = {}  # of each weight
        self._gradients: TensorWriter | None = None
        self._done = False

    # Set-up

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if isinstance(trainer.strategy, FSDPStrategy | DeepSpeedStrategy):
            raise ValueError(
                f"{type(trainer.strategy).__name__} does not keep the parameters under their names, so that verify"
                " cannot compare them; it can under moe_ep, ddp, ModelParallelStrategy and one device"
            )
        if "dataloader_iter" in inspect.signature(pl_module.training_step).parameters:
            raise ValueError(
                f"{type(pl_module).__name__}.training_step takes a dataloader_iter, whose batches verify cannot see;"
                " it needs training_step(batch, batch_idx)"
            )
        self._rank = trainer.global_rank
        self._recording.folder.mkdir(exist_ok=True)
        if self._recording.batches is not None:
            self._recording.batches.joinpath("batches").mkdir(exist_ok=True)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._recording.no_dropout:
            switched_off = switch_off(pl_module)
            if switched_off:
                self._recording.notes.append(
                    f"--no-dropout set {len(switched_off)} rates to 0: {', '.join(switched_off[:3])}"
                    + (" ..." if len(switched_off) > 3 else "")
                )
        self._random = random_parts(pl_module)
        if self._recording.start is None:
            self._save("initial", dict(pl_module.named_parameters()))
            self._save("buffers", dict(pl_module.named_buffers()))
        else:
            self._load(trainer, pl_module)
            write_json(self._recording.folder / "groups.json", parameter_groups(pl_module))
        self._gradients = TensorWriter(self._recording.folder, "gradients", self._rank)
        step_hook = pl_module.on_before_optimizer_step

        def after_the_users(optimizer: Optimizer) -> None:
            step_hook(optimizer)
            self._before_step(pl_module, optimizer)

        # In place of this callback's own hook, which would not see what the module's does to the gradients.
        pl_module.on_before_optimizer_step = after_the_users  # type: ignore[method-assign]

    def _load(self, trainer: Trainer, module: LightningModule) -> None:
        start = self._start(trainer)
        parameters = dict(module.named_parameters())
        missing = [name for name in parameters if name not in start.tensors]
        extra = [name for name in start.tensors.names() if name not in parameters]
        if missing or extra:
            raise ValueError(
                "the model has other parameters under the layout than in one process: only in one process"
                f" {', '.join(missing[:3]) or 'none'}, only under the layout {', '.join(extra[:3]) or 'none'}"
            )
        assert self._recording.start is not None
        # Those that only a strategy adds are none of the model's.
        buffers = Tensors(self._recording.start, "buffers")
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(start(name))
            for name, buffer in module.named_buffers():
                if name in buffers:
                    buffer.copy_(buffers[name])

    def _start(self, trainer: Trainer) -> "_Start":
        epsilon = machine_epsilon(trainer) if self._recording.rounded else 0.0
        return _Start(Tensors(self._recording.start or self._recording.folder, "initial"), epsilon)

    def _save(self, kind: str, named: dict[str, Tensor]) -> None:
        with TensorWriter(self._recording.folder, kind, self._rank) as writer:
            for name, tensor in whole_tensors(named):
                writer.add(name, tensor)

    # Steps

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._recording.reseeded:
            seed_everything(_OTHER_SEED + batch_idx, verbose=False)
        if self._recording.batches is not None:
            torch.save(batch, batch_file(self._recording.batches, len(self._epochs), self._rank))
        self._epochs.append(trainer.current_epoch)

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        # Before the strategy scales it. Lightning has divided it by the number of accumulated batches, so that the sum
        # of what comes before a step is their mean.
        self._pending.append(float(loss.detach()))

    def _before_step(self, module: LightningModule, optimizer: Optimizer) -> None:
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        named = {name: parameter for name, parameter in module.named_parameters() if id(parameter) in stepped}
        self._norms.append(float(gradient_norm(named.values(), module.device)))
        self._losses.append(sum(self._pending) if self._pending else None)
        self._pending = []
        if id(optimizer) not in self._optimizers:
            self._optimizers[id(optimizer)] = type(optimizer).__name__
            assert self._gradients is not None
            for name, gradient in whole_tensors(gradients(named)):
                self._gradients.add(name, gradient)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if len(self._norms) >= self._recording.steps and not self._done:
            self._finish(trainer, pl_module)
            # A run has a length on which schedules depend, so it is that of the config until here.
            trainer.fit_loop.epoch_loop.max_steps = trainer.global_step

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._done:
            self._finish(trainer, pl_module)

    # The record

    def _finish(self, trainer: Trainer, module: LightningModule) -> None:
        self._done = True
        del module.on_before_optimizer_step  # what stood before this instance's own is the class's
        assert self._gradients is not None
        self._gradients.close()
        folder = self._recording.folder
        start = self._start(trainer)
        with TensorWriter(folder, "changes", self._rank) as writer:
            for name, weight in whole_tensors(dict(module.named_parameters())):
                before = start(name)
                writer.add(name, weight.cpu().float() - before.float())
                self._spacings[name] = _spacing(before)
        write_json(folder / f"losses-{self._rank}.json", self._losses)
        trainer.strategy.barrier()
        if self._rank == 0:
            write_json(folder / "record.json", self._record(trainer))

    def _record(self, trainer: Trainer) -> dict[str, Any]:
        batches = trainer.num_training_batches
        return {
            "ranks": trainer.world_size,
            "epochs": self._epochs,
            "batches_per_epoch": batches if isinstance(batches, int) else None,
            "epoch_ended": trainer.is_last_batch,
            "norms": self._norms,
            "optimizers": list(self._optimizers.values()),
            "precision": str(trainer.precision),
            "epsilon": machine_epsilon(trainer),
            "layout": describe(trainer),
            "random": self._random,
            "spacings": self._spacings,
            "notes": self._recording.notes,
        }


@dataclass(frozen=True)
class _Start:
    """The weights that a run begins with."""

    tensors: Tensors
    epsilon: float

    def __call__(self, name: str) -> Tensor:
        value = self.tensors[name]
        if not self.epsilon or not value.is_floating_point():
            return value
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        moved = torch.empty(value.shape, dtype=torch.float64).uniform_(-1, 1, generator=generator)
        # Up to one unit in the last place of the precision in which the run computes, up or down.
        return (value.double() * (1 + self.epsilon * moved)).to(value.dtype)


def _spacing(weight: Tensor) -> float:
    """The distance from the largest of some weights to the next number of their dtype."""
    if not weight.numel() or not weight.is_floating_point():
        return 0.0
    return float(weight.abs().max()) * torch.finfo(weight.dtype).eps


def describe(trainer: Trainer) -> str:
    """Say in one line how a run is spread over ranks."""
    strategy = trainer.strategy
    if isinstance(strategy, ExpertParallelStrategy):
        return f"moe_ep, {strategy.layout}"
    name, ranks = type(strategy).__name__, trainer.world_size
    return f"{name}, {ranks} ranks" if dist.is_initialized() and ranks > 1 else f"{name}, one process"


def machine_epsilon(trainer: Trainer) -> float:
    """The spacing of numbers at 1, in the precision in which the products of a run are computed."""
    precision = str(trainer.precision)
    if "bf16" in precision:
        dtype = torch.bfloat16
    elif "16" in precision:
        dtype = torch.float16
    elif "64" in precision:
        dtype = torch.float64
    elif trainer.strategy.root_device.type == "cuda":
        # TensorFloat32 has the significand of float16.
        reduced = {"high": torch.float16, "medium": torch.bfloat16}
        dtype = reduced.get(torch.get_float32_matmul_precision(), torch.float32)
    else:
        dtype = torch.float32
    return torch.finfo(dtype).eps
