import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_moe.models import CausalLM
from tests.models.tiny import FIELDS, Sequences, config


def built(model: CausalLM) -> CausalLM:
    model.configure_model()
    return model


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=Sequences(2).inputs).logits


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A saved model with its weights, in more than one file."""
    from transformers import Qwen3MoeForCausalLM

    network = Qwen3MoeForCausalLM(config()).to(torch.bfloat16)
    network.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    return tmp_path


@pytest.mark.parametrize(
    "options", [{"config_class": "Qwen3MoeConfig", "config": FIELDS}, {"config": {**FIELDS, "model_type": "qwen3_moe"}}]
)
def test_by_fields(options: dict[str, Any]) -> None:
    model = built(CausalLM(**options))
    assert type(model.model).__name__ == "Qwen3MoeForCausalLM"
    assert model.model.model.layers[0].mlp.experts.num_experts == 4
    # A field that the configuration class does not declare, but the network reads.
    assert model.model.model.layers[0].self_attn.q_proj.weight.shape == (4 * 8, 32)


def test_weights_of_a_folder_are_loaded_in_float32_and_trained(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = built(CausalLM(pretrained=str(folder)))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert torch.equal(logits(model), logits(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)))
    assert all(module.training for module in model.modules())  # from_pretrained leaves dropout off


def test_folder_without_weights_gives_random_ones(tmp_path: Path) -> None:
    config(dtype="bfloat16").save_pretrained(tmp_path)
    torch.manual_seed(1)
    first = built(CausalLM(pretrained=str(tmp_path)))
    torch.manual_seed(2)
    second = built(CausalLM(pretrained=str(tmp_path)))
    assert not torch.equal(logits(first), logits(second))
    assert {parameter.dtype for parameter in first.parameters()} == {torch.float32}


def test_incomplete_folders_are_errors(folder: Path) -> None:
    shard = sorted(folder.glob("*.safetensors"))[0]
    content = shard.read_bytes()
    shard.unlink()
    with pytest.raises(ValueError, match=rf"lacks 1 of the \d+ files .* for example {shard.name}"):
        CausalLM(pretrained=str(folder))
    shard.write_bytes(content)
    index = folder / "model.safetensors.index.json"
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    (folder / "pytorch_model.bin").touch()
    assert not index.exists()
    with pytest.raises(ValueError, match=r"weights only as pytorch_model\.bin"):
        CausalLM(pretrained=str(folder))
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"holds no config\.json"):
        CausalLM(pretrained=str(folder))


def test_missing_weights_are_an_error(folder: Path) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    wider = config(num_hidden_layers=3)
    wider.save_pretrained(folder)
    path.write_text(json.dumps(index))
    model = CausalLM(pretrained=str(folder))
    with pytest.raises(ValueError, match=r"lacks \d+ weights of Qwen3MoeForCausalLM, for example .*layers\.2"):
        model.configure_model()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "no network is named.*config_class.*model_type.*pretrained"),
        ({"config": FIELDS}, "config has no key model_type.*exactly one way"),
        ({"config": {"model_type": "qwen3_moe"}, "config_class": "Qwen3MoeConfig"}, "both given.*exactly one way"),
        ({"config": FIELDS, "pretrained": "."}, "cannot be combined with config.*exactly one way"),
        ({"config_class": "Qwen3MoEConfig"}, "'Qwen3MoEConfig' is not a configuration class.*Qwen3MoeConfig"),
        ({"config_class": "AutoModel"}, "'AutoModel' is not a configuration class"),
        ({"config_class": "T5Config"}, "no causal language model for T5Config"),
        ({"config": {"model_type": "qwen3moe"}}, "'qwen3moe' is not known.*qwen3_moe"),
        ({"pretrained": "Qwen/Qwen3-30B-A3B"}, "is not a folder. Nothing is downloaded"),
        (
            {"config": {"hiden_size": 8}, "config_class": "Qwen3MoeConfig"},
            "hiden_size; the closest names are hidden_size",
        ),
        ({"config": {"hidden_size": "8"}, "config_class": "Qwen3MoeConfig"}, "'hidden_size' expected int, got str"),
        ({"config": {"dtype": "bfloat16"}, "config_class": "Qwen3MoeConfig"}, r"Trainer\(precision=\.\.\.\)"),
        ({"config": {"output_router_logits": True}, "config_class": "Qwen3MoeConfig"}, "output_router_logits=True"),
        ({"config_class": "Qwen3MoeConfig", "schedule": "cosin"}, "schedule='cosin'"),
    ],
)
def test_bad_options_are_errors_before_anything_starts(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"(?s){message}"):
        CausalLM(**options)


def test_weights_without_a_place_are_an_error_unless_they_may_be_left_out(folder: Path) -> None:
    config(num_hidden_layers=1).save_pretrained(folder)
    with pytest.raises(ValueError, match=r"holds \d+ weights that Qwen3MoeForCausalLM has no place for.*layers\.1"):
        built(CausalLM(pretrained=str(folder)))
    assert len(built(CausalLM(pretrained=str(folder), pretrained_strict=False)).model.model.layers) == 1
