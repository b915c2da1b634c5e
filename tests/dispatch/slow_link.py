"""An all-to-all over a link of a given speed, to see what travels beside a computation and what is waited for."""

import time
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup
from typing_extensions import override

from lightning_moe.dispatch.all_to_all import AllToAllDispatcher
from lightning_moe.dispatch.exchange import ExchangeTransport
from lightning_moe.dispatch.once_per_choice import OncePerChoice
from lightning_moe.dispatch.once_per_rank import OncePerRank
from lightning_moe.in_flight import InFlight


class Link:
    """Carries one message after the other.

    Args:
        bytes_per_second: Its speed; ``None`` for one that costs nothing.
    """

    def __init__(self, bytes_per_second: float | None) -> None:
        self.bytes_per_second = bytes_per_second
        self._free_at = 0.0

    def carry(self, num_bytes: int, flight: InFlight[Tensor], asynchronous: bool) -> InFlight[Tensor]:
        """Let a message arrive when the link has carried it."""
        if self.bytes_per_second is None:
            return flight
        self._free_at = max(self._free_at, time.perf_counter()) + num_bytes / self.bytes_per_second
        arrives_at = self._free_at

        def wait(rows: Tensor) -> Tensor:
            time.sleep(max(0.0, arrives_at - time.perf_counter()))
            return rows

        late = flight.then(wait)
        if asynchronous:
            return late
        rows = late.wait()
        return InFlight(lambda: rows)


class _OnALink(ExchangeTransport):
    link: Link

    @override
    def start(self, rows: Tensor, receive: list[int], send: list[int], asynchronous: bool) -> InFlight[Tensor]:
        row = rows[:1].numel() * rows.element_size()
        return self.link.carry(
            row * self.elsewhere(send), super().start(rows, receive, send, asynchronous), asynchronous
        )


class _EachOnALink(_OnALink, OncePerChoice):
    pass


class _OnceOnALink(_OnALink, OncePerRank):
    pass


class SlowLinkDispatcher(AllToAllDispatcher):
    """``all_to_all`` whose rows to other ranks share one link.

    Args:
        link: The link.
        deduplicate: As that of :class:`AllToAllDispatcher`.
    """

    name = "slow_link"

    def __init__(self, link: Link, deduplicate: Any = "auto") -> None:
        super().__init__(deduplicate)
        self.link = link

    @override
    def setup(self, group: ProcessGroup | None, *, num_experts: int, **module: Any) -> None:
        super().setup(group, num_experts=num_experts, **module)
        if group is not None:
            self._transports = _EachOnALink(group, num_experts), _OnceOnALink(group, num_experts)
            for transport in self._transports:
                transport.link = self.link
