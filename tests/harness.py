"""Run a function in several real processes, as torchrun would start them.

    from tests.harness import run_ranks

    def _sum(value):                                   # at module level: it is pickled by name
        torch.distributed.init_process_group("gloo")
        ...
        return tensor

    def test_sum():
        assert run_ranks(_sum, 2, 3.0) == [...]        # what each rank returned, by rank

The processes are forked from a server that has imported torch, Lightning and transformers already, so that a rank
starts in a fraction of a second. The function initializes torch.distributed itself (a Trainer does); the harness
destroys the process group at the end.
"""

import contextlib
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

PRELOAD = [
    "torch",
    "torch.distributed",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.checkpoint",
    "lightning.pytorch",
    "transformers",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "peft",
    "pytest",
    "lightning_moe",
]
RANK_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "NODE_RANK",
    "GROUP_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_RESTART_COUNT",
    "OMP_NUM_THREADS",
)
_SECONDS_TO_EXIT = 10.0
_LOG_LINES = 80


class RanksFailedError(AssertionError):
    """Some rank raised, died or ran out of time; the message holds the traceback and what the ranks printed."""


@dataclass
class _Failure:
    error: str  # "Type: message"
    traceback: str


@dataclass
class _Rank:
    process: Any
    connection: Connection
    log: Path
    result: Any = None
    failure: _Failure | None = None
    done: bool = False


@dataclass
class _Job:
    """What a child process needs, in plain types: nothing here goes through torch's shared-memory pickling."""

    rank: int
    payload: bytes
    environment: dict[str, str]
    threads: int
    log: str
    connection: Connection = field(repr=False)


def run_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120, threads: int = 1
) -> list[Any]:
    """Call ``function(*args)`` in ``world_size`` processes and return what each returned.

    Args:
        function: A picklable (module-level) function.
        world_size: How many processes.
        *args: Its arguments; tensors are copied.
        timeout: Seconds until all ranks are killed. A traceback of every thread of every rank is then shown.
        threads: ``torch.set_num_threads`` in each process.

    Returns:
        The results in the order of the ranks. Tensors come back as copies.

    Raises:
        RanksFailedError: At the first rank that raises or dies, with its traceback, or when time runs out.
    """
    with _launched(function, world_size, args, threads) as ranks:
        finished = _collect(ranks, timeout, stop_at_failure=True)
        if not finished or any(rank.failure for rank in ranks):
            raise RanksFailedError(_describe(ranks, timeout, finished))
        _release(ranks)
        return [rank.result for rank in ranks]


def run_ranks_expecting_error(
    function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120, threads: int = 1
) -> list[str]:
    """Call ``function(*args)`` in ``world_size`` processes, each of which has to raise by itself.

    A rank that waits for another one that raised is a hang to a user, so it counts as a failure: no process exits
    before all have raised.

    Args:
        function: A picklable (module-level) function.
        world_size: How many processes.
        *args: Its arguments.
        timeout: Seconds until all ranks are killed.
        threads: ``torch.set_num_threads`` in each process.

    Returns:
        Each rank's exception as ``"Type: message"``, in the order of the ranks.

    Raises:
        RanksFailedError: If some rank returned, died or did not raise in time.
    """
    with _launched(function, world_size, args, threads) as ranks:
        finished = _collect(ranks, timeout, stop_at_failure=False)
        calm = [number for number, rank in enumerate(ranks) if rank.done and rank.failure is None]
        died = any(rank.failure and rank.failure.error.startswith("Died:") for rank in ranks)
        if not finished or calm or died:
            text = f"ranks {calm} returned without an error\n" if calm else ""
            raise RanksFailedError(text + _describe(ranks, timeout, finished))
        _release(ranks)
        return [rank.failure.error for rank in ranks if rank.failure]


