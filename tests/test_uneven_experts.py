"""Expert counts that the expert-parallel size does not divide: some ranks hold fewer experts, or none."""

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from lightning_moe import ExpertsSpec, register_experts
from lightning_moe.mesh import Layout, experts_per_rank
from lightning_moe.nn import TopKRouter
from lightning_moe.parallel import experts_placement
from tests import tiny
from tests.harness import run_ranks
from tests.test_module_list import HIDDEN, LM, Experts, Net
from tests.test_parity import assert_same
from tests.test_strategy import fit, rank_and_world

EXPERT = "net.model.layers.0.mlp.experts.down_proj"


def test_blocks_are_those_of_a_dtensor() -> None:
    for ranks in range(1, 9):
        for count in range(1, 70):
            chunks = [len(chunk) for chunk in torch.arange(count).chunk(ranks)]
            assert experts_per_rank(count, ranks) == chunks + [0] * (ranks - len(chunks))
    assert experts_per_rank(60, 8) == [8] * 7 + [4]


def build(experts: int) -> torch.nn.Module:
    return tiny.qwen3_moe(num_experts=experts)


def train(experts: int, options: dict[str, Any] | None) -> tuple[list[dict[str, Any]], list[int]]:
    """What one rank saw with each optimizer, and the experts it held."""
    rank, world = rank_and_world()
    results = []
    for optimizer in (tiny.sgd, tiny.adamw):
        pl.seed_everything(0, verbose=False)
        module = tiny.TinyLM(optimizer, partial(build, experts), keep_gradients=True)
        trainer = tiny.trainer(
            "auto" if options is None else tiny.moe_ep(**options), devices=world, max_steps=4, gradient_clip_val=0.5
        )
        trainer.fit(module, tiny.loader(tiny.tokens(4), rank, world))
        results.append(
            {
                "losses": module.losses,
                "norms": module.norms,
                "gradients": module.gradients,
                "weights": tiny.weights(module),
            }
        )
    weight = module.get_parameter(EXPERT)
    return results, list(weight.to_local().shape) if isinstance(weight, DTensor) else []


# Experts; processes, expert_parallel_size, replicate_size; what each rank holds of [E, 32, 16]
CASES = [
    (7, (2, 2, 1), [[4, 32, 16], [3, 32, 16]]),
    (7, (4, 4, 1), [[2, 32, 16]] * 3 + [[1, 32, 16]]),
    (7, (4, 2, 2), [[4, 32, 16], [3, 32, 16]] * 2),
    (7, (4, 2, 1), [[4, 16, 16], [3, 16, 16]] * 2),  # inside the experts: blocks of 4 and 3 cannot be halved alike
    (7, (4, 1, 1), [[7, 8, 16]] * 4),
    (5, (4, 4, 1), [[2, 32, 16]] * 2 + [[1, 32, 16], [0, 32, 16]]),  # none left for the last rank
    (5, (8, 4, 1), [[2, 16, 16], [2, 16, 16], [1, 16, 16], [0, 16, 16]] * 2),
]


@pytest.mark.parametrize("experts", [5, 7])
def test_same_as_one_process(experts: int) -> None:
    reference, _ = run_ranks(train, 1, experts, None)[0]
    for _, (world, expert, replicate), held in (case for case in CASES if case[0] == experts):
        options = {"expert_parallel_size": expert, "replicate_size": replicate}
        ranks = run_ranks(train, world, experts, options, timeout=200)
        assert_same(ranks[0][0], reference)
        assert [shape for _, shape in ranks] == held
        for result, _ in ranks[1:]:
            assert [r["norms"] for r in result] == [r["norms"] for r in ranks[0][0]]


def fit_on(options: dict[str, Any], path: str, resume: bool) -> dict[str, Any]:
    rank, world = rank_and_world()
    pl.seed_everything(int(resume), verbose=False)
    module = tiny.TinyLM(tiny.adamw, partial(build, 5))
    trainer = tiny.trainer(tiny.moe_ep(**options), devices=world, max_steps=5 if resume else 3)
    data = tiny.tokens(5)
    data = data.roll(2, 0) if resume else data
    trainer.fit(module, tiny.loader(data, rank, world), ckpt_path=path if resume else None)
    if not resume:
        trainer.save_checkpoint(path)
    return {"losses": module.losses, "weights": tiny.weights(module)}


