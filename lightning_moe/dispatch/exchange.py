"""What the transports over ``all_to_all_single`` have in common."""

from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_moe.dispatch.collectives import start_all_to_all_rows
from lightning_moe.dispatch.transport import Transport
from lightning_moe.in_flight import InFlight
from lightning_moe.mesh import experts_per_rank


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

    def start(self, rows: Tensor, receive: list[int], send: list[int], asynchronous: bool) -> InFlight[Tensor]:
        """Send consecutive rows to each rank, and receive theirs."""
        return start_all_to_all_rows(rows, receive, send, self.group, asynchronous)

    def elsewhere(self, send: list[int]) -> int:
        """Of the rows that go to each rank, those that leave this one."""
        return sum(send) - send[self.group.rank()]
