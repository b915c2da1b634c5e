"""What a rank says when a collective fails: where each rank was, and which of them did not come.

With gloo a collective that a rank misses raises on the others: after the strategy's ``timeout``, or as soon as the
connection to that rank breaks. :class:`Watch` turns this into an error that names ranks and layers.

With NCCL no exception reaches Python then. A thread of torch, the watchdog, writes to the log of each waiting rank that
it "caught collective operation timeout", with the kind, size and sequence number of the operation but no layer, and
aborts the process (torch's flight recorder can write the last operations of each rank to files then:
``TORCH_NCCL_DUMP_ON_TIMEOUT=1``). What is named under NCCL too is a rank that is missing where the ranks agree on the
next batch of a dataloader, because they do that over gloo.
"""

import contextlib
import json
import re
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch import nn

_GRACE_S = 5.0  # how long a rank whose collective failed waits for the reports of the others
_LATE_S = 1.0  # a report that takes longer than this comes from a rank that is late
_SHORT_GRACE_S = 1.0  # the same, once a rank has said that it raised an exception
_LINGER_S = 1.0  # how long rank 0, which may hold the store, stays for the others to read
_STORE_TIMEOUT = timedelta(seconds=3)
_PREFIX = "lightning_moe/watch"
_MAX_CHARACTERS = 300
_TRAIL = 64  # calls of experts that a rank remembers

# What gloo says of a rank that does not answer, and of a pair of ranks that it has given up.
_LOST_RANK = re.compile(r"gloo/|Connection (closed|reset) by peer|Application timeout caused pair closure|\bNCCL\b")


class MissingRankError(RuntimeError):
    """A collective failed because some rank did not come to it; the message says where each rank was."""


def lost_rank(error: BaseException) -> bool:
    """Whether an exception means that a collective did not hear from some rank."""
    return isinstance(error, RuntimeError) and (
        isinstance(error, dist.DistError) or _LOST_RANK.search(str(error)) is not None
    )


class Watch:
    """Knows where this rank is, and tells it and asks the others when a collective fails.

    While all is well it notes names and talks to nobody.

    Attributes:
        place: Where in the model this rank is, such as ``"forward of net.layers.1.mlp.experts"``.
    """

    def __init__(self) -> None:
        self.place = ""
        self._trail: deque[str] = deque(maxlen=_TRAIL)  # experts that were called in this step
        self._calls = 0
        self._what = ""
        self._inside = False
        self._module: Any = None
        self._names: Sequence[str] = ()
        self._timeout: timedelta | None = None
        self._told: int | None = None

    def start(self, module: nn.Module, names: Sequence[str], timeout: timedelta | None) -> None:
        """Begin to watch. Every rank calls it, with a barrier after it, so that no report of before is left.

        Args:
            module: The LightningModule, with its trainer.
            names: Qualified names of its experts modules, the same on every rank.
            timeout: How long a collective waits for a rank, for the messages.
        """
        self._module, self._names, self._timeout = module, names, timeout
        self.place, self._what, self._inside, self._told = "", "set-up", False, None
        if dist.is_initialized() and dist.get_world_size() > 1:
            with contextlib.suppress(RuntimeError):
                dist.PrefixStore(_PREFIX, _default_store()).delete_key(str(dist.get_rank()))

    def enter_forward(self, place: str, name: str) -> None:
        """Note that this rank enters the experts ``name``, which is at ``place``."""
        self.place = place
        self._trail.append(name)
        self._calls += 1

    @contextlib.contextmanager
    def over(self, what: str, new_step: bool = False) -> Iterator[None]:
        """Watch over a part of a step.

        Args:
            what: What this rank does, as a noun.
            new_step: Whether a step begins with it.

        Raises:
            MissingRankError: From the error of a collective inside, once the other ranks have told where they are.
        """
        outermost, self._inside = not self._inside, True
        self._told = None
        self._what, self.place = what, ""
        if new_step:
            self._trail.clear()
            self._calls = 0
        try:
            yield
            self._what, self.place = f"after {what}", ""
        except StopIteration:  # an end, not an error
            raise
        except Exception as error:
            if outermost and (message := self.explain(error)):
                raise MissingRankError(message) from error
            raise
        finally:
            if outermost:
                self._inside = False

    def explain(self, error: BaseException) -> str | None:
        """Tell the other ranks of an error, and say what they tell if it comes from a rank that is missing.

        An error of another kind is only published, so that the ranks that wait for this one can name it.

        Args:
            error: What was raised on this rank.

        Returns:
            A message about the missing ranks; ``None`` for other errors, and for those that were explained before.
        """
        explained = isinstance(error, MissingRankError) or self._told == id(error)
        if explained or not dist.is_initialized() or dist.get_world_size() == 1:
            return None
        self._told = id(error)
        summary = f"{type(error).__name__}: {error}"[:_MAX_CHARACTERS]
        lost = lost_rank(error)
        mine = self._report(error, None if lost else summary)
        board = _Board(dist.get_rank(), mine)
        if not lost:
            return None
        board.collect(dist.get_world_size())
        return "\n".join([*_message(board, mine, self._names, self._timeout), f"The collective said: {summary}"])

    def _report(self, error: BaseException, raised: str | None) -> "_Report":
        step, module = "", ""
        with contextlib.suppress(Exception):  # an error of the description must not hide the one that is described
            step = _step(self._module.trainer)
        with contextlib.suppress(Exception):
            module = _innermost_module(error.__traceback__, self._module)
        if module and not self.place.endswith(f"forward of {module}"):
            module = f"in {module}"
        elif module:
            module = ""
        where = ", ".join(filter(None, (step, self._what, self.place, module)))
        trail = [self._names.index(name) for name in self._trail if name in self._names]
        return _Report(raised, where, step, self._calls, trail)


