"""The dispatchers over DeepEP, which choose an API by the classes that the installed package has."""

from types import ModuleType
from typing import ClassVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from typing_extensions import override

from lightning_moe.dispatch.base import DispatcherCaps
from lightning_moe.dispatch.deepep.hybrid import HybridTransport
from lightning_moe.dispatch.deepep.shared import BufferTransport, Layer, Options, SharedBuffers
from lightning_moe.dispatch.deepep.v1 import V1Transport
from lightning_moe.dispatch.deepep.v2 import V2Transport
from lightning_moe.dispatch.deepep.v2_5 import V25Transport
from lightning_moe.dispatch.transport import TransportDispatcher
from lightning_moe.optional import probe

_CAPS = DispatcherCaps(uneven_experts=False, min_ranks=2, payload_dtypes=(torch.bfloat16,), device_types=("cuda",))


class DeepEPDispatcher(TransportDispatcher):
    """Moves rows with DeepEP: a token goes once to each rank that holds one of its experts.

    Uses the newest of ``EPBuffer`` (2.5), ``ElasticBuffer`` (2.0) and ``Buffer`` that the installed ``deep_ep`` has.
    The buffers are opened at the first call, shared by all layers and destroyed in :meth:`finalize`; a call after that
    opens new ones. :attr:`rows_sent` and :attr:`bytes_sent` stay 0: to count them would wait for the device.

    ``EPBuffer`` and ``ElasticBuffer`` have room for a fixed number of tokens. The ranks compare what they bring in one
    small exchange a call, so that all open a larger buffer together, or raise where ``max_tokens_per_rank`` is given.

    Args:
        num_sms: Multiprocessors that its kernels occupy, an even number; ``None`` leaves it to the library.
        num_qps: RDMA queue pairs; ``None`` leaves it to the library.
        max_tokens_per_rank: Most tokens that a rank brings to one call; ``None`` takes the most of the first call,
            rounded up to a multiple of 128, and doubles it where a later one brings more. ``Buffer`` needs none.

    Raises:
        ValueError: If an option is out of its range.
    """

    name = "deepep"
    caps = _CAPS
    transports: ClassVar[tuple[type[BufferTransport], ...]] = (V25Transport, V2Transport, V1Transport)

    def __init__(
        self, num_sms: int | None = None, num_qps: int | None = None, max_tokens_per_rank: int | None = None
    ) -> None:
        given = {"num_sms": num_sms, "num_qps": num_qps, "max_tokens_per_rank": max_tokens_per_rank}
        for option, value in given.items():
            if value is not None and value < 1:
                raise ValueError(f"{option}={value} of dispatcher={self.name!r} must be at least 1, or None")
        if num_sms is not None and num_sms % 2:
            raise ValueError(f"num_sms={num_sms} of dispatcher={self.name!r} must be even, or None")
        self.options = Options(num_sms, num_qps, max_tokens_per_rank)
        self._shared = SharedBuffers()
        self._transport: BufferTransport | None = None

    @override
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
        super().setup(group, num_experts=num_experts, hidden_size=hidden_size, dtype=dtype, alignment=alignment)
        assert group is not None
        if "cpu" not in self.caps.device_types and (problem := _no_device(group)):
            raise RuntimeError(f"dispatcher={self.name!r} is not usable here: {problem}; set dispatcher='all_to_all'")
        package, problem = find(self.transports)
        if package is None:
            raise RuntimeError(f"dispatcher={self.name!r} is not usable here: {problem}; set dispatcher='all_to_all'")
        filled = getattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # a property of the module
        if torch.are_deterministic_algorithms_enabled() and filled:
            raise ValueError(
                f"dispatcher={self.name!r} cannot work with torch.utils.deterministic.fill_uninitialized_memory=True,"
                " which overwrites what its kernels write on another stream; set"
                " torch.utils.deterministic.fill_uninitialized_memory = False, or dispatcher='all_to_all'"
            )
        options = self.options
        if max_tokens_per_rank is not None and options.max_tokens_per_rank is None:
            options = Options(options.num_sms, options.num_qps, max_tokens_per_rank)
        made_by = (self.name, type(self).__name__)
        layer = Layer(made_by, group, num_experts, self.num_local_experts, hidden_size)
        (chosen,) = [kind for kind in self.transports if hasattr(package, kind.class_name)][:1]
        transport = chosen(package, layer, options, self._shared)
        transport.check()
        if top_k is not None:
            transport.check_call(top_k)
        self._transport = transport

    @override
    def transport_for(self, hidden_states: Tensor, top_k: int) -> BufferTransport:
        if self._transport is None:
            raise RuntimeError(f"dispatcher={self.name!r} was not set up; call setup() with the expert-parallel ranks")
        if hidden_states.device.type not in self.caps.device_types:
            raise ValueError(
                f"dispatcher={self.name!r} moves rows on {', '.join(self.caps.device_types)}, got rows on"
                f" {hidden_states.device}; set dispatcher='all_to_all' or accelerator='gpu'"
            )
        if hidden_states.dtype not in self.caps.payload_dtypes:
            allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in self.caps.payload_dtypes)
            raise ValueError(f"dispatcher={self.name!r} moves rows of {allowed}, got {hidden_states.dtype}")
        return self._transport

    @override
    def finalize(self) -> None:
        """Destroy the buffers of all layers, in the order in which they were opened. Collective, idempotent.

        Does nothing while an exception is handled, or after one inside the library: other ranks may never come.
        """
        self._shared.close()


