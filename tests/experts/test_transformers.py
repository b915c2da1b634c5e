"""What the adapter of Transformers' experts classes refuses."""

import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from lightning_moe.experts import experts_spec, find_experts
from lightning_moe.experts.transformers import MINIMUM_VERSION
from tests.families import FAMILIES
from tests.family_parts import TEXT_SIZES, small


def mixtral_experts() -> Any:
    (family,) = [family for family in FAMILIES if family.directory == "mixtral"]
    return find_experts(family.build())[0].module


def test_an_old_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = mixtral_experts()
    library = sys.modules["transformers"]  # it replaces its module while it imports
    for version in ("5.10.2", "5.9.0.dev0", "4.57.1"):
        monkeypatch.setattr(library, "__version__", version)
        with pytest.raises(RuntimeError, match=rf"MixtralExperts comes from Transformers {version}; .* from 5.11 on"):
            experts_spec(experts)
    for version in ("5.11.0.dev0", "5.11.0", "5.100.0", "6.0.0rc1"):
        monkeypatch.setattr(library, "__version__", version)
        assert experts_spec(experts) is not None
    # Before the interface a class was known by its stacked weights alone; everything else is no business of ours.
    monkeypatch.setattr(library, "__version__", "4.57.1")
    old = type("Llama4TextExperts", (nn.Module,), {"__module__": "transformers.models.llama4.modeling_llama4"})()
    old.gate_up_proj, old.down_proj = nn.Parameter(torch.ones(4, 2, 2)), nn.Parameter(torch.ones(4, 1, 2))
    with pytest.raises(RuntimeError, match=r"Llama4TextExperts comes from Transformers 4\.57\.1"):
        experts_spec(old)
    assert find_experts(nn.Sequential(nn.Linear(2, 2), nn.Conv1d(2, 2, 2))) == []


def test_the_oldest_version_is_that_of_the_package() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    (requirement,) = [r for r in project["optional-dependencies"]["hf"] if r.startswith("transformers")]
    assert requirement == f"transformers>={'.'.join(map(str, MINIMUM_VERSION))},<{MINIMUM_VERSION[0] + 1}"


def test_unknown_weights_are_refused() -> None:
    experts = mixtral_experts()
    experts.gate_up_proj_scale_inv = nn.Parameter(torch.ones(8, 1, 1))
    with pytest.raises(NotImplementedError, match="MixtralExperts holds 'gate_up_proj_scale_inv' beside"):
        experts_spec(experts)
    experts = mixtral_experts()
    experts.act_fn = nn.PReLU()
    with pytest.raises(NotImplementedError, match="MixtralExperts holds 'act_fn' beside"):
        experts_spec(experts)


def test_quantized_experts_are_refused() -> None:
    from transformers.integrations import finegrained_fp8

    config = transformers.MixtralConfig(**small(transformers.MixtralConfig, TEXT_SIZES, {}))
    quantization = transformers.FineGrainedFP8Config(weight_block_size=(16, 16))
    with torch.device("meta"):
        model = transformers.MixtralForCausalLM(config)
    finegrained_fp8.replace_with_fp8_linear(model, quantization_config=quantization)
    with pytest.raises(NotImplementedError, match=r"FP8Experts holds .*load the model with dequantized weights"):
        find_experts(model)


def test_a_forward_of_its_own_is_refused() -> None:
    experts = mixtral_experts()
    cls = type("MyExperts", (type(experts),), {"forward": lambda self, hidden, index, weights: hidden})
    experts.__class__ = cls
    with pytest.raises(NotImplementedError, match=r"MyExperts has a forward of its own .*register_experts\(MyExperts"):
        experts_spec(experts)


def test_experts_that_transformers_has_split_are_refused() -> None:
    experts = mixtral_experts()
    experts._is_expert_parallel = True
    with pytest.raises(RuntimeError, match="has been made expert-parallel by Transformers already"):
        experts_spec(experts)
