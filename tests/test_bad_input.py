"""What a user gets wrong: an error with the option, the value, what is allowed and the fix, on every rank alike."""

import re
import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

import lightning_moe
from lightning_moe import ExpertParallelStrategy, ExpertsSpec, MoEPrecision, register_experts
from tests import tiny
from tests.harness import run_ranks, run_ranks_expecting_error
from tests.test_strategy import fit, rank_and_world


def fit_with(options: dict[str, Any]) -> None:
    fit(tiny.TinyLM(), tiny.moe_ep(**options), steps=1)


def expect(errors: list[str], *fragments: str) -> None:
    assert len(set(errors)) == 1, f"every rank must say the same: {errors}"
    for fragment in fragments:
        assert fragment in errors[0], f"{fragment!r} is not in {errors[0]!r}"


@pytest.mark.parametrize(
    ("world", "options", "fragments"),
    [
        (2, {"expert_parallel_size": 3}, ["expert_parallel_size=3", "divisor", "(2)", "allowed are 1, 2"]),
        (2, {"expert_parallel_size": 0}, ["expert_parallel_size=0", "allowed are 1, 2"]),
        (4, {"expert_parallel_size": 4, "replicate_size": 2}, ["expert_parallel_size=4", "one replica (2)"]),
        (2, {"replicate_size": 3}, ["replicate_size=3", "(2)", "allowed are 1, 2"]),
        (
            2,
            {"expert_parallel_size": 2, "dispatcher": "local"},
            ["dispatcher='local'", "expert_parallel_size=2", "'auto'"],
        ),
        (2, {"block_classes": ["Qwen4Layer"]}, ["block_classes=['Qwen4Layer']", "Qwen3MoeDecoderLayer"]),
    ],
)
def test_options_that_do_not_fit(world: int, options: dict[str, Any], fragments: list[str]) -> None:
    expect(run_ranks_expecting_error(fit_with, world, options, timeout=60), *fragments)


def fit_few_experts(experts: int, size: int) -> None:
    fit(tiny.TinyLM(build=lambda: tiny.qwen3_moe(num_experts=experts)), tiny.moe_ep(expert_parallel_size=size))


def test_more_ranks_than_experts() -> None:
    errors = run_ranks_expecting_error(fit_few_experts, 4, 2, 4, timeout=60)
    problem = "expert_parallel_size=4 is larger than the number of experts"
    expect(errors, problem, "layers.0.mlp.experts", "which is 2", "Allowed with 4 ranks a replica are 1, 2, or 'auto'")


def test_names_that_do_not_exist_and_dispatchers_that_are_not_usable() -> None:
    with pytest.raises(
        ValueError, match=r"dispatcher='deepspeed' is not known; allowed are 'auto', 'local', 'all_to_all'"
    ):
        ExpertParallelStrategy(dispatcher="deepspeed")
    with pytest.raises(
        RuntimeError, match=r"dispatcher='deepep' is not usable here: deep_ep is .*'all_to_all'.*doctor"
    ):
        ExpertParallelStrategy(dispatcher="deepep")
    with pytest.raises(
        ValueError, match=r"experts_backend='triton' is not known; allowed are 'auto', 'loop', 'grouped_mm'"
    ):
        ExpertParallelStrategy(experts_backend="triton")
    with pytest.raises(RuntimeError, match=r"experts_backend='te' is not usable here: transformer_engine is not inst"):
        ExpertParallelStrategy(experts_backend="te")
    with pytest.raises(ValueError, match="expert_parallel_size='all' must be 'auto'"):
        ExpertParallelStrategy(expert_parallel_size="all")  # type: ignore[arg-type]


# Precision


@pytest.mark.parametrize("precision", ["16-true", "64-true"])
def test_unsupported_precision_with_the_name(precision: str) -> None:
    with pytest.raises(ValueError, match=rf"'{precision}'.*'32-true', 'bf16-true', 'bf16-mixed'"):
        tiny.trainer("moe_ep", precision=precision)


def test_plugins_of_another_kind() -> None:
    class Other(pl.plugins.Precision):
        precision = "transformer-engine"  # type: ignore[assignment]

    with pytest.raises(ValueError, match=r"'transformer-engine' \(Other\) is not supported.*'32-true', 'bf16-true'"):
        tiny.trainer("moe_ep", plugins=[Other()])


