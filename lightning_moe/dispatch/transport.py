"""What moves tokens between ranks, and the one place where autograd meets it.

A transport moves tokens to the ranks that hold their experts, and sums on the way back. Copying a token to its experts
on the rank, and adding up what they return, is the same for all of them and happens here. The backward pass of a
dispatch is the way back, and that of the way back a dispatch along the same route.

Each way is two nodes of the graph: one where the rows leave and one where they arrive. What is computed between them in
the forward pass runs while rows travel, and its backward pass while their gradients do: autograd walks the nodes in the
reverse order, on every rank alike.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import override

from lightning_moe.dispatch.base import Call, Dispatched, Dispatcher
from lightning_moe.dispatch.permute import (
    Routing,
    choices_to_rows,
    count_experts,
    make_routing,
    rows_to_tokens,
    sort_choices,
    tokens_to_rows,
)
from lightning_moe.in_flight import InFlight, kept, kept_flight


class Received(NamedTuple):
    """The tokens that came to this rank.

    Attributes:
        rows: ``[U, H]``.
        weights: ``[U, K]`` float32, 0 for choices of other ranks and dropped ones.
        local: Which of the ``[U, K]`` choices are for experts of this rank, sorted by expert.
        tokens_per_expert_host: Choices of each expert of this rank, on the host.
        handle: The route, for the other calls.
        rows_sent: Rows that this rank has sent to others; 0 where that is not known on the host.
    """

    rows: Tensor
    weights: Tensor
    local: Routing
    tokens_per_expert_host: list[int]
    handle: Any
    rows_sent: int = 0


def local_routing(index: Tensor, tokens_per_expert: Tensor, tokens_per_expert_host: list[int]) -> Routing:
    """Sort the choices that came to this rank by expert.

    Args:
        index: ``[U, K]`` int64 expert of this rank for each choice, -1 for choices of other ranks and dropped ones.
        tokens_per_expert: ``[E_local]`` int64 choices of each expert.
        tokens_per_expert_host: The same numbers on the host.
    """
    return make_routing(index, sort_choices(index), tokens_per_expert, sum(tokens_per_expert_host))


class Transport(ABC):
    """Moves tokens between the ranks of one group. Every call is collective; none is differentiable.

    ``asynchronous`` lets this rank go on while rows travel, where the transport can; what it returns is to be waited
    for in either case.
    """

    def plan(self, index: Sequence[Tensor], choices_per_expert: Sequence[Tensor]) -> Sequence[Any]:
        """Exchange what several calls of :meth:`send` have to know, all at once.

        Args:
            index: The ``[T, K]`` int64 experts of each call.
            choices_per_expert: ``[E]`` int64 how often each names each expert.
        """
        return [None] * len(index)

    @abstractmethod
    def send(
        self, rows: Tensor, index: Tensor, weights: Tensor, choices_per_expert: Tensor, plan: Any, asynchronous: bool
    ) -> InFlight[Received]:
        """Send tokens to the ranks that hold their experts.

        Args:
            rows: ``[T, H]``; ``T`` may be 0 and may differ between ranks.
            index: ``[T, K]`` int64 experts of the whole module, -1 for a dropped choice.
            weights: ``[T, K]`` float32.
            choices_per_expert: ``[E]`` int64 how often ``index`` names each expert.
            plan: What :meth:`plan` made of it.
            asynchronous: Do not wait for the rows.
        """

    @abstractmethod
    def send_again(self, rows: Tensor, handle: Any, asynchronous: bool) -> InFlight[Tensor]:
        """Send other rows ``[T, H]`` along the route of an earlier call, ``[U, H]``."""

    @abstractmethod
    def bring_back(
        self, rows: Tensor, weights: Tensor | None, handle: Any, asynchronous: bool
    ) -> InFlight[tuple[Tensor, Tensor | None]]:
        """Sum the rows of each token over the ranks that it visited.

        Args:
            rows: ``[U, H]`` in the order of :attr:`Received.rows`.
            weights: ``[U, K]`` float32, summed alike; ``None`` where they are not wanted.
            handle: :attr:`Received.handle`.
            asynchronous: Do not wait for the rows.

        Returns:
            ``[T, H]``, exact zeros for a token that went nowhere, and ``[T, K]`` or ``None``.
        """

    def bytes_beside(self, top_k: int) -> int:
        """Bytes that travel with a row of one of ``top_k`` choices or more."""
        return 0


class TransportDispatcher(Dispatcher):
    """A dispatcher over a transport."""

    @abstractmethod
    def transport_for(self, hidden_states: Tensor, top_k: int) -> Transport:
        """The transport for a call, the same on every rank.

        Raises:
            ValueError: If the call cannot be served.
            RuntimeError: If the dispatcher was not set up.
        """

    @override
    def dispatch(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Dispatched:
        (flight,) = self._start([(hidden_states, top_k_index, top_k_weights)], asynchronous=False)
        return flight.wait()

    @override
    def start(self, calls: Sequence[Call]) -> list[InFlight[Dispatched]]:
        return self._start(calls, asynchronous=True)

    def _start(self, calls: Sequence[Call], asynchronous: bool) -> list[InFlight[Dispatched]]:
        hidden, index, _ = calls[0]
        transport = self.transport_for(hidden, index.shape[1])
        indices = [index for _, index, _ in calls]
        chosen = [count_experts(index, self.num_experts)[1:] for index in indices]
        plans = kept(lambda: transport.plan(indices, chosen))
        return [
            self._send(_Way(transport, asynchronous), call, counts, plan)
            for call, counts, plan in zip(calls, chosen, plans, strict=True)
        ]

    def _send(self, way: "_Way", call: Call, chosen: Tensor, plan: Any) -> InFlight[Dispatched]:
        hidden, index, weights = call
        link = _Leave.apply(hidden, weights.float(), (index, chosen, plan), way)

        def arrive() -> Dispatched:
            arrival: list[Received] = []
            rows, row_weights = _Arrive.apply(link, way, arrival)
            (received,) = arrival
            local = received.local
            self.rows_sent += received.rows_sent
            row_bytes = hidden.shape[1] * hidden.element_size() + way.transport.bytes_beside(index.shape[1])
            self.bytes_sent += received.rows_sent * row_bytes
            return Dispatched(
                rows=tokens_to_rows(rows, local),
                row_weights=choices_to_rows(row_weights, local),
                tokens_per_expert=local.tokens_per_expert,
                tokens_per_expert_host=received.tokens_per_expert_host,
                choices_per_expert=chosen,
                state=Journey(way, local),
            )

        return InFlight(arrive)

    @override
    def combine(self, expert_rows: Tensor, state: Any) -> Tensor:
        journey: Journey = state
        return journey.back(expert_rows, asynchronous=False).wait()

    @override
    def start_combine(self, expert_rows: Tensor, state: Any) -> InFlight[Tensor]:
        journey: Journey = state
        return journey.back(expert_rows, asynchronous=True)


class _Way:
    """One way between ranks and its route, which its backward pass goes the other way round."""

    def __init__(self, transport: Transport, asynchronous: bool, handle: Any = None) -> None:
        self.transport = transport
        self.asynchronous = asynchronous
        self.handle = handle
        self.flight: InFlight[Any] | None = None

    def arrive(self) -> Any:
        """Wait for what is in flight, and forget it."""
        flight, self.flight = self.flight, None
        assert flight is not None
        return flight.wait()


@dataclass(frozen=True)
class Journey:
    """One layer's way out, which :meth:`back` goes back."""

    way: _Way
    local: Routing

    def back(self, expert_rows: Tensor, asynchronous: bool) -> InFlight[Tensor]:
        """Add up the rows of each visit here, and those of each token where it came from. Collective.

        Args:
            expert_rows: ``[R, H]`` sorted by local expert, routing weights applied.
            asynchronous: Do not wait for the rows.

        Returns:
            ``[T, H]``.
        """
        back = _Way(self.way.transport, asynchronous, self.way.handle)
        link = _LeaveBack.apply(rows_to_tokens(expert_rows, self.local), back)
        return InFlight(lambda: _ArriveBack.apply(link, back))


