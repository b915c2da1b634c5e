"""DeepEP V2 and V2.5 over gloo, with the signatures of 2.1.0 and 2.5.0."""

import random
from typing import Any

import torch
from torch import Tensor

from tests.dispatch.fakes.deepep_gloo import (
    LIBRARY,
    Buffer,
    EventHandle,
    Route,
    check_stream,
    in_time,
    with_garbage,
)
from tests.dispatch.fakes.deepep_v1 import of_each_visit


class EPHandle:
    """What the library hands out for the way back."""

    def __init__(self, route: Route, topk_idx: Tensor, copied: bool, **values: Any) -> None:
        self.route, self.topk_idx = route, topk_idx.clone() if copied else topk_idx
        self.version = self.topk_idx._version
        vars(self).update(values)

    def use(self) -> Route:
        assert self.topk_idx._version == self.version, "topk_idx was changed"
        return self.route


class _Buffer(Buffer):
    """What both versions do."""

    copies_index = True

    @staticmethod
    def capture():
        return EventHandle()

    def _make(
        self, group, num_max_tokens_per_rank, hidden, num_topk, deterministic, num_allocated_qps, explicitly_destroy
    ):
        assert num_max_tokens_per_rank > 0
        assert hidden % 256 == 0
        self.room, self.deterministic, self.num_topk = num_max_tokens_per_rank, deterministic, num_topk
        made = {"tokens": num_max_tokens_per_rank, "num_qps": num_allocated_qps, "explicitly": explicitly_destroy}
        self._open(group, explicitly_destroy, **made)

    def _dispatch(
        self,
        x,
        topk_idx,
        topk_weights,
        num_experts,
        tokens,
        alignment,
        num_sms,
        handle,
        do_cpu_sync,
        do_expand,
        *stream,
    ):
        assert not do_expand, "the layout of inference"
        filled = torch.utils.deterministic.fill_uninitialized_memory
        assert not (torch.are_deterministic_algorithms_enabled() and filled)
        self._enter("dispatch" if handle is None else "dispatch again")
        check_stream(stream[0], EventHandle, *stream[1:])
        LIBRARY.check_rows(x)
        if handle is not None:
            assert topk_idx is None
            assert not do_cpu_sync
            if num_sms == 0:
                raise TypeError("unsupported operand type(s) for %: 'NoneType' and 'int'")
            route = handle.use()
            assert x.shape[0] == route.num_tokens
            return in_time((route.forth(x), route.local, None, handle), stream[1])
        tokens = tokens or self.room
        assert x.shape[0] <= tokens <= self.room
        assert 1 <= topk_idx.shape[1] <= (self.num_topk or 32)
        assert topk_idx.dtype == torch.int64
        assert topk_idx.is_contiguous()
        assert topk_weights.dtype == torch.float32
        assert topk_weights.is_contiguous()
        in_order = topk_idx.sort(1).values
        assert not ((in_order[:, 1:] == in_order[:, :-1]) & (in_order[:, 1:] >= 0)).any(), "an expert twice"
        ranks, num_local = self.group.size(), num_experts // self.group.size()
        assert num_experts % ranks == 0
        of_expert = torch.nn.functional.one_hot(topk_idx + 1, num_experts + 1)[..., 1:].sum(1)
        route = Route(self.group, of_expert.view(-1, ranks, num_local).any(-1))
        if not self.deterministic:
            # As threads come in: not from a generator that a recomputed forward finds in its former state.
            route.order = torch.tensor(random.sample(range(len(route.order)), len(route.order)), dtype=torch.int64)
        local = route.forth(of_each_visit(route, topk_idx, topk_weights, num_local)[0], by_visit=True)
        weights = route.forth(topk_weights)  # also those of choices on other ranks
        alignment = alignment or 1
        counts = [-(-int((local == expert).sum()) // alignment) * alignment for expert in range(num_local)]
        route.local = local  # type: ignore[attr-defined]
        route.owned = topk_idx[route.token] // num_local == route.rank[:, None]  # type: ignore[attr-defined]
        handle = EPHandle(
            route,
            topk_idx,
            self.copies_index,
            num_sms=num_sms or 24,
            num_experts=num_experts,
            num_max_tokens_per_rank=tokens,
            num_recv_tokens_per_expert_list=counts,
        )
        arrived = route.forth(x)
        if do_cpu_sync is False:
            arrived, local, weights = (with_garbage(t, tokens * ranks) for t in (arrived, local, weights))
        return in_time((arrived, local, weights, handle), stream[1])

    def _combine(self, x, handle, topk_weights, *stream):
        self._enter("combine")
        check_stream(stream[0], EventHandle, *stream[1:])
        LIBRARY.check_rows(x)
        route = handle.use()
        out = route.add_up(route.back(x))
        if topk_weights is None:
            return in_time((out, None), stream[1])
        assert topk_weights.dtype == torch.float32
        assert topk_weights.is_contiguous()
        back = torch.where(route.owned, route.back(topk_weights), 0.0)  # of the owner of a choice alone
        return in_time((out, route.add_up(back)), stream[1])


class ElasticBuffer(_Buffer):
    def __init__(
        self,
        group,
        num_bytes=None,
        num_cpu_bytes=0,
        num_max_tokens_per_rank=0,
        hidden=0,
        num_topk=0,
        use_fp8_dispatch=False,
        deterministic=False,
        allow_hybrid_mode=True,
        allow_multiple_reduction=True,
        prefer_overlap_with_compute=True,
        sl_idx=3,
        num_allocated_qps=0,
        num_cpu_timeout_secs=300,
        num_gpu_timeout_secs=100,
        explicitly_destroy=False,
    ) -> None:
        assert num_cpu_bytes == 0
        self._make(
            group, num_max_tokens_per_rank, hidden, num_topk, deterministic, num_allocated_qps, explicitly_destroy
        )

    def dispatch(
        self,
        x,
        topk_idx=None,
        topk_weights=None,
        cumulative_local_expert_recv_stats=None,
        num_experts=None,
        num_max_tokens_per_rank=None,
        expert_alignment=None,
        num_sms=0,
        num_qps=0,
        previous_event=None,
        previous_event_before_epilogue=None,
        async_with_compute_stream=False,
        allocate_on_comm_stream=False,
        handle=None,
        do_handle_copy=True,
        do_cpu_sync=None,
        do_expand=False,
        do_zero_padding=False,
        use_tma_aligned_col_major_sf=False,
    ):
        self.copies_index = do_handle_copy
        return self._dispatch(
            x,
            topk_idx,
            topk_weights,
            num_experts,
            num_max_tokens_per_rank,
            expert_alignment,
            num_sms,
            handle,
            do_cpu_sync,
            do_expand,
            previous_event,
            async_with_compute_stream,
            allocate_on_comm_stream,
        )

    def combine(
        self,
        x,
        handle,
        topk_weights=None,
        bias=None,
        num_sms=0,
        num_qps=0,
        previous_event=None,
        previous_event_before_epilogue=None,
        async_with_compute_stream=False,
        allocate_on_comm_stream=False,
    ):
        stream = (previous_event, async_with_compute_stream, allocate_on_comm_stream)
        return self._combine(x, handle, topk_weights, *stream)

    def destroy(self):
        super().destroy()


class EPBuffer(_Buffer):
    copies_index = False

    def __init__(
        self,
        group,
        num_bytes=None,
        num_max_tokens_per_rank=0,
        hidden=0,
        num_topk=0,
        use_fp8_dispatch=False,
        lb_allocation_plan_or_num_bytes=0,
        deterministic=False,
        allow_hybrid_mode=True,
        allow_multiple_reduction=True,
        prefer_overlap_with_compute=True,
        sl_idx=None,
        num_allocated_qps=0,
        num_cpu_timeout_secs=300,
        num_gpu_timeout_secs=100,
        explicitly_destroy=False,
    ) -> None:
        assert lb_allocation_plan_or_num_bytes == 0
        self._make(
            group, num_max_tokens_per_rank, hidden, num_topk, deterministic, num_allocated_qps, explicitly_destroy
        )

    def dispatch(
        self,
        x,
        topk_idx=None,
        topk_weights=None,
        cumulative_local_expert_recv_stats=None,
        num_experts=None,
        num_max_tokens_per_rank=None,
        expert_alignment=None,
        num_sms=0,
        num_qps=0,
        previous_event=None,
        async_with_compute_stream=False,
        allocate_on_comm_stream=False,
        handle=None,
        do_handle_copy=False,
        do_cpu_sync=None,
        do_expand=False,
        do_zero_padding=False,
        use_tma_aligned_col_major_sf=False,
        defer_epilogue=False,
    ):
        assert not do_handle_copy
        assert not defer_epilogue
        return self._dispatch(
            x,
            topk_idx,
            topk_weights,
            num_experts,
            num_max_tokens_per_rank,
            expert_alignment,
            num_sms,
            handle,
            do_cpu_sync,
            do_expand,
            previous_event,
            async_with_compute_stream,
            allocate_on_comm_stream,
        )

    def combine(
        self,
        x,
        handle,
        topk_weights=None,
        bias=None,
        num_sms=0,
        num_qps=0,
        previous_event=None,
        async_with_compute_stream=False,
        allocate_on_comm_stream=False,
        defer_epilogue=False,
    ):
        assert not defer_epilogue
        stream = (previous_event, async_with_compute_stream, allocate_on_comm_stream)
        return self._combine(x, handle, topk_weights, *stream)

    def destroy(self):
        super().destroy()
