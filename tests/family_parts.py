"""Sizes, batches and losses of the tiny models in ``tests/families.py``."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCH, LENGTH, WIDTH, VOCABULARY, EXPERTS, IMAGE_TOKEN = 4, 8, 32, 64, 8, 60

# What a text model's config takes of these, by the names that it has fields for.
_MODEL = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2, "max_position_embeddings": 64}
_TOKENS = {"pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False}
_WIDTHS = {"intermediate_size": 32, "dense_intermediate_size": 32, "moe_intermediate_size": 16}
_SHARED_WIDTHS = {
    "shared_expert_intermediate_size": 16,
    "shared_experts_intermediate_size": 16,
    "shared_intermediate_size": 16,
}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "sliding_window": 4}
_LATENT_HEADS = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
_SPARSE_ATTENTION = {"index_topk": 4, "index_head_dim": 8, "index_n_heads": 2}
_LINEAR_ATTENTION = {
    "linear_head_dim": 8,
    "linear_num_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_EXPERTS = dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), EXPERTS)
_TOP_K = dict.fromkeys(("num_experts_per_tok", "top_k_experts", "moe_k", "moe_topk"), 2)
_SHARED = dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1)
_EVERY_LAYER = {
    "first_k_dense_replace": 0,
    "num_dense_layers": 0,
    "moe_layer_start_index": 0,
    "mlp_layer_types": ["sparse", "sparse"],
    "mlp_only_layers": [],
}
# Noise would differ between one process and two.
_ROUTING = {"n_group": 2, "topk_group": 1, "router_jitter_noise": 0.0}
# Small enough to cut something off.
_GATE = {"swiglu_limit": 0.5}
TEXT_SIZES: dict[str, Any] = (
    _MODEL
    | _TOKENS
    | _WIDTHS
    | _SHARED_WIDTHS
    | _HEADS
    | _LATENT_HEADS
    | _SPARSE_ATTENTION
    | _LINEAR_ATTENTION
    | _EXPERTS
    | _TOP_K
    | _SHARED
    | _EVERY_LAYER
    | _ROUTING
    | _GATE
)
TEXT_PARTS = ("text_config", "thinker_config", "talker_config", "code_predictor_config")

_TOWER = dict.fromkeys(("num_hidden_layers", "depth", "n_layers", "encoder_layers"), 1)
_TOWER_WIDTHS = dict.fromkeys(
    (
        "hidden_size",
        "intermediate_size",
        "adapter_in_dim",
        "adapter_input_size",
        "d_model",
        "downsample_hidden_size",
        "encoder_ffn_dim",
        "mlp_dim",
        "output_channels",
        "position_embedding_size",
        "projection_hidden_dim",
        "projection_intermediate_size",
    ),
    16,
)
_TOWER_RESULTS = dict.fromkeys(("out_hidden_size", "adapter_out_dim", "text_hidden_size", "output_dim"), WIDTH)
_TOWER_HEADS = {"num_attention_heads": 2, "num_heads": 2, "num_key_value_heads": 2, "encoder_attention_heads": 2}
_TOWER_EXPERTS = {
    "moe_intermediate_size": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "router_scaling_factor": 1.0,
    "mlp_layer_types": ["sparse"],
}
_PATCHES = {"patch_size": 4, "temporal_patch_size": 1, "image_size": 16, "max_image_size": 16}
_MERGE = {"spatial_merge_size": 1, "adapter_merge_size": 1, "merge_size": 1}
TOWER_SIZES: dict[str, Any] = (
    _TOWER
    | _TOWER_WIDTHS
    | _TOWER_RESULTS
    | _TOWER_HEADS
    | _TOWER_EXPERTS
    | _PATCHES
    | _MERGE
    | {"head_dim": 8, "num_mel_bins": 8, "num_position_embeddings": 16, "deepstack_visual_indexes": (0,)}
    | {"global_attn_indexes": [0], "downsample_channels": [16, 16]}
)


def small(config_class: Any, sizes: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Make the arguments of a config with small sizes, and with small parts where it has parts.

    Args:
        config_class: A config class of Transformers.
        sizes: Values of those fields that it has.
        changes: What is different, by field; for a part of the config, what is different in the part.
    """
    fields = {f.name for f in dataclasses.fields(config_class)}
    values = {name: value for name, value in sizes.items() if name in fields} | dict(changes)
    for name, part in config_class.sub_configs.items():
        if dataclasses.is_dataclass(part):  # not an AutoConfig, whose class its dictionary says
            values[name] = small(part, TEXT_SIZES if name in TEXT_PARTS else TOWER_SIZES, changes.get(name, {}))
    return {name: value for name, value in values.items() if value != UNSET}