def _step(trainer: Any) -> str:
    if trainer.training:
        batch = max(trainer.fit_loop.batch_idx, 0)
        return f"training step {trainer.global_step} (epoch {trainer.current_epoch}, batch {batch})"
    batch = max(trainer._active_loop.batch_progress.current.ready - 1, 0)
    return f"{trainer.state.stage.dataloader_prefix} batch {batch}"


def _innermost_module(traceback: TracebackType | None, root: nn.Module) -> str:
    """Name the module in whose forward, or in whose gathering of weights by FSDP2, an exception was raised."""
    names = {id(module): name for name, module in root.named_modules()}
    found = ""
    while traceback is not None:
        this = traceback.tb_frame.f_locals.get("self")
        # FSDP2's group of parameters lists the modules that it gathers.
        for module in getattr(this, "modules", ()) if type(this).__name__ == "FSDPParamGroup" else (this,):
            found = names.get(id(module)) or found
        traceback = traceback.tb_next
    return found


def _default_store() -> Any:
    """The store of the default process group, without the prefix that the group puts in front of its keys."""
    store = dist.distributed_c10d._get_default_store()
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    return store


@dataclass
class _Report:
    """What a rank tells.

    Attributes:
        raised: The exception that it raised by itself; ``None`` if it waited for another rank.
        where: Where it was.
        step: In which step.
        calls: How many experts modules it had entered in that step.
        trail: Which of them were the last, as positions in the names.
    """

    raised: str | None
    where: str
    step: str
    calls: int
    trail: list[int]


