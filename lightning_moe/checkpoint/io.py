"""Saves and loads the checkpoints of the strategy: whole or not there, at once or in the background."""

import io
import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import _distributed_is_initialized
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_moe.checkpoint import state as content
from lightning_moe.checkpoint.damage import CheckpointError, Ranks
from lightning_moe.checkpoint.folder import Origin, SavedFolder, write_folder
from lightning_moe.checkpoint.in_background import Pending, memory_of, private_copy
from lightning_moe.checkpoint.in_place import FILE, Unfinished, remove, unfinished_path
from lightning_moe.checkpoint.single_file import read_file, write_file
from lightning_moe.checkpoint.unpickle import load_safely
from lightning_moe.files import repair, replace_link, wait_for_folder

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_moe.strategy import ExpertParallelStrategy

_WAIT_FOR_RANKS_S = 20.0


class Checkpoints:
    """What the strategy saves to and loads from.

    Args:
        strategy: The strategy.
        distributed: Every rank writes its shards into a folder; else rank 0 writes one file.
        asynchronously: Training goes on while a checkpoint is written, once its state is copied to the CPU.
    """

    def __init__(self, strategy: "ExpertParallelStrategy", distributed: bool, asynchronously: bool) -> None:
        self.strategy = strategy
        self.distributed = distributed
        self.asynchronously = asynchronously
        self._pending: Pending | None = None
        self._running = False
        self._newest: Path | None = None
        self._callbacks: list[ModelCheckpoint] = []
        self._warned: set[str] = set()
        self._group: tuple[Any, dist.ProcessGroup] | None = None

    # The life of a run

    def attach(self, trainer: "pl.Trainer") -> None:
        """Begin a run of a Trainer. Collective."""
        self._running = True
        self._ranks()  # makes their group while all of them are here
        self._callbacks = [found for found in trainer.checkpoint_callbacks if isinstance(found, ModelCheckpoint)]
        for callback in self._callbacks:
            exists = type(callback).file_exists
            # Lightning deletes its link to the last checkpoint before it makes the new one, and knows of no checkpoint
            # that is still being written.
            callback._link_checkpoint = self._link  # type: ignore[method-assign]
            callback.file_exists = self._file_exists(callback, exists)  # type: ignore[assignment,method-assign]

    def check_all_save(self) -> None:
        """Before a checkpoint is saved of a run that an exception ends: see that every rank has met one.

        Where one rank alone has, the others wait for it in the middle of a step, and would take what it sends to save a
        checkpoint for what they wait for.

        Raises:
            CheckpointError: If a rank does not come to save.
        """
        assert self.strategy.lightning_module is not None
        ranks = self._ranks()
        if self.strategy.lightning_module.trainer.state.status != TrainerStatus.INTERRUPTED or ranks.group is None:
            return
        self.finish()
        begun = time.monotonic()
        try:
            # Not monitored_barrier: all ranks but the first wait there for as long as the group waits.
            dist.barrier(ranks.group, async_op=True).wait(timedelta(seconds=_WAIT_FOR_RANKS_S))
        except RuntimeError as error:
            waited = time.monotonic() - begun
            why = f"within {_WAIT_FOR_RANKS_S:.0f} s not every rank has met one and come to save"
            if waited < _WAIT_FOR_RANKS_S / 2:  # it did not wait: a connection has ended
                why = "another rank is gone"
            raise CheckpointError(
                f"no checkpoint is saved of this exception: {why}, and one rank alone cannot"
            ) from error

    def finish(self) -> None:
        """Wait for the save in the background.

        Raises:
            CheckpointError: If it failed.
            OSError: If it failed to write.
        """
        pending, error = self._wait()
        if pending is not None and error is not None:
            error.add_note(f"this was in the background: {pending.path} is not saved")
            raise error

    def _wait(self) -> tuple[Pending | None, BaseException | None]:
        pending = self._pending
        error = None if pending is None else pending.wait()
        if self._pending is pending:  # and not that of a signal handler which came in between
            self._pending = None
        return pending, error

    def end_with(self, exception: BaseException) -> None:
        """Wait for the save in the background when a run ends with an exception, which is told of an error in it."""
        self._running = False
        pending, error = self._wait()
        if pending is not None and error is not None:
            exception.add_note(f"saving {pending.path} in the background failed as well: {error}")

    def teardown(self) -> None:
        """End a run.

        Raises:
            CheckpointError: If a save in the background failed.
        """
        self._running = False
        for callback in self._callbacks:
            for name in ("_link_checkpoint", "file_exists"):
                vars(callback).pop(name, None)
        self._callbacks = []
        self.finish()

    # Saving

    def save(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None) -> None:
        """Save a checkpoint, which takes the place of one of the same name when it is whole. Collective.

        Raises:
            TypeError: If storage options are given.
            CheckpointError: On every rank, if something that is no checkpoint is in the way.
            OSError: On every rank, if one of them cannot write.
        """
        if storage_options is not None:
            raise TypeError(
                f"storage_options={storage_options!r} is for a CheckpointIO, which {type(self.strategy).__name__} does"
                " not use; leave it out"
            )
        self.finish()
        ranks = self._ranks()
        # Absolute, because the working directory may be another when a save in the background ends.
        path = Path(ranks.from_first(os.path.abspath(_local(filepath))))
        unfinished = self._begin(path, ranks)
        try:
            write = self._prepare(checkpoint, path, ranks, unfinished)
        except BaseException:
            _discard(unfinished)
            raise
        if not self._may_go_on(path):
            write(None)
            return
        self._pending = Pending(path, write)
        self._pending.start()

    def _begin(self, path: Path, ranks: Ranks) -> Unfinished | None:
        """Make the unfinished folder, on rank 0, and see that every rank sees it."""
        unfinished: Unfinished | None = None
        try:
            with ranks.failing_together(f"saving {path}"):
                if ranks.rank == 0:
                    unfinished = Unfinished(path)
            with ranks.failing_together(f"saving {path}"):
                _wait_for(unfinished_path(path), self.distributed)
        except BaseException:
            _discard(unfinished)
            raise
        return unfinished

    def _prepare(
        self, checkpoint: dict[str, Any], path: Path, ranks: Ranks, unfinished: Unfinished | None
    ) -> Callable[[Pending | None], None]:
        """Take the state, and say how it is to be written. Collective."""
        strategy = self.strategy
        assert strategy.lightning_module is not None
        own = _private(strategy) if self._may_go_on(path) else (lambda state: state)
        if not self.distributed:
            content.collect_whole(strategy, checkpoint)
            whole = own(checkpoint) if unfinished is not None else {}

            def write_one() -> None:
                if unfinished is not None:
                    write_file(unfinished.path / FILE, whole)
                    self._warn_of(unfinished.path / FILE)

            return self._writing(path, ranks, unfinished, FILE, write_one)

        state = own(content.collect(strategy, checkpoint))
        meta = io.BytesIO()
        with ranks.failing_together(f"saving {path}"):
            if unfinished is not None:
                torch.save(checkpoint, meta)  # now, because callbacks go on changing what they have put there
        layout = strategy.layout
        sizes = {"world_size": layout.world_size, "expert_parallel_size": layout.expert}
        origin = Origin(type(strategy.lightning_module).__name__, {**sizes, "replicate_size": layout.replicate})

        def write_all() -> None:
            write_folder(unfinished_path(path), state, meta.getvalue(), origin, ranks, unfinished)
            if unfinished is not None:
                self._warn_of(meta)

        return self._writing(path, ranks, unfinished, None, write_all)

    def _writing(
        self, path: Path, ranks: Ranks, unfinished: Unfinished | None, file: str | None, write: Callable[[], None]
    ) -> Callable[[Pending | None], None]:
        def run(pending: Pending | None) -> None:
            try:
                with ranks.failing_together(f"saving {path}"):
                    write()
                with ranks.failing_together(f"saving {path}"):
                    if unfinished is not None:
                        unfinished.put_in_place(file)
                        self._newest = path
                    if pending is not None:
                        pending.run_deferred()
            except BaseException:
                _discard(unfinished)
                raise

        return run

    def _warn_of(self, source: Path | io.BytesIO) -> None:
        """Warn of what could not be read again: now, and not when a run is to be resumed."""
        try:
            load_safely(source, weights_only=True, what="this checkpoint", mmap=isinstance(source, Path))
        except CheckpointError as error:
            if str(error) not in self._warned:
                self._warned.add(str(error))
                rank_zero_warn(f"a checkpoint was saved that cannot be loaded as it is: {error}")

    def _may_go_on(self, path: Path) -> bool:
        """Whether training may go on while a checkpoint is written.

        It may not when there is no training to go on, and not before a job is requeued, which ends it at once.
        """
        if not (self.asynchronously and self._running) or path.name.startswith("hpc_ckpt_"):
            return False
        assert self.strategy.lightning_module is not None
        return self.strategy.lightning_module.trainer.state.status == TrainerStatus.RUNNING

    # Loading

    def load(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a checkpoint of any layout into model and optimizers, once it is known to be whole. Collective.

        Returns:
            What Lightning keeps beside.

        Raises:
            FileNotFoundError: On every rank, if there is none.
            CheckpointError: On every rank, if it is damaged, of another model or of a newer version.
        """
        self.finish()
        ranks = self._ranks()
        path = Path(ranks.from_first(os.fspath(_local(checkpoint_path))))
        with ranks.failing_together(f"loading {path}"):
            if ranks.rank == 0:
                repair(path)
        with ranks.failing_together(f"loading {path}"):
            if not path.exists():
                raise FileNotFoundError(2, "no checkpoint is there", str(path))
        path = Path(ranks.from_first(_behind_links(path)))
        if path.is_dir():
            return self._load_folder(path, ranks, weights_only)
        return self._load_file(path, ranks, weights_only)

    def _load_folder(self, path: Path, ranks: Ranks, weights_only: bool | None) -> dict[str, Any]:
        saved = SavedFolder(path, ranks)
        if saved.manifest is None:
            rank_zero_warn(
                f"{path} has no manifest, so lightning-moe did not write it, or it was lost: its files are long enough,"
                " but their content cannot be checked"
            )
        assert self.strategy.lightning_module is not None
        trainer = self.strategy.lightning_module.trainer
        saved.verify(without="" if trainer.state.fn == TrainerFn.FITTING else "optimizer_")
        meta = saved.read_meta(weights_only)
        content.restore_folder(self.strategy, saved, meta)
        return meta

    def _load_file(self, path: Path, ranks: Ranks, weights_only: bool | None) -> dict[str, Any]:
        checkpoint = read_file(path, ranks, weights_only)
        content.restore_whole(self.strategy, checkpoint, str(path))
        return checkpoint

    # Deleting

    def remove(self, filepath: str | Path) -> None:
        """Delete a checkpoint, once the one that is being written is whole."""
        if self.strategy.is_global_zero:
            self._now_or_after(lambda: self._remove(Path(filepath)))

    def _remove(self, path: Path) -> None:
        # Lightning deletes the former checkpoint before it lets its link to the last one point to the new one.
        if self._newest is not None and self._newest != path and self._newest.exists():
            for link in self._links():
                if link.is_symlink() and link.parent / os.readlink(link) == path:
                    replace_link(link, self._newest)
        remove(path)

    def _links(self) -> Iterator[Path]:
        for callback in self._callbacks:
            if callback.save_last == "link" and callback.last_model_path:
                yield Path(callback.last_model_path)

    def _link(self, trainer: "pl.Trainer", filepath: str, linkpath: str) -> None:
        # Not in the group that the thread in the background uses.
        ranks = Ranks(
            trainer.global_rank, trainer.world_size, dist.group.WORLD if _distributed_is_initialized() else None
        )
        with ranks.failing_together(f"linking {linkpath}"):
            if trainer.is_global_zero and os.path.abspath(filepath) != os.path.abspath(linkpath):
                self._now_or_after(lambda: replace_link(Path(linkpath), Path(filepath)))

    def _now_or_after(self, action: Callable[[], None]) -> None:
        if self._pending is None or not self._pending.after(action):
            action()

    def _file_exists(
        self, callback: ModelCheckpoint, exists: Callable[[ModelCheckpoint, Any, "pl.Trainer"], bool]
    ) -> Callable[[Any, "pl.Trainer"], bool]:
        def file_exists(filepath: Any, trainer: "pl.Trainer") -> bool:
            being_written = self._pending is not None and str(self._pending.path) == str(filepath)
            return being_written or exists(callback, filepath, trainer)

        return file_exists

    def _ranks(self) -> Ranks:
        """The ranks, with a group of their own: of the CPU, and apart from what training sends."""
        if not _distributed_is_initialized():
            return Ranks()
        world = dist.group.WORLD
        if self._group is None or self._group[0] is not world:
            self._group = (world, dist.new_group(backend="gloo", timeout=self.strategy._timeout))
        return Ranks(dist.get_rank(), dist.get_world_size(), self._group[1])


def _local(path: str | Path) -> str | Path:
    if "://" in str(path):
        raise CheckpointError(
            f"{path} is not in a file system of this machine: checkpoints are written and read where names can be"
            " exchanged; mount the storage, or copy the checkpoint"
        )
    return path


def _behind_links(path: Path) -> str:
    """What a link points to now: it may point to the next checkpoint while this one is being read."""
    while path.is_symlink():
        path = path.parent / os.readlink(path)
    return str(path)


def _discard(unfinished: Unfinished | None) -> None:
    if unfinished is not None:
        unfinished.discard()


def _wait_for(folder: Path, everywhere: bool) -> None:
    """Wait until this rank sees the folder that rank 0 has made."""
    if not everywhere:
        return
    if not wait_for_folder(folder):
        raise CheckpointError(
            f"{folder}, which rank 0 has made, is not there: a distributed checkpoint needs a file system that all"
            " ranks share; save to one, or set save_distributed_checkpoint=False"
        )


def _private(strategy: "ExpertParallelStrategy") -> Callable[[Any], Any]:
    """What copies a state that training is going to change."""
    live = memory_of(_live_tensors(strategy))
    on_cpu = strategy.root_device.type == "cpu"
    return lambda state: private_copy(state, live, copy_all=on_cpu)


def _live_tensors(strategy: "ExpertParallelStrategy") -> Iterator[Tensor]:
    assert strategy.lightning_module is not None
    yield from strategy.lightning_module.buffers()
    for parameter in strategy.lightning_module.parameters():
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad
    for optimizer in strategy.optimizers:
        for of_parameter in optimizer.state.values():
            yield from (value for value in of_parameter.values() if isinstance(value, Tensor))
