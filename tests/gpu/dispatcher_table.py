"""Run every case of ``tests/dispatch/cases.py`` through every dispatcher, and print one table.

    torchrun --nproc-per-node 8 -m tests.gpu.dispatcher_table                       on CUDA devices, any number of nodes
    torchrun --nproc-per-node 2 -m tests.gpu.dispatcher_table --device cpu          on CPU with gloo
    torchrun --nproc-per-node 2 -m tests.gpu.dispatcher_table --device cpu --fakes  the libraries by their stand-ins

The number of ranks has to divide the 8 experts of the cases. The exit code is 0 where nothing failed, else 1.
"""

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from lightning_moe.dispatch import dispatcher_options
from lightning_moe.dispatch.base import Dispatcher
from tests.dispatch.cases import (
    SCENARIOS,
    E,
    Setting,
    build,
    expected,
    layer_of,
    relative_errors,
    scenarios_of,
    wrong,
)

WIDTH = 256  # a multiple of what every library takes
COLUMNS = 120
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Candidate:
    """A dispatcher to try.

    Attributes:
        label: How the table calls it.
        make: Makes it.
        missing: Why it cannot run here; empty where it can.
    """

    label: str
    make: Callable[[], Dispatcher]
    missing: str = ""


@dataclass
class Finding:
    """What one rank, or all of them together, found for a case.

    Attributes:
        forward: The largest relative error of an output.
        gradient: The same of a gradient.
        rows: Rows sent to other ranks in all dispatches of the case.
        bytes: Their bytes and those of what travels with them.
        problems: What rounding does not explain.
        stopped: The case ended in an exception.
    """

    forward: float = 0.0
    gradient: float = 0.0
    rows: int = 0
    bytes: int = 0
    problems: list[str] = field(default_factory=list)
    stopped: bool = False

    @classmethod
    def of_all(cls, ranks: Iterable["Finding"]) -> "Finding":
        """The worst of the ranks, and the sum of what they sent."""
        ranks = list(ranks)
        return cls(
            forward=max((r.forward for r in ranks), key=_nan_first),
            gradient=max((r.gradient for r in ranks), key=_nan_first),
            rows=sum(r.rows for r in ranks),
            bytes=sum(r.bytes for r in ranks),
            problems=[f"rank {number}: {line}" for number, r in enumerate(ranks) for line in r.problems],
            stopped=any(r.stopped for r in ranks),
        )


@dataclass(frozen=True)
class Row:
    """One line of the table; ``finding`` is ``None`` where nothing ran, with the result and why."""

    label: str
    dtype: str
    case: str
    finding: Finding | None
    result: str = ""
    reason: str = ""


def _nan_first(error: float) -> float:
    return error if error == error else float("inf")


def candidates(device: str, fakes: bool, world: int) -> list[Candidate]:
    """What there is to try, the libraries by their stand-ins where ``fakes`` is set."""
    found = [Candidate("local", lambda: build("local", 1), "" if world == 1 else "serves one rank")]
    for label, name in (("all_to_all", "all_to_all"), ("all_to_all, once a rank", "once")):
        found.append(Candidate(label, lambda name=name: build(name, world)))  # type: ignore[misc]
    if fakes:
        return found + [Candidate(c.label, c.make, c.missing or _too_few(world)) for c in _stand_ins()]
    options = dispatcher_options()
    for name in [name for name in options if name not in ("local", "all_to_all")]:
        missing = options[name] or ("" if device == "cuda" else "runs on CUDA devices only") or _too_few(world)
        found.append(Candidate(name, lambda name=name: build(name, world), missing))  # type: ignore[misc]
    return found


def _too_few(world: int) -> str:
    return "needs at least 2 ranks" if world < 2 else ""


