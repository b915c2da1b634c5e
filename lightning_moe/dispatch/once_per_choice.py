"""The all-to-all as a transport: a token goes to a rank once for each of its experts there."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from lightning_moe.dispatch.collectives import exchange_tables
from lightning_moe.dispatch.exchange import ExchangeTransport, Route
from lightning_moe.dispatch.permute import (
    Routing,
    choices_to_rows,
    make_routing,
    rows_to_tokens,
    sort_choices,
)
from lightning_moe.dispatch.transport import Received
from lightning_moe.in_flight import InFlight


@dataclass(frozen=True)
class ChoiceRoute(Route):
    """Which rows travel, each for one expert.

    Attributes:
        local: The order by expert of the rows that came.
    """

    local: Routing


class OncePerChoice(ExchangeTransport):
    """Moves choices with ``all_to_all_single``, each as a visit of its own."""

    @override
    def bytes_beside(self, top_k: int) -> int:
        return 4  # a float32 weight

    @override
    def plan(self, index: Sequence[Tensor], choices_per_expert: Sequence[Tensor]) -> list[ChoiceRoute]:
        # Sorting needs nothing from the host and so comes before the wait.
        order = [sort_choices(choices) for choices in index]
        sent, told, told_on_device = exchange_tables(self.by_rank(choices_per_expert), self.group)
        routes = []
        for call, choices in enumerate(index):
            send, receive = ([sum(line) for line in lines[call]] for lines in (sent, told))
            counts, num_rows = told_on_device[call, :, : self.num_local], sum(receive)
            routes.append(
                ChoiceRoute(
                    send,
                    receive,
                    make_routing(choices, order[call], choices_per_expert[call], sum(send)),
                    self.of_own_experts(told[call]),
                    Routing(expert_major_order(counts, num_rows), counts.sum(0), num_rows, 1, complete=True),
                )
            )
        return routes

    @override
    def send(
        self,
        rows: Tensor,
        index: Tensor,
        weights: Tensor,
        choices_per_expert: Tensor,
        plan: ChoiceRoute,
        asynchronous: bool,
    ) -> InFlight[Received]:
        arriving = self.send_again(rows, plan, asynchronous)
        weights = choices_to_rows(weights, plan.order)
        arriving_weights = self.start(weights, plan.receive, plan.send, asynchronous)
        return InFlight(
            lambda: Received(
                rows=arriving.wait(),
                weights=arriving_weights.wait().unsqueeze(1),
                local=plan.local,
                tokens_per_expert_host=plan.per_expert,
                handle=plan,
                rows_sent=self.elsewhere(plan.send),
            )
        )

    @override
    def bring_back(
        self, rows: Tensor, weights: Tensor | None, handle: Route, asynchronous: bool
    ) -> InFlight[tuple[Tensor, Tensor | None]]:
        rows_home = self.start_home(rows, handle, asynchronous)
        weights_home = None if weights is None else self.start_home(weights.reshape(-1), handle, asynchronous)

        def finish() -> tuple[Tensor, Tensor | None]:
            routing = handle.order
            tokens = rows_to_tokens(rows_home.wait(), routing)
            if weights_home is None:
                return tokens, None
            back = weights_home.wait()
            assert routing.order is not None
            choices = back.new_zeros(routing.num_tokens * routing.top_k)
            choices[routing.order] = back
            return tokens, choices.view(routing.num_tokens, routing.top_k)

        return InFlight(finish)


def expert_major_order(counts: Tensor, num_rows: int) -> Tensor | None:
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
