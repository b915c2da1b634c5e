"""NCCL EP as ``transformer_engine.pytorch.ep`` offers it, with the signatures of its releases, over gloo.

It refuses what the library refuses, traps where it traps, and leaves NaN wherever the library does not promise to
write.
"""

import sys
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

VERSIONS = ("2.17.1", "2.18.0", "2.19.0", "2.20.2")


@dataclass
class Route:
    """Where the rows of one prepared call go: what the library keeps in ``handle_mem``."""

    token: Tensor
    choice: Tensor
    send: list[int]
    receive: list[int]
    slot: Tensor
    shape: tuple[int, int]
    tokens_per_expert: Tensor


@dataclass
class Library:
    """The context of a process. ``log`` notes what an observer of the library sees."""

    dtypes: tuple[torch.dtype, ...]
    zero_tokens: bool
    group: Any = None
    config: dict[str, Any] = field(default_factory=dict)
    routes: dict[int, Route] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)

    def bootstrap(self, group: Any, **config: Any) -> None:
        if self.group is not None:
            raise RuntimeError("ep_bootstrap was already called in this process")
        if group.size() < 2:
            raise ValueError(f"ep_bootstrap requires ep_group.size() >= 2 (got {group.size()}).")
        capacity, tokens = config["recv_capacity_per_rank"], config["max_tokens_per_rank"]
        assert config["num_experts"] % group.size() == 0
        assert tokens > 0
        assert tokens % 64 == 0, "invalid usage"
        assert capacity is None or capacity >= tokens
        assert config["hidden_dim"] * config["max_token_dtype"].itemsize % 16 == 0
        assert not config["zero_copy"]
        assert not config["drop_on_overflow"], "rows would be lost"
        dist.barrier(group)
        self.group, self.config = group, config
        self.log.append(f"bootstrap tokens={tokens} topk={config['num_topk']} capacity={capacity}")

    def finalize(self) -> None:
        if self.group is not None:
            dist.barrier(self.group)  # so that a rank that finalizes alone hangs, as it may with the library
            self.log.append("finalize")
        self.group = None
        self.routes.clear()

    def exchange(self, rows: Tensor, receive: list[int], send: list[int]) -> Tensor:
        received = rows.new_empty((sum(receive), *rows.shape[1:]))
        dist.all_to_all_single(received, rows.contiguous(), receive, send, group=self.group)
        return received

    def route(self, handle: Tensor) -> Route:
        if self.group is None:
            raise RuntimeError("EPBackend not initialized. Call nvte_ep_initialize() first.")
        return self.routes[handle.data_ptr()]

    def prepare(self, handle: Tensor, index: Tensor) -> Route:
        ranks, local = self.group.size(), self.config["num_experts"] // self.group.size()
        # A bitmap: an expert that a token chose twice is one bit.
        chosen = torch.zeros(len(index), self.config["num_experts"] + 1, dtype=torch.bool).scatter_(1, index + 1, True)
        expert, token = chosen[:, 1:].t().nonzero().unbind(1)
        choice = (index[token] == expert[:, None]).int().argmax(1)
        send = torch.bincount(expert // local, minlength=ranks).tolist()
        receive = self.exchange(torch.tensor(send), [1] * ranks, [1] * ranks).tolist()
        where = self.exchange(expert % local, receive, send)
        slot = torch.empty_like(where)
        slot[where.argsort(stable=True)] = torch.arange(len(where))
        counts = torch.bincount(where, minlength=local)
        self.routes[handle.data_ptr()] = Route(token, choice, send, receive, slot, tuple(index.shape), counts)
        return self.routes[handle.data_ptr()]

    def dispatch(self, handle: Tensor, index: Tensor, tokens: Tensor, weights: Tensor, capacity: int | None) -> Any:
        route = self.prepare(handle, index)
        total = sum(route.receive)
        if capacity is not None and total > capacity:
            raise RuntimeError(f"trap: {total} rows overflow the capacity of {capacity}")
        self.log.append(f"dispatch {len(index)} tokens")
        rows = torch.full((total if capacity is None else capacity, tokens.shape[1]), torch.nan, dtype=tokens.dtype)
        row_weights = torch.full(rows.shape[:1], torch.nan)
        rows[route.slot] = self.exchange(tokens[route.token], route.receive, route.send)
        row_weights[route.slot] = self.exchange(weights[route.token, route.choice], route.receive, route.send)
        return rows, row_weights, route.tokens_per_expert

    def combine(self, handle: Tensor, rows: Tensor, num_tokens: int) -> Tensor:
        route = self.route(handle)
        assert num_tokens == route.shape[0]
        back = self.exchange(rows[route.slot], route.send, route.receive)
        out = torch.full((num_tokens, rows.shape[1]), torch.nan, dtype=rows.dtype)
        out[route.token] = 0
        return out.index_add_(0, route.token, back)

    def dispatch_backward(self, handle: Tensor, grad_rows: Tensor, grad_weights: Tensor) -> tuple[Tensor, Tensor]:
        route = self.route(handle)
        weights = torch.full(route.shape, torch.nan)
        back = self.exchange(grad_weights[route.slot], route.send, route.receive)
        weights[route.token, route.choice] = back
        return self.combine(handle, grad_rows, route.shape[0]), weights

    def combine_backward(self, handle: Tensor, grad: Tensor, num_rows: int) -> Tensor:
        route = self.route(handle)
        rows = torch.full((num_rows, grad.shape[1]), torch.nan, dtype=grad.dtype)
        rows[route.slot] = self.exchange(grad[route.token], route.receive, route.send)
        return rows


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weights: Tensor, index: Tensor, buffer: Any) -> Any:
        ctx.library, ctx.handle = buffer.library, buffer.handle_mem
        rows, row_weights, counts = buffer.library.dispatch(
            buffer.handle_mem, index, tokens, weights, buffer.recv_capacity_per_rank
        )
        buffer.counts.copy_(counts)
        return rows, row_weights

    @staticmethod
    def backward(ctx: Any, grad_rows: Tensor, grad_weights: Tensor) -> Any:
        grads = ctx.library.dispatch_backward(ctx.handle, grad_rows.contiguous(), grad_weights.contiguous())
        return *grads, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, buffer: Any, num_tokens: int) -> Tensor:
        ctx.library, ctx.handle, ctx.num_rows = buffer.library, buffer.handle_mem, len(rows)
        return buffer.library.combine(buffer.handle_mem, rows, num_tokens)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.library.combine_backward(ctx.handle, grad.contiguous(), ctx.num_rows), None, None