# The two nodes of a way are linked by an empty tensor: what is in flight must not be seen by autograd, which may look
# at any tensor that it passes on (anomaly detection, hooks). A gradient that autograd does not have arrives as zeros,
# so no rank ever skips a call.


class _Leave(torch.autograd.Function):
    """Tokens and their weights leave; their gradients arrive."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, choices: tuple[Tensor, Tensor, Any], way: _Way) -> Tensor:
        index, per_expert, plan = choices
        transport, asynchronous = way.transport, way.asynchronous
        way.flight = kept_flight(lambda: transport.send(rows, index, weights, per_expert, plan, asynchronous))
        ctx.way = way
        return rows.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        grad_rows, grad_weights = ctx.way.arrive()
        return grad_rows, grad_weights, None, None


class _Arrive(torch.autograd.Function):
    """Tokens and their weights arrive; their gradients leave."""

    @staticmethod
    def forward(ctx: Any, link: Tensor, way: _Way, arrival: list[Received]) -> tuple[Tensor, Tensor]:
        received: Received = way.arrive()
        arrival.append(received)
        way.handle = received.handle
        ctx.way = way
        return received.rows, received.weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_rows: Tensor, grad_weights: Tensor) -> tuple[Tensor, None, None]:
        way: _Way = ctx.way
        way.flight = way.transport.bring_back(grad_rows, grad_weights, way.handle, way.asynchronous)
        return grad_rows.new_empty(0), None, None


class _LeaveBack(torch.autograd.Function):
    """Rows leave for where their tokens came from; their gradients arrive."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, way: _Way) -> Tensor:
        transport, handle, asynchronous = way.transport, way.handle, way.asynchronous
        way.flight = kept_flight(lambda: transport.bring_back(rows, None, handle, asynchronous))
        ctx.way = way
        return rows.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.way.arrive(), None


class _ArriveBack(torch.autograd.Function):
    """Rows arrive where their tokens came from; their gradients leave."""

    @staticmethod
    def forward(ctx: Any, link: Tensor, way: _Way) -> Tensor:
        ctx.way = way
        rows: Tensor = way.arrive()[0]
        return rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        way: _Way = ctx.way
        way.flight = way.transport.send_again(grad, way.handle, way.asynchronous)
        return grad.new_empty(0), None
