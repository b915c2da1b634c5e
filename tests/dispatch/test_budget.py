"""What a budget for rows drops: the same as a plain computation that sees all ranks, and nothing below the budget."""

import os
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_moe.dispatch.budget import RowBudget, check_max_rows_per_rank, divide_budget
from lightning_moe.mesh import experts_per_rank
from lightning_moe.parallel.recompute import checkpoint_block
from tests.dispatch.cases import CASES, E, build, compute, expert_weights, routing, tokens_of
from tests.harness import run_ranks


def divide_plainly(demand: list[int], budget: int) -> list[int]:
    """The rows that each sender may send to one rank."""
    total = sum(demand)
    if total <= budget:
        return demand
    exact = [Fraction(rows * budget, total) for rows in demand]
    shares = [int(share) for share in exact]
    first = sorted(range(len(demand)), key=lambda source: (shares[source] - exact[source], source))
    for source in first[: budget - sum(shares)]:
        shares[source] += 1
    return shares


def drop_plainly(calls: list[tuple[Tensor, Tensor]], budget: int, num_experts: int) -> list[Tensor]:
    """The ``[T, K]`` experts that are left of the index and weights of each rank of one group."""
    ranks = len(calls)
    held = experts_per_rank(num_experts, ranks)
    owner = [rank for rank, count in enumerate(held) for _ in range(count)]
    wants: list[list[list[tuple[float, int]]]] = [[[] for _ in range(ranks)] for _ in range(ranks)]
    for source, (index, weights) in enumerate(calls):
        flat = zip(index.flatten().tolist(), weights.flatten().tolist(), strict=True)
        for position, (expert, weight) in enumerate(flat):
            if expert >= 0:
                wants[source][owner[expert]].append((-weight, position))
    left = [torch.full((index.numel(),), -1) for index, _ in calls]
    for destination in range(ranks):
        shares = divide_plainly([len(wants[source][destination]) for source in range(ranks)], budget)
        for source, share in enumerate(shares):
            for _, position in sorted(wants[source][destination])[:share]:
                left[source][position] = calls[source][0].flatten()[position]
    return [flat.view_as(index) for flat, (index, _) in zip(left, calls, strict=True)]


def test_shares_sum_up_to_the_budget_and_are_those_of_largest_remainders() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        ranks = int(torch.randint(1, 9, (), generator=generator))
        demand = torch.randint(0, 40, (ranks, ranks), generator=generator)
        demand[:, 0] *= torch.rand(ranks, generator=generator) < 0.5
        budget = int(torch.randint(1, 200, (), generator=generator))
        got = divide_budget(demand, budget)
        assert (got <= demand).all()
        assert got.sum(0).tolist() == demand.sum(0).clamp_max(budget).tolist()
        assert got.t().tolist() == [divide_plainly(column, budget) for column in demand.t().tolist()]
    # As many rows as a cluster could ever send
    assert divide_budget(torch.full((64, 64), 2**24), 2**29 + 1).sum(0).tolist() == [2**29 + 1] * 64


def test_one_rank_drops_the_smallest_weights_and_later_tokens_among_equals() -> None:
    index = torch.tensor([[0, 1], [2, -1], [3, 1], [0, 2]])
    weights = torch.tensor([[0.5, 0.1], [0.3, 0.9], [0.3, 0.2], [0.3, 0.2]])
    left = RowBudget(4, 4).apply(index, weights)
    assert left.top_k_index.tolist() == [[0, -1], [2, -1], [3, -1], [0, -1]]
    assert RowBudget(5, 4).apply(index, weights).top_k_index.tolist() == [[0, -1], [2, -1], [3, 1], [0, -1]]
    assert left.dropped.tolist() == 3
    assert left.chosen.tolist() == [2, 2, 2, 1], "the router's choices, dropped or not"
    assert index.tolist() == [[0, 1], [2, -1], [3, 1], [0, 2]], "what the router returned is its own"
    assert torch.equal(RowBudget(7, 4).apply(index, weights).top_k_index, index)
    empty = RowBudget(1, 4).apply(index[:0], weights[:0])
    assert (empty.top_k_index.shape, empty.dropped.tolist()) == ((0, 2), 0)