def in_subprocess(
    argv: Sequence[str], timeout: float = 120, env: Mapping[str, str] | None = None, cwd: str | Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a whole program in a process group of its own.

    Args:
        argv: The program and its arguments, for example ``[sys.executable, "-m", "lightning_moe.cli", "doctor"]``.
        timeout: Seconds until the whole process group is killed.
        env: Variables to set beside the present ones; the variables of a rank are taken out.
        cwd: Where it runs; default: here.

    Returns:
        The exit code with the captured ``stdout`` and ``stderr``. A code other than 0 is not an error here.

    Raises:
        RanksFailedError: When time runs out, with what was printed until then.
    """
    environment = {key: value for key, value in os.environ.items() if key not in RANK_VARIABLES}
    environment.update({"OMP_NUM_THREADS": "1", **(env or {})})
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:  # pipes would wait for grandchildren
        process = subprocess.Popen(
            [str(part) for part in argv],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=environment,
            cwd=cwd,
            start_new_session=True,
        )
        timed_out = False
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            _kill_group(process.pid)
            process.wait()
        out.seek(0)
        err.seek(0)
        result = subprocess.CompletedProcess(list(argv), process.returncode, out.read(), err.read())
    if timed_out:
        printed = f"--- stdout\n{result.stdout[-4000:]}\n--- stderr\n{result.stderr[-4000:]}"
        raise RanksFailedError(f"{list(argv)} ran past {timeout} s\n{printed}")
    return result


def server_processes() -> list[int]:
    """The process ids of the fork server and of the resource tracker, which live until the tests end."""
    from multiprocessing import resource_tracker

    pids = [
        getattr(multiprocessing.forkserver._forkserver, "_forkserver_pid", None),
        getattr(resource_tracker._resource_tracker, "_pid", None),
    ]
    return [pid for pid in pids if pid is not None]


@contextlib.contextmanager
def _launched(
    function: Callable[..., Any], world_size: int, args: tuple[Any, ...], threads: int
) -> Iterator[list[_Rank]]:
    """Start the ranks; whatever happens, none is left at the end."""
    payload = pickle.dumps((function, args))
    context = _context()
    directory = Path(tempfile.mkdtemp(prefix="ranks-"))
    environments = _environments(world_size, threads)
    ranks: list[_Rank] = []
    try:
        for number, environment in enumerate(environments):
            ours, theirs = context.Pipe()
            log = directory / f"rank{number}.log"
            log.touch()
            job = _Job(number, payload, environment, threads, str(log), theirs)
            process = context.Process(target=_child, args=(job,), name=f"rank-{number}")
            process.start()
            theirs.close()
            ranks.append(_Rank(process, ours, log))
        yield ranks
    finally:
        for rank in ranks:
            _kill_group(rank.process.pid)
        for rank in ranks:
            rank.process.join()
            rank.process.close()
            rank.connection.close()
        shutil.rmtree(directory, ignore_errors=True)


def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    # The server reads its environment once, at its start: no thread may run in it, because only the thread that forks
    # lives on in a child, and CUDA must not be touched before the fork.
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    settings = {
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        "PYTHONPATH": path,
    }
    before = dict(os.environ)
    try:
        os.environ.update(settings)
        for name in set(RANK_VARIABLES) - set(settings):
            os.environ.pop(name, None)
        multiprocessing.forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return context


def _environments(world_size: int, threads: int) -> list[dict[str, str]]:
    common = {
        **os.environ,
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "TORCHELASTIC_RUN_ID": "tests",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
    }
    common.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    common.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)]


def free_port() -> int:
    """A port that nothing listens on, below the range from which the system takes ports for outgoing connections."""
    for _ in range(100):
        port = random.SystemRandom().randrange(15000, 32000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError("no free port between 15000 and 32000 on 127.0.0.1")


def _collect(ranks: list[_Rank], timeout: float, stop_at_failure: bool) -> bool:
    """Wait for the reports. False when time ran out."""
    deadline = time.monotonic() + timeout
    while pending := [rank for rank in ranks if not rank.done]:
        ready = wait([rank.connection for rank in pending], max(0.0, deadline - time.monotonic()))
        if not ready:
            _dump_tracebacks(pending)
            return False
        for rank in pending:
            if rank.connection in ready:
                _receive(rank)
        if stop_at_failure and any(rank.failure for rank in ranks):
            return True
    return True


def _receive(rank: _Rank) -> None:
    rank.done = True
    try:
        ok, content = pickle.loads(rank.connection.recv_bytes())
    except (EOFError, OSError):
        rank.process.join(_SECONDS_TO_EXIT)
        code = rank.process.exitcode
        rank.failure = _Failure(f"Died: exit code {code} before it reported", "")
        return
    if ok:
        rank.result = pickle.loads(content)
    else:
        rank.failure = _Failure(*content)


def _release(ranks: list[_Rank]) -> None:
    """Let the ranks leave together: rank 0 holds the store that the others may still talk to."""
    for rank in ranks:
        with contextlib.suppress(OSError):
            rank.connection.send_bytes(b"leave")
    deadline = time.monotonic() + _SECONDS_TO_EXIT
    for rank in ranks:
        rank.process.join(max(0.0, deadline - time.monotonic()))


def _dump_tracebacks(ranks: list[_Rank]) -> None:
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank.process.pid, signal.SIGUSR1)
    time.sleep(0.3)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)  # a child that has not made its own group yet


def _describe(ranks: list[_Rank], timeout: float, finished: bool) -> str:
    failed = [(number, rank) for number, rank in enumerate(ranks) if rank.failure]
    waiting = [number for number, rank in enumerate(ranks) if not rank.done]
    parts = []
    if not finished:
        parts.append(f"ranks {waiting} had not finished after {timeout} s (where they were: see their output)")
    for number, rank in failed:
        assert rank.failure
        parts.append(f"rank {number} of {len(ranks)}: {rank.failure.error}\n{rank.failure.traceback}")
    for number, rank in enumerate(ranks):
        lines = rank.log.read_text(errors="replace").splitlines()
        if lines:
            parts.append(f"--- output of rank {number}\n" + "\n".join(lines[-_LOG_LINES:]))
    return "\n".join(parts)


def _child(job: _Job) -> None:
    """What a rank runs. It never returns: a fork must not run its parent's exit handlers."""
    os.setsid()
    _set_up(job)
    import traceback

    try:
        function, args = pickle.loads(job.payload)
        report = pickle.dumps((True, pickle.dumps(function(*args))))
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
        report = pickle.dumps((False, (text, traceback.format_exc())))
    job.connection.send_bytes(report)
    with contextlib.suppress(EOFError, OSError):
        job.connection.recv_bytes()
    with contextlib.suppress(Exception):
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()  # gloo aborts at exit otherwise
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _set_up(job: _Job) -> None:
    import faulthandler
    import logging
    import threading

    log = os.open(job.log, os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(sys.stderr)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    os.environ.clear()
    os.environ.update(job.environment)
    threading.Thread(target=_die_with_the_parent, daemon=True).start()

    import torch
    from lightning.pytorch.utilities.rank_zero import rank_zero_only

    torch.set_num_threads(job.threads)
    rank_zero_only.rank = job.rank  # type: ignore[attr-defined]  # Lightning read RANK when the server imported it
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)


def _die_with_the_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os.killpg(0, signal.SIGKILL)
