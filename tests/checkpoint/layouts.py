"""Runs that are saved on one layout and go on on another.

As a program it prints the table of all of them: ``python -m tests.checkpoint.layouts``.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import Callback
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from lightning_moe.checkpoint.optimizer_state import named_optimizer_state
from tests import tiny
from tests.checkpoint.resuming import Case, Model, Noisy, SaveAt, fit
from tests.harness import run_ranks

# (ranks, expert_parallel_size, replicate_size)
Layout = tuple[int, int, int]
LAYOUTS: list[Layout] = [(1, 1, 1), (2, 1, 1), (2, 2, 1), (2, 1, 2), (4, 2, 1), (4, 4, 1), (4, 2, 2)]
GLOBAL_BATCH, SAVED_AFTER, STEPS = 8, 3, 8


def loader(rank: int, ranks: int) -> DataLoader:
    """The same batches on any number of ranks, in an order that is shuffled anew in each epoch of 5 steps."""
    data = Noisy(5 * GLOBAL_BATCH)
    sampler = DistributedSampler(data, ranks, rank, shuffle=True, seed=7)
    return DataLoader(data, GLOBAL_BATCH // ranks, sampler=sampler)


def case(layout: Layout, distributed: bool = True, **trainer: Any) -> Case:
    """One way of training, on a layout."""
    _, expert, replicate = layout
    options = {"expert_parallel_size": expert, "replicate_size": replicate, "save_distributed_checkpoint": distributed}
    return Case(partial(Model, dropout=0.0), loader, after=SAVED_AFTER, strategy=options, trainer=trainer)


class Moments(Callback):
    """What the optimizer knows when training begins, or when a checkpoint is saved; whole, on rank 0."""

    def __init__(self, after: int) -> None:
        self.after = after
        self.state: dict[str, Any] = {}

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        if len(module.losses) == self.after:
            names = [name for name, _ in module.named_parameters()]
            optimizer = trainer.optimizers[0]
            state = named_optimizer_state(module, optimizer, whole=True).get("state", {})
            self.state = {f"{names[i]} {key}": v.clone() for i, values in state.items() for key, v in values.items()}


def run(layout: Layout, ckpt_path: Path | None, save_to: Path | None = None, **options: Any) -> dict[str, Any]:
    """Train from the beginning and save on the way, or go on from a checkpoint."""
    moments = Moments(0 if ckpt_path else SAVED_AFTER)
    callbacks: list[Callback] = [moments]
    if save_to is not None:
        callbacks.append(SaveAt(save_to, "on_train_batch_end", SAVED_AFTER))
    _, module = fit(case(layout, **options), 0 if ckpt_path is None else 9, callbacks, ckpt_path)
    return {"losses": module.losses, "weights": tiny.weights(module), "moments": moments.state}


def path_of(folder: Path, layout: Layout) -> Path:
    """Where a layout saves."""
    return folder / "-".join(map(str, layout))


def save_all(folder: Path, layouts: Sequence[Layout]) -> dict[Layout, dict[str, Any]]:
    return {layout: run(layout, None, path_of(folder, layout)) for layout in layouts}


def resume_all(folder: Path, pairs: Sequence[tuple[Layout, Layout]]) -> dict[tuple[Layout, Layout], dict[str, Any]]:
    return {(source, target): run(target, path_of(folder, source)) for source, target in pairs}


def train(folder: Path, layouts: Iterable[Layout]) -> dict[Layout, dict[str, Any]]:
    """The unbroken runs, each of which saves on the way."""
    layouts = list(layouts)
    found: dict[Layout, dict[str, Any]] = {}
    for ranks in sorted({layout[0] for layout in layouts}):
        found |= run_ranks(save_all, ranks, folder, [n for n in layouts if n[0] == ranks], timeout=300)[0]
    return found


def resume(folder: Path, pairs: Iterable[tuple[Layout, Layout]]) -> dict[tuple[Layout, Layout], dict[str, Any]]:
    """The resumed runs, by the layouts that saved and that went on."""
    pairs = list(pairs)
    found: dict[tuple[Layout, Layout], dict[str, Any]] = {}
    for ranks in sorted({target[0] for _, target in pairs}):
        found |= run_ranks(resume_all, ranks, folder, [p for p in pairs if p[1][0] == ranks], timeout=600)[0]
    return found


def difference(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> float:
    """The largest difference of elements."""
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))


def worst(unbroken: dict[str, Any], resumed: dict[str, Any]) -> tuple[float, float, float]:
    """The largest differences of the losses (relative), of the weights at the end, and of the moments when loaded."""
    losses = max(abs(a - b) / b for a, b in zip(resumed["losses"], unbroken["losses"][SAVED_AFTER:], strict=True))
    weights = difference(resumed["weights"].values(), unbroken["weights"].values())
    assert resumed["moments"].keys() == unbroken["moments"].keys()
    return losses, weights, difference(resumed["moments"].values(), unbroken["moments"].values())


def main() -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        unbroken = train(folder, LAYOUTS)
        resumed = resume(folder, [(source, target) for source in LAYOUTS for target in LAYOUTS])
    print("worst relative difference of the next 5 losses (and absolute one of the weights after them); moments: equal")
    print("| from \\ to | " + " | ".join(str(n) for n in LAYOUTS) + " |\n|" + "---|" * (len(LAYOUTS) + 1))
    for source in LAYOUTS:
        cells = []
        for target in LAYOUTS:
            losses, weights, moments = worst(unbroken[source], resumed[source, target])
            cells.append(f"{losses:.1e} ({weights:.1e})" + ("" if moments == 0 else f" MOMENTS {moments:.1e}"))
        print(f"| {source} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
