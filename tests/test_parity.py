"""The promise: whatever the layout, training is that of one process on the whole batch.

SGD shows a wrong scale of a gradient, which AdamW hides; AdamW shows a wrong state. Clipping is on, so that the norm
over both meshes decides every step.
"""

import os
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_moe.dispatch.all_to_all import AllToAllDispatcher
from tests import tiny
from tests.harness import run_ranks

TOLERANCE = 1e-5
# (processes, expert_parallel_size, replicate_size)
LAYOUTS = [
    *[(1, 1, 1), (2, 1, 1), (2, 2, 1), (2, 1, 2), (4, 1, 1), (4, 2, 1), (4, 4, 1), (4, 1, 2), (4, 2, 2)],
    *(pytest.param(*layout, marks=pytest.mark.slow) for layout in [(8, 8, 1), (8, 2, 1), (8, 4, 2)]),
]


def train(strategy_options: dict[str, Any] | None, options: dict[str, Any]) -> list[dict[str, Any]]:
    """Train 6 steps with each optimizer; what one rank saw."""
    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    results = []
    for optimizer in (tiny.sgd, tiny.adamw):
        pl.seed_everything(0, verbose=False)
        module = tiny.TinyLM(optimizer, keep_gradients=True)
        strategy = "auto" if strategy_options is None else tiny.moe_ep(**strategy_options)
        settings = {"max_steps": 6, "gradient_clip_val": 0.5, **options}
        steps = 6 * settings.get("accumulate_grad_batches", 1)
        trainer = tiny.trainer(strategy, devices=world, **settings)
        trainer.fit(module, tiny.loader(tiny.tokens(steps), rank, world))
        results.append(
            {
                "losses": module.losses,
                "norms": module.norms,
                "gradients": module.gradients,
                "weights": tiny.weights(module),
            }
        )
        if strategy_options is not None:
            layout = trainer.strategy.layout
            expected = (world, strategy_options["expert_parallel_size"], strategy_options.get("replicate_size", 1))
            assert (layout.world_size, layout.expert, layout.replicate) == expected
    return results


def relative(ours: torch.Tensor, reference: torch.Tensor) -> float:
    """Largest difference over the largest magnitude of the tensor."""
    return float((ours - reference).abs().max() / reference.abs().max().clamp_min(1e-12))


def assert_same(ours: list[dict[str, Any]], reference: list[dict[str, Any]], tolerance: float = TOLERANCE) -> None:
    for got, expected in zip(ours, reference, strict=True):
        torch.testing.assert_close(got["losses"], expected["losses"], rtol=tolerance, atol=0)
        torch.testing.assert_close(got["norms"], expected["norms"], rtol=tolerance, atol=0)
        for kind in ("gradients", "weights"):
            assert got[kind].keys() == expected[kind].keys()
            errors = {name: relative(got[kind][name], expected[kind][name]) for name in expected[kind]}
            worst = max(errors, key=errors.__getitem__)
            assert errors[worst] <= tolerance, f"{kind} of {worst} differ by {errors[worst]:.1e}"


@pytest.fixture(scope="module")
def one_process() -> list[dict[str, Any]]:
    """Plain Lightning, no strategy of ours."""
    return run_ranks(train, 1, None, {})[0]


def test_the_reference_learns_and_clips(one_process: list[dict[str, Any]]) -> None:
    for result in one_process:
        assert len(result["losses"]) == 6
        assert min(result["norms"]) > 0.5, "clipping must have something to do at every step"
        experts = result["gradients"]["net.model.layers.1.mlp.experts.down_proj"]
        assert (experts.flatten(1).norm(dim=1) > 0).all(), "every expert must get tokens"


@pytest.mark.parametrize(("processes", "expert", "replicate"), LAYOUTS)
def test_same_as_one_process(one_process: list[dict[str, Any]], processes: int, expert: int, replicate: int) -> None:
    options = {"expert_parallel_size": expert, "replicate_size": replicate}
    ranks = run_ranks(train, processes, options, {}, timeout=200)
    assert_same(ranks[0], one_process)
    for rank in ranks[1:]:
        # Not nearly the same: a coefficient that differs in the last bit makes replicas drift apart.
        assert [r["norms"] for r in rank] == [r["norms"] for r in ranks[0]]


@pytest.mark.parametrize("dispatcher", ["all_to_all"])
@pytest.mark.parametrize("backend", ["loop", "grouped_mm"])
def test_same_with_each_backend(one_process: list[dict[str, Any]], backend: str, dispatcher: str) -> None:
    options = {"expert_parallel_size": 2, "experts_backend": backend, "dispatcher": dispatcher}
    assert_same(run_ranks(train, 2, options, {}, timeout=200)[0], one_process)


@pytest.mark.parametrize(
    ("processes", "options"),
    [
        (2, {"dispatch_chunks": 3}),
        (2, {"dispatch_chunks": 2, "activation_checkpointing": "selective", "dispatcher": AllToAllDispatcher(False)}),
        (4, {"dispatch_chunks": 2, "activation_checkpointing": "full", "dispatcher": AllToAllDispatcher(True)}),
        (2, {"dispatch_chunks": 50, "reshard_after_forward": False, "prefetch_blocks": 1}),
        (4, {"prefetch_blocks": 1}),
        (4, {"prefetch_blocks": 2, "activation_checkpointing": "full"}),
    ],
)
def test_same_when_tokens_travel_in_parts_and_weights_come_ahead(
    one_process: list[dict[str, Any]], processes: int, options: dict[str, Any]
) -> None:
    ours = run_ranks(train, processes, {"expert_parallel_size": 2, **options}, {}, timeout=200)
    assert_same(ours[0], one_process)


def test_same_with_accumulated_gradients() -> None:
    options = {"accumulate_grad_batches": 2}
    reference = run_ranks(train, 1, None, options)[0]
    ours = run_ranks(train, 2, {"expert_parallel_size": 2, "reshard_after_forward": False}, options, timeout=200)[0]
    assert len(ours[0]["losses"]) == 12
    assert_same(ours, reference)


def test_same_when_clipped_by_value() -> None:
    options = {"gradient_clip_val": 0.002, "gradient_clip_algorithm": "value"}
    reference = run_ranks(train, 1, None, options)[0]
    assert_same(run_ranks(train, 2, {"expert_parallel_size": 2}, options, timeout=200)[0], reference)
