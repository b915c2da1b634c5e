"""The command line: ``lightning-moe fit --config configs/X.yaml`` and the tools beside it.

``fit``, ``validate``, ``test`` and ``predict`` are Lightning's own command line (LightningCLI) over any model and data
module named by ``class_path``. Importing this module registers the strategy ``moe_ep``, so a config may name it.
"""

import difflib
import importlib
import inspect
import logging
import os
import re
import shlex
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_only, rank_zero_warn
from rich.console import Console
from rich.text import Text
from typing_extensions import override

import lightning_moe  # noqa: F401  (registers the strategy)

_TRAINER_COMMANDS = {
    "fit": "train the model of a config file",
    "validate": "run the validation data through the model of a config file",
    "test": "run the test data through it",
    "predict": "run the prediction data through it",
}


@dataclass(frozen=True)
class _Tool:
    """A command that is not one of the Trainer's: ``function(argv) -> exit code``, imported when it is asked for."""

    summary: str
    module: str
    function: str = "main"


_TOOLS = {
    "doctor": _Tool("show versions, devices and what is usable here, with reasons", "lightning_moe.doctor"),
}


class _RefusedError(SystemExit):
    """The arguments or the config cannot be used. An exit, so that no layer between takes it for a crash."""

    def __init__(self, reason: str, hint: str = "") -> None:
        super().__init__(2)
        self.reason = reason
        self.hint = hint


