"""Experts that are modules of their own, in a ModuleList: any MLP, split over the ranks as it is."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_moe import ExpertsSpec, register_experts
from lightning_moe.nn import TopKRouter
from tests import tiny
from tests.harness import run_ranks, run_ranks_expecting_error
from tests.test_parity import assert_same
from tests.test_strategy import fit, rank_and_world

HIDDEN = 16


class Experts(nn.Module):
    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 24), nn.Tanh(), nn.Linear(24, HIDDEN))
            for _ in range(num_experts)
        )

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden)
        for number, mlp in enumerate(self.mlps):
            token, choice = (index == number).nonzero(as_tuple=True)
            out = out.index_add(0, token, mlp(hidden[token]) * weights[token, choice, None])
        return out


register_experts(Experts, ExpertsSpec(modules="mlps"))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(tiny.VOCABULARY, HIDDEN)
        # The router prefers two of the experts of the second layer, so that some of its experts get no tokens at all.
        self.layers = nn.ModuleList(
            nn.ModuleDict({"router": TopKRouter(HIDDEN, n, 2), "experts": Experts(n)}) for n in (4, 8)
        )
        with torch.no_grad():
            self.layers[1]["router"].weight[:2] *= 50
        self.head = nn.Linear(HIDDEN, tiny.VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens).flatten(0, 1)
        for layer in self.layers:
            _, weights, index = layer["router"](x)
            x = x + layer["experts"](x, index, weights)
        return self.head(x)


class LM(tiny.TinyLM):
    def loss(self, tokens: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.net(tokens), tokens.roll(1, 1).flatten())


def local_weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: tiny.whole(parameter) for name, parameter in module.named_parameters()}


def train(options: dict[str, Any] | None) -> list[dict[str, Any]]:
    results = []
    for optimizer in (tiny.sgd, tiny.adamw):
        pl.seed_everything(0, verbose=False)
        module = LM(optimizer, build=Net, keep_gradients=True)
        strategy = "auto" if options is None else tiny.moe_ep(**options)
        fit(module, strategy, steps=6, gradient_clip_val=0.5)
        results.append(
            {
                "losses": module.losses,
                "norms": module.norms,
                "gradients": module.gradients,
                "weights": local_weights(module),
            }
        )
    return results


@pytest.mark.parametrize(("world", "expert", "replicate"), [(2, 2, 1), (4, 2, 1), (4, 4, 1), (4, 2, 2)])
def test_same_as_one_process(world: int, expert: int, replicate: int) -> None:
    reference = run_ranks(train, 1, None)[0]
    ranks = run_ranks(train, world, {"expert_parallel_size": expert, "replicate_size": replicate})
    merged = []
    for run in range(2):
        result = {key: ranks[0][run][key] for key in ("losses", "norms")}
        for kind in ("gradients", "weights"):
            result[kind] = {name: t for rank in ranks for name, t in rank[run][kind].items()}
        merged.append(result)
        held = [sum(".mlps." in name for name in rank[run]["weights"]) for rank in ranks]
        assert held == [(4 + 8) // expert * 6] * world, "each rank holds its own experts only"
        # Their weights are on no mesh that knows of other experts, as those of layers with plain local tensors.
        assert all(rank[run]["norms"] == ranks[0][run]["norms"] for rank in ranks), "one number"
    assert_same(merged, reference)


def save(path: str) -> dict[str, Tensor]:
    pl.seed_everything(0, verbose=False)
    module = LM(tiny.adamw, build=Net)
    fit(module, tiny.moe_ep(expert_parallel_size=2), steps=3).save_checkpoint(path)
    return local_weights(module)


def resume(options: dict[str, Any], path: str) -> dict[str, Any]:
    pl.seed_everything(9, verbose=False)
    rank, world = rank_and_world()
    module = LM(tiny.adamw, build=Net)
    trainer = tiny.trainer(tiny.moe_ep(**options), devices=world, max_steps=4)
    trainer.fit(module, tiny.loader(tiny.tokens(4).roll(1, 0), rank, world), ckpt_path=path)
    moments = {s["exp_avg"].shape for s in trainer.optimizers[0].state.values()}
    return {"losses": module.losses, "weights": local_weights(module), "moments": moments}


def test_checkpoint_of_two_ranks_resumes_on_four_and_on_one(tmp_path: Path) -> None:
    path = str(tmp_path / "a.ckpt")
    run_ranks(save, 2, path)
    same = run_ranks(resume, 2, {"expert_parallel_size": 2}, path)
    for world, expert in ((4, 4), (1, 1)):
        other = run_ranks(resume, world, {"expert_parallel_size": expert}, path)
        torch.testing.assert_close(other[0]["losses"], same[0]["losses"], rtol=1e-5, atol=0)
        expected = {name: t for rank in same for name, t in rank["weights"].items()}
        got = {name: t for rank in other for name, t in rank["weights"].items()}
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def fit_single_file() -> None:
    fit(LM(build=Net), tiny.moe_ep(expert_parallel_size=2, save_distributed_checkpoint=False))


def test_a_single_file_would_lose_experts_and_is_refused() -> None:
    errors = run_ranks_expecting_error(fit_single_file, 2, timeout=60)
    assert len(set(errors)) == 1
    assert "save_distributed_checkpoint=False" in errors[0]
    assert "layers.0.experts" in errors[0]
    assert "save_distributed_checkpoint=True" in errors[0]


def test_bad_names() -> None:
    from lightning_moe.experts import find_experts

    class Other(Experts):
        pass

    register_experts(Other, ExpertsSpec(modules="mlp"))
    with pytest.raises(ValueError, match="modules='mlp' must name a ModuleList"):
        find_experts(Other(2))
    with pytest.raises(ValueError, match="not both"):
        ExpertsSpec(modules="mlps", up="w")
