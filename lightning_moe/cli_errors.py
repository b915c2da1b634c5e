"""How the command line ends a run that cannot go on: one line for a mistake, a traceback for a fault, no rank left."""

import difflib
import dis
import inspect
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_moe.parallel.watch import MissingRankError

_PACKAGE = Path(__file__).resolve().parent
_LIBRARIES = ("lightning_moe", "lightning", "torch", "jsonargparse")
_PEER_LOST = re.compile(
    r"connection (closed|reset|refused)|broken pipe|gloo|NCCL|TCPStore|socket|unhandled cuda error", re.IGNORECASE
)
_PATIENCE = 5.0  # seconds for the other ranks to end by themselves, to report what they have met
_HOLD = 3.0  # seconds in which rank 0 reports what every rank has met, and stops the others


class RefusedError(SystemExit):
    """The arguments or the config cannot be used. An exit, so that no layer between takes it for a crash.

    Args:
        reason: What is wrong, without a full stop.
        hint: What to do about it.
    """

    def __init__(self, reason: str, hint: str = "") -> None:
        super().__init__(2)
        self.reason = reason
        self.hint = hint


def traceback_wanted() -> bool:
    """Whether the user has asked for tracebacks of mistakes, with ``LIGHTNING_MOE_TRACEBACK=1``."""
    return os.environ.get("LIGHTNING_MOE_TRACEBACK", "0") not in ("", "0")


def report(refused: RefusedError) -> None:
    """Print why a command was refused, once on a machine.

    What all ranks refuse, local rank 0 prints; it then stops the others. A rank that is not stopped within a few
    seconds has met the error alone, and prints it with its number.

    Args:
        refused: The refusal.
    """
    text = f"lightning-moe: error: {refused.reason}. {refused.hint}".rstrip()
    if _local_rank() == 0:
        print(text, file=sys.stderr, flush=True)
    elif _outlasts_the_parent(_HOLD):
        print(f"[rank {getattr(rank_zero_only, 'rank', _local_rank())}] {text}", file=sys.stderr, flush=True)


def end_of_run(error: BaseException, trainer: Trainer, sources: str) -> BaseException:
    """Decide how a run ends that an exception has ended, and stop the ranks that this process has started.

    Args:
        error: What came out of the Trainer.
        trainer: The Trainer.
        sources: The config files, for the message.

    Returns:
        ``error`` itself where its traceback is of use, otherwise the exit to raise in its place.
    """
    ranks = _started_ranks(trainer)
    if isinstance(error, SystemExit | KeyboardInterrupt):
        _stop(ranks, 0.0 if isinstance(error, RefusedError) else _PATIENCE)
        return error
    if _is_lost_peer(error):
        if not ranks and _local_rank() != 0:
            _outlasts_the_parent(_HOLD)
        failed = _first_failure(ranks)
        _stop(ranks, 0.0)
        return error if failed is None or traceback_wanted() else _blame(*failed)
    reason = None if traceback_wanted() else refusal(error, trainer.ckpt_path)
    _stop(ranks, _PATIENCE if reason is None else 0.0)
    if reason is None:
        return error
    return RefusedError(f"{sources}: {reason}", "(LIGHTNING_MOE_TRACEBACK=1 shows where this was raised)")


def refusal(error: BaseException, ckpt_path: object = None) -> str | None:
    """Say in one line what a user has to change.

    Args:
        error: What a run has raised.
        ckpt_path: The checkpoint that was to be loaded, if any.

    Returns:
        The line, or ``None`` where the error is a fault and no mistake in a config: its traceback is needed.
    """
    if isinstance(error, MisconfigurationException) or _raised_on_purpose(error):
        return condense(_text(error))
    if ckpt_path is not None and _met_in_a_checkpoint(error):
        return f"ckpt_path {ckpt_path} does not fit this model or cannot be read: {condense(_text(error))}"
    return None


