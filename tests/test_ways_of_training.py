"""Every way in which Lightning trains, against the same way in one plain process."""

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from tests import tiny
from tests.harness import run_ranks
from tests.test_parity import assert_same, relative
from tests.test_strategy import rank_and_world

EP2 = {"expert_parallel_size": 2}
Ways = Callable[[Any, int, int], dict[str, Any]]


class TwoOptimizers(tiny.TinyLM):
    """Manual optimization: experts and the rest have an optimizer each, with clipping of each."""

    def __init__(self) -> None:
        super().__init__(keep_gradients=True)
        self.automatic_optimization = False
        self.twice = False

    def training_step(self, tokens: Tensor, index: int) -> None:
        experts, rest = self.optimizers()
        for half in tokens.chunk(2):  # gradients are accumulated over two halves
            loss = self.loss(half) / 2
            self.manual_backward(loss)
            self.losses.append(float(self.trainer.strategy.reduce(loss.detach())))
        for optimizer, limit in ((experts, 0.2), (rest, 0.3)):
            self.clip_gradients(optimizer, gradient_clip_val=limit, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        inside = [p for name, p in self.named_parameters() if ".experts." in name]
        outside = [p for name, p in self.named_parameters() if ".experts." not in name]
        return [torch.optim.SGD(inside, lr=0.1), torch.optim.AdamW(outside, lr=1e-2, eps=1e-4)]


def record(module: tiny.TinyLM, **more: Any) -> dict[str, Any]:
    return {
        "losses": module.losses,
        "norms": module.norms,
        "gradients": module.gradients,
        "weights": tiny.weights(module),
        **more,
    }


def two_optimizers(strategy: Any, rank: int, world: int) -> dict[str, Any]:
    module = TwoOptimizers()
    # Each half of a rank's batch must be a half of the whole batch's tokens.
    data = tiny.tokens(3).unflatten(1, (2, world, -1)).transpose(1, 2).flatten(1, 3)
    tiny.trainer(strategy, devices=world, max_epochs=1).fit(module, tiny.loader(data, rank, world))
    return record(module)


def uneven_window(strategy: Any, rank: int, world: int) -> dict[str, Any]:
    """Five batches an epoch in windows of two, so that the last window of each epoch is a short one."""
    module = tiny.TinyLM(keep_gradients=True)
    trainer = tiny.trainer(strategy, devices=world, max_epochs=2, accumulate_grad_batches=2, gradient_clip_val=0.5)
    trainer.fit(module, tiny.loader(tiny.tokens(5), rank, world))
    return record(module, steps=trainer.global_step)


def validations_between(strategy: Any, rank: int, world: int) -> dict[str, Any]:
    """Validate before, twice an epoch and after; test and predict; then train the same module once more."""
    module = tiny.TinyLM(tiny.adamw, keep_gradients=True)
    data = tiny.loader(tiny.tokens(4), rank, world)
    held_out = tiny.loader(tiny.tokens(2, seed=7), rank, world)
    seen: list[float] = []

    class Note(pl.Callback):
        def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
            seen.append(float(trainer.callback_metrics["val_loss"]))

    def trainer(**options: Any) -> pl.Trainer:
        settings = {"max_epochs": 1, "val_check_interval": 2, "gradient_clip_val": 0.5, "callbacks": [Note()]}
        return tiny.trainer(strategy(), devices=world, **{**settings, **options})

    trainer().validate(module, held_out, verbose=False)
    first = trainer(num_sanity_val_steps=1)
    first.fit(module, data, held_out)
    seen.append(first.test(module, held_out, verbose=False)[0]["test_loss"])
    predicted = torch.cat(trainer().predict(module, held_out))
    trainer().fit(module, data, held_out)
    trainer().validate(module, held_out, verbose=False)
    return record(module, seen=seen, predicted=predicted)


def overfit(strategy: Any, rank: int, world: int) -> dict[str, Any]:
    module = tiny.TinyLM(keep_gradients=True)
    trainer = tiny.trainer(strategy, devices=world, max_epochs=3, overfit_batches=2, gradient_clip_val=0.5)
    trainer.fit(module, tiny.loader(tiny.tokens(5), rank, world))
    return record(module)


def scheduler(strategy: Any, rank: int, world: int) -> dict[str, Any]:
    class Scheduled(tiny.TinyLM):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.2)
            steps = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 4)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": steps, "interval": "step"}}

    module = Scheduled(keep_gradients=True)
    tiny.trainer(strategy, devices=world, max_steps=6).fit(module, tiny.loader(tiny.tokens(6), rank, world))
    return record(module)


def train(way: Ways, options: dict[str, Any] | None, seed: int = 0) -> dict[str, Any]:
    rank, world = rank_and_world()
    pl.seed_everything(seed, verbose=False)
    several = way is validations_between  # a strategy belongs to one Trainer

    def strategy() -> Any:
        return "auto" if options is None else tiny.moe_ep(**options)

    return way(strategy if several else strategy(), rank, world)


