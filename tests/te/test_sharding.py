"""Transformer Engine's layers and weights kept in float32 under the strategy's other options."""

import logging
import os
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_moe import MoEPrecision
from lightning_moe.callbacks import HubCheckpoint
from lightning_moe.experts.te import TransformerEngineBackend
from lightning_moe.float32 import kept_in_float32
from lightning_moe.models import CausalLM
from lightning_moe.te import swap
from tests import tiny
from tests.checkpoint import hub_models
from tests.families import FAMILIES
from tests.harness import run_ranks, run_ranks_expecting_error
from tests.te import fakes
from tests.te.test_swap import both_norms


def fit(
    options: dict[str, Any] | None,
    strategy: dict[str, Any],
    build: Any = tiny.qwen3_moe,
    module_class: type[tiny.TinyLM] = tiny.TinyLM,
    **more: Any,
) -> dict[str, Any]:
    """Two steps; the weights after them."""
    swap.DEVICES = ("cpu", "cuda")  # type: ignore[assignment]
    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    with fakes.installed():
        pl.seed_everything(0, verbose=False)
        with torch.device("meta" if strategy.pop("meta", False) else "cpu"):
            module = module_class(build=build)
        plugin = MoEPrecision("32-true", transformer_engine=options)
        trainer = tiny.trainer(tiny.moe_ep(**strategy), devices=world, max_steps=2, plugins=[plugin], **more)
        trainer.fit(module, tiny.loader(tiny.tokens(2 * more.get("accumulate_grad_batches", 1)), rank, world))
        return {"losses": module.losses, **tiny.weights(module)}


class Manual(tiny.TinyLM):
    """Steps by itself, on an optimizer without Lightning around it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization = False

    def training_step(self, tokens: torch.Tensor, index: int) -> torch.Tensor:
        optimizer: Any = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        loss = super().training_step(tokens, index)
        self.manual_backward(loss)
        optimizer.step()
        return loss


def fits(cases: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
    return [fit(*case) for case in cases]


def test_recomputation_is_in_the_same_precision() -> None:
    modes = ("none", "full", "selective")
    cases = [({"recipe": "current"}, {"expert_parallel_size": 2, "activation_checkpointing": mode}) for mode in modes]
    kept, *again = run_ranks(fits, 2, cases, timeout=200)[0]
    for run in again:
        assert run["losses"] == kept["losses"]
        for name, weight in kept.items():
            assert name == "losses" or torch.equal(run[name], weight), name


def test_weights_from_the_meta_device_are_those_of_the_plain_model() -> None:
    cases = [(options, {"meta": True, "expert_parallel_size": 2}, both_norms) for options in (None, {})]
    plain, ours = run_ranks(fits, 2, cases, timeout=200)[0]
    assert ours["losses"] == pytest.approx(plain["losses"], rel=1e-5)


@pytest.mark.parametrize(
    ("strategy", "recipe", "words"),
    [
        ({"compile": True}, None, "compile=True cannot be combined with transformer_engine"),
        ({"activation_checkpointing": "full"}, "delayed", "activation_checkpointing='full' cannot be combined"),
    ],
)
def test_options_that_do_not_go_together(strategy: dict[str, Any], recipe: Any, words: str) -> None:
    for message in run_ranks_expecting_error(fit, 2, {"recipe": recipe}, strategy):
        assert words in message


def count_copies(cases: list[tuple[Any, Any, Any, int]]) -> list[dict[str, Any]]:
    """The run of each case, and how many times the layers made a low-precision copy of an expert's weight."""
    TransformerEngineBackend.device_types = ("cpu", "cuda")
    made: list[str] = []

    class Counting(pl.Callback):
        def setup(self, *_: Any, **__: Any) -> None:
            layer = import_module("transformer_engine.pytorch").GroupedLinear
            quantizer = layer.quantizer

            def counted(self: Any, gemm: int, tensor: str) -> Any:
                quantize = quantizer(self, gemm, tensor)
                return lambda t: (made.append(tensor), quantize(t))[1]

            layer.quantizer = counted

    results = []
    for options, strategy, module_class, accumulate in cases:
        made.clear()
        # Lightning counts no steps of an optimizer that it has not wrapped.
        more = {"accumulate_grad_batches": accumulate, "module_class": module_class, "max_epochs": 1}
        run = fit(options, strategy, callbacks=[Counting()], **more)
        results.append(run | {"copies": made.count("weight")})
    return results


def test_copies_of_the_weights_of_experts_are_made_once_a_step() -> None:
    pair = {"expert_parallel_size": 2, "experts_backend": "te"}
    cases = [
        ({"recipe": "current", "cache_expert_weights": cache}, {**pair}, *case)
        for case in ((tiny.TinyLM, 3), (Manual, 1))
        for cache in (False, True)
    ]
    for runs in run_ranks(count_copies, 2, cases, timeout=200):
        # 4 experts a rank, 2 weights, 2 layers, 2 steps, of 3 micro-batches each
        for (each_time, once), micro_batches in zip((runs[:2], runs[2:]), (3, 1), strict=True):
            assert (each_time.pop("copies"), once.pop("copies")) == (4 * 2 * 2 * 2 * micro_batches, 4 * 2 * 2 * 2)
            assert each_time.pop("losses") == once.pop("losses")
            assert all(torch.equal(once[name], weight) for name, weight in each_time.items())


