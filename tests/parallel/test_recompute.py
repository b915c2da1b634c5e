"""Activation checkpointing and compilation change memory and time, and nothing else."""

from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_moe.nn import GroupedExperts, MoE
from lightning_moe.parallel.recompute import checkpoint_block, in_recompute
from tests import tiny
from tests.harness import in_subprocess, run_ranks, run_ranks_expecting_error
from tests.test_parity import assert_same
from tests.test_strategy import fit, rank_and_world


class CountExchanges:
    """Counts all-to-all exchanges on the wire while it is active."""

    def __enter__(self) -> "CountExchanges":
        self.calls, self._original = 0, dist.all_to_all_single

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return self._original(*args, **kwargs)

        dist.all_to_all_single = counted
        return self

    def __exit__(self, *_: Any) -> None:
        dist.all_to_all_single = self._original


class WithDropout(tiny.TinyLM):
    """Draws random numbers in the blocks, adds the auxiliary loss of the model, and takes three experts."""

    def __init__(self) -> None:
        build = partial(
            tiny.qwen3_moe,
            attention_dropout=0.1,
            output_router_logits=True,
            router_aux_loss_coef=0.5,
            num_experts_per_tok=3,
        )
        super().__init__(tiny.sgd, build, keep_gradients=True)


def train(options: dict[str, Any] | None, dropout: bool) -> dict[str, Any]:
    rank, world = rank_and_world()
    pl.seed_everything(0, verbose=False)
    module: Any = WithDropout() if dropout else tiny.TinyLM(keep_gradients=True)
    strategy = "auto" if options is None else tiny.moe_ep(**options)
    data = [tiny.loader(tiny.tokens(4), rank, world) for _ in range(2)]
    trainer = tiny.trainer(strategy, devices=world, max_steps=4, val_check_interval=2, gradient_clip_val=0.5)
    with CountExchanges() as exchanges:
        trainer.fit(module, *data)
    result = {
        "losses": module.losses,
        "norms": module.norms,
        "gradients": module.gradients,
        "weights": tiny.weights(module),
        "exchanges": exchanges.calls,
        "random": torch.get_rng_state().tolist(),
    }
    if options is not None:
        result["load"] = {e.name: e.load.tolist() for e in trainer.strategy._sharded.experts}
    return result


@pytest.mark.parametrize(("world", "expert"), [(2, 2), (4, 2)])
def test_recompute_is_exact_for_every_layout(world: int, expert: int) -> None:
    reference = run_ranks(train, 1, None, False)[0]
    for mode in ("full", "selective"):
        options = {"expert_parallel_size": expert, "activation_checkpointing": mode}
        assert_same([run_ranks(train, world, options, False)[0]], [reference])


def test_loads_auxiliary_loss_and_random_state_are_those_without_recompute() -> None:
    runs = {}
    for mode in ("none", "full", "selective"):
        runs[mode] = run_ranks(train, 2, {"expert_parallel_size": 2, "activation_checkpointing": mode}, True)
    for mode in ("full", "selective"):
        for got, want in zip(runs[mode], runs["none"], strict=True):
            for key in ("losses", "norms", "load", "random"):
                assert got[key] == want[key], (mode, key)
            for kind in ("gradients", "weights"):
                assert all(torch.equal(got[kind][name], tensor) for name, tensor in want[kind].items()), (mode, kind)
    tokens = 4 * tiny.BATCH * tiny.LENGTH
    for layer in runs["none"][0]["load"]:
        counted = sum(sum(rank["load"][layer]) for rank in runs["full"])
        assert counted == tokens * 3, "each choice of the training steps once; validation does not count"
    exchanged = {mode: run[0]["exchanges"] for mode, run in runs.items()}
    assert exchanged["selective"] == exchanged["none"], "communication is kept"
    assert exchanged["full"] > exchanged["none"], "and done again where it is not"


def buffered(scores: Tensor) -> tuple[Tensor, Tensor]:
    values, index = torch.empty(len(scores), 2), torch.empty(len(scores), 2, dtype=torch.long)
    torch.topk(scores.detach(), 2, out=(values, index))
    return scores.gather(1, index), index


def drawn(scores: Tensor) -> tuple[Tensor, Tensor]:
    index = torch.multinomial(scores, 2)
    return torch.nn.functional.dropout(scores.gather(1, index), 0.2), index


# Ways to choose two experts, as routers do.
CHOICES: dict[str, Any] = {
    "topk": lambda scores: scores.topk(2, dim=-1),
    "topk by names": lambda scores: torch.topk(input=scores, k=2, dim=1),
    "topk into buffers": buffered,
    "sort": lambda scores: tuple(part[:, :2] for part in scores.sort(-1, descending=True)),
    "argsort": lambda scores: (scores.gather(1, i := scores.argsort(-1, descending=True)[:, :2]), i),
    "argmax": lambda scores: (scores.gather(1, i := scores.argmax(-1, keepdim=True)), i),
    "max": lambda scores: tuple(part.unsqueeze(1) for part in scores.max(-1)),
    "max, kept": lambda scores: tuple(torch.max(scores, 1, keepdim=True)),
    "a draw": drawn,
}


