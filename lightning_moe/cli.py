"""The command line: ``lightning-moe fit --config configs/X.yaml`` and the tools beside it.

``fit``, ``validate``, ``test`` and ``predict`` are Lightning's own command line (LightningCLI) over any model and data
module named by ``class_path``. Importing this module registers the strategy ``moe_ep``, so a config may name it.
"""

import difflib
import importlib
import logging
import os
import shlex
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import yaml
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_only, rank_zero_warn
from rich.console import Console
from rich.text import Text
from typing_extensions import override

import lightning_moe  # noqa: F401  (registers the strategy)
from lightning_moe.cli_checkpoints import callback_directories, checkpoint_places, newest_checkpoints, newest_fitting
from lightning_moe.cli_errors import (
    RefusedError,
    condense,
    end_of_run,
    first_cause,
    hint,
    refuses_an_option,
    report,
    traceback_wanted,
    unknown_options,
)

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
    "verify": _Tool("compare a config's layout with one process, on its own model and data", "lightning_moe.verify"),
    "export": _Tool("write a checkpoint as a folder that Transformers loads", "lightning_moe.checkpoint.export"),
}


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
    except RefusedError as refused:
        report(refused)
        return 2
    except SystemExit as stop:  # --help of a command, and Lightning after Ctrl-C
        return stop.code if stop.code is None or isinstance(stop.code, int) else 1


