"""DeepEP V2: ``deep_ep.ElasticBuffer``."""

import os
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_moe.dispatch.deepep.shared import BufferTransport, in_flight, known, parameters
from lightning_moe.dispatch.deepep.v1 import Route
from lightning_moe.dispatch.transport import Received
from lightning_moe.in_flight import InFlight


class V2Transport(BufferTransport):
    """Its buffer has room for a fixed number of tokens a rank, the same on every rank."""

    class_name = "ElasticBuffer"
    hidden_multiple = 256  # combine's loop over a row has no remainder: 32 lanes of 16 bytes
    max_experts = 2048
    max_local_experts = 256
    max_top_k = 32

    @override
    def check(self) -> None:
        super().check()
        if "deterministic" not in parameters(self.buffer_class):
            self.refuse("recomputed forwards only where the buffer has deterministic=", "a version without it")

    @override
    def open(self, capacity: int, top_k: int) -> Any:
        # The library reads the variable, but this argument's default would make it look for a network all the same.
        no_network = os.environ.get("EP_DISABLE_GIN", "0") not in ("", "0")
        # In one order: a recomputed forward must see its rows where the first one, which the backward goes back along,
        # saw them.
        return self.buffer_class(
            group=self.layer.group,
            num_max_tokens_per_rank=capacity,
            hidden=self.layer.hidden_size,
            num_topk=top_k,
            deterministic=True,
            **known(self.buffer_class, allow_hybrid_mode=False if no_network else None),
            **known(self.buffer_class, num_allocated_qps=self.options.num_qps, explicitly_destroy=True),
        )

    @override
    def send(
        self, rows: Tensor, index: Tensor, weights: Tensor, choices_per_expert: Tensor, plan: None, asynchronous: bool
    ) -> InFlight[Received]:
        layer, top_k = self.layer, index.shape[1]
        self.check_call(top_k)
        key = (layer.group, layer.hidden_size, top_k)
        # Also the first collective of a group whose communicator the buffer takes over.
        _, capacity = self.agree(key, rows.shape[0], rows.device)
        with self.shared.guard():
            buffer = self.buffer(key, top_k, capacity)
            arrived, local, local_weights, handle, event = buffer.dispatch(
                x=rows.contiguous(),
                topk_idx=self.own_index(index),
                topk_weights=weights.contiguous(),
                num_experts=layer.num_experts,
                num_max_tokens_per_rank=capacity,
                do_cpu_sync=True,
                **self._tuning(self.options.num_sms),
                **self._own_stream(buffer, asynchronous),
            )
        counts, route = list(handle.num_recv_tokens_per_expert_list), Route(buffer, handle)
        return in_flight((arrived, local, local_weights), event, asynchronous, rows, weights).then(
            lambda came: self.received(*came, counts, route)
        )

    def _own_stream(self, buffer: Any, asynchronous: bool) -> dict[str, Any]:
        """Arguments of a call on the library's stream, which begins when this stream has come to here."""
        if not asynchronous:
            return {}
        return {
            "previous_event": buffer.capture(),
            "async_with_compute_stream": True,
            "allocate_on_comm_stream": True,
        }

    def own_index(self, index: Tensor) -> Tensor:
        """The index in the library's dtype; the handle keeps a copy of it."""
        return index.to(getattr(self.package, "topk_idx_t", torch.int64)).contiguous()

    def _tuning(self, num_sms: int | None) -> dict[str, int]:
        return known(self.buffer_class.dispatch, num_sms=num_sms, num_qps=self.options.num_qps)

    @override
    def send_again(self, rows: Tensor, handle: Route, asynchronous: bool) -> InFlight[Tensor]:
        with self.shared.guard():
            # The default number of multiprocessors is computed from arguments that a call with a handle does not have.
            arrived, *_, event = handle.buffer.dispatch(
                x=rows.contiguous(),
                handle=handle.handle,
                do_cpu_sync=False,
                **self._tuning(handle.handle.num_sms),
                **self._own_stream(handle.buffer, asynchronous),
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
                x=rows.contiguous(),
                handle=handle.handle,
                topk_weights=weights,
                **self._tuning(None),
                **self._own_stream(handle.buffer, asynchronous),
            )
        self.shared.combining = event if asynchronous else None
        return in_flight((back, back_weights), event, asynchronous, rows, weights)
