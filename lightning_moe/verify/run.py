"""The runs of a comparison, each in processes of its own: ``python -m lightning_moe.verify.run FOLDER RUN ...``.

Not for users: :mod:`lightning_moe.verify.command` calls it.
"""

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ProgressBar
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins import ClusterEnvironment
from typing_extensions import override

from lightning_moe.cli import MoECLI, quiet
from lightning_moe.cli_errors import RefusedError, report
from lightning_moe.models import CausalLM
from lightning_moe.parallel.initialize import materialize
from lightning_moe.precision import MoEPrecision
from lightning_moe.verify.batches import MergeError, Replay, SizedReplay
from lightning_moe.verify.command import as_list, callback_name
from lightning_moe.verify.compare import Record
from lightning_moe.verify.plan import LAYOUT, Plan, Reference, write_json
from lightning_moe.verify.recorder import Recorder, Recording
from lightning_moe.verify.shrink import shrink


def main(argv: list[str] | None = None) -> int:
    """Carry out runs of a comparison in this process.

    Args:
        argv: The temporary folder, then ``layout`` or names of :class:`Reference`.

    Returns:
        The exit code; 2 where the config cannot be used. What a reference raises is left in its folder.
    """
    folder, *names = sys.argv[1:] if argv is None else argv
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # as the command line does: a class_path may name a module beside the config
    quiet()
    plan = Plan.read(Path(folder))
    try:
        for name in names:
            if name == LAYOUT:
                _LayoutRun(plan, Path(folder))
            else:
                _reference(plan, Path(folder), Reference.named(name))
    except RefusedError as refused:
        report(refused)
        return 2
    return 0


def _reference(plan: Plan, folder: Path, reference: Reference) -> None:
    try:
        _ReferenceRun(plan, folder, reference)
    except (Exception, RefusedError) as error:
        text = error.reason if isinstance(error, RefusedError) else f"{type(error).__name__}: {error}"
        if not isinstance(error, MergeError | RefusedError):
            traceback.print_exc()
        folder.joinpath(reference.name).mkdir(exist_ok=True)
        write_json(folder / reference.name / "error.json", " ".join(text.split()))


class _Run(MoECLI):
    """The ``fit`` of a config that leaves nothing but a record.

    Args:
        plan: What all runs do alike.
        recording: What this one records.
    """

    def __init__(self, plan: Plan, recording: Recording) -> None:
        self._plan = plan
        self._recording = recording
        super().__init__(["fit", *plan.arguments])

    @override
    def before_instantiate_classes(self) -> None:
        self.save_config_callback = None
        trainer = self.config["fit"]["trainer"]
        trainer["logger"] = False
        trainer["profiler"] = None
        callbacks = as_list(trainer["callbacks"])
        trainer["callbacks"] = [part for part in callbacks if callback_name(part) in self._plan.callbacks]

    @override
    def instantiate_classes(self) -> None:
        super().instantiate_classes()
        _without_files(self.model)
        if self._plan.shrink:
            try:
                self._recording.notes.append(shrink(self.model))
            except ValueError as error:
                raise RefusedError(str(error)) from error
        self.trainer.callbacks.insert(0, Recorder(self._recording))  # type: ignore[attr-defined]

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        return super().instantiate_trainer(
            logger=DummyLogger(),
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            limit_val_batches=0,
            val_check_interval=1.0,
            check_val_every_n_epoch=1,
            fast_dev_run=False,
            barebones=False,
            max_time=None,
            default_root_dir=self._recording.folder,
            **kwargs,
        )

    @override
    def fit(self, **kwargs: Any) -> None:
        """Train for the steps of the plan."""
        self.trainer.fit(**{**kwargs, "ckpt_path": None})


