"""What the APIs of DeepEP have in common: buffers that layers share, and calls that pass what a version knows."""

import inspect
import sys
from abc import abstractmethod
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_moe.dispatch.permute import count_experts
from lightning_moe.dispatch.transport import Received, Transport, local_routing
from lightning_moe.in_flight import InFlight

T = TypeVar("T")


@dataclass(frozen=True)
class Options:
    """Options of a dispatcher that reach the library; ``None`` leaves a choice to it.

    Attributes:
        num_sms: Multiprocessors that the kernels occupy.
        num_qps: RDMA queue pairs.
        max_tokens_per_rank: Most tokens that a rank brings to one call; ``None`` takes it from the calls.
    """

    num_sms: int | None = None
    num_qps: int | None = None
    max_tokens_per_rank: int | None = None


@dataclass(frozen=True)
class Layer:
    """What a transport knows of the experts module that it serves.

    Attributes:
        dispatcher: Name of the dispatcher and that of its class, for messages.
        group: The expert-parallel ranks.
        num_experts: Experts of the whole module.
        num_local: Experts of this rank.
        hidden_size: Width of a row.
    """

    dispatcher: tuple[str, str]
    group: ProcessGroup
    num_experts: int
    num_local: int
    hidden_size: int


@dataclass
class SharedBuffers:
    """The buffers of all layers of a strategy. Opened at the first use and closed together, alike on every rank.

    Attributes:
        opened: The buffers by what they were made for, in the order in which they were opened.
        capacity: Most tokens of a rank that each was made for.
        broken: A call into the library raised: the other ranks may wait inside it, and closing is collective.
        kept: Buffers that were not closed because of an exception; their destructors may be collective too.
        combining: The event of the last combine that this rank did not wait for.
    """

    opened: dict[Hashable, Any] = field(default_factory=dict)
    capacity: dict[Hashable, int] = field(default_factory=dict)
    broken: bool = False
    kept: list[Any] = field(default_factory=list)
    combining: Any = None

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Note that a call into the library raised."""
        try:
            yield
        except BaseException:
            self.broken = True
            raise

    def close(self) -> None:
        """Destroy all buffers. Collective and idempotent; the next call opens new ones.

        Destroys none after an exception: other ranks may never come.
        """
        buffers = list(self.opened.values())
        self.combining = None
        self.opened.clear()
        self.capacity.clear()
        if self.broken or sys.exc_info()[0] is not None:
            self.kept += buffers
            self.broken = False
            return
        while buffers:
            buffer = buffers.pop(0)
            made_from: Any = type(buffer)
            if "explicitly_destroy" in parameters(made_from):
                buffer.destroy()
            del buffer  # a version without that argument frees it here


@cache
def parameters(function: Hashable) -> frozenset[str]:
    """The names of the arguments of a class or of an unbound method."""
    assert callable(function)
    return frozenset(inspect.signature(function).parameters)


def known(function: Hashable, **optional: Any) -> dict[str, Any]:
    """Those arguments that a function of the installed version has and that are not ``None``."""
    names = parameters(function)
    return {name: value for name, value in optional.items() if value is not None and name in names}


class BufferTransport(Transport):
    """A transport over a buffer of the library, for one layer.

    Class attributes say what the API can do, as its sources assert it.

    Args:
        package: The imported package.
        layer: The layer.
        options: Options of the dispatcher.
        shared: The buffers of all layers.
    """

    class_name: ClassVar[str]
    hidden_multiple: ClassVar[int]
    max_experts: ClassVar[int | None] = None
    max_local_experts: ClassVar[int | None] = None
    max_top_k: ClassVar[int | None] = None
    # Without max_tokens_per_rank the buffer has room for the most tokens of the group, rounded up to a multiple.
    capacity_multiple: ClassVar[int] = 128

    def __init__(self, package: ModuleType, layer: Layer, options: Options, shared: SharedBuffers) -> None:
        self.package = package
        self.buffer_class = getattr(package, self.class_name)
        self.layer = layer
        self.options = options
        self.shared = shared

    def check(self) -> None:
        """Find what this API does not support, before any collective.

        Raises:
            ValueError: The same on every rank; it names what is allowed.
        """
        layer = self.layer
        if not layer.hidden_size:
            self.refuse("experts whose width is known before the first call", "experts that do not tell it")
        if layer.hidden_size % self.hidden_multiple:
            self.refuse(f"rows whose width is a multiple of {self.hidden_multiple}", f"width {layer.hidden_size}")
        if self.max_experts is not None and layer.num_experts > self.max_experts:
            self.refuse(f"at most {self.max_experts} experts", f"{layer.num_experts}")
        if self.max_local_experts is not None and layer.num_local > self.max_local_experts:
            self.refuse(
                f"at most {self.max_local_experts} experts a rank",
                f"{layer.num_local}",
                "a larger expert_parallel_size",
            )

    def check_call(self, top_k: int) -> None:
        """Check a call by what is the same on every rank.

        Raises:
            ValueError: If a token chooses too many experts.
        """
        if self.max_top_k is not None and top_k > self.max_top_k:
            self.refuse(f"at most {self.max_top_k} experts a token", f"{top_k}")

    def refuse(self, allowed: str, got: str, fix: str = "") -> None:
        """Raise the error of something that this API does not support."""
        fix = f" or {fix}" if fix else ""
        raise ValueError(
            f"dispatcher={self.layer.dispatcher[0]!r} ({self.class_name} of deep_ep) supports {allowed}, got {got};"
            f" set dispatcher='all_to_all'{fix}"
        )

    @abstractmethod
    def open(self, capacity: int, top_k: int) -> Any:
        """Make the buffer. Collective.

        Args:
            capacity: Most tokens that a rank brings to one call.
            top_k: Experts a token.
        """

    def buffer(self, key: Hashable, top_k: int, capacity: int = 0) -> Any:
        """The buffer of this layer and of all others with the same key, opened if need be. Collective then."""
        sized = (key, capacity)
        if sized not in self.shared.opened:
            self.shared.opened[sized] = self.open(capacity, top_k)
        return self.shared.opened[sized]

    def received(
        self, rows: Tensor, index: Tensor, weights: Tensor, tokens_per_expert: list[int], handle: Any
    ) -> Received:
        """Sort what a dispatch has brought.

        Args:
            rows: ``[U, H]``.
            index: ``[U, K]`` expert of this rank, negative for others, whose weights some versions pass on.
            weights: ``[U, K]`` float32.
            tokens_per_expert: Choices of each expert of this rank.
            handle: The route.
        """
        here = index >= 0
        index = torch.where(here, index, -1).long()
        counts = count_experts(index, self.layer.num_local)[1:]
        return Received(
            rows=rows,
            weights=torch.where(here, weights, 0.0),
            local=local_routing(index, counts, tokens_per_expert),
            tokens_per_expert_host=tokens_per_expert,
            handle=handle,
        )

    def one_combine_at_a_time(self) -> None:
        """Let this stream wait for the last combine: the buffer has room for one."""
        if self.shared.combining is not None:
            self.shared.combining.current_stream_wait()
            self.shared.combining = None

    def agree(self, key: Hashable, num_tokens: int, device: torch.device) -> tuple[int, int]:
        """Find the most tokens that a rank brings to this call, and the capacity of the buffer. Collective.

        Without ``max_tokens_per_rank`` the first call settles the capacity, and one that exceeds it at least doubles
        it: a larger buffer is opened beside the former, whose routes may still be on their way. Every rank learns of a
        call that exceeds the capacity, also one that itself has few tokens and would wait for the others.

        Returns:
            Both numbers, the same on every rank.

        Raises:
            ValueError: If the call exceeds ``max_tokens_per_rank``.
        """
        most_on_device = torch.tensor(num_tokens, device=device)
        dist.all_reduce(most_on_device, dist.ReduceOp.MAX, self.layer.group)
        most, given = int(most_on_device), self.options.max_tokens_per_rank
        if given is not None and most > given:
            name, made_by = self.layer.dispatcher
            raise ValueError(
                f"the buffers of dispatcher={name!r} have room for max_tokens_per_rank={given} tokens a rank, but a"
                f" rank brings {most} to one call; set dispatcher={made_by}(max_tokens_per_rank={most}) or more"
            )
        capacity = self.shared.capacity.get(key, 0)
        if given is not None:
            capacity = given
        elif most > capacity or not capacity:
            multiple = self.capacity_multiple
            capacity = -(-max(most, 2 * capacity, 1) // multiple) * multiple
        self.shared.capacity[key] = capacity
        return most, capacity


def in_flight(value: T, event: Any, asynchronous: bool, *sources: Tensor | None) -> InFlight[T]:
    """What a call has returned, to be used once its event has come.

    Until then it owns what the call reads: autograd adds in place to a gradient that nobody else owns.
    """
    owned = list(sources)

    def finish() -> T:
        if asynchronous:
            event.current_stream_wait()
        owned.clear()
        return value

    return InFlight(finish)
