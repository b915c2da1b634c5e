"""DeepEP V1 over gloo, with the signatures of 1.0.0 and of 2.1.0."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from tests.dispatch.fakes.deepep_gloo import (
    LIBRARY,
    EventHandle,
    EventOverlap,
    Route,
    check_stream,
    in_time,
    with_garbage,
)
from tests.dispatch.fakes.deepep_gloo import Buffer as Base


class Config:
    """Compiled in the library: its methods know no names of arguments."""

    def __init__(self, num_sms: int) -> None:
        self.num_sms = num_sms

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int, /) -> int:
        return 128 * hidden_bytes * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int, /) -> int:
        return 0 if num_ranks <= 8 else hidden_bytes * num_ranks


class Buffer(Base):
    num_sms: ClassVar[int] = 20

    def __init__(
        self,
        group,
        num_nvl_bytes=0,
        num_rdma_bytes=0,
        low_latency_mode=False,
        num_qps_per_rank=24,
        allow_nvlink_for_low_latency_mode=True,
        allow_mnnvl=False,
        explicitly_destroy=False,
        enable_shrink=False,
        comm=None,
    ) -> None:
        assert num_nvl_bytes > 0
        assert num_rdma_bytes == 0 or group.size() > 8
        self._open(
            group, explicitly_destroy, bytes=num_nvl_bytes, num_qps=num_qps_per_rank, explicitly=explicitly_destroy
        )

    @staticmethod
    def capture():
        return EventOverlap(EventHandle())

    @staticmethod
    def set_num_sms(new_num_sms):
        assert new_num_sms % 2 == 0
        Buffer.num_sms = new_num_sms

    @staticmethod
    def get_dispatch_config(num_ranks):
        assert num_ranks in (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160), (
            f"Unsupported number of EP ranks: {num_ranks}"
        )
        return Config(Buffer.num_sms)

    @staticmethod
    def get_combine_config(num_ranks):
        return Buffer.get_dispatch_config(num_ranks)

    def get_dispatch_layout(
        self, topk_idx, num_experts, previous_event=None, async_finish=False, allocate_on_comm_stream=False
    ):
        assert not self.destroyed
        assert topk_idx.dim() == 2
        assert topk_idx.is_contiguous()
        assert topk_idx.dtype == torch.int64
        assert num_experts > 0
        ranks = self.group.size()
        of_expert = torch.nn.functional.one_hot(topk_idx + 1, num_experts + 1)[..., 1:].sum(1)
        goes = of_expert.view(-1, ranks, num_experts // ranks).any(-1)
        return goes.sum(0).int(), None, of_expert.sum(0).int(), goes, EventOverlap()

    def dispatch(
        self,
        x,
        handle=None,
        num_tokens_per_rank=None,
        num_tokens_per_rdma_rank=None,
        is_token_in_rank=None,
        num_tokens_per_expert=None,
        topk_idx=None,
        topk_weights=None,
        expert_alignment=1,
        num_worst_tokens=0,
        config=None,
        previous_event=None,
        async_finish=False,
        allocate_on_comm_stream=False,
    ):
        self._enter("dispatch" if handle is None else "dispatch again")
        check_stream(previous_event, EventOverlap, async_finish, allocate_on_comm_stream)
        LIBRARY.check_rows(x)
        if handle is not None:
            assert topk_idx is None
            assert topk_weights is None
            route: Route = handle[0]
            assert x.shape[0] == route.num_tokens
            return in_time((route.forth(x), None, None, None, None), async_finish)
        ranks, experts = self.group.size(), num_tokens_per_expert.shape[0]
        assert num_tokens_per_expert.dtype == num_tokens_per_rank.dtype == torch.int32
        assert is_token_in_rank.dtype == torch.bool
        assert is_token_in_rank.shape == (x.shape[0], ranks)
        assert topk_idx.shape == topk_weights.shape == (x.shape[0], topk_idx.shape[1])
        assert topk_weights.dtype == torch.float32
        assert topk_weights.is_contiguous()
        assert experts % ranks == 0
        route = Route(self.group, is_token_in_rank)
        local, weights = of_each_visit(route, topk_idx, topk_weights, experts // ranks)
        local, weights = route.forth(local, by_visit=True), route.forth(weights, by_visit=True)
        counts = [int((local == expert).sum()) for expert in range(experts // ranks)]
        counts = [-(-count // expert_alignment) * expert_alignment for count in counts]
        arrived = route.forth(x)
        if num_worst_tokens:
            arrived, local, weights = (with_garbage(t, num_worst_tokens) for t in (arrived, local, weights))
            counts = []
        return in_time((arrived, local, weights, counts, (route, *[None] * 5)), async_finish)

    def combine(
        self,
        x,
        handle,
        topk_weights=None,
        bias=None,
        config=None,
        previous_event=None,
        async_finish=False,
        allocate_on_comm_stream=False,
    ):
        self._enter("combine")
        check_stream(previous_event, EventOverlap, async_finish, allocate_on_comm_stream)
        LIBRARY.check_rows(x)
        route: Route = handle[0]
        out = route.add_up(route.back(x))
        if topk_weights is None:
            return in_time((out, None), async_finish)
        assert topk_weights.dtype == torch.float32
        assert topk_weights.is_contiguous()
        return in_time((out, route.add_up(route.back(topk_weights))), async_finish)


def of_each_visit(route: Route, index: Tensor, weights: Tensor, num_local: int) -> tuple[Tensor, Tensor]:
    """The choices of a token on the rank that it visits: local experts, and weights that are 0 elsewhere."""
    here = (index[route.token] >= 0) & (index[route.token] // num_local == route.rank[:, None])
    local = index[route.token] - route.rank[:, None] * num_local
    return torch.where(here, local, -1), torch.where(here, weights[route.token], 0.0)


class OldBuffer(Buffer):
    """Of 1.0.0: its destructor frees it, and it knows fewer arguments."""

    __name__ = "Buffer"

    def __init__(self, group, num_nvl_bytes=0, num_rdma_bytes=0, low_latency_mode=False, num_qps_per_rank=1) -> None:
        super().__init__(group, num_nvl_bytes, num_rdma_bytes, num_qps_per_rank=num_qps_per_rank)

    def __del__(self) -> None:
        if not LIBRARY.fail and hasattr(self, "number"):
            self._enter("free")

    destroy: Any = property()

    def dispatch(
        self,
        x,
        handle=None,
        num_tokens_per_rank=None,
        num_tokens_per_rdma_rank=None,
        is_token_in_rank=None,
        num_tokens_per_expert=None,
        topk_idx=None,
        topk_weights=None,
        expert_alignment=1,
        config=None,
        previous_event=None,
        async_finish=False,
        allocate_on_comm_stream=False,
    ):
        layout = (num_tokens_per_rank, num_tokens_per_rdma_rank, is_token_in_rank, num_tokens_per_expert)
        stream = (previous_event, async_finish, allocate_on_comm_stream)
        return super().dispatch(x, handle, *layout, topk_idx, topk_weights, expert_alignment, 0, None, *stream)

    def combine(
        self,
        x,
        handle,
        topk_weights=None,
        config=None,
        previous_event=None,
        async_finish=False,
        allocate_on_comm_stream=False,
    ):
        stream = (previous_event, async_finish, allocate_on_comm_stream)
        return super().combine(x, handle, topk_weights, None, None, *stream)
