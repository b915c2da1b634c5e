"""The table on CPU: what it says where all is right, and where something is not."""

import os
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor
from typing_extensions import override

from lightning_moe.dispatch.all_to_all import AllToAllDispatcher
from tests.gpu import dispatcher_table
from tests.harness import ROOT, in_subprocess, run_ranks

CASES = ["random", "dropped choices"]


def test_torchrun_prints_one_table_and_says_what_is_missing() -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    chosen = [part for case in CASES for part in ("--case", case)]
    done = in_subprocess(
        [*launcher, "-m", "tests.gpu.dispatcher_table", "--device", "cpu", *chosen], timeout=90, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 120 or any(line.startswith("skipped") and len(line) > 120 for line in lines)
    assert sum(line.count(" ok ") for line in lines) == 2 * len(CASES)
    assert "skipped local: serves one rank" in lines
    assert any(line.startswith("skipped deepep: ") for line in lines)
    assert "FAILED" not in done.stdout


class Swapped(AllToAllDispatcher):
    """The first two tokens get each other's result on rank 1."""

    @override
    def combine(self, expert_rows: Tensor, state: Any) -> Tensor:
        out = super().combine(expert_rows, state)
        return out if dist.get_rank() == 0 else torch.cat((out[:2].flip(0), out[2:]))


class Raises(AllToAllDispatcher):
    """Raises on rank 1 where the others wait for it."""

    @override
    def combine(self, expert_rows: Tensor, state: Any) -> Tensor:
        if dist.get_rank() == 1:
            raise ArithmeticError("of rank 1")
        return super().combine(expert_rows, state)


def tried(kind: type[AllToAllDispatcher]) -> tuple[bool, str, float]:
    """Whether the table has failed, the table, and the largest error of a case that no swap changes."""
    dist.init_process_group("gloo")
    candidates = [
        dispatcher_table.Candidate("broken", kind),
        dispatcher_table.Candidate("after it", AllToAllDispatcher),
    ]
    rows = dispatcher_table.try_all(candidates, ["random", "none anywhere"], None, "cpu", timeout=3)
    console = Console(width=dispatcher_table.COLUMNS, file=open(os.devnull, "w"), record=True)  # noqa: SIM115
    dispatcher_table.show(rows, "title", console)
    whole = [row.finding.forward for row in rows if row.finding and row.label == "after it"]
    return dispatcher_table.failed(rows), console.export_text(), max(whole)


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        (Swapped, ["FAILED broken, random: rank 1: out is wrong by "]),
        (Raises, ["FAILED broken, random: rank 1: ArithmeticError: of rank 1", "not run"]),
    ],
)
def test_a_fault_of_one_rank_fails_and_the_next_dispatcher_runs(
    kind: type[AllToAllDispatcher], parts: list[str]
) -> None:
    first, second = run_ranks(tried, 2, kind, timeout=60)
    assert first == second
    is_failed, text, error = first
    assert is_failed
    for part in parts:
        assert part in text, text
    assert error < 1e-5


@pytest.mark.parametrize(
    ("arguments", "world", "problem"),
    [
        ([], None, "start it with torchrun"),
        (["--device", "cpu"], "3", "3 ranks cannot share the 8 experts of the cases evenly; allowed are 1, 2, 4 and 8"),
        (["--device", "cuda", "--fakes"], "2", "CUDA|stand-ins on CPU"),
    ],
)
def test_says_why_it_cannot_start(
    arguments: list[str],
    world: str | None,
    problem: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if world is not None:
        monkeypatch.setenv("WORLD_SIZE", world)
    assert dispatcher_table.main(arguments) == 2
    assert any(part in capsys.readouterr().err for part in problem.split("|"))
