"""Every dispatcher against a dense computation on one process: outputs and all gradients, whatever the tokens are."""

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_moe.dispatch import build_dispatcher, dispatcher_options
from lightning_moe.dispatch.all_to_all import AllToAllDispatcher
from tests.dispatch.cases import CASES, E, H, build, compute, dense, expert_weights, routing, through, tokens_of
from tests.harness import run_ranks


def dispatched(name: str, case: str, dtype: torch.dtype) -> dict[str, Tensor]:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    dispatcher = build(name, world)
    dispatcher.setup(dist.group.WORLD, num_experts=E, hidden_size=H, dtype=dtype)
    result = through(dispatcher, case, dtype, rank, world)
    dispatcher.finalize()
    dispatcher.finalize()
    return result


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
