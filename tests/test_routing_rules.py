"""Unusual tokens through a whole training step, against one process that has all of them.

Memory that nobody wrote holds NaN in every run here (``deterministic=True`` fills it), so that a row which a kernel
left out would show.
"""

import os
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_moe.nn import GroupedExperts
from lightning_moe.parallel import gradient_norm
from tests import tiny
from tests.harness import run_ranks

E, H, K, RANKS = 8, 8, 2, 2

# What the tokens of each rank choose, one training step each.
STEPS = [
    "random",
    "unequal, odd numbers of tokens",
    "no tokens on rank 0",
    "no tokens on rank 1",
    "no tokens at all",
    "rank 1 receives nothing",
    "one expert gets all",
    "some choices dropped",
    "whole tokens dropped",
    "all choices of rank 0 dropped",
]


def tokens(step: str, rank: int) -> dict[str, Tensor]:
    """Hidden states ``[T, H]`` and expert indices ``[T, K]`` of one rank in one step."""
    generator = torch.Generator().manual_seed(100 * STEPS.index(step) + rank)
    count = {
        "unequal, odd numbers of tokens": (3, 7)[rank],
        "no tokens on rank 0": (0, 5)[rank],
        "no tokens on rank 1": (5, 0)[rank],
        "no tokens at all": 0,
    }.get(step, 6)
    hidden = torch.randn(count, H, generator=generator)
    index = torch.rand(count, E, generator=generator).argsort(1)[:, :K]
    if step == "rank 1 receives nothing":
        index = torch.rand(count, E // 2, generator=generator).argsort(1)[:, :K]
    elif step == "one expert gets all":
        index = torch.stack([torch.full((count,), 5), torch.full((count,), -1)], dim=1)
    elif step == "some choices dropped":
        index = index.masked_fill(torch.rand(index.shape, generator=generator) < 0.4, -1)
    elif step == "whole tokens dropped":
        index[::2] = -1
    elif step == "all choices of rank 0 dropped" and rank == 0:
        index = torch.full_like(index, -1)
    return {"hidden": hidden, "index": index}


class Layer(nn.Module):
    """A router that gives weights, and experts that the batch chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(H, H)
        self.router = nn.Linear(H, E)
        self.experts = GroupedExperts(E, H, 16)

    def forward(self, hidden: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        x = self.before(hidden)
        weights = self.router(x).softmax(-1).gather(1, index.clamp_min(0))
        routed = self.experts(x, index, weights)
        others = torch.where(index < 0, index, (index + 1) % E)
        again = self.experts(torch.tanh(routed + x), others, weights)  # twice in one forward
        return routed, again + x


class Module(pl.LightningModule):
    def __init__(self, freeze: tuple[str, ...], no_grad_first: bool) -> None:
        super().__init__()
        self.layer = Layer()
        self.no_grad_first = no_grad_first
        for name in freeze:
            self.layer.get_submodule(name).requires_grad_(False)
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.gradients: list[dict[str, Tensor]] = []
        self.missing: list[str] = []

    def training_step(self, batch: dict[str, Any], index: int) -> Tensor:
        if self.no_grad_first:
            with torch.no_grad():
                self.layer(batch["hidden"], batch["index"])
        routed, out = self.layer(batch["hidden"], batch["index"])
        dropped = (batch["index"] < 0).all(1)
        assert (routed[dropped] == 0).all(), "a token without an expert gets exact zeros"
        # Every rank divides by the tokens of all of them, so that the mean over ranks is the sum over tokens / total.
        loss = out.square().sum() * self.trainer.world_size / max(batch["total"], 1)
        self.losses.append(float(self.trainer.strategy.reduce(loss.detach())))
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        trained = [(name, p) for name, p in self.named_parameters() if p.requires_grad]
        self.missing += [name for name, p in trained if p.grad is None]
        self.norms.append(float(gradient_norm(self.parameters(), self.device)))
        self.gradients.append({name: tiny.whole(p.grad) for name, p in trained})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, weight_decay=0.1)


VARIANTS: dict[str, dict[str, Any]] = {
    "all trains": {"freeze": (), "no_grad_first": False},
    "a forward without a gradient before": {"freeze": (), "no_grad_first": True},
    # The hidden states need no gradient then, and nor do the routing weights.
    "only experts train": {"freeze": ("before", "router"), "no_grad_first": False},
    "experts are frozen": {"freeze": ("experts",), "no_grad_first": False},
    "only the router trains": {"freeze": ("before", "experts"), "no_grad_first": False},
}


def train(variant: str, options: dict[str, Any] | None) -> dict[str, Any]:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    pl.seed_everything(0, verbose=False)
    module = Module(**VARIANTS[variant])
    batches = []
    for step in STEPS:
        parts = [tokens(step, r) for r in range(RANKS)]
        total = sum(len(part["hidden"]) for part in parts)
        whole = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
        mine = parts[rank] if world == RANKS else whole
        batches.append({**mine, "total": total})
    strategy = "auto" if options is None else tiny.moe_ep(**options)
    trainer = tiny.trainer(strategy, devices=world, max_epochs=1, gradient_clip_val=1.0, deterministic=True)
    try:
        trainer.fit(module, DataLoader(batches, batch_size=None, shuffle=False))
    finally:
        torch.use_deterministic_algorithms(False)
    return {
        "losses": module.losses,
        "norms": module.norms,
        "gradients": module.gradients,
        "missing": module.missing,
        "weights": tiny.weights(module),
    }


@pytest.mark.parametrize("variant", VARIANTS)
def test_same_as_one_process(variant: str) -> None:
    reference = run_ranks(train, 1, variant, None)[0]
    assert len(reference["losses"]) == len(STEPS)
    for size, backend in ((2, "grouped_mm"), (2, "loop"), (1, "auto")):
        options = {"expert_parallel_size": size, "experts_backend": backend}
        ranks = run_ranks(train, RANKS, variant, options, timeout=60)
        ours = ranks[0]
        assert ours["missing"] == [], "zero, not None"
        assert ranks[1]["norms"] == ours["norms"]
        torch.testing.assert_close(ours["losses"], reference["losses"], rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(ours["norms"], reference["norms"], rtol=1e-5, atol=1e-7)
        for step, got, want in zip(STEPS, ours["gradients"], reference["gradients"], strict=True):
            for name, gradient in want.items():
                torch.testing.assert_close(
                    got[name], gradient, rtol=1e-4, atol=1e-6, msg=lambda m, s=step, n=name: f"{s}, {n}: {m}"
                )
        torch.testing.assert_close(ours["weights"], reference["weights"], rtol=1e-5, atol=1e-6)


def test_the_steps_are_what_they_say() -> None:
    reference = run_ranks(train, 1, "all trains", None)[0]
    by_step = dict(zip(STEPS, reference["gradients"], strict=True))
    used = by_step["one expert gets all"]["layer.experts.down_proj"].flatten(1).norm(dim=1)
    assert [float(u) > 0 for u in used] == [expert in (5, 6) for expert in range(E)], "5, and 6 the second time"
    assert all((g == 0).all() for g in by_step["no tokens at all"].values())
    initial = Module(**VARIANTS["all trains"])
    assert set(reference["weights"]) == {name for name, _ in initial.named_parameters()}
