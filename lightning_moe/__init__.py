"""Train Mixture-of-Experts models in PyTorch Lightning.

Importing this package registers the strategy name ``"moe_ep"`` with Lightning; nothing else happens.
"""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_moe.experts import ExpertsSpec, local_weight, register_experts
from lightning_moe.precision import MoEPrecision
from lightning_moe.strategy import ExpertParallelStrategy

__all__ = ["ExpertParallelStrategy", "ExpertsSpec", "MoEPrecision", "local_weight", "register_experts"]
__version__ = "0.1.0"

StrategyRegistry.register(
    "moe_ep",
    ExpertParallelStrategy,
    description="Expert parallelism for Mixture-of-Experts models; FSDP2 for the rest",
    override=True,
)
