"""A model with Transformer Engine's layers is the model that it was, over a stand-in of the package."""

import copy
import os
import pickle
from collections.abc import Iterator
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_moe import MoEPrecision
from lightning_moe.parallel.initialize import materialize
from lightning_moe.te import swap
from tests import tiny
from tests.families import FAMILIES
from tests.harness import run_ranks
from tests.te import fakes
from tests.test_parity import assert_same, relative

ANYWHERE = ("cpu", "cuda")


@pytest.fixture
def te(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(swap, "DEVICES", ANYWHERE)
    with fakes.installed() as module:
        yield module


def swapped(model: Any, **options: Any) -> Any:
    MoEPrecision("32-true", transformer_engine=options).convert_module(model)
    return model


def step(model: Any, *inputs: Any, **named: Any) -> tuple[float, dict[str, Tensor]]:
    loss = model.loss(*inputs, **named)
    model.zero_grad()
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_step(ours: Any, reference: Any) -> None:
    assert ours[0] == pytest.approx(reference[0], rel=1e-5)
    assert ours[1].keys() == reference[1].keys()
    for name, gradient in reference[1].items():
        assert relative(ours[1][name], gradient) < 1e-4 or gradient.abs().max() < 1e-7, name


# One process


@pytest.mark.parametrize("version", fakes.VERSIONS)
def test_loss_and_every_gradient_are_the_same(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swap, "DEVICES", ANYWHERE)
    with fakes.installed(version) as te:
        plain = tiny.TinyLM()
        ours = swapped(copy.deepcopy(plain))
        counts = {kind: sum(isinstance(m, kind) for m in ours.modules()) for kind in (te.Linear, te.RMSNorm, nn.Linear)}
        assert counts == {te.Linear: 9, te.RMSNorm: 9, nn.Linear: 0}
        data = tiny.tokens(1)[0]
        assert_same_step(step(ours, data), step(plain, data))


@pytest.mark.slow
@pytest.mark.parametrize("entry", FAMILIES, ids=lambda family: family.name)
def test_every_family_is_the_same(te: Any, entry: Any) -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = entry.build()

        def loss(self, batch: Any) -> Tensor:
            torch.manual_seed(0)
            return entry.loss(self.net, batch)

    assert_same_step(step(swapped(Holder()), entry.batch()), step(Holder(), entry.batch()))


def test_parameters_are_the_same_objects_under_the_same_names(te: Any) -> None:
    model = tiny.TinyLM()
    model.net.lm_head.weight.requires_grad_(False)
    model.net.model.layers[0].self_attn.eval()
    before = dict(model.named_parameters())
    swapped(model, recipe="delayed")
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is parameter for name, parameter in before.items())
    assert not model.net.lm_head.weight.requires_grad
    assert not model.net.model.layers[0].self_attn.q_proj.training
    assert model.net.model.layers[1].self_attn.q_proj.training


def test_checkpoints_go_both_ways(te: Any) -> None:
    plain = tiny.TinyLM()
    precision = MoEPrecision("32-true", transformer_engine={"recipe": "delayed"})
    ours = tiny.TinyLM()
    precision.convert_module(ours)
    with precision.train_step_context():
        loss = ours.loss(tiny.tokens(1)[0])
    loss.backward()
    assert list(ours.state_dict()) == list(plain.state_dict()), "no state of the layers beside the weights"
    ours.load_state_dict(plain.state_dict(), strict=True)
    assert ours.loss(tiny.tokens(1)[0]).item() == pytest.approx(plain.loss(tiny.tokens(1)[0]).item(), rel=1e-5)
    other = tiny.TinyLM()
    other.load_state_dict(ours.state_dict(), strict=True)
    assert torch.equal(other.net.lm_head.weight, plain.net.lm_head.weight)


def test_weights_from_the_meta_device_are_initialized_as_the_plain_model_is(te: Any) -> None:
    built = []
    for options in (None, {}):
        with torch.device("meta"):
            model = tiny.TinyLM(build=both_norms)
        if options is not None:
            swapped(model, **options)
            assert isinstance(model.net.lm_head, te.Linear)
            assert all(parameter.is_meta for parameter in model.parameters())
        torch.manual_seed(3)
        materialize(model.net, model, torch.device("cpu"), skip=set())
        built.append(model.state_dict())
    for name, tensor in built[0].items():
        if "norm" in name or name.endswith("bias"):
            assert torch.equal(built[1][name], tensor), name
        elif name.endswith("_proj.weight") or "lm_head" in name:
            assert float(built[1][name].std()) == pytest.approx(float(tensor.std()), rel=0.3), name


