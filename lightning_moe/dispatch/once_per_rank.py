"""The all-to-all as a transport: a token goes once to each rank that holds one of its experts."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from typing_extensions import override

from lightning_moe.dispatch.collectives import all_to_all_rows
from lightning_moe.dispatch.permute import Routing, rows_to_tokens, tokens_to_rows
from lightning_moe.dispatch.transport import Received, Transport
from lightning_moe.mesh import experts_per_rank


@dataclass(frozen=True)
class Route:
    """Which rows travel.

    Attributes:
        send: Rows that go to each rank.
        receive: Rows that come from each rank.
        visits: The order of the rows sent, by rank and then by token; each visit of a token has a slot of its own.
    """

    send: list[int]
    receive: list[int]
    visits: Routing


class OncePerRank(Transport):
    """Moves tokens with ``all_to_all_single``. A call waits for the host once, to learn how many rows it receives.

    Args:
        group: The expert-parallel ranks.
        num_experts: Experts of the whole module.
    """

    def __init__(self, group: ProcessGroup, num_experts: int) -> None:
        self.group = group
        self.num_experts = num_experts
        self.num_ranks = group.size()
        held = experts_per_rank(num_experts, self.num_ranks)
        self.block = max(held)
        self.num_local = held[group.rank()]

    @override
    def send(self, rows: Tensor, index: Tensor, weights: Tensor, choices_per_expert: Tensor) -> Received:
        rank_of_choice = torch.div(index, self.block, rounding_mode="floor")
        goes = self._goes(rank_of_choice)
        send, by_source, received = self._exchange_counts(choices_per_expert, goes)
        receive = [counts[-1] for counts in by_source]
        visits, rank_of_row = order_visits(goes, sum(send), index.shape[1])
        token = visits.token_of_row
        here = rank_of_choice[token] == rank_of_row.unsqueeze(1)
        # Which of its choices a row is for: the number of the expert on the rank it goes to, -1 for other ranks'.
        local = torch.where(here, index[token] % self.block, -1).to(torch.int32)
        # One message for both: an int32 and a float32 are as wide.
        choices = torch.stack((torch.where(here, weights[token], 0.0).view(torch.int32), local), dim=1)
        route = Route(send, receive, visits)
        arrived = self.send_again(rows, route)
        choices = all_to_all_rows(choices, receive, send, self.group)
        per_expert_host = [sum(counts) for counts in zip(*by_source, strict=True)][: self.num_local]
        return Received(
            rows=arrived,
            index=choices[:, 1].long(),
            weights=choices[:, 0].contiguous().view(torch.float32),
            tokens_per_expert=received[:, : self.num_local].sum(0),
            tokens_per_expert_host=per_expert_host,
            handle=route,
        )

    @override
    def send_again(self, rows: Tensor, handle: Route) -> Tensor:
        return all_to_all_rows(tokens_to_rows(rows, handle.visits), handle.receive, handle.send, self.group)

    @override
    def bring_back(self, rows: Tensor, weights: Tensor | None, handle: Route) -> tuple[Tensor, Tensor | None]:
        def back(received: Tensor) -> Tensor:
            return rows_to_tokens(all_to_all_rows(received, handle.send, handle.receive, self.group), handle.visits)

        return back(rows), None if weights is None else back(weights)

    def _goes(self, rank_of_choice: Tensor) -> Tensor:
        """``[T, ranks]`` bool: which token visits which rank."""
        goes = rank_of_choice.new_zeros((rank_of_choice.shape[0], self.num_ranks + 1), dtype=torch.bool)
        return goes.scatter_(1, rank_of_choice + 1, True)[:, 1:]  # column 0 takes the dropped choices

    def _exchange_counts(self, sent: Tensor, goes: Tensor) -> tuple[list[int], list[list[int]], Tensor]:
        """Tell each rank how many rows it gets for each of its experts, and in all.

        Returns:
            Rows to each rank; for each rank the counts that it sent, its rows in all last; and these as a tensor.
        """
        padded = sent.new_zeros(self.num_ranks * self.block)
        padded[: self.num_experts] = sent
        rows = goes.sum(0)
        table = torch.cat((padded.view(self.num_ranks, self.block), rows.unsqueeze(1)), dim=1)
        each = [1] * self.num_ranks
        received = all_to_all_rows(table, each, each, self.group)
        on_host: list[int] = torch.cat((rows, received.reshape(-1))).tolist()
        send, flat, width = on_host[: self.num_ranks], on_host[self.num_ranks :], self.block + 1
        return send, [flat[start : start + width] for start in range(0, len(flat), width)], received


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
