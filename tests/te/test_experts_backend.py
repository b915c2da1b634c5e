"""The experts backend of Transformer Engine, over a stand-in with the signatures of its releases."""

import gc
import os
import sys
import weakref
from collections.abc import Iterator
from importlib import import_module
from typing import Any, ClassVar

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_moe import ExpertParallelStrategy, optional
from lightning_moe.experts import ExpertsMLP, ExpertsSpec, backend_options, choose_backend
from lightning_moe.experts.loop import LoopBackend
from lightning_moe.experts.te import (
    TransformerEngineBackend,
    low_precision_unsuitable,
    outside_of_recipe,
    te_unusable,
)
from tests import tiny
from tests.harness import run_ranks
from tests.te import fakes
from tests.test_parity import assert_same

E, H, I = 4, 32, 64  # noqa: E741
COUNTS = [[3, 0, 5, 1], [0, 0, 0, 0], [0, 0, 7, 0], [16, 32, 0, 16]]
RECIPES = ["DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling"]
# Which devices there are is the one thing that the tests say otherwise than a user's machine.
ANYWHERE = ("cpu", "cuda")


@pytest.fixture(params=fakes.VERSIONS)
def te(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Each release."""
    monkeypatch.setattr(TransformerEngineBackend, "device_types", ANYWHERE)
    with fakes.installed(request.param) as module:
        yield module


@pytest.fixture
def newest(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The newest release."""
    monkeypatch.setattr(TransformerEngineBackend, "device_types", ANYWHERE)
    with fakes.installed() as module:
        yield module


def gate(rows: Tensor) -> Tensor:
    gate, up = rows.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def make(
    dtype: torch.dtype, *, bias: bool = False, transposed: bool = False, gated: bool = True, post: bool = False
) -> tuple[Any, ...]:
    """Experts and their parameters, stored as ``[E, out, in]`` or, transposed, as ``[E, in, out]``."""
    generator = torch.Generator().manual_seed(0)

    def parameter(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) * 0.3).to(dtype).requires_grad_()

    width = 2 * I if gated else I
    up = parameter(E, H, width) if transposed else parameter(E, width, H)
    down = parameter(E, I, H) if transposed else parameter(E, H, I)
    biases = (parameter(E, width), parameter(E, H)) if bias else (None, None)
    activation = gate if gated else torch.relu
    mlp = ExpertsMLP(
        up if transposed else up.transpose(1, 2),
        down if transposed else down.transpose(1, 2),
        activation,
        *biases,
        post=torch.tanh if post else None,
    )
    return mlp, [up, down, *(b for b in biases if b is not None)]


