"""Every dispatcher against a dense computation on one process: outputs and all gradients, whatever the tokens are."""

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_moe.dispatch import build_dispatcher, dispatcher_options
from lightning_moe.dispatch.all_to_all import AllToAllDispatcher
from lightning_moe.dispatch.base import Dispatcher
from tests.harness import run_ranks

E, H, K = 8, 4, 3


def routing(case: str, rank: int, world: int) -> tuple[Tensor, Tensor]:
    """``[T, K]`` indices and weights of one rank."""
    generator = torch.Generator().manual_seed(10 + rank)
    num_tokens = {"none on rank 0": 0 if rank == 0 else 5, "none anywhere": 0, "uneven": 3 * rank + 1}.get(case, 6)
    index = torch.rand(num_tokens, E, generator=generator).argsort(1)[:, :K]
    if case == "all to one expert":
        index = torch.full((num_tokens, 1), E - 1)
    elif case == "all to rank 0":
        index = torch.rand(num_tokens, E // world, generator=generator).argsort(1)[:, :K]
    elif case == "dropped choices":
        index = index.masked_fill(torch.rand(index.shape, generator=generator) < 0.5, -1)
        index[0] = -1
    return index, torch.rand(index.shape, generator=generator)


CASES = [
    "random",
    "uneven",
    "none on rank 0",
    "none anywhere",
    "all to one expert",
    "all to rank 0",
    "dropped choices",
]


def compute(rows: Tensor, tokens_per_expert: Tensor, weight: Tensor) -> Tensor:
    """Each expert multiplies its rows by its own matrix."""
    parts = rows.split(tokens_per_expert.tolist())
    return torch.cat([part @ w for part, w in zip(parts, weight.unbind(0), strict=True)])


def expert_weights() -> Tensor:
    return torch.randn(E, H, H, generator=torch.Generator().manual_seed(0))


def tokens_of(rank: int, num_tokens: int) -> Tensor:
    return torch.randn(num_tokens, H, generator=torch.Generator().manual_seed(20 + rank))


def build(name: str, world: int) -> Dispatcher:
    """A dispatcher by its name; ``all_to_all`` sends a row a choice, ``once`` a row a rank."""
    if name in ("all_to_all", "once"):
        return AllToAllDispatcher(deduplicate=name == "once").for_layer()
    return build_dispatcher(name, world).for_layer()


def through(dispatcher: Dispatcher, case: str, dtype: torch.dtype, rank: int, world: int) -> dict[str, Tensor]:
    """One rank's outputs and gradients of a case."""
    index, weights = routing(case, rank, world)
    hidden = tokens_of(rank, len(index)).to(dtype).requires_grad_()
    weights = weights.requires_grad_()
    local = expert_weights().chunk(world)[rank].to(dtype).requires_grad_()
    d = dispatcher.dispatch(hidden, index, weights)
    assert d.rows.shape == (int(d.tokens_per_expert.sum()), H)
    assert d.rows.isfinite().all()
    assert d.row_weights.isfinite().all()
    assert (d.rows.dtype, d.row_weights.dtype, d.tokens_per_expert.dtype) == (dtype, torch.float32, torch.int64)
    assert d.tokens_per_expert_host in (None, d.tokens_per_expert.tolist())
    assert d.tokens_per_expert.shape == (E // world,)
    assert d.choices_per_expert.tolist() == [int((index == e).sum()) for e in range(E)]
    rows = compute(d.rows, d.tokens_per_expert, local) * d.row_weights[:, None].to(dtype)
    out = dispatcher.combine(rows, d.state)
    assert (out[(index < 0).all(1)] == 0).all()
    out.square().sum().backward()
    with torch.no_grad():  # leaves nothing behind that the next call would trip over
        again = dispatcher.dispatch(hidden, index, weights)
    assert torch.equal(again.rows, d.rows)
    return {"out": out.detach(), "hidden": hidden.grad, "weights": weights.grad, "experts": local.grad}


def dispatched(name: str, case: str, dtype: torch.dtype) -> dict[str, Tensor]:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    dispatcher = build(name, world)
    dispatcher.setup(dist.group.WORLD, num_experts=E, hidden_size=H, dtype=dtype)
    result = through(dispatcher, case, dtype, rank, world)
    dispatcher.finalize()
    dispatcher.finalize()
    return result


def dense(case: str, world: int) -> list[dict[str, Tensor]]:
    """The same, every token through every expert of its choice, without sorting anything."""
    matrices = expert_weights().requires_grad_()
    ranks = []
    for rank in range(world):
        index, weights = routing(case, rank, world)
        hidden, weights = tokens_of(rank, len(index)).requires_grad_(), weights.requires_grad_()
        valid = (index >= 0).float() * weights
        out = torch.einsum("th,tkhj,tk->tj", hidden, matrices[index.clamp_min(0)], valid)
        out.square().sum().backward()
        ranks.append({"out": out.detach(), "hidden": hidden.grad, "weights": weights.grad})
    for rank, part in enumerate(matrices.grad.chunk(world)):
        ranks[rank]["experts"] = part
    return ranks


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("name", "world"), [("local", 1), *((name, world) for name in ("all_to_all", "once") for world in (1, 2, 4))]
)
def test_same_as_dense(name: str, world: int, case: str) -> None:
    expected = dense(case, world)
    for got, want in zip(run_ranks(dispatched_float32, world, name, case, timeout=60), expected, strict=True):
        for key in want:
            torch.testing.assert_close(got[key], want[key], rtol=1e-5, atol=1e-5, msg=lambda m, key=key: f"{key}: {m}")
    if case == "dropped choices":
        assert (expected[0]["out"][0] == 0).all(), "a token without a choice gives exact zeros"


def dispatched_float32(name: str, case: str) -> dict[str, Tensor]:
    result = dispatched(name, case, torch.float32)
    dropped = (routing(case, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))[0] < 0).all(1)
    assert (result["out"][dropped] == 0).all()
    return result


