"""What becomes of rank 0 when another rank that it has started fails."""

import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.harness import in_subprocess

ROOT = Path(__file__).parent.parent

WATCHING = """
import subprocess, sys, threading, time
from lightning_moe.launcher import watch_ranks
ranks = [subprocess.Popen([sys.executable, "-c", code]) for code in sys.argv[2:]]
print(*[rank.pid for rank in ranks], flush=True)
threading.Thread(target=watch_ranks, args=(ranks, float(sys.argv[1])), daemon=True).start()
time.sleep(5)
print("rank 0 goes on", flush=True)
[rank.wait() for rank in ranks]
"""


def watching(grace_s: float, *ranks: str) -> "subprocess.CompletedProcess[str]":
    return in_subprocess([sys.executable, "-c", WATCHING, str(grace_s), *ranks], timeout=60, cwd=ROOT)


def test_a_rank_0_that_waits_for_a_failed_rank_is_killed_with_the_others() -> None:
    done = watching(1.0, "import sys; sys.exit(3)", "import time; time.sleep(60)")
    assert done.returncode == -signal.SIGKILL
    assert "rank 1 ended with exit code 3" in done.stderr
    assert "rank 0 goes on" not in done.stdout
    waiting = Path(f"/proc/{done.stdout.split()[1]}/cmdline")
    end = time.monotonic() + 10
    while waiting.exists() and waiting.read_text() and time.monotonic() < end:
        time.sleep(0.1)
    assert not waiting.exists() or not waiting.read_text(), "no process is left"


def test_rank_0_has_time_to_end_by_itself_after_a_failure() -> None:
    done = watching(30.0, "import sys; sys.exit(3)")
    assert done.returncode == 0
    assert "rank 0 goes on" in done.stdout


def test_ranks_that_end_well_stop_nothing() -> None:
    done = watching(0.0, "", "")
    assert done.returncode == 0
    assert "rank 0 goes on" in done.stdout


FAILING = """
import os, time
import lightning.pytorch as pl
from tests import tiny

class FailsAlone(pl.Callback):
    def on_train_start(self, trainer, pl_module):
        if trainer.global_rank == 1:
            os._exit(3)
        time.sleep(7)  # longer than Lightning would let it live
        print("rank 0 can say what it has met", flush=True)

if __name__ == "__main__":
    trainer = tiny.trainer("moe_ep", devices=2, max_steps=1, callbacks=[FailsAlone()])
    trainer.fit(tiny.TinyLM(), tiny.loader(tiny.tokens(2), trainer.global_rank, trainer.world_size))
"""


def test_under_the_strategy_rank_0_can_say_why_a_run_ends(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(FAILING)
    done = in_subprocess([sys.executable, script], timeout=100, env={"PYTHONPATH": str(ROOT)}, cwd=tmp_path)
    assert "rank 0 can say what it has met" in done.stdout
    assert done.returncode == 1, "its own error, not a signal"
    assert "MissingRankError" in done.stderr