def main(argv: list[str] | None = None) -> int | None:
    """Run the command line.

    Lightning starts the other ranks of a machine by running ``sys.argv`` again. A caller that passes ``argv`` from
    Python and wants several ranks has to start them itself, for example with torchrun.

    Args:
        argv: The arguments after the program's name; default: those of the process.

    Returns:
        The exit code: ``None`` and 0 mean success, 2 that the arguments or the config file cannot be used.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    command = arguments[0] if arguments else "--help"
    if command in ("-h", "--help", "help"):
        print(_help())
        return 0
    if command == "--version":
        print(f"lightning-moe {_version()}")
        return 0
    try:
        return _run(command, arguments)
    except _RefusedError as refused:
        _complain(f"lightning-moe: error: {refused.reason}. {refused.hint}".rstrip())
        return 2
    except SystemExit as stop:  # --help of a command, and Lightning after Ctrl-C
        return stop.code if stop.code is None or isinstance(stop.code, int) else 1


def _run(command: str, arguments: list[str]) -> int | None:
    if command not in _TRAINER_COMMANDS and command not in _TOOLS:
        known = [*_TRAINER_COMMANDS, *_TOOLS]
        close = difflib.get_close_matches(command, known, n=1)
        meant = f"Did you mean {close[0]!r}?" if close else ""
        raise _RefusedError(f"unknown command {command!r}", f"{meant}\n\n{_help()}")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # a class_path may name a module beside the config
    if command in _TOOLS:
        tool = _TOOLS[command]
        return getattr(importlib.import_module(tool.module), tool.function)(arguments[1:])
    _quiet()
    for file in _config_files(arguments):
        _check_config_file(file)
    MoECLI(arguments)
    return 0


class MoECLI(LightningCLI):
    """LightningCLI with the settings that sharded models need, and a summary at the end of ``fit``.

    There is no top-level ``optimizer:`` group: LightningCLI would build that optimizer from the parameters before the
    strategy shards them, and it would train nothing. A model takes its optimizer as one of its ``init_args``.

    Args:
        arguments: The command and its options.
    """

    def __init__(self, arguments: list[str]) -> None:
        self._arguments = arguments
        super().__init__(
            args=arguments,
            parser_class=_Parser,
            auto_configure_optimizers=False,
            save_config_kwargs={"overwrite": True},
            seed_everything_default=0,
        )

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        try:
            self.config = parser.parse_args(args)
        except _RefusedError as refused:
            raise _explain(refused.reason, self._arguments) from None

    @override
    def _parse_ckpt_path(self) -> None:
        """Leave the config as it is: hyperparameters inside a checkpoint must not overrule it silently."""

    @override
    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
        except Exception as error:
            cause = _first_cause(error)
            if os.environ.get("LIGHTNING_MOE_TRACEBACK") or not _refuses_an_option(cause):
                raise cause from None
            reason = f"{_sources(self._arguments)}: {_condense(str(error))}"
            raise _RefusedError(reason, "(LIGHTNING_MOE_TRACEBACK=1 shows where this was raised)") from error

    def fit(self, **kwargs: Any) -> None:
        """Train, then say where the results lie and how to go on; also after Ctrl-C."""
        kwargs = self._with_checkpoint(kwargs)
        try:
            self.trainer.fit(**kwargs)
        except SystemExit:
            self._print_summary()
            raise
        self._print_summary()

    def validate(self, **kwargs: Any) -> None:
        """Run the validation data."""
        self.trainer.validate(**self._with_checkpoint(kwargs))

    def test(self, **kwargs: Any) -> None:
        """Run the test data."""
        self.trainer.test(**self._with_checkpoint(kwargs))

    def predict(self, **kwargs: Any) -> None:
        """Run the prediction data."""
        self.trainer.predict(**self._with_checkpoint(kwargs))

    def _with_checkpoint(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Turn ``ckpt_path: last`` into a path.

        Lightning looks for it in the directory of the run that starts now, which is new and empty, and would begin
        anew. Here it is the newest checkpoint of earlier runs of the same model class that this config writes beside.
        """
        wanted = kwargs.get("ckpt_path")
        if wanted not in ("last", "best"):
            self._check_checkpoint(wanted)
            return kwargs
        model = self._get(self.config, "model")
        places = _checkpoint_places(self.trainer, getattr(model, "class_path", None))
        found = newest_checkpoints(places)
        searched = ", ".join(_shown(place) for place in places) or _shown(self.trainer.default_root_dir)
        if wanted == "best":
            listed = " ".join(_shown(path) for path in found) or f"none in {searched}"
            raise _RefusedError("ckpt_path 'best' is known only inside the run that saved it", f"Give a path: {listed}")
        if found:
            self._check_checkpoint(found[0])
            _say(f"{self.subcommand} continues from {_shown(found[0])}")
            return {**kwargs, "ckpt_path": str(found[0])}
        if self.subcommand == "fit":
            rank_zero_warn(f"ckpt_path 'last': no checkpoint in {searched}; training begins at step 0.")
            return {**kwargs, "ckpt_path": None}
        raise _RefusedError(f"ckpt_path 'last': no checkpoint in {searched}", "Run `lightning-moe fit` or give a path")

    def _check_checkpoint(self, path: str | Path | None) -> None:
        if path is None or not (Path(path) / ".metadata").is_file():
            return
        if not isinstance(self.trainer.strategy, ModelParallelStrategy | FSDPStrategy):
            raise _RefusedError(
                f"ckpt_path {_shown(path)} is a distributed checkpoint (a directory), which the strategy"
                f" {type(self.trainer.strategy).__name__} cannot read",
                "Set trainer.strategy: moe_ep, or merge it to one file:"
                f" python -m lightning.fabric.utilities.consolidate_checkpoint {shlex.quote(_shown(path))}",
            )

    @rank_zero_only
    def _print_summary(self) -> None:
        trainer = self.trainer
        if getattr(trainer, "fast_dev_run", False):
            return
        checkpoints = newest_checkpoints(_callback_directories(trainer))
        lines = []
        for logger in trainer.loggers:
            if logger.save_dir is not None:
                lines.append(("logs", _shown(logger.log_dir or logger.save_dir)))
        if checkpoints:
            lines.append(("checkpoints", f"{_shown(checkpoints[0].parent)} (newest: {checkpoints[0].name})"))
        for logger in trainer.loggers:
            if type(logger).__name__ == "TensorBoardLogger" and logger.log_dir:
                lines.append(("watch", shlex.join(["tensorboard", "--logdir", _shown(Path(logger.log_dir).parent)])))
        if checkpoints:
            lines.append(("go on", shlex.join(["lightning-moe", *_arguments_to_go_on(self._arguments, trainer)])))
        _say("")
        for name, text in lines:
            _say(Text.assemble((f"{name:<13}", "bold"), text))


class _Parser(LightningArgumentParser):
    """Raises what it cannot parse, in place of a page of usage."""

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:
            super().error(message, ex)
        raise _RefusedError(message)


