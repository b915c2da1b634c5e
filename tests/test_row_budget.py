"""``max_rows_per_rank``: no rank computes more, and training is that of one process that drops the same choices."""

from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_moe.callbacks import ExpertLoadMonitor
from lightning_moe.dispatch import Dispatched
from lightning_moe.dispatch.all_to_all import AllToAllDispatcher
from lightning_moe.dispatch.base import Call
from lightning_moe.in_flight import InFlight
from lightning_moe.nn import MoE
from tests import tiny
from tests.callbacks.test_expert_load import A, choices, fixed
from tests.dispatch.test_budget import drop_plainly
from tests.harness import run_ranks
from tests.test_parity import assert_same
from tests.test_strategy import rank_and_world

STEPS = 4
MIXED = [0, 1, 2, 3]


class Recording(AllToAllDispatcher):
    """Records how many rows this rank computes in each forward."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.rows: list[int] = []

    def dispatch(self, *call: Tensor) -> Dispatched:
        dispatched = super().dispatch(*call)
        self.rows.append(len(dispatched.rows))
        return dispatched

    def start(self, calls: Sequence[Call]) -> list[InFlight[Dispatched]]:
        flights = super().start(calls)
        self.rows.append(0)

        def add(dispatched: Dispatched) -> Dispatched:
            self.rows[-1] += len(dispatched.rows)
            return dispatched

        return [flight.then(add) for flight in flights]


class Plain:
    """The forward of an experts module in one process that drops what several ranks would, and counts it."""

    def __init__(self, experts: nn.Module, budget: int, num_experts: int, sizes: Callable[[int], list[int]], ep: int):
        self.experts, self.original = experts, experts.forward
        self.budget, self.num_experts, self.sizes, self.ep = budget, num_experts, sizes, ep
        self.load, self.dropped = torch.zeros(num_experts, dtype=torch.long), 0
        experts.forward = self

    def __call__(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        sizes = self.sizes(len(index))
        calls = list(zip(index.split(sizes), weights.detach().split(sizes), strict=True))
        left: list[Tensor] = []
        for first in range(0, len(calls), self.ep):
            left += drop_plainly(calls[first : first + self.ep], self.budget, self.num_experts)
        keep = torch.cat(left) >= 0
        if self.experts.training:
            self.load += index.flatten().bincount(minlength=self.num_experts)
            self.dropped += int((~keep).sum())
        return self.original(hidden, index, torch.where(keep, weights, 0.0))


def fit(module: Any, strategy: Any) -> tuple[pl.Trainer, dict[str, Any]]:
    rank, world = rank_and_world()
    trainer = tiny.trainer(strategy, devices=world, max_steps=STEPS, gradient_clip_val=0.5, val_check_interval=STEPS)
    trainer.fit(module, tiny.loader(tiny.tokens(STEPS), rank, world), tiny.loader(tiny.tokens(1), rank, world))
    result = {"losses": module.losses, "norms": module.norms, "gradients": module.gradients}
    return trainer, {
        **result,
        "weights": tiny.weights(module),
        "validation": float(trainer.callback_metrics["val_loss"]),
    }


def one_process(world: int, ep: int, budget: int) -> dict[str, Any]:
    pl.seed_everything(0, verbose=False)
    module = tiny.TinyLM(keep_gradients=True)
    plain = [
        Plain(layer.mlp.experts, budget, 8, lambda tokens: [tokens // world] * world, ep)
        for layer in module.net.model.layers
    ]
    _, result = fit(module, "auto")
    return {**result, "load": [p.load.tolist() for p in plain], "dropped": [p.dropped for p in plain]}


def ranks(options: list[dict[str, Any]]) -> list[dict[str, Any]]:
    results = []
    for option in options:
        pl.seed_everything(0, verbose=False)
        dispatcher = Recording(deduplicate=option.pop("deduplicate", "auto"))
        trainer, result = fit(tiny.TinyLM(keep_gradients=True), tiny.moe_ep(dispatcher=dispatcher, **option))
        experts = trainer.strategy._sharded.experts
        result |= {"load": [e.load.tolist() for e in experts], "dropped": [int(e.dropped) for e in experts]}
        results.append({**result, "rows": dispatcher.rows})
    return results


# Rows that a rank gets are about 16 * 16 tokens * 2 choices over the ranks of the group, and one group's part of them.
CASES: dict[tuple[int, int, int], list[dict[str, Any]]] = {
    (2, 2, 240): [
        {},
        {"deduplicate": True},
        {"activation_checkpointing": "full"},
        {"activation_checkpointing": "selective"},
        {"activation_checkpointing": "selective", "dispatch_chunks": 3},
    ],
    (4, 2, 120): [{}, {"activation_checkpointing": "full", "dispatch_chunks": 2}],
    (4, 4, 100): [{"activation_checkpointing": "selective", "reshard_after_forward": False}],
    (1, 1, 400): [{}],
}


@pytest.mark.parametrize(("world", "ep", "budget"), CASES)
def test_same_as_one_process_that_drops_the_same(world: int, ep: int, budget: int) -> None:
    reference = run_ranks(one_process, 1, world, ep, budget)[0]
    options = [{**case, "expert_parallel_size": ep, "max_rows_per_rank": budget} for case in CASES[world, ep, budget]]
    by_rank = run_ranks(ranks, world, options, timeout=200)
    assert min(reference["dropped"]) > 0, "each layer must drop something for this to mean anything"
    for case, results in zip(options, zip(*by_rank, strict=True), strict=True):
        assert_same([results[0]], [reference])
        assert results[0]["validation"] == pytest.approx(reference["validation"], rel=1e-5)
        for layer in (0, 1):
            load = torch.tensor([rank["load"][layer] for rank in results]).sum(0)
            assert load.tolist() == reference["load"][layer], (case, "the router's choices, dropped or not")
            assert sum(rank["dropped"][layer] for rank in results) == reference["dropped"][layer], case
        rows = [rank["rows"] for rank in results]
        assert max(max(rank) for rank in rows) == budget, (case, "the budget is used, and never exceeded")
        # Two layers, in each of the steps, in their recomputation, and in one step of validation
        passes = 1 if case.get("activation_checkpointing", "none") == "none" else 2
        assert {len(rank) for rank in rows} == {2 * (passes * STEPS + 1)}


def test_no_budget_and_one_that_is_never_reached_are_the_same() -> None:
    options = [{"expert_parallel_size": 2}, {"expert_parallel_size": 2, "max_rows_per_rank": 10_000}]
    for without, with_budget in run_ranks(ranks, 2, options):
        for kind in ("losses", "norms", "load", "rows", "dropped"):
            assert without[kind] == with_budget[kind], kind
        assert with_budget["dropped"] == [0, 0]
        for kind in ("gradients", "weights"):
            assert all(torch.equal(with_budget[kind][name], tensor) for name, tensor in without[kind].items())


# What is logged


def monitored() -> dict[int, dict[str, float]]:
    strategy = tiny.moe_ep(expert_parallel_size=2, max_rows_per_rank=6)
    return fixed(ExpertLoadMonitor(2), [choices(A, A, A, MIXED), choices(A)], strategy=strategy)["rows"]


def test_the_share_of_dropped_choices_is_logged() -> None:
    for rows in run_ranks(monitored, 2):
        # Of A all eight choices are for rank 0, which computes six; of the mixed step each rank gets four.
        assert [row["experts/experts/dropped_share"] for row in rows.values()] == [2 / 8, 2 / 16]
        assert [row["experts/dropped_share"] for row in rows.values()] == [2 / 8, 2 / 16]
        assert [row["experts/experts/rank_imbalance"] for row in rows.values()] == [2.0, 1.5], "before the drop"


# Uneven numbers of tokens, and none


class Uneven(pl.LightningModule):
    """A layer whose ranks have different numbers of tokens."""

    def __init__(self, sizes: list[int], experts: int) -> None:
        super().__init__()
        self.layer = MoE(8, 8, experts, 2)
        self.sizes = sizes
        self.gradients: dict[str, Tensor] = {}

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        parts = torch.randn(sum(self.sizes), 8, generator=torch.Generator().manual_seed(index)).split(self.sizes)
        rank, world = rank_and_world()
        # The mean over the ranks of each one's sum
        return self.layer(parts[rank] if world > 1 else torch.cat(parts)).square().sum() * (world / len(self.sizes))

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.gradients = {name: tiny.whole(p.grad) for name, p in self.named_parameters()}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def uneven(sizes: list[int], experts: int, budget: int, mode: Any) -> dict[str, Any]:
    _, world = rank_and_world()
    pl.seed_everything(0, verbose=False)
    module = Uneven(sizes, experts)
    if world == 1:
        plain = Plain(module.layer.experts, budget, experts, lambda _: sizes, len(sizes))
        tiny.trainer(max_steps=3).fit(module, DataLoader(torch.zeros(3)))
        return {"gradients": module.gradients, "weights": tiny.weights(module), "dropped": plain.dropped}
    strategy = tiny.moe_ep(
        expert_parallel_size=world, max_rows_per_rank=budget, activation_checkpointing=mode, block_classes=["MoE"]
    )
    trainer = tiny.trainer(strategy, devices=world, max_steps=3)
    trainer.fit(module, DataLoader(torch.zeros(3 * world)))
    dropped = int(trainer.strategy._sharded.experts[0].dropped)
    return {"gradients": module.gradients, "weights": tiny.weights(module), "dropped": dropped}


@pytest.mark.parametrize(
    ("sizes", "experts", "budget", "mode"),
    [
        ([0, 20], 4, 9, "none"),
        ([14, 0], 4, 5, "full"),
        ([3, 0, 12, 7], 5, 6, "selective"),
        ([0, 8, 1, 9], 8, 1, "full"),
    ],
)
def test_ranks_with_few_tokens_or_none(sizes: list[int], experts: int, budget: int, mode: str) -> None:
    reference = run_ranks(uneven, 1, sizes, experts, budget, "none")[0]
    got = run_ranks(uneven, len(sizes), sizes, experts, budget, mode)
    assert sum(rank["dropped"] for rank in got) == reference["dropped"] > 0
    assert all(rank["dropped"] == 0 for rank, size in zip(got, sizes, strict=True) if size == 0)
    for kind in ("gradients", "weights"):
        for name, want in reference[kind].items():
            torch.testing.assert_close(
                got[0][kind][name], want, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.parametrize("bad", [0, -3, 1.5, "100", True])
def test_no_other_budget_than_a_positive_number(bad: Any) -> None:
    with pytest.raises(ValueError, match=f"max_rows_per_rank={bad!r} must be a positive number of rows"):
        tiny.moe_ep(max_rows_per_rank=bad)
