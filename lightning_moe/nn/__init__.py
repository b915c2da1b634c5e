"""A Mixture-of-Experts layer to build models from, and losses on routers, in plain PyTorch.

They run alone, and under any strategy.
"""

from lightning_moe.nn.experts import GroupedExperts
from lightning_moe.nn.moe import MoE
from lightning_moe.nn.router import TopKRouter
from lightning_moe.nn.router_losses import (
    RouterObserver,
    Routing,
    batch_balance_loss,
    router_z_loss,
    sequence_balance_loss,
)

__all__ = [
    "GroupedExperts",
    "MoE",
    "RouterObserver",
    "Routing",
    "TopKRouter",
    "batch_balance_loss",
    "router_z_loss",
    "sequence_balance_loss",
]