def newest_checkpoints(directories: Sequence[Path]) -> list[Path]:
    """List the whole checkpoints of some directories.

    Args:
        directories: Where ``*.ckpt`` files and ``*.ckpt`` directories (distributed checkpoints) may lie.

    Returns:
        Their paths, the newest first. A distributed checkpoint counts once its metadata is there: it is written last.
    """
    times = {}
    for directory in directories:
        for path in directory.glob("*.ckpt"):
            marker = path / ".metadata" if path.is_dir() else path
            if marker.exists():
                times[path] = marker.stat().st_mtime_ns
    return sorted(times, key=lambda path: times[path], reverse=True)


def _callback_directories(trainer: Trainer) -> list[Path]:
    directories = [getattr(callback, "dirpath", None) for callback in trainer.checkpoint_callbacks]
    return [Path(directory) for directory in directories if directory]


def _checkpoint_places(trainer: Trainer, model_class: str | None) -> list[Path]:
    """Where earlier runs of a config have put checkpoints, by the rules of ModelCheckpoint."""
    places = _callback_directories(trainer)
    for logger in trainer.loggers:
        runs = Path(logger.save_dir or trainer.default_root_dir) / str(logger.name)
        places += [run / "checkpoints" for run in runs.glob("*") if _saved_model_class(run) in (None, model_class)]
    if not trainer.loggers:
        places.append(Path(trainer.default_root_dir) / "checkpoints")
    return [place for place in dict.fromkeys(places) if place.is_dir()]


def _saved_model_class(run: Path) -> str | None:
    """The model of a run by the config that the command line saved there; ``None`` where that is unknown."""
    try:
        saved = yaml.safe_load((run / "config.yaml").read_text())
        return saved["model"]["class_path"]
    except (OSError, yaml.YAMLError, KeyError, TypeError):
        return None


def _arguments_to_go_on(arguments: list[str], trainer: Trainer) -> list[str]:
    """The same command with ``--ckpt_path last``, and with a later end where the run has reached its own."""
    limits = {}
    if trainer.max_steps > 0 and trainer.global_step >= trainer.max_steps:
        limits["--trainer.max_steps"] = trainer.max_steps
    elif trainer.max_epochs is not None and 0 < trainer.max_epochs <= trainer.current_epoch:
        limits["--trainer.max_epochs"] = trainer.max_epochs
    kept = _without_options(arguments, ["--ckpt_path", *limits])
    doubled = [str(part) for option, limit in limits.items() for part in (option, 2 * limit)]
    return [*kept, "--ckpt_path", "last", *doubled]


def _without_options(arguments: list[str], options: Sequence[str]) -> list[str]:
    kept = []
    parts = iter(arguments)
    for part in parts:
        if part in options:
            next(parts, None)
        elif part.split("=")[0] not in options:
            kept.append(part)
    return kept


def _config_files(arguments: Sequence[str]) -> list[str]:
    """The files that ``--config`` names. Its value may also be the YAML itself."""
    values = []
    for position, argument in enumerate(arguments):
        name, given, value = argument.partition("=")
        if name in ("-c", "--config"):
            values.append(value if given else "".join(arguments[position + 1 : position + 2]))
    return [value for value in values if "\n" not in value and "{" not in value and "://" not in value]


def _check_config_file(file: str) -> None:
    """Find what YAML alone can tell, so that the message can name the file and the line."""
    path = Path(file)
    if not file or not path.is_file():
        folder = path.parent if path.parent.is_dir() else Path()
        there = sorted(_shown(other) for pattern in ("*.yaml", "*.yml") for other in folder.glob(pattern))
        listed = f"Config files in {_shown(folder)}: {', '.join(there)}" if there else "Check the path"
        raise _RefusedError(f"config file {file!r} does not exist", listed)
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = ", ".join(str(part) for part in (error.context, error.problem) if part)
        raise _RefusedError(f"config file {file}{where}: {problem}", "Correct the YAML there or just above") from None
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise _RefusedError(
            f"config file {file}: {' '.join(str(error).split())}", "It has to be YAML in UTF-8"
        ) from None
    if not isinstance(content, dict):
        found = "is empty" if content is None else f"holds a {type(content).__name__}"
        raise _RefusedError(
            f"config file {file} {found}", "It needs the keys trainer:, model: and, for most models, data:"
        )


