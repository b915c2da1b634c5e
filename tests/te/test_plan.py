"""What becomes of a model, found without Transformer Engine."""

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_moe import MoEPrecision
from lightning_moe.te import TransformerEngineConfig
from lightning_moe.te.norms import RMSNormFacts, rms_norm_facts
from lightning_moe.te.plan import Plan, make_plan
from tests import tiny
from tests.families import FAMILIES

Rows = dict[str, tuple[str, int, str]]


def plan(model: nn.Module, **options: Any) -> Plan:
    return MoEPrecision("bf16-mixed", transformer_engine=options).plan(model)


def rows(model: nn.Module, **options: Any) -> Rows:
    """Name of the modules -> what takes their place (or nothing), how many there are, reason."""
    return {row.name: (row.target, row.count, row.reason) for row in plan(model, **options).rows}


def family(name: str) -> nn.Module:
    (found,) = [family for family in FAMILIES if family.experts == name]
    return nn.ModuleDict({"net": found.build()})


# Tables of whole models


def test_qwen3_moe() -> None:
    experts = "experts: experts_backend decides what computes them"
    expected = {
        "net.model.embed_tokens": ("", 1, "Transformer Engine has no such layer"),
        "net.model.layers.*.self_attn": ("te.DotProductAttention", 2, ""),
        **{f"net.model.layers.*.self_attn.{name}_proj": ("te.Linear", 2, "") for name in "qkvo"},
        **{f"net.model.layers.*.self_attn.{name}_norm": ("te.RMSNorm", 2, "") for name in "qk"},
        "net.model.layers.*.mlp.experts": ("", 2, experts),
        "net.model.layers.*.mlp.gate": ("", 2, "router: it decides in router_dtype"),
        "net.model.layers.*.input_layernorm": ("te.RMSNorm", 2, ""),
        "net.model.layers.*.post_attention_layernorm": ("te.RMSNorm", 2, ""),
        "net.model.norm": ("te.RMSNorm", 1, ""),
        "net.lm_head": ("te.Linear", 1, ""),
    }
    assert rows(tiny.TinyLM()) == expected
    with torch.device("meta"):
        assert rows(tiny.TinyLM()) == expected
    assert "transformer_engine" not in sys.modules


def test_nemotron_h() -> None:
    found = rows(family("NemotronHExperts"))
    assert found["net.model.layers.*.norm"][0] == "te.RMSNorm"
    assert found["net.model.layers.*.mixer.in_proj"][0] == "te.Linear"
    assert found["net.model.layers.*.mixer.norm"] == ("", 1, "its forward takes more than what it normalizes")
    assert found["net.model.layers.*.mixer"][0] in ("", "te.DotProductAttention")
    reasons = {row.source: row.reason for row in plan(family("NemotronHExperts")).rows if not row.target}
    assert reasons["NemotronHMamba2Mixer"] == reasons["Conv1d"] == "Transformer Engine has no such layer"
    assert reasons["NemotronHTopkRouter"].startswith("router")
    assert any(row.source == "NemotronHAttention" and row.target for row in plan(family("NemotronHExperts")).rows)


def test_norms_of_gemma_are_zero_centered_and_a_tied_head_stays() -> None:
    from transformers import GemmaConfig, GemmaForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    config = GemmaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    found = rows(nn.ModuleDict({"net": GemmaForCausalLM(config)}))
    assert found["net.model.layers.*.input_layernorm"] == ("te.RMSNorm", 2, "zero_centered_gamma")
    assert found["net.lm_head"] == ("", 1, "shares its weight with net.model.embed_tokens")
    assert found["net.model.layers.*.mlp.down_proj"] == ("te.Linear", 2, "")


def test_the_gated_norm_of_qwen3_next_stays() -> None:
    found = plan(family("Qwen3NextExperts")).rows
    norms = {row.source: (row.target, row.reason) for row in found if "Norm" in row.source}
    assert norms["Qwen3NextRMSNorm"] == ("te.RMSNorm", "zero_centered_gamma")
    assert norms["Qwen3NextRMSNormGated"] == ("", "its forward takes more than what it normalizes")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("GptOssExperts", "attention sinks are a parameter of the model, and Transformer Engine has its own"),
        ("DeepseekV32Experts", "attention with indices, which Transformer Engine does not have"),
        ("InklingExperts", "attention with position_bias, which Transformer Engine does not have"),
        ("PhimoeExperts", "attention in windows that are in its mask alone"),
        ("Glm5NextTextExperts", "its mask depends on the name of the implementation"),
    ],
)
def test_attention_that_transformer_engine_does_not_have_stays(name: str, reason: str) -> None:
    found = plan(family(name)).rows
    assert reason in [row.reason for row in found]
    assert any(row.target == "te.Linear" for row in found), "the rest does not suffer"


