"""The NCCL EP dispatcher over a stand-in of the library, which runs on gloo and has the signatures of its releases."""

import inspect
import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_moe import ExpertParallelStrategy, optional
from lightning_moe.dispatch import build_dispatcher, dispatcher_options
from lightning_moe.dispatch.nccl_ep import NcclEpDispatcher, nccl_ep_unusable
from tests import tiny
from tests.dispatch import cases as parity
from tests.dispatch.fakes import nccl_ep as fake
from tests.dispatch.fakes.record_nccl_ep import RECORD
from tests.harness import run_ranks

E, K = parity.E, parity.K
BOTH = (torch.bfloat16, torch.float32)


class OnGloo(NcclEpDispatcher):
    """The dispatcher where the stand-in runs; float32 lets results be compared to rounding."""

    caps = replace(NcclEpDispatcher.caps, payload_dtypes=BOTH, device_types=("cpu", "cuda"))


def begin(version: str = "2.20.2", dtypes: tuple[torch.dtype, ...] = BOTH) -> tuple[fake.Library, int, int]:
    """The library, the rank and the number of ranks."""
    dist.init_process_group("gloo")
    return fake.install(version, dtypes), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def layer(dispatcher: NcclEpDispatcher, dtype: torch.dtype = torch.float32, **changes: Any) -> NcclEpDispatcher:
    made = dispatcher.for_layer()
    made.setup(dist.group.WORLD, **{"num_experts": E, "hidden_size": parity.H, "dtype": dtype, **changes})
    return made


# The signatures


@pytest.mark.parametrize("version", fake.VERSIONS)
def test_the_stand_in_has_the_signatures_of_the_release(version: str) -> None:
    recorded = json.loads(RECORD.read_text())[version]
    module = fake.build(version)
    assert {name for name in vars(module) if name in ("EpBuffer",) or "ep_" in name} == set(recorded)
    for name, signature in recorded.items():
        parameters = inspect.signature(getattr(module, name)).parameters.values()
        assert [
            [p.name, p.kind.name, None if p.default is p.empty else repr(p.default)] for p in parameters
        ] == signature, name


# The same as a dense computation


def all_cases(version: str, options: dict[str, Any]) -> dict[str, dict[str, Tensor]]:
    _, rank, world = begin(version)
    dispatcher = OnGloo(**options)
    results = {case: parity.through(layer(dispatcher), case, torch.float32, rank, world) for case in parity.CASES}
    dispatcher.finalize()
    return results


@pytest.mark.parametrize(
    ("version", "world", "options"),
    [
        ("2.17.1", 2, {}),
        ("2.18.0", 2, {"receive_capacity": 64}),
        ("2.19.0", 2, {"max_tokens_per_rank": 64, "top_k": 5}),
        ("2.20.2", 4, {}),
        ("2.20.2", 4, {"max_tokens_per_rank": 20, "receive_capacity": 100}),
    ],
)
def test_same_as_dense(version: str, world: int, options: dict[str, Any]) -> None:
    ranks = run_ranks(all_cases, world, version, options, timeout=60)
    for case in parity.CASES:
        for got, want in zip(ranks, parity.dense(case, world), strict=True):
            for key in want:
                torch.testing.assert_close(
                    got[case][key], want[key], rtol=1e-5, atol=1e-5, msg=lambda m, at=f"{case}, {key}": f"{at}: {m}"
                )


def in_bfloat16(version: str, width: int) -> dict[str, Tensor]:
    _, rank, world = begin(version, (torch.bfloat16,))
    made = layer(OnGloo(), torch.bfloat16, hidden_size=width)
    return parity.through(made, "random", torch.bfloat16, rank, world, width)


@pytest.mark.parametrize("version", ["2.18.0", "2.20.2"])
def test_bfloat16_rows_with_float32_weights(version: str) -> None:
    for got, want in zip(run_ranks(in_bfloat16, 2, version, 8), parity.dense("random", 2, 8), strict=True):
        assert got["hidden"].dtype == got["experts"].dtype == torch.bfloat16
        assert got["weights"].dtype == torch.float32
        for key in want:
            torch.testing.assert_close(got[key].float(), want[key], rtol=5e-2, atol=0.2)