@pytest.mark.parametrize("bad", [0, -1, 2.5, "8", True])
def test_no_budget_but_a_positive_number(bad: Any) -> None:
    with pytest.raises(ValueError, match=f"max_rows_per_rank={bad!r} must be a positive number"):
        check_max_rows_per_rank(bad)
    with pytest.raises(ValueError, match="max_rows_per_rank"):
        RowBudget(bad, 4)
    check_max_rows_per_rank(None)


# Every case and budget goes through one pair of processes.

BUDGETS = (1, 5, 9, 1000)


class CountGathers:
    """Counts the exchanges of a budget while it is active."""

    def __enter__(self) -> "CountGathers":
        self.calls, self._original = 0, dist.all_gather_into_tensor

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return self._original(*args, **kwargs)

        dist.all_gather_into_tensor = counted
        return self

    def __exit__(self, *_: Any) -> None:
        dist.all_gather_into_tensor = self._original


def all_cases(name: str) -> dict[tuple[str, int], dict[str, Any]]:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    dispatcher = build(name, world)
    dispatcher.setup(dist.group.WORLD, num_experts=E, hidden_size=4, dtype=torch.float32)
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for case in CASES:
        for budget in BUDGETS:
            index, weights = routing(case, rank, world)
            hidden = tokens_of(rank, len(index)).requires_grad_()
            local = expert_weights().chunk(world)[rank].requires_grad_()
            weights.requires_grad_()
            with CountGathers() as gathers:
                left = RowBudget(budget, E, dispatcher.group).apply(index, weights)
            d = dispatcher.dispatch(hidden, left.top_k_index, weights)
            out = dispatcher.combine(compute(d.rows, d.tokens_per_expert, local) * d.row_weights[:, None], d.state)
            out.square().sum().backward()
            found[case, budget] = {
                "gathers": gathers.calls,
                "rows": len(d.rows),
                "index": left.top_k_index,
                "dropped": int(left.dropped),
                "chosen": left.chosen.tolist(),
                "out": out.detach(),
                "hidden": hidden.grad,
                "weights": weights.grad,
                "experts": local.grad,
            }
    return found


