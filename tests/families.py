"""A tiny model for every class of Transformers whose experts go through the library's experts interface.

``FAMILIES`` says how to build a model that holds the class; :func:`decorated_classes` reads the sources of the
installed library for all classes that there are. ``python -m tests.families`` writes the table of ``docs/families.md``.
"""

import ast
import importlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.family_parts import (
    IMAGE_TOKEN,
    TEXT_SIZES,
    UNSET,
    VOCABULARY,
    WIDTH,
    Inputs,
    cross_entropy,
    denoise,
    embeddings,
    images,
    loss_of_the_model,
    randomize,
    small,
    tokens,
    tokens_of_two_classes,
    tokens_of_two_kinds,
)

DOC = Path(__file__).resolve().parent.parent / "docs" / "families.md"
DECORATOR = "use_experts_implementation"
DECORATED = rf"^@[\w.]*{DECORATOR}\b.*?^class .*?(?=^[^\s)]|\Z)"
# The Transformers whose classes the table lists; others may lack some of them, or name them otherwise.
VERSION = (5, 24)


@dataclass(frozen=True)
class Family:
    """How to build a tiny model that holds an experts class.

    Attributes:
        directory: The model directory in Transformers.
        experts: Name of the experts class.
        model: Name of the model class.
        config: What its config has beside the sizes that all have.
        inputs: Makes a batch; the first half of each tensor is that of the first half of the batch.
        loss: The mean loss of a model on a batch.
        training: In training mode.
        reshard_after_forward: Passed to the strategy.
        seed: Of the batch. In some batches the gradient of a scalar nearly cancels, and rounding is what is left.
    """

    directory: str
    experts: str
    model: str
    config: Mapping[str, Any] = field(default_factory=dict)
    inputs: Callable[[torch.Generator], Inputs] = tokens
    loss: Callable[[nn.Module, Inputs], Tensor] = loss_of_the_model
    training: bool = True
    reshard_after_forward: bool = True
    seed: int = 1

    @property
    def name(self) -> str:
        return f"{self.directory}-{self.experts}"

    @property
    def _module(self) -> str:
        return f"transformers.models.{self.directory}.modeling_{self.directory}"

    def batch(self) -> Inputs:
        """Make the batch, the same every time."""
        return self.inputs(torch.Generator().manual_seed(self.seed))

    def build(self) -> nn.Module:
        """Build the model, with the same weights every time."""
        model_class = getattr(importlib.import_module(self._module), self.model)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            config_class = model_class.config_class
            model = model_class(config_class(**small(config_class, TEXT_SIZES, self.config)))
        randomize(model)
        return model.train(self.training)


LINEAR_THEN_FULL = {"layer_types": ["linear_attention", "full_attention"]}
LINEAR_THEN_INDEXED = {"layer_types": ["linear_attention", "indexed_attention"]}
_INKLING = {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8, "rel_extent": 8}
INKLING = {**_INKLING, "sliding_window_size": 4, "d_rel": 4}
INKLING2 = {**INKLING, "unpadded_vocab_size": VOCABULARY}
_VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION = {**_VISION, "patch_size": 4}


