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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch import nn

_GRACE_S = 5.0  # how long a rank whose collective failed waits for the reports of the others
_SHORT_GRACE_S = 1.0  # the same, once a rank has said that it raised an exception
_LINGER_S = 1.0  # how long rank 0, which may hold the store, stays for the others to read
_STORE_TIMEOUT = timedelta(seconds=3)
_PREFIX = "lightning_moe/watch"
_MAX_CHARACTERS = 300

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

    While all is well it costs an attribute store at each mark and talks to nobody.

    Attributes:
        place: Where in the model this rank is, such as ``"forward of net.layers.1.mlp.experts"``.
    """

    def __init__(self) -> None:
        self.place = ""
        self._what = ""
        self._inside = False
        self._module: Any = None
        self._timeout: timedelta | None = None
        self._told: int | None = None

    def start(self, module: nn.Module, timeout: timedelta | None) -> None:
        """Begin to watch. Every rank calls it, with a barrier after it, so that no report of before is left.

        Args:
            module: The LightningModule, with its trainer.
            timeout: How long a collective waits for a rank, for the messages.
        """
        self._module, self._timeout = module, timeout
        self.place, self._what, self._inside, self._told = "", "set-up", False, None
        if dist.is_initialized() and dist.get_world_size() > 1:
            with contextlib.suppress(RuntimeError):
                dist.PrefixStore(_PREFIX, _default_store()).delete_key(str(dist.get_rank()))

    @contextlib.contextmanager
    def over(self, what: str) -> Iterator[None]:
        """Watch over a part of a step.

        Args:
            what: What this rank does, as a noun.

        Raises:
            MissingRankError: From the error of a collective inside, once the other ranks have told where they are.
        """
        outermost, self._inside = not self._inside, True
        self._what, self.place = what, ""
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
        rank = dist.get_rank()
        where = self._where(error)
        summary = f"{type(error).__name__}: {error}"[:_MAX_CHARACTERS]
        if not lost_rank(error):
            _Reports(rank, {"raised": summary, "where": where})
            return None
        reports = _Reports(rank, {"raised": None, "where": where})
        reports.collect(dist.get_world_size())
        return _message(rank, dist.get_world_size(), where, summary, reports, self._timeout)

    def _where(self, error: BaseException) -> str:
        parts = []
        with contextlib.suppress(Exception):  # an error of the description must not hide the one that is described
            parts.append(_step(self._module.trainer))
        parts += [self._what, self.place]
        with contextlib.suppress(Exception):
            name = _innermost_module(error.__traceback__, self._module)
            if name and not self.place.endswith(f"forward of {name}"):
                parts.append(f"in {name}")
        return ", ".join(filter(None, parts))


def _step(trainer: Any) -> str:
    if trainer.training:
        return (
            f"training step {trainer.global_step} (epoch {trainer.current_epoch}, batch {trainer.fit_loop.batch_idx})"
        )
    batch = trainer._active_loop.batch_progress.current.ready - 1
    return f"{trainer.state.stage.dataloader_prefix} batch {max(batch, 0)}"


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
    raised: str | None
    where: str
    after_s: float


class _Reports:
    """What the ranks have told. Whatever the state of the job, it neither raises nor waits for long."""

    def __init__(self, rank: int, mine: Mapping[str, str | None]) -> None:
        self.rank = rank
        self.others: dict[int, _Report] = {}
        self.store_is_gone = False
        self._store: Any = None
        try:
            store = _default_store()
            if isinstance(store, dist.TCPStore):
                # A connection of our own: another thread may wait on the old one, and its timeout is long.
                store = dist.TCPStore(
                    store.host, store.port, is_master=False, wait_for_workers=False, timeout=_STORE_TIMEOUT
                )
            self._store = dist.PrefixStore(_PREFIX, store)
            self._store.set(str(rank), json.dumps(mine))
        except Exception:
            self.store_is_gone = True

    def collect(self, world_size: int) -> None:
        """Read what the others tell, until all have told or it has taken too long."""
        start = time.monotonic()
        try:
            while not self.store_is_gone:
                for rank in set(range(world_size)) - {self.rank} - set(self.others):
                    if self._store.check([str(rank)]):
                        report = json.loads(self._store.get(str(rank)))
                        self.others[rank] = _Report(**report, after_s=time.monotonic() - start)
                raised = any(report.raised for report in self.others.values())
                grace = _SHORT_GRACE_S if raised else _GRACE_S
                if len(self.others) == world_size - 1 or time.monotonic() - start > grace:
                    break
                time.sleep(0.1)
        except Exception:
            self.store_is_gone = True
        if self.rank == 0:
            time.sleep(_LINGER_S)


def _message(
    rank: int, world_size: int, where: str, summary: str, reports: _Reports, timeout: timedelta | None
) -> str:
    raised = {r: report.raised for r, report in reports.others.items() if report.raised}
    missing = [r for r in range(world_size) if r != rank and r not in reports.others]
    late = [r for r, report in reports.others.items() if report.after_s > 1.0]
    if raised:
        told = "; ".join(f"rank {r} raised {error}" for r, error in raised.items())
        head = f"rank {rank} waited for a rank that has stopped: {told}"
    elif reports.store_is_gone:
        head = f"rank {rank} lost the others, and what they were doing is not known: the store on rank 0 is gone too"
    elif missing:
        head = f"{_ranks(missing)} did not come to a collective that rank {rank} waited in"
    elif late:
        head = f"{_ranks(late)} came too late to a collective that rank {rank} waited in"
    else:
        head = f"the ranks waited for each other at different places, or rank {rank} came too late"
    places: dict[str, list[int]] = {}
    for r, text in [(rank, where), *((r, report.where) for r, report in sorted(reports.others.items()))]:
        places.setdefault(text, []).append(r)
    lines = [f"  {_ranks(ranks)}: {text}" for text, ranks in places.items()]
    if missing:
        lines.append(f"  {_ranks(missing)}: no report within {_GRACE_S:.0f} s")
    return "\n".join(
        [
            head + ". Where the ranks were:",
            *lines,
            "Every rank must enter every collective. Usual causes: ranks that run different modules (let every rank"
            " call every experts module at every step, with no tokens if need be), ranks that take different numbers"
            " of steps (give each the same number of batches, and stop all at the same step), a rank that has died or"
            f" hangs (see its output), or one that takes longer than the strategy's timeout={timeout} beside the"
            " others (raise it).",
            f"The collective said: {summary}",
        ]
    )


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))}"
