"""A checkpoint is whole or not there, whatever kills a run and whenever."""

import contextlib
import mmap
import os
import random
import signal
import struct
import time
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest

from lightning_moe.parallel import watch
from tests.checkpoint.stepping import Stepping, stepping_trainer
from tests.harness import _launched, _receive, run_ranks
from tests.test_strategy import rank_and_world

# Of a rank: whether it saves, at which step it resumed, the last step it knows as saved, the saves that it has begun,
# and the nanoseconds from one to the next.
ENTRY = struct.Struct("qqqqq")
SAVING, RESUMED, SAVED, BEGUN, PERIOD = range(5)


class Board:
    """What each rank shows of its progress, readable after it was killed."""

    def __init__(self, path: str, ranks: int = 2) -> None:
        with contextlib.suppress(FileExistsError), open(path, "xb") as file:
            file.write(ENTRY.pack(0, -1, -1, 0, 0) * ranks)
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)

    def __getitem__(self, rank: int) -> list[int]:
        return list(ENTRY.unpack_from(self._map, rank * ENTRY.size))

    def show(self, rank: int, place: int, value: int) -> None:
        struct.pack_into("q", self._map, rank * ENTRY.size + 8 * place, value)


def train_until_killed(folder: str, board_path: str, options: dict[str, Any], steps: int) -> int:
    rank, world = rank_and_world()
    board = Board(board_path)
    # The other rank asks for no report of one that is known to be killed.
    watch._GRACE_S = watch._LINGER_S = 0.1
    watch._STORE_TIMEOUT = timedelta(seconds=0.2)

    class Shown(Stepping):
        def on_train_start(self) -> None:
            super().on_train_start()
            board.show(rank, RESUMED, self.resumed_at)

    module = Shown(hidden=2048)
    trainer = stepping_trainer(folder, world, max_steps=steps, **options)
    save, saved, began = trainer.strategy.save_checkpoint, [-1], [time.monotonic_ns()]

    def save_checkpoint(*args: Any, **kwargs: Any) -> None:
        now = time.monotonic_ns()
        board.show(rank, SAVING, 1)
        board.show(rank, PERIOD, now - began[0])
        board.show(rank, BEGUN, board[rank][BEGUN] + 1)
        began[0] = now
        save(*args, **kwargs)
        # In the background, what is whole is the one before.
        board.show(rank, SAVED, saved[0] if options.get("save_asynchronously") else trainer.global_step)
        board.show(rank, SAVING, 0)
        saved[0] = trainer.global_step

    trainer.strategy.save_checkpoint = save_checkpoint
    trainer.fit(module, ckpt_path="last")
    return module.resumed_at


def kill_one(chance: random.Random, folder: Path, board_path: Path, options: dict[str, Any]) -> tuple[int, int, bool]:
    """Start a run, kill one rank in the midst of it, and see the other one end.

    Returns the step at which it resumed, the last that is known to be saved, and whether the killed rank was saving.
    """
    board_path.unlink(missing_ok=True)
    board = Board(str(board_path))
    with _launched(train_until_killed, 2, (str(folder), str(board_path), options, 100000), 1) as ranks:
        deadline = time.monotonic() + 60
        while min(board[rank][BEGUN] for rank in range(2)) < 3:
            for early in wait([rank.connection for rank in ranks], 0.005):
                _receive(rank := next(rank for rank in ranks if rank.connection is early))
                raise AssertionError(f"a rank did not resume: {rank.failure}\n{rank.log.read_text()}")
            assert time.monotonic() < deadline, "the ranks did not start"
        time.sleep(chance.uniform(0, 2e-9 * board[0][PERIOD]))
        victim = chance.randrange(2)
        os.kill(ranks[victim].process.pid, signal.SIGKILL)
        saving, resumed, saved, _, _ = board[victim]
        other = ranks[1 - victim]
        assert wait([other.connection], 30), f"the other rank hangs\n{other.log.read_text()}"
        return resumed, saved, bool(saving)


MODES: list[tuple[int, dict[str, Any]]] = [
    (6, {"save_last": "link"}),
    (4, {"save_last": True}),
    (5, {"save_last": "link", "save_asynchronously": True}),
    (5, {"save_last": "link", "save_distributed_checkpoint": False}),
]


@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    chance = random.Random(0)
    tally: list[tuple[int, bool, list[str]]] = []
    for mode, (kills, options) in enumerate(MODES):
        folder, board = tmp_path / str(mode), tmp_path / f"board{mode}"
        known = 0
        for _ in range(kills):
            resumed, saved, saving = kill_one(chance, folder, board, options)
            # The link to the last one is moved after the save, so it may point to the one before.
            assert resumed >= known - 1, f"{options}: resumed at step {resumed}, but step {known} had been saved"
            known = max(resumed, saved)
            entries = sorted(entry.name for entry in folder.iterdir()) if folder.exists() else []
            tally.append((resumed, saving, [name for name in entries if name.endswith(".partial")]))
        final = run_ranks(train_until_killed, 2, str(folder), str(board), options, known + 3, timeout=60)
        assert final[0] == final[1] >= known - 1
        left = {entry.name for entry in folder.iterdir()}
        assert not [name for name in left if "partial" in name or "replaced" in name], left
    assert len(tally) == 20
    print(
        f"20 kills, {sum(saving for _, saving, _ in tally)} in a save, {sum(bool(p) for _, _, p in tally)} with a part"
    )
    assert sum(saving for _, saving, _ in tally) >= 5, f"the kills missed the saves: {tally}"
