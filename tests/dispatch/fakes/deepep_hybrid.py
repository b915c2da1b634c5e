"""HybridEP over gloo, with the signatures of DeepEP's branch ``hybrid-ep``."""

import torch
import torch.distributed as dist

from tests.dispatch.fakes.deepep_gloo import LIBRARY, Buffer, Route, check_alike


class HybridEPBuffer(Buffer):
    def __init__(
        self,
        group,
        hidden_dim,
        max_num_of_tokens_per_rank,
        num_local_experts,
        use_fp8=False,
        num_sms_dispatch_api=None,
        num_sms_combine_api=None,
        num_sms_preprocessing_api=None,
        num_blocks_permute=None,
        num_blocks_unpermute=None,
        load_cached_kernels=False,
        use_shared_buffer=True,
        enable_custom_allgather=False,
        num_of_hybrid_ep_ranks_per_nvlink_domain=None,
        use_mnnvl=None,
    ) -> None:
        assert group.size() > 1
        assert hidden_dim % 16 == 0
        assert num_local_experts * group.size() % 4 == 0
        assert max_num_of_tokens_per_rank % 16 == 0
        self.hidden_dim, self.room, self.num_local = hidden_dim, max_num_of_tokens_per_rank, num_local_experts
        self._open(group, tokens=max_num_of_tokens_per_rank, num_sms=(num_sms_dispatch_api, num_sms_combine_api))

    def dispatch_with_permute(
        self,
        *,
        hidden,
        topk_idx=None,
        topk_weights=None,
        num_of_experts_per_rank=None,
        num_of_experts=None,
        use_fp8=None,
        routing_map=None,
        probs=None,
        scaling_factor=None,
        num_permuted_tokens=None,
        pad_multiple=None,
        handle=None,
        non_blocking=False,
        fuse_permute_dispatch=False,
        num_dispatched_tokens=None,
        use_host_meta=None,
    ):
        self._enter("dispatch" if handle is None else "dispatch again")
        LIBRARY.check_rows(hidden)
        assert num_dispatched_tokens is None, "deprecated"
        assert use_host_meta is None, "deprecated"
        assert not non_blocking
        check_alike(hidden.shape[0], "the ranks bring different numbers of tokens", self.group)
        assert hidden.shape[0] <= self.room
        if handle is not None:
            route = handle[0]
            assert probs is None
            assert num_permuted_tokens == len(route.order)
            return route.forth(hidden), None, None, route.counts, handle
        assert routing_map.dtype == torch.bool
        assert routing_map.is_contiguous()
        assert probs.dtype == torch.float32
        assert probs.is_contiguous()
        assert routing_map.shape == probs.shape == (hidden.shape[0], self.num_local * self.group.size())
        # A row a choice: the route's destinations are experts, whose counts are exchanged by rank.
        route = _ExpertRoute(self.group, routing_map, self.num_local)
        weights = route.forth(probs[route.token, route.expert], by_visit=True)
        return route.forth(hidden), weights, None, route.counts, (route, *[None] * 8)

    def combine_with_unpermute(
        self,
        *,
        hidden,
        probs=None,
        handle=None,
        pad_multiple=None,
        fuse_unpermute_combine=False,
        num_dispatched_tokens=None,
    ):
        self._enter("combine")
        LIBRARY.check_rows(hidden)
        route = handle[0]
        out = route.add_up(route.back(hidden))
        nowhere = torch.ones(route.num_tokens, dtype=torch.bool)
        nowhere[route.token] = False
        out[nowhere] = float("nan")
        if probs is None:
            return out, None
        assert probs.dim() == 1
        assert probs.dtype == torch.float32
        weights = torch.full((route.num_tokens, self.num_local * self.group.size()), float("nan"))
        weights[route.token, route.expert] = route.back(probs)
        return out, weights


class _ExpertRoute(Route):
    """A visit for each expert, sorted by it where it arrives."""

    def __init__(self, group, chosen, num_local) -> None:
        ranks = group.size()
        super().__init__(group, torch.zeros(chosen.shape[0], ranks, dtype=torch.bool))
        self.expert, self.token = chosen.t().nonzero(as_tuple=True)
        sent = chosen.sum(0).view(ranks, num_local)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        self.send, self.receive = sent.sum(1).tolist(), received.sum(1).tolist()
        of_row = torch.arange(num_local).repeat(ranks).repeat_interleave(received.reshape(-1))
        self.order = of_row.argsort(stable=True)
        self.counts = received.sum(0).int()
