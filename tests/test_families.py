"""Expert parallelism is exact for every experts class of the installed Transformers.

Two processes go through all families once. In each, a rank holds half of the experts and reads half of the batch; the
reference is the same model, whole, with the eager forward of its own experts class, on the whole batch.
"""

import copy
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

from lightning_moe.dispatch import build_dispatcher
from lightning_moe.experts import FoundExperts, find_experts
from lightning_moe.experts.transformers import _interface
from lightning_moe.mesh import Meshes, build_dense_mesh, build_meshes
from lightning_moe.parallel import DtypePolicy, Sharded, ShardingOptions, gradient_norm, shard_module
from lightning_moe.parallel.structure import find_routers
from lightning_moe.precision import MoEPrecision
from tests import tiny
from tests.families import DOC, EXCEPTIONS, FAMILIES, VERSION, Family, decorated_classes, table, table_of_the_doc
from tests.family_parts import Inputs
from tests.harness import run_ranks
from tests.test_parity import TOLERANCE, assert_same

RANKS = 2
INSTALLED = [family for family in FAMILIES if (family.directory, family.experts) in decorated_classes()]
BY_DIRECTORY = {family.directory: family for family in INSTALLED}


def installed(*directories: str) -> list[str]:
    return [directory for directory in directories if directory in BY_DIRECTORY]


CPU = torch.device("cpu")
PATIENCE = timedelta(seconds=40)
OLDER = tuple(map(int, transformers.__version__.split(".")[:2])) < VERSION
only_newest = pytest.mark.skipif(OLDER, reason="the table is that of a newer Transformers")

# What is special about the layout of some families, and one that has it.
FEATURES = {
    "gate and up in one weight": "mixtral",
    "no gate": "nemotron_h",
    "latent width": "nemotron_h",
    "transposed": "aria",
    "biases": "gpt_oss",
    "interleaved": "gpt_oss",
    "gate function of its own": "deepseek_v4",
    "norm after each expert": "muse_spark",
    "correction bias": "deepseek_v3",
    "groups": "deepseek_v3",
    "shared experts": "qwen2_moe",
    "multimodal": "qwen3_vl_moe",
    "modules of different size": "ernie4_5_vl_moe",
    "choices that skip the experts": "zaya",
    "called more than once": "inkling2_loop",
}
IN_BFLOAT16 = installed("deepseek_v3", "mixtral", "gpt_oss", "nemotron_h", "muse_spark")
WITH_A_TRAINER = installed("qwen3_moe", "gpt_oss", "nemotron_h", "deepseek_v3", "qwen3_vl_moe", "muse_spark")
# Their routers are not one matrix with a row an expert, and compute in the dtype of the run.
ROUTERS_OF_THEIR_OWN_DTYPE = {"inkling", "zaya"}


@dataclass
class Measured:
    """What one family showed on rank 0.

    Attributes:
        loss: Relative difference of the mean loss.
        norm: Relative difference of the norm of all gradients.
        gradients: Relative difference of each gradient, by name.
        weights: Relative difference of each weight after one step, by name.
        zero: Names of the gradients that are zero in the reference.
        found: Class of each experts module that was found.
        expected: Class of each module that is one of the decorated classes by name.
        shares: Part of the experts on this rank, for each parameter of each experts module.
        calls: Dispatches of each experts module.
        used: Part of the experts that have a gradient in the reference, for each experts module that has any.
        routers: Number of routers that were found.
        features: What is special about the family, in the words of ``FEATURES``.
    """

    loss: float
    norm: float
    gradients: dict[str, float]
    weights: dict[str, float]
    zero: list[str]
    found: list[str]
    expected: list[str]
    shares: list[float]
    calls: list[int]
    used: list[float]
    routers: int
    features: set[str]


@dataclass
class InBfloat16:
    """What one family showed on rank 0 with ``precision="bf16-true"``.

    Attributes:
        loss: Relative difference of the mean loss from that in float32.
        calls: The dispatches of all experts modules.
        outputs: Dtypes that the experts modules take and return.
        finite: Whether all gradients are numbers.
    """

    loss: float
    calls: "list[Call]"
    outputs: set[tuple[torch.dtype, torch.dtype]]
    finite: bool