UNSET = "unset"
"""Leaves a field that the sizes name at its default."""

Inputs = dict[str, Tensor]


def tokens(generator: torch.Generator) -> Inputs:
    """``[BATCH, LENGTH]`` tokens, which are their own labels."""
    ids = torch.randint(3, 50, (BATCH, LENGTH), generator=generator)
    return {"input_ids": ids, "labels": ids}


def tokens_of_two_classes(generator: torch.Generator) -> Inputs:
    inputs = tokens(generator)
    return inputs | {"labels": inputs["labels"] % 2}


def tokens_of_two_kinds(generator: torch.Generator) -> Inputs:
    """Every second token is one of an image."""
    return tokens(generator) | {"moe_mm_token_type_ids": (torch.arange(LENGTH) % 2).int().expand(BATCH, -1)}


def embeddings(generator: torch.Generator) -> Inputs:
    labels = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)
    return {"inputs_embeds": torch.randn(BATCH, LENGTH, WIDTH, generator=generator), "labels": labels}


def images(generator: torch.Generator) -> Inputs:
    """One image of 2 by 2 patches in the middle of each text."""
    inputs = tokens(generator)
    ids, side, channels = inputs["input_ids"], 2, 3
    ids[:, 2 : 2 + side * side] = IMAGE_TOKEN
    pixels = torch.randn(BATCH * side * side, channels * _PATCHES["patch_size"] ** 2, generator=generator)
    return inputs | {
        "pixel_values": pixels,
        "image_grid_thw": torch.tensor([[1, side, side]]).expand(BATCH, -1),
        "mm_token_type_ids": (ids == IMAGE_TOKEN).int(),
    }


def loss_of_the_model(model: nn.Module, inputs: Inputs) -> Tensor:
    return model(**inputs).loss


def cross_entropy(model: nn.Module, inputs: Inputs) -> Tensor:
    """For a model that computes no loss (rightly)."""
    labels = inputs["labels"]
    logits = model(inputs_embeds=inputs["inputs_embeds"], attention_mask=torch.ones_like(labels)).logits
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def denoise(model: nn.Module, inputs: Inputs) -> Tensor:
    """The second half of each text, from all of it."""
    canvas = inputs["labels"][:, LENGTH // 2 :]
    logits = model(input_ids=inputs["input_ids"], decoder_input_ids=canvas).logits
    return F.cross_entropy(logits.flatten(0, 1), canvas.flatten())


@torch.no_grad()
def randomize(model: nn.Module) -> None:
    """Give every weight and every routing bias a value worth comparing: none is zero, and routers have preferences."""
    generator = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim > 1:
            parameter.copy_(0.2 * noise)
        else:
            parameter.add_(0.1 * noise)
    for name, buffer in model.named_buffers():
        if name.endswith("balancing_biases"):
            buffer[-1] = 0.05  # else no token skips the experts
        if "bias" in name and buffer.ndim == 1:
            buffer.add_(0.02 * torch.randn(buffer.shape, generator=generator))
        elif name.endswith("tid2eid"):  # the experts of each token, where they depend on nothing else
            buffer.random_(EXPERTS, generator=generator)