# What norms compute


class Scaled(nn.Module):
    """An RMSNorm of somebody's own, in several variants."""

    def __init__(self, variant: str = "", eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))
        self.small = eps
        self.unrelated = 0.01
        self.variant = variant

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y - y.mean(-1, keepdim=True) if self.variant == "centered" else y
        power = y.abs().mean(-1, keepdim=True).square() if self.variant == "mean" else y.square().mean(-1, keepdim=True)
        y = y / (power.sqrt() + self.small) if self.variant == "outside" else y * (power + self.small).rsqrt()
        weight = self.weight + 1 if self.variant == "one" else self.weight
        return y * weight.float() if self.variant == "float32" else (y * weight).to(x.dtype)


def test_a_norm_is_known_by_what_it_computes() -> None:
    assert rms_norm_facts(Scaled()) == RMSNormFacts(1e-5, False)
    assert rms_norm_facts(Scaled("one", 1e-3)) == RMSNormFacts(1e-3, True)
    assert rms_norm_facts(nn.RMSNorm(16, eps=1e-6)) == RMSNormFacts(1e-6, False)


class ScaledNorm(Scaled):
    pass


@pytest.mark.parametrize("variant", ["centered", "mean", "outside"])
def test_another_norm_stays(variant: str) -> None:
    assert rms_norm_facts(Scaled(variant)) == ""
    assert rms_norm_facts(ScaledNorm(variant)) == "it computes something else than x / rms(x) * weight"


def test_what_cannot_be_told_stays() -> None:
    assert rms_norm_facts(ScaledNorm("float32")) == "its result is float32 for bfloat16"
    assert rms_norm_facts(nn.RMSNorm(16)) == "it has no fixed epsilon", "it depends on the dtype"
    assert rms_norm_facts(nn.Linear(4, 4)) == ""