@pytest.mark.parametrize(("name", "world"), [("local", 1), ("all_to_all", 2), ("once", 2), ("all_to_all", 4)])
def test_same_as_a_plain_computation_of_what_is_dropped(name: str, world: int) -> None:
    ranks = run_ranks(all_cases, world, name)
    for case in CASES:
        calls = [routing(case, rank, world) for rank in range(world)]
        for budget in BUDGETS:
            got, left = [rank[case, budget] for rank in ranks], drop_plainly(calls, budget, E)
            wanted_rows = [0] * world
            for index, _ in calls:
                for expert in index[index >= 0].tolist():
                    wanted_rows[expert * world // E] += 1
            assert [rank["rows"] for rank in got] == [min(rows, budget) for rows in wanted_rows], (case, budget)
            check_gradients(got, calls, left)
            for rank in range(world):
                assert torch.equal(got[rank]["index"], left[rank]), (case, budget, rank)
                index = calls[rank][0]
                assert got[rank]["dropped"] == int((index >= 0).sum() - (left[rank] >= 0).sum())
                assert got[rank]["chosen"] == [int((index == expert).sum()) for expert in range(E)]
                assert got[rank]["gathers"] == (world > 1), "one exchange, and none for one rank alone"
    assert sum(rank["all to rank 0", 5]["dropped"] for rank in ranks) > 0
    assert all(rank["random", 1000]["dropped"] == 0 for rank in ranks)


def check_gradients(got: list[dict[str, Any]], calls: list[tuple[Tensor, Tensor]], left: list[Tensor]) -> None:
    """Outputs and gradients against every token through every expert of the choices that are left."""
    matrices = expert_weights().requires_grad_()
    for rank, ((index, weights), stays) in enumerate(zip(calls, left, strict=True)):
        hidden = tokens_of(rank, len(index)).requires_grad_()
        weights = weights.clone().requires_grad_()
        used = torch.where(stays >= 0, weights, 0.0)
        out = torch.einsum("th,tkhj,tk->tj", hidden, matrices[index.clamp_min(0)], used)
        out.square().sum().backward()
        torch.testing.assert_close(got[rank]["out"], out.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(got[rank]["hidden"], hidden.grad, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(got[rank]["weights"], weights.grad, rtol=1e-5, atol=1e-5)
        assert (got[rank]["weights"][stays < 0] == 0).all(), "a dropped weight has no gradient"
    for rank, part in enumerate(matrices.grad.chunk(len(got))):
        torch.testing.assert_close(got[rank]["experts"], part, rtol=1e-5, atol=1e-5)


def uneven_experts(count: int) -> list[Tensor]:
    """``count`` experts over 4 ranks, for several budgets."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    index, weights = call_with(count, rank)
    return [RowBudget(budget, count, dist.group.WORLD).apply(index, weights).top_k_index for budget in BUDGETS]


def call_with(count: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    index = torch.randint(-1, count, (4 * rank, 3), generator=generator)
    # Few different weights, so that many are equal
    return index, torch.randint(0, 4, index.shape, generator=generator) / 4


@pytest.mark.parametrize("count", [5, 7])
def test_ranks_with_fewer_experts_or_none(count: int) -> None:
    ranks = run_ranks(uneven_experts, 4, count)
    for place, budget in enumerate(BUDGETS):
        want = drop_plainly([call_with(count, rank) for rank in range(4)], budget, count)
        for rank in range(4):
            assert torch.equal(ranks[rank][place], want[rank]), (budget, rank)


class Drifting(torch.nn.Module):
    """Weights that are others in the recomputation, as rounding can make them."""

    def __init__(self, budget: RowBudget) -> None:
        super().__init__()
        self.budget = budget
        self.left: list[Tensor] = []
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        index = torch.arange(16).view(8, 2) % 4
        weights = x.sigmoid() * torch.rand(8, 2, generator=torch.Generator().manual_seed(self.calls))
        self.left.append(self.budget.apply(index, weights).top_k_index)
        return torch.tanh(weights.sum() * x)


def drifting(mode: Any) -> tuple[list[Tensor], int]:
    dist.init_process_group("gloo")
    block = Drifting(RowBudget(6, 4, dist.group.WORLD))
    checkpoint_block(block, mode)
    with CountGathers() as gathers:
        for _ in range(2):
            block(torch.ones(8, 2, requires_grad=True)).sum().backward()
    return block.left, gathers.calls


@pytest.mark.parametrize(("mode", "exchanges"), [("none", 2), ("full", 4), ("selective", 2)])
def test_recompute_drops_what_the_forward_dropped(mode: str, exchanges: int) -> None:
    for left, gathers in run_ranks(drifting, 2, mode):
        assert gathers == exchanges
        if mode == "none":
            assert not torch.equal(*left), "the weights must change what is dropped for this to mean anything"
        else:
            first, again, second, again_second = left
            assert torch.equal(first, again)
            assert torch.equal(second, again_second)
            assert not torch.equal(first, second)


def of_one_call(waits: bool) -> set[str]:
    """Operators of a call that take numbers or shapes from the device to the host."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: set[str] = set()

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.add(func.name())
            return func(*args, **(kwargs or {}))

    dist.init_process_group("gloo")
    index, weights = routing("random", int(os.environ["RANK"]), 2)
    with Record():
        left = RowBudget(5, E, dist.group.WORLD).apply(index, weights)
        if waits:
            left.dropped.item()
    return {name for name in seen if any(part in name for part in ("local_scalar", "nonzero", "masked_select"))}


def test_does_not_wait_for_the_device() -> None:
    assert run_ranks(of_one_call, 2, False) == [set(), set()]
    assert run_ranks(of_one_call, 2, True)[0] == {"aten::_local_scalar_dense"}