def test_fp16_mixed() -> None:
    from lightning.pytorch.plugins.precision import MixedPrecision

    with pytest.raises(ValueError, match=r"'16-mixed'.*'32-true', 'bf16-true', 'bf16-mixed'"):
        MoEPrecision.from_plugin(MixedPrecision("16-mixed", "cuda"))
    with pytest.raises(ValueError, match="'16-true'"):
        tiny.trainer(ExpertParallelStrategy(), precision="16-true")
    with pytest.raises(ValueError, match="'16-mixed' is not supported by MoEPrecision"):
        MoEPrecision("16-mixed")  # type: ignore[arg-type]


# Models


class Dense(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
        self.losses: list[float] = []

    def training_step(self, x: torch.Tensor, index: int) -> torch.Tensor:
        loss = self.net(x).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit_dense() -> tuple[list[str], list[float]]:
    _, world = rank_and_world()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module = Dense()
        tiny.trainer("moe_ep", devices=world, max_steps=4).fit(module, DataLoader(torch.ones(8, 4), batch_size=2))
    return [str(w.message) for w in caught], module.losses


def test_a_model_without_experts_trains_with_a_warning() -> None:
    first, second = run_ranks(fit_dense, 2)
    texts = [text for text in first[0] if "no experts" in text]
    assert len(texts) == 1
    assert "Dense" in texts[0]
    assert "register_experts(" in texts[0]
    assert not [text for text in second[0] if "no experts" in text], "said once, not by every rank"
    assert first[1][-1] < first[1][0]


class StaleOptimizer(tiny.TinyLM):
    """What LightningCLI's top-level ``optimizer:`` does."""

    def __init__(self) -> None:
        super().__init__()
        self.built = torch.optim.AdamW(self.net.parameters())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.built


def fit_stale() -> None:
    fit(StaleOptimizer(), tiny.moe_ep())


def test_an_optimizer_built_before_sharding() -> None:
    errors = run_ranks_expecting_error(fit_stale, 2)
    expect(errors, "AdamW was built before the model was sharded", "configure_optimizers", "OptimizerCallable")


class Direct(tiny.TinyLM):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1))


class TiedAcross(Dense):
    def __init__(self) -> None:
        super().__init__()
        self.other = torch.nn.Linear(4, 4)
        self.other.weight = self.net[0].weight


class AlreadySharded(tiny.TinyLM):
    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard

        fully_shard(self.net)


class RankDependent(Dense):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(4, 2 + rank_and_world()[0])


class Forgetful(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(4))


class MetaWithoutInit(tiny.TinyLM):
    def configure_model(self) -> None:
        with torch.device("meta"):
            self.net = Forgetful()


@pytest.mark.parametrize(
    ("build", "fragments"),
    [
        (Direct, ["Direct holds the parameters 'scale' directly", "submodule"]),
        (TiedAcross, ["'net' and 'other' of TiedAcross share a parameter", "one submodule"]),
        (AlreadySharded, ["AlreadySharded is sharded by fully_shard already", "configure_model"]),
        (RankDependent, ["the model of rank 1 has other parameters or shapes than that of rank 0"]),
        (MetaWithoutInit, ["Forgetful was built on the meta device", "weight", "reset_parameters"]),
    ],
)
def test_modules_that_cannot_be_sharded(build: type, fragments: list[str]) -> None:
    expect(run_ranks_expecting_error(fit_built, 2, build, timeout=60), *fragments)


def fit_built(build: type) -> None:
    fit(build(), tiny.moe_ep())


def fit_twice_differently() -> None:
    module = tiny.TinyLM()
    fit(module, tiny.moe_ep(expert_parallel_size=1))
    fit(module, tiny.moe_ep(expert_parallel_size=2))


def test_another_layout_for_a_sharded_module() -> None:
    expect(
        run_ranks_expecting_error(fit_twice_differently, 2),
        "is sharded already as",
        "expert_parallel_size=1",
        "expert_parallel_size=2",
        "build a new",
    )


