"""``lightning-moe verify``: what a user calls. It starts the runs, has them judged, and cleans up."""

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from lightning.pytorch.plugins.environments import SLURMEnvironment
from typing_extensions import override

from lightning_moe.cli import ParsedCLI, check_config_file, config_files
from lightning_moe.cli_errors import RefusedError, terminable
from lightning_moe.verify.compare import Record
from lightning_moe.verify.judge import Judge, Start
from lightning_moe.verify.plan import LAYOUT, Plan, Reference
from lightning_moe.verify.report import show, write

_MAX_TOLERANCE = 0.5
_LOG_LINES = 60
_ERROR = "lightning-moe: error: "

_DESCRIPTION = """\
Run the model and the data of a config for a few steps under its layout, then in one process (devices=1, Lightning's
own strategy) on the batches of all ranks joined to one, from the same initial weights. Compare the loss and the
gradient norm of each step, the gradients of the first step, and by how much each weight has changed after the last.

Every option that is not listed here is one of `lightning-moe fit`, for example --trainer.devices 4 or
--trainer.strategy.init_args.expert_parallel_size 2."""

_EPILOG = """\
errors are |layout - one process| / |one process| in the 2-norm, of each parameter; a row shows the one that comes
nearest to its tolerance. Without --tolerance that is 1e-5 in float32 and two roundings in coarser precisions (1.6e-2
in bfloat16), or five times what one process is moved by when each initial weight is changed by one rounding, where that
is more. `unclear`: that would be more than half of the quantity, so nothing can be said about it. float32
(--trainer.precision 32-true) shows the most.

Where the layout agrees only with one process that takes each rank's batch as a micro-batch and averages the losses,
the strategy is exact, but the loss depends on which samples share a rank: a mean over each rank's own tokens, or
statistics of a batch. The exit code is 0, and the verdict says so.

Nothing is written but --json. Loggers, checkpoints, callbacks and validation of the config stay out. What the runs
record lies in a temporary folder (TMPDIR) of 7 times the size of the weights in float32, or 13 times where they differ,
and is removed at the end.

exit codes: 0 the same, 1 different, 2 the comparison could not be made"""


def main(argv: list[str] | None = None) -> int:
    """Run ``lightning-moe verify``.

    Args:
        argv: The arguments after the command.

    Returns:
        0 if the layout trains as one process does, 1 if not, 2 if the forward is random, so that it cannot be known.

    Raises:
        RefusedError: If the options or the config cannot be used, or a run failed.
    """
    options, arguments = _parse(sys.argv[2:] if argv is None else argv)
    config = _config(arguments)
    callbacks = _callbacks(options.callbacks, config["trainer"]["callbacks"])
    plan = Plan(tuple(arguments), options.steps, options.shrink, options.no_dropout, callbacks)
    model = str(config["model"]["class_path"])
    try:
        with terminable(), _temporary_folder() as folder:
            plan.write(folder)
            verdict = Judge(folder, options.tolerance, _starter(options.timeout)).verdict()
            layout = Record(folder / LAYOUT)
            files = ", ".join(config_files(arguments))
            show(verdict, layout, f"{model.rpartition('.')[2]} of {files}, {layout.steps} steps, {layout.precision}")
            if options.json is not None:
                write(options.json, verdict, layout, model)
    except KeyboardInterrupt:
        return 130
    return verdict.exit_code


class _Options(argparse.ArgumentParser):
    """Raises what it cannot parse, in place of a page of usage."""

    @override
    def error(self, message: str) -> NoReturn:
        raise RefusedError(message, "`lightning-moe verify --help` lists the options")


