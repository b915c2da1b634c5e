"""What a dispatcher is called with, and a dense computation on one process that its results are compared with.

Used on CPU here, on devices in ``tests/gpu/test_dispatchers.py`` and by ``tests/gpu/dispatcher_table.py``.
"""

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_moe.dispatch import build_dispatcher
from lightning_moe.dispatch.all_to_all import AllToAllDispatcher
from lightning_moe.dispatch.base import Dispatcher
from lightning_moe.parallel.routed import RoutedExperts

E, H, K = 8, 4, 3

CASES = [
    "random",
    "uneven",
    "none on rank 0",
    "none anywhere",
    "all to one expert",
    "all to rank 0",
    "dropped choices",
]


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
    elif case == "an expert twice":
        index[:, 1] = index[:, 0]
    weights = torch.rand(index.shape, generator=generator)
    return index, weights.bfloat16().float() if case == "bfloat16 weights" else weights


def compute(rows: Tensor, tokens_per_expert: Tensor, weight: Tensor) -> Tensor:
    """Each expert multiplies its rows by its own matrix."""
    parts = rows.split(tokens_per_expert.tolist())
    return torch.cat([part @ w for part, w in zip(parts, weight.unbind(0), strict=True)])


def expert_weights(width: int = H) -> Tensor:
    return torch.randn(E, width, width, generator=torch.Generator().manual_seed(0))


def tokens_of(rank: int, num_tokens: int, width: int = H) -> Tensor:
    return torch.randn(num_tokens, width, generator=torch.Generator().manual_seed(20 + rank))


def build(name: str, world: int) -> Dispatcher:
    """A dispatcher by its name; ``all_to_all`` sends a row a choice, ``once`` a row a rank."""
    if name in ("all_to_all", "once"):
        return AllToAllDispatcher(deduplicate=name == "once").for_layer()
    return build_dispatcher(name, world).for_layer()


