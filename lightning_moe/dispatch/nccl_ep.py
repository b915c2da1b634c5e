"""NCCL EP: dispatch and combine in kernels of the device, over NVLink and RDMA, through Transformer Engine.

A dispatcher of its own rather than a transport: rows arrive sorted by expert, one for each choice, and the library
brings its own autograd.
"""

import importlib
import inspect
import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import pad
from typing_extensions import override

from lightning_moe.dispatch.base import Dispatched, Dispatcher, DispatcherCaps
from lightning_moe.dispatch.collectives import all_to_all_rows
from lightning_moe.dispatch.permute import count_experts
from lightning_moe.optional import probe, require

_MIN_NCCL = (2, 30, 4)
_MIN_CAPABILITY = (9, 0)
_MIN_TRANSFORMER_ENGINE = "2.17"
_MAX_TOP_K = 32
# The library moves rows in units of 16 bytes, the float32 weights of the experts of a rank's neighbourhood alike, and
# sizes its buffers in chunks of 64 tokens.
_ROW_BYTES, _EXPERTS, _CHUNK = 16, 4, 64
# What a rank tells the others of a call, before its choices of each expert.
_TOKENS, _BUSY, _REPEATED, _VISITS, _TOLD = range(5)


def nccl_ep_unusable() -> str:
    """Say why NCCL EP is not usable here.

    Returns:
        The reason in one line; empty where it is usable.
    """
    found = probe("transformer_engine")
    if found.module is None:
        return found.why
    try:
        _library()
    except ModuleNotFoundError:
        version = found.version or "of unknown version"
        return f"transformer_engine {version} has no NCCL EP; install {_MIN_TRANSFORMER_ENGINE} or newer"
    except Exception as error:
        text = " ".join(str(error).split())[:200]
        return f"transformer_engine.pytorch.ep cannot be imported: {type(error).__name__}: {text}"
    if not torch.cuda.is_available():
        return "it runs on CUDA devices only, and there is none"
    capability = torch.cuda.get_device_capability()
    if capability < _MIN_CAPABILITY:
        found_here, needed = (".".join(map(str, numbers)) for numbers in (capability, _MIN_CAPABILITY))
        return f"it needs compute capability {needed} or higher, and this device has {found_here}"
    if not dist.is_nccl_available():
        return "this torch is built without NCCL"
    nccl = torch.cuda.nccl.version()
    if nccl < _MIN_NCCL:
        found_here, needed = (".".join(map(str, numbers)) for numbers in (nccl, _MIN_NCCL))
        return f"it needs NCCL {needed} or newer, and torch runs with {found_here}; install a newer nvidia-nccl-cu13"
    return ""


def _library() -> Any:
    return importlib.import_module(f"{require('transformer_engine', 'dispatcher=' + repr('nccl_ep')).__name__}.ep")


@dataclass(frozen=True)
class _Served:
    """What all layers of a process have to share."""

    group: str
    num_experts: int
    hidden_size: int
    dtype: torch.dtype


@dataclass(frozen=True)
class _Call:
    """What the ranks bring to one call, the same on each.

    Attributes:
        tokens: The most tokens of a rank.
        top_k: Experts a token.
        busy: Whether a call waits for its backward pass on some rank.
        repeated: Choices of an expert that its token chose already.
        rows: Rows that each rank receives.
        rows_here: Rows that each expert of this rank receives.
        choices_here: Choices of this rank's tokens that are not dropped.
        visits_here: Visits of this rank's tokens to other ranks.
    """

    tokens: int
    top_k: int
    busy: bool
    repeated: int
    rows: list[int]
    rows_here: list[int]
    choices_here: int
    visits_here: int


