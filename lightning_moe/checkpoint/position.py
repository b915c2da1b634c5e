"""Where a run stands in its training data, and what else comes back only when training begins.

Lightning counts batches, but a dataloader that cannot be saved begins anew on resume, and making its iterator draws
random numbers that the unbroken run did not draw there. The dataloaders that train are therefore wrapped:

- A pass that was cut off goes on behind the batches that were handed out. Their indices are drawn again, from the
  generators as they were when the pass began, and their samples are not read again.
- On another number of ranks or with another batch size it goes on behind as many samples, rounded down to a whole step.
- Iterators are made when the first batch is asked for: behind all hooks in every epoch, also in the first.

The position of an iterable dataset is that of its own ``state_dict``, if it has one; else it begins anew, which
Lightning says. What a dataset draws in worker processes is not restored.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.data import has_iterable_dataset, sized_len
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.utils.data import DataLoader, SequentialSampler
from typing_extensions import override

from lightning_moe.checkpoint.optimizer_state import parameter_names
from lightning_moe.checkpoint.progress import align_fit_loop, unfinished_batches
from lightning_moe.checkpoint.random_state import keeping_random_state, random_state, set_random_state
from lightning_moe.wrapped_loader import WrappedLoader


@dataclass
class Resumption:
    """What a run that resumes gets back when training begins: Lightning and hooks draw random numbers before.

    Attributes:
        random: States of the random generators.
        passes: Those from which the passes over the training dataloaders began, by the number of the dataloader.
        gradients: Accumulated gradients by the name of the parameter.
        asked: Epoch and batch for which the ranks have asked each other last.
    """

    random: dict[str, Tensor] | None = None
    passes: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    asked: tuple[int, int] | None = None

    def begin(self, module: nn.Module, device: torch.device) -> None:
        """Give generators and gradients back, once."""
        if self.random is not None:
            set_random_state(self.random, device)
            self.random = None
        if self.gradients:
            for parameter, name in parameter_names(module).items():
                if name in self.gradients:
                    parameter.grad = self.gradients[name].to(parameter.dtype)
            self.gradients = {}


def wrap(
    loader: Any,
    trainer: "pl.Trainer",
    resumption: Resumption,
    device: torch.device,
    ranks: int,
    before_batch: Callable[["pl.Trainer"], None],
) -> "TrainingLoader":
    """Wrap a dataloader that trains.

    Args:
        loader: The dataloader of this rank.
        trainer: The trainer, which restores its loops before it asks for dataloaders.
        resumption: What is to be given back.
        device: The device of this rank.
        ranks: How many ranks read different data.
        before_batch: Called before each batch is fetched.

    Returns:
        One with a position, unless it has one of its own or its data is a stream.
    """
    common = _Common(trainer, resumption, device, ranks, before_batch)
    if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
        return OwnPositionLoader(loader, common)
    if sized_len(loader) is None or has_iterable_dataset(loader):
        return TrainingLoader(loader, common)
    return PositionedLoader(loader, common)


def training_loaders(trainer: "pl.Trainer") -> list["TrainingLoader"]:
    """The wrapped dataloaders that a trainer trains on now."""
    return [loader for _, loader in _inner(trainer) if isinstance(loader, TrainingLoader)]


def _inner(trainer: "pl.Trainer") -> list[tuple[Any, Any]]:
    """Each dataloader that Lightning has, with ours inside where it is read in step with the other ranks."""
    found = []
    for outer in training_sources(trainer):
        inner = getattr(outer, "__dict__", {}).get("_loader")
        found.append((outer, inner if not isinstance(outer, TrainingLoader) and inner is not None else outer))
    return found


def stateful_loaders(trainer: "pl.Trainer") -> list[Any]:
    """Those whose states Lightning saves, in its order, unwrapped as far as ours."""
    inner = {id(outer): loader for outer, loader in _inner(trainer)}
    return [inner[id(outer)] for outer in training_sources(trainer) if isinstance(outer, _Stateful)]


def pass_states(trainer: "pl.Trainer") -> dict[str, dict[str, Tensor]]:
    """The generators from which the present passes began, and the dataloaders' own as they are now."""
    found = {str(number): loader.random_states() for number, loader in enumerate(training_loaders(trainer))}
    return {number: states for number, states in found.items() if states}