def dispatched_bfloat16(name: str) -> dict[str, Tensor]:
    return dispatched(name, "random", torch.bfloat16)


@pytest.mark.parametrize("name", ["all_to_all", "once"])
def test_bfloat16_rows_with_float32_weights(name: str) -> None:
    for got, want in zip(run_ranks(dispatched_bfloat16, 2, name), dense("random", 2), strict=True):
        assert got["hidden"].dtype == got["experts"].dtype == torch.bfloat16
        for key in want:
            torch.testing.assert_close(got[key].float(), want[key], rtol=5e-2, atol=0.2)


def frozen_inputs(name: str) -> dict[str, Any]:
    """No gradient is wanted for the tokens, as with frozen embeddings, but the experts and the router train."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    dispatcher = build(name, world)
    dispatcher.setup(dist.group.WORLD, num_experts=E, hidden_size=H, dtype=torch.float32)
    index, weights = routing("random", rank, world)
    weights.requires_grad_()
    local = expert_weights().chunk(world)[rank].requires_grad_()
    total = torch.zeros(())
    for _ in range(2):  # two layers through one dispatcher, backward in reverse order
        d = dispatcher.dispatch(tokens_of(rank, len(index)), index, weights)
        rows = compute(d.rows, d.tokens_per_expert, local) * d.row_weights[:, None]
        total = total + dispatcher.combine(rows, d.state).square().sum()
    total.backward()
    return {"weights": weights.grad / 2, "experts": local.grad / 2}


@pytest.mark.parametrize("name", ["all_to_all", "once"])
def test_tokens_that_need_no_gradient(name: str) -> None:
    for got, want in zip(run_ranks(frozen_inputs, 2, name, timeout=60), dense("random", 2), strict=True):
        for key in got:
            torch.testing.assert_close(got[key], want[key], rtol=1e-5, atol=1e-5)


def traffic(deduplicate: Any, top_k: int, hidden: int) -> tuple[int, int]:
    """Rows and bytes that one rank sends to the others, of 512 tokens with a random choice of experts."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    dispatcher = AllToAllDispatcher(deduplicate).for_layer()
    dispatcher.setup(dist.group.WORLD, num_experts=32, hidden_size=hidden, dtype=torch.float32)
    generator = torch.Generator().manual_seed(rank)
    index = torch.rand(512, 32, generator=generator).argsort(1)[:, :top_k]
    dispatcher.dispatch(torch.randn(512, hidden), index, torch.ones(512, top_k))
    expected = [(index // 8 == r).sum() if not deduplicate else (index // 8 == r).any(1).sum() for r in range(4)]
    if deduplicate != "auto":
        assert dispatcher.rows_sent == sum(int(count) for r, count in enumerate(expected) if r != rank)
    return dispatcher.rows_sent, dispatcher.bytes_sent


def test_a_token_for_several_experts_of_a_rank_travels_once() -> None:
    each, once = (run_ranks(traffic, 4, deduplicate, 8, 64)[0] for deduplicate in (False, True))
    assert once[0] < each[0] / 1.9
    assert once[1] < each[1] / 1.5
    assert run_ranks(traffic, 4, "auto", 8, 64)[0] == once
    one = run_ranks(traffic, 4, False, 1, 64)[0]
    assert run_ranks(traffic, 4, "auto", 1, 64)[0] == one, "with one choice there is nothing to save"
    narrow = run_ranks(traffic, 4, False, 2, 2)[0]
    assert run_ranks(traffic, 4, "auto", 2, 2)[0] == narrow, "the choices of a row would weigh more than the row"


def test_setup_refuses_what_cannot_work() -> None:
    local = build_dispatcher("local", 1)
    with pytest.raises(ValueError, match=r"moves rows of .*float32.*got torch.int64"):
        local.setup(None, num_experts=E, hidden_size=H, dtype=torch.int64)
    with pytest.raises(ValueError, match="alignment=16, allowed is 1"):
        local.setup(None, num_experts=E, hidden_size=H, dtype=torch.float32, alignment=16)


def test_options_say_why() -> None:
    options = dispatcher_options()
    assert options["local"] == options["all_to_all"] == ""
    assert all("\n" not in reason for reason in options.values())
    assert set(options) == {"local", "all_to_all", "deepep", "hybridep", "nccl_ep"}
