"""How a module is sharded: expert shards, FSDP2, initialisation, gradient norm."""

from lightning_moe.parallel.apply import (
    Sharded,
    ShardingOptions,
    already_sharded,
    experts_placement,
    reshard,
    shard_module,
)
from lightning_moe.parallel.gradients import clip_gradients_by_norm, clip_gradients_by_value, gradient_norm
from lightning_moe.parallel.policy import DtypePolicy
from lightning_moe.parallel.routed import RoutedExperts

__all__ = [
    "DtypePolicy",
    "RoutedExperts",
    "Sharded",
    "ShardingOptions",
    "already_sharded",
    "clip_gradients_by_norm",
    "clip_gradients_by_value",
    "experts_placement",
    "gradient_norm",
    "reshard",
    "shard_module",
]
