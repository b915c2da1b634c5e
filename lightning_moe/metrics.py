"""How evenly the router loads the experts and their ranks, as metrics of torchmetrics.

All of them take counts, on any device, and add them up over the updates and, in a distributed run, over the ranks.
:func:`choices_per_expert` counts the choices of a router; under ``strategy="moe_ep"``
:class:`lightning_moe.callbacks.ExpertLoadMonitor` counts and logs them by itself.

    imbalance = LoadImbalance(num_experts=64)
    imbalance.update(choices_per_expert(top_k_index, num_experts=64))
    self.log("imbalance", imbalance)
"""

import math
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override

from lightning_moe.dispatch.permute import count_experts
from lightning_moe.mesh import experts_per_rank


def choices_per_expert(top_k_index: Tensor, num_experts: int) -> Tensor:
    """Count how often each expert was chosen. Does not wait for the device.

    Args:
        top_k_index: ``[..., K]`` integer experts; -1 is a dropped choice, which does not count.
        num_experts: ``E``.

    Returns:
        ``[E]`` int64.
    """
    return count_experts(top_k_index.long(), num_experts)[1:]


class ExpertLoad(Metric):
    """How often each expert was chosen: ``[E]`` int64.

    Args:
        num_experts: ``E``.
        **options: Those of ``torchmetrics.Metric``.

    Raises:
        ValueError: If there is not at least one expert.
    """

    higher_is_better: bool | None = None
    is_differentiable = False
    full_state_update = False
    load: Tensor

    def __init__(self, num_experts: int, **options: Any) -> None:
        super().__init__(**options)
        if num_experts < 1:
            raise ValueError(f"num_experts={num_experts} must be 1 or more")
        self.num_experts = num_experts
        self.add_state("load", torch.zeros(num_experts, dtype=torch.int64), dist_reduce_fx="sum")

    @override
    def update(self, load: Tensor) -> None:
        """Add counts.

        Args:
            load: ``[E]`` integer choices of each expert.

        Raises:
            ValueError: If there is another number of them.
        """
        if load.shape != (self.num_experts,):
            raise ValueError(
                f"{type(self).__name__}(num_experts={self.num_experts}) takes one count an expert, got shape"
                f" {list(load.shape)}; choices_per_expert(top_k_index, {self.num_experts}) makes them of a router's"
                " choices"
            )
        self.load += load

    @override
    def compute(self) -> Tensor:
        """The counts."""
        return self.load


class LoadImbalance(ExpertLoad):
    """The load of the busiest expert over the mean: 1 where all are loaded alike, ``E`` where one gets everything.

    NaN before anything was chosen.

    Args:
        num_experts: ``E``.
        **options: Those of ``torchmetrics.Metric``.
    """

    higher_is_better = False

    @override
    def compute(self) -> Tensor:
        """Scalar float32."""
        return self.load.max().float() * self.num_experts / self.load.sum()


class DeadExperts(ExpertLoad):
    """The share of the experts that were never chosen: 0 where each was; NaN before anything was chosen.

    Args:
        num_experts: ``E``.
        **options: Those of ``torchmetrics.Metric``.
    """

    higher_is_better = False

    @override
    def compute(self) -> Tensor:
        """Scalar float32."""
        return (self.load == 0).float().mean().where(self.load.sum() > 0, math.nan)


class RouterEntropy(ExpertLoad):
    """The entropy of the load over the experts, divided by that of an even load.

    1 where all experts are loaded alike, 0 where one gets everything; NaN before anything was chosen. This is how the
    router spreads all tokens, not how sure it is of each of them.

    Args:
        num_experts: ``E``.
        **options: Those of ``torchmetrics.Metric``.
    """

    higher_is_better = True

    @override
    def compute(self) -> Tensor:
        """Scalar float32."""
        share = self.load.float() / self.load.sum()
        if self.num_experts == 1:
            return share.sum()  # the only load there can be is an even one
        # log E is the entropy of an even load.
        return -torch.special.xlogy(share, share).sum() / math.log(self.num_experts)


class RowsPerRank(ExpertLoad):
    """The choices for the experts of each expert-parallel rank: ``[ranks]`` int64.

    They are the rows that the rank computes, where no budget drops some.

    Args:
        num_experts: ``E``.
        ranks: Expert-parallel ranks, over which the experts are divided in blocks.
        **options: Those of ``torchmetrics.Metric``.
    """

    def __init__(self, num_experts: int, ranks: int, **options: Any) -> None:
        super().__init__(num_experts, **options)
        if ranks < 1:
            raise ValueError(f"ranks={ranks} must be 1 or more")
        self.held = experts_per_rank(num_experts, ranks)

    @override
    def compute(self) -> Tensor:
        """The rows."""
        return torch.stack([block.sum() for block in self.load.split(self.held)])


class DroppedTokens(Metric):
    """The share of the routers' choices that a budget for rows has dropped; NaN before anything was chosen.

    Args:
        **options: Those of ``torchmetrics.Metric``.
    """

    higher_is_better = False
    is_differentiable = False
    full_state_update = False
    dropped: Tensor
    chosen: Tensor

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for state in ("dropped", "chosen"):
            self.add_state(state, torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    @override
    def update(self, dropped: Tensor | int, chosen: Tensor | int) -> None:
        """Add counts.

        Args:
            dropped: Choices that were dropped.
            chosen: All choices, these included.
        """
        self.dropped += dropped
        self.chosen += chosen

    @override
    def compute(self) -> Tensor:
        """Scalar float32."""
        return self.dropped.float() / self.chosen