class HybridEPDispatcher(DeepEPDispatcher):
    """Moves rows with ``HybridEPBuffer`` of DeepEP's branch ``hybrid-ep``: a row for each choice, sorted by expert.

    The ranks compare what they bring in one small exchange a call: all are padded to the most tokens of one.

    Args:
        num_sms: Multiprocessors that its kernels occupy, an even number; ``None`` leaves it to the library.
        max_tokens_per_rank: Most tokens that a rank brings to one call; ``None`` takes the most of the first call,
            rounded up to a multiple of 128, and doubles it where a later one brings more.

    Raises:
        ValueError: If an option is out of its range.
    """

    name = "hybridep"
    transports: ClassVar[tuple[type[BufferTransport], ...]] = (HybridTransport,)

    def __init__(self, num_sms: int | None = None, max_tokens_per_rank: int | None = None) -> None:
        super().__init__(num_sms=num_sms, max_tokens_per_rank=max_tokens_per_rank)


def find(transports: tuple[type[BufferTransport], ...]) -> tuple[ModuleType | None, str]:
    """The package with a class that one of some transports needs, or ``None`` and the reason in one line."""
    found = probe("deep_ep")
    if found.module is None:
        return None, found.why
    names = [transport.class_name for transport in transports]
    if any(hasattr(found.module, name) for name in names):
        return found.module, ""
    return None, f"the installed deep_ep {found.version} has no {' or '.join(names)}".replace("  ", " ")


def deepep_unusable() -> str:
    """Why ``dispatcher="deepep"`` is not usable here, in one line; empty where it is."""
    return _unusable(DeepEPDispatcher.transports)


def hybridep_unusable() -> str:
    """Why ``dispatcher="hybridep"`` is not usable here, in one line; empty where it is."""
    return _unusable(HybridEPDispatcher.transports)


def _unusable(transports: tuple[type[BufferTransport], ...]) -> str:
    package, problem = find(transports)
    if package is not None and not torch.cuda.is_available():
        return "this process has no CUDA device"
    return problem


def _no_device(group: ProcessGroup) -> str:
    if not torch.cuda.is_available():
        return "this process has no CUDA device"
    connected = torch.distributed.get_backend_config(group)
    if "cuda:nccl" in connected:
        return ""
    return f"it needs process_group_backend='nccl' and accelerator='gpu', and the ranks are connected by {connected!r}"