@dataclass(frozen=True)
class Setting:
    """Where and in what a case is computed."""

    rank: int
    world: int
    width: int = H
    dtype: torch.dtype = torch.float32
    device: str = "cpu"

    def inputs(self, case: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The tokens of this rank, the index and the weights of their choices, and the experts of this rank."""
        index, weights = routing(case, self.rank, self.world)
        hidden = tokens_of(self.rank, len(index), self.width).to(self.device, self.dtype)
        experts = expert_weights(self.width).chunk(self.world)[self.rank].to(self.device, self.dtype)
        weights = weights.to(self.device).requires_grad_()
        return hidden.requires_grad_(), index.to(self.device), weights, experts.requires_grad_()


def through(
    dispatcher: Dispatcher, case: str, dtype: torch.dtype, rank: int, world: int, width: int = H
) -> dict[str, Tensor]:
    """One rank's outputs and gradients of a case, and a check that they are the same in parts."""
    here = Setting(rank, world, width, dtype)
    result = at_once(dispatcher, case, here)
    for key, part in in_parts(dispatcher, case, here).items():
        scale = float(result[key].abs().max()) if result[key].numel() else 0.0
        allowed = 2 * tolerance(dtype, width) * scale  # both are rounded
        torch.testing.assert_close(part, result[key], rtol=0, atol=allowed, msg=lambda m, key=key: f"{key}: {m}")
    return result


def at_once(dispatcher: Dispatcher, case: str, here: Setting) -> dict[str, Tensor]:
    """One rank's outputs and gradients of a case."""
    hidden, index, weights, local = here.inputs(case)
    d = dispatcher.dispatch(hidden, index, weights)
    assert d.rows.shape == (int(d.tokens_per_expert.sum()), here.width)
    assert d.rows.isfinite().all()
    assert d.row_weights.isfinite().all()
    assert (d.rows.dtype, d.row_weights.dtype, d.tokens_per_expert.dtype) == (here.dtype, torch.float32, torch.int64)
    assert d.tokens_per_expert_host in (None, d.tokens_per_expert.tolist())
    assert d.tokens_per_expert.shape == (E // here.world,)
    assert d.choices_per_expert.tolist() == [int((index == e).sum()) for e in range(E)]
    rows = compute(d.rows, d.tokens_per_expert, local) * d.row_weights[:, None].to(here.dtype)
    out = dispatcher.combine(rows, d.state)
    assert (out[(index < 0).all(1)] == 0).all()
    out.square().sum().backward()
    with torch.no_grad():  # leaves nothing behind that the next call would trip over
        again = dispatcher.dispatch(hidden, index, weights)
    assert torch.equal(again.rows, d.rows)
    return {"out": out.detach(), "hidden": hidden.grad, "weights": weights.grad, "experts": local.grad}


def in_parts(dispatcher: Dispatcher, case: str, here: Setting) -> dict[str, Tensor]:
    """The same in three parts that travel while others are computed."""
    hidden, index, weights, local = here.inputs(case)
    sent = dispatcher.rows_sent
    sizes = [len(part) for part in torch.arange(len(index)).tensor_split(3)]
    calls = list(zip(hidden.split(sizes), index.split(sizes), weights.split(sizes), strict=True))
    homeward = []
    for flight in dispatcher.start(calls):
        d = flight.wait()
        rows = compute(d.rows, d.tokens_per_expert, local) * d.row_weights[:, None].to(here.dtype)
        homeward.append(dispatcher.start_combine(rows, d.state))
    out = torch.cat([flight.wait() for flight in homeward])
    out.square().sum().backward()
    assert not sent or 2 * (dispatcher.rows_sent - sent) == sent, "as many rows as in one part"
    return {"out": out.detach(), "hidden": hidden.grad, "weights": weights.grad, "experts": local.grad}


def dense(case: str, world: int, width: int = H, dtype: torch.dtype = torch.float32) -> list[dict[str, Tensor]]:
    """The same, every token through every expert of its choice, without sorting anything.

    Computed in float32 from inputs that were rounded to ``dtype``, as the ranks have them.
    """
    matrices = expert_weights(width).to(dtype).float().requires_grad_()
    ranks = []
    for rank in range(world):
        index, weights = routing(case, rank, world)
        hidden = tokens_of(rank, len(index), width).to(dtype).float().requires_grad_()
        weights.requires_grad_()
        valid = (index >= 0).float() * weights
        out = torch.einsum("th,tkhj,tk->tj", hidden, matrices[index.clamp_min(0)], valid)
        out.square().sum().backward()
        ranks.append({"out": out.detach(), "hidden": hidden.grad, "weights": weights.grad})
    for rank, part in enumerate(matrices.grad.chunk(world)):
        ranks[rank]["experts"] = part
    return ranks


# What a layer does beside one forward and one backward pass. Each returns what ``dense`` has under the same name.

NewLayer = Callable[[], Dispatcher]


def forward(layer: Dispatcher, hidden: Tensor, index: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    d = layer.dispatch(hidden, index, weights)
    rows = compute(d.rows, d.tokens_per_expert, experts) * d.row_weights[:, None].to(d.rows.dtype)
    return layer.combine(rows, d.state)


def results(out: Tensor, hidden: Tensor, weights: Tensor, experts: Tensor, times: int = 1) -> dict[str, Tensor]:
    """The output and the gradients there are, of as many equal losses."""
    gradients = {"hidden": hidden.grad, "weights": weights.grad, "experts": experts.grad}
    return {"out": out.detach(), **{key: grad / times for key, grad in gradients.items() if grad is not None}}


def two_layers(new_layer: NewLayer, here: Setting) -> dict[str, Tensor]:
    """Two layers share what the dispatcher has; the backward of the second comes first."""
    hidden, index, weights, experts = here.inputs("random")
    first, second = (forward(layer, hidden, index, weights, experts) for layer in (new_layer(), new_layer()))
    assert torch.equal(first, second)
    (first.square().sum() + second.square().sum()).backward()
    return results(first, hidden, weights, experts, times=2)


def micro_batches(new_layer: NewLayer, here: Setting) -> dict[str, Tensor]:
    """Two forwards of a layer before the first backward, as in a pipeline."""
    layer, found = new_layer(), {}
    batches = {case: here.inputs(case) for case in ("random", "uneven")}
    experts = batches["random"][3]
    outs = {case: forward(layer, *batch[:3], experts) for case, batch in batches.items()}
    for case, (hidden, _, weights, _) in batches.items():
        outs[case].square().sum().backward()
        found |= {f"{key} of {case}": t for key, t in results(outs[case], hidden, weights, experts).items()}
        found.pop(f"experts of {case}")
    return {**found, "experts": experts.grad}


def recomputed(new_layer: NewLayer, here: Setting) -> dict[str, Tensor]:
    """The forward runs once more in the backward pass."""
    layer, (hidden, index, weights, experts) = new_layer(), here.inputs("random")
    out = checkpoint(forward, layer, hidden, index, weights, experts, use_reentrant=False)
    out.square().sum().backward()
    return results(out, hidden, weights, experts)


def frozen_tokens(new_layer: NewLayer, here: Setting) -> dict[str, Tensor]:
    """No rank wants a gradient of its tokens, as with frozen embeddings."""
    hidden, index, weights, experts = here.inputs("random")
    out = forward(new_layer(), hidden.detach(), index, weights, experts)
    out.square().sum().backward()
    return results(out, hidden, weights, experts)


def frozen_on_rank_0(new_layer: NewLayer, here: Setting) -> dict[str, Tensor]:
    """Rank 0 alone wants none, and yet takes part in the exchange of the others."""
    hidden, index, weights, experts = here.inputs("random")
    out = forward(new_layer(), hidden.detach() if here.rank == 0 else hidden, index, weights, experts)
    out.square().sum().backward()
    return results(out, hidden, weights, experts)


def as_models_call(new_layer: NewLayer, here: Setting) -> dict[str, Tensor]:
    """Tensors that are not contiguous, bfloat16 weights and an int32 index, through what a sharded module calls."""
    hidden, index, weights, experts = here.inputs("bfloat16 weights")
    weights = weights.detach().bfloat16().requires_grad_()
    module = nn.Module().eval()
    spec = SimpleNamespace(
        hidden_size=lambda _: here.width, modules=None, compute=lambda _, rows, counts: compute(rows, counts, experts)
    )
    moe = RoutedExperts(module, spec, new_layer(), None, here.dtype)  # type: ignore[arg-type]
    columns = [t.t().contiguous().t() for t in (hidden, index.int(), weights)]
    assert not columns[0].is_contiguous()
    out = moe(*columns)
    out.square().sum().backward()
    return results(out, hidden, weights, experts)


def nothing_is_kept(new_layer: NewLayer, here: Setting) -> dict[str, Tensor]:
    """A forward without gradients leaves neither a route nor memory of the device behind."""
    layer, (hidden, index, weights, experts) = new_layer(), here.inputs("random")
    used = []
    with torch.no_grad():
        for _ in range(3):
            d = layer.dispatch(hidden, index, weights)
            rows = compute(d.rows, d.tokens_per_expert, experts) * d.row_weights[:, None].to(d.rows.dtype)
            out, state = layer.combine(rows, d.state), weakref.ref(d.state)
            del d, rows
            gc.collect()
            assert state() is None, "the route of a call that is over"
            used.append(torch.cuda.memory_allocated() if here.device == "cuda" else 0)
    assert used[2] <= used[1], f"bytes in use after each call: {used}"
    return {"out": out}


def after_finalize(new_layer: NewLayer, here: Setting) -> dict[str, Tensor]:
    """Finalized twice, then used again."""
    layer, inputs = new_layer(), here.inputs("random")
    with torch.no_grad():
        forward(layer, *inputs)
    layer.finalize()
    layer.finalize()
    out = forward(layer, *inputs)
    out.square().sum().backward()
    hidden, _, weights, experts = inputs
    return results(out, hidden, weights, experts)


def after_an_exception(new_layer: NewLayer, here: Setting) -> dict[str, Tensor]:
    """Finalized while the user's exception is handled, then used again."""
    layer, inputs = new_layer(), here.inputs("random")
    forward(layer, *inputs)
    try:
        raise ArithmeticError("of the user")
    except ArithmeticError:
        layer.finalize()
    out = forward(layer, *inputs)
    out.square().sum().backward()
    hidden, _, weights, experts = inputs
    return results(out, hidden, weights, experts)


def _routed(case: str) -> Callable[[NewLayer, Setting], dict[str, Tensor]]:
    """At once and in parts, with what comes of both: the ranks compare nothing between two exchanges."""

    def run(new_layer: NewLayer, here: Setting) -> dict[str, Tensor]:
        layer = new_layer()
        whole = at_once(layer, case, here)
        return {**whole, **_of_parts(in_parts(layer, case, here))}

    return run


def _of_parts(found: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{key} in parts": t for key, t in found.items()}


_ROUTED = [*CASES, "an expert twice"]
SCENARIOS: dict[str, Callable[[NewLayer, Setting], dict[str, Tensor]]] = {
    **{case: _routed(case) for case in _ROUTED},
    "int32 index, bf16 weights": as_models_call,
    "two layers": two_layers,
    "two micro-batches": micro_batches,
    "recompute": recomputed,
    "tokens without gradient": frozen_tokens,
    "without gradient on rank 0": frozen_on_rank_0,
    "no_grad keeps nothing": nothing_is_kept,
    "finalized twice": after_finalize,
    "finalized in an exception": after_an_exception,
}
# How ``dense`` routes those whose name is not that of a case.
_ROUTED_AS = {"int32 index, bf16 weights": "bfloat16 weights"}
# Kernels of these take each expert of a token once.
_DISTINCT_EXPERTS = ("deepep", "nccl_ep")


def scenarios_of(dispatcher: Dispatcher) -> list[str]:
    """The scenarios that a dispatcher serves."""
    return [name for name in SCENARIOS if name != "an expert twice" or dispatcher.name not in _DISTINCT_EXPERTS]


def expected(scenario: str, here: Setting) -> dict[str, Tensor]:
    """What a scenario returns on a rank, computed densely in one process."""

    def of(case: str) -> dict[str, Tensor]:
        return dense(case, here.world, here.width, here.dtype)[here.rank]

    if scenario == "two micro-batches":
        both = {case: of(case) for case in ("random", "uneven")}
        found = {f"{key} of {case}": t for case, want in both.items() for key, t in want.items() if key != "experts"}
        return {**found, "experts": both["random"]["experts"] + both["uneven"]["experts"]}
    found = of(_ROUTED_AS.get(scenario, scenario))
    if scenario in _ROUTED:
        return {**found, **_of_parts(found)}
    if scenario == "no_grad keeps nothing":
        return {"out": found["out"]}
    if scenario == "tokens without gradient" or (scenario == "without gradient on rank 0" and here.rank == 0):
        del found["hidden"]
    return found


def relative_errors(got: dict[str, Tensor], want: dict[str, Tensor]) -> dict[str, float]:
    """The largest error of each tensor as a fraction of the largest value that it should have."""
    assert set(got) == set(want), (set(got), set(want))
    errors = {}
    for key, right in want.items():
        found = got[key].detach().float().cpu()
        assert found.shape == right.shape, (key, found.shape, right.shape)
        largest = float(right.abs().max()) if right.numel() else 0.0
        errors[key] = float((found - right).abs().max()) / (largest or 1.0) if right.numel() else 0.0
    return errors


def tolerance(dtype: torch.dtype, width: int, result: torch.dtype | None = None) -> float:
    """How large :func:`relative_errors` may become by rounding alone.

    A rounding changes a number by at most half an epsilon. On the way of a row to the output these are rounded: the
    product with the expert's matrix, the routing weight, the product with it, and each of up to K partial sums over the
    choices: K + 3. The gradient of a token goes the same way back, from the output, and rounds the gradient of the loss
    once on each side of the square: 2 (K + 3) + 2 in all, the most of any result. The routes are worth nothing if they
    are wrong: a row that is lost, doubled or sent to another expert changes a result by about its own size.

    A product with a matrix adds up ``width`` numbers. In float32 each sum rounds, in a direction of its own, so that
    the errors grow with the root of their number; products of bfloat16 are added up in float32, which is not seen.

    Args:
        dtype: Dtype of the rows.
        width: Width of a row.
        result: Dtype of the result, where it is another.
    """
    sums = sqrt(width) if dtype == torch.float32 else 1.0
    rounding = torch.finfo(dtype).eps / 2 * (2 * (K + 3) + 2) * sums
    return rounding + (torch.finfo(result).eps / 2 if result not in (None, dtype) else 0.0)


def wrong(got: dict[str, Tensor], want: dict[str, Tensor], here: Setting) -> list[str]:
    """The results that rounding does not explain; NaN is one of them."""
    return [
        f"{key} is wrong by {error:.1e} of its largest value, and {allowed:.1e} may be rounding"
        for key, error in relative_errors(got, want).items()
        if not error <= (allowed := tolerance(here.dtype, here.width, got[key].dtype))
    ]


def layer_of(dispatcher: Dispatcher, here: Setting, group: dist.ProcessGroup | None = None) -> Dispatcher:
    """A dispatcher for one layer of a case."""
    made = dispatcher.for_layer()
    group = None if here.world == 1 and dispatcher.name == "local" else group or dist.group.WORLD
    made.setup(group, num_experts=E, hidden_size=here.width, dtype=here.dtype)
    return made
