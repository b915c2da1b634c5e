"""What libraries that move tokens between ranks have in common, and the one place where autograd meets them.

A transport moves a token once to each rank that holds one of its experts, and sums on the way back. Copying a token to
its experts on the rank, and adding up what they return, is the same for all of them and happens here. The backward pass
of a dispatch is the way back, and that of the way back a dispatch along the same route.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_moe.dispatch.base import Dispatched
from lightning_moe.dispatch.permute import (
    Routing,
    count_experts,
    make_routing,
    rows_to_tokens,
    sort_choices,
    tokens_to_rows,
)


@dataclass(frozen=True)
class Received:
    """The tokens that came to this rank, each once.

    Attributes:
        rows: ``[U, H]``.
        index: ``[U, K]`` int64 expert of this rank for each choice, -1 for choices of other ranks and dropped ones.
        weights: ``[U, K]`` float32, 0 where ``index`` is -1.
        tokens_per_expert: ``[E_local]`` int64 choices of each expert of this rank.
        tokens_per_expert_host: The same numbers on the host.
        handle: The route, for the other calls.
    """

    rows: Tensor
    index: Tensor
    weights: Tensor
    tokens_per_expert: Tensor
    tokens_per_expert_host: list[int]
    handle: Any


class Transport(ABC):
    """Moves tokens between the ranks of one group. Every call is collective; none is differentiable."""

    @abstractmethod
    def send(self, rows: Tensor, index: Tensor, weights: Tensor, choices_per_expert: Tensor) -> Received:
        """Send each token once to each rank that holds one of its experts.

        Args:
            rows: ``[T, H]``; ``T`` may be 0 and may differ between ranks.
            index: ``[T, K]`` int64 experts of the whole module, -1 for a dropped choice.
            weights: ``[T, K]`` float32.
            choices_per_expert: ``[E]`` int64 how often ``index`` names each expert.
        """

    @abstractmethod
    def send_again(self, rows: Tensor, handle: Any) -> Tensor:
        """Send other rows ``[T, H]`` along the route of an earlier call, ``[U, H]``."""

    @abstractmethod
    def bring_back(self, rows: Tensor, weights: Tensor | None, handle: Any) -> tuple[Tensor, Tensor | None]:
        """Sum the rows of each token over the ranks that it visited.

        Args:
            rows: ``[U, H]`` in the order of :attr:`Received.rows`.
            weights: ``[U, K]`` float32, summed alike; ``None`` where they are not wanted.
            handle: :attr:`Received.handle`.

        Returns:
            ``[T, H]``, exact zeros for a token that went nowhere, and ``[T, K]`` or ``None``.
        """


@dataclass(frozen=True)
class Journey:
    """One layer's way out, which :meth:`combine` goes back."""

    transport: Transport
    handle: Any
    local: Routing

    def combine(self, expert_rows: Tensor) -> Tensor:
        """Add up the rows of each visit here, and those of each token where it came from. Collective.

        Args:
            expert_rows: ``[R, H]`` sorted by local expert, routing weights applied.

        Returns:
            ``[T, H]``.
        """
        return _BringBack.apply(rows_to_tokens(expert_rows, self.local), self.transport, self.handle)


def dispatch_through(
    transport: Transport, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, num_experts: int
) -> Dispatched:
    """Send tokens to the ranks of their experts, and copy those received to the experts of this rank. Collective.

    Args:
        transport: What moves them.
        hidden_states: ``[T, H]``.
        top_k_index: ``[T, K]`` int64; -1 drops the choice.
        top_k_weights: ``[T, K]``.
        num_experts: Experts of the whole module.

    Returns:
        The rows of this rank's experts; its ``state`` is a :class:`Journey`.
    """
    arrival: list[Received] = []
    chosen = count_experts(top_k_index, num_experts)[1:]
    rows, weights = _Send.apply(hidden_states, top_k_weights.float(), (top_k_index, chosen), transport, arrival)
    (received,) = arrival
    order = sort_choices(received.index)
    host = received.tokens_per_expert_host
    local = make_routing(received.index, order, received.tokens_per_expert, sum(host))
    return Dispatched(
        rows=tokens_to_rows(rows, local),
        row_weights=weights.reshape(-1).index_select(0, local.order),
        tokens_per_expert=received.tokens_per_expert,
        tokens_per_expert_host=host,
        choices_per_expert=chosen,
        state=Journey(transport, received.handle, local),
    )


class _Send(torch.autograd.Function):
    """Tokens with their weights. One node, so that its collectives keep one order on every rank."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weights: Tensor,
        choices: tuple[Tensor, Tensor],
        transport: Transport,
        arrival: list[Received],
    ) -> tuple[Tensor, Tensor]:
        index, per_expert = choices
        received = transport.send(rows, index, weights, per_expert)
        arrival.append(received)
        ctx.transport, ctx.handle = transport, received.handle
        return received.rows, received.weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_rows: Tensor, grad_weights: Tensor) -> tuple[Tensor | None, ...]:
        # Gradients that autograd does not have arrive as zeros, so no rank ever skips this.
        grad_rows, grad = ctx.transport.bring_back(grad_rows, grad_weights, ctx.handle)
        return grad_rows, grad, None, None, None


class _BringBack(torch.autograd.Function):
    """Rows back to where their tokens came from."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, transport: Transport, handle: Any) -> Tensor:
        ctx.transport, ctx.handle = transport, handle
        return transport.bring_back(rows, None, handle)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.transport.send_again(grad, ctx.handle), None, None