class _Session:
    """The one expert-parallel context that Transformer Engine keeps in a process. All layers share it.

    Args:
        max_num_sms: Multiprocessors that the kernels may use; 0 leaves it to the library.

    Attributes:
        tokens: Tokens that a rank may bring to a call; 0 before it is set up.
        top_k: Experts a token.
        capacity: Rows of the buffers that receive; ``None`` where each call makes room for its own.
    """

    def __init__(self, max_num_sms: int) -> None:
        self.max_num_sms = max_num_sms
        self.served: _Served | None = None
        self.tokens = 0
        self.top_k = 0
        self.capacity: int | None = None
        self._handles: list[StorageWeakRef] = []

    def serve(self, served: _Served) -> None:
        """Check that one more layer is like the others.

        Raises:
            ValueError: If it is not.
        """
        if self.served is not None and self.served != served:
            raise ValueError(
                "dispatcher='nccl_ep' keeps one context a process, so all layers need the same number of experts,"
                f" width, dtype and group; got {served} beside {self.served}; set dispatcher='all_to_all'"
            )
        self.served = served

    def busy(self) -> bool:
        """Whether some call still waits for its backward pass, which needs the context as it is."""
        self._handles = [handle for handle in self._handles if not handle.expired()]
        return bool(self._handles)

    def set_up(self, group: ProcessGroup, tokens: int, top_k: int, capacity: int | None) -> None:
        """Set the context up, or anew with other sizes. Collective."""
        library, served = _library(), self.served
        assert served is not None
        if self.tokens:
            self.finish()
            self.served = served
        elif getattr(library, "is_ep_bootstrapped", lambda: False)():
            raise ValueError(
                "dispatcher='nccl_ep' cannot set up expert parallelism in Transformer Engine, where something else did"
                " before: other code, or a fit that an exception ended. Call ep_finalize() of"
                " transformer_engine.pytorch.ep on every rank before, or start new processes"
            )
        takes = inspect.signature(library.ep_bootstrap).parameters
        newer = {"num_topk": top_k, "drop_on_overflow": False}
        library.ep_bootstrap(
            ep_group=group,
            num_experts=served.num_experts,
            max_tokens_per_rank=tokens,
            hidden_dim=served.hidden_size,
            recv_capacity_per_rank=capacity,
            max_num_sms=self.max_num_sms,
            max_token_dtype=served.dtype,
            **{name: value for name, value in newer.items() if name in takes},
        )
        self.tokens, self.top_k, self.capacity = tokens, top_k, capacity

    def buffer(self, num_local_experts: int, device: torch.device) -> Any:
        """Make what one dispatch, its combine and their backward passes keep their route in."""
        assert self.served is not None
        buffer = _library().EpBuffer(
            top_k=self.top_k,
            max_tokens_per_rank=self.tokens,
            hidden_dim=self.served.hidden_size,
            num_local_experts=num_local_experts,
            recv_capacity_per_rank=self.capacity,
            payload_dtype=self.served.dtype,
            device=device,
        )
        self._handles.append(StorageWeakRef(buffer.handle_mem.untyped_storage()))
        return buffer

    def finish(self) -> None:
        """Take the context down. Collective where there is one."""
        set_up, self.tokens, self.served = self.tokens > 0, 0, None
        self._handles.clear()
        if set_up:
            _library().ep_finalize()


@dataclass(frozen=True)
class _Route:
    """One call's way, which :meth:`NcclEpDispatcher.combine` goes back.

    Attributes:
        buffer: The library's side of it.
        num_tokens: ``T``.
        capacity: Rows that the library takes back, or ``None`` for as many as it gave.
        reached: ``[T, 1]`` bool: tokens with a choice; ``None`` where all have.
    """

    buffer: Any
    num_tokens: int
    capacity: int | None
    reached: Tensor | None