def _sections(*sizes: int) -> dict[str, Any]:
    """Rotary dimensions of time, height and width."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0, "mrope_section": list(sizes)}
    return {"rope_parameters": rope}


FAMILIES: tuple[Family, ...] = (
    Family("afmoe", "AfmoeExperts", "AfmoeForCausalLM"),
    Family(
        "aria",
        "AriaExperts",
        "AriaForConditionalGeneration",
        {
            "vision_config": {**VISION, "model_type": "idefics3_vision", "hidden_size": WIDTH, "image_size": 16},
            "projector_patch_to_query_dict": {16: 4},
        },
    ),
    Family("axk1", "AXK1Experts", "AXK1ForCausalLM"),
    Family("axk2", "AXK2Experts", "AXK2ForCausalLM"),
    Family("bailing_hybrid", "BailingHybridExperts", "BailingHybridForCausalLM", LINEAR_THEN_FULL),
    Family("beam", "BeamExperts", "BeamForCausalLM"),
    Family("cohere2_moe", "Cohere2MoeExperts", "Cohere2MoeForCausalLM"),
    Family("deepseek_ocr2", "DeepseekOcr2TextExperts", "DeepseekOcr2ForConditionalGeneration"),
    Family("deepseek_v2", "DeepseekV2Experts", "DeepseekV2ForCausalLM"),
    Family("deepseek_v3", "DeepseekV3Experts", "DeepseekV3ForCausalLM", {"first_k_dense_replace": 1}),
    Family("deepseek_v32", "DeepseekV32Experts", "DeepseekV32ForCausalLM"),
    Family(
        "deepseek_v4",
        "DeepseekV4Experts",
        "DeepseekV4ForCausalLM",
        {
            "mlp_layer_types": ["hash_moe", "moe"],
            "layer_types": ["sliding_attention", "compressed_sparse_attention"],
            "o_groups": 2,
            "o_lora_rank": 8,
        },
        seed=8,
    ),
    Family(
        "diffusion_gemma",
        "DiffusionGemmaTextExperts",
        "DiffusionGemmaForBlockDiffusion",
        {
            "text_config": {
                "global_head_dim": 8,
                "num_global_key_value_heads": 4,
                "final_logit_softcapping": 30.0,
                "pad_token_id": 0,
            },
            "vision_config": {
                **VISION,
                "model_type": "gemma4_vision",
                "num_key_value_heads": 2,
                "head_dim": 8,
                "position_embedding_size": 16,
            },
            "tie_word_embeddings": False,
        },
        loss=denoise,
        # The decoder reads keys and values of the encoder's last block, whose result nothing uses; FSDP2 gathers the
        # weights of a block for the backward pass when a gradient reaches its result.
        reshard_after_forward=False,
    ),
    Family("dots1", "Dots1Experts", "Dots1ForCausalLM"),
    Family(
        "dots3_note",
        "Dots3NoteExperts",
        "Dots3NoteForConditionalGeneration",
        {"image_token_id": IMAGE_TOKEN},
        inputs=images,
    ),
    Family("ernie4_5_moe", "Ernie4_5_MoeExperts", "Ernie4_5_MoeForCausalLM"),
    Family(
        "ernie4_5_vl_moe",
        "Ernie4_5_VLMoeMoeExperts",
        "Ernie4_5_VLMoeForConditionalGeneration",
        {"text_config": {**_sections(1, 1, 2), "moe_intermediate_size": [16, 8]}},
        inputs=tokens_of_two_kinds,
    ),
    Family("exaone_moe", "ExaoneMoeExperts", "ExaoneMoeForCausalLM"),
    Family("flex_olmo", "FlexOlmoExperts", "FlexOlmoForCausalLM"),
    Family("flint", "FlintExperts", "FlintForCausalLM"),
    Family(
        "gemma4",
        "Gemma4TextExperts",
        "Gemma4ForCausalLM",
        {"enable_moe_block": True, "hidden_size_per_layer_input": 0, "global_head_dim": 8},
    ),
    Family("glm4_moe", "Glm4MoeExperts", "Glm4MoeForCausalLM"),
    Family("glm4_moe_lite", "Glm4MoeLiteExperts", "Glm4MoeLiteForCausalLM"),
    Family("glm4v_moe", "Glm4vMoeTextExperts", "Glm4vMoeForConditionalGeneration", {"text_config": _sections(2, 1, 1)}),
    Family(
        "glm5_next",
        "Glm5NextTextExperts",
        "Glm5NextForConditionalGeneration",
        {"text_config": {**LINEAR_THEN_INDEXED, "index_kpool": 2, "qk_rope_head_dim": 0, "head_dim": 0}},
    ),
    Family("glm_moe_dsa", "GlmMoeDsaExperts", "GlmMoeDsaForCausalLM"),
    Family("gpt_oss", "GptOssExperts", "GptOssForCausalLM"),
    Family("granitemoe", "GraniteMoeExperts", "GraniteMoeForCausalLM"),
    Family("granitemoe_swa", "GraniteMoeSWAExperts", "GraniteMoeSWAForCausalLM"),
    Family(
        "granitemoehybrid",
        "GraniteMoeHybridExperts",
        "GraniteMoeHybridForCausalLM",
        {
            **LINEAR_THEN_FULL,
            "mamba_n_heads": 8,
            "mamba_d_head": 8,
            "mamba_d_state": 8,
            "mamba_chunk_size": 8,
        },
    ),
    Family("granitemoeshared", "GraniteMoeSharedExperts", "GraniteMoeSharedForCausalLM"),
    Family("hunyuan_v1_moe", "HunYuanMoEV1Experts", "HunYuanMoEV1ForCausalLM"),
    Family("hy_v3", "HYV3Experts", "HYV3ForCausalLM"),
    Family("hy_v4", "HYV4Experts", "HYV4ForCausalLM", seed=3),
    Family("hy_v4_vl", "HYV4VLExperts", "HYV4VLForConditionalGeneration", {"text_config": _sections(2, 1, 1)}, seed=6),
    Family("inkling", "InklingExperts", "InklingForCausalLM", INKLING),
    Family("inkling2", "Inkling2Experts", "Inkling2ForCausalLM", INKLING2),
    Family(
        "inkling2_loop",
        "Inkling2LoopExperts",
        "Inkling2LoopForConditionalGeneration",
        {
            "text_config": {
                **INKLING2,
                "num_hidden_layers": 3,
                "n_layers_per_attn_res_block": 1,
                "loop_layer_index_start": 1,
                "loop_layer_index_end": 2,
                "loop_num_passes": 2,
                "loop_gate_rank": 4,
            },
            "vision_config": {
                **VISION,
                "model_type": "inkling2_vision",
                "text_hidden_size": WIDTH,
                "projection_hidden_dim": 16,
                "posemb_grid_size": 4,
            },
        },
    ),
    Family(
        "jamba",
        "JambaExperts",
        "JambaForCausalLM",
        {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 1,
            "expert_layer_offset": 0,
            "use_mamba_kernels": False,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
        },
    ),
    Family("kimi_linear", "KimiLinearExperts", "KimiLinearForCausalLM", LINEAR_THEN_FULL),
    Family("kolibri1", "Kolibri1Experts", "Kolibri1ForCausalLM"),
    Family("laguna", "LagunaExperts", "LagunaForCausalLM"),
    Family("lara_mini", "LaraMiniExperts", "LaraMiniForCausalLM", seed=6),
    Family("lfm2_moe", "Lfm2MoeExperts", "Lfm2MoeForCausalLM", {"layer_types": ["conv", "full_attention"]}),
    Family("mellum", "MellumExperts", "MellumForCausalLM"),
    Family(
        "mimo_v2_flash",
        "MiMoV2FlashExperts",
        "MiMoV2FlashForCausalLM",
        {"layer_types": ["full_attention", "full_attention"]},
    ),
    Family("minimax", "MiniMaxExperts", "MiniMaxForCausalLM", {**LINEAR_THEN_FULL, "block_size": 4}),
    Family("minimax_m2", "MiniMaxM2Experts", "MiniMaxM2ForCausalLM"),
    Family(
        "minimax_m3_vl",
        "MiniMaxM3VLExperts",
        "MiniMaxM3SparseForConditionalGeneration",
        {"projector_hidden_size": 16},
    ),
    Family("mistral4", "Mistral4Experts", "Mistral4ForCausalLM"),
    Family(
        "mistral_large4",
        "MistralLarge4TextExperts",
        "MistralLarge4ForConditionalGeneration",
        {"vision_config": {**VISION, "model_type": "pixtral", "head_dim": 8, "image_size": 16}},
    ),
    Family("mixtral", "MixtralExperts", "MixtralForCausalLM"),
    Family(
        "muse_spark",
        "MuseSparkExperts",
        "MuseSparkForConditionalGeneration",
        {
            "text_config": {"moe_hidden_size": 16},
            "audio_config": {"patch_sizes": (4,), "hidden_sizes": (16,), "depths": (1,)},
            "out_hidden_size": WIDTH,
            "projector_hidden_size": 16,
        },
    ),
    Family(
        "nemotron_h",
        "NemotronHExperts",
        "NemotronHForCausalLM",
        {
            "num_hidden_layers": UNSET,
            "layers_block_type": ["mamba", "moe", "attention", "moe"],
            "moe_latent_size": 16,
            "moe_shared_expert_intermediate_size": 16,
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "ssm_state_size": 8,
            "n_groups": 2,
            "chunk_size": 8,
        },
    ),
    Family("olmoe", "OlmoeExperts", "OlmoeForCausalLM"),
    Family(
        "openai_privacy_filter",
        "OpenAIPrivacyFilterExperts",
        "OpenAIPrivacyFilterForTokenClassification",
        inputs=tokens_of_two_classes,
    ),
    # In training mode its router draws the experts at random.
    Family("phimoe", "PhimoeExperts", "PhimoeForCausalLM", {"router_jitter_noise": 0.5}, training=False),
    Family("qwen2_moe", "Qwen2MoeExperts", "Qwen2MoeForCausalLM"),
    Family("qwen3_5_moe", "Qwen3_5MoeExperts", "Qwen3_5MoeForConditionalGeneration", {"text_config": LINEAR_THEN_FULL}),
    Family("qwen3_moe", "Qwen3MoeExperts", "Qwen3MoeForCausalLM"),
    Family("qwen3_next", "Qwen3NextExperts", "Qwen3NextForCausalLM", LINEAR_THEN_FULL),
    Family("qwen3_omni_moe", "Qwen3OmniMoeThinkerTextExperts", "Qwen3OmniMoeThinkerForConditionalGeneration"),
    Family(
        "qwen3_omni_moe",
        "Qwen3OmniMoeTalkerTextExperts",
        "Qwen3OmniMoeTalkerForConditionalGeneration",
        {
            "text_config": {"shared_expert_intermediate_size": 16},
            "code_predictor_config": {"vocab_size": 16},
            "num_code_groups": 2,
            "thinker_hidden_size": WIDTH,
            "spatial_merge_size": 1,
        },
        inputs=embeddings,
        loss=cross_entropy,
    ),
    Family(
        "qwen3_vl_moe",
        "Qwen3VLMoeTextExperts",
        "Qwen3VLMoeForConditionalGeneration",
        {"text_config": _sections(2, 1, 1), "image_token_id": IMAGE_TOKEN},
        inputs=images,
    ),
    Family(
        "qwen4_exp",
        "Qwen4ExpTextExperts",
        "Qwen4ExpForConditionalGeneration",
        {
            "text_config": {
                **LINEAR_THEN_INDEXED,
                "indexer_n_heads": 2,
                "indexer_kv_heads": 1,
                "indexer_head_dim": 8,
                "indexer_budget": 4,
                "indexer_compress_ratio": 2,
                "hc_lowrank": 8,
            }
        },
    ),
    Family("solar_open", "SolarOpenExperts", "SolarOpenForCausalLM"),
    Family("unlimited_ocr", "UnlimitedOcrTextExperts", "UnlimitedOcrForConditionalGeneration"),
    Family("zaya", "ZayaExperts", "ZayaForCausalLM", {"num_experts_per_tok": 1, "router_hidden_size": 48}),
)

# (directory, experts class): why a class that goes through the experts interface cannot be expert-parallel.
EXCEPTIONS: dict[tuple[str, str], str] = {}


@cache
def decorated_classes() -> dict[tuple[str, str], str]:
    """Find the classes that go through the experts interface in the sources of the installed Transformers.

    Returns:
        For each (directory, class) how it lays its experts out, in words.
    """
    import transformers

    found = {}
    for path in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        # From the decorator to the next statement that is not indented: parsing whole files takes long.
        for source in re.findall(DECORATED, path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
            (node,) = ast.parse(source).body
            assert isinstance(node, ast.ClassDef)
            (decorator,) = [d for d in node.decorator_list if DECORATOR in ast.unparse(d)]
            found[path.parent.name, node.name] = _layout(node, decorator)
    return found


def _layout(node: ast.ClassDef, decorator: ast.expr) -> str:
    keywords = decorator.keywords if isinstance(decorator, ast.Call) else []
    flags = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in keywords}
    methods = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
    words = [
        "gate and up in one weight" if flags.pop("has_gate", True) else "no gate",
        "" if flags.pop("is_concatenated", True) else "interleaved",
        "[E, in, out]" if flags.pop("is_transposed", False) else "[E, out, in]",
        "biases" if flags.pop("has_bias", False) else "",
        "gate function of its own" if "_apply_gate" in methods else "",
        "norm after each expert" if flags.pop("has_post_expert_norm", False) else "",
        *(f"{name}={value}" for name, value in flags.items()),
    ]
    return ", ".join(filter(None, words))


def table(classes: Mapping[tuple[str, str], str]) -> list[str]:
    """The lines of the table in the documentation.

    Args:
        classes: Result of :func:`decorated_classes`.
    """
    models = {(family.directory, family.experts): family.model for family in FAMILIES}
    lines = ["| directory | experts class | layout | expert-parallel |", "|---|---|---|---|"]
    for key, layout in sorted(classes.items()):
        state = f"verified in `{models[key]}`" if key in models else f"no: {EXCEPTIONS.get(key, 'not verified')}"
        lines.append(f"| {key[0]} | `{key[1]}` | {layout} | {state} |")
    return lines


def table_of_the_doc() -> list[str]:
    """The same lines as they are in the documentation."""
    return [line for line in DOC.read_text(encoding="utf-8").splitlines() if line.startswith("|")]


if __name__ == "__main__":
    lines = DOC.read_text(encoding="utf-8").splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("|"))
    last = max(number for number, line in enumerate(lines) if line.startswith("|"))
    lines[first : last + 1] = table(decorated_classes())
    DOC.write_text("\n".join(lines) + "\n", encoding="utf-8")