def fit_twice(cache: bool) -> dict[str, Any]:
    """Two runs of one module, each with a Trainer and a plugin of its own."""
    swap.DEVICES = ("cpu", "cuda")  # type: ignore[assignment]
    TransformerEngineBackend.device_types = ("cpu", "cuda")
    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    with fakes.installed():
        pl.seed_everything(0, verbose=False)
        module = tiny.TinyLM()
        for _ in range(2):
            plugin = MoEPrecision("32-true", transformer_engine={"recipe": "current", "cache_expert_weights": cache})
            strategy = tiny.moe_ep(expert_parallel_size=2, experts_backend="te")
            trainer = tiny.trainer(strategy, devices=world, max_steps=3, plugins=[plugin])
            trainer.fit(module, tiny.loader(tiny.tokens(3), rank, world))
        return {"losses": module.losses, **tiny.weights(module)}


def test_a_second_run_makes_new_copies_as_well() -> None:
    each_time, once = (run_ranks(fit_twice, 2, cache, timeout=200)[0] for cache in (False, True))
    assert each_time.pop("losses") == once.pop("losses")
    assert all(torch.equal(once[name], weight) for name, weight in each_time.items())


def in_and_out(folder: str) -> list[str]:
    """Read weights of the hub into a model with the package's layers, and write them again."""
    swap.DEVICES = ("cpu", "cuda")  # type: ignore[assignment]
    with fakes.installed() as te:
        sgd = partial(torch.optim.SGD, lr=0.0)
        module = CausalLM(pretrained=folder, optimizer=sgd)  # type: ignore[arg-type]
        plugin = MoEPrecision("32-true", transformer_engine={"layers": ["linear", "norm", "attention"]})
        trainer = tiny.trainer(
            tiny.moe_ep(expert_parallel_size=2),
            devices=2,
            max_steps=1,
            plugins=[plugin],
            callbacks=[HubCheckpoint(dirpath=f"{folder}/out")],
        )
        batch = {"input_ids": torch.zeros(2, 8, dtype=torch.long), "labels": torch.zeros(2, 8, dtype=torch.long)}
        trainer.fit(module, torch.utils.data.DataLoader([batch], batch_size=None))
        return [type(m).base.__name__ for m in module.modules() if isinstance(m, te.Linear | te.RMSNorm)]  # type: ignore[attr-defined]


def test_weights_of_the_hub_go_in_and_out(tmp_path: Path) -> None:
    plain = hub_models.save("qwen3_moe", tmp_path)
    for classes in run_ranks(in_and_out, 2, str(tmp_path), timeout=120):
        assert set(classes) == {"Linear", "RMSNorm"}
    again = type(plain).from_pretrained(tmp_path / "out" / "step-1")
    assert again.config._attn_implementation != "te"
    for name, tensor in plain.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def test_copies_need_experts_that_transformer_engine_computes() -> None:
    options = {"recipe": "current", "cache_expert_weights": True}
    for message in run_ranks_expecting_error(fit, 2, options, {"experts_backend": "loop"}):
        assert "cache_expert_weights=True needs experts that Transformer Engine computes" in message
        assert "experts_backend='te'" in message


def test_experts_that_a_recipe_does_not_reach_are_told() -> None:
    lines = run_ranks(told, 1)[0]
    (line,) = [line for line in lines if "does not reach" in line]
    assert "Float8CurrentScaling does not reach 2 experts modules (net.model.layers.0.mlp.experts, ...)" in line
    assert "experts_backend='grouped_mm' knows no recipes, 'te' does" in line


def told() -> list[str]:
    """What the strategy says when it sets the model up."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    fit({"recipe": "current"}, {"experts_backend": "grouped_mm"})
    return lines


class Kept(pl.LightningModule):
    def __init__(self, family: Any) -> None:
        super().__init__()
        self.family, self.net = family, family.build()

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        return self.family.loss(self.net, self.family.batch())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def keep(name: str, precision: Any) -> tuple[set[torch.dtype], set[torch.dtype]]:
    """Dtypes of the weights that the model keeps in float32: where they are stored, and where they are used."""
    (family,) = [family for family in FAMILIES if family.experts == name]
    module = Kept(family)
    used: set[torch.dtype] = set()
    kept = kept_in_float32(module)
    for owner, part in module.named_modules():
        for own, _ in part.named_parameters(recurse=False):
            if f"{owner}.{own}" in kept:
                part.register_forward_pre_hook(lambda m, args, own=own: used.add(getattr(m, own).dtype))
    trainer = tiny.trainer(tiny.moe_ep(), devices=2, max_steps=1, plugins=[MoEPrecision(precision)])
    trainer.fit(module, torch.utils.data.DataLoader(range(2), batch_size=1))
    return {parameter.dtype for name, parameter in module.named_parameters() if name in kept}, used


@pytest.mark.parametrize(
    ("family", "precision"),
    [
        ("MuseSparkExperts", "bf16-mixed"),
        ("MuseSparkExperts", "bf16-true"),
        pytest.param("DeepseekV4Experts", "bf16-true", marks=pytest.mark.slow),
    ],
)
def test_the_model_keeps_weights_in_float32(family: str, precision: str) -> None:
    for stored, used in run_ranks(partial(keep, family, precision), 2, timeout=200):
        assert stored == used == {torch.float32}