def two_layers_with_frozen_tokens() -> dict[str, Any]:
    library, rank, world = begin()
    dispatcher = OnGloo()
    layers = [layer(dispatcher), layer(dispatcher)]
    index, weights = parity.routing("random", rank, world)
    weights.requires_grad_()
    local = parity.expert_weights().chunk(world)[rank].requires_grad_()
    total = torch.zeros(())
    for one in layers:
        d = one.dispatch(parity.tokens_of(rank, len(index)), index, weights)
        rows = parity.compute(d.rows, d.tokens_per_expert, local) * d.row_weights[:, None]
        total = total + one.combine(rows, d.state).square().sum()
    total.backward()
    elsewhere = [{int(e) * world // E for e in row} - {rank} for row in index]
    assert layers[0].rows_sent == sum(map(len, elsewhere))
    assert sum(entry.startswith("bootstrap") for entry in library.log) == 1, "one context for all layers"
    return {"weights": weights.grad / 2, "experts": local.grad / 2}


def test_two_layers_share_a_context_and_tokens_need_no_gradient() -> None:
    ranks = run_ranks(two_layers_with_frozen_tokens, 2, timeout=60)
    for got, want in zip(ranks, parity.dense("random", 2), strict=True):
        for key in got:
            torch.testing.assert_close(got[key], want[key], rtol=1e-5, atol=1e-5)


def crowded(version: str) -> None:
    begin(version)
    dispatcher = layer(OnGloo())
    index = torch.arange(K)[:, None].expand(K, 64).t()  # all to rank 0, and nothing contiguous
    hidden, weights = torch.ones(parity.H, 64).t(), torch.full((K, 64), 0.5).t()
    d = dispatcher.dispatch(hidden, index, weights)
    assert len(d.rows) in (2 * 64 * K, 0)
    assert torch.equal(dispatcher.combine(d.rows * d.row_weights[:, None], d.state), hidden * 0.5 * K)


@pytest.mark.parametrize("version", ["2.17.1", "2.20.2"])
def test_makes_room_for_all_tokens_on_one_rank(version: str) -> None:
    run_ranks(crowded, 2, version, timeout=60)


# What cannot work is an error on every rank, and nothing is lost


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def send(dispatcher: NcclEpDispatcher, num_tokens: int, index: Tensor | None = None, **options: Any) -> Tensor:
    """The sum of the choices of each token, computed by experts that return their rows."""
    if index is None:
        index = (torch.arange(num_tokens)[:, None] + torch.arange(K)) % E
    hidden = torch.ones(num_tokens, parity.H, **options)
    d = dispatcher.dispatch(hidden, index, torch.ones(index.shape))
    return dispatcher.combine(d.rows * d.row_weights[:, None], d.state)


def works(dispatcher: NcclEpDispatcher, num_tokens: int) -> None:
    assert torch.equal(send(dispatcher, num_tokens), torch.full((num_tokens, parity.H), float(K)))


def refused_calls() -> dict[str, str]:
    library, rank, _ = begin()
    errors = {}

    def refuse(name: str, dispatcher: NcclEpDispatcher, *arguments: Any) -> None:
        errors[name] = error_of(lambda: send(dispatcher, *arguments))
        works(dispatcher, 5)
        dispatcher.finalize()

    refuse("tokens", layer(OnGloo(max_tokens_per_rank=70)), 70 + rank)
    to_rank_0 = torch.arange(K).expand(40, K)
    refuse("capacity", layer(OnGloo(receive_capacity=239)), 40, to_rank_0)
    fits = layer(OnGloo(receive_capacity=240))
    send(fits, 40, to_rank_0)
    fits.finalize()
    repeats = (torch.arange(6)[:, None] + torch.arange(K)) % E
    repeats[2, 1] = repeats[2, 0] if rank == 1 else repeats[2, 1]
    refuse("repeated", layer(OnGloo()), 6, repeats)
    refuse("top_k", layer(OnGloo(top_k=K)), 6, torch.arange(K + 1).expand(6, K + 1))

    small = layer(OnGloo(receive_capacity=100))
    errors["small"] = error_of(lambda: send(small, 101 + rank))
    works(small, 5)
    small.finalize()

    growing, before = layer(OnGloo()), len(library.log)
    pending = send(growing, 5, requires_grad=rank == 1)
    errors["growing"] = error_of(lambda: send(growing, 65))
    assert pending.requires_grad == (rank == 1), "one rank that is not ready is enough"
    del pending
    works(growing, 65)
    made = [entry.split()[1] for entry in library.log[before:] if entry.startswith("bootstrap")]
    assert made == ["tokens=64", "tokens=128"]
    return errors


def test_calls_that_cannot_work_are_refused_on_every_rank() -> None:
    first, second = run_ranks(refused_calls, 2, timeout=60)
    assert first == second
    for name, fragments in {
        "tokens": ["max_tokens_per_rank=70", "brings 71 tokens", "at least 71"],
        "capacity": ["receive_capacity=239", "rank 0 of the group receives 240 rows", "at least 240"],
        "repeated": ["1 choices repeat one", "'all_to_all'"],
        "top_k": ["top_k=3", "has 4 experts", "at least 4"],
        "small": ["receive_capacity=100", "at least the 128 tokens", "max_tokens_per_rank"],
        "growing": ["set up for 64 tokens", "cannot grow to 128", "NcclEpDispatcher(max_tokens_per_rank=128"],
    }.items():
        assert first[name].startswith("ValueError: "), (name, first[name])
        for fragment in (*fragments, "nccl_ep"):
            assert fragment in first[name], (name, first[name])


def refused_set_ups() -> dict[str, str]:
    begin()
    errors = {
        "dtype": error_of(lambda: layer(NcclEpDispatcher(), torch.float32)),
        "uneven": error_of(lambda: layer(OnGloo(), num_experts=9)),
        "experts": error_of(lambda: layer(OnGloo(), num_experts=6)),
        "width": error_of(lambda: layer(OnGloo(), torch.bfloat16, hidden_size=12)),
        "machine": error_of(lambda: layer(NcclEpDispatcher(), torch.bfloat16, hidden_size=8)),
        "one rank": error_of(lambda: OnGloo().setup(None, num_experts=E, hidden_size=parity.H, dtype=torch.float32)),
        "top_k": error_of(lambda: layer(OnGloo(top_k=33))),
    }
    dispatcher = OnGloo()
    layer(dispatcher)
    errors["other layer"] = error_of(lambda: layer(dispatcher, num_experts=16))
    return errors


def test_set_ups_that_cannot_work_are_refused() -> None:
    first, second = run_ranks(refused_set_ups, 2, timeout=60)
    assert first == second
    for name, fragments in {
        "dtype": ["bfloat16", "got torch.float32", "precision="],
        "uneven": ["9 experts", "2 ranks", "'all_to_all'"],
        "experts": ["multiple of 4 experts, got 6", "'all_to_all'"],
        "width": ["multiple of 16 bytes", "hidden size 12", "multiple of 8"],
        "machine": ["not usable here", "CUDA", "'all_to_all'"],
        "one rank": ["supports 2 to any number of", "got 1", "'auto'"],
        "top_k": ["at most 32", "got 33"],
        "other layer": ["num_experts=16", "num_experts=8", "'all_to_all'"],
    }.items():
        for fragment in (*fragments, "nccl_ep"):
            assert fragment in first[name], (name, first[name])


@pytest.mark.parametrize("option", ["max_tokens_per_rank", "receive_capacity", "top_k", "max_num_sms"])
def test_options_out_of_range(option: str) -> None:
    with pytest.raises(ValueError, match=rf"{option}=-1 of dispatcher='nccl_ep' must be at least"):
        NcclEpDispatcher(**{option: -1})


# The context in a process


def lifetime() -> None:
    library, _, _ = begin()
    dispatcher = OnGloo()
    layers = [layer(dispatcher), layer(dispatcher)]
    dispatcher.finalize()
    assert library.log == [], "nothing to take down, and nothing to wait for"
    for one in layers:
        works(one, 6)
    for one in layers:
        one.finalize()
    made = "bootstrap tokens=64 topk=3 capacity=None"
    assert library.log == [made, *["dispatch 6 tokens"] * 2, "finalize"]
    works(layers[1], 6)
    assert library.log[4:] == [made, "dispatch 6 tokens"], "set up again where it is needed"
    try:
        raise ConnectionError
    except ConnectionError:
        dispatcher.finalize()
    assert library.log[-1] == "dispatch 6 tokens", "other ranks may not come"
    works(layers[0], 6)
    other = layer(OnGloo())
    assert "something else did before" in error_of(lambda: works(other, 6))
    dispatcher.finalize()
    works(other, 6)


def test_the_context_is_set_up_once_and_again_after_it_was_taken_down() -> None:
    run_ranks(lifetime, 2, timeout=60)


class Stops(tiny.TinyLM):
    """Raises in a step."""

    def training_step(self, tokens: Tensor, index: int) -> Tensor:
        loss = super().training_step(tokens, index)
        if index == 1:
            raise ArithmeticError("a step that fails")
        return loss


def trained(name: str, checkpointing: str) -> tuple[list[float], list[str]]:
    """Losses of two fits of one module, and what became of the context."""
    library, rank, world = begin()
    torch.manual_seed(0)
    module = tiny.TinyLM()
    data = tiny.loader(tiny.tokens(steps=2), rank, world)
    dispatcher = OnGloo() if name == "nccl_ep" else name
    strategy = tiny.moe_ep(dispatcher=dispatcher, expert_parallel_size=2, activation_checkpointing=checkpointing)
    trainer = tiny.trainer(strategy, devices=world, max_epochs=1)
    trainer.fit(module, data)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, data)
    return module.losses, [entry.split()[0] for entry in library.log if not entry.startswith("dispatch")]


@pytest.fixture(scope="module")
def expected_losses() -> list[float]:
    return run_ranks(trained, 2, "all_to_all", "none", timeout=90)[0][0]


@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
def test_fits_as_with_all_to_all_and_again(checkpointing: str, expected_losses: list[float]) -> None:
    losses, log = run_ranks(trained, 2, "nccl_ep", checkpointing, timeout=90)[0]
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected_losses), rtol=1e-5, atol=1e-6)
    assert len(losses) == 4
    assert log == ["bootstrap", "finalize"] * 2


