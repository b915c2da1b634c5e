"""What a rank does while rows travel, and what it costs on a slow link."""

import os
import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from lightning_moe.dispatch import once_per_rank
from lightning_moe.dispatch.all_to_all import AllToAllDispatcher
from lightning_moe.nn import GroupedExperts, MoE, TopKRouter
from lightning_moe.parallel.late import LateScope, LateTensor, on_time
from tests import tiny
from tests.dispatch.slow_link import Link, SlowLinkDispatcher
from tests.harness import run_ranks


class Logged(Link):
    """A link that writes down when something leaves and when this rank waits for it."""

    def __init__(self, log: list[str]) -> None:
        super().__init__(None)
        self.log = log

    def carry(self, num_bytes: int, flight: Any, asynchronous: bool) -> Any:
        if num_bytes == 0:
            return flight
        number = sum("leaves" in line for line in self.log)
        self.log.append(f"{number} leaves")
        return flight.then(lambda rows: (self.log.append(f"{number} arrives"), rows)[1])


class Step(torch.autograd.Function):
    """Writes down when its forward and its backward run."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, log: list[str], name: str) -> Tensor:
        ctx.log, ctx.name = log, name
        log.append(name)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.log.append(f"{ctx.name} backward")
        return grad, None, None


class Shared(nn.Module):
    """A shared expert that takes its time."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.log: list[str] = []
        self.seconds = 0.0

    def forward(self, hidden: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return Step.apply(self.linear(hidden), self.log, "shared")


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.ModuleDict({"moe": MoE(16, 16, num_experts=4, top_k=2, shared_expert=Shared(16))})
        self.results: dict[str, Any] = {}

    def training_step(self, batch: Tensor) -> Tensor:
        start = time.perf_counter()
        loss = self.block["moe"](batch).square().mean()
        self.results["forward"] = time.perf_counter() - start
        return loss

    def on_after_backward(self) -> None:
        self.results["gradients"] = {name: full(p.grad) for name, p in self.named_parameters()}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def full(tensor: Any) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def train(strategy: Any, module: pl.LightningModule) -> None:
    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    batches = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(1))
    mine = batches.flatten(0, 1)[rank::world]
    tiny.trainer(strategy, devices=world, max_steps=1).fit(module, torch.utils.data.DataLoader(mine, len(mine)))


def trained(options: dict[str, Any] | None) -> dict[str, Any]:
    """The gradients of one step, and what happened in which order."""
    pl.seed_everything(0, verbose=False)
    module, log = Net(), []
    module.block["moe"].shared_expert.log = log
    if options is None:
        train("auto", module)
    else:
        link = Logged(log)
        train(tiny.moe_ep(expert_parallel_size=2, dispatcher=SlowLinkDispatcher(link, False), **options), module)
    return {"log": log, **module.results}


def travels(log: list[str]) -> str:
    """The order of events with what leaves as ``>`` and what arrives as ``<``, the shared expert as ``S`` and ``s``."""
    signs = {"leaves": ">", "arrives": "<", "shared": "S", "backward": "s"}
    return "".join(signs[line.split()[-1]] for line in log)


@pytest.mark.parametrize(
    ("options", "order"),
    [
        # Rows and weights out and in, rows home; backward: gradients of rows out, those of rows and weights home.
        ({}, ">><<>S<" + ">s<>><<"),
        ({"overlap_shared_experts": False}, ">><<><S" + "s><>><<"),
        ({"dispatch_chunks": 2}, ">>>><<><<>S<<" + ">>s<>><>><<<<"),
        ({"activation_checkpointing": "full", "block_classes": ["MoE"]}, None),
        ({"activation_checkpointing": "selective", "block_classes": ["MoE"], "dispatch_chunks": 2}, None),
    ],
)
def test_the_shared_expert_runs_while_the_results_of_the_others_travel(options: dict[str, Any], order: str) -> None:
    (reference,) = run_ranks(trained, 1, None)
    for got in run_ranks(trained, 2, options):
        assert order is None or travels(got["log"]) == order
        for name, gradient in reference["gradients"].items():
            torch.testing.assert_close(got["gradients"][name], gradient, rtol=1e-5, atol=1e-7)


