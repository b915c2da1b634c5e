"""The reference dispatcher: ``torch.distributed`` all-to-all, on gloo and on NCCL."""

from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from typing_extensions import override

from lightning_moe.dispatch.base import Dispatched, Dispatcher, DispatcherCaps
from lightning_moe.dispatch.collectives import all_to_all_rows
from lightning_moe.dispatch.once_per_rank import OncePerRank
from lightning_moe.dispatch.permute import (
    Routing,
    count_experts,
    make_routing,
    rows_to_tokens,
    sort_choices,
    tokens_to_rows,
)
from lightning_moe.dispatch.transport import dispatch_through

# What travels with a row: the float32 weight of its choice, or for a row of several choices an int32 expert with each.
_BYTES_A_WEIGHT, _BYTES_A_CHOICE = 4, 8


@dataclass(frozen=True)
class _Exchange:
    """One layer's traffic: how many rows go where, and how received rows become sorted by expert.

    Attributes:
        routing: The order of the rows on the sending side.
        group: The expert-parallel ranks.
        send: Rows that go to each rank.
        receive: Rows that come from each rank.
        to_expert_major: ``[R]`` int64 position among the received rows of each row sorted by expert; ``None`` where
            they arrive sorted.
    """

    routing: Routing
    group: ProcessGroup
    send: list[int]
    receive: list[int]
    to_expert_major: Tensor | None

    def combine(self, expert_rows: Tensor) -> Tensor:
        """Send every row back, and add up the choices of each token."""
        return rows_to_tokens(_ReturnRows.apply(expert_rows, self), self.routing)


