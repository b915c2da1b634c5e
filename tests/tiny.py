"""Small models and data that several tests train, whole in one process or sharded over many."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

import lightning_moe
from lightning_moe.parallel import gradient_norm

VOCABULARY, LENGTH, BATCH = 64, 16, 16

QWEN3_MOE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 64,
    # Large enough for the router to have clear preferences, and for every part to have a gradient worth comparing.
    "initializer_range": 0.2,
}


def qwen3_moe(**changes: Any) -> torch.nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**QWEN3_MOE, **changes}))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    # With the usual epsilon of 1e-8 an element whose gradient is rounding noise moves by a full learning rate, in any
    # direction: a comparison to 1e-5 needs an epsilon above the noise.
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4, weight_decay=0.1)


class TinyLM(pl.LightningModule):
    """A user's LightningModule around a Transformers model, built in ``__init__``; it records what it sees."""

    def __init__(
        self,
        optimizer: Callable[[Any], torch.optim.Optimizer] = sgd,
        build: Callable[[], torch.nn.Module] = qwen3_moe,
        keep_gradients: bool = False,
    ) -> None:
        super().__init__()
        self.net = build()
        self.optimizer = optimizer
        self.keep_gradients = keep_gradients
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.gradients: dict[str, Tensor] = {}

    def loss(self, tokens: Tensor) -> Tensor:
        return self.net(input_ids=tokens, labels=tokens).loss

    def training_step(self, tokens: Tensor, index: int) -> Tensor:
        loss = self.loss(tokens)
        self.losses.append(float(self.trainer.strategy.reduce(loss.detach())))
        return loss

    def validation_step(self, tokens: Tensor, index: int) -> None:
        self.log("val_loss", self.loss(tokens), sync_dist=True)

    def test_step(self, tokens: Tensor, index: int) -> None:
        self.log("test_loss", self.loss(tokens), sync_dist=True)

    def predict_step(self, tokens: Tensor, index: int) -> Tensor:
        return self.net(input_ids=tokens).logits.argmax(-1)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.norms.append(float(gradient_norm(self.parameters(), self.device)))
        if self.keep_gradients and not self.gradients:
            self.gradients = {
                name: whole(p.grad) if p.grad is not None else torch.zeros(p.shape)
                for name, p in self.named_parameters()
            }

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer(self.parameters())


def whole(tensor: Tensor) -> Tensor:
    """A copy of the full tensor; collective for a sharded one."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).float().clone()


def weights(module: torch.nn.Module) -> dict[str, Tensor]:
    return {name: whole(parameter) for name, parameter in module.named_parameters()}


def tokens(steps: int = 6, batch: int = BATCH, seed: int = 1) -> Tensor:
    """``[steps, batch, LENGTH]`` random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (steps, batch, LENGTH), generator=generator)


def loader(data: Tensor, rank: int = 0, ranks: int = 1) -> DataLoader:
    """This rank's part of each of the ``[steps, batch, LENGTH]`` batches."""
    mine = data.unflatten(1, (ranks, -1))[:, rank]
    return DataLoader(mine.flatten(0, 1), batch_size=mine.shape[1])


def trainer(strategy: Any = "auto", devices: int = 1, **options: Any) -> pl.Trainer:
    quiet = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "num_sanity_val_steps": 0,
    }
    return pl.Trainer(devices=devices, strategy=strategy, **{**quiet, **options})


def moe_ep(**options: Any) -> "lightning_moe.ExpertParallelStrategy":
    return lightning_moe.ExpertParallelStrategy(**options)
