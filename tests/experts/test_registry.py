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
        ours = RoutedExperts(experts.module, experts.spec, dispatcher, LoopBackend(), torch.float32)
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


# Weights in submodules, experts that are modules


class Inside(torch.nn.Module):
    """Two weights in a submodule."""

    def __init__(self, others: bool = False) -> None:
        super().__init__()
        self.mlp = torch.nn.Module()
        self.mlp.up = torch.nn.Parameter(torch.randn(3, 8, 4))
        self.mlp.down = torch.nn.Parameter(torch.randn(3, 4, 8))
        if others:
            self.mlp.scale = torch.nn.Parameter(torch.ones(4))

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        up, down = self.mlp.up[index], self.mlp.down[index]
        return torch.einsum("th,tkuh,tkou,tk->to", hidden, up, down, weights)


class Listed(torch.nn.ModuleDict):
    """Experts that are the entries of the module itself, beside something that is none."""

    def __init__(self) -> None:
        super().__init__({f"expert_{number}": torch.nn.Linear(4, 4) for number in range(3)})
        self.dropout = torch.nn.Dropout(0.0)

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        every = torch.stack([self[f"expert_{number}"](hidden) for number in range(3)], dim=1)
        return torch.einsum("tko,tk->to", every.gather(1, index[..., None].expand(-1, -1, 4)), weights) * 2


def identity(module: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return rows


def doubled(module: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return 2 * rows


@pytest.mark.parametrize(
    ("cls", "spec", "weights"),
    [
        (Inside, ExpertsSpec(up="mlp.up", down="mlp.down", activation=identity), {"mlp.up", "mlp.down"}),
        (Listed, ExpertsSpec(modules=".", post=doubled), set()),
    ],
)
def test_where_the_weights_may_be(cls: type[torch.nn.Module], spec: ExpertsSpec, weights: set[str]) -> None:
    register_experts(cls, spec)
    experts = cls()
    (found,) = find_experts(experts)
    assert (found.num_experts, set(found.spec.parameters(experts))) == (3, weights)
    dispatcher = LocalDispatcher()
    dispatcher.setup(None, num_experts=3, hidden_size=4, dtype=torch.float32)
    backend = None if spec.modules else LoopBackend()
    ours = RoutedExperts(experts, found.spec, dispatcher, backend, torch.float32)
    hidden, index, choice = torch.randn(5, 4), torch.randint(0, 3, (5, 2)), torch.rand(5, 2)
    torch.testing.assert_close(ours(hidden, index, choice), experts(hidden, index, choice))


def test_entries_of_other_ranks_go_and_the_number_of_experts_stays() -> None:
    experts, spec = Listed(), ExpertsSpec(modules=".")
    spec.keep_modules(experts, 1, 1)
    assert [name for name, _ in experts.named_children()] == ["expert_1", "dropout"]
    assert spec.num_experts(experts) == 3


def test_what_all_experts_share_must_not_lie_among_their_weights() -> None:
    spec = ExpertsSpec(up="mlp.up", down="mlp.down", activation=identity)
    with pytest.raises(ValueError, match=r"'mlp.scale' beside them would be cut too"):
        spec.num_experts(Inside(others=True))
    with pytest.raises(ValueError, match="weights= goes with compute="):
        ExpertsSpec(up="a", down="b", activation=identity, weights=("c",))


def test_ranks_among_which_the_experts_cannot_be_divided() -> None:
    spec = ExpertsSpec(up="mlp.up", down="mlp.down", activation=identity, even=True)
    spec.check_ranks("mine", Inside(), 3)
    with pytest.raises(
        ValueError, match=r"expert_parallel_size=2 cannot divide 'mine' with its 3 experts.*one of 1, 3"
    ):
        spec.check_ranks("mine", Inside(), 2)
    ExpertsSpec(up="mlp.up", down="mlp.down", activation=identity).check_ranks("mine", Inside(), 2)