def _stand_ins() -> list[Candidate]:
    """The dispatchers over the stand-ins of ``tests/dispatch/fakes``; each is installed when it is made."""
    from tests.dispatch import test_deepep, test_nccl_ep
    from tests.dispatch.fakes import deepep_gloo
    from tests.dispatch.fakes import nccl_ep as nccl_ep_fake

    def deepep(release: str) -> Dispatcher:
        deepep_gloo.install(test_deepep.RELEASES[release], test_deepep.BOTH)
        return test_deepep.on_cpu(release)

    def nccl_ep(version: str) -> Dispatcher:
        nccl_ep_fake.install(version, test_nccl_ep.BOTH)
        return test_nccl_ep.OnGloo()

    releases = [r for r in test_deepep.RELEASES if r != "v1_0"]  # as v1, with fewer arguments
    made = [Candidate(f"deepep {r} (fake)", lambda r=r: deepep(r)) for r in releases]  # type: ignore[misc]
    versions = nccl_ep_fake.VERSIONS[-1:]
    return made + [Candidate(f"nccl_ep {v} (fake)", lambda v=v: nccl_ep(v)) for v in versions]  # type: ignore[misc]


def find(dispatcher: Dispatcher, scenario: str, here: Setting, group: dist.ProcessGroup | None) -> Finding:
    """Run a case on this rank. Collective; an exception is part of what is found."""
    layers: list[Dispatcher] = []

    def new_layer() -> Dispatcher:
        layers.append(layer_of(dispatcher, here, group))
        return layers[-1]

    try:
        got = SCENARIOS[scenario](new_layer, here)
        want = expected(scenario, here)
        errors = relative_errors(got, want)
        problems = wrong(got, want, here)
    except Exception as error:
        traceback.print_exc()
        text = " ".join(str(error).split())[:300]
        return Finding(problems=[f"{type(error).__name__}: {text}"], stopped=True)
    return Finding(
        forward=max((e for key, e in errors.items() if key.startswith("out")), key=_nan_first),
        gradient=max((e for key, e in errors.items() if not key.startswith("out")), key=_nan_first, default=0.0),
        rows=sum(layer.rows_sent for layer in layers),
        bytes=sum(layer.bytes_sent for layer in layers),
        problems=problems,
    )


def dtype_for(dispatcher: Dispatcher, asked: str | None) -> torch.dtype:
    """The dtype of the rows: float32 tells faults from rounding best, where a dispatcher moves it."""
    if asked is not None:
        return DTYPES[asked]
    return torch.float32 if torch.float32 in dispatcher.caps.payload_dtypes else torch.bfloat16


def try_all(tried: list[Candidate], cases: list[str], asked: str | None, device: str, timeout: float) -> list[Row]:
    """Run the cases. Collective; every rank returns the same rows.

    Each dispatcher has a group of its own, so that what one breaks does not reach the next. After an exception the
    ranks may be in different calls: the rest of that dispatcher's cases is left out.
    """
    rank, world, limit = dist.get_rank(), dist.get_world_size(), timedelta(seconds=timeout)
    # Longer than anything that the others may wait for in vain before they come here.
    control = dist.new_group(backend="gloo", timeout=limit * 3)
    rows: list[Row] = []
    for candidate in tried:
        if candidate.missing:
            rows.append(Row(candidate.label, "", "", None, "skipped", candidate.missing))
            continue
        dispatcher = candidate.make()
        dtype = dtype_for(dispatcher, asked)
        name = str(dtype).removeprefix("torch.")
        if dtype not in dispatcher.caps.payload_dtypes:
            rows.append(Row(candidate.label, name, "", None, "skipped", f"does not move rows of {name}"))
            continue
        group, stopped = dist.new_group(timeout=limit), False
        here = Setting(rank, world, WIDTH, dtype, device)
        for case in [case for case in scenarios_of(dispatcher) if not cases or case in cases]:
            if stopped:
                rows.append(Row(candidate.label, name, case, None, "not run"))
                continue
            found: list[Finding | None] = [None] * world
            dist.all_gather_object(found, find(dispatcher, case, here, group), control)
            together = Finding.of_all(f for f in found if f is not None)
            rows.append(Row(candidate.label, name, case, together))
            stopped = together.stopped
        if not stopped:
            dispatcher.finalize()
    return rows


