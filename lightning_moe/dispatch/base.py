"""What a dispatcher is: it moves rows to the ranks that hold their experts, and back."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_moe.in_flight import InFlight, arrived
from lightning_moe.mesh import experts_per_rank

# The arguments of :meth:`Dispatcher.dispatch`.
Call = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class DispatcherCaps:
    """What a dispatcher can do, checked once at set-up.

    Attributes:
        uneven_tokens: Ranks may bring different numbers of tokens to one call.
        uneven_experts: Ranks may hold different numbers of experts.
        host_sync: A call waits for the device once, to learn how many rows it receives.
        expert_major: Rows arrive sorted by local expert without a further permutation.
        deterministic: The same input gives the same bits.
        min_ranks: The smallest group that it supports.
        max_ranks: The largest group that it supports, or ``None`` where there is no limit.
        payload_dtypes: The dtypes that hidden states may have.
        device_types: The device types that it runs on.
    """

    uneven_tokens: bool = True
    uneven_experts: bool = True
    host_sync: bool = True
    expert_major: bool = False
    deterministic: bool = True
    min_ranks: int = 1
    max_ranks: int | None = None
    payload_dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    device_types: tuple[str, ...] = ("cpu", "cuda")


@dataclass
class Dispatched:
    """The rows that the experts of this rank have to compute.

    Attributes:
        rows: ``[R, H]`` in the dtype of the hidden states, sorted by local expert.
        row_weights: ``[R]`` float32 routing weights, differentiable; 0 on padding rows.
        tokens_per_expert: ``[E_local]`` int64 on the device of ``rows``; sums to ``R``, alignment padding included.
        tokens_per_expert_host: The same numbers as a list where the dispatcher knows them on the host anyway.
        choices_per_expert: ``[E]`` int64 choices of this rank's own tokens for each expert of the whole module.
        state: What :meth:`Dispatcher.combine` needs to bring the rows back; opaque to everyone else.
    """

    rows: Tensor
    row_weights: Tensor
    tokens_per_expert: Tensor
    tokens_per_expert_host: list[int] | None
    choices_per_expert: Tensor
    state: Any


class Dispatcher(ABC):
    """Moves rows to the ranks that hold their experts, and brings the results back.

    A dispatcher knows nothing of what an expert computes. Every rank of the group enters :meth:`dispatch` and
    :meth:`combine` once a layer whatever its tokens are, in the forward and in the backward pass.

    One object serves one experts module; :meth:`for_layer` makes it from the object that the strategy holds. Buffers
    that layers share belong in an attribute that the shallow copy carries along.

    Attributes:
        group: The expert-parallel ranks, ``None`` for one rank alone.
        num_experts: Experts of the whole module.
        experts_per_rank: Experts that each rank of the group holds.
        num_local_experts: Experts that this rank holds; may be 0.
        rows_sent: Rows that this object's forward dispatches have sent to other ranks; as many come back.
        bytes_sent: The bytes of those rows and of what travels with them.
    """

    name: str = ""
    caps: DispatcherCaps = DispatcherCaps()

    group: ProcessGroup | None = None
    num_experts: int = 0
    experts_per_rank: Sequence[int] = ()
    num_local_experts: int = 0
    rows_sent: int = 0
    bytes_sent: int = 0

    def for_layer(self) -> Self:
        """Return a dispatcher for one more experts module, sharing communication buffers with this one."""
        return copy.copy(self)

    def setup(
        self,
        group: ProcessGroup | None,
        *,
        num_experts: int,
        hidden_size: int,
        dtype: torch.dtype,
        top_k: int | None = None,
        max_tokens_per_rank: int | None = None,
        alignment: int = 1,
    ) -> None:
        """Prepare for one experts module. Collective and eager: every rank of the group calls it once.

        Args:
            group: The expert-parallel ranks, in the order in which they hold the experts; ``None`` for one rank alone.
            num_experts: Experts of the whole module, divided over the ranks by :func:`experts_per_rank`.
            hidden_size: Width ``H`` of a row.
            dtype: Dtype in which the experts compute, hence that of the rows.
            top_k: Experts a token, where it is known before the first call.
            max_tokens_per_rank: Most tokens that a rank brings to one call, for dispatchers with fixed buffers.
            alignment: The rows of each expert are padded to a multiple of this.

        Raises:
            ValueError: If the dispatcher cannot serve this module on this group.
        """
        size = 1 if group is None else group.size()
        if num_experts % size and not self.caps.uneven_experts:
            raise ValueError(
                f"dispatcher={self.name!r} needs as many experts on each rank, but {num_experts} experts cannot be"
                f" spread evenly over {size} ranks; set dispatcher='all_to_all', or an expert_parallel_size that"
                f" divides {num_experts}"
            )
        if size < self.caps.min_ranks or (self.caps.max_ranks is not None and size > self.caps.max_ranks):
            allowed = f"{self.caps.min_ranks} to {self.caps.max_ranks or 'any number of'}"
            raise ValueError(
                f"dispatcher={self.name!r} supports {allowed} expert-parallel ranks, got {size};"
                f" set dispatcher='auto' or change expert_parallel_size"
            )
        if dtype not in self.caps.payload_dtypes:
            allowed = ", ".join(str(d).removeprefix("torch.") for d in self.caps.payload_dtypes)
            raise ValueError(f"dispatcher={self.name!r} moves rows of {allowed}, got {dtype}; change precision=")
        if alignment != 1:
            raise ValueError(f"dispatcher={self.name!r} does not pad rows; got alignment={alignment}, allowed is 1")
        self.group = group
        self.num_experts = num_experts
        self.experts_per_rank = experts_per_rank(num_experts, size)
        self.num_local_experts = self.experts_per_rank[0 if group is None else group.rank()]

    @abstractmethod
    def dispatch(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Dispatched:
        """Send each token to the ranks of its experts.

        Args:
            hidden_states: ``[T, H]``; ``T`` may be 0 and may differ between ranks.
            top_k_index: ``[T, K]`` int64 expert of each choice, from 0 to ``num_experts - 1``; -1 drops the choice.
            top_k_weights: ``[T, K]`` float routing weights; their gradient travels in float32.

        Returns:
            The rows that this rank's experts compute.
        """

    @abstractmethod
    def combine(self, expert_rows: Tensor, state: Any) -> Tensor:
        """Bring rows back to their tokens and add up the choices of each.

        Args:
            expert_rows: ``[R, H]`` in the order of :attr:`Dispatched.rows`, routing weights applied.
            state: :attr:`Dispatched.state` of the same call.

        Returns:
            ``[T, H]``; a token without a valid choice gets exact zeros.
        """

    def start(self, calls: Sequence[Call]) -> list[InFlight[Dispatched]]:
        """Send several batches of tokens off, and let this rank compute while they travel.

        A dispatcher that cannot do that waits for each.

        Args:
            calls: The arguments of :meth:`dispatch` for each; as many on every rank.

        Returns:
            What :meth:`dispatch` returns for each, to be waited for in this order.
        """
        return [arrived(self.dispatch(*call)) for call in calls]

    def start_combine(self, expert_rows: Tensor, state: Any) -> InFlight[Tensor]:
        """Send rows back to their tokens, and let this rank go on; the same as :meth:`combine` once it is waited for.

        Args:
            expert_rows: ``[R, H]`` in the order of :attr:`Dispatched.rows`, routing weights applied.
            state: :attr:`Dispatched.state` of the same call.
        """
        return arrived(self.combine(expert_rows, state))

    def finalize(self) -> None:  # noqa: B027 - most dispatchers hold nothing to free
        """Free communication buffers. Collective, idempotent, called before the process group is destroyed."""
