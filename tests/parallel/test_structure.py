"""What is sharded as one unit."""

import pytest
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_moe.experts import find_experts
from lightning_moe.nn import MoE
from lightning_moe.parallel.structure import find_blocks, find_roots, find_routers
from tests import tiny


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.moe = MoE(8, 8, 4, 2)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.ModuleList(nn.Linear(8, 8) for _ in range(9))
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.tail = nn.ModuleList([Block()])
        self.containers = nn.ModuleList(nn.ModuleDict({"moe": MoE(8, 8, 4, 2)}) for _ in range(2))


def names(model: nn.Module, block_classes: list[str] | None = None) -> list[str]:
    return [name for name, _ in find_blocks(model, find_experts(model), block_classes)]


def test_blocks_are_the_entries_of_the_longest_list_that_holds_experts() -> None:
    assert names(Model()) == ["blocks.0", "blocks.1", "blocks.2"]
    assert names(tiny.qwen3_moe()) == ["model.layers.0", "model.layers.1"]


def test_the_user_names_the_classes() -> None:
    assert names(Model(), ["Block"]) == ["blocks.0", "blocks.1", "blocks.2", "tail.0"]
    # The outer one counts where one lies in another.
    assert names(Model(), ["Block", "MoE"])[-2:] == ["containers.0.moe", "containers.1.moe"]
    with pytest.raises(ValueError, match=r"no module of class Blok; its classes with parameters are .*Block"):
        names(Model(), ["Blok"])


def test_a_dense_model() -> None:
    config = LlamaConfig(
        hidden_size=16, num_hidden_layers=3, num_attention_heads=2, vocab_size=32, intermediate_size=16
    )
    assert names(LlamaForCausalLM(config)) == ["model.layers.0", "model.layers.1", "model.layers.2"]
    assert names(nn.Sequential(nn.Linear(2, 2))) == []


def test_roots_are_what_has_a_forward() -> None:
    roots = [name for name, _ in find_roots(Model())]
    assert roots[:2] == ["stem.0", "stem.1"]
    assert roots[-3:] == ["tail.0", "containers.0.moe", "containers.1.moe"]


def test_routers_are_the_siblings_with_a_row_an_expert() -> None:
    for model, expected in ((Model(), 6), (tiny.qwen3_moe(), 2)):
        routers = find_routers(model, find_experts(model))
        assert len(routers) == expected
        assert {type(router).__name__ for router in routers} <= {"TopKRouter", "Qwen3MoeTopKRouter"}
