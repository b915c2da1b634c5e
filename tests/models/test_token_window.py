"""Gradient accumulation: each optimizer step is that of the mean over all tokens of its micro-batches and ranks."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Subset

from lightning_moe.models import CausalLM
from lightning_moe.models.token_window import TokenWindow, scale_gradients
from tests.harness import run_ranks
from tests.models.tiny import Sequences, causal_lm, loader, sgd, trainer
from tests.tiny import moe_ep, weights, whole

ACCUMULATE, MAX_NORM = 3, 0.7
# Valid tokens of the two sequences of each micro-batch. Windows of three, the last of one; in the second one the first
# micro-batch has none, in the third all.
VALID = [[16, 3], [1, 0], [7, 16], [0, 0], [5, 2], [0, 9], [0, 0], [0, 0], [0, 0], [4, 0]]


def data() -> Sequences:
    return Sequences(len(VALID) * 2, valid=[count for pair in VALID for count in pair])


def build() -> CausalLM:
    torch.manual_seed(0)
    model = causal_lm(optimizer=sgd, schedule="constant")
    model.network_config.initializer_range = 0.2
    model.configure_model()
    return model


class Recorder(Callback):
    """What another callback sees of the gradients, and the weights after each step."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, Tensor]] = []
        self.weights: list[dict[str, Tensor]] = []
        self.losses: list[float] = []
        self.validated = 0

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.gradients.append({name: whole(p.grad) for name, p in pl_module.named_parameters()})

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["train/loss"]))
        if len(self.weights) < trainer.global_step:
            self.weights.append(weights(pl_module))

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.validated += 1


def train(root: str, world: int, strategy: str, precision: str = "32-true") -> dict[str, Any]:
    recorder, rows, mine = Recorder(), data(), 2 // world
    run = trainer(
        root,
        max_epochs=2,
        devices=world,
        strategy=moe_ep() if strategy == "moe_ep" else strategy,
        precision=precision,
        accumulate_grad_batches=ACCUMULATE,
        gradient_clip_val=MAX_NORM,
        val_check_interval=2,
        limit_val_batches=1,
        callbacks=[recorder],
    )
    part = rows if world == 1 else Subset(rows, range(run.global_rank, len(rows), 2))
    model = build()
    run.fit(model, DataLoader(part, mine), DataLoader(part, mine))
    return {
        "gradients": recorder.gradients,
        "weights": recorder.weights,
        "losses": recorder.losses,
        "validated": recorder.validated,
    }