def show(rows: list[Row], title: str, console: Console) -> None:
    """Print the table, and below it what is wrong."""
    table = Table(title=title, width=min(COLUMNS, console.width), show_lines=False)
    for heading in ("dispatcher", "dtype", "case"):
        table.add_column(heading, no_wrap=True)
    for heading in ("forward", "gradient", "rows", "bytes"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("result", no_wrap=True)
    before = ""
    for row in rows:
        if before and row.label != before:
            table.add_section()
        label = "" if row.label == before else row.label
        dtype = "" if row.label == before else row.dtype
        before = row.label
        if row.finding is None:
            table.add_row(label, dtype, row.case, "", "", "", "", row.result)
            continue
        found = row.finding
        errors = ["", ""] if found.stopped else [f"{found.forward:.1e}", f"{found.gradient:.1e}"]
        traffic = [f"{count:,}" if count else "-" for count in (found.rows, found.bytes)]
        table.add_row(label, dtype, row.case, *errors, *traffic, "[red]FAILED" if found.problems else "ok")
    console.print(table)
    console.print(
        "forward, gradient: the largest error of any rank as a fraction of the largest value; a gradient in bfloat16 is"
        " rounded. Each routing is computed at once and in three parts in flight, with the worst of both. rows, bytes:"
        " sent to other ranks in all dispatches of the case; - where none is, or the dispatcher does not count them.",
        highlight=False,
    )
    for row in rows:
        if row.reason:
            console.print(f"{row.result} {row.label}: {row.reason}", markup=False, highlight=False, soft_wrap=True)
        for line in row.finding.problems if row.finding else []:
            console.print(f"FAILED {row.label}, {row.case}: {line}", markup=False, highlight=False, soft_wrap=True)


def failed(rows: list[Row]) -> bool:
    """Whether any case failed, or none ran."""
    ran = [row.finding for row in rows if row.finding is not None]
    return not ran or any(finding.problems for finding in ran)


def main(arguments: list[str] | None = None) -> int:
    """Run what the command line asks for.

    Returns:
        The exit code: 0 where every case that ran is right, 1 where one is not or none ran, 2 where it cannot start.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--fakes", action="store_true", help="stand-ins for the libraries, on CPU")
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="of the rows; default: float32 where it is moved")
    parser.add_argument("--only", action="append", default=[], help="a part of the names of dispatchers to try")
    parser.add_argument("--case", action="append", default=[], choices=tuple(SCENARIOS), help="a case to run")
    parser.add_argument("--timeout", type=float, default=60, help="seconds that a rank waits for another")
    given = parser.parse_args(arguments)
    world = int(os.environ.get("WORLD_SIZE", "0"))
    device = given.device if given.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if problem := _cannot_start(world, device, given.fakes):
        print(problem, file=sys.stderr)
        return 2
    if device == "cuda":
        os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")  # a timeout is an exception, not the end of the process
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False  # see ``tolerance``
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=given.timeout))
    tried = candidates(device, given.fakes, world)
    tried = [c for c in tried if not given.only or any(part in c.label for part in given.only)]
    rows = try_all(tried, given.case, given.dtype, device, given.timeout)
    if dist.get_rank() == 0:
        where = f"{world} rank(s) on {torch.cuda.get_device_name() if device == 'cuda' else 'CPU, gloo'}"
        show(rows, f"Dispatchers against a dense computation: {where}", Console(width=COLUMNS))
    sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()
    return int(failed(rows))


def _cannot_start(world: int, device: str, fakes: bool) -> str:
    if not world:
        return "start it with torchrun: torchrun --nproc-per-node 2 -m tests.gpu.dispatcher_table"
    if E % world:
        return f"{world} ranks cannot share the {E} experts of the cases evenly; allowed are 1, 2, 4 and 8"
    if device == "cuda" and not torch.cuda.is_available():
        return "--device cuda, but this process has no CUDA device; use --device cpu"
    if fakes and device != "cpu":
        return "--fakes are stand-ins on CPU; add --device cpu"
    return ""


if __name__ == "__main__":
    sys.exit(main())
