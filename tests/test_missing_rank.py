"""A rank that does not come to a collective: the others end with an error that names it and the layer."""

import os
import signal
import time
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_moe.nn import MoE
from lightning_moe.parallel.watch import MissingRankError, lost_rank
from tests import tiny
from tests.harness import RanksFailedError, run_ranks, run_ranks_expecting_error
from tests.test_strategy import rank_and_world

TIMEOUT_S = 5
BOUND_S = TIMEOUT_S + 10
LAYERS, STEP = 3, 2


def act(module: "Module", place: str) -> bool:
    """What the misbehaving rank does at a place; return whether the experts of the layer are left out."""
    what, where, rank = module.case
    if where != place or rank != rank_and_world()[0] or module.step != STEP:
        return False
    if what == "sleep":
        time.sleep(TIMEOUT_S + 8)
    elif what == "raise":
        raise ValueError("boom")
    elif what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "stop":
        module.trainer.should_stop = True
    return what == "skip"


class Block(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.linear = nn.Linear(8, 8)
        self.moe = MoE(8, 8, 6, 2)
        self.owner: list[Any] = []  # a list, so that it is no submodule

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.linear(x)
        if not act(self.owner[0], f"layer {self.number}"):
            x = x + self.moe(x)
        if x.requires_grad:
            x.register_hook(lambda _: act(self.owner[0], f"backward of layer {self.number}") or None)
        return x


class Module(pl.LightningModule):
    """``case``: what happens, where, and on which rank."""

    def __init__(self, case: tuple[str, str, int]) -> None:
        super().__init__()
        self.case = case
        self.step = 0
        self.started = 0.0
        self.net = nn.Sequential(*[Block(number) for number in range(LAYERS)])
        for block in self.net:
            block.owner.append(self)

    def run(self, x: Tensor, index: int, place: str) -> Tensor:
        self.step, self.started = index, time.monotonic()
        act(self, place)
        return self.net(x).square().mean()

    def training_step(self, x: Tensor, index: int) -> Tensor:
        return self.run(x, index, "training_step")

    def validation_step(self, x: Tensor, index: int) -> None:
        self.run(x, index, "validation_step")

    def predict_step(self, x: Tensor, index: int) -> Tensor:
        return self.run(x, index, "predict_step")

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        self.step, self.started = index, time.monotonic()
        act(self, "hook")

    def on_train_epoch_end(self) -> None:
        if self.case[:2] == ("extra", "epoch end") and self.case[2] == rank_and_world()[0]:
            self.started = time.monotonic()
            self.trainer.strategy.reduce(torch.ones(1))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Slow(IterableDataset):
    def __init__(self, at: int) -> None:
        self.at = at

    def __iter__(self) -> Any:
        for number in range(5):
            if number == self.at and rank_and_world()[0] == 1:
                time.sleep(TIMEOUT_S + 8)
            yield torch.randn(4, 8)


def run_case(case: tuple[str, str, int], stage: str = "fit", options: dict[str, Any] | None = None) -> tuple[str, str]:
    """What this rank ended with: the type of its error, and the whole text."""
    _, world = rank_and_world()
    pl.seed_everything(0, verbose=False)
    strategy = tiny.moe_ep(timeout=timedelta(seconds=TIMEOUT_S), **{"expert_parallel_size": world, **(options or {})})
    module = Module(case)
    if case[0] == "data":
        data = DataLoader(Slow(int(case[1])), batch_size=None)
    else:
        data = DataLoader(torch.randn(16, 8), batch_size=4)
    trainer = tiny.trainer(strategy, devices=world, **({"max_epochs": 1} if stage == "fit" else {}))
    error: Exception | None = None
    try:
        getattr(trainer, stage)(module, data)
    except Exception as raised:
        error = raised
    seconds = time.monotonic() - module.started
    if error is None:
        return "", ""
    assert case[0] == "data" or seconds < BOUND_S, f"{seconds} s"
    if isinstance(error, MissingRankError):
        assert isinstance(error.__cause__, RuntimeError)
        assert lost_rank(error.__cause__)
    return type(error).__name__, "\n".join([str(error), *getattr(error, "__notes__", ())])


def expect(text: str, *fragments: str) -> None:
    for fragment in fragments:
        assert fragment in text, f"{fragment!r} is not in:\n{text}"


@pytest.mark.parametrize("layer", [0, 2])
def test_a_rank_that_skips_the_experts_of_a_layer(layer: int) -> None:
    ranks = run_ranks(run_case, 3, ("skip", f"layer {layer}", 1), timeout=60)
    assert {kind for kind, _ in ranks} == {"MissingRankError"}
    for rank in (0, 2):
        expect(
            ranks[rank][1],
            "the ranks do not run the same modules",
            "ranks 0, 2: training step 2 (epoch 0, batch 2), training_step, forward of net.2.moe.experts",
            "rank 1: training step 2 (epoch 0, batch 2), the backward pass",
            f"rank 1 did not call net.2.moe.experts, rank {rank} did"
            if layer == 2
            else f"rank 1 called net.{layer + 1}.moe.experts where rank {rank} called net.{layer}.moe.experts",
            "let every rank call every experts module",
        )
    expect(
        ranks[1][1], "ranks 0, 2 called" if layer == 2 else f"ranks 0, 2 called net.{layer}.moe.experts where rank 1"
    )


@pytest.mark.parametrize("stage", ["validate", "predict"])
def test_a_rank_that_skips_outside_of_training(stage: str) -> None:
    first, _ = run_ranks(run_case, 2, ("skip", "layer 2", 1), stage, timeout=60)
    assert first[0] == "MissingRankError"
    name = {"validate": "val batch 2, validation_step", "predict": "predict batch 2, predict_step"}[stage]
    expect(first[1], f"rank 0: {name}, forward of net.2.moe.experts")


def test_a_rank_that_leaves_the_loop_early() -> None:
    first, second = run_ranks(run_case, 2, ("stop", "training_step", 1), timeout=60)
    assert second == ("", "")
    assert first[0] == "MissingRankError"
    expect(
        first[1],
        "rank 1 did not come to a collective that rank 0 waited in",
        "rank 0: training step 3 (epoch 0, batch 3), training_step, in net",
        "rank 1: no report within 5 s",
        "ranks that take different numbers of steps",
    )


def test_a_rank_that_sleeps_in_user_code() -> None:
    first, second = run_ranks(run_case, 2, ("sleep", "layer 1", 1), timeout=60)
    assert first[0] == "MissingRankError"
    expect(
        first[1],
        "rank 1 did not come",
        "rank 0: training step 2 (epoch 0, batch 2), training_step, forward of net.1.moe.experts",
        "rank 1: no report",
        "timeout=0:00:05",
    )
    assert second[0] == "MissingRankError"
    expect(second[1], "or rank 1 came too late")


def test_a_rank_that_sleeps_in_the_backward_pass() -> None:
    first, _ = run_ranks(run_case, 2, ("sleep", "backward of layer 1", 1), timeout=60)
    assert first[0] == "MissingRankError"
    where = "training step 2 (epoch 0, batch 2), the backward pass, backward of net.1.moe.experts"
    expect(first[1], "rank 1 did not come", f"rank 0: {where}")


@pytest.mark.parametrize(
    ("place", "where"),
    [
        ("training_step", "training_step, in net"),
        ("layer 1", "training_step, forward of net.1.moe.experts"),
        ("hook", "training_step, in net"),
        ("backward of layer 2", "the backward pass"),
    ],
)
def test_a_rank_that_raises_shows_its_own_error(place: str, where: str) -> None:
    first, second = run_ranks(run_case, 2, ("raise", place, 1), timeout=60)
    assert second == ("ValueError", "boom")
    assert first[0] == "MissingRankError"
    expect(first[1], "rank 0 waited in vain: rank 1 raised ValueError: boom", "rank 0: training step 2", where)


def raise_case(case: tuple[str, str, int], options: dict[str, Any] | None = None) -> None:
    raise RuntimeError(": ".join(run_case(case, options=options)))


def errors_beside_a_dead_rank(*args: Any) -> str:
    with pytest.raises(RanksFailedError) as caught:
        run_ranks_expecting_error(raise_case, 2, *args, timeout=60)
    return str(caught.value)


@pytest.mark.parametrize(("dead", "head"), [(0, "the store on rank 0 is gone too"), (1, "rank 1 did not come")])
def test_a_rank_that_dies(dead: int, head: str) -> None:
    alive = 1 - dead
    expect(
        errors_beside_a_dead_rank(("die", "layer 1", dead)),
        f"rank {dead} of 2: Died: exit code -9",
        f"rank {alive} of 2: RuntimeError: MissingRankError: ",
        head,
        f"rank {alive}: training step 2 (epoch 0, batch 2), training_step, forward of net.1.moe.experts",
        f"rank {dead}: no report",
    )


def test_a_rank_that_gloo_aborts() -> None:
    """Where ranks meet in one group with different collectives, gloo itself ends a process."""
    expect(
        errors_beside_a_dead_rank(("skip", "layer 1", 1), {"expert_parallel_size": 1}),
        "rank 1 of 2: Died: exit code -6",
        "Is there a distributed collective mismatch in your code?",
        "rank 0 of 2: RuntimeError: MissingRankError: rank 1 did not come",
        "rank 0: training step 2 (epoch 0, batch 2)",
    )


def test_a_collective_outside_of_a_step() -> None:
    first, second = run_ranks(run_case, 2, ("extra", "epoch end", 0), timeout=60)
    assert second[0] == ""
    assert first[0] == "RuntimeError"
    expect(first[1], "gloo", "rank 1 did not come to a collective that rank 0 waited in", "training step 4")


@pytest.mark.parametrize(
    ("at", "where"), [(0, "agreement on batch 0 of the train dataloader"), (STEP, "training_step, in net")]
)
def test_a_rank_whose_data_do_not_come(at: int, where: str) -> None:
    """It reads ahead, so that the others wait in a step before the one that the batch is for."""
    first, _ = run_ranks(run_case, 2, ("data", str(at), 1), timeout=60)
    assert first[0] == "MissingRankError"
    expect(first[1], "rank 1 did not come", f"rank 0: training step 0 (epoch 0, batch 0), {where}", "rank 1: no report")


def fail_alike_then_leave() -> list[tuple[str, str]]:
    rank, _ = rank_and_world()
    results = [run_case(("raise", "training_step", rank)), run_case(("none", "", 0))]
    return [*results, run_case(("stop", "training_step", 1))]


def test_reports_of_before_are_forgotten() -> None:
    first, second = run_ranks(fail_alike_then_leave, 2, timeout=90)
    assert first[0] == second[0] == ("ValueError", "boom")
    assert first[1] == second[1] == ("", "")
    expect(first[2][1], "rank 1 did not come", "rank 1: no report")
    assert "boom" not in first[2][1]


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"), True),
        (RuntimeError("Application timeout caused pair closure"), True),
        (dist.DistBackendError("NCCL communicator was aborted on rank 1"), True),
        (RuntimeError("size mismatch"), False),
        (ConnectionResetError("Connection reset by peer"), False),
        (TimeoutError("the tokenizer server"), False),
    ],
)
def test_which_errors_mean_a_lost_rank(error: BaseException, lost: bool) -> None:
    assert lost_rank(error) is lost