def run(backend: Any, counts: list[int], dtype: torch.dtype, on_host: bool = True, **options: Any) -> list[Tensor]:
    """The result, and the gradients of the rows and of every parameter."""
    mlp, leaves = make(dtype, **options)
    rows = torch.randn(sum(counts), H, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    out = backend(mlp, rows, torch.tensor(counts), counts if on_host else None)
    (out * torch.linspace(-1, 1, H).to(dtype)).sum().backward()
    assert all(leaf.grad is not None for leaf in (rows, *leaves)), "zero, not None, without rows"
    return [out.detach(), rows.grad, *(leaf.grad for leaf in leaves)]  # type: ignore[list-item]


# The same as the loop


@pytest.mark.parametrize(
    "options", [{}, {"bias": True, "post": True}, {"bias": True, "transposed": True}, {"gated": False}]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_as_the_loop(te: Any, dtype: torch.dtype, options: dict[str, bool]) -> None:
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 5e-2, "atol": 0.1}
    for counts in COUNTS:
        for on_host in (True, False):
            ours = run(TransformerEngineBackend(), counts, dtype, on_host, **options)
            reference = run(LoopBackend(), counts, dtype, on_host, **options)
            for a, b in zip(ours, reference, strict=True):
                assert a.dtype == dtype
                torch.testing.assert_close(a, b, **tolerance)


@pytest.mark.parametrize("recipe", RECIPES)
def test_low_precision_is_on_and_close(te: Any, recipe: str) -> None:
    made = getattr(import_module("transformer_engine.common.recipe"), recipe)()
    for counts in COUNTS:
        plain = run(LoopBackend(), counts, torch.float32, bias=True)
        with te.autocast(enabled=True, recipe=made):
            low = run(TransformerEngineBackend(), counts, torch.float32, bias=True)
        for a, b in zip(low, plain, strict=True):
            assert a.shape == b.shape
            assert float((a - b).norm()) <= 0.15 * float(b.norm())
        if any(counts):
            assert not torch.equal(low[0], plain[0]), "nothing was rounded to low precision"
            assert not torch.equal(low[2], plain[2])
        empty = [expert for expert, count in enumerate(counts) if count == 0]
        assert all(not gradient[empty].any() for gradient in low[2:]), "no rows, no gradient: padding adds nothing"


def test_padding_changes_no_row(newest: Any) -> None:
    """Rows that need padding give what the same rows give where zeros beside them are somebody's rows."""
    recipe = import_module("transformer_engine.common.recipe").Float8CurrentScaling()
    mlp, _ = make(torch.float32)
    rows = torch.randn(16, H)
    rows[5:] = 0
    with torch.no_grad(), newest.autocast(enabled=True, recipe=recipe):
        whole = TransformerEngineBackend()(mlp, rows, torch.tensor([16, 0, 0, 0]), [16, 0, 0, 0])
        part = TransformerEngineBackend()(mlp, rows[:5], torch.tensor([5, 0, 0, 0]), [5, 0, 0, 0])
    assert torch.equal(whole[:5], part)


@pytest.mark.parametrize("recipe", ["MXFP8BlockScaling", "NVFP4BlockScaling"])
def test_widths_that_low_precision_does_not_take(newest: Any, recipe: str) -> None:
    made = getattr(import_module("transformer_engine.common.recipe"), recipe)()
    mlp = ExpertsMLP(torch.randn(1, 48, 32), torch.randn(1, 32, 48), torch.relu)
    rows, counts = torch.randn(5, 48), torch.tensor([5])
    with newest.autocast(enabled=True, recipe=made):
        out = TransformerEngineBackend()(mlp, rows, counts, [5])
    torch.testing.assert_close(out, LoopBackend()(mlp, rows, counts, [5]))
    shapes = (mlp.up.shape, mlp.down.shape)
    assert low_precision_unsuitable(shapes, made) == f"{recipe} needs widths that are multiples of 32, got 48"
    assert low_precision_unsuitable(shapes, "current") == ""
    told = outside_of_recipe(
        made, [("a", TransformerEngineBackend(), shapes), ("b", LoopBackend(), shapes), ("c", None, ())]
    )
    assert [line.partition(": ")[2] for line in told] == [
        low_precision_unsuitable(shapes, made),
        "experts_backend='loop' knows no recipes, 'te' does",
        "their class computes them itself",
    ]


def test_delayed_scales_follow_the_magnitudes_of_this_rank_alone(newest: Any) -> None:
    delayed = import_module("transformer_engine.common.recipe").DelayedScaling
    state = newest.quantization.FP8GlobalStateManager.state
    backend = TransformerEngineBackend()
    errors = []
    plain = run(LoopBackend(), COUNTS[0], torch.float32)
    for _ in range(2):
        with newest.autocast(enabled=True, recipe=delayed(), amax_reduction_group="everyone"):
            low = run(backend, COUNTS[0], torch.float32)
        errors.append(float((low[0] - plain[0]).norm() / plain[0].norm()))
    assert errors[1] != errors[0], "the first step knows no magnitudes, the second those of the first"
    # A rank with other experts, or without rows at its first step, would bring another number of magnitudes.
    assert [group for _, group, _ in state.entered] == ["everyone", None] * 2
    assert {(recipe.reduce_amax, group) for _, recipe, group in state.histories} == {(False, None)}


# The parameters


def test_weights_are_lent_for_the_call(te: Any) -> None:
    backend = TransformerEngineBackend()
    mlp, (up, down) = make(torch.float32)
    rows = torch.randn(9, H)
    backend(mlp, rows, torch.tensor(COUNTS[0]), COUNTS[0]).sum().backward()
    layers = list(backend._layers.values())
    assert len(layers) == 2
    for layer in layers:
        assert all(parameter.is_meta and parameter.grad is None for parameter in layer.parameters()), "no second copy"
    kept = [weakref.ref(up), weakref.ref(down)]
    assert up.grad is not None
    del mlp, up, down
    gc.collect()
    assert [reference() for reference in kept] == [None, None], "memory of gathered weights would stay"


def test_gradients_in_one_buffer_are_not_copied(newest: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library computes the gradients of all weights into one buffer; stacking would take as much again."""

    class InOneBuffer(torch.autograd.Function):
        buffers: ClassVar[list[Tensor]] = []

        @staticmethod
        def forward(ctx: Any, rows: Tensor, *weights: Tensor) -> Tensor:
            ctx.shapes = [w.shape for w in weights]
            return rows[:, :1] * sum(w.sum() for w in weights) + rows.new_zeros(weights[0].shape[0])

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
            packed = torch.stack([torch.full(shape, float(expert)) for expert, shape in enumerate(ctx.shapes)])
            InOneBuffer.buffers.append(packed)
            return None, *(packed[expert] for expert in range(len(ctx.shapes)))

    monkeypatch.setattr(
        newest.GroupedLinear,
        "compute",
        lambda self, inp, *_: InOneBuffer.apply(inp, *(getattr(self, f"weight{i}") for i in range(E))),
    )
    mlp, (up, down) = make(torch.float32)
    TransformerEngineBackend()(mlp, torch.randn(9, H), torch.tensor(COUNTS[0]), COUNTS[0]).sum().backward()
    for parameter in (up, down):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, torch.arange(E).view(E, 1, 1).expand_as(parameter).float())
    assert down.grad.untyped_storage().data_ptr() == InOneBuffer.buffers[0].untyped_storage().data_ptr()


def test_two_experts_modules_share_nothing(newest: Any) -> None:
    class Mine(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w1, self.w2 = torch.nn.Parameter(torch.zeros(E, I, H)), torch.nn.Parameter(torch.zeros(E, H, I))

    spec = ExpertsSpec(up="w1", down="w2", activation=lambda module, rows: rows)
    module = Mine()
    made = [choose_backend("te", spec, module, torch.bfloat16, torch.device("cpu")) for _ in range(2)]
    assert [reason for _, reason in made] == ["", ""]
    assert made[0][0] is not made[1][0], "a layer keeps the scales of what it saw"
    assert list(module.state_dict()) == ["w1", "w2"]
    with pytest.raises(ValueError, match=r"experts_backend='te' cannot compute Mine: .*not in float64"):
        choose_backend("te", spec, module, torch.float64, torch.device("cpu"))


def test_copies_of_weights_are_kept_until_they_are_forgotten(newest: Any) -> None:
    recipe = import_module("transformer_engine.common.recipe").Float8CurrentScaling()
    backend = TransformerEngineBackend()
    mlp, (up, _) = make(torch.float32)
    rows = torch.randn(16, H)

    def compute(keep: bool) -> Tensor:
        backend.keep_copies = keep
        with newest.autocast(enabled=True, recipe=recipe):
            return backend(mlp, rows, torch.tensor([16, 0, 0, 0]), [16, 0, 0, 0]).detach()

    before = compute(True)
    with torch.no_grad():
        up.mul_(2)
    assert torch.equal(compute(True), before), "the copies are what is multiplied"
    fresh = compute(False)
    assert not torch.equal(fresh, before)
    with torch.no_grad():
        assert torch.equal(compute(True), fresh), "evaluation uses no kept copy"
    backend.forget_weights()
    assert all(not layer._fp8_workspaces for layer in backend._layers.values())
    assert torch.equal(compute(True), fresh)


# Counts on the device


def test_counts_stay_on_the_device_where_the_release_takes_them(te: Any) -> None:
    seen: list[Any] = []
    forward = te.GroupedLinear.forward
    te.GroupedLinear.forward = lambda self, inp, m_splits, **rest: (
        seen.append((type(m_splits), getattr(self, "use_grouped_tensor", False)))
        or forward(self, inp, m_splits, **rest)
    )
    run(TransformerEngineBackend(), COUNTS[0], torch.bfloat16, on_host=False)
    newer = import_module("transformer_engine").__version__ != "2.16.1"
    assert set(seen) == {(Tensor, True) if newer else (list, False)}
    seen.clear()
    run(TransformerEngineBackend(), COUNTS[0], torch.bfloat16, on_host=True)
    assert set(seen) == {(list, False)}


# Whether it is usable


def test_why_it_is_not_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes.remove()
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    assert "transformer_engine" in te_unusable()
    monkeypatch.delitem(sys.modules, "transformer_engine")

    class Broken:
        @staticmethod
        def find_spec(name: str, *_: Any) -> None:
            if name == "transformer_engine":
                raise RuntimeError("libcuda.so.1 is missing")

    monkeypatch.setattr(sys, "meta_path", [Broken, *sys.meta_path])
    optional.probe.cache_clear()
    assert "cannot be imported: RuntimeError: libcuda.so.1 is missing" in te_unusable()
    with pytest.raises(RuntimeError, match=r"experts_backend='te' is not usable here: .*libcuda.so.1 is missing"):
        ExpertParallelStrategy(experts_backend="te")
    monkeypatch.undo()
    with fakes.installed():
        if not torch.cuda.is_available():
            assert te_unusable() == backend_options()["te"] == "there is no CUDA device"
    optional.probe.cache_clear()


# With the strategy


class InLowPrecision(tiny.TinyLM):
    """Opens the context of the library around its steps."""

    recipe: Any = None

    def loss(self, tokens: Tensor) -> Tensor:
        te = sys.modules["transformer_engine.pytorch"]
        with te.autocast(enabled=self.recipe is not None, recipe=self.recipe):
            return super().loss(tokens)


def gpt_oss() -> torch.nn.Module:
    """Weights stored as ``[E, in, out]``, and biases."""
    from transformers import GptOssConfig, GptOssForCausalLM

    config = {key: tiny.QWEN3_MOE[key] for key in ("vocab_size", "hidden_size", "num_attention_heads", "head_dim")}
    more = {"num_hidden_layers": 2, "num_local_experts": 4, "intermediate_size": 16, "num_key_value_heads": 2}
    return GptOssForCausalLM(GptOssConfig(**config, **more, layer_types=["full_attention"] * 2, initializer_range=0.2))


def count_calls() -> list[str]:
    """Note each product that the library computes from here on."""
    layer = import_module("transformer_engine.pytorch").GroupedLinear
    calls, compute = [], layer.compute
    layer.compute = lambda self, *arguments: calls.append("product") or compute(self, *arguments)
    return calls


def train(version: str | None, recipe: str | None, build: Any, expert: int = 2) -> list[dict[str, Any]]:
    """Train a few steps with SGD; what one rank saw. ``version=None`` is plain Lightning."""
    world, rank, steps = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"]), 3
    strategy: Any = "auto"
    module_class: type[tiny.TinyLM] = tiny.TinyLM
    if version is not None:
        TransformerEngineBackend.device_types = ANYWHERE
        fakes.install(version)
        strategy = tiny.moe_ep(expert_parallel_size=expert, experts_backend="te")
        module_class = InLowPrecision
    calls = count_calls() if version is not None else []
    pl.seed_everything(0, verbose=False)
    module = module_class(tiny.sgd, build, keep_gradients=True)
    if isinstance(module, InLowPrecision) and recipe:
        module.recipe = getattr(import_module("transformer_engine.common.recipe"), recipe)()
    before = tiny.weights(module)
    tiny.trainer(strategy, devices=world, max_steps=steps, gradient_clip_val=0.5).fit(
        module, tiny.loader(tiny.tokens(steps), rank, world)
    )
    after = tiny.weights(module)
    unmoved = [name for name in before if torch.equal(before[name], after[name])]
    reductions = (
        []
        if version is None
        else import_module("transformer_engine.pytorch").quantization.FP8GlobalStateManager.state.reductions
    )
    return [
        {
            "losses": module.losses,
            "norms": module.norms,
            "gradients": module.gradients,
            "weights": after,
            "unmoved": unmoved,
            "products": len(calls),
            "reductions": reductions,
        }
    ]


@pytest.mark.parametrize(("version", "expert"), [("2.16.1", 2), ("2.20.2", 1)])
def test_training_is_that_of_one_process(version: str, expert: int) -> None:
    reference = run_ranks(train, 1, None, None, tiny.qwen3_moe)[0]
    assert reference[0]["unmoved"] == []
    for rank in run_ranks(train, 2, version, None, tiny.qwen3_moe, expert):
        assert_same(rank, reference)
        assert rank[0]["unmoved"] == [], "every parameter is trained"
        assert rank[0]["products"] == 3 * 2 * 2, "steps, layers and weights"


def test_transposed_weights_with_biases_train_as_in_one_process() -> None:
    reference = run_ranks(train, 1, None, None, gpt_oss)[0]
    assert_same(run_ranks(train, 2, "2.20.2", None, gpt_oss)[0], reference)


@pytest.mark.parametrize("recipe", ["Float8CurrentScaling", "DelayedScaling"])
def test_low_precision_trains_every_parameter(recipe: str) -> None:
    reference = run_ranks(train, 1, None, None, tiny.qwen3_moe)[0][0]
    ranks = run_ranks(train, 2, "2.20.2", recipe, tiny.qwen3_moe)
    for (rank,) in ranks:
        assert rank["unmoved"] == []
        assert rank["reductions"] == [], "scales of experts are not exchanged"
        assert rank["losses"] != reference["losses"]
        torch.testing.assert_close(rank["losses"], reference["losses"], rtol=0.02, atol=0)
    name = "net.model.layers.0.mlp.experts.down_proj"
    ours, plain = ranks[0][0]["gradients"][name], reference["gradients"][name]
    assert float((ours - plain).norm()) < 0.2 * float(plain.norm())