# Data


def fit_uneven() -> None:
    rank, world = rank_and_world()
    data = tiny.tokens(1, 4 if rank else 6)[0]
    tiny.trainer(tiny.moe_ep(), devices=world, max_epochs=1).fit(tiny.TinyLM(), DataLoader(data, batch_size=2))


def predict_with_too_little() -> None:
    rank, world = rank_and_world()
    data = tiny.tokens(1, 1)[0][rank:]
    tiny.trainer(tiny.moe_ep(), devices=world).predict(tiny.TinyLM(), DataLoader(data, shuffle=False))


def test_ranks_with_different_numbers_of_batches() -> None:
    errors = run_ranks_expecting_error(fit_uneven, 2, timeout=60)
    expect(errors, "train dataloader has 3, 2 batches on rank 0 to 1", "drop_last=True", "limit_train_batches=2")
    errors = run_ranks_expecting_error(predict_with_too_little, 2, timeout=60)
    expect(errors, "predict dataloader has 1, 0 batches")


# The other package


def fit_mixed_imports(what: str) -> None:
    import pytorch_lightning

    _, world = rank_and_world()
    module = tiny.TinyLM()
    if what == "module":

        class Other(pytorch_lightning.LightningModule):
            pass

        module = Other()
    callbacks = [pytorch_lightning.callbacks.Timer()] if what == "callback" else []
    tiny.trainer("moe_ep", devices=world, callbacks=callbacks).fit(module, tiny.loader(tiny.tokens(1)))


@pytest.mark.parametrize("what", ["module", "callback"])
def test_objects_of_pytorch_lightning(what: str) -> None:
    pytest.importorskip("pytorch_lightning")
    errors = run_ranks_expecting_error(fit_mixed_imports, 2, what, timeout=60)
    if what == "callback":
        expect(errors, "Timer", "pytorch_lightning", "from lightning.pytorch import")
    else:  # the Trainer itself refuses it, before any strategy is asked
        expect(errors, "must be a `LightningModule`", "Other")


def fit_averaged() -> None:
    averaging = pl.callbacks.StochasticWeightAveraging(swa_lrs=1e-2)
    fit(tiny.TinyLM(), tiny.moe_ep(), steps=1, callbacks=[averaging])


def test_callbacks_that_average_weights() -> None:
    errors = run_ranks_expecting_error(fit_averaged, 2, timeout=60)
    expect(errors, "StochasticWeightAveraging averages a copy of the whole model", "remove the callback")


# Registration


def test_registration() -> None:
    class Mine(torch.nn.Module):
        pass

    with pytest.raises(ValueError, match="down, activation missing"):
        ExpertsSpec(up="w1")
    with pytest.raises(ValueError, match="not both"):
        ExpertsSpec(up="w1", compute=lambda m, x, n: x)
    with pytest.raises(TypeError, match=r"cls must be a subclass of torch.nn.Module"):
        register_experts(Mine(), ExpertsSpec(compute=lambda m, x, n: x))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="spec must be an ExpertsSpec"):
        register_experts(Mine, "up")  # type: ignore[arg-type]
    register_experts(Mine, ExpertsSpec(up="w1", down="w2", activation=lambda m, x: x))
    with pytest.raises(ValueError, match="Mine names the parameter 'w1', which the module does not have"):
        lightning_moe.experts.find_experts(Mine())
    fused = Mine()
    fused.w1, fused.w2 = torch.nn.Parameter(torch.ones(2, 12, 8)), torch.nn.Parameter(torch.ones(2, 8, 6))
    register_experts(Mine, ExpertsSpec(up="w1", down="w2", activation=lambda m, x: x, transposed=True))
    with pytest.raises(ValueError, match=r"'w1' \[2, 12, 8\] takes rows of width 12, .* returns 6; .*transposed=False"):
        lightning_moe.experts.find_experts(fused)
    mine = Mine()
    mine.w1, mine.w2 = (torch.nn.Parameter(torch.ones(n, 2, 2)) for n in (2, 3))
    with pytest.raises(ValueError, match=re.escape("{'w1': 2, 'w2': 3}")):
        lightning_moe.experts.find_experts(mine)
