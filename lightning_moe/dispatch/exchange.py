"""What the transports over ``all_to_all_single`` have in common."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from typing_extensions import override

from lightning_moe.dispatch.collectives import start_all_to_all_rows
from lightning_moe.dispatch.permute import Routing, tokens_to_rows
from lightning_moe.dispatch.transport import Transport
from lightning_moe.in_flight import InFlight
from lightning_moe.mesh import experts_per_rank


@dataclass(frozen=True)
class Route:
    """Which rows travel.

    Attributes:
        send: Rows that go to each rank.
        receive: Rows that come from each rank.
        order: The order of the rows sent, by rank.
        per_expert: Choices of each expert of this rank.
    """

    send: list[int]
    receive: list[int]
    order: Routing
    per_expert: list[int]


class ExchangeTransport(Transport):
    """Moves rows with ``all_to_all_single``. A plan waits for the host once, to learn how many rows come.

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
    def send_again(self, rows: Tensor, handle: Route, asynchronous: bool) -> InFlight[Tensor]:
        return self.start(tokens_to_rows(rows, handle.order), handle.receive, handle.send, asynchronous)

    def start(self, rows: Tensor, receive: list[int], send: list[int], asynchronous: bool) -> InFlight[Tensor]:
        """Send consecutive rows to each rank, and receive theirs."""
        return start_all_to_all_rows(rows, receive, send, self.group, asynchronous)

    def start_home(self, rows: Tensor, route: Route, asynchronous: bool) -> InFlight[Tensor]:
        """Send rows that came back to where they came from, and receive those that this rank has sent."""
        return self.start(rows, route.send, route.receive, asynchronous)

    def by_rank(self, choices_per_expert: Sequence[Tensor]) -> Tensor:
        """``[N, ranks, block]`` int64 choices of the experts of each rank, of the ``[E]`` of each of ``N`` calls."""
        table = choices_per_expert[0].new_zeros(len(choices_per_expert), self.num_ranks * self.block)
        table[:, : self.num_experts] = torch.stack(tuple(choices_per_expert))
        return table.view(-1, self.num_ranks, self.block)

    def of_own_experts(self, told: Sequence[Sequence[Any]]) -> list[int]:
        """The choices of each expert of this rank, from what each rank has told of one call."""
        return [sum(counts) for counts in zip(*told, strict=True)][: self.num_local]

    def elsewhere(self, send: list[int]) -> int:
        """Of the rows that go to each rank, those that leave this one."""
        return sum(send) - send[self.group.rank()]