class Own(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


def test_layers_of_pytorch() -> None:
    def step(x: Tensor) -> Tensor:
        return x

    model = nn.ModuleDict(
        {
            "layer_norm": nn.LayerNorm(32),
            "no_bias": nn.LayerNorm(32, bias=False),
            "no_weight": nn.LayerNorm(32, elementwise_affine=False),
            "linear": nn.Linear(32, 32),
            "own": Own(32, 32),
            "replaced": nn.Linear(32, 32),
            "attention": nn.MultiheadAttention(32, 4),
        }
    )
    model["replaced"].forward = step  # type: ignore[method-assign]
    assert rows(model) == {
        "layer_norm": ("te.LayerNorm", 1, ""),
        "no_bias": ("", 1, "te.LayerNorm always has a bias, this has none"),
        "linear": ("te.Linear", 1, ""),
        "own": ("", 1, "Own extends nn.Linear"),
        "replaced": ("", 1, "somebody has replaced its forward"),
        "attention": ("", 1, "Transformer Engine has no such layer"),
        "attention.out_proj": ("", 1, "NonDynamicallyQuantizableLinear extends nn.Linear"),
    }


def test_layers_of_peft_stay() -> None:
    peft: Any = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj"])
    found = rows(nn.ModuleDict({"net": peft.get_peft_model(tiny.qwen3_moe(), config)}))
    inside = {name: row for name, row in found.items() if ".q_proj" in name}
    assert inside
    assert {row[2] for row in inside.values()} == {"part of an adapter layer of PEFT"}
    assert any(name.endswith("k_proj") and row[0] for name, row in found.items())


def test_what_the_model_keeps_in_float32_stays() -> None:
    net = tiny.qwen3_moe()
    net._keep_in_fp32_modules_strict = ["v_proj", "layers.1.input_layernorm"]
    found = rows(nn.ModuleDict({"net": net}))
    assert found["net.model.layers.*.self_attn.v_proj"] == ("", 2, "the model keeps it in float32")
    counts = {(row.name, row.target): row.count for row in plan(nn.ModuleDict({"net": net})).rows}
    assert counts["net.model.layers.*.input_layernorm", "te.RMSNorm"] == 1
    assert counts["net.model.layers.*.input_layernorm", ""] == 1


# What the user asks for


def test_patterns_choose_modules() -> None:
    model = tiny.TinyLM()
    found = rows(model, exclude=["lm_head", "layers.0", "k_*"], layers=["linear"])
    assert found["net.lm_head"] == ("", 1, "exclude='lm_head'")
    by_row = {(row.name, row.reason): row.count for row in plan(model, exclude=["layers.0"]).rows}
    assert by_row["net.model.layers.*.self_attn.q_proj", ""] == 1
    assert by_row["net.model.layers.*.self_attn.q_proj", "exclude='layers.0'"] == 1
    only = plan(model, include=["net.model.layers.*.self_attn"], layers=["linear"])
    assert [item.name.split(".")[-1] for item in only.swapped] == ["q_proj", "k_proj", "v_proj", "o_proj"] * 2
    assert rows(model, layers=["norm"])["net.lm_head"] == ("", 1, "layers leaves out 'linear'")


def test_one_attention_that_stays_keeps_all_of_its_model() -> None:
    found = [row for row in plan(tiny.TinyLM(), exclude=["layers.1.self_attn"]).rows if row.name.endswith("self_attn")]
    assert not any(row.target for row in found), "the choice is made in one place for all layers"
    assert "net.model.layers.*.self_attn is left alone: exclude='layers.1.self_attn'" in found[0].reason


def test_a_recipe_leaves_what_it_cannot_take() -> None:
    model = tiny.TinyLM()
    assert rows(model, recipe="current")["net.model.layers.*.self_attn.k_proj"][0] == "te.Linear"
    target, count, reason = rows(model, recipe="mxfp8")["net.model.layers.*.self_attn.k_proj"]
    assert (target, count) == ("", 2)
    assert reason == "MXFP8BlockScaling needs widths that are multiples of 32, this has 32 and 16"
    assert rows(model, recipe="mxfp8")["net.model.norm"][0] == "te.RMSNorm", "norms have no such needs"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"exclude": ["lm_haed"]}, ["exclude='lm_haed'", "matches no module", "'lm_head'"]),
        ({"include": ["model.layer.*.self_attn"]}, ["include='model.layer.*.self_attn'", "model.layers.*.self_attn"]),
        ({"layers": ["mlp"]}, ["layers=['mlp']", "'linear'", "'attention'"]),
        ({"layers": "linear"}, ["layers='linear'", "list of strings"]),
        ({"exclude": ["*"]}, ["nothing", "exclude='*'"]),
        ({"include": ["mlp.gate"]}, ["nothing", "router"]),
        ({"excluded": ["lm_head"]}, ["no option 'excluded'", "'exclude'"]),
        ({"recipe": "fp8"}, ["recipe='fp8'", "'mxfp8' (MXFP8BlockScaling)"]),
        ({"quantize_evaluation": True}, ["quantize_evaluation=True needs a recipe"]),
        ({"recipe": "current", "layers": ["norm"]}, ["recipe='current'", "add 'linear'"]),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        plan(tiny.TinyLM(), **options)
    for word in words:
        assert word in str(error.value), str(error.value)


def test_options_are_a_mapping_or_an_object() -> None:
    wanted = TransformerEngineConfig(recipe="mxfp8")
    assert MoEPrecision(transformer_engine={"recipe": "mxfp8"}).transformer_engine == wanted
    with pytest.raises(TypeError, match="transformer_engine='mxfp8'"):
        MoEPrecision(transformer_engine="mxfp8")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="transformer_engine=\\.\\.\\.\\) is not set"):
        MoEPrecision().plan(tiny.TinyLM())


@pytest.mark.slow
def test_every_family_has_a_plan() -> None:
    for entry in FAMILIES:
        with torch.device("meta"):
            model = nn.ModuleDict({"net": entry.build()})
        found = make_plan(model, TransformerEngineConfig())
        assert found.swapped, entry.name
        assert all(item.reason for item in found.items if not item.target), entry.name