class _Buffer:
    """What the buffers of all releases do."""

    library: Library

    def _fill(self, config: dict[str, Any], counts: torch.dtype) -> None:
        library = self.library
        if library.group is None:
            raise RuntimeError("EpBuffer requires ep_bootstrap() to be called first.")
        bootstrapped = library.config
        assert config["alignment"] in (0, 1)
        assert config["max_tokens_per_rank"] == bootstrapped["max_tokens_per_rank"]
        assert config["hidden_dim"] == bootstrapped["hidden_dim"]
        assert config["payload_dtype"] == bootstrapped["max_token_dtype"]
        assert config["recv_capacity_per_rank"] == bootstrapped["recv_capacity_per_rank"]
        assert config["num_local_experts"] == bootstrapped["num_experts"] // library.group.size()
        assert bootstrapped["num_topk"] in (None, config["top_k"])
        assert config["device"] is not None, "the default is a CUDA device"
        self.top_k, self.recv_capacity_per_rank = config["top_k"], config["recv_capacity_per_rank"]
        self.handle_mem = torch.zeros(64, dtype=torch.uint8)
        self.counts = torch.zeros(config["num_local_experts"], dtype=counts)


def _dispatch(buffer: Any, tokens: Tensor, index: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    library = buffer.library
    if tokens.dtype not in library.dtypes:
        raise NotImplementedError(
            f"NCCL EP currently supports only bfloat16 payloads; got tokens.dtype={tokens.dtype}."
        )
    if weights.dtype is not torch.float32:
        raise TypeError(f"topk_weights must be float32; got dtype={weights.dtype}.")
    assert index.dtype == torch.int64
    assert tokens.is_contiguous()
    assert index.is_contiguous()
    assert weights.is_contiguous()
    assert index.shape == weights.shape == (len(tokens), buffer.top_k)
    assert len(tokens) <= library.config["max_tokens_per_rank"]
    if len(tokens) == 0 and not library.zero_tokens:
        raise RuntimeError("topk_idx data must not be null")
    rows, row_weights = _Dispatch.apply(tokens, weights, index, buffer)
    return rows, row_weights, buffer.counts


def _combine(buffer: Any, rows: Tensor, num_tokens: int | None) -> Tensor:
    if rows.dtype not in buffer.library.dtypes:
        raise NotImplementedError(f"NCCL EP currently supports only bfloat16 payloads; got {rows.dtype}.")
    assert rows.is_contiguous()
    capacity = buffer.recv_capacity_per_rank
    assert len(rows) == (int(buffer.counts.sum()) if capacity is None else capacity)
    if num_tokens is None:
        num_tokens = buffer.library.config["max_tokens_per_rank"]
    return _Combine.apply(rows, buffer, num_tokens)


def _early(library: Library) -> dict[str, Any]:
    def ep_bootstrap(
        ep_group,
        num_experts,
        max_tokens_per_rank,
        recv_capacity_per_rank,
        hidden_dim,
        max_num_sms=0,
        zero_copy=False,
        max_token_dtype=torch.bfloat16,
    ):
        assert recv_capacity_per_rank is not None
        library.bootstrap(
            ep_group,
            num_experts=num_experts,
            max_tokens_per_rank=max_tokens_per_rank,
            recv_capacity_per_rank=recv_capacity_per_rank,
            hidden_dim=hidden_dim,
            max_num_sms=max_num_sms,
            zero_copy=zero_copy,
            max_token_dtype=max_token_dtype,
            num_topk=None,
            drop_on_overflow=False,
        )

    return {"ep_bootstrap": ep_bootstrap, "ep_finalize": lambda: library.finalize()}


def _of_2_17(library: Library) -> dict[str, Any]:
    class EpBuffer(_Buffer):
        def __init__(
            self,
            top_k,
            max_tokens_per_rank,
            recv_capacity_per_rank,
            hidden_dim,
            num_local_experts,
            alignment=0,
            payload_dtype=torch.bfloat16,
            device=None,
            dispatch_recv_tokens=None,
            combine_grad_expert_out=None,
        ):
            self._fill(locals(), torch.int32)

    def ep_dispatch(buffer, tokens, topk_idx, topk_weights):
        return _dispatch(buffer, tokens, topk_idx, topk_weights)

    def ep_combine(buffer, expert_out, *, num_local_tokens=None):
        return _combine(buffer, expert_out, num_local_tokens)

    EpBuffer.library = library
    return {**_early(library), "EpBuffer": EpBuffer, "ep_dispatch": ep_dispatch, "ep_combine": ep_combine}


def _calls() -> dict[str, Any]:
    def ep_dispatch(buffer, tokens, topk_idx, topk_weights, *, recv_tokens=None, recv_topk_weights=None):
        return _dispatch(buffer, tokens, topk_idx, topk_weights)

    def ep_combine(buffer, expert_out, *, num_local_tokens=None, grad_out=None):
        return _combine(buffer, expert_out, num_local_tokens)

    return {"ep_dispatch": ep_dispatch, "ep_combine": ep_combine}


def _of_2_18(library: Library) -> dict[str, Any]:
    class EpBuffer(_Buffer):
        def __init__(
            self,
            top_k,
            max_tokens_per_rank,
            recv_capacity_per_rank,
            hidden_dim,
            num_local_experts,
            alignment=0,
            payload_dtype=torch.bfloat16,
            device=None,
        ):
            self._fill(locals(), torch.int32)

    EpBuffer.library = library
    return {**_early(library), **_calls(), "EpBuffer": EpBuffer}


def _of_2_19(library: Library) -> dict[str, Any]:
    def ep_bootstrap(
        ep_group,
        num_experts,
        max_tokens_per_rank,
        hidden_dim,
        num_topk,
        recv_capacity_per_rank=None,
        max_num_sms=0,
        zero_copy=False,
        drop_on_overflow=False,
        max_token_dtype=torch.bfloat16,
    ):
        assert num_topk >= 1
        library.bootstrap(
            ep_group,
            num_experts=num_experts,
            max_tokens_per_rank=max_tokens_per_rank,
            recv_capacity_per_rank=recv_capacity_per_rank,
            hidden_dim=hidden_dim,
            max_num_sms=max_num_sms,
            zero_copy=zero_copy,
            max_token_dtype=max_token_dtype,
            num_topk=num_topk,
            drop_on_overflow=drop_on_overflow,
        )

    class EpBuffer(_Buffer):
        def __init__(
            self,
            top_k,
            max_tokens_per_rank,
            hidden_dim,
            num_local_experts,
            recv_capacity_per_rank=None,
            alignment=0,
            payload_dtype=torch.bfloat16,
            device=None,
            dispatch_fwd_quant_recipe=None,
            combine_bwd_quant_recipe=None,
        ):
            assert dispatch_fwd_quant_recipe is combine_bwd_quant_recipe is None
            self._fill(locals(), torch.int64)

    EpBuffer.library = library
    return {
        "ep_bootstrap": ep_bootstrap,
        "is_ep_bootstrapped": lambda: library.group is not None,
        "ep_finalize": lambda: library.finalize(),
        **_calls(),
        "EpBuffer": EpBuffer,
    }


def build(version: str, dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,)) -> ModuleType:
    """The module as a release has it; its ``library`` is the context behind it."""
    library = Library(dtypes, zero_tokens=version >= "2.19")
    api = {"2.17": _of_2_17, "2.18": _of_2_18, "2.19": _of_2_19, "2.20": _of_2_19}[version[:4]](library)
    module = ModuleType("transformer_engine.pytorch.ep")
    vars(module).update(api, library=library)
    return module


def install(version: str, dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,)) -> Library:
    """Put it where an import finds it, in this process."""
    ep = build(version, dtypes)
    sys.modules.update(
        {
            "transformer_engine": ModuleType("transformer_engine"),
            "transformer_engine.pytorch": ModuleType("transformer_engine.pytorch"),
            ep.__name__: ep,
        }
    )
    return ep.library