@pytest.mark.parametrize("way", [two_optimizers, uneven_window, validations_between, overfit, scheduler])
def test_same_as_one_process(way: Ways) -> None:
    reference = run_ranks(train, 1, way, None)[0]
    assert len(reference["losses"]) >= 6
    for options in (EP2, {"expert_parallel_size": 1, "reshard_after_forward": False}):
        ranks = run_ranks(train, 2, way, options, timeout=200)
        assert_same([ranks[0]], [reference])
        assert ranks[0].get("steps") == reference.get("steps")
        if "seen" in reference:
            assert len(reference["seen"]) == 8
            torch.testing.assert_close(ranks[0]["seen"], reference["seen"], rtol=1e-5, atol=0)
            halves = [rank["predicted"].unflatten(0, (2, -1)) for rank in ranks]
            assert torch.equal(torch.cat(halves, dim=1).flatten(0, 1), reference["predicted"])


# Precision


def bf16(options: dict[str, Any] | None, precision: str) -> dict[str, Any]:
    rank, world = rank_and_world()
    pl.seed_everything(0, verbose=False)
    module = tiny.TinyLM(keep_gradients=True)
    strategy = "auto" if options is None else tiny.moe_ep(**options)
    trainer = tiny.trainer(strategy, devices=world, max_steps=4, gradient_clip_val=0.5, precision=precision)
    trainer.fit(module, tiny.loader(tiny.tokens(4), rank, world))
    return record(module)


def worst(ours: dict[str, Any], reference: dict[str, Any], kind: str) -> float:
    return max(relative(ours[kind][name], tensor) for name, tensor in reference[kind].items())


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_bf16_is_as_near_to_fp32_as_one_bf16_process(precision: str) -> None:
    """Layouts add no noise of their own: every one is within twice the distance of one bf16 process from float32."""
    exact = run_ranks(bf16, 1, None, "32-true")[0]
    one = run_ranks(bf16, 1, {"expert_parallel_size": 1}, precision)[0]
    noise = {kind: worst(one, exact, kind) for kind in ("gradients", "weights")}
    assert noise["gradients"] > 1e-4, "bfloat16 must be seen at all"
    for world, expert in ((2, 2), (2, 1), (4, 2)):
        ours = run_ranks(bf16, world, {"expert_parallel_size": expert}, precision, timeout=200)[0]
        torch.testing.assert_close(ours["losses"], one["losses"], rtol=5e-3, atol=0)
        torch.testing.assert_close(ours["norms"], one["norms"], rtol=2e-2, atol=0)
        for kind, distance in noise.items():
            assert worst(ours, exact, kind) <= 2 * distance, (world, expert, kind)


# Widths


def odd_width(options: dict[str, Any] | None) -> dict[str, Any]:
    """Experts 50 wide: rows of 200 bytes in float32, which no grouped product of PyTorch takes."""
    rank, world = rank_and_world()
    pl.seed_everything(0, verbose=False)
    module = tiny.TinyLM(build=partial(tiny.qwen3_moe, moe_intermediate_size=50), keep_gradients=True)
    if options is None:
        module.net.set_experts_implementation("eager")
    strategy = "auto" if options is None else tiny.moe_ep(**options)
    trainer = tiny.trainer(strategy, devices=world, max_steps=3, gradient_clip_val=0.5)
    trainer.fit(module, tiny.loader(tiny.tokens(3), rank, world))
    return record(module)


def test_widths_that_grouped_products_refuse() -> None:
    reference = run_ranks(odd_width, 1, None)[0]
    assert_same([run_ranks(odd_width, 2, EP2)[0]], [reference])


# Determinism


def deterministic(options: dict[str, Any]) -> dict[str, Any]:
    rank, world = rank_and_world()
    pl.seed_everything(3, verbose=False)
    module = tiny.TinyLM(tiny.adamw, keep_gradients=True)
    trainer = tiny.trainer(
        tiny.moe_ep(**options), devices=world, max_steps=4, gradient_clip_val=0.5, deterministic=True
    )
    try:
        trainer.fit(module, tiny.loader(tiny.tokens(4), rank, world))
    finally:
        torch.use_deterministic_algorithms(False)
    return record(module)


@pytest.mark.parametrize("backend", ["grouped_mm", "loop"])
def test_two_runs_give_equal_bits(backend: str) -> None:
    options = {**EP2, "experts_backend": backend, "activation_checkpointing": "full"}
    first, second = (run_ranks(deterministic, 4, options, timeout=200) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert a["losses"] == b["losses"]
        assert a["norms"] == b["norms"]
        for kind in ("gradients", "weights"):
            assert all(torch.equal(b[kind][name], tensor) for name, tensor in a[kind].items())
