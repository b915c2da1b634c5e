"""Experts modules are found by what they are."""

import pytest
import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
)

from lightning_moe import ExpertsSpec, register_experts
from lightning_moe.dispatch.local import LocalDispatcher
from lightning_moe.experts import experts_spec, find_experts
from lightning_moe.experts.loop import LoopBackend
from lightning_moe.nn import MoE
from lightning_moe.parallel.routed import RoutedExperts
from tests import tiny

SMALL = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


def build(name: str) -> torch.nn.Module:
    if name == "qwen3_moe":
        return tiny.qwen3_moe()
    if name == "mixtral":
        config = MixtralConfig(**SMALL, num_key_value_heads=1, intermediate_size=24, num_local_experts=4)
        return MixtralForCausalLM(config)
    if name == "gpt_oss":  # transposed, biased, interleaved gate
        config = GptOssConfig(
            **SMALL, num_key_value_heads=1, head_dim=8, intermediate_size=24, num_local_experts=4, num_experts_per_tok=2
        )
        return GptOssForCausalLM(config)
    if name == "nemotron_h":  # no gate
        config = NemotronHConfig(
            **{k: v for k, v in SMALL.items() if k != "num_hidden_layers"},
            layers_block_type=["moe", "attention"],
            num_key_value_heads=1,
            head_dim=8,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            moe_shared_expert_intermediate_size=24,
            n_group=1,
            topk_group=1,
        )
        return NemotronHForCausalLM(config)
    config = DeepseekV3Config(
        **SMALL,
        num_key_value_heads=2,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        intermediate_size=24,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=8,
    )
    return DeepseekV3ForCausalLM(config)


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "gpt_oss", "nemotron_h", "deepseek_v3"])
def test_transformers_experts_compute_what_their_own_forward_does(name: str) -> None:
    torch.manual_seed(0)
    model = build(name)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    found = find_experts(model)
    assert found, "no experts found"
    for experts in found:
        hidden = torch.randn(7, 16 if name != "qwen3_moe" else 32)
        index = torch.rand(7, experts.num_experts).argsort(1)[:, :2]
        weights = torch.rand(7, 2)
        dispatcher = LocalDispatcher()
        dispatcher.setup(None, num_experts=experts.num_experts, hidden_size=16, dtype=torch.float32)
        ours = RoutedExperts(experts.module, experts.spec, dispatcher, LoopBackend())
        model.set_experts_implementation("eager")  # type: ignore[operator]
        torch.testing.assert_close(ours(hidden, index, weights), experts.module(hidden, index, weights))


def test_other_modules_are_not_experts() -> None:
    model = tiny.qwen3_moe()
    names = {found.name for found in find_experts(model)}
    assert names == {"model.layers.0.mlp.experts", "model.layers.1.mlp.experts"}
    assert experts_spec(torch.nn.Linear(2, 2)) is None
    assert [found.name for found in find_experts(MoE(8, 8, 4, 2))] == ["experts"]


def test_a_registered_class_covers_its_subclasses() -> None:
    class Mine(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Parameter(torch.ones(3, 4, 8))
            self.outer = torch.nn.Parameter(torch.ones(3, 8, 4))

    class Child(Mine):
        pass

    assert not find_experts(torch.nn.Sequential(Child()))
    spec = ExpertsSpec(up="inner", down="outer", activation=lambda module, rows: rows)
    register_experts(Mine, spec)
    (found,) = find_experts(torch.nn.Sequential(Child()))
    assert (found.name, found.spec, found.num_experts) == ("0", spec, 3)
