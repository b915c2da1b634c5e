"""The command line: ``lightning-moe fit --config configs/X.yaml`` and the tools beside it.

``fit``, ``validate``, ``test`` and ``predict`` are Lightning's own command line (LightningCLI) over any model and data module
named by ``class_path``. Importing this module registers the strategy ``moe_ep``, so a config may name it.
"""

import difflib
import importlib
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
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities.rank_zero import rank_zero_only, rank_zero_warn
from rich.console import Console
from rich.table import Table
from typing_extensions import override

import lightning_moe

_TRAINER_COMMANDS = {
    "fit": "train the model of a config file",
    "validate": "run the validation data through a checkpoint",
    "test": "run the test data through a checkpoint",
    "predict": "collect the predictions of a checkpoint",
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


def main(argv: list[str] | None = None) -> int | None:
    """Run the command line.

    Lightning starts the other ranks of this machine by running ``sys.argv`` again, so a caller that passes ``argv`` from
    Python and wants several ranks has to start them itself, for example with torchrun.

    Args:
        argv: The arguments after the program's name; default: those of the process.

    Returns:
        The exit code; ``None`` and 0 mean success, 2 that the arguments or the config file cannot be used.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    command = arguments[0] if arguments else "--help"
    if command in ("-h", "--help", "help"):
        _print_help()
        return 0
    if command == "--version":
        Console().print(f"lightning-moe {_version()}", highlight=False)
        return 0
    if command not in _TRAINER_COMMANDS and command not in _TOOLS:
        return _refuse_command(command)
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # a class_path may name a module beside the config
    try:
        if command in _TOOLS:
            tool = _TOOLS[command]
            return getattr(importlib.import_module(tool.module), tool.function)(arguments[1:])
        _quiet()
        _check_config_files(_config_files(arguments))
        MoECLI(args=arguments)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) or stop.code is None else 1
    return 0


class MoECLI(LightningCLI):
    """LightningCLI with the settings that sharded models need, and a summary at the end of ``fit``.

    There is no top-level ``optimizer:`` group: LightningCLI would build that optimizer from the parameters before the
    strategy shards them, and it would train nothing. A model takes its optimizer as an ``init_args`` entry.

    Args:
        args: The command and its options.
    """

    def __init__(self, args: ArgsType) -> None:
        self._arguments = list(args) if isinstance(args, list) else []
        super().__init__(
            args=args,
            parser_class=_Parser,
            auto_configure_optimizers=False,
            save_config_kwargs={"overwrite": True},
            seed_everything_default=0,
        )

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        self.config = parser.parse_args(args)

    @override
    def _parse_ckpt_path(self) -> None:
        """The config and the options decide; the hyperparameters inside a checkpoint must not overrule them silently."""

    @override
    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
        except (ValueError, MisconfigurationException, ModuleNotFoundError) as error:
            if os.environ.get("LIGHTNING_MOE_TRACEBACK"):
                raise
            files = ", ".join(_config_files(self._arguments)) or "the options given"
            _fail(
                f"{files}: {_one_line(error)} (LIGHTNING_MOE_TRACEBACK=1 in the environment shows where this was raised)"
            )

    def fit(self, **kwargs: Any) -> None:
        """Train, then say where the results lie and how to go on, also after Ctrl-C."""
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

        Lightning looks for it in the directory of the run that starts now, which is a new and empty one, and would begin
        anew. Here it is the newest checkpoint of the earlier runs that this config writes beside.
        """
        wanted = kwargs.get("ckpt_path")
        if wanted not in ("last", "best"):
            return kwargs
        command = str(self.subcommand)
        places = _checkpoint_places(self.trainer, self._model_class_path())
        found = newest_checkpoints(places)
        searched = ", ".join(str(place) for place in places) or str(self.trainer.default_root_dir)
        if wanted == "best":
            listed = " ".join(str(path) for path in found) or f"none in {searched}"
            _fail(f"--ckpt_path best is known only inside the run that saved it; give one of the paths: {listed}")
        if found:
            if self.trainer.is_global_zero:
                Console().print(f"{command} continues from {found[0]}", highlight=False, soft_wrap=True)
            return {**kwargs, "ckpt_path": str(found[0])}
        if command == "fit":
            rank_zero_warn(f"--ckpt_path last: no checkpoint in {searched}; training begins at step 0.")
            return {**kwargs, "ckpt_path": None}
        return _fail(f"--ckpt_path last: no checkpoint in {searched}; run `lightning-moe fit` first or give a path")

    def _model_class_path(self) -> str | None:
        model = self._get(self.config, "model")
        return getattr(model, "class_path", None)

    @rank_zero_only
    def _print_summary(self) -> None:
        trainer = self.trainer
        if trainer.fast_dev_run:
            return
        logs = [str(logger.log_dir or logger.save_dir) for logger in trainer.loggers if logger.save_dir is not None]
        checkpoints = newest_checkpoints(_own_checkpoint_places(trainer))
        table = Table.grid(padding=(0, 2))
        for log in logs:
            table.add_row("logs", _shown(log))
        if checkpoints:
            table.add_row("checkpoints", f"{_shown(checkpoints[0].parent)}  (newest: {checkpoints[0].name})")
        if any(type(logger).__name__ == "TensorBoardLogger" for logger in trainer.loggers):
            table.add_row("watch", shlex.join(["tensorboard", "--logdir", _shown(Path(logs[0]).parent)]))
        if checkpoints:
            table.add_row("go on", shlex.join(["lightning-moe", *_arguments_to_go_on(self._arguments, trainer)]))
        console = Console()
        console.print()
        # A command that is broken over lines cannot be copied.
        console.print(table, highlight=False, soft_wrap=True)


class _Parser(LightningArgumentParser):
    """Reports an unusable option or config in one line that names the file and the next step."""

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        files = ", ".join(_config_files(sys.argv[1:] if not _CURRENT else _CURRENT[-1]))
        raise NotImplementedError(files, message, ex)