@dataclass
class Call:
    """One dispatch.

    Attributes:
        hidden: Dtype of the tokens that are sent.
        weights: ``[T, K]`` routing weights that go along.
        rows: Dtype of the rows that reach the backend.
        results: Dtype of the weighted rows that are sent back.
    """

    hidden: torch.dtype
    weights: Tensor
    rows: torch.dtype | None = None
    results: torch.dtype | None = None


def record(sharded: Sharded) -> list[list[Call]]:
    """Record the calls of each experts module of a sharded model, as they come."""
    return [_record(routed) for routed in sharded.experts]


def _record(routed: Any) -> list[Call]:
    calls: list[Call] = []
    dispatcher, backend = routed.dispatcher, routed.backend
    dispatch, ways_back = dispatcher.dispatch, (dispatcher.combine, dispatcher.start_combine)

    def recording_dispatch(hidden: Tensor, index: Tensor, weights: Tensor) -> Any:
        calls.append(Call(hidden.dtype, weights.detach().clone()))
        return dispatch(hidden, index, weights)

    def recording_backend(_: Any, mlp: Any, rows: Tensor, *counts: Any) -> Tensor:
        calls[-1].rows = rows.dtype
        return backend(mlp, rows, *counts)

    def recording_way_back(go: Callable[..., Any], rows: Tensor, state: Any) -> Any:
        calls[-1].results = rows.dtype
        return go(rows, state)

    dispatcher.dispatch = recording_dispatch
    dispatcher.combine, dispatcher.start_combine = (partial(recording_way_back, go) for go in ways_back)
    routed.backend = type("Recording", (type(backend),), {"__call__": recording_backend})()
    return calls


def shard(family: Family, model: nn.Module, meshes: Meshes, policy: DtypePolicy) -> Sharded:
    """What the strategy does to a LightningModule around the model."""
    module = nn.Module()
    module.net = model
    options = ShardingOptions(
        dispatcher=build_dispatcher("auto", meshes.layout.expert),
        experts_backend="auto",
        reshard_after_forward=family.reshard_after_forward,
        block_classes=None,
    )
    return shard_module(module, find_experts(module), lambda: meshes, policy, options, CPU)


def backward(family: Family, model: nn.Module, inputs: Inputs) -> Tensor:
    """Train on this rank's half of a batch, as the strategy does, and return the mean loss over ranks."""
    mine = {name: tensor.unflatten(0, (RANKS, -1))[dist.get_rank()] for name, tensor in inputs.items()}
    loss = family.loss(model, mine) / RANKS
    loss.backward()
    mean_loss = loss.detach().clone()
    dist.all_reduce(mean_loss)
    return mean_loss


def relative(ours: Tensor, reference: Tensor) -> float:
    """Largest difference over the largest magnitude of the tensor; where that is 0, ours has to be 0."""
    if not reference.any():
        return float("inf") if ours.any() else 0.0
    return float((ours - reference).abs().max() / reference.abs().max())


def differences(ours: dict[str, Tensor], reference: dict[str, Tensor]) -> dict[str, float]:
    assert ours.keys() == reference.keys()
    return {name: relative(ours[name], reference[name]) for name in reference}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: torch.zeros(p.shape) if p.grad is None else tiny.whole(p.grad) for n, p in model.named_parameters()}


