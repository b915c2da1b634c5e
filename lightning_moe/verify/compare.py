"""Two runs of the same steps, compared: how far apart is what they did, and how far may it be."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_moe.verify.groups import GROUPS
from lightning_moe.verify.tensors import Tensors

Result = Literal["ok", "FAIL", "unclear"]

# Sums over the tokens of a batch are taken in another order when the ranks share them. In float32 that moves gradients
# by 1e-7 to 1e-6 of their norm.
_FLOAT32_TOLERANCE = 1e-5
# Coarser precisions: two roundings of one operation. What many of them add up to is measured.
_ROUNDINGS = 2
# A layout rounds in other places than one process whose weights were moved by one rounding. Measured for float32 and
# both bfloat16 modes, it ends up about as far away, at most twice.
_MARGIN = 5
# A stored weight that comes to lie in the middle of two numbers is rounded up in one run and down in the other. In
# float32 that is rare, so the measured distance may miss it. Sixteen such elements move the 2-norm by four of one.
_FLIPS = 4
# An agreement to half of a quantity says nothing.
_UNCLEAR = 0.5


class Record:
    """What a run has left.

    Args:
        folder: Its folder.
    """

    def __init__(self, folder: Path) -> None:
        content: dict[str, Any] = json.loads((folder / "record.json").read_text())
        self.ranks: int = content["ranks"]
        self.epochs: list[int] = content["epochs"]
        self.batches_per_epoch: int | None = content["batches_per_epoch"]
        self.epoch_ended: bool = content["epoch_ended"]  # after the last of these batches
        self.norms: list[float] = content["norms"]
        self.optimizers: list[str] = content["optimizers"]
        self.precision: str = content["precision"]
        self.epsilon: float = content["epsilon"]
        self.layout: str = content["layout"]
        self.random: list[str] = content["random"]
        self.notes: list[str] = content["notes"]
        self.spacings: dict[str, float] = content["spacings"]
        of_ranks = [json.loads((folder / f"losses-{rank}.json").read_text()) for rank in range(self.ranks)]
        # The loss of a step is the mean over the ranks, as everywhere in Lightning.
        self.losses: list[float] = [
            sum(losses) / self.ranks for losses in zip(*of_ranks, strict=True) if None not in losses
        ]
        self.gradients = Tensors(folder, "gradients")
        self.changes = Tensors(folder, "changes")
        groups = folder / "groups.json"
        self.groups: dict[str, str] = json.loads(groups.read_text()) if groups.exists() else {}

    @property
    def steps(self) -> int:
        """Optimizer steps."""
        return len(self.norms)


@dataclass(frozen=True)
class Row:
    """One quantity of both runs.

    Attributes:
        quantity: ``"loss"``, ``"gradient norm"``, ``"gradient"`` or ``"weight change"``.
        step: The step, counted from 1; ``None`` for the change over all steps.
        group: The part of the model, ``None`` for all of it.
        layout: Its value under the layout; of several tensors their 2-norm.
        one_process: The same in one process.
        error: The largest relative error of a tensor, ``|layout - one process| / |one process|`` in the 2-norm.
        tolerance: What it may be.
        worst: Name of the parameter that ``error`` and ``tolerance`` are of.
        result: ``"unclear"`` where rounding alone moves it so far that nothing can be said.
    """

    quantity: str
    step: int | None
    group: str | None
    layout: float
    one_process: float
    error: float
    tolerance: float
    worst: str | None
    result: Result

    @property
    def name(self) -> str:
        """What a user reads."""
        return f"{self.quantity}, {self.group or f'step {self.step}'}"


@dataclass(frozen=True)
class Comparison:
    """The rows of two runs, and the parameters that rounding alone moves too far to be judged."""

    rows: list[Row] = field(default_factory=list)
    noisy: list[str] = field(default_factory=list)

    @property
    def failed(self) -> list[Row]:
        """The rows that are out of tolerance."""
        return [row for row in self.rows if row.result == "FAIL"]


def floor_of(epsilon: float) -> float:
    """The tolerance of a precision where one process shows no larger effect of rounding.

    Args:
        epsilon: The spacing of numbers at 1.
    """
    if epsilon <= torch.finfo(torch.float32).eps:
        return _FLOAT32_TOLERANCE
    return _ROUNDINGS * epsilon


def compare(layout: Record, reference: Record, rounded: Record | None, tolerance: float | None) -> Comparison:
    """Compare a run under a layout with one in one process.

    Args:
        layout: The run under the layout.
        reference: The run in one process.
        rounded: The same with its initial weights moved by one rounding, ``None`` where there is none.
        tolerance: The largest relative error, ``None`` to derive it for each quantity: what the precision allows, or
            five times the distance between ``reference`` and ``rounded`` where that is more.

    Raises:
        ValueError: If the runs have taken different numbers of steps.
    """
    if layout.steps != reference.steps:
        raise ValueError(f"the layout took {layout.steps} optimizer steps, one process {reference.steps}")
    limit = _Limit(floor_of(reference.epsilon), tolerance)
    rows = [
        *_rows_of_steps("loss", layout.losses, reference.losses, rounded.losses if rounded else [], limit),
        *_rows_of_steps("gradient norm", layout.norms, reference.norms, rounded.norms if rounded else [], limit),
    ]
    noisy: list[str] = []
    for quantity, step in (("gradient", 1), ("weight change", None)):
        ours, theirs, moved = (
            None if record is None else (record.gradients if step else record.changes)
            for record in (layout, reference, rounded)
        )
        assert ours is not None
        assert theirs is not None
        noises = {} if moved is None else _errors(moved, theirs, reference.epsilon)
        judged = {}
        for name, error in _errors(ours, theirs, reference.epsilon).items():
            stored = 0.0 if step else reference.spacings.get(name, 0.0) / (error.one_process or math.inf)
            judged[name] = (error, limit(noises[name].value if name in noises else 0.0, stored))
        for group in GROUPS:
            of_group = {name: both for name, both in judged.items() if reference.groups.get(name) == group}
            if of_group:
                rows.append(_row_of_group(quantity, step, group, of_group))
        unclear = [name for name, (error, allowed) in judged.items() if _result(error.value, allowed) == "unclear"]
        noisy += [f"{quantity} of {name}" for name in unclear]
    return Comparison(rows, noisy)


@dataclass(frozen=True)
class _Limit:
    """The largest error that a quantity may have, given what rounding does to it, relative to it."""

    floor: float
    fixed: float | None

    def __call__(self, noise: float, stored: float = 0.0) -> float:
        if self.fixed is not None:
            return self.fixed
        return max(self.floor, _MARGIN * noise if math.isfinite(noise) else 0.0, _FLIPS * stored)


def _rows_of_steps(
    quantity: str, layout: list[float], reference: list[float], rounded: list[float], limit: _Limit
) -> list[Row]:
    rows = []
    for step, (ours, theirs) in enumerate(zip(layout, reference, strict=True)):
        error = _relative(ours, theirs)
        allowed = limit(_relative(rounded[step], theirs) if step < len(rounded) else 0.0)
        rows.append(Row(quantity, step + 1, None, ours, theirs, error, allowed, None, _result(error, allowed)))
    return rows


@dataclass(frozen=True)
class _Error:
    value: float
    layout: float  # 2-norms
    one_process: float


def _row_of_group(quantity: str, step: int | None, group: str, judged: dict[str, tuple[_Error, float]]) -> Row:
    results = {name: _result(error.value, limit) for name, (error, limit) in judged.items()}
    # What cannot be judged must not hide the rest.
    clear = [name for name, result in results.items() if result != "unclear"] or list(judged)
    worst = max(clear, key=lambda name: _excess(*judged[name]))
    error, limit = judged[worst]
    norms = [
        math.sqrt(sum(value * value for value in values))
        for values in zip(*((error.layout, error.one_process) for error, _ in judged.values()), strict=True)
    ]
    return Row(quantity, step, group, norms[0], norms[1], error.value, limit, worst, results[worst])


def _excess(error: _Error, limit: float) -> float:
    return error.value / limit if math.isfinite(error.value) else math.inf


def _result(error: float, limit: float) -> Result:
    if not error <= limit:  # NaN too
        return "FAIL"
    return "unclear" if limit > _UNCLEAR else "ok"


def _relative(ours: float, reference: float) -> float:
    if ours == reference:
        return 0.0
    return abs(ours - reference) / abs(reference) if reference else math.inf


def _errors(ours: Tensors, reference: Tensors, epsilon: float) -> dict[str, _Error]:
    """The relative error of each tensor; one that only one run has is zero in the other."""
    names = list(dict.fromkeys([*reference.names(), *ours.names()]))
    norms = {name: _norm(reference, name) for name in names}
    # What is smaller than the rounding of all together is rounding, such as the gradient of a bias that has no effect.
    least = epsilon * math.sqrt(sum(norm * norm for norm in norms.values()))
    return {name: _error(ours, reference, name, norms[name], least) for name in names}


def _error(ours: Tensors, reference: Tensors, name: str, norm: float, least: float) -> _Error:
    if name not in ours:
        distance, own = norm, 0.0
    elif name not in reference:
        distance = own = _norm(ours, name)
    else:
        own = _norm(ours, name)
        distance = _two_norm(ours[name].float() - reference[name].float())
    if distance == 0:
        return _Error(0.0, own, norm)
    return _Error(distance / max(norm, least) if max(norm, least) else math.inf, own, norm)


def _norm(tensors: Tensors, name: str) -> float:
    return _two_norm(tensors[name].float()) if name in tensors else 0.0


def _two_norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))


def how(row: Row) -> str:
    """Say what became of a quantity where that is plain: it is missing, or it has another scale.

    Args:
        row: A row that failed.
    """
    if row.layout == 0:
        return "none under the layout"
    ratio = row.layout / row.one_process if row.one_process else math.inf
    # A factor, and nothing else, moves a tensor by as much as its norm.
    if math.isfinite(ratio) and abs(ratio - 1) > 0.05 and 0.9 < row.error / abs(ratio - 1) < 1.1:
        return f"{ratio:.3g} times that of one process"
    return f"off by {row.error:.1e}"


def first_to_differ(failed: Sequence[Row]) -> list[Row]:
    """The failed rows nearest to the cause, worst first: the loss of step 1, else the gradients, else what follows."""
    for wanted in (
        lambda row: row.quantity == "loss" and row.step == 1,
        lambda row: row.quantity == "gradient",
        lambda row: row.quantity == "gradient norm" and row.step == 1,
        lambda row: row.quantity == "weight change",
    ):
        found = [row for row in failed if wanted(row)]
        if found:
            return sorted(found, key=lambda row: -row.error / row.tolerance)
    return list(failed)
