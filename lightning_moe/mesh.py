"""The two views of the ranks.

Dense weights see ``(replicate, shard)``, experts ``(replicate, expert_shard, expert)``.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

REPLICATE, SHARD, EXPERT_SHARD, EXPERT = "replicate", "shard", "expert_shard", "expert"


@dataclass(frozen=True)
class Layout:
    """How the ranks are divided; all ranks are data-parallel ranks.

    ``replicate * shard == world`` and ``expert_shard * expert == shard``.

    Attributes:
        world_size: Number of ranks.
        replicate: Replicas of the whole sharded model (HSDP).
        expert: Ranks that share the experts of one layer (expert parallelism).
    """

    world_size: int
    replicate: int
    expert: int

    @property
    def shard(self) -> int:
        """Ranks over which a dense weight is sharded."""
        return self.world_size // self.replicate

    @property
    def expert_shard(self) -> int:
        """Ranks over which the experts of one expert-parallel rank are sharded."""
        return self.shard // self.expert

    def __str__(self) -> str:
        return (
            f"{self.world_size} rank{'s' * (self.world_size > 1)}: expert_parallel_size={self.expert} (experts sharded"
            f" over {self.expert_shard}), other weights sharded over {self.shard}, replicate_size={self.replicate}"
        )


def check_replicate_size(replicate_size: int, world_size: int) -> None:
    """Check the strategy's ``replicate_size`` against the number of ranks.

    Raises:
        ValueError: If it is not a positive divisor of the number of ranks.
    """
    if replicate_size < 1 or world_size % replicate_size:
        raise ValueError(
            f"replicate_size={replicate_size} must be a divisor of the number of ranks ({world_size});"
            f" allowed are {_listed(_divisors(world_size))}"
        )


def check_expert_parallel_size(size: int | Literal["auto"], shard_size: int) -> None:
    """Check the strategy's ``expert_parallel_size`` against the number of ranks, before the model is known.

    Raises:
        ValueError: If it is not ``"auto"`` or a positive divisor of the ranks of one replica.
    """
    if size == "auto":
        return
    if not isinstance(size, int) or isinstance(size, bool) or size < 1 or shard_size % size:
        raise ValueError(
            f"expert_parallel_size={size!r} must be 'auto' or a divisor of the ranks of one replica ({shard_size});"
            f" allowed are {_listed(_divisors(shard_size))}"
        )


def resolve_expert_parallel_size(
    size: int | Literal["auto"], num_experts: Mapping[str, int], shard_size: int, ranks_per_node: int
) -> int:
    """Turn ``expert_parallel_size`` into a number that fits every experts module.

    Args:
        size: The option; ``"auto"`` is the largest number that divides every expert count, the ranks of one node and
            those of one replica.
        num_experts: Expert count of each experts module, by its name.
        shard_size: Ranks of one replica.
        ranks_per_node: Ranks of one node.

    Returns:
        The number of ranks that share the experts of one layer; 1 for a model without experts.

    Raises:
        ValueError: If the size does not divide the ranks of one replica, or is larger than an expert count.
    """
    check_expert_parallel_size(size, shard_size)
    if not num_experts:
        return 1
    if size == "auto":
        return math.gcd(ranks_per_node, shard_size, *num_experts.values())
    smallest = min(num_experts.values())
    for name, count in num_experts.items():
        if size > count:
            allowed = [divisor for divisor in _divisors(shard_size) if divisor <= smallest]
            raise ValueError(
                f"expert_parallel_size={size} is larger than the number of experts of {name!r}, which is {count}."
                f" Allowed with {shard_size} ranks a replica are {_listed(allowed)}, or 'auto'"
            )
    return size


def experts_per_rank(num_experts: int, ranks: int) -> list[int]:
    """How many experts each expert-parallel rank holds, in blocks of consecutive experts.

    The blocks are those of ``torch.chunk`` and of a DTensor's ``Shard(0)``: ``ceil(E / ranks)`` experts on each rank
    until none are left. The fullest rank, which a layer waits for, holds no more than with any other division.

    Args:
        num_experts: Experts of the whole module, ``E``.
        ranks: Expert-parallel ranks; need not divide ``E``.

    Returns:
        One number a rank; they sum to ``E``.
    """
    block = -(-num_experts // ranks)
    return [max(0, min(block, num_experts - rank * block)) for rank in range(ranks)]


@dataclass(frozen=True)
class Meshes:
    """The device meshes of a layout.

    Attributes:
        layout: The sizes.
        dense: ``(replicate, shard)``, over which weights that are not experts are sharded.
        experts: ``(replicate, expert_shard, expert)`` over the same ranks, in the same order.
    """

    layout: Layout
    dense: DeviceMesh
    experts: DeviceMesh

    @property
    def dense_fsdp(self) -> DeviceMesh:
        """What ``fully_shard`` takes for dense weights: 1-D, or 2-D where there are replicas."""
        return self.dense if self.layout.replicate > 1 else self.dense[SHARD]

    @property
    def experts_fsdp(self) -> DeviceMesh:
        """What ``fully_shard`` takes for experts: 1-D, or 2-D where there are replicas."""
        return self.experts[REPLICATE, EXPERT_SHARD] if self.layout.replicate > 1 else self.experts[EXPERT_SHARD]

    @property
    def experts_whole(self) -> DeviceMesh:
        """The mesh of a sharded expert weight: :attr:`experts_fsdp` and :attr:`expert`."""
        return self.experts if self.layout.replicate > 1 else self.experts[EXPERT_SHARD, EXPERT]

    @property
    def expert(self) -> DeviceMesh:
        """The 1-D mesh of the ranks that share the experts of one layer."""
        return self.experts[EXPERT]

    @property
    def expert_group(self) -> ProcessGroup:
        """The process group of the ranks that share the experts of one layer."""
        return self.expert.get_group()

    @property
    def expert_rank(self) -> int:
        """Position of this rank in :attr:`expert_group`."""
        return self.expert.get_local_rank()


def build_dense_mesh(device_type: str, world_size: int, replicate: int, timeout: timedelta | None = None) -> DeviceMesh:
    """Build the view of the ranks for dense weights, which does not depend on the experts. Collective.

    Args:
        device_type: ``"cpu"`` or ``"cuda"``.
        world_size: Number of ranks.
        replicate: Replicas of the whole sharded model.
        timeout: How long a collective waits for a rank, ``None`` for the backend's own.
    """
    shape = (replicate, world_size // replicate)
    return _with_timeout(init_device_mesh(device_type, shape, mesh_dim_names=(REPLICATE, SHARD)), timeout)


def build_meshes(dense: DeviceMesh, expert_parallel_size: int, timeout: timedelta | None = None) -> Meshes:
    """Build the view of the ranks for experts beside the dense one. Collective.

    Args:
        dense: Result of :func:`build_dense_mesh`.
        expert_parallel_size: A divisor of the ranks of one replica.
        timeout: How long a collective waits for a rank, ``None`` for the backend's own.
    """
    replicate, shard = dense.shape
    layout = Layout(dense.size(), replicate, expert_parallel_size)
    # Expert is the innermost dimension: neighbouring ranks, hence the ranks of one node, exchange the tokens.
    shape = (replicate, shard // expert_parallel_size, expert_parallel_size)
    experts = init_device_mesh(dense.device_type, shape, mesh_dim_names=(REPLICATE, EXPERT_SHARD, EXPERT))
    return Meshes(layout, dense, _with_timeout(experts, timeout))


def _with_timeout(mesh: DeviceMesh, timeout: timedelta | None) -> DeviceMesh:
    """Give the groups of a mesh the timeout that the user set: they do not take it from the default group."""
    if timeout is not None:
        for group in mesh.get_all_groups():
            _set_pg_timeout(timeout, group)
    return mesh


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
