"""A tiny model whose weights say after which step they were saved, so that a mixture of two checkpoints shows."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_moe.nn import MoE
from tests import tiny


def expected(step: int) -> float:
    """Every weight after ``step`` steps: SGD with momentum 0.5, learning rate 1 and gradients of -1, from 0."""
    weight = momentum = 0.0
    for _ in range(step):
        momentum = 0.5 * momentum - 1
        weight -= momentum
    return weight


class Endless(IterableDataset):
    def __iter__(self) -> Iterator[Tensor]:
        while True:
            yield torch.ones(4)


class Stepping(pl.LightningModule):
    """Its gradients are -1 everywhere, whatever the data."""

    def __init__(self, hidden: int = 32, experts: int = 4, steps_seen: list[int] | None = None) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.moe = MoE(4, hidden, experts, 2)
        self.resumed_at = -1
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.zero_()

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return self.moe(self.inner(batch)).sum()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            parameter.grad = torch.full_like(parameter, -1.0)

    def on_train_start(self) -> None:
        self.resumed_at = self.trainer.global_step
        self.check(self.resumed_at)

    def check(self, step: int) -> None:
        for name, parameter in self.named_parameters():
            local = parameter.detach().to_local() if hasattr(parameter, "to_local") else parameter.detach()
            assert bool((local == expected(step)).all()), f"{name} is not what it was after step {step}: {local}"
        for state in self.optimizers().optimizer.state.values():
            buffer = state["momentum_buffer"].to_local()
            momentum = expected(step - 1) - expected(step)
            assert bool((buffer == momentum).all()), f"momentum after step {step}: {buffer}"

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0, momentum=0.5)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Endless(), batch_size=2)


def stepping_trainer(folder: Path | str | None, devices: int, callbacks: Any = (), **options: Any) -> pl.Trainer:
    """A Trainer that saves after every step; options beyond Lightning's are those of the strategy and the callback."""
    strategy = {name: options.pop(name) for name in list(options) if name.startswith("save_") and name != "save_last"}
    last = options.pop("save_last", None)
    saves = [] if folder is None else [ModelCheckpoint(folder, every_n_train_steps=1, save_last=last)]
    present = [*saves, *callbacks]
    return tiny.trainer(
        tiny.moe_ep(**strategy),
        devices=devices,
        enable_checkpointing=any(isinstance(callback, ModelCheckpoint) for callback in present),
        callbacks=present,
        **options,
    )