def seconds(chunks: int) -> float:
    """Of one forward, of experts and a link that take as long as each other."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    link = Link(None)
    dispatcher = SlowLinkDispatcher(link, False)
    dispatcher.setup(dist.group.WORLD, num_experts=2, hidden_size=256, dtype=torch.float32)
    hidden, weights = torch.randn(800, 256), torch.ones(800, 1)
    index = torch.full((800, 1), 1 - int(os.environ["RANK"]))  # every row to the other rank
    sizes = [800 // chunks] * chunks
    dist.barrier()
    link.bytes_per_second = 800 * 257 * 4 / 0.4
    start = time.perf_counter()
    flights = dispatcher.start(list(zip(hidden.split(sizes), index.split(sizes), weights.split(sizes), strict=True)))
    homeward = []
    for flight in flights:
        dispatched = flight.wait()
        time.sleep(0.8 / chunks)
        homeward.append(dispatcher.start_combine(dispatched.rows, dispatched.state))
    out = torch.cat([flight.wait() for flight in homeward])
    taken = time.perf_counter() - start
    torch.testing.assert_close(out, hidden)
    return taken


def test_parts_hide_a_slow_link() -> None:
    # One part: 0.4 s there, 0.8 s of computation, 0.4 s home. Four: 0.1 s, 0.8 s, 0.1 s.
    one, four = (max(run_ranks(seconds, 2, chunks)) for chunks in (1, 4))
    assert one > 1.6
    assert four < 0.85 * one


# A tensor that is late


def late(value: Tensor, log: list[str]) -> LateTensor:
    return LateTensor(value, value.shape, value.requires_grad, lambda: (log.append("waited"), value * 1)[1])


def test_a_late_tensor_can_be_asked_what_it_is_and_viewed() -> None:
    log: list[str] = []
    value = torch.arange(6.0).requires_grad_()
    promised = late(value, log)
    assert (promised.shape, promised.dtype, promised.requires_grad, promised.dim()) == ((6,), torch.float32, True, 1)
    seen: list[Tensor] = []
    table = promised.view(2, 3).reshape(3, -1)
    table.register_hook(seen.append)
    assert table.shape == (3, 2)
    assert not log
    result = torch.ones(3, 2) + table
    assert log == ["waited"]
    torch.testing.assert_close(result, value.view(3, 2) + 1)
    (result * promised.view(3, 2)).sum().backward()
    assert log == ["waited"]
    torch.testing.assert_close(value.grad, 2 * torch.arange(6.0) + 1)
    assert len(seen) == 1


def test_a_view_without_gradients_has_none_and_inference_mode_changes_nothing() -> None:
    value = torch.ones(3, requires_grad=True)
    promised = late(value, [])
    with torch.no_grad():
        view = promised.view(3, 1)
    with torch.inference_mode():
        assert float(promised.sum()) == 3
    (promised + view.squeeze(1)).sum().backward()
    assert value.grad.tolist() == [1, 1, 1]


class Hides(nn.Module):
    """Returns a result in an object that nobody looks into, and does not use another."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []
        self.scope = LateScope(self)

    def forward(self, value: Tensor) -> Any:
        self.scope.promise(late(value, self.log))
        return SimpleNamespace(hidden=self.scope.promise(late(value, self.log)))


def test_nothing_that_is_late_leaves_the_block() -> None:
    block = Hides()
    block(torch.ones(3))
    assert block.log == ["waited"] * 2


def test_a_late_tensor_that_is_changed_in_place_is_a_tensor() -> None:
    value = torch.ones(3, requires_grad=True)
    out = late(value, [])
    out += 1
    assert type(out) is Tensor
    torch.testing.assert_close(on_time(out), torch.full((3,), 2.0))


def test_a_late_tensor_past_the_overrides_is_an_error_and_no_wrong_number() -> None:
    out = Step.apply(late(torch.ones(3, requires_grad=True), []), [], "step")
    with pytest.raises(RuntimeError, match="set overlap_shared_experts=False"):
        out.sum().backward()


