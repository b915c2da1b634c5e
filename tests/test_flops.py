from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lightning_moe.flops import transformer_flops_per_token

QWEN3_30B = {
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "intermediate_size": 6144,
    "vocab_size": 151936,
}
QWEN3_235B = {
    **QWEN3_30B,
    "hidden_size": 4096,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "moe_intermediate_size": 1536,
    "intermediate_size": 12288,
}
DEEPSEEK_V3 = {
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "intermediate_size": 18432,
    "first_k_dense_replace": 3,
    "vocab_size": 129280,
}


def giga(config: dict[str, Any], length: int = 4096, **options: Any) -> float:
    return transformer_flops_per_token(SimpleNamespace(**config), length, **options).total / 1e9


@pytest.mark.parametrize(
    ("config", "published"),
    [
        pytest.param(QWEN3_30B, 23.01, id="qwen3-30b-a3b"),
        pytest.param(QWEN3_235B, 148.03, id="qwen3-235b-a22b"),
        pytest.param(DEEPSEEK_V3, 249.81, id="deepseek-v3"),
    ],
)
def test_published_models(config: dict[str, Any], published: float) -> None:
    assert giga(config) == pytest.approx(published, rel=5e-4)


def test_whole_attention_square() -> None:
    assert giga(QWEN3_30B, causal=False) == pytest.approx(27.85, rel=5e-4)
    half = transformer_flops_per_token(SimpleNamespace(**QWEN3_30B), 4096)
    whole = transformer_flops_per_token(SimpleNamespace(**QWEN3_30B), 4096, causal=False)
    assert whole.attention_scores == 2 * half.attention_scores == 12 * 48 * 32 * 128 * 4096


def test_router_is_reported_beside_the_total() -> None:
    flops = transformer_flops_per_token(SimpleNamespace(**QWEN3_30B), 4096)
    assert flops.router == 6 * 48 * 2048 * 128
    assert flops.total == (
        flops.attention_projections
        + flops.attention_scores
        + flops.dense_mlp
        + flops.routed_experts
        + flops.shared_experts
        + flops.lm_head
    )


@pytest.mark.parametrize(
    ("fields", "sparse_layers"),
    [
        ({}, 6),
        ({"mlp_only_layers": [0, 5]}, 4),
        ({"decoder_sparse_step": 2}, 3),
        ({"first_k_dense_replace": 1}, 5),
        ({"mlp_layer_types": ["dense", "dense", "sparse", "sparse", "sparse", "sparse"]}, 4),
        ({"moe_layers": [1, 3, 5]}, 3),
        ({"num_experts": 0}, 0),
    ],
)
def test_which_layers_hold_experts(fields: dict[str, Any], sparse_layers: int) -> None:
    config = SimpleNamespace(**{**QWEN3_30B, "num_hidden_layers": 6, **fields})
    flops = transformer_flops_per_token(config, 4096)
    assert flops.routed_experts == 6 * sparse_layers * 3 * 2048 * 768 * 8
    assert flops.dense_mlp == 6 * (6 - sparse_layers) * 3 * 2048 * 6144


@pytest.mark.parametrize(
    ("fields", "weights"),
    [
        ({"n_shared_experts": 2}, 3 * 2048 * 2 * 768),
        ({"shared_expert_intermediate_size": 512}, 3 * 2048 * 512 + 2048),  # a sigmoid gates it
        ({"shared_intermediate_size": 512}, 3 * 2048 * 512),
        ({"model_type": "llama4_text"}, 3 * 2048 * 768),
    ],
)
def test_shared_experts(fields: dict[str, Any], weights: int) -> None:
    flops = transformer_flops_per_token(SimpleNamespace(**QWEN3_30B, **fields), 4096)
    assert flops.shared_experts == 6 * 48 * weights


def test_sliding_window_counts_what_is_attended() -> None:
    full = transformer_flops_per_token(SimpleNamespace(**QWEN3_30B), 4096).attention_scores
    kinds = ["sliding_attention", "full_attention"] * 24
    mixed = SimpleNamespace(**QWEN3_30B, sliding_window=128, layer_types=kinds)
    length, window = 4096, 128
    attended = sum(min(t, window) for t in range(length)) / length
    expected = full / 2 * (1 + attended / (length / 2))
    assert transformer_flops_per_token(mixed, 4096).attention_scores == pytest.approx(expected, rel=1e-3)
    longer_than_the_text = SimpleNamespace(**QWEN3_30B, sliding_window=10_000)
    assert transformer_flops_per_token(longer_than_the_text, 4096).attention_scores == full


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"num_experts_per_tok": None}, "num_experts_per_tok"),
        ({"num_attention_heads": [32] * 48}, "num_attention_heads"),
        ({"layer_types": ["linear_attention"] * 48}, "linear_attention"),
        ({"mamba_d_state": 16}, "mamba_d_state"),
        ({"index_topk": 2048}, "index_topk"),
    ],
)
def test_what_cannot_be_read_is_an_error_that_names_the_field(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        giga({**QWEN3_30B, **changes})


def test_sequence_length_must_be_positive() -> None:
    with pytest.raises(ValueError, match="sequence_length"):
        giga(QWEN3_30B, length=0)


def counted(model: torch.nn.Module, vocabulary: int, length: int) -> float:
    """What PyTorch counts for a forward and backward, a token."""
    tokens = torch.randint(0, vocabulary, (2, length))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=tokens, labels=tokens).loss.backward()
    return counter.get_total_flops() / tokens.numel()


def test_dense_model_agrees_with_the_flop_counter() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        attn_implementation="eager",
    )
    mine = transformer_flops_per_token(config, 48, causal=False).total
    assert mine == pytest.approx(counted(LlamaForCausalLM(config), 256, 48), rel=0.02)


def test_moe_model_agrees_with_the_flop_counter() -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=64,
        moe_intermediate_size=32,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        mlp_only_layers=[0],
        attn_implementation="eager",
        experts_implementation="eager",  # the counter does not know grouped_mm
    )
    flops = transformer_flops_per_token(config, 48, causal=False)
    assert flops.total + flops.router == pytest.approx(counted(Qwen3MoeForCausalLM(config), 256, 48), rel=0.02)
