"""Transformer Engine itself, where ``tests/te`` uses a stand-in: its layers and its experts, with and without recipes.

pytest tests/gpu/test_te.py      on a machine with CUDA devices and the package; elsewhere skipped with the reason
"""

import os
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_moe import MoEPrecision
from lightning_moe.te import TransformerEngineConfig
from lightning_moe.te.recipes import RECIPES
from lightning_moe.te.swap import unusable
from tests import tiny
from tests.harness import run_ranks
from tests.test_parity import assert_same

pytestmark = pytest.mark.gpu(1)

STEPS = 4
# Widths that every recipe takes.
WIDE = {"hidden_size": 128, "moe_intermediate_size": 64, "intermediate_size": 128, "head_dim": 32}


def build() -> torch.nn.Module:
    return tiny.qwen3_moe(**WIDE, initializer_range=0.05)


def world() -> int:
    return max(size for size in (1, 2, 4, 8) if size <= torch.cuda.device_count())


def needs(**options: Any) -> dict[str, Any]:
    """The options, where they can be used here."""
    if reason := unusable(TransformerEngineConfig(**options)):
        pytest.skip(reason)
    return options


def train(precision: str, options: dict[str, Any] | None, strategy: dict[str, Any] | None) -> list[dict[str, Any]]:
    """A few steps with SGD; what one rank saw. Without options for the strategy it is plain Lightning."""
    ranks, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    pl.seed_everything(0, verbose=False)
    module = tiny.TinyLM(tiny.sgd, build, keep_gradients=True)
    before = tiny.weights(module)
    more: dict[str, Any] = {}
    if strategy is not None:
        more["plugins"] = [MoEPrecision(precision, transformer_engine=options)]  # type: ignore[arg-type]
    trainer = tiny.trainer(
        "auto" if strategy is None else tiny.moe_ep(**strategy),
        devices=ranks,
        accelerator="cuda",
        max_steps=STEPS,
        gradient_clip_val=0.5,
        **more,
    )
    trainer.fit(module, tiny.loader(tiny.tokens(STEPS), rank, ranks))
    after = tiny.weights(module)
    unmoved = [name for name, weight in before.items() if torch.equal(after[name].cpu(), weight.cpu())]
    classes = {type(part).base.__name__ for part in module.modules() if hasattr(type(part), "base")}
    return [
        {
            "losses": module.losses,
            "norms": module.norms,
            "gradients": module.gradients,
            "weights": after,
            "unmoved": unmoved,
            "classes": classes,
        }
    ]


def distance(ours: torch.Tensor, reference: torch.Tensor) -> float:
    """Norm of the difference over that of the reference; single values differ more, where near-ties of experts flip."""
    return float((ours - reference).norm() / reference.norm())


@pytest.fixture(scope="module")
def plain() -> list[dict[str, Any]]:
    """Plain Lightning in float32."""
    return run_ranks(train, 1, "32-true", None, None)[0]


def test_float32_layers_are_those_of_the_plain_model(plain: list[dict[str, Any]]) -> None:
    options = needs(layers=["linear", "norm"])
    (ours,) = run_ranks(train, world(), "32-true", options, {"expert_parallel_size": world()}, timeout=300)[0]
    assert ours["classes"] == {"Linear", "RMSNorm"}
    assert ours["unmoved"] == []
    # Products of TF32 keep 10 bits; PyTorch's own are float32.
    assert_same([ours], plain, tolerance=1e-2)


@pytest.mark.parametrize("backend", ["auto", "te"])
def test_bf16_mixed_is_near(plain: list[dict[str, Any]], backend: str) -> None:
    options = needs()
    strategy = {"expert_parallel_size": world(), "experts_backend": backend}
    for (ours,) in run_ranks(train, world(), "bf16-mixed", options, strategy, timeout=300):
        assert ours["unmoved"] == []
        torch.testing.assert_close(ours["losses"], plain[0]["losses"], rtol=2e-2, atol=0)
        for name in ("net.model.layers.0.mlp.experts.gate_up_proj", "net.model.layers.1.self_attn.q_proj.weight"):
            assert distance(ours["gradients"][name], plain[0]["gradients"][name]) < 0.2, name


@pytest.mark.parametrize("recipe", [facts.name for facts in RECIPES])
def test_low_precision_trains_every_weight(plain: list[dict[str, Any]], recipe: str) -> None:
    options = needs(recipe=recipe)
    strategy = {"expert_parallel_size": world(), "experts_backend": "te"}
    for (ours,) in run_ranks(train, world(), "bf16-mixed", options, strategy, timeout=300):
        assert ours["unmoved"] == []
        assert all(gradient.isfinite().all() for gradient in ours["gradients"].values())
        torch.testing.assert_close(ours["losses"], plain[0]["losses"], rtol=8e-2, atol=0)
        assert ours["losses"] != plain[0]["losses"]


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputation_is_that_of_the_forward(mode: str) -> None:
    options = needs(recipe="current")
    strategy = {"expert_parallel_size": world(), "experts_backend": "te"}
    (kept,) = run_ranks(train, world(), "bf16-mixed", options, strategy, timeout=300)[0]
    (again,) = run_ranks(
        train, world(), "bf16-mixed", options, {**strategy, "activation_checkpointing": mode}, timeout=300
    )[0]
    torch.testing.assert_close(again["losses"], kept["losses"], rtol=1e-3, atol=0)
    for name, gradient in kept["gradients"].items():
        assert distance(again["gradients"][name], gradient) < 2e-2, name


def test_copies_of_the_weights_of_experts_change_nothing() -> None:
    strategy = {"expert_parallel_size": world(), "experts_backend": "te"}
    runs = [
        run_ranks(train, world(), "bf16-mixed", needs(recipe="current", cache_expert_weights=cache), strategy)[0][0]
        for cache in (False, True)
    ]
    torch.testing.assert_close(runs[1]["losses"], runs[0]["losses"], rtol=1e-3, atol=0)
