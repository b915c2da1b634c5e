"""The DeepEP dispatchers over stand-ins of its four APIs, which run on gloo and have the signatures of the releases."""

import gc
import inspect
import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_moe import ExpertParallelStrategy, optional
from lightning_moe.dispatch import build_dispatcher, dispatcher_options
from lightning_moe.dispatch.deepep import DeepEPDispatcher, HybridEPDispatcher
from tests import tiny
from tests.dispatch import cases as parity
from tests.dispatch.fakes import deepep_gloo, deepep_hybrid, deepep_v1, deepep_v2
from tests.dispatch.fakes.extract_signatures import RECORD
from tests.harness import run_ranks, run_ranks_expecting_error

E, K, H = parity.E, parity.K, 256
BOTH = (torch.bfloat16, torch.float32)

# What the package deep_ep has in a release; the dispatcher takes the newest class.
RELEASES: dict[str, dict[str, Any]] = {
    "v1_0": {"Buffer": deepep_v1.OldBuffer},
    "v1": {"Buffer": deepep_v1.Buffer},
    "v2": {"Buffer": deepep_v1.Buffer, "ElasticBuffer": deepep_v2.ElasticBuffer},
    "v2_5": {"EPBuffer": deepep_v2.EPBuffer},
    "hybrid": {"Buffer": deepep_v1.Buffer, "HybridEPBuffer": deepep_hybrid.HybridEPBuffer},
}


def begin(release: str, dtypes: tuple[torch.dtype, ...] = BOTH) -> tuple[deepep_gloo.Library, int, int]:
    """The library, the rank and the number of ranks."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return deepep_gloo.install(RELEASES[release], dtypes), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def on_cpu(release: str, dtypes: tuple[torch.dtype, ...] = BOTH, **options: Any) -> DeepEPDispatcher:
    """The dispatcher where the stand-in runs; float32 lets results be compared to rounding."""
    dispatcher = HybridEPDispatcher(**options) if release == "hybrid" else DeepEPDispatcher(**options)
    dispatcher.caps = replace(dispatcher.caps, payload_dtypes=dtypes, device_types=("cpu",))
    return dispatcher


def layer(dispatcher: DeepEPDispatcher, dtype: torch.dtype = torch.float32, **changes: Any) -> DeepEPDispatcher:
    made = dispatcher.for_layer()
    made.setup(dist.group.WORLD, **{"num_experts": E, "hidden_size": H, "dtype": dtype, **changes})
    return made


def random_call(rank: int, num_tokens: int, top_k: int = K) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    index = torch.rand(num_tokens, E, generator=generator).argsort(1)[:, :top_k].contiguous()
    return torch.randn(num_tokens, H, generator=generator), index, torch.rand(index.shape, generator=generator)


# The signatures


@pytest.mark.parametrize("release", RELEASES)
def test_the_stand_in_has_the_signatures_of_the_release(release: str) -> None:
    recorded = json.loads(RECORD.read_text())[release]
    stand_in = RELEASES[release][recorded["class"]]
    for name, signature in recorded["methods"].items():
        parameters = inspect.signature(getattr(stand_in, name)).parameters.values()
        assert [
            [p.name, p.kind.name, None if p.default is p.empty else repr(p.default)]
            for p in parameters
            if p.name != "self"
        ] == signature, name


# The same as a dense computation


def all_cases(release: str) -> dict[tuple[str, torch.dtype], dict[str, Tensor]]:
    library, rank, world = begin(release)
    results = {}
    for dtype, cases in ((torch.float32, parity.CASES), (torch.bfloat16, ("random", "uneven", "dropped choices"))):
        library.dtypes = (dtype,)
        dispatcher = on_cpu(release)
        for case in cases:
            results[case, dtype] = parity.through(layer(dispatcher, dtype), case, dtype, rank, world, H)
        gc.collect()
        assert not library.routes, "handles that nobody needs"
        dispatcher.finalize()
    return results


@pytest.mark.parametrize(("release", "world"), [("v1_0", 2), *((r, w) for r in list(RELEASES)[1:] for w in (2, 4))])
def test_same_as_dense(release: str, world: int) -> None:
    ranks = run_ranks(all_cases, world, release, timeout=100)
    for rank, results in enumerate(ranks):
        for (case, dtype), got in results.items():
            for key, want in dense(case, world)[rank].items():
                # The gradient of a weight is float32 in both, but in bfloat16 it is that of bfloat16 rows.
                tolerance = 1e-5 if dtype == torch.float32 else 4e-2
                assert key != "weights" or got[key].dtype == torch.float32
                largest = float(want.abs().max()) if want.numel() else 0.0
                torch.testing.assert_close(
                    got[key].float(),
                    want,
                    rtol=0,
                    atol=tolerance * largest,
                    msg=lambda m, at=f"{case}, {key}, {dtype}": f"{at}: {m}",
                )


@cache
def dense(case: str, world: int) -> list[dict[str, Tensor]]:
    """The results of each rank at this file's width."""
    return parity.dense(case, world, H)


