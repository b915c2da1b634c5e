"""A Qwen3-MoE that a test trains in a moment, and data for it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_moe.models import CausalLM

VOCABULARY, LENGTH = 64, 16
FIELDS = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
}


def config(**changes: Any) -> Any:
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(**{**FIELDS, **changes})


def causal_lm(**options: Any) -> CausalLM:
    return CausalLM(**{"config": dict(FIELDS), "config_class": "Qwen3MoeConfig", **options})


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


class Sequences(Dataset[dict[str, Tensor]]):
    """Random tokens with shifted labels; ``valid`` gives how many labels of each sequence count."""

    def __init__(self, count: int, valid: list[int] | None = None, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(0, VOCABULARY, (count, LENGTH + 1), generator=generator)
        self.inputs, self.labels = tokens[:, :-1], tokens[:, 1:].clone()
        for row, kept in enumerate(valid or []):
            self.labels[row, kept:] = -100

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.inputs[index], "labels": self.labels[index]}

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (self[index] for index in range(len(self)))


def loader(count: int = 8, batch: int = 4, **options: Any) -> DataLoader:
    return DataLoader(Sequences(count, **options), batch_size=batch)


def trainer(root: Path | str, **options: Any) -> Trainer:
    quiet = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "num_sanity_val_steps": 0,
    }
    return Trainer(default_root_dir=root, **{**quiet, **options})