@dataclass(frozen=True)
class _Common:
    trainer: "pl.Trainer"
    resumption: Resumption
    device: torch.device
    ranks: int
    before_batch: Callable[["pl.Trainer"], None]

    def ask(self) -> None:
        """Let the ranks ask each other once before each batch, however many dataloaders it comes from."""
        loop = self.trainer.fit_loop
        progress: Any = loop.epoch_loop.batch_progress.total
        batch = (self.epoch, progress.ready)
        if self.resumption.asked != batch:
            self.resumption.asked = batch
            self.before_batch(self.trainer)

    @property
    def epoch(self) -> int:
        """The epoch as Lightning tells it to samplers."""
        progress: Any = self.trainer.fit_loop.epoch_progress.current
        return progress.processed


class TrainingLoader(WrappedLoader):
    """A dataloader whose iterator is made when the first batch is asked for. Attributes are those of the dataloader.

    Args:
        loader: The dataloader of this rank.
        common: What all have in common.
    """

    def __init__(self, loader: Any, common: _Common) -> None:
        self._set(_loader=loader, _common=common, _epoch=-1, _began={})

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return _Pass(self)

    def random_states(self) -> dict[str, Tensor]:
        """Of the generators from which the present pass began, and of the dataloader's own ones now."""
        now = {f"now{number}": g.get_state() for number, g in enumerate(self._generators())}
        return {**self._began, **now} if self._began else {}

    def _start(self) -> Iterator[Any]:
        """Make the iterator of a pass."""
        common = self._common
        common.resumption.begin(common.trainer.lightning_module, common.device)
        self._note_beginning()
        return iter(self._loader)

    def _note_beginning(self) -> None:
        own = {f"generator{number}": g.get_state() for number, g in enumerate(self._generators())}
        self._set(_epoch=self._common.epoch, _began={**random_state(self._common.device), **own})

    def _generators(self) -> list[torch.Generator]:
        """The generators that the dataloader and its samplers do not share with anything else."""
        samplers = [getattr(self._loader, name, None) for name in ("sampler", "batch_sampler")]
        holders = [self._loader, *samplers, getattr(samplers[1], "sampler", None)]
        found = [getattr(holder, "generator", None) for holder in holders]
        return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())

    def _count(self) -> None:
        pass


class _Pass(Iterator[Any]):
    """One pass over a dataloader. Lightning alone holds it, so that its workers end when it lets go."""

    def __init__(self, loader: TrainingLoader) -> None:
        self._loader = loader
        self._iterator: Iterator[Any] | None = None

    @override
    def __next__(self) -> Any:
        common = self._loader._common
        common.ask()
        if self._iterator is None:
            self._iterator = self._loader._start()
        batch = next(self._iterator)
        self._loader._count()
        return batch


