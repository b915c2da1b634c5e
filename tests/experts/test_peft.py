"""LoRA by PEFT on experts and on linear layers: exact at every layout, with PEFT's own forward as the reference."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers.modeling_outputs import CausalLMOutput

from lightning_moe import ExpertsSpec, register_experts
from lightning_moe.experts import find_experts, local_weight
from lightning_moe.experts.peft import innermost
from lightning_moe.nn import GroupedExperts, MoE
from lightning_moe.parallel.structure import find_blocks, find_roots, find_routers
from tests import tiny
from tests.experts import test_undecorated as undecorated
from tests.harness import run_ranks, run_ranks_expecting_error
from tests.test_parity import relative

TOLERANCE = 1e-5
STEPS = 3
LORA: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
GATED = ["experts.gate_up_proj", "experts.down_proj"]


# Models


def gpt_oss() -> nn.Module:
    """Transposed weights, and biases, one of which is adapted too."""
    from transformers import GptOssConfig, GptOssForCausalLM

    config = {**tiny.QWEN3_MOE, "intermediate_size": 16, "num_local_experts": 8, "pad_token_id": None}
    return GptOssForCausalLM(GptOssConfig(**{k: v for k, v in config.items() if k != "num_experts"}))


def nemotron_h() -> nn.Module:
    """No gate, and rows of another width than the model."""
    from transformers import NemotronHConfig, NemotronHForCausalLM

    same = ("vocab_size", "hidden_size", "moe_intermediate_size", "num_experts_per_tok", "initializer_range")
    heads = ("num_attention_heads", "num_key_value_heads", "head_dim")
    return NemotronHForCausalLM(
        NemotronHConfig(
            **{name: tiny.QWEN3_MOE[name] for name in (*same, *heads)},
            layers_block_type=["moe", "attention", "moe"],
            n_routed_experts=8,
            moe_latent_size=16,
            moe_shared_expert_intermediate_size=16,
            n_group=1,
            topk_group=1,
            pad_token_id=None,
            use_cache=False,
        )
    )


class Computed(GroupedExperts):
    """Experts of a user's that read their weights themselves."""


def compute(experts: Any, rows: Tensor, tokens_per_expert: Tensor) -> Tensor:
    up, down = local_weight(experts, "up_proj"), local_weight(experts, "down_proj")
    parts = rows.split(tokens_per_expert.tolist())
    return torch.cat([torch.relu(x @ u.T) @ d.T for x, u, d in zip(parts, up, down, strict=True)])


register_experts(Computed, ExpertsSpec(compute=compute))


