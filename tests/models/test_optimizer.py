from typing import Any

import torch
from torch import nn

from lightning_moe.models.optimizer import decay_groups


def decayed_names(module: nn.Module) -> tuple[set[str], set[str]]:
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    groups: list[dict[str, Any]] = decay_groups(module)
    decayed = {names[id(p)] for group in groups if "weight_decay" not in group for p in group["params"]}
    plain = {names[id(p)] for group in groups if group.get("weight_decay") == 0.0 for p in group["params"]}
    return decayed, plain


def test_gpt_oss_biases_of_experts_do_not_decay() -> None:
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    network = GptOssForCausalLM(config)
    decayed, plain = decayed_names(network)
    biases = {name for name, _ in network.named_parameters() if name.endswith("bias")}
    norms = {name for name, _ in network.named_parameters() if "norm" in name}
    assert {"model.layers.0.mlp.experts.gate_up_proj_bias", "model.layers.0.mlp.experts.down_proj_bias"} <= biases
    assert plain == biases | norms | {"model.layers.0.self_attn.sinks"}
    assert decayed | plain == {name for name, _ in network.named_parameters()}
    assert not decayed & plain


def test_experts_router_and_embeddings_decay() -> None:
    from transformers import Qwen3MoeForCausalLM

    from tests.models.tiny import config

    network = Qwen3MoeForCausalLM(config())
    decayed, plain = decayed_names(network)
    assert {"model.embed_tokens.weight", "lm_head.weight", "model.layers.0.mlp.gate.weight"} <= decayed
    assert {"model.layers.1.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj"} <= decayed
    assert all("norm" in name for name in plain)


def test_shared_and_frozen_parameters() -> None:
    network = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8), nn.Linear(8, 8, bias=False))
    network[1].weight = network[0].weight
    network[2].weight.requires_grad_(False)
    groups = decay_groups(network)
    assert [[p.shape for p in group["params"]] for group in groups] == [[(8, 4)], [(8,)]]
    assert len(decay_groups(nn.Linear(2, 2, bias=False))) == 1  # no empty group
    torch.optim.AdamW(groups)