class OwnPositionLoader(TrainingLoader):
    """One whose dataloader can be saved by itself."""

    def __init__(self, loader: Any, common: _Common) -> None:
        super().__init__(loader, common)
        self._set(_loaded=False)

    def state_dict(self) -> dict[str, Any]:
        """The state of the dataloader."""
        return self._loader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the dataloader go on from a state.

        Raises:
            ValueError: If the state is that of a dataloader of another kind.
        """
        if "samples_per_step" in state_dict and "dataset" in state_dict:
            raise ValueError(
                "the checkpoint has the position of a training dataloader that keeps none itself, and the one of now,"
                f" {type(self._loader).__name__}, does; use the same kind of dataloader, or begin anew with the weights"
                " of the checkpoint"
            )
        self._set(_loaded=True)
        self._loader.load_state_dict(state_dict)

    @override
    def _start(self) -> Iterator[Any]:
        loaded = self._loaded and self._common.trainer.fit_loop.epoch_loop.batch_progress.current.ready > 0
        self._set(_loaded=False)
        if not loaded:
            return super()._start()
        with keeping_random_state(self._common.device):  # the unbroken run draws nothing here
            return super()._start()


class PositionedLoader(TrainingLoader):
    """One that goes on behind the batches that were handed out. It has a state, so that Lightning does not warn."""

    def __init__(self, loader: Any, common: _Common) -> None:
        super().__init__(loader, common)
        self._set(_handed=0, _resumed=None)
        loop = common.trainer.fit_loop
        if loop.restarting and not loop._combined_loader_states_to_load:
            self._resume_by_count()

    @property
    def samples_per_step(self) -> int:
        """Samples that one batch on every rank takes, as far as the dataloader tells."""
        batch = getattr(self._loader, "batch_size", None)
        if batch is None:
            batch = getattr(getattr(self._loader, "batch_sampler", None), "batch_size", None)
        return self._common.ranks * (batch if isinstance(batch, int) else 1)

    def state_dict(self) -> dict[str, Any]:
        """The position: the same on every rank but for random generators, which :meth:`random_states` has."""
        return {
            "epoch": self._epoch,
            "batches": self._handed,
            "samples_per_step": self.samples_per_step,
            "dataset": sized_len(getattr(self._loader, "dataset", None)),
            "seed": getattr(self._seeded_sampler(), "seed", None),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on behind a position, which was saved on any number of ranks."""
        trainer = self._common.trainer
        if "samples_per_step" not in state_dict:
            raise ValueError(
                "the checkpoint has the state of a training dataloader that keeps its position itself, and that of now,"
                f" {type(self._loader).__name__}, does not; use the same kind of dataloader, or begin anew with the"
                " weights of the checkpoint"
            )
        if state_dict["seed"] is not None and (sampler := self._seeded_sampler()) is not None:
            sampler.seed = state_dict["seed"]
        per_step = state_dict["samples_per_step"]
        batches = state_dict["batches"]
        if batches > 0:
            batches -= unfinished_batches(trainer)
        steps = min(batches * per_step // self.samples_per_step, len(self))
        loop = trainer.fit_loop
        if len(training_sources(trainer)) == 1:
            steps = align_fit_loop(trainer, steps, len(self))
        elif stateful_loaders(trainer)[0] is self:
            # A loader that begins anew within an epoch has another count of its own.
            progress: Any = loop.epoch_loop.batch_progress.current
            length = _combined_length(trainer)
            if length is not None:
                align_fit_loop(trainer, progress.processed * per_step // self.samples_per_step, length)
        self._say_what_changed(state_dict, batches * per_step, steps)
        self._set(_resumed=(state_dict["epoch"], steps))

    def _resume_by_count(self) -> None:
        """Go on behind as many batches as a run counted that saved no position: one of plain Lightning."""
        trainer = self._common.trainer
        progress: Any = trainer.fit_loop.epoch_loop.batch_progress.current
        steps = align_fit_loop(trainer, min(progress.processed, len(self)), len(self))
        if 0 < steps < len(self) and not isinstance(getattr(self._loader, "sampler", None), SequentialSampler):
            rank_zero_warn(
                f"the checkpoint lies {steps} batches into an epoch and does not say in which order its run read the"
                " data; training goes on behind as many batches of a new order, so that some samples of this epoch"
                " come twice and others not at all"
            )
        self._set(_resumed=(None, steps))

    def _say_what_changed(self, saved: dict[str, Any], samples: int, steps: int) -> None:
        now = self.state_dict()
        if 0 < steps < len(self) and saved["dataset"] != now["dataset"]:
            rank_zero_warn(
                f"the checkpoint lies in the middle of an epoch over {saved['dataset']} samples, and now there are"
                f" {now['dataset']}: training goes on behind the first {steps} batches of their order"
            )
        elif steps < len(self) and (again := samples - steps * self.samples_per_step) > 0:
            rank_zero_info(
                f"moe_ep: the checkpoint's position of {samples} samples is not a whole number of steps of"
                f" {self.samples_per_step}: {again} samples are seen again"
            )

    def _seeded_sampler(self) -> Any:
        """A sampler whose order follows from a seed and the epoch, as that of Lightning's distributed samplers."""
        samplers = [getattr(self._loader, name, None) for name in ("sampler", "batch_sampler")]
        holders = [*samplers, getattr(samplers[1], "sampler", None)]
        return next((s for s in holders if hasattr(s, "set_epoch") and isinstance(getattr(s, "seed", None), int)), None)

    @override
    def _start(self) -> Iterator[Any]:
        (epoch, steps), common = self._resumed or (None, 0), self._common
        first = self._resumed is not None
        self._set(_resumed=None, _handed=0)
        saved = self._saved_generators() if first else {}
        continued = first and steps > 0 and (epoch is None or epoch == common.epoch)
        if not continued:
            self._set_generators(saved, "now")
            return super()._start()
        common.resumption.begin(common.trainer.lightning_module, common.device)
        with keeping_random_state(common.device):  # the unbroken run draws nothing here
            set_random_state(saved, common.device)
            self._set_generators(saved, "generator")
            self._note_beginning()
            self._set(_handed=steps)
            iterator = _skip(self._loader, steps)
        self._set_generators(saved, "now")
        return iterator

    def _saved_generators(self) -> dict[str, Tensor]:
        numbers = {id(loader): str(number) for number, loader in enumerate(training_loaders(self._common.trainer))}
        return self._common.resumption.passes.pop(numbers.get(id(self), ""), {})

    def _set_generators(self, states: dict[str, Tensor], name: str) -> None:
        for number, generator in enumerate(self._generators()):
            if (state := states.get(f"{name}{number}")) is not None:
                generator.set_state(state.cpu())

    @override
    def _count(self) -> None:
        self._set(_handed=self._handed + 1)


def begin_training(trainer: "pl.Trainer", resumption: Resumption, device: torch.device) -> None:
    """Give back what was saved, also to our dataloaders what Lightning keeps back where an epoch had ended.

    Args:
        trainer: The trainer, which has its dataloaders.
        resumption: What is given back.
        device: The device of this rank.
    """
    resumption.asked = None
    loop = trainer.fit_loop
    states, loop._combined_loader_states_to_load = loop._combined_loader_states_to_load, []
    loaders = stateful_loaders(trainer)
    if len(states) == len(loaders):
        for loader, state in zip(loaders, states, strict=True):
            if isinstance(loader, PositionedLoader):
                loader.load_state_dict(state)
    resumption.begin(trainer.lightning_module, device)


def training_sources(trainer: "pl.Trainer") -> list[Any]:
    """The dataloaders that a trainer trains on, as Lightning has them now."""
    combined = trainer.fit_loop._combined_loader
    return [] if combined is None else combined.flattened


def _combined_length(trainer: "pl.Trainer") -> int | None:
    """Batches of an epoch over several dataloaders; Lightning's own ``len`` waits for the first iterator."""
    combined: Any = trainer.fit_loop._combined_loader
    lengths = [sized_len(loader) for loader in combined.flattened]
    sizes = [length for length in lengths if length is not None]
    if len(sizes) < len(lengths):
        return None
    if combined._mode == "sequential":
        return sum(sizes)
    return min(sizes) if combined._mode == "min_size" else max(sizes)


def _skip(loader: Any, batches: int) -> Iterator[Any]:
    """Make an iterator of what is left behind some batches."""
    if not isinstance(loader, DataLoader):
        iterator = iter(loader)
        for _ in range(batches):
            next(iterator, None)
        return iterator
    # A DataLoader has no way to begin elsewhere than its sampler does, and refuses another sampler.
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    attributes, sampler = vars(loader), getattr(loader, name)
    attributes[name] = rest = _Rest(sampler, batches)
    try:
        iterator = iter(loader)
        rest.skip()
        return iterator
    finally:
        attributes[name] = sampler


class _Rest:
    """A sampler that leaves out the first of its items, once: persistent workers ask it again in the next epoch.

    It draws random numbers in the order of the unbroken pass: where the iterator reads nothing ahead, the sampler
    draws after it.
    """

    def __init__(self, sampler: Any, skip: int) -> None:
        self._sampler, self._skip = sampler, skip
        self._iterator: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        if not self._skip:
            return iter(self._sampler)
        self._iterator = iter(self._sampler)
        return self._rest(self._iterator)

    def __len__(self) -> int:
        return len(self._sampler)

    def skip(self) -> None:
        """Leave the items out now, if that has not happened."""
        for _ in range(self._skip):
            next(self._iterator, None)
        self._skip = 0

    def _rest(self, iterator: Iterator[Any]) -> Iterator[Any]:
        self.skip()
        yield from iterator