def both_norms() -> nn.Module:
    """Zero-centered norms start at zero, others at one, and linear layers with biases."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    sizes = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "attention_bias": True}
    linear = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8}
    config = {**tiny.QWEN3_MOE, **sizes, **linear, "linear_value_head_dim": 8, "shared_expert_intermediate_size": 16}
    return Qwen3NextForCausalLM(Qwen3NextConfig(**config))


def test_hooks_go_along_and_can_be_removed(te: Any) -> None:
    model = tiny.TinyLM()
    seen: list[str] = []
    handle = model.net.lm_head.register_forward_hook(lambda *_: seen.append("head"))
    model.net.model.norm.register_forward_pre_hook(lambda *_: seen.append("norm"))
    swapped(model).loss(tiny.tokens(1)[0])
    assert seen == ["norm", "head"]
    handle.remove()
    model.loss(tiny.tokens(1)[0])
    assert seen == ["norm", "head", "norm"]


def test_a_module_in_two_places_stays_one(te: Any) -> None:
    shared = nn.Linear(16, 16)
    model = swapped(nn.ModuleDict({"a": shared, "b": nn.Sequential(shared)}))
    assert model["a"] is model["b"][0]
    assert isinstance(model["a"], te.Linear)
    assert model["a"].weight is shared_weight(model)


def shared_weight(model: nn.Module) -> Tensor:
    (weight,) = [p for name, p in model.named_parameters() if name.endswith("weight")]
    return weight


def test_a_second_conversion_changes_nothing(te: Any) -> None:
    model = swapped(tiny.TinyLM())
    before = list(model.modules())
    swapped(model)
    assert all(a is b for a, b in zip(model.modules(), before, strict=True))


def test_the_users_configuration_stays_as_it_is(te: Any) -> None:
    """Other models may be built from it, and it may be in a checkpoint that is read where this package is not."""
    plain = tiny.qwen3_moe()
    mine = plain.config
    ours = swapped(nn.ModuleDict({"net": type(plain)(mine)}))
    assert mine._attn_implementation != "te"
    inside = [m.config for m in ours.modules() if "config" in vars(m)]
    assert {config._attn_implementation for config in inside} == {"te"}
    assert len({id(config) for config in inside}) == 1, "one configuration for all, as before"
    copied = pickle.loads(pickle.dumps(mine))
    type(plain)(copied)(input_ids=tiny.tokens(1)[0])


def test_norms_leave_the_precision_alone(te: Any) -> None:
    """What comes in float32 is computed in float32, also beside weights in bfloat16, as the model itself does."""
    model = nn.ModuleDict({"norm": tiny.qwen3_moe().model.norm.to(torch.bfloat16)})
    x = torch.randn(5, 32, requires_grad=True)
    wanted = model["norm"](x)
    got = swapped(model)["norm"](x)
    assert isinstance(model["norm"], te.RMSNorm)
    assert got.dtype == torch.float32
    assert torch.equal(got, wanted)
    got.sum().backward()
    assert model["norm"].weight.grad is not None


def test_a_module_that_is_held_elsewhere_as_well_computes_alike(te: Any) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 16)
            self.also = [self.layer]

    model = Model()
    x = torch.randn(3, 16)
    swapped(model)
    assert isinstance(model.layer, te.Linear)
    assert torch.equal(model.also[0](x), model.layer(x))


def test_a_vector_stays_a_vector(te: Any) -> None:
    layer, _ = weight_and_input(te)
    assert layer(torch.randn(32)).shape == (64,)
    precision = MoEPrecision("32-true", transformer_engine={"recipe": "current"})
    with precision.train_step_context():
        assert layer(torch.randn(32)).shape == (64,)


@pytest.mark.parametrize("wrap", ["weight_norm", "spectral_norm", "buffer"])
def test_layers_with_more_than_a_weight_stay(te: Any, wrap: str) -> None:
    layer = nn.Linear(16, 16)
    if wrap == "buffer":
        layer.register_buffer("mine", torch.ones(1))
    else:
        getattr(torch.nn.utils, wrap)(layer)
    model = swapped(nn.ModuleDict({"layer": layer, "other": nn.Linear(16, 16)}))
    assert model["layer"] is layer
    assert isinstance(model["other"], te.Linear)


def test_only_models_that_cap_their_logits_do_so(te: Any) -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "attn_implementation": "eager"}
    for config_class, network_class in ((Gemma2Config, Gemma2ForCausalLM), (Gemma3TextConfig, Gemma3ForCausalLM)):
        plain = network_class(config_class(**sizes, attn_logit_softcapping=0.02))
        ours = swapped(nn.ModuleDict({"net": copy.deepcopy(plain)}), layers=["attention"])
        tokens = tiny.tokens(1)[0]
        assert relative(ours["net"](input_ids=tokens).logits, plain(input_ids=tokens).logits) < 1e-4, network_class


# Attention


def masked(model: Any, **inputs: Any) -> Tensor:
    def loss(tokens: Tensor) -> Tensor:
        return model.net(input_ids=tokens, labels=tokens, **inputs).loss

    model.loss = loss
    return model


@pytest.mark.parametrize("kind", ["padding", "packed", "window", "dropout"])
def test_attention_with_masks_and_windows(te: Any, kind: str) -> None:
    window = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}
    plain = tiny.TinyLM(build=lambda: tiny.qwen3_moe(**(window if kind == "window" else {})))
    ours = swapped(copy.deepcopy(plain), layers=["attention"])
    padding = torch.ones(16, 16, dtype=torch.long)
    padding[3, 10:], padding[5, :4] = 0, 0
    positions = torch.cat([torch.arange(6), torch.arange(10)]).repeat(16, 1)
    inputs = {"padding": {"attention_mask": padding}, "packed": {"position_ids": positions, "use_cache": False}}
    if kind == "dropout":
        for model in (plain, ours):
            model.eval()
            for module in model.modules():
                if hasattr(module, "attention_dropout"):
                    module.attention_dropout = 0.5
    both = [masked(model, **inputs.get(kind, {})) for model in (ours, plain)]
    assert_same_step(step(both[0], tiny.tokens(1)[0]), step(both[1], tiny.tokens(1)[0]))


def test_attention_that_is_causal_needs_no_mask(te: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    forward = te.DotProductAttention.forward

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append((kwargs["attention_mask"], kwargs["attn_mask_type"], kwargs["window_size"], self.num_gqa_groups))
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(te.DotProductAttention, "forward", watched)
    window = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}
    swapped(tiny.TinyLM()).loss(tiny.tokens(1)[0])
    swapped(tiny.TinyLM(build=lambda: tiny.qwen3_moe(**window))).loss(tiny.tokens(1)[0])
    assert calls == [(None, "causal", (-1, 0), 2)] * 2 + [(None, "causal", (4, 0), 2)] * 2
    with pytest.warns(UserWarning, match="unfused"):
        swapped(tiny.TinyLM()).net(input_ids=tiny.tokens(1)[0], attention_mask=torch.ones(16, 16).tril() > 0)
    assert calls[-1][1] == "arbitrary"


def test_attention_says_what_it_does_not_have(te: Any) -> None:
    model = swapped(tiny.TinyLM())
    with pytest.raises(ValueError, match=r"output_attentions=True.*layers: \[linear, norm\]"):
        model.net(input_ids=tiny.tokens(1)[0], output_attentions=True)


# Low precision


def weight_and_input(te: Any, **options: Any) -> tuple[Any, Tensor]:
    torch.manual_seed(0)
    model = swapped(nn.ModuleDict({"layer": nn.Linear(32, 64)}), **options)
    assert isinstance(model["layer"], te.Linear)
    return model["layer"], torch.randn(5, 13, 32)


@pytest.mark.parametrize("recipe", ["delayed", "current", "block", "mxfp8", "nvfp4"])
def test_any_number_of_tokens_can_be_computed(te: Any, recipe: str) -> None:
    layer, x = weight_and_input(te, recipe=recipe)
    precision = MoEPrecision("32-true", transformer_engine={"recipe": recipe})
    exact = layer(x)
    with precision.train_step_context():
        out = layer(x)
        empty = layer(x[:0])
    assert out.shape == exact.shape
    assert empty.shape == (0, 13, 64)
    assert not torch.equal(out, exact)
    assert float((out - exact).detach().norm()) < 0.3 * float(exact.detach().norm())
    out.sum().backward()
    if recipe == "mxfp8":  # its scales are those of single rows, so that a row does not see the others
        with precision.train_step_context():
            torch.testing.assert_close(layer(x[:1, :5]), out[:1, :5])


class Probe(pl.LightningModule):
    """Notes when low precision is on."""

    def __init__(self, manual: bool = False) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 32))
        self.automatic_optimization = not manual
        self.seen: dict[str, set[bool]] = {}

    def note(self, where: str) -> None:
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager

        self.seen.setdefault(where, set()).add(FP8GlobalStateManager.is_fp8_enabled())

    def compute(self, batch: Any, where: str) -> Tensor:
        self.note(where)
        out = self.net(batch[0])
        if out.requires_grad:
            out.register_hook(lambda gradient: self.note("backward"))
        return out.square().mean()

    def training_step(self, batch: Any, index: int) -> Tensor | None:
        loss = self.compute(batch, "training")
        if self.automatic_optimization:
            return loss
        self.manual_backward(loss)
        self.note("after backward")
        self.optimizers().step()
        return None

    def validation_step(self, batch: Any, index: int) -> None:
        self.compute(batch, "validation")

    def test_step(self, batch: Any, index: int) -> None:
        self.compute(batch, "test")

    def predict_step(self, batch: Any, index: int) -> Tensor:
        return self.compute(batch, "predict")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("evaluation", [False, True])
def test_low_precision_is_on_in_the_forward_of_training_alone(te: Any, evaluation: bool) -> None:
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(32, 32)), batch_size=16)
    options = {"recipe": "current", "quantize_evaluation": evaluation}
    trainer = tiny.trainer(plugins=[MoEPrecision("32-true", transformer_engine=options)], max_epochs=1)
    module = Probe()
    trainer.fit(module, data, data)
    trainer.test(module, data, verbose=False)
    trainer.predict(module, data)
    assert module.seen == {
        "training": {True},
        "backward": {False},
        "validation": {evaluation},
        "test": {evaluation},
        "predict": {evaluation},
    }


def test_low_precision_is_off_in_a_manual_backward(te: Any) -> None:
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(32, 32)), batch_size=16)
    plugin = MoEPrecision("32-true", transformer_engine={"recipe": "delayed"})
    module = Probe(manual=True)
    tiny.trainer(plugins=[plugin], max_epochs=1).fit(module, data)
    assert module.seen == {"training": {True}, "backward": {False}, "after backward": {True}}


def test_a_recomputation_is_in_low_precision(te: Any) -> None:
    precision = MoEPrecision("32-true", transformer_engine={"recipe": "current"})
    torch.manual_seed(0)
    model = nn.ModuleDict({"net": nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))})
    precision.convert_module(model)
    x = torch.randn(16, 32)
    gradients = []
    for again in (False, True):
        model.zero_grad()
        with precision.train_step_context():
            if again:
                contexts = lambda: (nullcontext(), precision.recompute_context())  # noqa: E731
                out = checkpoint(model["net"], x, use_reentrant=False, context_fn=contexts)
            else:
                out = model["net"](x)
        out.square().mean().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


# Two processes


def train(options: dict[str, Any] | None, path: str, steps: tuple[int, int], strategy_options: Any) -> dict[str, Any]:
    """Train from one step to another; what one rank saw."""
    swap.DEVICES = ANYWHERE  # type: ignore[assignment]
    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    first, last = steps
    with fakes.installed() as te:
        pl.seed_everything(0, verbose=False)
        module = tiny.TinyLM(tiny.sgd, keep_gradients=True)
        begin = {name: p.detach().clone() for name, p in module.named_parameters()}
        strategy = "auto" if strategy_options is None else tiny.moe_ep(**strategy_options)
        plugins = [MoEPrecision("32-true", transformer_engine=options)] if strategy_options is not None else []
        trainer = tiny.trainer(strategy, devices=world, max_steps=last, gradient_clip_val=0.5, plugins=plugins)
        data = tiny.loader(tiny.tokens(6), rank, world)
        trainer.fit(module, data, ckpt_path=path if first else None)
        weights = tiny.weights(module)
        if path and not first:
            trainer.save_checkpoint(path)
        state = te.quantization.FP8GlobalStateManager.state
        return {
            "losses": module.losses,
            "norms": module.norms,
            "gradients": module.gradients,
            "weights": weights,
            "moved": {name for name, value in weights.items() if not torch.equal(value, begin[name])},
            "entered": [(name, group is torch.distributed.group.WORLD) for name, group, _ in state.entered],
            "reductions": len(state.reductions),
            "classes": {type(m).base.__name__ for m in module.modules() if hasattr(type(m), "base")},
        }


def trains(cases: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
    """Several runs, one after the other, in the same processes."""
    return [train(*case) for case in cases]


PAIR: dict[str, Any] = {"expert_parallel_size": 2}


def test_two_ranks_train_as_one_plain_process() -> None:
    (reference,) = run_ranks(trains, 1, [(None, "", (0, 6), None)])[0]
    (ours,) = run_ranks(trains, 2, [({}, "", (0, 6), PAIR)], timeout=200)[0]
    assert ours["classes"] == {"Linear", "RMSNorm"}
    assert_same([ours], [reference])
    assert ours["moved"] == set(ours["weights"]), "every parameter is trained"


@pytest.mark.parametrize("distributed", [True, False])
def test_checkpoints_of_runs_go_both_ways(tmp_path: Path, distributed: bool) -> None:
    options = {**PAIR, "save_distributed_checkpoint": distributed}
    from_te, to_te = str(tmp_path / "from_te"), str(tmp_path / "to_te")
    cases = [
        (None, "", (0, 4), options),
        ({}, from_te, (0, 2), options),
        (None, from_te, (2, 4), options),
        (None, to_te, (0, 2), options),
        ({}, to_te, (2, 4), options),
    ]
    whole, _, plain, _, ours = run_ranks(trains, 2, cases, timeout=200)[0]
    assert (plain["classes"], ours["classes"]) == (set(), {"Linear", "RMSNorm"})
    for key, weight in whole["weights"].items():
        assert relative(plain["weights"][key], weight) < 1e-5, key
        assert relative(ours["weights"][key], weight) < 1e-5, key


def test_delayed_scaling_goes_on_bit_for_bit(tmp_path: Path) -> None:
    options, path = {"recipe": {"name": "delayed", "amax_history_len": 4}}, str(tmp_path / "delayed")
    cases = [(options, "", (0, 4), PAIR), (options, path, (0, 2), PAIR), (options, path, (2, 4), PAIR)]
    for whole, _, resumed in run_ranks(trains, 2, cases, timeout=200):
        assert whole["reductions"] >= 4, "magnitudes are those of all ranks"
        assert set(whole["entered"]) == {("DelayedScaling", True)}
        for name, weight in whole["weights"].items():
            assert torch.equal(resumed["weights"][name], weight), name


def test_delayed_scaling_goes_on_with_another_recipe(tmp_path: Path) -> None:
    path = str(tmp_path / "delayed")
    short, long = ({"recipe": {"name": "delayed", "amax_history_len": n}} for n in (4, 8))
    cases = [(short, path, (0, 2), PAIR), (long, path, (2, 4), PAIR)]
    for saved, resumed in run_ranks(trains, 2, cases, timeout=200):
        assert saved["losses"][-1] > 0
        assert len(resumed["losses"]) == 2


def test_functions_in_a_recipe_do_not_lose_the_scales(te: Any) -> None:
    recipes = import_module("transformer_engine.common.recipe")
    recipe = recipes.DelayedScaling(amax_compute_algo=lambda history: history.amax(0))
    precision = MoEPrecision("32-true", transformer_engine={"recipe": recipe})
    module = Probe()
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(32, 32)), batch_size=16)
    tiny.trainer(plugins=[precision], max_epochs=1).fit(module, data)
    assert set(precision.state_dict()["delayed_scaling"]) == {"net.0", "net.2"}


def test_low_precision_does_not_depend_on_the_layout() -> None:
    options = {"recipe": "mxfp8"}
    alone = {"expert_parallel_size": 1}
    one, exact = run_ranks(trains, 1, [(options, "", (0, 2), alone), (None, "", (0, 2), alone)], timeout=200)[0]
    (two,) = run_ranks(trains, 2, [(options, "", (0, 2), PAIR)], timeout=200)[0]
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-3)
    assert two["losses"][0] != pytest.approx(exact["losses"][0], rel=1e-5), "nothing was rounded to low precision"
    assert set(two["entered"]) == {("MXFP8BlockScaling", False)}