def _explain(message: str, arguments: list[str]) -> _RefusedError:
    """Say what is wrong with the content of a config, and the next step."""
    text = _condense(message)
    return _RefusedError(f"{_sources(arguments)}: {text}", _hint(text, arguments[0]))


def _condense(message: str) -> str:
    """Make one line of what jsonargparse says, which lists every type that a value might have had."""
    lines = [line.strip() for line in message.splitlines()]
    noise = ["Does not validate against any", "Subtypes:", "Errors:", "Given value type:"]
    tried = [line for line in lines if line.startswith("- ")]
    if any(not line.startswith("- Expected a <class") for line in tried):
        noise += ["- Expected a <class", "Given value:"]
    text = " ".join(line.removeprefix("- ") for line in lines if line and not line.startswith(tuple(noise)))
    text = re.sub(r'Parser key "([^"]+)"', r"\1", text)
    return re.sub(r"(?:a )?<class '([\w.]+)'>", r"\1", text).rstrip(".")


def _first_cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _refuses_an_option(error: BaseException) -> bool:
    """Whether Lightning or this package rejected what it was given; faults of a user's class keep their traceback."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    raised_in = trace.tb_frame.f_globals.get("__name__", "") if trace is not None else ""
    deliberate = (ValueError, TypeError, RuntimeError, ImportError, OSError, MisconfigurationException)
    return isinstance(error, deliberate) and raised_in.startswith(("lightning_moe.", "lightning.", "jsonargparse."))


def _hint(text: str, command: str) -> str:
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


def _sources(arguments: list[str]) -> str:
    return ", ".join(_config_files(arguments)) or "options given"


def _shown(path: str | Path) -> str:
    """A path as a user would type it here."""
    absolute = Path(path).absolute()
    return str(absolute.relative_to(Path.cwd())) if absolute.is_relative_to(Path.cwd()) else str(absolute)


@rank_zero_only
def _say(text: str | Text) -> None:
    # soft_wrap: a command or a path that is broken over two lines cannot be copied
    Console().print(text, highlight=False, markup=False, soft_wrap=True)


@rank_zero_only
def _complain(text: str) -> None:
    print(text, file=sys.stderr)


def _help() -> str:
    lines = ["usage: lightning-moe COMMAND [options]", ""]
    lines += [f"  {name:<10}{summary}" for name, summary in _TRAINER_COMMANDS.items()]
    lines += [f"  {name:<10}{tool.summary}" for name, tool in _TOOLS.items()]
    lines += [
        "",
        "  lightning-moe fit --config configs/X.yaml                       train",
        "  lightning-moe fit --config configs/X.yaml --ckpt_path last      go on from the newest checkpoint",
        "  lightning-moe fit --config configs/X.yaml --trainer.devices 8   change any entry of the config",
        "  lightning-moe fit --config configs/X.yaml --print_config        show the whole config, defaults included",
        "",
        "`lightning-moe COMMAND --help` lists the options of a command, `lightning-moe --version` prints the version.",
    ]
    return "\n".join(lines)


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("lightning-moe")
    except PackageNotFoundError:
        return "(not installed)"


class _WithoutAdvertising(logging.Filter):
    """Drops Lightning's tips about further products and its lines about devices that nobody asked for."""

    @override
    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        return not text.startswith(("💡 Tip", "TPU available: False", "HPU available: False"))


def _quiet() -> None:
    """Silence what a user can do nothing about, or what is no fault. Everything else stays."""
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    if not any(isinstance(known, _WithoutAdvertising) for known in logger.filters):
        logger.addFilter(_WithoutAdvertising())
    for pattern in (
        r".*does not have many workers",
        r".*isinstance\(treespec, LeafSpec\).*is deprecated",
        r".*is not supported by the model summary",
        r"The dirpath has changed from",  # every resumed run writes into a directory of its own
    ):
        warnings.filterwarnings("ignore", message=pattern)


if __name__ == "__main__":
    sys.exit(main())
