"""A checkpoint of any layout goes on on any other: optimizer, data and random numbers as well as weights."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_moe.checkpoint.optimizer_state import merged
from lightning_moe.checkpoint.random_state import derived_random_state, random_state, set_random_state
from tests.checkpoint.layouts import LAYOUTS, SAVED_AFTER, STEPS, resume, train, worst
from tests.checkpoint.resuming import Apart, Case, Model, SaveAt, fit
from tests.harness import run_ranks

# Each layout saves for two others, and some for themselves; the table of all is printed by tests/checkpoint/layouts.py.
PAIRS = [(source, LAYOUTS[(place + step) % len(LAYOUTS)]) for place, source in enumerate(LAYOUTS) for step in (2, 4)]
PAIRS += [(layout, layout) for layout in LAYOUTS[::3]]


@pytest.mark.slow
def test_every_layout_goes_on_on_others(tmp_path: Path) -> None:
    unbroken = train(tmp_path, LAYOUTS)
    for (source, target), resumed in resume(tmp_path, PAIRS).items():
        assert len(resumed["losses"]) == STEPS - SAVED_AFTER
        losses, weights, moments = worst(unbroken[source], resumed)
        assert moments == 0, "the moments of each parameter, by name"
        if source == target:
            assert (losses, weights) == (0, 0)
        assert losses < 1e-6, (source, target)
        assert weights < 1e-6, (source, target)


# Data


class Seen(Model):
    """Notes which samples it is given; they are numbered."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.seen: list[list[int]] = []

    def training_step(self, numbers: torch.Tensor, index: int) -> torch.Tensor:
        self.seen.append(numbers.tolist())
        self.numbers = numbers
        return super().training_step(numbers[:, None].expand(-1, 6) % 16, index)


def numbered(batch: int, length: int, rank: int, ranks: int) -> DataLoader:
    return DataLoader(range(length), batch, shuffle=True)  # type: ignore[arg-type]


def see(batch: int, length: int, after: int, max_steps: int, saved: Path, loaded: Path | None) -> list[list[int]]:
    case = Case(Seen, partial(numbered, batch, length), trainer={"max_steps": max_steps, "max_epochs": -1})
    _, module = fit(case, 4, [SaveAt(saved, "on_train_batch_end", after)], loaded)
    return module.seen


def by_step(ranks: list[list[list[int]]]) -> list[set[int]]:
    return [{number for rank in step for number in rank} for step in zip(*ranks, strict=True)]


def test_no_sample_is_left_out_or_comes_twice_on_another_number_of_ranks(tmp_path: Path) -> None:
    # 48 samples, 8 a step on two ranks: after 4 steps 32 are seen, and with 4 a step on one rank 4 steps are left.
    two = by_step(run_ranks(see, 2, 4, 48, 4, 6, tmp_path / "two", None))
    one = by_step(run_ranks(see, 1, 4, 48, 2, 16, tmp_path / "one", tmp_path / "two"))
    assert set().union(*two[:4], *one[:4]) == set(range(48))
    assert len(one) == 12
    assert set().union(*one[4:]) < set(range(48)), "then the next epoch"
    back = by_step(run_ranks(see, 2, 4, 48, 99, 7, tmp_path / "back", tmp_path / "one"))  # 40 samples are seen
    assert back[0] == two[5]


# Random numbers


def draws(folder: Path, loaded: bool, apart: bool) -> tuple[list[float], list[float]]:
    case = Case(callbacks=lambda: [Apart()] if apart else [], trainer={"max_steps": 3}, after=2)
    first: list[float] = []

    class Draw(SaveAt):
        def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
            if len(module.losses) == (0 if loaded else 2):
                state = random_state(torch.device("cpu"))
                first.extend(torch.rand(2).tolist())
                set_random_state(state, torch.device("cpu"))

    fit(
        case,
        1 if loaded else 0,
        [Draw(folder / "a", "on_train_batch_end", 99 if loaded else 2)],
        folder / "a" if loaded else None,
    )
    return first, torch.rand(2).tolist()


@pytest.mark.parametrize("apart", [False, True])
def test_random_numbers_on_more_ranks(tmp_path: Path, apart: bool) -> None:
    saved = [first for first, _ in run_ranks(draws, 2, tmp_path, False, apart)]
    more = [[first for first, _ in run_ranks(draws, 4, tmp_path, True, apart)] for _ in range(2)]
    assert more[0] == more[1], "the same each time"
    assert more[0][:2] == saved
    if apart:
        assert len({tuple(first) for first in more[0]}) == 4, "no rank repeats what another draws"
    else:
        assert more[0] == saved[:1] * 4, "ranks that draw alike go on doing so: samplers rely on it"


def test_derived_states_differ_and_leave_the_generators_alone() -> None:
    device = torch.device("cpu")
    before = random_state(device)
    derived = [derived_random_state(before, number, device) for number in (1, 2)]
    assert all(torch.equal(random_state(device)[name], state) for name, state in before.items())
    assert all(not torch.equal(derived[0][name], derived[1][name]) for name in before)


def test_names_of_ranks_with_other_experts_are_put_together_in_order() -> None:
    first = ["a", "e.0.w", "e.1.w", "b", "f.0.w", "c"]
    second = ["a", "e.2.w", "b", "f.1.w", "f.2.w", "c"]
    assert merged([first, second, first, second]) == [
        "a",
        "e.0.w",
        "e.1.w",
        "e.2.w",
        "b",
        "f.0.w",
        "f.1.w",
        "f.2.w",
        "c",
    ]