def test_a_hook_of_a_late_tensor_can_be_removed() -> None:
    value, seen = torch.ones(3, requires_grad=True), []
    promised = late(value, [])
    first, second = (promised.register_hook(lambda _, name=name: seen.append(name)) for name in "ab")
    first.remove()
    promised.register_hook(hook=lambda _: seen.append("c"))
    loss = promised.sum()
    second.remove()
    loss.backward()
    assert seen == ["c"]


def test_a_view_of_another_dtype_has_it_at_once() -> None:
    bits = late(torch.ones(2, 4), []).view(torch.int16)
    assert (bits.dtype, bits.shape) == (torch.int16, (2, 8))


def test_a_late_tensor_that_is_first_looked_at_without_gradients_has_its_graph() -> None:
    value = torch.ones(3, requires_grad=True)
    promised = late(value, [])
    with torch.no_grad():
        assert float(promised.sum()) == 3
    (promised * 2).sum().backward()
    assert value.grad.tolist() == [2, 2, 2]


class InARow(nn.Module):
    """A block whose experts feed others, which FSDP2 shards, too."""

    def __init__(self) -> None:
        super().__init__()
        self.router = TopKRouter(16, 4, 2)
        self.experts, self.more_experts = (GroupedExperts(4, 16, 16) for _ in range(2))
        self.linear = nn.Linear(16, 16)

    def forward(self, hidden: Tensor) -> Tensor:
        _, weights, index = self.router(hidden)
        first = self.experts(hidden, index, weights)
        self.was_late = isinstance(first, LateTensor)
        return self.more_experts(first, index, weights) + self.linear(hidden)


class InARowNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.block["moe"] = InARow()


def in_a_row(overlap: bool) -> dict[str, Tensor]:
    pl.seed_everything(0, verbose=False)
    module = InARowNet()
    options = {"overlap_shared_experts": overlap, "block_classes": ["InARow"]}
    train(tiny.moe_ep(expert_parallel_size=2, **options), module)
    assert module.block["moe"].was_late == overlap
    return module.results["gradients"]


def test_what_feeds_other_experts_of_the_block_is_on_time() -> None:
    plain, late_ones = (run_ranks(in_a_row, 2, overlap)[0] for overlap in (False, True))
    assert plain.keys() == late_ones.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(late_ones[name], gradient, rtol=1e-5, atol=1e-7)


def hooked() -> None:
    """A full backward hook of the experts is an autograd.Function around their result."""
    pl.seed_everything(0, verbose=False)
    module, seen = Net(), []
    module.block["moe"].experts.register_full_backward_hook(lambda *_: seen.append(1))
    train(tiny.moe_ep(expert_parallel_size=2), module)
    assert seen


def test_experts_with_a_backward_hook_are_on_time() -> None:
    run_ranks(hooked, 2)


def fit_without_parts(chunks: Any) -> None:
    tiny.moe_ep(dispatch_chunks=chunks)


@pytest.mark.parametrize("chunks", [0, -1, 1.5, True])
def test_a_wrong_number_of_parts_is_refused(chunks: Any) -> None:
    with pytest.raises(ValueError, match=r"dispatch_chunks=.* must be a positive number"):
        fit_without_parts(chunks)


# Weights


def gathered(prefetch_blocks: Any) -> list[str]:
    """The units of a forward as they are gathered, with the waits for the host between."""
    order: list[str] = []
    unshard, exchange = FSDPParamGroup.unshard, once_per_rank.exchange_tables

    def logged_unshard(group: FSDPParamGroup, *args: Any, **kwargs: Any) -> Any:
        if group.is_sharded:
            order.append(group._module_fqn.removeprefix("model."))
        return unshard(group, *args, **kwargs)

    def logged_exchange(*args: Any) -> Any:
        order.append("wait for the host")
        return exchange(*args)

    class FirstForward(tiny.TinyLM):
        def training_step(self, *args: Any) -> Any:
            order.clear()
            loss = super().training_step(*args)
            order.append("end")
            return loss

    module = FirstForward()
    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    strategy = tiny.moe_ep(
        expert_parallel_size=2, prefetch_blocks=prefetch_blocks, dispatcher=AllToAllDispatcher(deduplicate=True)
    )
    trainer = tiny.trainer(strategy, devices=world, max_steps=1)
    with (
        patch.object(FSDPParamGroup, "unshard", logged_unshard),
        patch.object(once_per_rank, "exchange_tables", logged_exchange),
    ):
        trainer.fit(module, tiny.loader(tiny.tokens(1), rank, world))
    return order[: order.index("end")]


