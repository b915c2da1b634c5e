"""The reference dispatcher: ``torch.distributed`` all-to-all, on gloo and on NCCL."""

from typing import Any, Literal

from torch import Tensor
from torch.distributed import ProcessGroup
from typing_extensions import override

from lightning_moe.dispatch.base import DispatcherCaps
from lightning_moe.dispatch.exchange import ExchangeTransport
from lightning_moe.dispatch.once_per_choice import OncePerChoice
from lightning_moe.dispatch.once_per_rank import OncePerRank
from lightning_moe.dispatch.transport import TransportDispatcher


class AllToAllDispatcher(TransportDispatcher):
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
        self._transports: tuple[OncePerChoice, OncePerRank] | None = None

    @override
    def setup(self, group: ProcessGroup | None, *, num_experts: int, **module: Any) -> None:
        super().setup(group, num_experts=num_experts, **module)
        if group is not None:
            self._transports = OncePerChoice(group, num_experts), OncePerRank(group, num_experts)

    @override
    def transport_for(self, hidden_states: Tensor, top_k: int) -> ExchangeTransport:
        if self._transports is None:
            raise RuntimeError("dispatcher='all_to_all' was set up without a process group; 'local' needs none")
        each, once = self._transports
        if self.deduplicate != "auto":
            return once if self.deduplicate else each
        # What moves fewer bytes. The same on every rank: it does not depend on the routing. Of K choices that fall on
        # N ranks alike, one rank is missed by all with probability (1 - 1/N)^K.
        visits = each.num_ranks * (1 - (1 - 1 / each.num_ranks) ** top_k)
        row = hidden_states.shape[1] * hidden_states.element_size()
        return once if visits * (row + once.bytes_beside(top_k)) < top_k * (row + each.bytes_beside(top_k)) else each