def measure(family: Family, classes: set[str], meshes: Meshes) -> Measured:
    model = family.build()
    reference = copy.deepcopy(model)
    reference.set_experts_implementation("eager")  # the forward of the class itself
    inputs = family.batch()
    expected_loss = family.loss(reference, inputs)
    expected_loss.backward()
    expected_gradients = gradients(reference)

    experts = find_experts(model)
    found, features = [type(e.module).__name__ for e in experts], features_of(model, experts)
    routers = len(find_routers(model, experts))
    of_modules = record(shard(family, model, meshes, DtypePolicy(router_dtype=torch.float32)))
    shares = [p.to_local().shape[0] / p.shape[0] for e in experts for p in e.module.parameters(recurse=False)]
    loss = backward(family, model, inputs)
    of_gradients = differences(gradients(model), expected_gradients)
    norm = gradient_norm(model.parameters(), CPU)
    expected_norm = torch.stack([gradient.double().norm() for gradient in expected_gradients.values()]).norm()
    for module in (model, reference):
        torch.optim.SGD(module.parameters(), lr=0.1).step()
    calls = [call for of_module in of_modules for call in of_module]
    features |= {"called more than once"} if len(calls) > len(experts) else set()
    features |= {"choices that skip the experts"} if any((call.weights == 0).any() for call in calls) else set()
    return Measured(
        loss=relative(loss, expected_loss.detach()),
        norm=relative(norm.double(), expected_norm),
        gradients=of_gradients,
        weights=differences(tiny.weights(model), tiny.weights(reference)),
        zero=[name for name, gradient in expected_gradients.items() if not gradient.any()],
        found=found,
        expected=[type(m).__name__ for m in reference.modules() if type(m).__name__ in classes],
        shares=shares,
        calls=[len(of_module) for of_module in of_modules],
        used=used_experts(expected_gradients, experts),
        routers=routers,
        features=features,
    )


def used_experts(of_reference: dict[str, Tensor], experts: list[FoundExperts]) -> list[float]:
    down = [of_reference[f"{found.name}.{found.spec.down}"] for found in experts]
    return [float(gradient.flatten(1).any(dim=1).float().mean()) for gradient in down if gradient.any()]


def features_of(model: Any, experts: list[FoundExperts]) -> set[str]:
    """What the modules show of ``FEATURES``."""
    from transformers.integrations.moe import _default_apply_gate

    config = model.config.get_text_config()
    shapes = {tuple(found.module.get_parameter(str(found.spec.up)).shape) for found in experts}
    features = {
        "groups": getattr(config, "n_group", None) not in (None, 1),
        "multimodal": hasattr(model.config, "vision_config"),
        "modules of different size": len(shapes) > 1,
    }
    for found in experts:
        module: Any = found.module
        parent = model.get_submodule(found.name.rpartition(".")[0])
        tensors = [*parent.named_buffers(), *parent.named_parameters()]
        here = {
            "gate and up in one weight": module.has_gate,
            "no gate": not module.has_gate,
            "transposed": module.is_transposed,
            "biases": module.has_bias,
            "interleaved": not module.is_concatenated,
            "gate function of its own": type(module)._apply_gate is not _default_apply_gate,
            "norm after each expert": getattr(module, "has_post_expert_norm", False),
            "latent width": found.spec.hidden_size(module) != config.hidden_size and "vision" not in found.name,
            "shared experts": any("shared" in name for name, _ in parent.named_children()),
            "correction bias": any("bias" in name and t.shape == (found.num_experts,) for name, t in tensors),
        }
        features |= {name: features.get(name, False) or there for name, there in here.items()}
    return {name for name, there in features.items() if there}


def measure_in_bfloat16(family: Family, meshes: Meshes) -> InBfloat16:
    model = family.build()
    inputs = family.batch()
    with torch.no_grad():
        expected_loss = family.loss(model, inputs)
    precision = MoEPrecision("bf16-true")
    precision.convert_module(model)
    outputs: set[tuple[torch.dtype, torch.dtype]] = set()
    for found in find_experts(model):
        found.module.register_forward_hook(lambda _, args, result: outputs.add((args[0].dtype, result.dtype)))
    of_modules = record(shard(family, model, meshes, precision.dtype_policy))
    loss = backward(family, model, inputs)
    return InBfloat16(
        loss=relative(loss.float(), expected_loss),
        calls=[call for of_module in of_modules for call in of_module],
        outputs=outputs,
        finite=all(bool(gradient.isfinite().all()) for gradient in gradients(model).values()),
    )