class _Board:
    """Where the ranks tell each other. Whatever the state of the job, it neither raises nor waits for long."""

    def __init__(self, rank: int, mine: _Report) -> None:
        self.rank = rank
        self.others: dict[int, _Report] = {}
        self.late: list[int] = []
        self.missing: list[int] = []
        self.is_gone = False
        self._store: Any = None
        try:
            store = _default_store()
            if isinstance(store, dist.TCPStore):
                # A connection of our own: another thread may wait on the old one, and its timeout is long.
                store = dist.TCPStore(
                    store.host, store.port, is_master=False, wait_for_workers=False, timeout=_STORE_TIMEOUT
                )
            self._store = dist.PrefixStore(_PREFIX, store)
            self._store.set(str(rank), json.dumps(asdict(mine)))
        except Exception:
            self.is_gone = True

    def collect(self, world_size: int) -> None:
        """Read what the others tell, until all have told or it has taken too long."""
        start = time.monotonic()
        self.missing = [rank for rank in range(world_size) if rank != self.rank]
        try:
            while not self.is_gone:
                waited = time.monotonic() - start
                for rank in [rank for rank in self.missing if self._store.check([str(rank)])]:
                    self.others[rank] = _Report(**json.loads(self._store.get(str(rank))))
                    self.missing.remove(rank)
                    if waited > _LATE_S:
                        self.late.append(rank)
                raised = any(report.raised for report in self.others.values())
                if not self.missing or waited > (_SHORT_GRACE_S if raised else _GRACE_S):
                    break
                time.sleep(0.1)
        except Exception:
            self.is_gone = True
        if self.rank == 0:
            time.sleep(_LINGER_S)


def _message(board: _Board, mine: _Report, names: Sequence[str], timeout: timedelta | None) -> list[str]:
    me = f"rank {board.rank}"
    raised = [f"rank {rank} raised {report.raised}" for rank, report in board.others.items() if report.raised]
    differences = _differences(board, mine, names)
    if raised:
        head = f"{me} waited in vain: {'; '.join(raised)}"
    elif board.missing and not board.is_gone:
        head = f"{_ranks(board.missing)} did not come to a collective that {me} waited in"
    elif differences:
        head = "the ranks do not run the same modules"
    elif board.late:
        head = f"{_ranks(board.late)} came too late to a collective that {me} waited in"
    elif board.is_gone:
        head = f"{me} lost the other ranks, and the store on rank 0 is gone too, so that they cannot be asked"
    else:
        head = f"the ranks waited for each other at different places, or {me} came too late"
    places: dict[str, list[int]] = {}
    for rank, report in [(board.rank, mine), *sorted(board.others.items())]:
        places.setdefault(report.where, []).append(rank)
    lines = [f"  {_ranks(ranks)}: {where}" for where, ranks in places.items()]
    if board.missing:
        lines.append(f"  {_ranks(board.missing)}: no report" + ("" if board.is_gone else f" within {_GRACE_S:.0f} s"))
    advice = (
        "Every rank must enter every collective. Usual causes: ranks that run different modules (let every rank call"
        " every experts module at every step, with no tokens if need be); ranks that take different numbers of steps"
        " (give each the same number of batches, and stop all at the same step); a rank that has died or hangs (see its"
        f" output); one that takes longer than the strategy's timeout={timeout} beside the others (raise it)."
    )
    return [f"{head}. Where the ranks were:", *lines, *differences, *([] if raised else [advice])]


def _differences(board: _Board, mine: _Report, names: Sequence[str]) -> list[str]:
    """Compare which experts the ranks have called in this step, and in which order."""
    lines: dict[str, list[int]] = {}
    for rank, theirs in sorted(board.others.items()):
        if theirs.step != mine.step or theirs.raised:
            continue
        ours, other = _by_number(mine), _by_number(theirs)
        for number in sorted(ours.keys() & other.keys()):
            if ours[number] != other[number]:
                text = f"called {names[other[number]]} where rank {board.rank} called {names[ours[number]]}"
                lines.setdefault(text, []).append(rank)
                break
        else:
            if (following := ours.get(theirs.calls)) is not None:
                lines.setdefault(f"did not call {names[following]}, rank {board.rank} did", []).append(rank)
            elif (following := other.get(mine.calls)) is not None:
                lines.setdefault(f"called {names[following]}, rank {board.rank} did not", []).append(rank)
    return [f"  {_ranks(ranks)} {text}" for text, ranks in lines.items()]


def _by_number(report: _Report) -> dict[int, int]:
    return dict(enumerate(report.trail, report.calls - len(report.trail)))


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))}"