class OwnNet(nn.Module):
    """Layers of this package, in a model that is not one of Transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(tiny.VOCABULARY, 32)
        self.q_proj, self.v_proj = nn.Linear(32, 32), nn.Linear(32, 32)
        self.layers = nn.ModuleList(MoE(32, 16, 8, 2, activation="relu", gated=False) for _ in range(2))
        self.layers[1].experts = Computed(8, 32, 16, activation="relu", gated=False)
        self.head = nn.Linear(32, tiny.VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> CausalLMOutput:
        x = self.embed(input_ids)
        x = x + self.v_proj(torch.tanh(self.q_proj(x)))
        for layer in self.layers:
            x = x + layer(x)
        logits = self.head(x)
        if labels is None:
            return CausalLMOutput(logits=logits)
        return CausalLMOutput(
            nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), logits
        )


def adapted(build: Callable[[], nn.Module], changes: dict[str, Any], then: Callable[[Any], None] | None = None) -> Any:
    """A PEFT model whose second factors are not zero, so that every factor has a gradient."""
    from peft import LoraConfig, get_peft_model

    net = get_peft_model(build(), LoraConfig(**{**LORA, "target_parameters": GATED, **changes}))
    if then is not None:
        then(net)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return net


def add_second(net: Any) -> None:
    from peft import LoraConfig

    # A rank that grouped products do not take as a width.
    net.add_adapter("second", LoraConfig(**{**LORA, "target_parameters": GATED, "r": 3}))


def use_both(net: Any) -> None:
    add_second(net)
    net.base_model.set_adapter(["default", "second"])


def use_second(net: Any) -> None:
    add_second(net)
    net.set_adapter("second")


def merge_first(net: Any) -> None:
    """The first adapter is in the weights for good, and the second beside it on all but the experts."""
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    for module in net.modules():
        if type(module).__name__ == "ParamWrapper":
            module.merge()


UNGATED = {"target_parameters": ["experts.up_proj", "experts.down_proj"]}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "qwen3_moe": partial(adapted, tiny.qwen3_moe, {}),
    "gpt_oss": partial(adapted, gpt_oss, {"target_parameters": [*GATED, "experts.gate_up_proj_bias"]}),
    "nemotron_h": partial(adapted, nemotron_h, UNGATED),
    "5 experts": partial(adapted, partial(tiny.qwen3_moe, num_experts=5), {"use_rslora": True}),
    "own layers": partial(adapted, OwnNet, UNGATED),
    "two adapters": partial(adapted, tiny.qwen3_moe, {"target_modules": []}, use_both),
}
SPECIAL: dict[str, Callable[[], nn.Module]] = {
    "one of two adapters": partial(adapted, tiny.qwen3_moe, {}, use_second),
    "merged": partial(adapted, tiny.qwen3_moe, {}, merge_first),
    "one weight": partial(adapted, tiny.qwen3_moe, {"target_parameters": GATED[1:]}),
    "router": partial(adapted, tiny.qwen3_moe, {"target_parameters": [*GATED, "mlp.gate.weight"]}),
    "trained router": partial(adapted, tiny.qwen3_moe, {"modules_to_save": ["gate", "lm_head"]}),
    "trained experts": partial(adapted, tiny.qwen3_moe, {"modules_to_save": ["experts"], "target_parameters": None}),
    "linear layers": partial(adapted, tiny.qwen3_moe, {"use_dora": True, "target_parameters": None}),
    "llama4": partial(adapted, undecorated.llama4, {}),
    "all experts": partial(adapted, partial(tiny.qwen3_moe, num_experts_per_tok=8), {}),  # nothing for bfloat16 to flip
    "longcat_flash": partial(adapted, undecorated.longcat_flash, {"target_modules": ["q_a_proj"]}),
}


# Training


def rank_and_world() -> tuple[int, int]:
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def train(
    names: list[str], strategy_options: dict[str, Any] | None, options: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """Train each model; what one rank saw."""
    rank, world = rank_and_world()
    results = {}
    for name in names:
        pl.seed_everything(0, verbose=False)
        module = tiny.TinyLM(tiny.sgd, {**MODELS, **SPECIAL}[name], keep_gradients=True)
        before = tiny.weights(module)
        strategy = "auto" if strategy_options is None else tiny.moe_ep(**strategy_options)
        trainer = tiny.trainer(strategy, devices=world, max_steps=STEPS, gradient_clip_val=0.2, **options)
        trainer.fit(module, tiny.loader(tiny.tokens(STEPS), rank, world))
        results[name] = {
            "losses": module.losses,
            "norms": module.norms,
            "gradients": module.gradients,
            "weights": tiny.weights(module),
            "before": before,
            "trained": {n for n, p in module.named_parameters() if p.requires_grad},
        }
    return results


def assert_same(ours: dict[str, dict[str, Any]], reference: dict[str, dict[str, Any]]) -> None:
    assert ours.keys() == reference.keys()
    for model, expected in reference.items():
        got = ours[model]
        assert got["trained"] == expected["trained"]
        torch.testing.assert_close(got["losses"], expected["losses"], rtol=TOLERANCE, atol=0)
        torch.testing.assert_close(got["norms"], expected["norms"], rtol=TOLERANCE, atol=0)
        for kind in ("gradients", "weights"):
            assert got[kind].keys() == expected[kind].keys()
            errors = {name: relative(got[kind][name], expected[kind][name]) for name in got["trained"]}
            worst = max(errors, key=errors.__getitem__)
            assert errors[worst] <= TOLERANCE, f"{model}: {kind} of {worst} differ by {errors[worst]:.1e}"
        frozen = got["weights"].keys() - got["trained"]
        assert all(torch.equal(got["weights"][name], got["before"][name]) for name in frozen)


@pytest.fixture(scope="module")
def one_process() -> dict[str, dict[str, Any]]:
    """Plain Lightning and PEFT, no strategy of ours."""
    return run_ranks(train, 1, list(MODELS), None, {})[0]


def test_the_reference_trains_every_factor(one_process: dict[str, dict[str, Any]]) -> None:
    for model, result in one_process.items():
        assert min(result["norms"]) > 0.2, f"{model}: clipping must have something to do at every step"
        factors = [name for name in result["trained"] if ".lora_A." in name or ".lora_B." in name]
        assert any("experts" in name for name in factors)
        assert set(factors) == result["trained"]
        assert all(result["gradients"][name].norm() > 1e-4 for name in factors)


FAMILIES = ["qwen3_moe", "gpt_oss", "nemotron_h"]
# (processes, expert_parallel_size), other options, models
LAYOUTS = [
    ((2, 2), {"reshard_after_forward": False}, list(MODELS)),
    ((2, 1), {"replicate_size": 2}, FAMILIES[:1]),
    ((4, 1), {}, FAMILIES),
    ((4, 2), {"activation_checkpointing": "full"}, FAMILIES),
    ((4, 4), {}, [*FAMILIES, "5 experts"]),  # none of 5 is left for the last rank
]


@pytest.mark.parametrize(("layout", "options", "models"), LAYOUTS)
def test_same_as_one_process(
    one_process: dict[str, dict[str, Any]],
    layout: tuple[int, int],
    options: dict[str, Any],
    models: list[str],
) -> None:
    world, expert = layout
    ranks = run_ranks(train, world, models, {"expert_parallel_size": expert, **options}, {}, timeout=200)
    assert_same(ranks[0], {name: one_process[name] for name in models})
    for rank in ranks[1:]:
        assert all(rank[name]["norms"] == ranks[0][name]["norms"] for name in models), "one number"


def test_other_ways_to_adapt_a_model() -> None:
    names = [name for name in SPECIAL if name != "all experts"]
    reference = run_ranks(train, 1, names, None, {})[0]
    options = {"expert_parallel_size": 2, "experts_backend": "loop"}
    assert_same(run_ranks(train, 2, names, options, {}, timeout=200)[0], reference)
    whole = ["longcat_flash"]  # reads its weights in another way where each rank has all of them
    ours = run_ranks(train, 2, whole, {"expert_parallel_size": 1}, {})[0]
    assert_same(ours, {name: reference[name] for name in whole})


def train_in(precisions: list[str], strategy_options: dict[str, Any] | None) -> dict[str, dict[str, Any]]:
    return {p: train(["all experts"], strategy_options, {"precision": p})["all experts"] for p in precisions}


def test_bf16_mixed_is_as_near_as_in_one_process() -> None:
    reference = run_ranks(train_in, 1, ["32-true", "bf16-mixed"], None)[0]
    ours = run_ranks(train_in, 2, ["bf16-mixed"], {"expert_parallel_size": 2})[0]["bf16-mixed"]
    exact, peft = reference["32-true"], reference["bf16-mixed"]

    def worst(result: dict[str, Any]) -> float:
        pairs = ((result["gradients"][name], exact["gradients"][name]) for name in exact["trained"])
        return max(float((got - expected).norm() / expected.norm()) for got, expected in pairs)

    assert 1e-3 < worst(ours) < 2 * worst(peft) < 0.1
    assert all(torch.equal(ours["weights"][n], ours["before"][n]) for n in ours["weights"].keys() - ours["trained"])


# Checkpoints, and what PEFT's model does besides training


def logits(net: Any) -> Tensor:
    with torch.no_grad():
        return net(input_ids=tiny.tokens(1)[0]).logits.clone()


def fit(module: pl.LightningModule, options: dict[str, Any] | None, steps: int, ckpt_path: str | None = None) -> Any:
    rank, world = rank_and_world()
    trainer = tiny.trainer(
        "auto" if options is None else tiny.moe_ep(**options), devices=world, max_steps=steps, gradient_clip_val=0.2
    )
    trainer.fit(module, tiny.loader(tiny.tokens(4), rank, world), ckpt_path=ckpt_path)
    return trainer


def save(folder: str) -> dict[str, Any]:
    pl.seed_everything(0, verbose=False)
    module = tiny.TinyLM(build=MODELS["qwen3_moe"])
    fit(module, {"expert_parallel_size": 2}, 2).save_checkpoint(f"{folder}/checkpoint")
    net: Any = module.net
    # As in the README.
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
    state = get_model_state_dict(net, options=options)
    if dist.get_rank() == 0:
        net.save_pretrained(f"{folder}/adapter", state_dict=state)
    result = {"logits": logits(net)}
    with net.disable_adapter():
        result["disabled"] = logits(net)
    with pytest.raises(RuntimeError, match=r"'down_proj' cannot be merged into experts that are sharded"):
        net.merge_adapter()
    return result


def resume(options: dict[str, Any] | None, path: str | None) -> dict[str, Any]:
    pl.seed_everything(0 if path is None else 1, verbose=False)
    module = tiny.TinyLM(build=MODELS["qwen3_moe"])
    fit(module, options, 4, path)
    return {"losses": module.losses[-2:], "weights": tiny.weights(module)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("saved")
    return folder, run_ranks(save, 2, str(folder))[0]


def test_checkpoints_are_those_of_peft(saved: tuple[Path, dict[str, Any]]) -> None:
    from peft import PeftModel
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    folder, ours = saved
    dcp_to_torch_save(folder / "checkpoint", folder / "file")
    pl.seed_everything(2, verbose=False)
    whole = tiny.TinyLM(build=MODELS["qwen3_moe"])
    whole.load_state_dict(torch.load(folder / "file", weights_only=False)["model"])  # every key, no other
    torch.testing.assert_close(logits(whole.net), ours["logits"], rtol=TOLERANCE, atol=TOLERANCE)
    pl.seed_everything(0, verbose=False)
    loaded = PeftModel.from_pretrained(tiny.qwen3_moe(), str(folder / "adapter"))
    torch.testing.assert_close(logits(loaded), ours["logits"], rtol=TOLERANCE, atol=TOLERANCE)
    base = logits(loaded.unload())
    assert relative(base, ours["logits"]) > 0.1, "the adapter must matter"
    torch.testing.assert_close(base, ours["disabled"], rtol=TOLERANCE, atol=TOLERANCE)


def test_resumes_on_another_layout(saved: tuple[Path, dict[str, Any]]) -> None:
    ours = run_ranks(resume, 2, {"expert_parallel_size": 1}, str(saved[0] / "checkpoint"))[0]
    reference = run_ranks(resume, 1, None, None)[0]
    torch.testing.assert_close(ours["losses"], reference["losses"], rtol=TOLERANCE, atol=0)
    errors = {name: relative(ours["weights"][name], weight) for name, weight in reference["weights"].items()}
    assert max(errors.values()) <= TOLERANCE, errors


# Models on the meta device


def on_meta(options: dict[str, Any], changes: dict[str, Any]) -> dict[str, Tensor]:
    pl.seed_everything(0, verbose=False)
    with torch.device("meta"):
        module = tiny.TinyLM(build=partial(adapted, tiny.qwen3_moe, changes))
    first: dict[str, Tensor] = {}
    module.on_train_start = lambda: first.update(tiny.weights(module))  # type: ignore[method-assign]
    fit(module, options, 1)
    return first


def test_adapters_on_the_meta_device_start_as_peft_starts_them() -> None:
    first, other = (run_ranks(on_meta, 2, {"expert_parallel_size": size}, {})[0] for size in (1, 2))
    assert first.keys() == other.keys()
    assert all(torch.equal(first[name], other[name]) for name in first)
    for name, weight in first.items():
        if "lora_B" in name:
            assert not weight.any()
        elif "lora_A" in name:
            # Kaiming's uniform distribution with a = sqrt(5).
            assert 0.9 * weight.shape[1] ** -0.5 < weight.abs().max() < weight.shape[1] ** -0.5


def test_adapters_that_depend_on_weights_cannot_be_on_the_meta_device() -> None:
    changes = {"use_dora": True, "target_parameters": None}
    for error in run_ranks_expecting_error(on_meta, 2, {"expert_parallel_size": 2}, changes):
        assert error.startswith("ValueError: ")
        assert "'default'" in error
        assert "build the model on a real device" in error


# What is found in a model


@pytest.mark.parametrize("model", ["qwen3_moe", "router", "trained router"])
def test_the_parts_of_a_model_are_found_inside_peft(model: str) -> None:
    module = tiny.TinyLM(build={**MODELS, **SPECIAL}[model])
    inner = module.net.base_model.model.model
    experts = find_experts(module)
    assert [found.module for found in experts] == [innermost(layer.mlp.experts) for layer in inner.layers]
    assert [found.parent for found in experts] == [layer.mlp for layer in inner.layers]
    assert [root for _, root in find_roots(module)] == [module.net]
    assert [block for _, block in find_blocks(module, experts)] == list(inner.layers)
    assert find_routers(module, experts) == [layer.mlp.gate for layer in inner.layers]


class Double(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


def test_parametrized_experts_are_refused() -> None:
    net = tiny.qwen3_moe()
    torch.nn.utils.parametrize.register_parametrization(net.model.layers[1].mlp.experts, "down_proj", Double())
    with pytest.raises(ValueError, match=r"'model\.layers\.1\.mlp\.experts' have parametrizations .* of 'down_proj'"):
        find_experts(net)


def test_adapters_inside_experts_are_refused() -> None:
    from peft import LoraConfig, inject_adapter_in_model

    net = undecorated.dbrx()
    with pytest.raises(ValueError, match=r"PEFT adapts 'mlp' inside the experts .* \(ParamWrapper\)"):
        find_experts(inject_adapter_in_model(LoraConfig(target_parameters=["mlp.w1"], target_modules=[]), net))