def go_through_all(classes: set[str]) -> dict[str, tuple[Any, str]]:
    """Measure each family; one that raises does not stop the others, and its traceback is the outcome."""
    rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], port, RANKS, is_master=rank == 0, timeout=10 * PATIENCE)
    jobs: dict[str, Callable[[Meshes], Any]] = {f.name: partial(measure, f, classes) for f in INSTALLED}
    jobs |= {f"bfloat16 {name}": partial(measure_in_bfloat16, BY_DIRECTORY[name]) for name in IN_BFLOAT16}
    outcomes: dict[str, tuple[Any, str]] = {}
    meshes = None
    for name, job in jobs.items():
        measured, error = None, ""
        try:
            if meshes is None:
                group = dist.PrefixStore(name, store)
                dist.init_process_group("gloo", store=group, rank=rank, world_size=RANKS, timeout=PATIENCE)
                meshes = build_meshes(build_dense_mesh("cpu", RANKS, 1), RANKS)
            measured = job(meshes)
        except Exception:
            error = traceback.format_exc()
        # Not by a collective: a rank that raises alone leaves the other one in the middle of another.
        store.set(f"{name} on {rank}", error)
        errors = {r: store.get(f"{name} on {r}").decode() for r in range(RANKS)}
        outcomes[name] = (measured, "\n".join(f"rank {r}: {e}" for r, e in errors.items() if e))
        if any(errors.values()):
            dist.destroy_process_group()
            meshes = None
    outcomes["classes"] = (loaded_classes(), "")
    return outcomes


def loaded_classes() -> set[tuple[str, str]]:
    """Directory and name of the imported classes whose instances are experts of the interface."""
    modules = [(name.split("."), module) for name, module in sys.modules.items() if ".modeling_" in name]
    return {
        (path[2], cls.__name__)
        for path, module in modules
        if path[:2] == ["transformers", "models"]
        for cls in list(vars(module).values())
        if isinstance(cls, type) and cls.__module__ == module.__name__ and _interface(getattr(cls, "forward", None))
    }


@pytest.fixture(scope="module")
def outcomes() -> dict[str, tuple[Any, str]]:
    return run_ranks(go_through_all, RANKS, {name for _, name in decorated_classes()}, timeout=280)[0]


def of(outcomes: dict[str, tuple[Any, str]], name: str) -> Any:
    measured, error = outcomes[name]
    assert not error, error
    return measured


@pytest.mark.timeout(300)
@pytest.mark.parametrize("family", INSTALLED, ids=lambda family: family.name)
def test_same_as_one_process(outcomes: dict[str, tuple[Any, str]], family: Family) -> None:
    measured: Measured = of(outcomes, family.name)
    assert family.experts in measured.found
    assert measured.found == measured.expected
    assert set(measured.shares) == {1 / RANKS}
    assert min(measured.calls) > 0, "the tokens were not dispatched"
    assert measured.loss <= TOLERANCE
    assert measured.norm <= TOLERANCE
    for kind, errors in (("gradient", measured.gradients), ("weight", measured.weights)):
        worst = max(errors, key=errors.__getitem__)
        assert errors[worst] <= TOLERANCE, f"{kind} of {worst} differs by {errors[worst]:.1e}"
    assert (measured.routers == 0) == (family.directory in ROUTERS_OF_THEIR_OWN_DTYPE)


def test_the_experts_are_used(outcomes: dict[str, tuple[Any, str]]) -> None:
    used = {family.name: of(outcomes, family.name).used for family in INSTALLED}
    assert all(parts and min(parts) > 0.25 for parts in used.values()), used
    assert sum(min(parts) == 1 for parts in used.values()) > 0.7 * len(used), used


def test_the_layouts_are_there(outcomes: dict[str, tuple[Any, str]]) -> None:
    for feature, directory in FEATURES.items():
        if directory not in BY_DIRECTORY:
            continue  # newer than the installed Transformers
        assert feature in of(outcomes, BY_DIRECTORY[directory].name).features, (feature, directory)


@pytest.mark.skipif(not installed("muse_spark"), reason="newer than the installed Transformers")
def test_the_norm_after_each_expert_gets_the_gradients_of_all_ranks(outcomes: dict[str, tuple[Any, str]]) -> None:
    measured: Measured = of(outcomes, BY_DIRECTORY["muse_spark"].name)
    norms = [name for name in measured.gradients if "experts.post_expert_norm" in name]
    assert len(norms) == 2
    assert not set(norms) & set(measured.zero)
    assert max(measured.gradients[name] for name in norms) <= TOLERANCE