class _LayoutRun(_Run):
    """The run under the layout of the config."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        super().__init__(plan, Recording(folder / LAYOUT, plan.steps, batches=folder, no_dropout=plan.no_dropout))


class _ReferenceRun(_Run):
    """A run in one process, on the batches and with the initial weights of the layout."""

    def __init__(self, plan: Plan, folder: Path, reference: Reference) -> None:
        self._folder, self._reference = folder, reference
        self._layout = Record(folder / LAYOUT)
        recording = Recording(
            folder / reference.name,
            plan.steps,
            start=folder / LAYOUT,
            rounded=reference.rounded,
            reseeded=reference.reseeded,
            no_dropout=plan.no_dropout,
        )
        super().__init__(plan, recording)

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        config = self._get(self.config_init, "trainer", default={})
        plugins = as_list(config["plugins"])
        ours = [plugin for plugin in plugins if isinstance(plugin, MoEPrecision)]
        # Each rank's batch is a micro-batch of its own, averaged as Lightning averages accumulated ones.
        accumulated = config["accumulate_grad_batches"] * (self._layout.ranks if self._reference.by_rank else 1)
        return super().instantiate_trainer(
            strategy="auto",
            devices=first_device(config["devices"]),
            num_nodes=1,
            plugins=[plugin for plugin in plugins if not isinstance(plugin, MoEPrecision | ClusterEnvironment)],
            precision=ours[-1].precision if ours else config["precision"],
            accumulate_grad_batches=accumulated,
            limit_train_batches=1.0,
            overfit_batches=0.0,
            reload_dataloaders_every_n_epochs=0,
            **kwargs,
        )

    @override
    def instantiate_classes(self) -> None:
        super().instantiate_classes()
        if self._reference.by_rank and not self.model.automatic_optimization and self._layout.ranks > 1:
            raise RefusedError(
                f"{type(self.model).__name__} optimizes manually, so that one process cannot take the batch of one rank"
                " after the other in one step"
            )
        if isinstance(self.model, CausalLM):
            self.model.meta_device = False
        _materialized(self.model)
        source = self.model if self.datamodule is None else self.datamodule
        kind = Replay if self._layout.batches_per_epoch is None else SizedReplay
        replay = kind(self._folder, self.trainer, self._layout, self._reference.by_rank)

        def train_dataloader() -> Replay:
            return replay

        def unchanged(batch: Any, dataloader_idx: int) -> Any:
            return batch

        def nothing() -> None:
            pass

        source.train_dataloader = train_dataloader
        # The batches were recorded after these hooks. The layout has prepared the data.
        source.on_before_batch_transfer = source.on_after_batch_transfer = unchanged
        source.prepare_data = nothing


def first_device(devices: Any) -> Any:
    """The ``devices`` of the Trainer that stands for the first of several."""
    if isinstance(devices, str) and "," in devices:
        devices = [int(device) for device in devices.split(",") if device.strip()]
    return devices[:1] if isinstance(devices, list) else 1


def _without_files(module: LightningModule) -> None:
    """Keep the callbacks that a LightningModule brings along, but those that write files or to the terminal."""
    configure: Callable[[], Any] = module.configure_callbacks

    def configure_callbacks() -> list[Callback]:
        brought = configure()
        brought = list(brought) if isinstance(brought, list | tuple) else [brought]
        return [callback for callback in brought if not isinstance(callback, Checkpoint | ProgressBar)]

    module.configure_callbacks = configure_callbacks  # type: ignore[method-assign]


def _materialized(module: LightningModule) -> None:
    """Give memory to what a LightningModule builds on the meta device, which its strategy would do."""
    configure = module.configure_model

    def configure_model() -> None:
        configure()
        if any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
            materialize(module, module, torch.device("cpu"), skip=set())

    module.configure_model = configure_model  # type: ignore[method-assign]


def _end_with_the_parent() -> None:
    """Kill this process and the ranks that it has started when the command that waits for it has gone."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.killpg(0, 9)

    if hasattr(os, "getsid") and os.getsid(0) == os.getpid():  # not a rank that Lightning has started
        threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    _end_with_the_parent()
    sys.exit(main())