def _parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options of this command, and those that are left for ``fit``."""
    parser = _Options(
        prog="lightning-moe verify",
        usage="lightning-moe verify --config FILE.yaml [options]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--steps", type=_positive, default=3, metavar="N", help="optimizer steps (default: 3)")
    parser.add_argument(
        "--shrink",
        action="store_true",
        help="make a lightning_moe.models.CausalLM smaller: two layers (more, where it takes them to have one with"
        " experts), and narrower MLPs if its weights are random",
    )
    parser.add_argument("--no-dropout", action="store_true", help="set dropout and the like to 0, in both runs")
    parser.add_argument("--tolerance", type=_tolerance, metavar="X", help="largest relative error of every quantity")
    parser.add_argument(
        "--callbacks", default="", metavar="A,B", help="class names of callbacks of the config that take part"
    )
    parser.add_argument("--json", type=_writable, metavar="PATH", help="write the comparison to a file, too")
    parser.add_argument(
        "--timeout", type=_positive, default=1800, metavar="S", help="seconds that the runs may take (default: 1800)"
    )
    return parser.parse_known_args(argv)


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number from 1 up")
    return int(text)


def _tolerance(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value <= _MAX_TOLERANCE:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number above 0, at most {_MAX_TOLERANCE}")
    return value


def _writable(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} must be a file in a folder that exists")
    return path


def _config(arguments: list[str]) -> Any:
    """Parse the config and refuse what a comparison cannot honour."""
    if not any(argument.split("=")[0] in ("-c", "--config") for argument in arguments):
        raise RefusedError("no config is given", "Give one: lightning-moe verify --config FILE.yaml")
    if any(argument.split("=")[0] == "--print_config" for argument in arguments):
        raise RefusedError("verify prints no config", "`lightning-moe fit --print_config` does")
    for file in config_files(arguments):
        check_config_file(file)
    if "LOCAL_RANK" in os.environ or (SLURMEnvironment.detect() and os.environ.get("SLURM_NTASKS", "1") != "1"):
        raise RefusedError(
            "verify starts the ranks of one machine itself, and was itself started several times",
            "Run it without torchrun or srun",
        )
    config = ParsedCLI(["fit", *arguments]).config["fit"]
    if config["trainer"]["num_nodes"] != 1:
        raise RefusedError(
            f"trainer.num_nodes={config['trainer']['num_nodes']}: verify runs on one machine",
            "Add --trainer.num_nodes 1",
        )
    if config["ckpt_path"] is not None:
        raise RefusedError(
            f"ckpt_path {config['ckpt_path']!r}: verify begins at step 0, with the weights that the model begins with",
            "Leave it out, or add --ckpt_path null",
        )
    return config


def _callbacks(wanted: str, configured: Any) -> tuple[str, ...]:
    names = [name.strip() for name in wanted.split(",") if name.strip()]
    there = [callback_name(part) for part in as_list(configured)]
    for name in names:
        if name not in there:
            listed = f"it has {', '.join(there)}" if there else "it has none"
            raise RefusedError(f"--callbacks {name}: no such callback in the config", f"By class name; {listed}")
    return tuple(names)


def callback_name(part: Any) -> str:
    """The class name of a callback in a config."""
    path = part if isinstance(part, str) else part["class_path"]
    return str(path).rpartition(".")[2]


def as_list(value: Any) -> list[Any]:
    """What a config gives as nothing, one or several."""
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


@contextlib.contextmanager
def _temporary_folder() -> Generator[Path, None, None]:
    folder = Path(tempfile.mkdtemp(prefix="lightning-moe-verify-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _starter(timeout: float) -> Start:
    def start(folder: Path, names: Sequence[str]) -> None:
        what = "the layout" if LAYOUT in names else "one process"
        first = LAYOUT in names or Reference().name in names
        print(f"verify: running {what}{'' if first else ' again, for the reason'} ...", file=sys.stderr, flush=True)
        log = folder / f"{names[0]}.log"
        command = [sys.executable, "-m", "lightning_moe.verify.run", str(folder), *names]
        with log.open("w") as out:
            # In a session of its own, so that its end is that of every rank that it starts.
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                code = process.wait(timeout)
            except subprocess.TimeoutExpired:
                _print_end_of(log)
                raise RefusedError(f"{what} ran past --timeout {timeout:g} s", "What it printed is above") from None
            finally:
                _kill(process)
        if code:
            raise _failure(what, code, log)

    return start


def _kill(process: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _failure(what: str, code: int, log: Path) -> RefusedError:
    """Pass on what a run has reported in one line, and all that it printed where it is more than a mistake."""
    text = log.read_text(errors="replace")
    reported = [line for line in text.splitlines() if _ERROR in line]
    if code != 2 or "Traceback" in text:
        _print_end_of(log)
    if code == 2 and reported:
        return RefusedError(reported[0].partition(_ERROR)[2].rstrip("."))
    how = f"was killed by signal {-code}" if code < 0 else f"failed with exit code {code}"
    return RefusedError(f"the run of {what} {how}", "What it printed is above")


def _print_end_of(log: Path) -> None:
    lines = log.read_text(errors="replace").splitlines()
    print("\n".join(lines[-_LOG_LINES:]), file=sys.stderr, flush=True)