@pytest.mark.parametrize("directory", IN_BFLOAT16)
def test_rows_stay_bfloat16(outcomes: dict[str, tuple[Any, str]], directory: str) -> None:
    measured: InBfloat16 = of(outcomes, f"bfloat16 {directory}")
    for call in measured.calls:
        # The routing weights would promote the rows.
        assert call.weights.dtype == torch.float32
        assert (call.hidden, call.rows, call.results) == (torch.bfloat16,) * 3
    assert {taken for taken, _ in measured.outputs} == {torch.bfloat16}
    assert all(taken == returned for taken, returned in measured.outputs)
    assert measured.finite
    assert measured.loss < 0.02


@only_newest
def test_every_class_is_in_the_table() -> None:
    """A newer Transformers has classes that nobody has looked at yet."""
    classes = set(decorated_classes())
    listed = {(family.directory, family.experts) for family in FAMILIES} | set(EXCEPTIONS)
    missing, gone = sorted(classes - listed), sorted(listed - classes)
    assert not missing, (
        f"Transformers {transformers.__version__} sends the experts of {missing} through its experts interface: add a"
        " Family for each to FAMILIES in tests/families.py, or the reason why there is none to EXCEPTIONS, set VERSION,"
        " and run `python -m tests.families`"
    )
    assert not gone, f"Transformers {transformers.__version__} has no {gone}: remove them from tests/families.py"
    assert len(listed) == len(FAMILIES) + len(EXCEPTIONS)


def test_the_sources_tell_what_the_classes_are(outcomes: dict[str, tuple[Any, str]]) -> None:
    directories = {directory for directory, _ in decorated_classes() if directory in BY_DIRECTORY}
    there = {(directory, name) for directory, name in of(outcomes, "classes") if directory in directories}
    assert there == {(directory, name) for directory, name in decorated_classes() if directory in directories}


@only_newest
def test_the_doc_holds_the_table() -> None:
    assert table_of_the_doc() == table(decorated_classes()), "run `python -m tests.families`"
    assert f"Transformers {'.'.join(map(str, VERSION))}." in DOC.read_text(encoding="utf-8")


def train(with_moe_ep: bool) -> dict[str, list[dict[str, Any]]]:
    """Train each family for 2 steps with Lightning; what one rank saw."""
    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    results = {}
    for directory in WITH_A_TRAINER:
        pl.seed_everything(0, verbose=False)
        module = tiny.TinyLM(build=BY_DIRECTORY[directory].build, keep_gradients=True)
        if not with_moe_ep:
            module.net.set_experts_implementation("eager")
        strategy = tiny.moe_ep(expert_parallel_size=RANKS) if with_moe_ep else "auto"
        trainer = tiny.trainer(strategy, devices=world, max_steps=2, gradient_clip_val=0.5)
        trainer.fit(module, tiny.loader(tiny.tokens(2, batch=4), rank, world))
        seen = {"losses": module.losses, "norms": module.norms, "gradients": module.gradients}
        results[directory] = [seen | {"weights": tiny.weights(module)}]
        assert not with_moe_ep or trainer.strategy.layout.expert == RANKS
    return results


@pytest.fixture(scope="module")
def trained() -> tuple[dict[str, Any], dict[str, Any]]:
    return run_ranks(train, RANKS, True, timeout=200)[0], run_ranks(train, 1, False, timeout=200)[0]


@pytest.mark.parametrize("directory", WITH_A_TRAINER)
def test_same_with_a_trainer(trained: tuple[dict[str, Any], dict[str, Any]], directory: str) -> None:
    ours, reference = (results[directory] for results in trained)
    assert len(ours[0]["losses"]) == 2
    assert_same(ours, reference)


@pytest.mark.skipif(not installed("diffusion_gemma"), reason="newer than the installed Transformers")
def test_tied_experts_are_refused() -> None:
    family = BY_DIRECTORY["diffusion_gemma"]
    tied = Family(**{**vars(family), "config": {**family.config, "tie_word_embeddings": True}})
    module = tiny.TinyLM(build=tied.build)
    with pytest.raises(ValueError, match=r"'net.model.encoder.*' and 'net.model.decoder.*' share their weights"):
        tiny.trainer(tiny.moe_ep(), max_steps=1).fit(module, tiny.loader(tiny.tokens(1)))
