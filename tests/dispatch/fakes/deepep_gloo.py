"""What the stand-ins of DeepEP share: routes over gloo, and what an observer of the library sees.

They refuse what the library refuses, and leave NaN wherever the library does not promise to write.
"""

import sys
import weakref
import zlib
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class EventHandle:
    """A point in the stream of the caller."""


class EventOverlap:
    """The end of a call. Until somebody waits for it, the results of an asynchronous call are garbage."""

    def __init__(self, event: "EventHandle | None" = None) -> None:
        self.event = event
        self.unwritten: list[tuple[Tensor, Tensor]] | None = None

    def current_stream_wait(self) -> None:
        assert self.unwritten is not None, "the event of a call that was not asynchronous"
        for garbage, result in self.unwritten:
            garbage.copy_(result)


def check_stream(previous_event: Any, kind: type, asynchronous: bool, on_comm_stream: bool) -> None:
    """What the library asserts of a call's stream."""
    assert asynchronous or not on_comm_stream
    assert previous_event is None or asynchronous
    assert not on_comm_stream or isinstance(previous_event, kind)


def in_time(results: tuple[Any, ...], asynchronous: bool) -> tuple[Any, ...]:
    """The results of a call, and its event."""
    event = EventOverlap()
    if not asynchronous:
        return *results, event
    event.unwritten = []
    out = []
    for result in results:
        if isinstance(result, Tensor):
            event.unwritten.append((with_garbage(result[:0], len(result)), result))
            result = event.unwritten[-1][0]
        out.append(result)
    return *out, event


@dataclass
class Library:
    """The stand-in of one process.

    ``log`` notes buffers that are made and destroyed and the calls that every rank makes; ``routes`` the handles that
    somebody still holds.
    """

    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,)
    log: list[str] = field(default_factory=list)
    routes: "weakref.WeakSet[Any]" = field(default_factory=weakref.WeakSet)
    made: list[dict[str, Any]] = field(default_factory=list)
    fail: bool = False

    def enter(self, call: str, group: Any) -> None:
        if self.fail:
            raise RuntimeError("an error inside the library")
        self.log.append(call)
        check_alike(zlib.crc32(call.encode()), f"the ranks are not all in {call!r}", group)

    def check_rows(self, x: Tensor) -> None:
        assert x.dim() == 2
        assert x.is_contiguous()
        assert x.dtype in self.dtypes, x.dtype
        assert x.shape[1] * x.element_size() % 16 == 0


def check_alike(value: int, problem: str, group: Any) -> None:
    """Every rank must have the same value."""
    bounds = torch.tensor([value, -value])
    dist.all_reduce(bounds, dist.ReduceOp.MAX, group)
    assert bounds.tolist() == [value, -value], problem


LIBRARY = Library()


def install(classes: dict[str, Any], dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,)) -> Library:
    """Make the stand-in the package ``deep_ep`` of this process."""
    from lightning_moe import optional

    LIBRARY.__init__(dtypes)  # type: ignore[misc]
    module = ModuleType("deep_ep")
    vars(module).update({**classes, "EventOverlap": EventOverlap, "topk_idx_t": torch.int64})
    sys.modules["deep_ep"] = module
    optional.probe.cache_clear()
    return LIBRARY


class Buffer:
    """What the constructors and ``destroy`` have in common."""

    def _open(self, group: Any, explicitly_destroy: bool = False, **made: Any) -> None:
        self.group, self.explicitly_destroy, self.destroyed = group, explicitly_destroy, False
        LIBRARY.made.append(made)
        self.number = len(LIBRARY.made)
        LIBRARY.enter(f"open {self.number}", group)

    def _enter(self, call: str) -> None:
        assert not self.destroyed
        LIBRARY.enter(f"{call} {self.number}", self.group)

    def destroy(self) -> None:
        assert self.explicitly_destroy
        assert not self.destroyed
        self._enter("destroy")
        self.destroyed = True


class Route:
    """Which rows of this rank go to which rank, and how many come from each."""

    def __init__(self, group: Any, goes: Tensor) -> None:
        self.group, self.num_tokens = group, goes.shape[0]
        self.rank, self.token = goes.t().nonzero(as_tuple=True)
        sent = goes.sum(0)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        self.send, self.receive = sent.tolist(), received.tolist()
        self.order = torch.arange(sum(self.receive))  # in which the rows lie, of those sorted by source
        LIBRARY.routes.add(self)

    def forth(self, rows: Tensor, by_visit: bool = False) -> Tensor:
        """To the ranks: rows of tokens, or of visits."""
        rows = (rows if by_visit else rows[self.token]).contiguous()
        out = rows.new_empty((sum(self.receive), *rows.shape[1:]))
        dist.all_to_all_single(out, rows, self.receive, self.send, group=self.group)
        return out[self.order]

    def back(self, rows: Tensor) -> Tensor:
        """From the ranks, a row a visit."""
        assert rows.shape[0] == sum(self.receive)
        by_source = torch.empty_like(rows)
        by_source[self.order] = rows
        out = rows.new_empty((sum(self.send), *rows.shape[1:]))
        dist.all_to_all_single(out, by_source, self.send, self.receive, group=self.group)
        return out

    def add_up(self, visits: Tensor) -> Tensor:
        """Sum the visits of each token, in float32."""
        out = torch.zeros(self.num_tokens, *visits.shape[1:])
        return out.index_add_(0, self.token, visits.float()).to(visits.dtype)


def with_garbage(t: Tensor, length: int) -> Tensor:
    """Rows of NaN, or of a wild index, up to a length."""
    tail = torch.full((length - t.shape[0], *t.shape[1:]), float("nan") if t.is_floating_point() else 7)
    return torch.cat((t, tail.to(t.dtype)))
