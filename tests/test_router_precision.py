"""Routing decides in float32: the router, the top-k and the correction bias, whatever the precision of the rest."""

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from tests import tiny
from tests.harness import run_ranks
from tests.test_strategy import rank_and_world

BIAS = "net.model.layers.1.mlp.gate.e_score_correction_bias"


def deepseek(**changes: Any) -> torch.nn.Module:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    fields = {
        **{key: tiny.QWEN3_MOE[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "initializer_range")},
        **{"moe_intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4},
        **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
        **{"n_shared_experts": 1, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1},
        **{"first_k_dense_replace": 1, "max_position_embeddings": 64, **changes},
    }
    return DeepseekV3ForCausalLM(DeepseekV3Config(**fields))


class Watched(tiny.TinyLM):
    """Notes the dtypes that the router sees and gives, and what it chose."""

    def __init__(self) -> None:
        super().__init__(tiny.adamw, build=deepseek)
        # Differences that bfloat16 cannot hold: all would be 1.
        self.get_buffer(BIAS).copy_(1 + torch.arange(8) * 1e-4)
        self.dtypes: set[str] = set()
        self.chosen: list[Tensor] = []
        self.net.model.layers[1].mlp.gate.register_forward_hook(self.note)

    def note(self, gate: torch.nn.Module, args: Any, output: tuple[Tensor, ...]) -> None:
        logits, _, index = output
        self.dtypes.add(f"bias {gate.e_score_correction_bias.dtype}, logits {logits.dtype}")
        self.chosen.append(index.clone())


def fit(precision: str, path: str, distributed: bool, resume: bool) -> dict[str, Any]:
    rank, world = rank_and_world()
    pl.seed_everything(0, verbose=False)
    module = Watched()
    if resume:
        module.get_buffer(BIAS).zero_()
    strategy = tiny.moe_ep(expert_parallel_size=2, save_distributed_checkpoint=distributed)
    trainer = tiny.trainer(strategy, devices=world, max_steps=4 if resume else 2, precision=precision)
    data = tiny.loader(tiny.tokens(4).roll(2 if resume else 0, 0), rank, world)
    trainer.fit(module, data, ckpt_path=path if resume else None)
    if not resume:
        trainer.save_checkpoint(path)
    expert = module.net.model.layers[1].mlp.experts.gate_up_proj
    return {"bias": module.get_buffer(BIAS).clone(), "dtypes": module.dtypes, "expert": expert.dtype}


@pytest.mark.parametrize("distributed", [True, False])
@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_the_correction_bias_keeps_its_bits(tmp_path: Path, precision: str, distributed: bool) -> None:
    path = str(tmp_path / "a.ckpt")
    for resume in (False, True):
        for result in run_ranks(fit, 2, precision, path, distributed, resume):
            assert torch.equal(result["bias"], 1 + torch.arange(8) * 1e-4), "through casts, training, save and load"
            assert result["dtypes"] == {"bias torch.float32, logits torch.float32"}
            assert result["expert"] == (torch.bfloat16 if precision == "bf16-true" else torch.float32)


def choices(precision: str) -> Tensor:
    rank, world = rank_and_world()
    pl.seed_everything(0, verbose=False)
    module = Watched()
    with torch.no_grad():
        for parameter in module.net.model.layers[1].mlp.gate.parameters():
            parameter.zero_()  # every score is 0.5: the bias alone decides
    trainer = tiny.trainer(tiny.moe_ep(expert_parallel_size=2), devices=world, precision=precision)
    trainer.validate(module, tiny.loader(tiny.tokens(1), rank, world), verbose=False)
    return torch.cat(module.chosen)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_near_ties_are_decided_in_float32(precision: str) -> None:
    for chosen in run_ranks(choices, 2, precision):
        assert (chosen.sort(-1).values == torch.tensor([6, 7])).all(), "the two of largest bias"


def fit_cast_by_hand() -> list[str]:
    import warnings

    rank, world = rank_and_world()
    module = tiny.TinyLM(build=partial(deepseek)).to(torch.bfloat16)
    trainer = tiny.trainer(tiny.moe_ep(), devices=world, max_steps=1, precision="bf16-true")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, tiny.loader(tiny.tokens(1), rank, world))
    return [str(warning.message) for warning in caught]


def test_a_bias_that_was_cast_before_is_pointed_out() -> None:
    (messages,) = run_ranks(fit_cast_by_hand, 1)
    assert any(BIAS in message and "bfloat16" in message and "float32" in message for message in messages), messages
