"""The metrics of router load, by themselves and in a LightningModule."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_moe.metrics import (
    DeadExperts,
    DroppedTokens,
    ExpertLoad,
    LoadImbalance,
    RouterEntropy,
    RowsPerRank,
    choices_per_expert,
)
from tests.harness import run_ranks

KINDS = (ExpertLoad, LoadImbalance, DeadExperts, RouterEntropy)


def value_of(kind: type[ExpertLoad], *loads: list[int], **options: Any) -> Any:
    metric = kind(len(loads[0]), **options)
    for load in loads:
        metric.update(torch.tensor(load))
    return metric.compute().tolist()


def test_an_even_load() -> None:
    for kind, value in ((LoadImbalance, 1.0), (DeadExperts, 0.0), (RouterEntropy, 1.0)):
        assert value_of(kind, [3, 3, 3, 3]) == pytest.approx(value)
        assert value_of(kind, [7]) == value, "one expert"


def test_one_expert_takes_everything() -> None:
    for kind, value in ((LoadImbalance, 4.0), (DeadExperts, 0.75), (RouterEntropy, 0.0)):
        assert value_of(kind, [0, 0, 9, 0]) == value


def test_updates_add_up() -> None:
    loads = [1, 0, 4, 0], [1, 2, 0, 0]
    assert value_of(ExpertLoad, *loads) == [2, 2, 4, 0]
    assert value_of(LoadImbalance, *loads) == 2.0
    assert value_of(DeadExperts, *loads) == 0.25
    # A quarter, a quarter and a half: 1.5 bits of 2
    assert value_of(RouterEntropy, *loads) == pytest.approx(0.75)


def test_no_choice_is_no_number() -> None:
    for kind in KINDS[1:]:
        assert math.isnan(value_of(kind, [0, 0])), kind
    metric = DroppedTokens()
    metric.update(0, 0)
    assert math.isnan(metric.compute())


def test_rows_of_ranks_that_hold_different_numbers_of_experts() -> None:
    assert value_of(RowsPerRank, [1, 2, 3, 4, 5], ranks=2) == [6, 9]
    assert value_of(RowsPerRank, [1, 2, 3, 4, 5], ranks=4) == [3, 7, 5, 0]


def test_share_of_dropped_choices() -> None:
    metric = DroppedTokens()
    metric.update(1, torch.tensor(10))
    metric.update(torch.tensor(2), 2)
    assert metric.compute() == 0.25


def test_choices_of_a_router() -> None:
    index = torch.tensor([[[0, 2], [2, -1]], [[3, 2], [-1, -1]]], dtype=torch.int32)
    assert choices_per_expert(index, 5).tolist() == [1, 0, 3, 1, 0]


def test_other_counts_than_one_an_expert_are_refused() -> None:
    with pytest.raises(ValueError, match=r"LoadImbalance\(num_experts=4\) takes one count an expert, got shape \[3\]"):
        LoadImbalance(4).update(torch.ones(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="num_experts=0"):
        ExpertLoad(0)
    with pytest.raises(ValueError, match="ranks=0"):
        RowsPerRank(4, 0)


def over_ranks() -> list[Any]:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    loads = [[4, 0, 0, 0], [0, 2, 2, 0]][rank]
    dropped = DroppedTokens()
    dropped.update(rank, 4)
    return [*(value_of(kind, loads) for kind in KINDS), value_of(RowsPerRank, loads, ranks=2), float(dropped.compute())]


def test_counts_of_all_ranks_are_added() -> None:
    first, second = run_ranks(over_ranks, 2)
    assert first == second
    assert first == [[4, 2, 2, 0], 2.0, 0.25, pytest.approx(0.75), [6, 2], 0.125]