@pytest.fixture(scope="module")
def expected() -> dict[str, list[Any]]:
    """Two epochs in plain PyTorch, with all tokens of a window in one batch."""
    model, rows = build(), data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    result: dict[str, list[Any]] = {"gradients": [], "weights": [], "losses": []}
    for _ in range(2):
        for start in range(0, len(VALID), ACCUMULATE):
            window = range(start, min(start + ACCUMULATE, len(VALID)))
            sums = []
            for index in window:
                logits = model.model(input_ids=rows.inputs[2 * index : 2 * index + 2]).logits
                labels = rows.labels[2 * index : 2 * index + 2]
                sums.append(cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"))
                result["losses"].append(sums[-1].item() / max(1, sum(VALID[index])))
            tokens = sum(sum(VALID[index]) for index in window)
            optimizer.zero_grad()
            (torch.stack(sums).sum() / max(1, tokens)).backward()
            result["gradients"].append({name: p.grad.clone() for name, p in model.named_parameters()})
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            result["weights"].append(weights(model))
    return result


def assert_same(ours: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-5) -> None:
    assert ours["losses"] == pytest.approx(expected["losses"], rel=tolerance)
    for kind in ("gradients", "weights"):
        assert len(ours[kind]) == len(expected[kind]) == 8
        for step, (found, wanted) in enumerate(zip(ours[kind], expected[kind], strict=True)):
            for name, tensor in wanted.items():
                error = (found[name] - tensor).abs().max() / tensor.abs().max().clamp_min(1e-5)
                assert error < tolerance, f"step {step}: {kind} of {name} differ by {error:.1e}"


def test_the_reference_clips_and_has_a_step_without_tokens(expected: dict[str, Any]) -> None:
    norms = [sum(g.square().sum() for g in step.values()).sqrt() for step in expected["gradients"]]
    assert norms[0] > MAX_NORM
    assert norms[2] == norms[6] == 0


def test_one_process(expected: dict[str, Any], tmp_path: Path) -> None:
    ours = train(str(tmp_path), 1, "auto")
    assert ours["validated"] == 10
    assert_same(ours, expected)


@pytest.mark.parametrize("strategy", ["ddp", "moe_ep"])
def test_two_ranks(strategy: str, expected: dict[str, Any], tmp_path: Path) -> None:
    for rank in run_ranks(train, 2, str(tmp_path), 2, strategy):
        assert_same(rank, expected)


def test_gradients_in_bfloat16(expected: dict[str, Any], tmp_path: Path) -> None:
    ours = run_ranks(train, 2, str(tmp_path), 2, "moe_ep", "bf16-true")[0]
    for found, wanted in zip(ours["gradients"][:2], expected["gradients"][:2], strict=True):
        gradient, other = found["model.lm_head.weight"], wanted["model.lm_head.weight"]
        assert (gradient - other).norm() < 0.06 * other.norm()
        assert (gradient * other).sum() / other.square().sum() == pytest.approx(1.0, abs=0.01)


class ResumableLoader:
    """Gives the micro-batches in order, and goes on after the last one when it is restored."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        batches = list(DataLoader(data(), 2))
        while self.position < len(batches):
            self.position += 1
            yield batches[self.position - 1]
        self.position = 0

    def __len__(self) -> int:
        return len(VALID)

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def final(root: Path, steps: int, module: CausalLM | None = None, **options: Any) -> dict[str, Tensor]:
    checkpoint = options.pop("ckpt_path", None)
    run = trainer(root, max_steps=steps, accumulate_grad_batches=ACCUMULATE, **options)
    module = module or build()
    run.fit(module, ResumableLoader(), ckpt_path=checkpoint)
    return weights(module)


class SeenBatches(Callback):
    def __init__(self) -> None:
        self.indices: list[int] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.indices.append(batch_idx)


def test_a_resumed_run_begins_with_a_whole_step(tmp_path: Path) -> None:
    straight = final(tmp_path, 6)
    save = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    final(tmp_path, 1, callbacks=[save], enable_checkpointing=True)
    seen = SeenBatches()
    resumed = final(tmp_path, 6, ckpt_path=str(tmp_path / "step=1.ckpt"), callbacks=[seen])
    assert seen.indices[0] == ACCUMULATE
    for name, tensor in resumed.items():
        torch.testing.assert_close(tensor, straight[name])


class StopAt(Callback):
    """Ends a run after a micro-batch, also in the middle of an accumulation."""

    def __init__(self, batches: int) -> None:
        self.batches = batches

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer.should_stop = batch_idx + 1 == self.batches


def test_a_run_that_ended_within_an_accumulation_leaves_nothing_behind(tmp_path: Path) -> None:
    model = build()
    before = weights(model)
    after = final(tmp_path, 6, model, callbacks=[StopAt(2)])
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items()), "no step was taken"
    again, fresh = final(tmp_path, 6, model), final(tmp_path, 6)
    assert all(torch.equal(again[name], tensor) for name, tensor in fresh.items())


def test_equal_micro_batches_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import lightning_moe.models.causal_lm as module

    factors: list[float] = []
    monkeypatch.setattr(module, "scale_gradients", lambda parameters, factor: factors.append(factor))
    trainer(tmp_path, max_steps=4, accumulate_grad_batches=2).fit(build(), loader(8, 2))
    assert factors == []
    trainer(tmp_path, max_epochs=1, accumulate_grad_batches=3).fit(build(), loader(8, 2))
    assert factors == [3.0], "the last step has one micro-batch instead of three"


@pytest.mark.parametrize(
    ("tokens", "divisors", "factor"),
    [
        ([4, 4, 4], [4, 4, 4], 1.0),
        ([4, 1, 1], [4, 4, 4], 2.0),
        ([4], [4], 3.0),
        ([0, 6, 3], [1, 6, 6], 2.0),
        ([0, 0, 0], [1, 1, 1], 1.0),
    ],
)
def test_factor(tokens: list[int], divisors: list[int], factor: float) -> None:
    window = TokenWindow()
    for _ in range(2):
        assert [window.add(torch.tensor(float(count))).item() for count in tokens] == divisors
        assert window.factor(3) == factor
        window.reset()


def test_scaling_leaves_out_parameters_without_a_gradient() -> None:
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    parameters[0].grad, parameters[2].grad = torch.ones(2), torch.ones(2)
    scale_gradients(parameters, 0.25)
    assert parameters[0].grad.tolist() == parameters[2].grad.tolist() == [0.25, 0.25]
    scale_gradients([], 2.0)