def what_arrives(release: str) -> None:
    _, rank, world = begin(release)
    served = layer(on_cpu(release))
    hidden, index, weights = random_call(rank, 7)
    index[0], index[1, 1] = -1, -1
    chosen = torch.bincount(index.flatten() + 1, minlength=E + 1)[1:]
    received = served._transport.send(hidden, index, weights, chosen, None, False).wait()
    here = torch.zeros(received.weights.numel(), dtype=torch.bool)
    here[slice(None) if received.local.order is None else received.local.order] = True
    assert received.weights.dtype == torch.float32
    assert ((received.weights.flatten() > 0) == here).all(), "a choice of another rank has no weight"
    told = [torch.empty_like(chosen) for _ in range(world)]
    dist.all_gather(told, chosen)
    mine = torch.stack(told).sum(0).chunk(world)[rank].tolist()
    assert received.tokens_per_expert_host == received.local.tokens_per_expert.tolist() == mine
    before = index.clone()
    index.zero_()  # what a caller does with its tensor afterwards changes nothing
    if release != "hybrid":
        back, _ = received.handle.buffer.combine(x=received.rows, handle=received.handle.handle)[:2]
        visits = torch.stack([((before // (E // world)) == r).any(1) & (before >= 0).any(1) for r in range(world)])
        torch.testing.assert_close(back, hidden * visits.sum(0)[:, None])


def twice_the_same_expert(release: str) -> dict[str, Tensor]:
    _, rank, _ = begin(release)
    served = layer(on_cpu(release))
    hidden, index, weights = random_call(rank, 5)
    index[:, 1] = index[:, 0]
    weights.requires_grad_()
    d = served.dispatch(hidden, index, weights)
    out = served.combine(d.rows * d.row_weights[:, None], d.state)
    out.square().sum().backward()
    want = hidden * weights.sum(1, keepdim=True)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(weights.grad, (2 * want.detach() * hidden).sum(1, keepdim=True).expand_as(weights))
    return {}


def test_an_expert_chosen_twice_counts_twice() -> None:
    run_ranks(twice_the_same_expert, 2, "hybrid")


def recomputed(release: str) -> None:
    """Rows must come in the order of the first forward, whose route the backward takes."""
    library, rank, world = begin(release)
    served = layer(on_cpu(release))
    gradients = []
    for recompute in (False, True):
        index, weights = parity.routing("random", rank, world)
        hidden = parity.tokens_of(rank, len(index), H).requires_grad_()
        local = parity.expert_weights(H).chunk(world)[rank].requires_grad_()

        def moe(hidden: Tensor, weights: Tensor, index: Tensor = index, local: Tensor = local) -> Tensor:
            d = served.dispatch(hidden, index, weights)
            rows = parity.compute(d.rows, d.tokens_per_expert, local) * d.row_weights[:, None]
            return served.combine(rows, d.state)

        weights.requires_grad_()
        out = checkpoint(moe, hidden, weights, use_reentrant=False) if recompute else moe(hidden, weights)
        out.square().sum().backward()
        gradients.append((hidden.grad, weights.grad, local.grad))
    for plain, again in zip(*gradients, strict=True):
        torch.testing.assert_close(again, plain, rtol=0, atol=1e-5 * float(plain.abs().max()))
    assert library.log.count("dispatch 1") == 3


def one_by_one(release: str) -> None:
    what_arrives(release)
    recomputed(release)


@pytest.mark.parametrize("release", list(RELEASES)[1:])
def test_choices_of_other_ranks_have_no_expert_and_no_weight_and_forwards_can_be_recomputed(release: str) -> None:
    run_ranks(one_by_one, 2, release)


# Buffers


def life_of_the_buffers(release: str) -> list[str]:
    library, rank, _ = begin(release)
    dispatcher = on_cpu(release)
    dispatcher.finalize()
    assert library.log == [], "nothing to destroy, and no collective"
    layers = [layer(dispatcher), layer(dispatcher), layer(dispatcher, hidden_size=2 * H)]
    for _ in range(2):
        for served in layers[:: -1 if release == "v1" else 1]:
            hidden, index, weights = random_call(rank, 4)
            hidden = hidden.repeat(1, 2)[:, : served._transport.layer.hidden_size]
            d = served.dispatch(hidden, index, weights)
            served.combine(d.rows, d.state)
            del d
        for served in layers:
            served.finalize()
        dispatcher.finalize()
        gc.collect()
    return [entry for entry in library.log if entry.split()[0] in ("open", "destroy", "free")]


@pytest.mark.parametrize("release", RELEASES)
def test_layers_share_buffers_which_are_destroyed_once_in_one_order_and_opened_again(release: str) -> None:
    end = {"v1_0": ["free {}"], "hybrid": []}.get(release, ["destroy {}"])
    lives = [f"open {n}" for n in (1, 2)] + [line.format(n) for n in (1, 2) for line in end]
    lives += [f"open {n}" for n in (3, 4)] + [line.format(n) for n in (3, 4) for line in end]
    assert run_ranks(life_of_the_buffers, 2, release) == [lives, lives]


def options_given(release: str, options: dict[str, Any]) -> dict[str, Any]:
    library, rank, _ = begin(release)
    served = layer(on_cpu(release, **options))
    d = served.dispatch(*random_call(rank, 4))
    handle = d.state.way.handle.handle
    return {
        **library.made[0],
        "sms": deepep_v1.Buffer.num_sms if "v1" in release else getattr(handle, "num_sms", None),
    }


def test_options_and_what_a_version_knows_reach_the_library() -> None:
    both = {"num_sms": 8, "num_qps": 6}
    assert run_ranks(options_given, 2, "v1_0", both)[1].items() >= {"num_qps": 6, "sms": 8, "explicitly": False}.items()
    assert run_ranks(options_given, 2, "v1", {})[0].items() >= {"num_qps": 24, "sms": 20, "explicitly": True}.items()
    expected = {"tokens": 256, "num_qps": 6, "explicitly": True, "sms": 8}
    assert run_ranks(options_given, 2, "v2", {**both, "max_tokens_per_rank": 256}) == [expected] * 2
    assert run_ranks(options_given, 2, "v2_5", {})[0].items() >= {"tokens": 128, "num_qps": 0, "sms": 24}.items()
    assert run_ranks(options_given, 2, "hybrid", {"num_sms": 16})[0].items() >= {"num_sms": (16, 16)}.items()


def one_token_too_many(release: str, limit: int) -> None:
    library, rank, _ = begin(release)
    served = layer(on_cpu(release, max_tokens_per_rank=limit))
    served.dispatch(*random_call(rank, 6 if rank else 2))
    served.dispatch(*random_call(rank, limit))  # exactly as many as there is room for
    try:
        served.dispatch(*random_call(rank, limit + 1 if rank == 1 else 3))
    finally:
        assert library.log.count("dispatch 1") == 2, "nobody waits inside the library"


@pytest.mark.parametrize(("release", "limit"), [("v2", 128), ("v2_5", 7), ("hybrid", 7)])
def test_a_call_beyond_the_capacity_is_an_error_on_every_rank(release: str, limit: int) -> None:
    errors = run_ranks_expecting_error(one_token_too_many, 2, release, limit)
    name = "HybridEPDispatcher" if release == "hybrid" else "DeepEPDispatcher"
    assert errors[0] == errors[1]
    for part in (f"max_tokens_per_rank={limit} tokens a rank", f"dispatcher={name}(max_tokens_per_rank={limit + 1})"):
        assert part in errors[0]


def more_tokens_than_before(release: str) -> list[Any]:
    """A validation batch is smaller than what training brings; the backward of a call may come after the next."""
    library, rank, _ = begin(release)
    dispatcher = on_cpu(release)
    served, outs = layer(dispatcher), []
    for num_tokens in (2, 129 if rank == 1 else 3, 300, 20):
        hidden, index, weights = random_call(rank, num_tokens)
        hidden.requires_grad_()
        d = served.dispatch(hidden, index, weights)
        out = served.combine(d.rows * d.row_weights[:, None], d.state)
        torch.testing.assert_close(out, hidden * weights.sum(1, keepdim=True))
        outs.append((out, hidden, weights))
    for out, hidden, weights in outs:
        out.sum().backward()
        torch.testing.assert_close(hidden.grad, weights.sum(1, keepdim=True).expand_as(hidden))
    dispatcher.finalize()
    assert sum(line.startswith("destroy") for line in library.log) in (0, len(library.made))
    return [made["tokens"] for made in library.made]


@pytest.mark.parametrize("release", ["v2", "v2_5", "hybrid"])
def test_a_buffer_grows_for_all_ranks_together(release: str) -> None:
    assert run_ranks(more_tokens_than_before, 2, release) == [[128, 256, 512]] * 2


def no_capacity_needed() -> None:
    _, rank, _ = begin("v1")
    served = layer(on_cpu("v1"))
    for num_tokens in (2, 300 * rank, 5):
        d = served.dispatch(*random_call(rank, num_tokens))
        assert served.combine(d.rows, d.state).shape == (num_tokens, H)


def test_v1_takes_any_number_of_tokens() -> None:
    run_ranks(no_capacity_needed, 2)


def after_an_error(release: str) -> list[str]:
    library, rank, _ = begin(release)
    dispatcher = on_cpu(release)
    served = layer(dispatcher)
    d = served.dispatch(*random_call(rank, 4))
    library.fail = True
    with pytest.raises(RuntimeError, match="inside the library"):
        served.combine(d.rows, d.state)
    library.fail = False
    dispatcher.finalize()
    log = list(library.log)
    served.dispatch(*random_call(rank, 4))
    try:
        raise ArithmeticError("of the user")
    except ArithmeticError:
        dispatcher.finalize()
    del d
    gc.collect()
    assert library.log == [*log, "open 2", "dispatch 2"]
    return log


@pytest.mark.parametrize("release", ["v1_0", "v1", "v2"])
def test_nothing_is_destroyed_after_an_exception(release: str) -> None:
    assert run_ranks(after_an_error, 2, release) == [["open 1", "dispatch 1"]] * 2


# What cannot work


def message_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def refused() -> dict[str, str]:
    begin("v1", (torch.bfloat16,))
    strict, bf16 = (torch.bfloat16,), torch.bfloat16

    def at_setup(release: str, ranks: int = 2, **changes: Any) -> str:
        deepep_gloo.install(RELEASES[release])
        made = on_cpu(release, strict)
        group = dist.group.WORLD if ranks == 2 else SimpleNamespace(size=lambda: ranks, rank=lambda: 0)
        arguments = {"num_experts": E, "hidden_size": H, "dtype": bf16, **changes}
        return message_of(lambda: made.setup(group, **arguments))

    def in_a_call(**changes: Any) -> str:
        deepep_gloo.install(RELEASES["v2"])
        made = layer(on_cpu("v2", strict), bf16)
        hidden, index, weights = random_call(0, 4)
        call = {"hidden_states": hidden.to(bf16), "top_k_index": index, "top_k_weights": weights, **changes}
        return message_of(lambda: made.dispatch(**call))

    torch.use_deterministic_algorithms(True)
    filled = at_setup("v2")
    torch.utils.deterministic.fill_uninitialized_memory = False
    unfilled = at_setup("v2")
    torch.use_deterministic_algorithms(False)
    found = {
        "filled": filled,
        "unfilled": unfilled,
        "fp16": at_setup("v1", dtype=torch.float16),
        "uneven experts": at_setup("v1", num_experts=9),
        "width of v1": at_setup("v1", hidden_size=24),
        "width of v2": at_setup("v2", hidden_size=H + 128),
        "ranks of v1": at_setup("v1", ranks=6, num_experts=12),
        "ranks without a configuration": at_setup("v1", ranks=56, num_experts=56),
        "ranks with one": at_setup("v1", ranks=48, num_experts=48),
        "one rank": at_setup("v1", ranks=1),
        "experts a rank": at_setup("v2", num_experts=514),
        "experts": at_setup("v2_5", ranks=32, num_experts=4096),
        "experts of hybrid": at_setup("hybrid", num_experts=6),
        "alignment": at_setup("v1", alignment=16),
        "top_k": at_setup("v2", top_k=33),
        "top_k in a call": in_a_call(top_k_index=torch.zeros(4, 33, dtype=torch.int64)),
        "device in a call": in_a_call(hidden_states=torch.empty(4, H, dtype=bf16, device="meta")),
        "dtype in a call": in_a_call(hidden_states=torch.zeros(4, H)),
        "not set up": message_of(lambda: DeepEPDispatcher().dispatch(*random_call(0, 4))),
        "no device": message_of(lambda: layer(DeepEPDispatcher(), bf16)),
    }
    deepep_gloo.install(RELEASES["v1"])
    found["no class"] = message_of(lambda: layer(on_cpu("hybrid", strict), bf16))
    return found


def test_what_cannot_work_is_an_error_at_setup() -> None:
    first, second = run_ranks(refused, 2)
    assert first == second
    expected = {
        "filled": ("fill_uninitialized_memory=True", "fill_uninitialized_memory = False, or dispatcher='all_to_all'"),
        "unfilled": ("no error",),
        "fp16": ("dispatcher='deepep' moves rows of bfloat16, got torch.float16; change precision=",),
        "uneven experts": ("9 experts", "2 ranks", "dispatcher='all_to_all'"),
        "width of v1": ("Buffer of deep_ep", "a multiple of 16, got width 24", "set dispatcher='all_to_all'"),
        "width of v2": ("ElasticBuffer of deep_ep", "a multiple of 256, got width 384"),
        "ranks of v1": ("2, 4, 8 expert-parallel ranks", "got 6", "another expert_parallel_size"),
        "ranks without a configuration": ("got 56",),
        "ranks with one": ("no error",),
        "one rank": ("supports 2 to any number of expert-parallel ranks, got 1",),
        "experts a rank": ("at most 256 experts a rank, got 257", "a larger expert_parallel_size"),
        "experts": ("EPBuffer of deep_ep", "at most 2048 experts, got 4096"),
        "experts of hybrid": ("dispatcher='hybridep'", "multiple of 4, got 6"),
        "alignment": ("alignment=16",),
        "top_k": ("at most 32 experts a token, got 33",),
        "top_k in a call": ("at most 32 experts a token, got 33",),
        "device in a call": ("rows on meta", "dispatcher='all_to_all' or accelerator='gpu'"),
        "dtype in a call": ("moves rows of bfloat16, got torch.float32",),
        "not set up": ("call setup()",),
        "no device": ("dispatcher='deepep' is not usable here: this process has no CUDA device",),
        "no class": ("has no HybridEPBuffer", "dispatcher='all_to_all'"),
    }
    assert set(first) == set(expected)
    for problem, parts in expected.items():
        for part in parts:
            assert part in first[problem], problem


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"num_sms": 0}, "num_sms=0 of dispatcher='deepep' must be at least 1"),
        ({"num_sms": 7}, "num_sms=7 of dispatcher='deepep' must be even"),
        ({"num_qps": -1}, "num_qps=-1"),
        ({"max_tokens_per_rank": 0}, "max_tokens_per_rank=0"),
    ],
)
def test_options_out_of_range(options: dict[str, int], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        DeepEPDispatcher(**options)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Installs a release in this process for one test."""
    monkeypatch.setitem(sys.modules, "deep_ep", SimpleNamespace())

    def install(release: str, cuda: bool) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
        deepep_gloo.install(RELEASES[release])

    yield install
    monkeypatch.undo()
    optional.probe.cache_clear()


def test_the_reason_says_what_is_missing(package: Callable[[str, bool], None]) -> None:
    package("v2_5", True)
    options = dispatcher_options()
    assert options["deepep"] == ""
    assert options["hybridep"] == "the installed deep_ep has no HybridEPBuffer"
    assert isinstance(build_dispatcher("deepep", 2), DeepEPDispatcher)
    assert build_dispatcher("auto", 2).name == "all_to_all"
    with pytest.raises(RuntimeError, match=r"dispatcher='hybridep' is not usable here: .*no HybridEPBuffer"):
        ExpertParallelStrategy(dispatcher="hybridep")
    package("hybrid", False)
    assert dispatcher_options()["hybridep"] == "this process has no CUDA device"


# In a strategy


def fitted_twice(release: str) -> dict[str, Any]:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    found = {}
    for name in ("all_to_all", "deepep"):
        library = deepep_gloo.install(RELEASES[release])
        torch.manual_seed(0)
        module = tiny.TinyLM()
        dispatcher = on_cpu(release, (torch.bfloat16,)) if name == "deepep" else name
        strategy = tiny.moe_ep(dispatcher=dispatcher, expert_parallel_size=2)
        trainer = tiny.trainer(strategy, devices=world, max_epochs=1, precision="bf16-mixed")
        data = tiny.loader(tiny.tokens(steps=2), rank, world)
        trainer.fit(module, data)
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module, data)
        found[name] = module.losses
    found["log"] = [entry for entry in library.log if entry.split()[0] in ("open", "destroy")]
    return found


def test_a_strategy_trains_with_it_and_fits_twice() -> None:
    for found in run_ranks(fitted_twice, 2, "v1", timeout=100):
        torch.testing.assert_close(found["deepep"], found["all_to_all"], rtol=2e-2, atol=0)
        assert len(found["deepep"]) == 4
        assert found["log"] == ["open 1", "destroy 1", "open 2", "destroy 2"]
