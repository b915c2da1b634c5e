"""The all-to-all as a transport: a token goes once to each rank that holds one of its experts."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from lightning_moe.dispatch.collectives import exchange_tables
from lightning_moe.dispatch.exchange import ExchangeTransport, Route
from lightning_moe.dispatch.permute import Routing, rows_to_tokens
from lightning_moe.dispatch.transport import Received, local_routing
from lightning_moe.in_flight import InFlight


@dataclass(frozen=True)
class VisitRoute(Route):
    """Which rows travel; each visit of a token has a slot of its own in the order.

    Attributes:
        rank_of_row: ``[S]`` int64 rank that each row goes to.
        tokens_per_expert: ``[E_local]`` int64 choices of each expert of this rank.
    """

    rank_of_row: Tensor
    tokens_per_expert: Tensor


class OncePerRank(ExchangeTransport):
    """Moves tokens with ``all_to_all_single``, with an expert and a weight for each choice."""

    @override
    def bytes_beside(self, top_k: int) -> int:
        return 8 * top_k  # an int32 expert and a float32 weight

    @override
    def plan(self, index: Sequence[Tensor], choices_per_expert: Sequence[Tensor]) -> list[VisitRoute]:
        goes = [self._goes(choices) for choices in index]
        visits = torch.stack([goes_there.sum(0) for goes_there in goes])
        table = torch.cat((self.by_rank(choices_per_expert), visits.unsqueeze(2)), dim=2)
        sent, told, told_on_device = exchange_tables(table, self.group)
        routes = []
        for call, choices in enumerate(index):
            send, receive = ([line[-1] for line in lines[call]] for lines in (sent, told))
            order, rank_of_row = order_visits(goes[call], sum(send), choices.shape[1])
            tokens_per_expert = told_on_device[call, :, : self.num_local].sum(0)
            routes.append(
                VisitRoute(send, receive, order, self.of_own_experts(told[call]), rank_of_row, tokens_per_expert)
            )
        return routes

    @override
    def send(
        self,
        rows: Tensor,
        index: Tensor,
        weights: Tensor,
        choices_per_expert: Tensor,
        plan: VisitRoute,
        asynchronous: bool,
    ) -> InFlight[Received]:
        arriving = self.send_again(rows, plan, asynchronous)
        token = plan.order.token_of_row
        here = self._rank_of(index)[token] == plan.rank_of_row.unsqueeze(1)
        # Which of its choices a row is for: the number of the expert on the rank it goes to, -1 for other ranks'.
        local = torch.where(here, index[token] % self.block, -1).to(torch.int32)
        # One message for both: an int32 and a float32 are as wide.
        choices = torch.stack((torch.where(here, weights[token], 0.0).view(torch.int32), local), dim=1)
        arriving_choices = self.start(choices, plan.receive, plan.send, asynchronous)

        def finish() -> Received:
            came = arriving_choices.wait()
            return Received(
                rows=arriving.wait(),
                weights=came[:, 0].contiguous().view(torch.float32),
                local=local_routing(came[:, 1].long(), plan.tokens_per_expert, plan.per_expert),
                tokens_per_expert_host=plan.per_expert,
                handle=plan,
                rows_sent=self.elsewhere(plan.send),
            )

        return InFlight(finish)

    @override
    def bring_back(
        self, rows: Tensor, weights: Tensor | None, handle: Route, asynchronous: bool
    ) -> InFlight[tuple[Tensor, Tensor | None]]:
        parts = [rows] if weights is None else [rows, weights]
        flights = [self.start_home(part, handle, asynchronous) for part in parts]

        def finish() -> tuple[Tensor, Tensor | None]:
            home = [rows_to_tokens(flight.wait(), handle.order) for flight in flights]
            return home[0], None if weights is None else home[1]

        return InFlight(finish)

    def _rank_of(self, index: Tensor) -> Tensor:
        return torch.div(index, self.block, rounding_mode="floor")

    def _goes(self, index: Tensor) -> Tensor:
        """``[T, ranks]`` bool: which token visits which rank."""
        goes = index.new_zeros((index.shape[0], self.num_ranks + 1), dtype=torch.bool)
        return goes.scatter_(1, self._rank_of(index) + 1, True)[:, 1:]  # column 0 takes the dropped choices


def order_visits(goes: Tensor, num_rows: int, top_k: int) -> tuple[Routing, Tensor]:
    """List the rows to send, by destination.

    Args:
        goes: ``[T, ranks]`` bool: which token visits which rank.
        num_rows: Its sum, known on the host.
        top_k: ``K``, which bounds the visits of a token.

    Returns:
        The order as positions in ``[T * slots]``, each visit of a token in a slot of its own; and the rank of each row.
    """
    num_tokens, num_ranks = goes.shape
    slots = min(top_k, num_ranks)
    by_rank = goes.t().reshape(-1)
    # Stable, so that the rows of a rank keep the order of their tokens. nonzero() would wait for the device.
    flat = torch.argsort(by_rank.logical_not().to(torch.uint8), stable=True)[:num_rows]
    rank, token = torch.div(flat, max(num_tokens, 1), rounding_mode="floor"), flat % max(num_tokens, 1)
    slot = (goes.cumsum(1) - 1)[token, rank]
    order = Routing(token * slots + slot, goes.sum(0), num_tokens, slots, complete=num_rows == num_tokens * slots)
    return order, rank
