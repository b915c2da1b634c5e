"""A tiny model that draws random numbers wherever it can, and runs of it that are saved at one moment and resumed."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import lightning_moe
from lightning_moe.nn import MoE
from tests import tiny
from tests.test_strategy import rank_and_world

WORDS, WIDTH = 16, 8


class Noisy(Dataset):
    """Sequences of tokens; with ``noise`` each item draws from three generators of the process."""

    def __init__(self, length: int = 24, noise: bool = False) -> None:
        self.tokens = torch.randint(0, WORDS, (length, 6), generator=torch.Generator().manual_seed(3))
        self.noise = noise

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: Any) -> Tensor:
        tokens = self.tokens[index]
        if self.noise:
            shift = torch.randint(0, WORDS, ()) + np.random.randint(WORDS) + random.randrange(WORDS)
            tokens = (tokens + shift + int(np.random.normal() > 0)) % WORDS
        return tokens


class Net(nn.Module):
    """A layer of experts between an embedding and its transpose; one weight is frozen."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList([MoE(WIDTH, 8, 4, 2)])
        self.norm = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, WORDS, bias=False)
        self.out.weight = self.embed.weight
        self.norm.bias.requires_grad_(False)
        self.dropout = dropout
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(std=0.3)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = hidden + nn.functional.dropout(layer(hidden), self.dropout, self.training)
        return nn.functional.cross_entropy(self.out(self.norm(hidden)).flatten(0, 1), tokens.roll(1, 1).flatten())


class Model(pl.LightningModule):
    """Predicts tokens."""

    def __init__(
        self,
        optimizer: Callable[[Any], torch.optim.Optimizer] = tiny.adamw,
        schedule: Callable[[torch.optim.Optimizer], Any] | None = None,
        dropout: float = 0.2,
    ) -> None:
        super().__init__()
        self.net = Net(dropout)
        self.optimizer, self.schedule = optimizer, schedule
        self.losses: list[float] = []
        self.rates: list[float] = []

    def training_step(self, tokens: Tensor, index: int) -> Tensor:
        loss = self.net(tokens)
        self.losses.append(float(self.trainer.strategy.reduce(loss.detach())))
        return loss

    def validation_step(self, tokens: Tensor, index: int) -> None:
        self.log("val_loss", self.net(tokens) + torch.rand(()), sync_dist=True)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(self.parameters())
        if self.schedule is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self.schedule(optimizer)}


@dataclass
class Case:
    """One way of training.

    Attributes:
        model: Makes the LightningModule.
        loader: Makes this rank's dataloader, given rank and ranks.
        hook: Where the run is saved, the first time that ``after`` batches are trained on.
        after: Batches.
        strategy: Options of the strategy, ``None`` for a plain Trainer.
        trainer: Options of the Trainer.
        callbacks: Makes more callbacks.
    """

    model: Callable[[], Any] = Model
    loader: Callable[[int, int], Any] = field(default=lambda rank, ranks: DataLoader(Noisy(), 2, shuffle=True))
    hook: str = "on_train_batch_end"
    after: int = 4
    strategy: dict[str, Any] | None = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    callbacks: Callable[[], list[Callback]] = list


class Apart(Callback):
    """Gives each rank random numbers of its own."""

    def on_fit_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        torch.manual_seed(100 + trainer.global_rank)


class SaveAt(Callback):
    """Saves at a hook, the first time that so many batches have been trained on."""

    def __init__(self, path: Path, hook: str, after: int) -> None:
        self.path, self.after, self.saved_after = path, after, -1
        setattr(self, hook, self._save)

    def _save(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        if len(module.losses) >= self.after and self.saved_after < 0:
            self.saved_after = len(module.losses)
            trainer.save_checkpoint(self.path)


def fit(case: Case, seed: int, callbacks: list[Callback], ckpt_path: Path | None = None) -> tuple[pl.Trainer, Any]:
    """Train, from another seed where a run is resumed: nothing may depend on it."""
    rank, ranks = rank_and_world()
    pl.seed_everything(seed, verbose=False)
    module = case.model()
    options = {
        "max_epochs": -1,
        "max_steps": case.after + 5,
        "use_distributed_sampler": True,
        "limit_val_batches": 0,
        **case.trainer,
    }
    strategy = "auto" if case.strategy is None else lightning_moe.ExpertParallelStrategy(**case.strategy)
    trainer = tiny.trainer(strategy, ranks, callbacks=[*callbacks, *case.callbacks()], **options)
    validation = DataLoader(Noisy(8), 2) if options["limit_val_batches"] else None
    trainer.fit(module, case.loader(rank, ranks), validation, ckpt_path=ckpt_path)
    return trainer, module


def compare(case: Case, path: Path) -> dict[str, Any]:
    """Run on, and resume from what was saved on the way."""
    save = SaveAt(path, case.hook, case.after)
    _, unbroken = fit(case, 0, [save])
    _, resumed = fit(case, 1, [], path)
    assert save.saved_after >= 0
    return {
        "unbroken": unbroken.losses[save.saved_after :],
        "resumed": resumed.losses,
        "rates": (unbroken.rates[-len(resumed.rates) :], resumed.rates),
        "weights": [
            torch.equal(tiny.whole(a), tiny.whole(b))
            for a, b in zip(unbroken.parameters(), resumed.parameters(), strict=True)
        ],
    }
