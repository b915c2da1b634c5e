"""Which runs a verdict needs, and what follows from them."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

from lightning_moe.cli_errors import RefusedError
from lightning_moe.verify.compare import Comparison, Record, compare
from lightning_moe.verify.plan import LAYOUT, Reference
from lightning_moe.verify.report import Verdict, different, same

Start = Callable[[Path, Sequence[str]], None]

_LISTED = 3


class Judge:
    """Carries out the runs that it takes to tell whether a layout trains as one process does.

    Args:
        folder: The temporary folder, with the plan in it.
        tolerance: The largest relative error, ``None`` for the default of each quantity.
        start: Carries out runs, given the folder and their names, and raises where one fails.
    """

    def __init__(self, folder: Path, tolerance: float | None, start: Start) -> None:
        self._folder = folder
        self._tolerance = tolerance
        self._start = start

    def verdict(self) -> Verdict:
        """Compare the layout with one process.

        First with one process on the whole batch. Where that differs or cannot run, with one process that takes each
        rank's batch as a micro-batch, and with one that draws other random numbers, to know why.

        Raises:
            RefusedError: If the runs do not allow a comparison.
        """
        self._start(self._folder, [LAYOUT])
        layout = Record(self._folder / LAYOUT)
        if not layout.steps:
            raise RefusedError(
                "no optimizer step was taken under the layout", "Check max_steps, max_epochs and the data"
            )
        whole = Reference()
        self._run(whole, Reference(rounded=True))
        problem = self._error(whole)
        if problem is not None:
            return self._without_the_whole(layout, problem)
        found = self._compare(layout, whole)
        said = f"Lightning's own, the batches of {layout.ranks} ranks as one" if layout.ranks > 1 else "Lightning's own"
        if not found.failed:
            return Verdict("same", same(found, layout), found, said, self._notes(layout, found))
        by_rank = Reference(by_rank=True)
        others = [by_rank, Reference(by_rank=True, rounded=True)] if layout.ranks > 1 else []
        self._run(*others, Reference(reseeded=True))
        if layout.ranks > 1 and self._error(by_rank) is None:
            other = self._compare(layout, by_rank)
            if not other.failed:
                worst = max(found.failed, key=lambda row: row.error)
                note = f"one process on the whole batch differs, most in {worst.name}: {worst.error:.1e}"
                return self._same_by_rank(layout, other, note)
        return self._no_agreement(layout, found, whole, said, [])

    def _without_the_whole(self, layout: Record, problem: str) -> Verdict:
        by_rank = Reference(by_rank=True)
        self._run(by_rank, Reference(by_rank=True, rounded=True), Reference(by_rank=True, reseeded=True))
        error = self._error(by_rank)
        if error is not None:
            raise RefusedError(
                f"one process cannot repeat what the ranks did; on the whole batch: {problem}; on one rank's batch"
                f" after the other: {error}"
            )
        found = self._compare(layout, by_rank)
        note = f"one process could not run on the whole batch: {problem}"
        if not found.failed:
            return self._same_by_rank(layout, found, note)
        return self._no_agreement(layout, found, by_rank, _BY_RANK, [note])

    def _same_by_rank(self, layout: Record, found: Comparison, note: str) -> Verdict:
        text = (
            f"SAME RANK BY RANK: {layout.ranks} ranks train exactly as one process that takes the batch of each rank as"
            " a micro-batch and averages the losses. "
        )
        if note.startswith("one process could not"):
            text += "Nothing is known about one process on the whole batch (note above)."
        else:
            text += (
                "The strategy is exact, but the loss of the model is a mean over each rank's own samples or tokens, or"
                " uses statistics of its batch: it depends on the number of ranks."
            )
        return Verdict("same_by_rank", text, found, _BY_RANK, [note, *self._notes(layout, found)])

    def _no_agreement(self, layout: Record, found: Comparison, base: Reference, said: str, notes: list[str]) -> Verdict:
        notes = [*notes, *self._notes(layout, found)]
        other = Reference(base.by_rank, reseeded=True)
        if self._error(other) is None:
            changed = self._compare(Record(self._folder / other.name), base)
            first = [row for row in changed.failed if row.step == 1]
            if first:
                random = Record(self._folder / base.name).random
                listed = f": {_some(random)}" if random else ""
                text = (
                    "NO VERDICT: the forward is random, so that ranks draw other numbers than one process. With another"
                    f" seed one process alone has another {first[0].name} (by {first[0].error:.1e}). Set that to zero,"
                    f" or add --no-dropout{listed}"
                )
                return Verdict("random", text, found, said, notes)
        return Verdict("different", different(found, layout), found, said, notes)

    def _run(self, *references: Reference) -> None:
        self._start(self._folder, [reference.name for reference in references])

    def _error(self, reference: Reference) -> str | None:
        """Why a run in one process could not be carried out."""
        path = self._folder / reference.name / "error.json"
        return json.loads(path.read_text()) if path.exists() else None

    def _compare(self, layout: Record, reference: Reference) -> Comparison:
        rounded = Reference(reference.by_rank, rounded=True)
        moved = Record(self._folder / rounded.name) if self._error(rounded) is None else None
        one = Record(self._folder / reference.name)
        _check_evidence(one)
        try:
            found = compare(layout, one, moved, self._tolerance)
        except ValueError as error:
            raise RefusedError(str(error)) from error
        if all(row.result == "unclear" for row in found.rows if row.quantity == "gradient"):
            raise RefusedError(
                f"in {layout.precision}, rounding alone moves every gradient of one process by half of itself, so that"
                " nothing can be said",
                "Add --trainer.precision 32-true",
            )
        return found

    def _notes(self, layout: Record, found: Comparison) -> list[str]:
        notes = list(layout.notes)
        if found.noisy:
            notes.append(
                f"{len(found.noisy)} tensors are not judged, because changing each weight by one rounding moves them by"
                f" 10 % or more in one process: {_some(found.noisy)}"
            )
        if not layout.losses:
            notes.append("no loss was seen: the model calls loss.backward() itself")
        if layout.epsilon > 1e-6:
            notes.append(
                f"rounding in {layout.precision} hides small errors; --trainer.precision 32-true shows the most"
            )
        return notes


def _check_evidence(reference: Record) -> None:
    """Refuse a reference that equals anything, or nothing.

    Raises:
        RefusedError: If all its gradients are zero, or a loss or norm is not finite.
    """
    for quantity, values in (("loss", reference.losses), ("gradient norm", reference.norms)):
        step = next((number for number, value in enumerate(values, 1) if not math.isfinite(value)), None)
        if step is not None:
            raise RefusedError(
                f"the {quantity} of one process is {values[step - 1]} at step {step}, so that nothing can be compared",
                "Lower the learning rate, or check the data and the model",
            )
    if not any(reference.norms):
        raise RefusedError(
            "every gradient of one process is zero, so that there is nothing to compare",
            "Check that the loss depends on the parameters that the optimizer has",
        )


_BY_RANK = "Lightning's own, the batch of each rank as a micro-batch"


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
