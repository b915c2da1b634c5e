"""A Mixture-of-Experts layer to build models from, in plain PyTorch: it runs alone, and under any strategy."""

from lightning_moe.nn.experts import GroupedExperts
from lightning_moe.nn.moe import MoE
from lightning_moe.nn.router import TopKRouter

__all__ = ["GroupedExperts", "MoE", "TopKRouter"]
