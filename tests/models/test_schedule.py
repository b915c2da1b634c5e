import itertools

import pytest

from lightning_moe.models.schedule import Schedule, check_schedule, learning_rate_factor


def factors(total: int, warmup: int, schedule: Schedule = "cosine", ratio: float = 0.1) -> list[float]:
    return [learning_rate_factor(step, lambda: total, warmup, schedule, ratio) for step in range(total + 3)]


def test_warmup_rises_linearly_and_never_starts_at_zero() -> None:
    assert factors(20, 4)[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


def test_cosine_falls_to_the_given_share_and_stays() -> None:
    found = factors(20, 4, ratio=0.1)
    assert found[12] == pytest.approx(0.55)  # half-way between warm-up and end: half-way between 1 and the share
    assert found[20:] == pytest.approx([0.1, 0.1, 0.1])
    assert all(later < earlier for earlier, later in itertools.pairwise(found[4:21]))


def test_constant_stays() -> None:
    assert factors(20, 2, "constant")[2:] == [1.0] * 21


def test_run_shorter_than_its_warmup() -> None:
    assert factors(3, 5)[:3] == pytest.approx([1 / 6, 2 / 6, 3 / 6])


def test_length_is_not_asked_for_before_the_decay() -> None:
    def unknown() -> int:
        raise AssertionError("asked for the length")

    for step in range(4):
        learning_rate_factor(step, unknown, 3, "cosine", 0.1)
    learning_rate_factor(100, unknown, 3, "constant", 0.1)


@pytest.mark.parametrize(
    ("schedule", "warmup", "ratio", "option"),
    [
        ("linear", 0, 0.1, "schedule='linear'"),
        ("cosine", -1, 0.1, "warmup_steps=-1"),
        ("cosine", 0, 2.0, "min_lr_ratio=2"),
    ],
)
def test_options_are_checked(schedule: str, warmup: int, ratio: float, option: str) -> None:
    with pytest.raises(ValueError, match=option):
        check_schedule(schedule, warmup, ratio)
