"""A budget for the rows that a rank computes: what is over it is dropped, in a defined order, and counted."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_moe.dispatch.permute import count_experts
from lightning_moe.in_flight import kept
from lightning_moe.mesh import experts_per_rank


@dataclass(frozen=True)
class WithinBudget:
    """The choices that are left.

    Attributes:
        top_k_index: ``[T, K]`` int64 experts, -1 for each choice that was dropped, here or before.
        chosen: ``[E]`` int64 choices of this rank's tokens for each expert, those dropped here included.
        dropped: Scalar int64, on the device: how many choices of this rank's tokens were dropped here.
    """

    top_k_index: Tensor
    chosen: Tensor
    dropped: Tensor


class RowBudget:
    """Bounds the rows that each expert-parallel rank computes in one forward of an experts module.

    Without a budget a rank computes every row that is sent to it, however many the router sends. With one the memory of
    a forward is bounded, and the choices over it are dropped: their rows are not computed, their weights not used.
    The other weights of the token stay as they are, so a token that loses a choice gets a smaller sum, and one that
    loses all of them gets zeros. The gradient of a dropped weight is zero.

    A rank that is sent no more rows than the budget loses nothing. One that is sent more computes exactly as many as
    the budget, divided over the ranks that send them in proportion to what each sends: shares are rounded down, and
    the rows left over go one each to the largest remainders, the first rank first among equals. Each sender keeps its
    choices with the largest routing weights, and among equal ones those of earlier tokens.

    It works before any dispatcher, which all leave out choices of -1, and in evaluation too: memory is as scarce there.
    Rows that pad those of an expert to a multiple are not counted. With several ranks a call costs one exchange of one
    number for each pair of ranks; nothing waits for the device.

    Args:
        max_rows: Rows that a rank may compute in one forward.
        num_experts: Experts of the whole module.
        group: The expert-parallel ranks, ``None`` for one rank alone.

    Raises:
        ValueError: If ``max_rows`` is not a positive number.
    """

    def __init__(self, max_rows: int, num_experts: int, group: ProcessGroup | None = None) -> None:
        check_max_rows_per_rank(max_rows)
        self.max_rows = max_rows
        self.num_experts = num_experts
        self.group = group
        self.num_ranks = 1 if group is None else group.size()
        self._rank = 0 if group is None else group.rank()
        self._block = max(experts_per_rank(num_experts, self.num_ranks))

    @torch.no_grad()
    def apply(self, top_k_index: Tensor, top_k_weights: Tensor) -> WithinBudget:
        """Drop what is over the budget. Collective where there are several ranks.

        Args:
            top_k_index: ``[T, K]`` int64 experts of the whole module, -1 for a choice that is dropped already.
            top_k_weights: ``[T, K]`` float routing weights, which decide what goes first.

        Returns:
            The choices that are left. ``top_k_index`` itself is not changed.
        """
        chosen = count_experts(top_k_index, self.num_experts)[1:]
        demand = chosen.new_zeros(self.num_ranks * self._block)
        demand[: self.num_experts] = chosen
        demand = demand.view(self.num_ranks, self._block).sum(1)
        quota = divide_budget(self._gather(demand), self.max_rows)[self._rank]
        # Recompute repeats orders as it repeats the router's choices, and so drops what the forward dropped.
        by_weight = torch.argsort(top_k_weights.reshape(-1), descending=True, stable=True)
        goes_to = torch.div(top_k_index.reshape(-1), self._block, rounding_mode="floor").index_select(0, by_weight)
        by_rank = torch.argsort(goes_to, stable=True)
        order, goes_to = by_weight.index_select(0, by_rank), goes_to.index_select(0, by_rank)
        # In this order come the choices dropped before, which are in nobody's quota, then those for each rank.
        before = order.numel() - demand.sum()
        starts = torch.cat((before.new_zeros(1), before + demand.cumsum(0) - demand))
        ends = starts + torch.cat((quota.new_zeros(1), quota))
        stays = torch.arange(order.numel(), device=order.device) < ends.index_select(0, goes_to + 1)
        keep = torch.empty_like(stays).scatter_(0, order, stays).view_as(top_k_index)
        return WithinBudget(torch.where(keep, top_k_index, -1), chosen, (demand - quota).sum())

    def _gather(self, demand: Tensor) -> Tensor:
        """``[ranks, ranks]`` rows that each rank wants to send to each."""
        group = self.group
        if group is None or self.num_ranks == 1:
            return demand.unsqueeze(0)

        def gather() -> Tensor:
            table = demand.new_empty(self.num_ranks * self.num_ranks)
            dist.all_gather_into_tensor(table, demand, group=group)
            return table.view(self.num_ranks, self.num_ranks)

        return kept(gather)


def divide_budget(demand: Tensor, max_rows: int) -> Tensor:
    """Divide the budget of each rank over the ranks that send to it. The same on every rank; no wait for the device.

    Args:
        demand: ``[sources, destinations]`` int64 rows that each rank wants to send to each.
        max_rows: Rows that a destination computes at most.

    Returns:
        ``[sources, destinations]`` int64 rows that it may send: ``demand`` where its column sums up to no more than the
        budget, else numbers no larger that sum up to the budget exactly.
    """
    total = demand.sum(0)
    allowed = total.clamp_max(max_rows)
    # A share is demand * allowed / total. Where all is allowed the division leaves nothing over.
    product = demand * allowed
    divisor = total.clamp_min(1)
    quota, remainder = torch.div(product, divisor, rounding_mode="floor"), product % divisor
    # Each share is short by less than one row, so the rows left over are fewer than the shares with a remainder.
    left = allowed - quota.sum(0)
    largest = torch.argsort(remainder, dim=0, descending=True, stable=True)
    gets_one = torch.arange(len(demand), device=demand.device).unsqueeze(1) < left
    return quota.scatter_add_(0, largest, gets_one.to(quota.dtype))


def check_max_rows_per_rank(max_rows_per_rank: int | None) -> None:
    """Check the strategy's ``max_rows_per_rank``.

    Raises:
        ValueError: If it is neither ``None`` nor a positive whole number.
    """
    if max_rows_per_rank is None:
        return
    if isinstance(max_rows_per_rank, bool) or not isinstance(max_rows_per_rank, int) or max_rows_per_rank < 1:
        raise ValueError(
            f"max_rows_per_rank={max_rows_per_rank!r} must be a positive number of rows (choices of tokens for experts)"
            " that a rank computes in one forward of an experts module, or None to drop nothing"
        )