def test_the_next_block_is_gathered_before_the_experts_of_one_wait_for_the_host() -> None:
    def before_the_first_wait(order: list[str]) -> set[str]:
        return set(order[: order.index("wait for the host")])

    late = before_the_first_wait(run_ranks(gathered, 4, 0)[0])
    early = before_the_first_wait(run_ranks(gathered, 4, 1)[0])
    assert "layers.0" in late
    assert early - late == {"layers.1", "layers.1.mlp.experts"}


@pytest.mark.parametrize("blocks", [-1, True, "one", 1.0])
def test_a_wrong_number_of_blocks_is_refused(blocks: Any) -> None:
    with pytest.raises(ValueError, match=r"prefetch_blocks=.* must be 'auto' or a number of blocks"):
        tiny.moe_ep(prefetch_blocks=blocks)


# Recompute


class SortsAfterwards(MoE):
    """Makes a choice of its own after the experts, of as many numbers as the dispatcher sorts."""

    def forward(self, hidden: Tensor) -> Tensor:
        both = torch.cat((super().forward(hidden), hidden))
        order = torch.argsort(both.sum(-1))
        scaled = both[order] * torch.linspace(0, 1, len(both)).unsqueeze(1)
        return hidden + scaled[: len(hidden)] + scaled[len(hidden) :]


def sorted_gradients(mode: str) -> dict[str, Tensor]:
    pl.seed_everything(0, verbose=False)
    module = Net()
    module.block["moe"] = SortsAfterwards(16, 16, num_experts=4, top_k=2)
    options = {"activation_checkpointing": mode, "block_classes": ["SortsAfterwards"]}
    train(tiny.moe_ep(expert_parallel_size=2, dispatcher=AllToAllDispatcher(False), **options), module)
    return module.results["gradients"]


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_orders_of_the_dispatcher_are_not_taken_for_choices_of_the_block(mode: str) -> None:
    plain, again = (run_ranks(sorted_gradients, 2, kind)[0] for kind in ("none", mode))
    for name, gradient in plain.items():
        torch.testing.assert_close(again[name], gradient, rtol=1e-5, atol=1e-7)


class RootBlocks(pl.LightningModule):
    """Calls its blocks itself: each is a root of FSDP2."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([MoE(16, 16, num_experts=4, top_k=2) for _ in range(3)])

    def training_step(self, batch: Tensor) -> Tensor:
        for layer in self.layers:
            batch = batch + layer(batch)
        return batch.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def fit_root_blocks() -> None:
    train(tiny.moe_ep(expert_parallel_size=2, prefetch_blocks=1, block_classes=["MoE"]), RootBlocks())


def test_blocks_that_are_roots_are_not_gathered_ahead() -> None:
    run_ranks(fit_root_blocks, 2)


class Stack(nn.Module):
    """Returns what its last block returns, so that FSDP2 gathers that block before the rest of this module."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([MoE(16, 16, num_experts=5, top_k=2) for _ in range(3)])
        self.norm = nn.LayerNorm(16)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.norm(hidden)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


class StackNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.ModuleDict({"moe": Stack()})


def stacked(options: dict[str, Any] | None) -> dict[str, Tensor]:
    pl.seed_everything(0, verbose=False)
    module = StackNet()
    train("auto" if options is None else tiny.moe_ep(block_classes=["MoE"], **options), module)
    return module.results["gradients"]


def test_a_rank_without_experts_gathers_in_the_order_of_the_others() -> None:
    """In the backward pass FSDP2 by itself gathers ahead in an order that depends on what a rank holds."""
    plain = run_ranks(stacked, 1, None)[0]
    for options in ({}, {"prefetch_blocks": 1}):
        for gradients in run_ranks(stacked, 4, {"expert_parallel_size": 4, **options}, timeout=60):
            for name, gradient in plain.items():
                torch.testing.assert_close(gradients[name], gradient, rtol=1e-5, atol=1e-7)
