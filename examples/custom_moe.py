"""Shard an experts class of your own: describe it once with ``register_experts``.

python examples/custom_moe.py
"""

import argparse

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_moe import ExpertsSpec, register_experts
from lightning_moe.nn import TopKRouter


class MyExperts(nn.Module):
    """Experts as you would write them for one process: stacked weights, and the call that the strategy knows."""

    def __init__(self, num_experts: int, hidden_size: int, width: int) -> None:
        super().__init__()
        self.w_in = nn.Parameter(torch.randn(num_experts, hidden_size, width) * hidden_size**-0.5)
        self.w_out = nn.Parameter(torch.randn(num_experts, width, hidden_size) * width**-0.5)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden_states)
        for expert in range(len(self.w_in)):
            token, choice = (top_k_index == expert).nonzero(as_tuple=True)
            rows = F.gelu(hidden_states[token] @ self.w_in[expert]) @ self.w_out[expert]
            out = out.index_add(0, token, rows * top_k_weights[token, choice, None])
        return out


# Which weights there are and what lies between them; under strategy="moe_ep" this replaces the loop above.
register_experts(
    MyExperts,
    ExpertsSpec(up="w_in", down="w_out", transposed=True, activation=lambda module, rows: F.gelu(rows)),
)


class Net(nn.Module):
    def __init__(self, hidden_size: int = 32, num_experts: int = 8, layers: int = 2) -> None:
        super().__init__()
        self.routers = nn.ModuleList([TopKRouter(hidden_size, num_experts, top_k=2) for _ in range(layers)])
        self.experts = nn.ModuleList([MyExperts(num_experts, hidden_size, 64) for _ in range(layers)])
        self.head = nn.Linear(hidden_size, 1)

    def forward(self, x: Tensor) -> Tensor:
        for router, experts in zip(self.routers, self.experts, strict=True):
            _, weights, index = router(x)
            x = x + experts(F.layer_norm(x, x.shape[-1:]), index, weights)
        return self.head(x)


class Regression(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        x, y = batch
        loss = F.mse_loss(self.net(x), y)
        self.log("loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--devices", type=int, default=2)
    options = parser.parse_args()
    pl.seed_everything(0)
    x = torch.randn(4096, 32)
    y = (x[:, :1] * x[:, 1:2]).tanh()
    trainer = pl.Trainer(
        strategy="moe_ep", accelerator="auto", devices=options.devices, max_steps=options.steps, log_every_n_steps=10
    )
    trainer.fit(Regression(), DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True))
    trainer.print(f"loss after {trainer.global_step} steps: {trainer.callback_metrics['loss']:.4f}")