def stopped() -> None:
    library, rank, world = begin()
    strategy = tiny.moe_ep(dispatcher=OnGloo(), expert_parallel_size=2)
    with pytest.raises(ArithmeticError):
        tiny.trainer(strategy, devices=world, max_epochs=1).fit(Stops(), tiny.loader(tiny.tokens(2), rank, world))
    assert "finalize" not in library.log


def test_a_fit_that_an_exception_ends_waits_for_nobody() -> None:
    run_ranks(stopped, 2, timeout=60)


# Where it is usable


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Installs a Transformer Engine; ``None`` is one that is not there."""

    def put(version: str | None) -> None:
        names = ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.ep")
        for name in names:
            monkeypatch.setitem(sys.modules, name, None if version is None else ModuleType(name))
        if version == "2.16":
            monkeypatch.delitem(sys.modules, names[2])
        optional.probe.cache_clear()

    yield put
    monkeypatch.undo()
    optional.probe.cache_clear()


def test_says_why_it_is_not_usable(engine: Callable[[str | None], None], monkeypatch: pytest.MonkeyPatch) -> None:
    engine(None)
    assert dispatcher_options()["nccl_ep"].startswith("transformer_engine ")
    with pytest.raises(RuntimeError, match=r"dispatcher='nccl_ep' is not usable here: transformer_engine cannot"):
        ExpertParallelStrategy(dispatcher="nccl_ep")
    engine("2.16")
    assert "has no NCCL EP; install 2.17 or newer" in nccl_ep_unusable()
    engine("2.20")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "CUDA devices only" in nccl_ep_unusable()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert "needs compute capability 9.0 or higher, and this device has 8.0" in nccl_ep_unusable()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    assert "needs NCCL 2.30.4 or newer, and torch runs with 2.28.9" in nccl_ep_unusable()
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 30, 7))
    assert nccl_ep_unusable() == ""
    assert isinstance(build_dispatcher("nccl_ep", 2), NcclEpDispatcher)
    assert build_dispatcher("auto", 2).name == "all_to_all"