class _SendRows(torch.autograd.Function):
    """Rows and their weights to the experts. One node, so that both collectives keep one order on every rank."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, exchange: _Exchange) -> tuple[Tensor, Tensor]:
        ctx.exchange = exchange
        rows = all_to_all_rows(rows, exchange.receive, exchange.send, exchange.group)
        weights = all_to_all_rows(weights, exchange.receive, exchange.send, exchange.group)
        if exchange.to_expert_major is not None:
            rows, weights = rows[exchange.to_expert_major], weights[exchange.to_expert_major]
        return rows, weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_rows: Tensor, grad_weights: Tensor) -> tuple[Tensor, Tensor, None]:
        # Gradients that autograd does not have arrive as zeros, so no rank ever skips these two collectives.
        exchange: _Exchange = ctx.exchange
        grad_rows, grad_weights = _to_source_order(grad_rows, exchange), _to_source_order(grad_weights, exchange)
        grad_rows = all_to_all_rows(grad_rows, exchange.send, exchange.receive, exchange.group)
        grad_weights = all_to_all_rows(grad_weights, exchange.send, exchange.receive, exchange.group)
        return grad_rows, grad_weights, None


class _ReturnRows(torch.autograd.Function):
    """Rows back to the ranks that sent them."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange
        return all_to_all_rows(_to_source_order(rows, exchange), exchange.send, exchange.receive, exchange.group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        exchange: _Exchange = ctx.exchange
        grad = all_to_all_rows(grad, exchange.receive, exchange.send, exchange.group)
        return grad if exchange.to_expert_major is None else grad[exchange.to_expert_major], None


def _to_source_order(rows: Tensor, exchange: _Exchange) -> Tensor:
    """Undo the sort by expert: back to the order in which the rows were received."""
    if exchange.to_expert_major is None:
        return rows
    by_source = torch.empty_like(rows)
    by_source[exchange.to_expert_major] = rows
    return by_source


def _expert_major_order(counts: Tensor, num_rows: int) -> Tensor | None:
    """Positions that turn rows sorted by (source rank, local expert) into rows sorted by (local expert, source rank).

    Args:
        counts: ``[ranks, E_local]`` int64 rows from each rank for each local expert.
        num_rows: The sum of ``counts``, known on the host.

    Returns:
        ``[R]`` int64, or ``None`` where the order is the same.
    """
    num_ranks, num_local = counts.shape
    if num_ranks == 1 or num_local <= 1:
        return None
    # The rows form num_ranks * num_local runs. Run (r, e) starts at its exclusive prefix sum; listing the starts by
    # expert and counting up inside each run gives the positions without a sort.
    lengths = counts.reshape(-1)
    starts = (lengths.cumsum(0) - lengths).view(num_ranks, num_local).t().reshape(-1)
    lengths = counts.t().reshape(-1)
    begins = lengths.cumsum(0) - lengths
    offset = (starts - begins).repeat_interleave(lengths, output_size=num_rows)
    return torch.arange(num_rows, device=counts.device) + offset


class AllToAllDispatcher(Dispatcher):
    """Exchanges rows with ``all_to_all_single``: no padding, nothing dropped.

    A layer costs one exchange of counts and one wait for the host in the forward pass, and none in the backward pass.

    Args:
        deduplicate: Send a token once to each rank that holds one of its experts, rather than once for each of them;
            ``"auto"`` does what moves fewer bytes under uniform routing.

    Raises:
        ValueError: If ``deduplicate`` is something else.
    """

    name = "all_to_all"
    caps = DispatcherCaps()

    def __init__(self, deduplicate: bool | Literal["auto"] = "auto") -> None:
        if deduplicate not in (True, False, "auto"):
            raise ValueError(f"deduplicate={deduplicate!r} is not known; allowed are True, False and 'auto'")
        self.deduplicate = deduplicate
        self._transport: OncePerRank | None = None

    @override
    def setup(self, group: ProcessGroup | None, *, num_experts: int, **module: Any) -> None:
        super().setup(group, num_experts=num_experts, **module)
        self._transport = None if group is None else OncePerRank(group, num_experts)

    @override
    def dispatch(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Dispatched:
        if self.group is None:
            raise RuntimeError("dispatcher='all_to_all' was set up without a process group; 'local' needs none")
        if self._once_per_rank(hidden_states, top_k_index.shape[1]):
            assert self._transport is not None
            dispatched = dispatch_through(self._transport, hidden_states, top_k_index, top_k_weights, self.num_experts)
            self._count(dispatched.state.handle.send, hidden_states, _BYTES_A_CHOICE * top_k_index.shape[1])
            return dispatched
        num_ranks, num_local = self.group.size(), self.num_local_experts
        sent = count_experts(top_k_index, self.num_experts)[1:]
        received = all_to_all_rows(sent, [num_local] * num_ranks, list(self.experts_per_rank), self.group)
        sorted_choices = sort_choices(top_k_index)
        # The one host synchronisation of the layer brings both halves.
        on_host = iter(torch.cat((sent, received)).tolist())
        send = [sum(islice(on_host, experts)) for experts in self.experts_per_rank]
        received_host = [list(islice(on_host, num_local)) for _ in range(num_ranks)]
        receive = [sum(row) for row in received_host]
        routing = make_routing(top_k_index, sorted_choices, sent, sum(send))
        received = received.view(num_ranks, num_local)
        exchange = _Exchange(routing, self.group, send, receive, _expert_major_order(received, sum(receive)))
        rows, row_weights = _SendRows.apply(
            tokens_to_rows(hidden_states, routing),
            top_k_weights.reshape(-1).float().index_select(0, routing.order),
            exchange,
        )
        self._count(send, hidden_states, _BYTES_A_WEIGHT)
        return Dispatched(
            rows=rows,
            row_weights=row_weights,
            tokens_per_expert=received.sum(dim=0),
            tokens_per_expert_host=[sum(column) for column in zip(*received_host, strict=True)],
            choices_per_expert=sent,
            state=exchange,
        )

    @override
    def combine(self, expert_rows: Tensor, state: Any) -> Tensor:
        return state.combine(expert_rows)

    def _once_per_rank(self, hidden_states: Tensor, top_k: int) -> bool:
        """Whether to send a token once to a rank. The same on every rank: it does not depend on the routing."""
        if self.deduplicate != "auto":
            return bool(self.deduplicate)
        assert self.group is not None
        ranks = self.group.size()
        # Of K choices that fall on N ranks alike, one rank is missed by all with probability (1 - 1/N)^K.
        visits = ranks * (1 - (1 - 1 / ranks) ** top_k)
        row = hidden_states.shape[1] * hidden_states.element_size()
        return visits * (row + _BYTES_A_CHOICE * top_k) < top_k * (row + _BYTES_A_WEIGHT)

    def _count(self, send: list[int], hidden_states: Tensor, bytes_beside: int) -> None:
        assert self.group is not None
        rows = sum(send) - send[self.group.rank()]
        self.rows_sent += rows
        self.bytes_sent += rows * (hidden_states.shape[1] * hidden_states.element_size() + bytes_beside)
