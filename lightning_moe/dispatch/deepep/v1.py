"""DeepEP V1: ``deep_ep.Buffer``."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_moe.dispatch.deepep.shared import BufferTransport, in_flight, known
from lightning_moe.dispatch.transport import Received
from lightning_moe.in_flight import InFlight

_NODE = 8  # ranks that it connects by NVLink
_BYTES = 2  # of a bfloat16


@dataclass(frozen=True)
class Route:
    """What a dispatch leaves behind for the way back.

    Attributes:
        buffer: The buffer that it went through.
        handle: The library's own.
    """

    buffer: Any
    handle: Any


class V1Transport(BufferTransport):
    """Its buffer passes tokens on in chunks, so any number of them fits."""

    class_name = "Buffer"
    hidden_multiple = 16
    max_local_experts = 1024
    max_top_k = 32

    @override
    def check(self) -> None:
        super().check()
        ranks, allowed = self.layer.group.size(), "2, 4, 8 expert-parallel ranks, or more that its configurations name"
        if ranks not in (2, 4, _NODE) and ranks % _NODE:
            self.refuse(allowed, f"{ranks}", "another expert_parallel_size")
        try:
            self._configs()
        except Exception:  # an assertion, where it has no configuration
            self.refuse(allowed, f"{ranks}", "another expert_parallel_size")

    def _configs(self) -> tuple[Any, Any]:
        """The settings of dispatch and of combine for this number of ranks."""
        if self.options.num_sms is not None:
            self.buffer_class.set_num_sms(new_num_sms=self.options.num_sms)
        ranks = self.layer.group.size()
        return (
            self.buffer_class.get_dispatch_config(num_ranks=ranks),
            self.buffer_class.get_combine_config(num_ranks=ranks),
        )

    @override
    def open(self, capacity: int, top_k: int) -> Any:
        ranks, row = self.layer.group.size(), self.layer.hidden_size * _BYTES
        configs = self._configs()
        # By position: these methods are compiled and have no names of arguments.
        nvlink = max(config.get_nvl_buffer_size_hint(row, ranks) for config in configs)
        rdma = max(config.get_rdma_buffer_size_hint(row, ranks) for config in configs)
        optional = known(self.buffer_class, num_qps_per_rank=self.options.num_qps, explicitly_destroy=True)
        return self.buffer_class(group=self.layer.group, num_nvl_bytes=nvlink, num_rdma_bytes=rdma, **optional)

    @override
    def send(
        self, rows: Tensor, index: Tensor, weights: Tensor, choices_per_expert: Tensor, plan: None, asynchronous: bool
    ) -> InFlight[Received]:
        self.check_call(index.shape[1])
        layer = self.layer
        index = index.to(getattr(self.package, "topk_idx_t", torch.int64)).contiguous()
        with self.shared.guard():
            buffer = self.buffer((layer.group, layer.hidden_size), index.shape[1])
            to_rank, to_node, to_expert, goes, _ = buffer.get_dispatch_layout(
                topk_idx=index, num_experts=layer.num_experts
            )
            arrived, local, local_weights, counts, handle, event = buffer.dispatch(
                x=rows.contiguous(),
                num_tokens_per_rank=to_rank,
                num_tokens_per_rdma_rank=to_node,
                is_token_in_rank=goes,
                num_tokens_per_expert=to_expert,
                topk_idx=index,
                topk_weights=weights.contiguous(),
                **self._own_stream(asynchronous),
            )
        route = Route(buffer, handle)
        return in_flight((arrived, local, local_weights), event, asynchronous, rows, weights).then(
            lambda came: self.received(*came, list(counts), route)
        )

    def _own_stream(self, asynchronous: bool) -> dict[str, Any]:
        """Arguments of a call on the library's stream, which begins when this stream has come to here."""
        if not asynchronous:
            return {}
        begin = self.buffer_class.capture()
        return {"previous_event": begin, "async_finish": True, "allocate_on_comm_stream": True}

    @override
    def send_again(self, rows: Tensor, handle: Route, asynchronous: bool) -> InFlight[Tensor]:
        with self.shared.guard():
            arrived, *_, event = handle.buffer.dispatch(
                x=rows.contiguous(), handle=handle.handle, **self._own_stream(asynchronous)
            )
        return in_flight(arrived, event, asynchronous, rows)

    @override
    def bring_back(
        self, rows: Tensor, weights: Tensor | None, handle: Route, asynchronous: bool
    ) -> InFlight[tuple[Tensor, Tensor | None]]:
        weights = None if weights is None else weights.float().contiguous()
        self.one_combine_at_a_time()
        with self.shared.guard():
            back, back_weights, event = handle.buffer.combine(
                x=rows.contiguous(), handle=handle.handle, topk_weights=weights, **self._own_stream(asynchronous)
            )
        self.shared.combining = event if asynchronous else None
        return in_flight((back, back_weights), event, asynchronous, rows, weights)
