"""Send a token once to each rank that holds one of its experts, however many of them that rank holds.

The rank copies it to its experts, adds up what they return, and sends one row back.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_moe.dispatch.collectives import all_to_all_rows
from lightning_moe.dispatch.permute import Routing, make_routing, rows_to_tokens, sort_choices, tokens_to_rows


@dataclass(frozen=True)
class Visits:
    """Which token goes to which rank.

    Attributes:
        goes: ``[T, ranks]`` bool.
        rank_of_choice: ``[T, K]`` int64 rank that holds the expert of each choice, -1 for a dropped one.
    """

    goes: Tensor
    rank_of_choice: Tensor


def find_visits(top_k_index: Tensor, experts_per_block: int, num_ranks: int) -> Visits:
    """Find the ranks that each token has to visit.

    Args:
        top_k_index: ``[T, K]`` int64; -1 is a dropped choice.
        experts_per_block: Consecutive experts on one rank.
        num_ranks: Ranks of the group.
    """
    rank_TK = torch.div(top_k_index, experts_per_block, rounding_mode="floor")
    goes = top_k_index.new_zeros((top_k_index.shape[0], num_ranks + 1), dtype=torch.bool)
    goes.scatter_(1, rank_TK + 1, True)  # column 0 takes the dropped choices
    return Visits(goes[:, 1:], rank_TK)


@dataclass(frozen=True)
class RowsOfRanks:
    """One layer's traffic.

    Attributes:
        group: The expert-parallel ranks.
        send: Rows that go to each rank.
        receive: Rows that come from each rank.
        visits: The order of the rows on the sending side: sorted by rank, then by token.
        local: The order of the rows of this rank's experts, among the rows received.
    """

    group: ProcessGroup
    send: list[int]
    receive: list[int]
    visits: Routing
    local: Routing

    def combine(self, expert_rows: Tensor) -> Tensor:
        """Add up the rows of each visit here, send one row back, and add up the visits of each token there."""
        returned = _Return.apply(rows_to_tokens(expert_rows, self.local), self)
        return rows_to_tokens(returned, self.visits)


def order_visits(visits: Visits, send: list[int], top_k: int) -> tuple[Routing, Tensor]:
    """List the rows that are sent, by destination.

    Args:
        visits: Result of :func:`find_visits`.
        send: Rows for each rank, known on the host.
        top_k: ``K``, which bounds the visits of a token.

    Returns:
        The order as positions in ``[T * slots]``, each visit of a token in a slot of its own; and the rank of each row.
    """
    num_tokens, num_ranks = visits.goes.shape
    slots = min(top_k, num_ranks)
    num_rows = sum(send)
    by_rank = visits.goes.t().reshape(-1)
    # Stable, so that the rows of a rank keep the order of their tokens. nonzero() would wait for the device.
    flat = torch.argsort(by_rank.logical_not().to(torch.uint8), stable=True)[:num_rows]
    rank, token = torch.div(flat, max(num_tokens, 1), rounding_mode="floor"), flat % max(num_tokens, 1)
    slot = (visits.goes.cumsum(1) - 1)[token, rank]
    counts = visits.goes.sum(0)
    return Routing(token * slots + slot, counts, num_tokens, slots, complete=num_rows == num_tokens * slots), rank


def send_once(
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    visits: Visits,
    experts_per_block: int,
    traffic: tuple[list[int], list[int]],
    local_counts: tuple[Tensor, int],
    group: ProcessGroup,
) -> tuple[Tensor, Tensor, RowsOfRanks]:
    """Send the tokens, and copy those received to the experts of this rank. Collective.

    Args:
        hidden_states: ``[T, H]``.
        top_k_index: ``[T, K]``.
        top_k_weights: ``[T, K]`` float32.
        visits: Result of :func:`find_visits`.
        experts_per_block: Consecutive experts on one rank.
        traffic: Rows to and from each rank.
        local_counts: ``[E_local]`` rows of each expert of this rank, and their sum.
        group: The expert-parallel ranks.

    Returns:
        ``[R, H]`` rows sorted by local expert, ``[R]`` their weights, and what brings them back.
    """
    send, receive = traffic
    order, rank_of_row = order_visits(visits, send, top_k_index.shape[1])
    token = order.token_of_row
    here = visits.rank_of_choice[token] == rank_of_row.unsqueeze(1)
    # Which of its choices a row is for: the number of the expert on the rank it goes to, -1 for those of other ranks.
    index = torch.where(here, top_k_index[token] % experts_per_block, -1).to(torch.int32)
    weights = torch.where(here, tokens_to_rows(top_k_weights, order), 0.0)
    rows, weights, index = _Send.apply(tokens_to_rows(hidden_states, order), weights, index, send, receive, group)
    counts, total = local_counts
    index = index.long()
    local = make_routing(index, sort_choices(index), counts, total)
    row_weights = weights.reshape(-1).index_select(0, local.order)
    return tokens_to_rows(rows, local), row_weights, RowsOfRanks(group, send, receive, order, local)


class _Send(torch.autograd.Function):
    """Rows, with the weights and experts of their choices. One node: both collectives keep one order on every rank."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weights: Tensor,
        index: Tensor,
        send: list[int],
        receive: list[int],
        group: ProcessGroup,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        # One message for both: an int32 and a float32 are as wide.
        choices = torch.stack((weights.view(torch.int32), index), dim=1)
        rows = all_to_all_rows(rows, receive, send, group)
        choices = all_to_all_rows(choices, receive, send, group)
        weights, index = choices[:, 0].contiguous().view(torch.float32), choices[:, 1].contiguous()
        ctx.mark_non_differentiable(index)
        return rows, weights, index

    @staticmethod
    def backward(ctx: Any, grad_rows: Tensor, grad_weights: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        # Gradients that autograd does not have arrive as zeros, so no rank ever skips these two collectives.
        grad_rows = all_to_all_rows(grad_rows, ctx.send, ctx.receive, ctx.group)
        grad_weights = all_to_all_rows(grad_weights, ctx.send, ctx.receive, ctx.group)
        return grad_rows, grad_weights, None, None, None, None


class _Return(torch.autograd.Function):
    """Rows back to the ranks that sent them."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, traffic: RowsOfRanks) -> Tensor:
        ctx.traffic = traffic
        return all_to_all_rows(rows, traffic.send, traffic.receive, traffic.group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        traffic: RowsOfRanks = ctx.traffic
        return all_to_all_rows(grad, traffic.receive, traffic.send, traffic.group), None