class Undecided(nn.Module):
    """A router that would choose other experts the second time that it is asked."""

    def __init__(self, choose: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 16))
        self.choose = CHOICES[choose]
        self.asked = 0
        self.undecided = True

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = x @ self.weight.t()
        noise = torch.rand(logits.shape, generator=torch.Generator().manual_seed(self.asked))
        self.asked += self.undecided
        scores = (logits - logits.max() + noise).softmax(-1)
        values, index = self.choose(scores)
        weights = values * 1
        weights /= weights.sum(-1, keepdim=True) + 1e-6  # in place, as many models do
        return logits, torch.maximum(weights, weights.min() * 0), index


class Block(nn.Module):
    def __init__(self, choose: str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.router = Undecided(choose)
        self.experts = GroupedExperts(8, 16, 8)
        self.chosen: list[list[Any]] = []
        self.drawn: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        _, weights, index = self.router(self.norm(x))
        self.chosen.append([in_recompute(), index.tolist()])
        noise = torch.rand(4)
        self.drawn.append(noise)
        # Not the last operation of the block, so that the recomputation has to pass the experts.
        return x + torch.tanh(self.experts(x, index, weights)) * noise.sum()


@pytest.mark.parametrize("choose", CHOICES)
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recompute_takes_the_experts_of_the_forward(mode: Any, choose: str) -> None:
    torch.manual_seed(0)
    block, x = Block(choose), torch.randn(12, 16, requires_grad=True)
    checkpoint_block(block, mode)
    for _ in range(2):
        block(x).square().sum().backward()
    (first, second), (third, fourth) = block.chosen[:2], block.chosen[2:]
    assert [first[0], second[0], third[0], fourth[0]] == [False, True, False, True]
    assert first[1] == second[1]
    assert third[1] == fourth[1]
    assert first[1] != third[1], "the router must be undecided for this to mean anything"
    assert torch.equal(block.drawn[0], block.drawn[1])


@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_two_backward_passes_of_one_graph(mode: Any) -> None:
    torch.manual_seed(0)
    block, x = Block("topk"), torch.randn(12, 16, requires_grad=True)
    block.router.undecided = False
    checkpoint_block(block, mode)
    out = block(x)
    out.sum().backward(retain_graph=True)
    first = x.grad.clone()
    out.sum().backward()
    torch.testing.assert_close(x.grad, 2 * first)


class Penalty(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = MoE(8, 8, 4, 2)

    def training_step(self, x: Tensor, index: int) -> Tensor:
        x = x.requires_grad_()
        loss = self.layer(x).square().mean()
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + gradient.square().sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit_penalty() -> None:
    trainer = tiny.trainer(tiny.moe_ep(expert_parallel_size=2), devices=2, max_steps=1)
    trainer.fit(Penalty(), torch.utils.data.DataLoader(torch.randn(4, 8), batch_size=2))


def test_gradients_of_gradients_are_refused() -> None:
    errors = run_ranks_expecting_error(fit_penalty, 2, timeout=60)
    assert all("create_graph=True" in error for error in errors), errors


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        out = torch.nn.functional.scaled_dot_product_attention(x, x, x)
        out *= 2
        return torch.tanh(out) * self.weight


def test_selective_refuses_a_kept_result_that_was_changed() -> None:
    block = InPlace()
    checkpoint_block(block, "selective")
    with pytest.raises(RuntimeError, match=r"changed it in place; set activation_checkpointing='full'"):
        block(torch.randn(1, 1, 4, 8, requires_grad=True)).sum().backward()


def fit_own_checkpointing() -> None:
    module = tiny.TinyLM()
    module.net.gradient_checkpointing_enable()
    fit(module, tiny.moe_ep(activation_checkpointing="full"))


class NoBlocks(tiny.TinyLM):
    def __init__(self) -> None:
        super().__init__(build=partial(nn.Linear, 4, 4))


def fit_no_blocks() -> None:
    fit(NoBlocks(), tiny.moe_ep(activation_checkpointing="full"))


def test_options_that_do_not_fit() -> None:
    errors = run_ranks_expecting_error(fit_own_checkpointing, 2, timeout=60)
    assert all("'net.model'" in e and "gradient_checkpointing_enable()" in e for e in errors), errors
    assert all("block_classes" in e for e in run_ranks_expecting_error(fit_no_blocks, 2, timeout=60))
    with pytest.raises(ValueError, match="activation_checkpointing='some' is not known; allowed are 'none', 'full'"):
        tiny.moe_ep(activation_checkpointing="some")
    assert all("compile=True cannot be combined" in e for e in run_ranks_expecting_error(fit_both, 1, timeout=60))


def fit_both() -> None:
    fit(tiny.TinyLM(), tiny.moe_ep(activation_checkpointing="selective", compile=True))


def has_compiler() -> bool:
    script = "from torch._inductor.cpp_builder import get_cpp_compiler; get_cpp_compiler()"
    import sys

    return in_subprocess([sys.executable, "-c", script], timeout=60).returncode == 0


def train_compiled(mode: str) -> dict[str, Any]:
    import torch._dynamo.utils

    result = train({"expert_parallel_size": 2, "activation_checkpointing": mode, "compile": True}, False)
    return {**result, "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"]}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["none", "full"])
def test_compiled_blocks_train_alike(mode: str) -> None:
    if not has_compiler():
        pytest.skip("no C++ compiler, which torch.compile needs on a CPU")
    reference = run_ranks(train, 1, None, False)[0]
    compiled = run_ranks(train_compiled, 2, mode, timeout=280)[0]
    assert compiled["graphs"] > 0
    assert_same([compiled], [reference])