def _run(command: str, arguments: list[str]) -> int | None:
    if command not in _TRAINER_COMMANDS and command not in _TOOLS:
        known = [*_TRAINER_COMMANDS, *_TOOLS]
        close = difflib.get_close_matches(command, known, n=1)
        meant = f"Did you mean {close[0]!r}?" if close else ""
        raise RefusedError(f"unknown command {command!r}", f"{meant}\n\n{_help()}")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # a class_path may name a module beside the config
    if command in _TOOLS:
        tool = _TOOLS[command]
        return getattr(importlib.import_module(tool.module), tool.function)(arguments[1:])
    quiet()
    for file in config_files(arguments):
        check_config_file(file)
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
            args=_with_strategy_class(arguments),
            parser_class=_Parser,
            auto_configure_optimizers=False,
            save_config_kwargs={"overwrite": True},
            seed_everything_default=0,
        )

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        try:
            self.config = parser.parse_args(args)
        except RefusedError as refused:
            command = self._arguments[0]
            known = self._subcommand_parsers[command]._option_string_actions
            unknown = unknown_options(refused.reason, known, command)
            raise unknown or _explain(refused.reason, self._arguments) from None

    @override
    def _parse_ckpt_path(self) -> None:
        """Leave the config as it is: hyperparameters inside a checkpoint must not overrule it silently."""

    @override
    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
        except Exception as error:
            cause = first_cause(error)
            if traceback_wanted() or not refuses_an_option(cause):
                raise cause from None
            reason = f"{_sources(self._arguments)}: {condense(str(error))}"
            raise RefusedError(reason, "(LIGHTNING_MOE_TRACEBACK=1 shows where this was raised)") from error

    @override
    def _run_subcommand(self, subcommand: str) -> None:
        try:
            super()._run_subcommand(subcommand)
        except BaseException as error:
            end = end_of_run(error, self.trainer, _sources(self._arguments))
            if end is error:
                raise
            raise end from error

    def fit(self, **kwargs: Any) -> None:
        """Train, then say where the results lie and how to go on; also after Ctrl-C."""
        kwargs = self._with_checkpoint(kwargs)
        watch = _TrainingStarted()
        self.trainer.callbacks.append(watch)  # type: ignore[attr-defined]
        try:
            self.trainer.fit(**kwargs)
        except SystemExit:
            self._print_summary()
            raise
        if kwargs.get("ckpt_path") and not watch.started:
            self._print_why_nothing_was_done(kwargs["ckpt_path"])
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
        anew. Here it is the newest checkpoint of earlier runs with the model and the data of this config.
        """
        wanted = kwargs.get("ckpt_path")
        if wanted not in ("last", "best"):
            self._check_checkpoint(wanted)
            return kwargs
        places = checkpoint_places(self.trainer)
        searched = ", ".join(dict.fromkeys(_shown(place.directory) for place in places))
        searched = searched or _shown(self.trainer.default_root_dir)
        if wanted == "best":
            found = newest_checkpoints([place.directory for place in places])
            listed = " ".join(_shown(path) for path in found) or f"none in {searched}"
            raise RefusedError("ckpt_path 'best' is known only inside the run that saved it", f"Give a path: {listed}")
        newest, passed_over = newest_fitting(places, self._saved_form())
        for line in passed_over:
            _say(line)
        if newest is not None:
            self._check_checkpoint(newest)
            _say(f"{self.subcommand} continues from {_shown(newest)}")
            return {**kwargs, "ckpt_path": str(newest)}
        reason = f"ckpt_path 'last': no checkpoint of this config's model and data in {searched}"
        if self.subcommand == "fit":
            rank_zero_warn(f"{reason}; training begins at step 0.")
            return {**kwargs, "ckpt_path": None}
        raise RefusedError(reason, "Run `lightning-moe fit` or give a path")

    def _saved_form(self) -> dict[str, Any]:
        """The present config as this run will save it."""
        command = str(self.subcommand)
        return yaml.safe_load(self._parser(command).dump(self.config[command], skip_none=False))

    def _check_checkpoint(self, path: str | Path | None) -> None:
        if path is None or str(path) == "hpc" or str(path).startswith("registry") or "://" in str(path):
            return
        if not Path(path).exists():
            beside = [_shown(other) for other in newest_checkpoints([Path(path).parent])[:5]]
            listed = f"Checkpoints there: {', '.join(beside)}" if beside else "Give a path, or `last`"
            raise RefusedError(f"ckpt_path {_shown(path)!r} does not exist", listed)
        if not (Path(path) / ".metadata").is_file():
            return
        if not isinstance(self.trainer.strategy, ModelParallelStrategy | FSDPStrategy):
            raise RefusedError(
                f"ckpt_path {_shown(path)} is a distributed checkpoint (a directory), which the strategy"
                f" {type(self.trainer.strategy).__name__} cannot read",
                "Set trainer.strategy: moe_ep, or merge it to one file:"
                f" python -m lightning.pytorch.utilities.consolidate_checkpoint {shlex.quote(_shown(path))}",
            )

    @rank_zero_only
    def _print_why_nothing_was_done(self, checkpoint: str) -> None:
        limits = _reached_limits(self.trainer)
        if limits:
            reached = " and ".join(f"{option[2:]}={limit}" for option, limit in limits.items())
            again = shlex.join(["lightning-moe", *_arguments_to_go_on(self._arguments, self.trainer, checkpoint)])
            _say(f"Nothing was trained: {_shown(checkpoint)} has reached {reached} already. To go on: {again}")

    @rank_zero_only
    def _print_summary(self) -> None:
        trainer = self.trainer
        if getattr(trainer, "fast_dev_run", False):
            return
        checkpoints = newest_checkpoints(callback_directories(trainer))
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


class ParsedCLI(MoECLI):
    """The config, parsed and checked, with nothing built from it."""

    @override
    def _set_seed(self) -> None:
        """Leave the seed to the runs."""

    @override
    def instantiate_classes(self) -> None:
        """Build nothing."""

    @override
    def _run_subcommand(self, subcommand: str) -> None:
        """Run nothing."""


class _TrainingStarted(Callback):
    """Knows whether there was anything left to train."""

    started = False

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.started = True


class _Parser(LightningArgumentParser):
    """Raises what it cannot parse, in place of a page of usage, and takes no abbreviations."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:
            super().error(message, ex)
        raise RefusedError(message)


def _reached_limits(trainer: Trainer) -> dict[str, int]:
    limits = {}
    if trainer.max_steps > 0 and trainer.global_step >= trainer.max_steps:
        limits["--trainer.max_steps"] = trainer.max_steps
    if trainer.max_epochs is not None and 0 < trainer.max_epochs <= trainer.current_epoch:
        limits["--trainer.max_epochs"] = trainer.max_epochs
    return limits