class NcclEpDispatcher(Dispatcher):
    """Moves rows with NCCL EP, which Transformer Engine brings along (``transformer_engine.pytorch.ep``).

    The ranks tell each other what they bring to a call, in one small exchange and one wait for the host in the forward
    pass; so that what cannot work is an error on every rank before a row moves. The backward pass has neither.

    Its context is set up at the first call and after :meth:`finalize`, and shared by all layers. It grows with the
    tokens of a call, unless ``max_tokens_per_rank`` fixes them or a backward pass is outstanding.

    Args:
        max_tokens_per_rank: Most tokens that a rank brings to one call; ``None`` takes them from the calls.
        receive_capacity: Rows that a rank can receive in one call, for buffers of one size; a call that needs more is
            an error. ``None`` makes room for each call, or on Transformer Engine before 2.19 for the worst one.
        top_k: Most experts a token of any layer; ``None`` takes them from the calls.
        max_num_sms: Multiprocessors that its kernels may use; 0 leaves it to the library.

    Raises:
        ValueError: If an option is out of its range.
    """

    name = "nccl_ep"
    caps = DispatcherCaps(
        uneven_experts=False,
        expert_major=True,
        min_ranks=2,
        payload_dtypes=(torch.bfloat16,),
        device_types=("cuda",),
    )

    def __init__(
        self,
        max_tokens_per_rank: int | None = None,
        receive_capacity: int | None = None,
        top_k: int | None = None,
        max_num_sms: int = 0,
    ) -> None:
        given = {"max_tokens_per_rank": max_tokens_per_rank, "receive_capacity": receive_capacity, "top_k": top_k}
        for option, value in given.items():
            if value is not None and value < 1:
                raise ValueError(f"{option}={value} of dispatcher='nccl_ep' must be at least 1, or None")
        if max_num_sms < 0:
            raise ValueError(
                f"max_num_sms={max_num_sms} of dispatcher='nccl_ep' must be at least 0, which is automatic"
            )
        self.max_tokens_per_rank = max_tokens_per_rank
        self.receive_capacity = receive_capacity
        self.top_k = top_k
        self._session = _Session(max_num_sms)
        self._dtype = torch.bfloat16

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
        self.top_k = top_k or self.top_k
        self.max_tokens_per_rank = max_tokens_per_rank or self.max_tokens_per_rank
        if "cpu" not in self.caps.device_types and (problem := nccl_ep_unusable() or _no_nccl(group)):
            raise RuntimeError(f"dispatcher='nccl_ep' is not usable here: {problem}; or set dispatcher='all_to_all'")
        if hidden_size * dtype.itemsize % _ROW_BYTES:
            raise ValueError(
                f"dispatcher='nccl_ep' moves rows of a multiple of {_ROW_BYTES} bytes, got hidden size {hidden_size} in"
                f" {str(dtype).removeprefix('torch.')}, {hidden_size * dtype.itemsize} bytes; set"
                f" dispatcher='all_to_all', or a hidden size that is a multiple of {_ROW_BYTES // dtype.itemsize}"
            )
        if num_experts % _EXPERTS:
            raise ValueError(
                f"dispatcher='nccl_ep' needs a multiple of {_EXPERTS} experts, got {num_experts};"
                " set dispatcher='all_to_all'"
            )
        self._check_top_k(self.top_k or 1)
        self._dtype = dtype
        if hidden_size:
            self._session.serve(self._served(hidden_size))

    @override
    def dispatch(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Dispatched:
        if self.group is None:
            raise RuntimeError("dispatcher='nccl_ep' was not set up; call setup() with the expert-parallel ranks")
        num_tokens, top_k = top_k_index.shape
        chosen = count_experts(top_k_index, self.num_experts)[1:]
        call = self._agree(top_k_index, chosen)
        self._session.serve(self._served(hidden_states.shape[1]))
        self._make_room(call)
        session, valid, reached = self._session, top_k_index >= 0, None
        if call.choices_here < num_tokens * top_k:
            # The library writes neither a result nor a gradient for a token that goes nowhere.
            reached = valid.any(dim=1, keepdim=True)
            hidden_states = torch.where(reached, hidden_states, 0.0)
        weights = torch.where(valid, top_k_weights.float(), 0.0)
        # Transformer Engine before 2.19 does not take an empty tensor: a row that goes nowhere stands in for it.
        row, columns = int(num_tokens == 0), session.top_k - top_k
        if row or columns:
            hidden_states = pad(hidden_states, (0, 0, 0, row))
            top_k_index = pad(top_k_index, (0, columns, 0, row), value=-1)
            weights = pad(weights, (0, columns, 0, row))
        buffer = session.buffer(self.num_local_experts, hidden_states.device)
        rows, row_weights, tokens_per_expert = _library().ep_dispatch(
            buffer=buffer,
            tokens=hidden_states.contiguous(),
            topk_idx=top_k_index.contiguous(),
            topk_weights=weights.contiguous(),
        )
        num_rows = sum(call.rows_here)
        if session.capacity is not None:
            # The rows beyond are uninitialised. Copied, as a view would keep them all until the backward pass.
            rows, row_weights = rows[:num_rows].clone(), row_weights[:num_rows].clone()
        self.rows_sent += call.visits_here
        self.bytes_sent += call.visits_here * rows.shape[1] * rows.element_size()
        return Dispatched(
            rows=rows,
            row_weights=row_weights,
            tokens_per_expert=tokens_per_expert.long(),
            tokens_per_expert_host=call.rows_here,
            choices_per_expert=chosen,
            state=_Route(buffer, num_tokens, session.capacity, reached),
        )

    @override
    def combine(self, expert_rows: Tensor, state: Any) -> Tensor:
        route: _Route = state
        if route.capacity is not None:
            expert_rows = pad(expert_rows, (0, 0, 0, route.capacity - expert_rows.shape[0]))
        out = _library().ep_combine(
            buffer=route.buffer, expert_out=expert_rows.contiguous(), num_local_tokens=max(route.num_tokens, 1)
        )
        if route.num_tokens == 0:
            return out[:0]
        return out if route.reached is None else torch.where(route.reached, out, 0.0)

    @override
    def finalize(self) -> None:
        """Take the context down; the next call sets it up again. Collective, idempotent.

        Does nothing while an exception is handled: other ranks may never come.
        """
        if sys.exc_info()[0] is None:
            self._session.finish()

    def _served(self, hidden_size: int) -> _Served:
        assert self.group is not None
        return _Served(self.group.group_name, self.num_experts, hidden_size, self._dtype)

    def _check_top_k(self, top_k: int) -> None:
        if top_k > _MAX_TOP_K:
            raise ValueError(
                f"dispatcher='nccl_ep' sends a token to at most {_MAX_TOP_K} experts, got {top_k};"
                " set dispatcher='all_to_all'"
            )

    def _agree(self, top_k_index: Tensor, chosen: Tensor) -> _Call:
        """Exchange what each rank brings to a call, and wait for it."""
        assert self.group is not None
        ranks, mine, local = self.group.size(), self.group.rank(), self.num_local_experts
        num_tokens, top_k = top_k_index.shape
        rank_of_choice = torch.div(top_k_index, local, rounding_mode="floor") + 1
        goes = top_k_index.new_zeros((num_tokens, ranks + 1)).scatter_(1, rank_of_choice, 1)
        goes[:, 0], goes[:, mine + 1] = 0, 0  # the dropped choices, and those that stay
        in_order = top_k_index.sort(dim=1).values
        repeated = (in_order[:, 1:] == in_order[:, :-1]) & (in_order[:, 1:] >= 0)
        told = chosen.new_empty(_TOLD + self.num_experts)
        told[_TOKENS], told[_BUSY] = num_tokens, int(self._session.busy())
        told[_REPEATED], told[_VISITS], told[_TOLD:] = repeated.sum(), goes.sum(), chosen
        each = [1] * ranks
        table: list[list[int]] = all_to_all_rows(told.expand(ranks, -1), each, each, self.group).tolist()
        rows = [sum(column) for column in zip(*(line[_TOLD:] for line in table), strict=True)]
        by_rank = [rows[rank * local : (rank + 1) * local] for rank in range(ranks)]
        return _Call(
            tokens=max(line[_TOKENS] for line in table),
            top_k=top_k,
            busy=any(line[_BUSY] for line in table),
            repeated=sum(line[_REPEATED] for line in table),
            rows=[sum(counts) for counts in by_rank],
            rows_here=by_rank[mine],
            choices_here=sum(table[mine][_TOLD:]),
            visits_here=table[mine][_VISITS],
        )

    def _make_room(self, call: _Call) -> None:
        """Set up or enlarge the context for a call, or raise the same error on every rank."""
        assert self.group is not None
        session, limit = self._session, self.max_tokens_per_rank
        self._check_top_k(call.top_k)
        if call.repeated:
            raise ValueError(
                f"dispatcher='nccl_ep' takes each expert of a token once, but {call.repeated} choices repeat one;"
                " choose different experts, or set dispatcher='all_to_all'"
            )
        if limit is not None and call.tokens > limit:
            raise ValueError(
                f"max_tokens_per_rank={limit} of dispatcher='nccl_ep' is too small: a rank brings {call.tokens} tokens"
                f" to one call; set at least {call.tokens}, or None"
            )
        if self.top_k is not None and call.top_k > self.top_k:
            raise ValueError(
                f"top_k={self.top_k} of dispatcher='nccl_ep' is too small: a token has {call.top_k} experts;"
                f" set at least {call.top_k}, or None"
            )
        if call.tokens > session.tokens or call.top_k > session.top_k or not session.tokens:
            tokens = max(limit or call.tokens, session.tokens, 1)
            tokens, top_k = -(-tokens // _CHUNK) * _CHUNK, max(self.top_k or call.top_k, session.top_k)
            if session.tokens and call.busy:
                raise ValueError(
                    f"dispatcher='nccl_ep' is set up for {session.tokens} tokens a rank and {session.top_k} experts a"
                    f" token, and cannot grow to {tokens} and {top_k} before the backward pass of an earlier call;"
                    " set dispatcher=lightning_moe.dispatch.NcclEpDispatcher("
                    f"max_tokens_per_rank={tokens}, top_k={top_k})"
                )
            session.set_up(self.group, tokens, top_k, self._capacity(tokens, top_k))
        if session.capacity is not None and max(call.rows) > session.capacity:
            rows = max(call.rows)
            raise ValueError(
                f"receive_capacity={session.capacity} of dispatcher='nccl_ep' is too small: rank"
                f" {call.rows.index(rows)} of the group receives {rows} rows; set at least {rows}, or None for any"
            )

    def _capacity(self, tokens: int, top_k: int) -> int | None:
        assert self.group is not None
        if self.receive_capacity is not None:
            if self.receive_capacity < tokens:
                raise ValueError(
                    f"receive_capacity={self.receive_capacity} of dispatcher='nccl_ep' must be at least the"
                    f" {tokens} tokens that a rank may send (max_tokens_per_rank rounded up to a multiple of {_CHUNK})"
                )
            return self.receive_capacity
        if inspect.signature(_library().ep_bootstrap).parameters["recv_capacity_per_rank"].default is None:
            return None
        # A token of any rank arrives once for each of its experts that is here.
        return self.group.size() * tokens * min(top_k, self.num_local_experts)


def _no_nccl(group: ProcessGroup) -> str:
    backends = dist.get_backend_config(group)
    if "cuda:nccl" in backends:
        return ""
    return f"it needs process_group_backend='nccl' and accelerator='gpu', and the ranks are connected by {backends!r}"