@pytest.mark.parametrize("distributed", [True, False])
def test_a_checkpoint_of_a_rank_without_experts_resumes_anywhere(tmp_path: Path, distributed: bool) -> None:
    path = str(tmp_path / "a.ckpt")
    save = {"save_distributed_checkpoint": distributed}
    run_ranks(fit_on, 4, {"expert_parallel_size": 4, **save}, path, False, timeout=200)
    same = run_ranks(fit_on, 4, {"expert_parallel_size": 4, **save}, path, True, timeout=200)[0]
    for world, expert in ((2, 2), (1, 1)):
        other = run_ranks(fit_on, world, {"expert_parallel_size": expert, **save}, path, True, timeout=200)[0]
        torch.testing.assert_close(other["losses"], same["losses"], rtol=1e-5, atol=0)
        torch.testing.assert_close(other["weights"], same["weights"], rtol=1e-4, atol=1e-5)


class OddNet(Net):
    """Five experts in the first layer, of which four ranks hold 2, 2, 1 and 0; the first ones are frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0]["router"] = TopKRouter(HIDDEN, 5, 2)
        self.layers[0]["experts"] = Experts(5)
        for frozen in (self.layers[0]["experts"].mlps[:2], self.embed, self.layers[0]["router"]):
            frozen.requires_grad_(False)


def train_modules(options: dict[str, Any] | None) -> dict[str, Any]:
    pl.seed_everything(0, verbose=False)
    module = LM(tiny.sgd, build=OddNet, keep_gradients=True)
    fit(module, "auto" if options is None else tiny.moe_ep(**options), steps=4, gradient_clip_val=0.5)
    weights: dict[str, Tensor] = {name: tiny.whole(p) for name, p in module.named_parameters()}
    return {"losses": module.losses, "norms": module.norms, "gradients": module.gradients, "weights": weights}


@pytest.mark.parametrize(("world", "expert"), [(2, 2), (4, 4)])
def test_modules_of_different_number_and_frozen_ones(world: int, expert: int) -> None:
    """Nothing before the experts needs a gradient, and on one rank nothing in them does either."""
    reference = run_ranks(train_modules, 1, None)[0]
    ranks = run_ranks(train_modules, world, {"expert_parallel_size": expert}, timeout=60)
    merged = {key: ranks[0][key] for key in ("losses", "norms")}
    for kind in ("gradients", "weights"):
        merged[kind] = {name: t for rank in ranks for name, t in rank[kind].items()}
    assert_same([merged], [reference])


class Normed(nn.Module):
    """Five stacked experts, and a norm of what each returns that all of them share."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(5, HIDDEN, 24) / 4)
        self.down = nn.Parameter(torch.randn(5, 24, HIDDEN) / 5)
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden)
        for number in range(5):
            token, choice = (index == number).nonzero(as_tuple=True)
            rows = self.norm(torch.tanh(hidden[token] @ self.up[number]) @ self.down[number])
            out = out.index_add(0, token, rows * weights[token, choice, None])
        return out


register_experts(
    Normed,
    ExpertsSpec(
        up="up",
        down="down",
        transposed=True,
        activation=lambda module, rows: torch.tanh(rows),
        post=lambda module, rows: module.norm(rows),
    ),
)


class NormedNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers[0]["router"] = TopKRouter(HIDDEN, 5, 2)
        self.layers[0]["experts"] = Normed()
        del self.layers[1]


def train_normed(options: dict[str, Any] | None) -> dict[str, Any]:
    pl.seed_everything(0, verbose=False)
    module = LM(tiny.sgd, build=NormedNet, keep_gradients=True)
    fit(module, "auto" if options is None else tiny.moe_ep(**options), steps=4, gradient_clip_val=0.5)
    weights = tiny.weights(module)
    return {"losses": module.losses, "norms": module.norms, "gradients": module.gradients, "weights": weights}


def test_what_experts_share_reaches_a_rank_without_experts() -> None:
    reference = run_ranks(train_normed, 1, None)[0]
    for world, expert in ((4, 4), (2, 2)):
        assert_same([run_ranks(train_normed, world, {"expert_parallel_size": expert}, timeout=60)[0]], [reference])


def test_what_cannot_be_divided_says_so() -> None:
    weight = torch.nn.Parameter(torch.zeros(7, 3, 5))
    assert experts_placement(weight, Layout(4, 1, 4)) == Shard(0)
    assert experts_placement(weight, Layout(12, 1, 4)) == Shard(1)
    assert experts_placement(weight, Layout(10, 1, 2)) == Shard(2)
    assert experts_placement(torch.nn.Parameter(torch.zeros(6, 3, 5)), Layout(4, 1, 2)) == Shard(0)
    with pytest.raises(ValueError, match=r"expert_parallel_size=2 does not divide 7 experts, and a weight of shape"):
        experts_placement(weight, Layout(4, 1, 2))
