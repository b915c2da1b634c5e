"""Starts the other ranks of this node, and ends this one if one of them fails."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from typing_extensions import override

GRACE_S = 20.0  # for this rank to meet the lost connection, to ask the other ranks why, and to end by itself
_POLL_S = 0.5


class ScriptLauncher(_SubprocessScriptLauncher):
    """Lightning's launcher of one process a rank, but for what it does when a rank fails.

    Lightning kills rank 0 within five seconds of that, at times in the middle of what it has to say: which rank is
    missing, and where the others were. Here rank 0 has time to end by itself, and is killed if it does not.
    """

    @override
    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: "pl.Trainer | None" = None, **kwargs: Any
    ) -> Any:
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        self._call_children_scripts()
        threading.Thread(target=watch_ranks, args=(self.procs,), daemon=True, name="watch-ranks").start()
        _set_num_threads_if_needed(num_processes=self.num_processes)
        return function(*args, **kwargs)


def watch_ranks(started: list["subprocess.Popen[bytes]"], grace_s: float = GRACE_S) -> None:
    """Wait until all started ranks have ended well; kill them and this process once one has failed.

    Args:
        started: The processes of the ranks. Who empties the list takes over from here.
        grace_s: Seconds between the first failure and the end of this process.
    """
    failed_at: float | None = None
    while ranks := list(started):
        codes = [rank.poll() for rank in ranks]
        if all(code == 0 for code in codes):
            return
        if failed_at is None and any(codes):
            failed_at = time.monotonic()
        if failed_at is not None and time.monotonic() - failed_at > grace_s:
            _kill(ranks, codes, grace_s)
            return
        time.sleep(_POLL_S)


def _kill(ranks: "list[subprocess.Popen[bytes]]", codes: list[int | None], grace_s: float) -> None:
    rank, code = next((rank, code) for rank, code in enumerate(codes, 1) if code)
    print(
        f"lightning-moe: error: rank {rank} ended with exit code {code}, and rank 0 still runs or waits {grace_s:.0f} s"
        " later: it is killed",
        file=sys.stderr,
        flush=True,
    )
    for process in ranks:
        process.kill()
    # Not SIGTERM: a process that waits in a collective does not come to handle it.
    os.kill(os.getpid(), signal.SIGKILL if sys.platform != "win32" else signal.SIGTERM)