def _arguments_to_go_on(arguments: list[str], trainer: Trainer, checkpoint: str = "last") -> list[str]:
    """The same command from a checkpoint on, and with a later end where the run has reached its own."""
    limits = _reached_limits(trainer)
    kept = _without_options(arguments, ["--ckpt_path", *limits])
    doubled = [str(part) for option, limit in limits.items() for part in (option, 2 * limit)]
    return [*kept, "--ckpt_path", checkpoint, *doubled]


def _without_options(arguments: list[str], options: Sequence[str]) -> list[str]:
    kept = []
    parts = iter(arguments)
    for part in parts:
        if part in options:
            next(parts, None)
        elif part.split("=")[0] not in options:
            kept.append(part)
    return kept


def _given(arguments: Sequence[str], names: Sequence[str]) -> list[str]:
    """The values that options were given."""
    values = []
    for position, argument in enumerate(arguments):
        name, given, value = argument.partition("=")
        if name in names:
            values.append(value if given else "".join(arguments[position + 1 : position + 2]))
    return values


def config_files(arguments: Sequence[str]) -> list[str]:
    """The files that ``--config`` names. Its value may also be the YAML itself."""
    values = _given(arguments, ("-c", "--config"))
    return [value for value in values if "\n" not in value and "{" not in value and "://" not in value]


def _with_strategy_class(arguments: list[str]) -> list[str]:
    """Write the strategy ``moe_ep`` as a class where its options are given one by one: a name can have none."""
    option = "--trainer.strategy"
    first = next((at for at, part in enumerate(arguments) if part.startswith(f"{option}.")), None)
    if first is None:
        return arguments
    strategies = _given(arguments, (option,))
    for file in () if strategies else config_files(arguments):
        trainer = yaml.safe_load(Path(file).read_text(encoding="utf-8")).get("trainer")
        if isinstance(trainer, dict) and "strategy" in trainer:
            strategies.append(trainer["strategy"])
    if not strategies or strategies[-1] != "moe_ep":
        return arguments
    before = _without_options(arguments[:first], [option])
    after = _without_options(arguments[first:], [option])
    return [*before, f"{option}=lightning_moe.ExpertParallelStrategy", *after]


def check_config_file(file: str) -> None:
    """Find what YAML alone can tell, so that the message can name the file and the line."""
    path = Path(file)
    if not file or not path.is_file():
        folder = path.parent if path.parent.is_dir() else Path()
        there = sorted(_shown(other) for pattern in ("*.yaml", "*.yml") for other in folder.glob(pattern))
        elsewhere = sorted(_shown(other) for other in Path("configs").rglob("*") if other.name == path.name)
        if elsewhere:
            raise RefusedError(f"config file {file!r} does not exist", f"Did you mean {' or '.join(elsewhere)}?")
        listed = f"Config files in {_shown(folder)}: {', '.join(there)}" if there else "Check the path"
        raise RefusedError(f"config file {file!r} does not exist", listed)
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = ", ".join(str(part) for part in (error.context, error.problem) if part)
        raise RefusedError(f"config file {file}{where}: {problem}", "Correct the YAML there or just above") from None
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise RefusedError(
            f"config file {file}: {' '.join(str(error).split())}", "It has to be YAML in UTF-8"
        ) from None
    if not isinstance(content, dict):
        found = "is empty" if content is None else f"holds a {type(content).__name__}"
        raise RefusedError(
            f"config file {file} {found}", "It needs the keys trainer:, model: and, for most models, data:"
        )


def _explain(message: str, arguments: list[str]) -> RefusedError:
    """Say what is wrong with the content of a config, and the next step."""
    text = condense(message)
    return RefusedError(f"{_sources(arguments)}: {text}", hint(text, arguments[0]))


def _sources(arguments: list[str]) -> str:
    return ", ".join(config_files(arguments)) or "options given"


def _shown(path: str | Path) -> str:
    """A path as a user would type it here."""
    absolute = Path(path).absolute()
    return str(absolute.relative_to(Path.cwd())) if absolute.is_relative_to(Path.cwd()) else str(absolute)


@rank_zero_only
def _say(text: str | Text) -> None:
    # soft_wrap: a command or a path that is broken over two lines cannot be copied
    Console().print(text, highlight=False, markup=False, soft_wrap=True)


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


def quiet() -> None:
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