def refuses_an_option(error: BaseException) -> bool:
    """Tell whether Lightning or this package rejected what it was given while a config was turned into objects.

    Args:
        error: The innermost cause of what was raised.

    Returns:
        ``False`` for faults of a user's class, which keep their traceback.
    """
    trace = _innermost(error)
    raised_in = trace.tb_frame.f_globals.get("__name__", "") if trace is not None else ""
    deliberate = (ValueError, TypeError, RuntimeError, ImportError, OSError, MisconfigurationException)
    return isinstance(error, deliberate) and raised_in.startswith(("lightning_moe.", "lightning.", "jsonargparse."))


def first_cause(error: BaseException) -> BaseException:
    """Follow ``raise ... from ...`` to its beginning."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def condense(message: str) -> str:
    """Make one line of a message, and of what jsonargparse says, which lists every type that a value might have had.

    Args:
        message: The text of an exception.

    Returns:
        The line, without a full stop.
    """
    lines = [line.strip() for line in message.splitlines()]
    noise = ["Does not validate against any", "Subtypes:", "Errors:", "Given value type:"]
    tried = [line for line in lines if line.startswith("- ")]
    if any(not line.startswith("- Expected a <class") for line in tried):
        noise += ["- Expected a <class", "Given value:"]
    text = " ".join(line.removeprefix("- ") for line in lines if line and not line.startswith(tuple(noise)))
    text = re.sub(r'Parser key "([^"]+)"', r"\1", text)
    text = re.sub(r'"[^"]+"(?:, "[^"]+"){3,}', _first_names, text)
    text = re.sub(r"(?:a )?<class '([\w.]+)'>", r"\1", text).rstrip(". ")
    return text if len(text) <= 1000 else f"{text[:1000]} ..."


def unknown_options(message: str, known: Iterable[str], command: str) -> RefusedError | None:
    """Explain options of the command line that do not exist.

    Args:
        message: What the parser says.
        known: The options that there are, with their dashes.
        command: The command.

    Returns:
        The refusal, or ``None`` where the message is about something else.
    """
    found = re.search(r"unrecognized arguments: (.*)", message, re.IGNORECASE | re.DOTALL)
    if found is None:
        return None
    given = [part.split("=")[0] for part in found[1].split() if part.startswith("-")] or found[1].split()
    close = difflib.get_close_matches(given[0], sorted(known), n=3)
    meant = f"Did you mean {' or '.join(close)}? " if close else ""
    plural = "s" if len(given) > 1 else ""
    return RefusedError(
        f"unknown option{plural} on the command line: {', '.join(given)}",
        f"{meant}`lightning-moe {command} --help` lists the options",
    )


def hint(text: str, command: str) -> str:
    """Name the next step after a config was refused.

    Args:
        text: The condensed reason.
        command: The command.
    """
    if "arguments are required" in text and "model" in text:
        return f"Give a config file: lightning-moe {command} --config FILE.yaml"
    if re.search(r"option '(optimizer|lr_scheduler)\b", text):
        return "Set it in model.init_args, so that it is built from the sharded parameters"
    if missing := re.search(r"No module named '([^']+)'", text):
        return f"Install {missing[1].split('.')[0]!r}, correct the name, or put its folder on PYTHONPATH"
    if wrong := re.search(r"option '(?:trainer\.)?(\w+)", text):
        known = [*inspect.signature(Trainer).parameters, "trainer", "model", "data", "seed_everything", "ckpt_path"]
        close = difflib.get_close_matches(wrong[1], known, n=1)
        meant = f"Did you mean {close[0]!r}? " if close else ""
        return f"{meant}`lightning-moe {command} --help` lists the options"
    if owner := re.search(r"^([\w.]+): .*class_path '([\w.]+)'.*not accepted", text):
        return f"`lightning-moe {command} --{owner[1]}.help {owner[2]}` lists what is"
    return f"`lightning-moe {command} --help` lists the options"


def _text(error: BaseException) -> str:
    failures = getattr(error, "failures", None)  # torch's CheckpointException: one error of each rank, with its stack
    if isinstance(failures, dict) and failures:
        error = next(iter(failures.values()))[0]
    text = str(error.args[0]) if len(error.args) == 1 else str(error)  # str(KeyError) puts quotes around it
    return text if " " in text.strip() else f"{type(error).__name__}: {text}"


def _first_names(names: re.Match[str]) -> str:
    listed = names[0].split(", ")
    return f"{', '.join(listed[:3])} and {len(listed) - 3} more"


def _trace(error: BaseException) -> list[TracebackType]:
    trace, found = error.__traceback__, []
    while trace is not None:
        found.append(trace)
        trace = trace.tb_next
    return found


def _innermost(error: BaseException) -> TracebackType | None:
    return next(reversed(_trace(error)), None)


def _raised_on_purpose(error: BaseException) -> bool:
    """Whether a ``raise`` of this package did it, and not a slip in its code."""
    trace = _innermost(error)
    if trace is None or _PACKAGE not in Path(trace.tb_frame.f_code.co_filename).resolve().parents:
        return False
    if isinstance(error, FileNotFoundError):
        return True
    by_raise = trace.tb_frame.f_code.co_code[trace.tb_lasti] == dis.opmap["RAISE_VARARGS"]
    return by_raise and isinstance(error, ValueError | TypeError | RuntimeError | ImportError)


def _met_in_a_checkpoint(error: BaseException) -> bool:
    modules = [str(trace.tb_frame.f_globals.get("__name__", "")) for trace in _trace(error)]
    if not modules or not any(name.endswith("connectors.checkpoint_connector") for name in modules):
        return False
    is_of_torch = hasattr(error, "failures")  # a BaseException
    if "out of memory" in str(error) or not (isinstance(error, Exception) or is_of_torch):
        return False
    return modules[-1].split(".")[0] in (*_LIBRARIES, "pickle", "zipfile", "fsspec")


def _is_lost_peer(error: BaseException) -> bool:
    """Whether this rank failed only because another one went away."""
    if isinstance(error, MissingRankError):
        return True
    return isinstance(error, RuntimeError) and not _raised_on_purpose(error) and bool(_PEER_LOST.search(str(error)))


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or 0)


def _outlasts_the_parent(seconds: float) -> bool:
    """Wait; ``False`` as soon as the process that started this one has gone."""
    parent, end = os.getppid(), time.monotonic() + seconds
    while time.monotonic() < end:
        if os.getppid() != parent:
            return False
        time.sleep(0.05)
    return True


def _started_ranks(trainer: Trainer) -> list["subprocess.Popen[bytes]"]:
    """Take over the ranks that Lightning's launcher has started.

    Emptying its list ends its observer, which would kill this process some time after a rank has failed.
    """
    started = getattr(trainer.strategy.launcher, "procs", [])
    ranks = [process for process in started if isinstance(process, subprocess.Popen)]
    if ranks:
        started.clear()
    return ranks


def _first_failure(ranks: Sequence["subprocess.Popen[bytes]"]) -> tuple[int, int] | None:
    """Wait until one of the started ranks has failed; return its number and its exit code."""
    end = time.monotonic() + _PATIENCE
    while ranks and time.monotonic() < end:
        for number, process in enumerate(ranks, 1):
            if process.poll():
                return number, process.returncode
        time.sleep(0.02)
    return None


def _blame(rank: int, code: int) -> SystemExit:
    """End this rank without the traceback of its lost connection, which would hide what another has printed."""
    if code == 2:
        return SystemExit(2)
    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}: what it printed is above"
    text = f"lightning-moe: error: rank {rank} {how}. This stopped the run."
    print(text, "(LIGHTNING_MOE_TRACEBACK=1 shows where the others were)", file=sys.stderr, flush=True)
    return SystemExit(1)


def _stop(ranks: Sequence["subprocess.Popen[bytes]"], patience: float) -> None:
    """Wait ``patience`` seconds for processes, terminate the rest, kill what is left."""
    _wait(ranks, patience)
    for process in ranks:
        process.terminate()
    _wait(ranks, 1.0)
    for process in ranks:
        process.kill()
    _wait(ranks, 1.0)


def _wait(ranks: Sequence["subprocess.Popen[bytes]"], seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and any(process.poll() is None for process in ranks):
        time.sleep(0.02)


@contextmanager
def terminable() -> Generator[None, None, None]:
    """Turn SIGTERM into an exit that cleans up."""

    def stop(number: int, frame: Any) -> NoReturn:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
