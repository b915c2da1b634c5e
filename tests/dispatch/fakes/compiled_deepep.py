"""The compiled part of DeepEP 2.1 over gloo: what the Python of the real package calls, on CPU.

Its arguments are those that the Python passes by position. What a call on the library's own stream returns holds
garbage until its event is waited for.
"""

import importlib
import os
import random
import sys
from collections import Counter
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_moe import optional
from tests.dispatch.fakes.deepep_gloo import Route
from tests.dispatch.fakes.deepep_v1 import of_each_visit

CALLS: Counter[str] = Counter()
# By the tensor of a handle that the Python passes on as it is; a route ends with its handle.
ROUTES: Any = WeakTensorKeyDictionary()


class EventHandle:
    """An event of a stream: what a call returned is there once it was waited for."""

    def __init__(self) -> None:
        self.finish: Callable[[], None] | None = None

    def current_stream_wait(self) -> None:
        if self.finish is not None:
            self.finish()
        self.finish = None


def deliver(
    results: tuple[Tensor | None, ...], previous: Any, asynchronous: bool, on_comm_stream: bool
) -> tuple[tuple[Tensor | None, ...], EventHandle | None]:
    """Hand out results now, or garbage that becomes them when the event is waited for."""
    assert previous is None or type(previous) is EventHandle, "the compiled part takes no EventOverlap"
    assert previous is None or (asynchronous and on_comm_stream)
    if not asynchronous:
        return results, None
    CALLS["on its own stream"] += 1
    shown = tuple(t if t is None else torch.full_like(t, torch.nan if t.is_floating_point() else 7) for t in results)
    event = EventHandle()

    def finish() -> None:
        for garbage, result in zip(shown, results, strict=True):
            if garbage is not None and result is not None:
                garbage.copy_(result)

    event.finish = finish
    return shown, event


def check(x: Tensor, index: Tensor | None, weights: Tensor | None) -> None:
    assert x.dim() == 2
    assert x.is_contiguous()
    if index is not None:
        assert index.dtype == torch.int64
        assert index.is_contiguous()
    if weights is not None:
        assert weights.dtype == torch.float32
        assert weights.is_contiguous()


