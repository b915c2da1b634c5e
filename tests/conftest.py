"""What holds for every test: nothing stays behind, and tests that need a GPU are skipped where there is none."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import RANK_VARIABLES, server_processes


def pytest_runtest_setup(item: pytest.Item) -> None:
    marker = item.get_closest_marker("gpu")
    if marker is None:
        return
    import torch

    needed = marker.args[0] if marker.args else 1
    present = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if present < needed:
        pytest.skip(f"needs {needed} CUDA device(s), {present} present")


@pytest.fixture(autouse=True)
def _nothing_stays_behind() -> Iterator[None]:
    """Restore the variables that describe a rank, close the process group, and fail where a process still runs."""
    before = {key: value for key, value in os.environ.items() if _describes_a_rank(key)}
    children = set(_descendants())
    yield
    for key in [key for key in os.environ if _describes_a_rank(key)]:
        if key not in before:
            del os.environ[key]
    os.environ.update(before)
    _close_process_group()
    left = _wait_for_the_end_of(children)
    assert not left, f"the test left processes running: {left}"


def _describes_a_rank(name: str) -> bool:
    return name in RANK_VARIABLES or name.startswith(("PL_", "TORCHELASTIC_", "SLURM_"))


def _close_process_group() -> None:
    import sys

    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def _wait_for_the_end_of(known: set[int], seconds: float = 5.0) -> dict[int, str]:
    deadline = time.monotonic() + seconds
    while True:
        left = {pid: command for pid, command in _descendants().items() if pid not in known}
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.05)


def _descendants() -> dict[int, str]:
    """Living processes that descend from this one, without the fork server and its tracker. Empty without /proc."""
    if not Path("/proc/self/stat").exists():
        return {}
    parent_of, command_of = {}, {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            name, _, rest = (entry / "stat").read_text().partition("(")[2].rpartition(")")
        except OSError:
            continue
        state, parent = rest.split()[:2]
        if state not in "ZX":
            parent_of[int(entry.name)], command_of[int(entry.name)] = int(parent), name
    servers = set(server_processes())
    ours = {os.getpid()}
    while more := {pid for pid, parent in parent_of.items() if parent in ours and pid not in ours}:
        ours |= more
    return {pid: command_of[pid] for pid in ours - servers - {os.getpid()}}
