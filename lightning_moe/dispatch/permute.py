"""The permutations that every dispatcher shares: tokens to rows sorted by expert, and back."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Routing:
    """Where each row of a sorted buffer comes from.

    Attributes:
        order: ``[S]`` int64 positions in the flattened ``[T * K]`` choices, sorted by expert and then by token;
            ``None`` where the tokens are the rows.
        tokens_per_expert: ``[E]`` int64 rows of each expert; sums to ``S``.
        num_tokens: ``T``.
        top_k: ``K``.
        complete: ``S == T * K``: no choice was dropped.
    """

    order: Tensor | None
    tokens_per_expert: Tensor
    num_tokens: int
    top_k: int
    complete: bool

    @cached_property
    def token_of_row(self) -> Tensor:
        """``[S]`` int64 token that each row belongs to."""
        assert self.order is not None
        return torch.div(self.order, self.top_k, rounding_mode="floor")


def count_experts(top_k_index: Tensor, num_experts: int) -> Tensor:
    """Count the choices of each expert.

    Args:
        top_k_index: ``[T, K]`` int64; -1 is a dropped choice.
        num_experts: ``E``.

    Returns:
        ``[E + 1]`` int64: the dropped choices first, then those of each expert.
    """
    flat = top_k_index.reshape(-1) + 1
    # Not bincount: on CUDA it waits for the device to learn the largest index.
    return flat.new_zeros(num_experts + 1).scatter_add_(0, flat, torch.ones_like(flat))


def sort_choices(top_k_index: Tensor) -> Tensor:
    """Sort the choices by expert, the dropped ones first.

    Stable: rows of an expert keep the order of their tokens, which makes the result the same for every layout.

    Args:
        top_k_index: ``[T, K]`` int64; -1 is a dropped choice.

    Returns:
        ``[T * K]`` int64 positions in the flattened choices.
    """
    return torch.argsort(top_k_index.reshape(-1), stable=True)


def make_routing(top_k_index: Tensor, sorted_choices: Tensor, tokens_per_expert: Tensor, num_rows: int) -> Routing:
    """Leave the dropped choices out of a sorted order.

    Args:
        top_k_index: ``[T, K]`` int64; -1 is a dropped choice.
        sorted_choices: Result of :func:`sort_choices`, which needs nothing from the host and so comes before the wait.
        tokens_per_expert: ``[E]`` int64 valid choices of each expert.
        num_rows: The sum of ``tokens_per_expert``, known on the host.

    Returns:
        The order of the rows.
    """
    num_tokens, top_k = top_k_index.shape
    num_choices = num_tokens * top_k
    order = sorted_choices[num_choices - num_rows :]
    return Routing(order, tokens_per_expert, num_tokens, top_k, complete=num_rows == num_choices)


class _RowsToTokens(torch.autograd.Function):
    """Un-permute ``[S, H]`` rows and add up the ``K`` of each token; the backward pass gathers.

    A view and a sum over ``K`` rather than ``index_add``: the latter is not deterministic on CUDA.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, routing: Routing) -> Tensor:
        ctx.routing = routing
        hidden = rows.shape[1]
        num_choices = routing.num_tokens * routing.top_k
        choices = rows.new_empty(num_choices, hidden) if routing.complete else rows.new_zeros(num_choices, hidden)
        choices[routing.order] = rows
        return choices.view(routing.num_tokens, routing.top_k, hidden).sum(dim=1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.index_select(0, ctx.routing.token_of_row), None


class _TokensToRows(torch.autograd.Function):
    """Gather ``[S, H]`` rows from ``[T, H]`` tokens; the backward pass is :class:`_RowsToTokens`' forward."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, routing: Routing) -> Tensor:
        ctx.routing = routing
        return tokens.index_select(0, routing.token_of_row)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return rows_to_tokens(grad, ctx.routing), None


def tokens_to_rows(tokens: Tensor, routing: Routing) -> Tensor:
    """Copy each token to the rows of its experts.

    Args:
        tokens: ``[T, H]``.
        routing: The order of the rows.

    Returns:
        ``[S, H]``, differentiable.
    """
    return tokens if routing.order is None else _TokensToRows.apply(tokens, routing)


def rows_to_tokens(rows: Tensor, routing: Routing) -> Tensor:
    """Add up the rows of each token.

    Args:
        rows: ``[S, H]``.
        routing: The order of the rows.

    Returns:
        ``[T, H]``, differentiable; exact zeros for a token with no row.
    """
    return rows if routing.order is None else _RowsToTokens.apply(rows, routing)


def choices_to_rows(choices: Tensor, routing: Routing) -> Tensor:
    """Give each row what belongs to its choice.

    Args:
        choices: ``[T, K]``.
        routing: The order of the rows.

    Returns:
        ``[S]``, differentiable.
    """
    flat = choices.reshape(-1)
    return flat if routing.order is None else flat.index_select(0, routing.order)