def counts_of(local: Tensor, num_local: int, alignment: int) -> list[int]:
    return [-(-int((local == expert).sum()) // alignment) * alignment for expert in range(num_local)]


class ElasticBuffer:
    def __init__(
        self,
        rank,
        size,
        comm,
        cpu_comm,
        num_bytes,
        num_cpu_bytes,
        allow_hybrid_mode,
        allow_multiple_reduction,
        prefer_overlap_with_compute,
        sl_idx,
        num_allocated_qps,
        num_cpu_timeout_secs,
        num_gpu_timeout_secs,
        explicitly_destroy,
    ) -> None:
        assert (rank, size, num_cpu_bytes) == (dist.get_rank(), dist.get_world_size(), 0)
        assert num_bytes > 0
        assert explicitly_destroy
        self.rank, self.size = rank, size
        CALLS["open"] += 1

    def get_logical_domain_size(self):
        return 1, self.size

    def get_physical_domain_size(self):
        return 1, self.size

    def destroy(self):
        CALLS["destroy"] += 1

    def dispatch(
        self,
        x,
        sf,
        index,
        weights,
        stats,
        cached_num_recv_tokens,
        cached_num_expanded_tokens,
        cached_counts,
        cached_psum_of_ranks,
        cached_psum_of_experts,
        cached_unaligned,
        cached_slots,
        cached_token_metadata,
        cached_source,
        cached_linked_list,
        capacity,
        num_experts,
        alignment,
        num_sms,
        num_qps,
        previous,
        previous_before_epilogue,
        asynchronous,
        on_comm_stream,
        do_handle_copy,
        do_cpu_sync,
        do_expand,
        do_zero_padding,
        tma_aligned,
    ):
        assert sf is stats is previous_before_epilogue is None
        assert not any((do_expand, do_zero_padding, tma_aligned))
        assert num_sms > 0
        assert num_qps > 0
        assert do_handle_copy
        assert x.shape[0] == index.shape[0] <= capacity
        check(x, index, weights)
        if cached_psum_of_ranks is not None:
            CALLS["dispatch again"] += 1
            assert not do_cpu_sync
            assert weights is None
            route = ROUTES[cached_psum_of_ranks]
            (rows,), event = deliver((route.forth(x),), previous, asynchronous, on_comm_stream)
            return rows, None, None, None, None, None, None, None, None, None, None, None, None, None, None, event
        CALLS["dispatch"] += 1
        assert do_cpu_sync
        num_local = num_experts // self.size
        of_expert = torch.nn.functional.one_hot(index + 1, num_experts + 1)[..., 1:].sum(1)
        assert (of_expert <= 1).all(), "an expert twice"
        route: Any = Route(dist.group.WORLD, of_expert.view(-1, self.size, num_local).any(-1))
        # Rows arrive as threads come in; the Python sorts them.
        route.order = torch.tensor(random.sample(range(len(route.order)), len(route.order)), dtype=torch.int64)
        route.owned = index[route.token] // num_local == route.rank[:, None]
        local = route.forth(of_each_visit(route, index, weights, num_local)[0], by_visit=True)
        source = route.forth((self.rank * capacity + torch.arange(len(x))).int()[:, None].repeat(1, 2 + index.shape[1]))
        psum_of_ranks = torch.tensor(route.receive).cumsum(0).int()
        counts = counts_of(local, num_local, alignment)
        ROUTES[psum_of_ranks] = route
        # The weights of choices on other ranks arrive, too.
        found = (route.forth(x), local, route.forth(weights), source)
        (rows, local, weights, source), event = deliver(found, previous, asynchronous, on_comm_stream)
        return (
            rows,
            None,
            local,
            weights,
            index.clone(),
            len(rows),
            0,
            counts,
            psum_of_ranks,
            torch.tensor(counts).cumsum(0).int(),
            None,
            source,
            torch.zeros(1),
            None,
            None,
            event,
        )

    def combine(
        self,
        x,
        weights,
        bias_0,
        bias_1,
        source,
        index,
        psum_of_ranks,
        token_metadata,
        linked_list,
        num_experts,
        capacity,
        num_sms,
        num_qps,
        previous,
        previous_before_epilogue,
        asynchronous,
        on_comm_stream,
        do_expand,
    ):
        CALLS["combine"] += 1
        assert bias_0 is bias_1 is None
        assert num_sms > 0
        check(x, index, weights)
        route = ROUTES[psum_of_ranks]
        # In which order the rows lie is what the handle says of their sources.
        arrival = source[:, 0].argsort()[route.order]
        out, out_weights = route.add_up(route.back(x[arrival])), None
        if weights is not None:
            out_weights = route.add_up(torch.where(route.owned, route.back(weights[arrival]), 0.0))
        (out, out_weights), event = deliver((out, out_weights), previous, asynchronous, on_comm_stream)
        return out, out_weights, event


class Buffer:
    def __init__(
        self,
        rank,
        size,
        num_nvl_bytes,
        num_rdma_bytes,
        low_latency_mode,
        explicitly_destroy,
        enable_shrink,
        allow_mnnvl,
    ) -> None:
        assert num_nvl_bytes > 0
        assert num_rdma_bytes == 0
        assert explicitly_destroy
        self.rank, self.size, self.available = rank, size, False
        CALLS["open"] += 1

    def get_local_device_id(self):
        return self.rank

    def get_local_ipc_handle(self):
        return bytearray(b"handle")

    def get_num_rdma_ranks(self):
        return 1

    def sync(self, device_ids, ipc_handles, root_unique_id):
        assert device_ids == list(range(self.size))
        assert root_unique_id is None
        self.available = True

    def is_available(self):
        return self.available

    def destroy(self):
        CALLS["destroy"] += 1

    def get_dispatch_layout(self, index, num_experts, previous, asynchronous, on_comm_stream):
        assert previous is None
        assert not asynchronous
        check(torch.empty(0, 0), index, None)
        of_expert = torch.nn.functional.one_hot(index + 1, num_experts + 1)[..., 1:].sum(1)
        goes = of_expert.view(len(index), self.size, num_experts // self.size).any(-1)
        return goes.sum(0).int(), None, of_expert.sum(0).int(), goes, None

    def intranode_dispatch(
        self,
        x,
        scales,
        index,
        weights,
        to_rank,
        goes,
        to_expert,
        cached_num_recv_tokens,
        cached_rank_prefix,
        cached_channel_prefix,
        alignment,
        num_worst_tokens,
        config,
        previous,
        asynchronous,
        on_comm_stream,
    ):
        assert scales is None
        assert num_worst_tokens == 0
        assert type(config) is Config
        check(x, index, weights)
        if index is None:
            CALLS["dispatch again"] += 1
            route = ROUTES[cached_rank_prefix]
            assert cached_num_recv_tokens == sum(route.receive)
            (rows,), event = deliver((route.forth(x),), previous, asynchronous, on_comm_stream)
            return rows, None, None, None, None, None, None, None, None, None, event
        CALLS["dispatch"] += 1
        assert to_rank.dtype == to_expert.dtype == torch.int32
        num_local = len(to_expert) // self.size
        route = Route(dist.group.WORLD, goes)
        local, masked = of_each_visit(route, index, weights, num_local)
        prefix = torch.tensor(route.receive).cumsum(0).int()
        ROUTES[prefix] = route
        found = (route.forth(x), route.forth(local, by_visit=True), route.forth(masked, by_visit=True))
        counts = counts_of(found[1], num_local, alignment)
        (rows, local, weights), event = deliver(found, previous, asynchronous, on_comm_stream)
        source = torch.zeros(len(rows), dtype=torch.int32)
        return rows, None, local, weights, counts, prefix, torch.zeros(1), torch.zeros(1), source, prefix, event

    def intranode_combine(
        self,
        x,
        weights,
        bias_0,
        bias_1,
        source,
        rank_prefix,
        channel_prefix,
        send_head,
        config,
        previous,
        asynchronous,
        on_comm_stream,
    ):
        CALLS["combine"] += 1
        assert bias_0 is bias_1 is None
        assert type(config) is Config
        check(x, None, weights)
        route = ROUTES[rank_prefix]
        out = route.add_up(route.back(x))
        out_weights = None if weights is None else route.add_up(route.back(weights))
        (out, out_weights), event = deliver((out, out_weights), previous, asynchronous, on_comm_stream)
        return out, out_weights, event


class Config:
    def __init__(self, num_sms, nvl_send, nvl_receive, rdma_send, rdma_receive, /) -> None:
        self.num_sms = num_sms

    def get_nvl_buffer_size_hint(self, hidden_bytes, num_ranks, /):
        return 128 * hidden_bytes * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes, num_ranks, /):
        return 0


def install(folder: str) -> ModuleType:
    """Import the unpacked package ``deep_ep`` of a folder over this compiled part, in this process.

    Returns:
        The package.
    """
    module: Any = ModuleType("deep_ep._C")
    vars(module).update(
        ElasticBuffer=ElasticBuffer,
        Buffer=Buffer,
        Config=Config,
        EventHandle=EventHandle,
        topk_idx_t=torch.int64,
        init_jit=lambda library, cuda, nccl: None,
        destroy_nccl_comm=lambda comm: None,
        calculate_elastic_buffer_size=lambda comm, tokens, hidden, top_k, fp8, hybrid, multiple: 2 << 20,
        is_sm90_compiled=lambda: True,
    )
    sys.modules["deep_ep._C"] = module
    os.environ.update(EP_SUPPRESS_NCCL_CHECK="1", EP_NCCL_ROOT_DIR=folder, CUDA_HOME=folder)
    without_a_device()
    sys.path.insert(0, folder)
    package = importlib.import_module("deep_ep")
    optional.probe.cache_clear()
    return package


def without_a_device() -> None:
    """Answer what Python asks of CUDA and of NCCL, in this process, where there is neither."""
    device: Any = torch.cuda
    device.get_device_name = lambda *_: "none"
    device.current_device = lambda: 0
    device.synchronize = lambda *_: None
    device.get_device_properties = lambda *_: SimpleNamespace(multi_processor_count=132)
    group: Any = dist.ProcessGroup
    group._get_backend = lambda self, device: SimpleNamespace(_comm_ptr=lambda: 1)
