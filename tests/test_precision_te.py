"""The precision plugin: what stays in float32, contradictions, and Transformer Engine as one of its options."""

from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_moe import ExpertParallelStrategy, MoEPrecision
from lightning_moe.cli import MoECLI
from lightning_moe.cli import main as command_line
from lightning_moe.float32 import kept_in_float32
from lightning_moe.te import TransformerEngineConfig, swap
from tests import tiny
from tests.harness import run_ranks, run_ranks_expecting_error
from tests.te import fakes
from tests.test_router_precision import deepseek
from tests.test_strategy import rank_and_world

CONFIG = Path(__file__).resolve().parent.parent / "configs" / "quickstart_te.yaml"


@pytest.fixture
def te(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(swap, "DEVICES", ("cpu", "cuda"))
    with fakes.installed() as module:
        yield module


# Options


@pytest.mark.parametrize("name", ["float32", "torch.float32", torch.float32])
def test_router_dtype_is_a_dtype_or_its_name(name: Any) -> None:
    assert MoEPrecision("bf16-mixed", router_dtype=name).dtype_policy.router_dtype == torch.float32


@pytest.mark.parametrize("name", ["fp32", "int64", "relu", "float8_e4m3fn", torch.int64])
def test_another_router_dtype_is_refused(name: Any) -> None:
    with pytest.raises(ValueError, match=r"router_dtype=.* must be 'float32', 'bfloat16', 'float16' or 'float64'"):
        MoEPrecision(router_dtype=name)


@pytest.mark.parametrize("precision", ["16-mixed", "16-true"])
def test_float16_is_refused(precision: Any) -> None:
    with pytest.raises(ValueError, match=rf"precision='{precision}' is not supported.*'bf16-mixed'"):
        MoEPrecision(precision, transformer_engine={})


def test_two_precisions_are_a_contradiction() -> None:
    with pytest.raises(ValueError, match=r"precision=bf16-mixed.*plugins=.*MoEPrecision"):
        tiny.trainer(tiny.moe_ep(), precision="bf16-mixed", plugins=[MoEPrecision("bf16-true")])
    strategy = tiny.moe_ep()
    strategy.precision_plugin = MoEPrecision("32-true")
    with pytest.raises(MisconfigurationException, match="both strategy class and plugins"):
        tiny.trainer(strategy, plugins=[MoEPrecision("bf16-true")])


@pytest.mark.parametrize(
    "written",
    [
        {"recipe": "mxfp8", "exclude": ["lm_head"]},
        {
            "class_path": "lightning_moe.te.TransformerEngineConfig",
            "init_args": {"recipe": "mxfp8", "exclude": ["lm_head"]},
        },
    ],
)
def test_options_from_yaml(written: dict[str, Any]) -> None:
    class Parsed(MoECLI):
        def instantiate_trainer(self, **kwargs: Any) -> Any:
            (self.plugin,) = self.config_init["fit"]["trainer"]["plugins"]

        def _run_subcommand(self, subcommand: str) -> None:
            pass

        def before_instantiate_classes(self) -> None:
            trainer = self.config["fit"]["trainer"]
            trainer["logger"], trainer["strategy"] = False, "auto"

    plugin = {
        "class_path": "lightning_moe.MoEPrecision",
        "init_args": {"precision": "bf16-mixed", "router_dtype": "float32", "transformer_engine": written},
    }
    cli = Parsed(["fit", "--config", str(CONFIG), "--trainer.plugins", f"[{plugin}]"])
    assert cli.plugin.transformer_engine == TransformerEngineConfig(recipe="mxfp8", exclude=("lm_head",))
    assert cli.plugin.router_dtype == torch.float32


def test_the_config_is_that_of_the_quickstart_but_for_the_device() -> None:
    import yaml

    ours, quickstart = (yaml.safe_load(CONFIG.with_name(name).read_text()) for name in (CONFIG.name, "quickstart.yaml"))
    assert (ours["model"], ours["data"]) == (quickstart["model"], quickstart["data"])
    assert ours["trainer"]["accelerator"] == "cuda"
    assert "needs a GPU" in CONFIG.read_text()


def test_the_plan_of_a_config_is_shown_without_the_package(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "250")
    assert command_line(["doctor", "--config", str(CONFIG)]) == 0
    text = capsys.readouterr().out
    assert "te.Linear" in text
    assert "te.GroupedLinear" in text
    assert "stays: router: it decides in router_dtype" in text
    assert "Changed: 4 te.DotProductAttention, 17 te.Linear, 17 te.RMSNorm" in text
    assert "not installed: pip install 'lightning-moe[te]'" in " ".join(text.split())
    assert not list(tmp_path.iterdir()), "nothing is written"
    options = ["--config", str(CONFIG.with_name("quickstart.yaml")), "--model.config.num_hidden_layers", "2"]
    assert command_line(["doctor", *options]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "this config does not use it" in text
    assert "stays: experts_backend='auto' computes them; with 'te' it is te.GroupedLinear" in text
    assert "Changed: 2 te.DotProductAttention" in text
    narrow = ["--trainer.plugins.transformer_engine.recipe", "mxfp8", "--model.config.moe_intermediate_size", "48"]
    assert command_line(["doctor", "--config", str(CONFIG), *narrow]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "te.GroupedLinear, in the base precision: MXFP8BlockScaling needs" in text


def test_the_doctor_refuses_what_it_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line(["doctor", "--foo"]) == 2
    assert "unrecognized arguments: --foo" in capsys.readouterr().err
    assert command_line(["doctor", "--config", "nowhere.yaml"]) == 2
    assert "'nowhere.yaml' does not exist" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("backend", "words"),
    [
        ("te", "experts_backend='te' is not usable here: transformer_engine is not installed: pip install"),
        ("auto", "'transformer_engine', which is not installed: pip install 'lightning-moe[te]'"),
    ],
)
def test_training_without_the_package_is_an_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, backend: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["--trainer.accelerator", "cpu", "--trainer.devices", "1", "--trainer.logger", "false"]
    options += ["--trainer.callbacks", "null", "--trainer.strategy.experts_backend", backend]
    assert command_line(["fit", "--config", str(CONFIG), *options]) == 2
    assert words in " ".join("".join(capsys.readouterr()).split())


# Transformer Engine and the strategy's options


def test_compile_is_refused() -> None:
    with pytest.raises(ValueError, match=r"compile=True cannot be combined with transformer_engine.*compile=False"):
        MoEPrecision(transformer_engine={}).check_sharding(True, "none")
    MoEPrecision().check_sharding(True, "full")


def test_recomputation_is_refused_with_delayed_scaling(te: Any) -> None:
    with pytest.raises(ValueError, match=r"activation_checkpointing='full'.*recipe='delayed'.*recipe='current'"):
        MoEPrecision(transformer_engine={"recipe": "delayed"}).check_sharding(False, "full")
    MoEPrecision(transformer_engine={"recipe": "current"}).check_sharding(False, "full")
    MoEPrecision(transformer_engine={"recipe": "delayed"}).check_sharding(False, "none")


def test_other_options_for_a_model_that_is_set_up_are_refused(te: Any) -> None:
    model = tiny.TinyLM()
    MoEPrecision(transformer_engine={}).convert_module(model)
    MoEPrecision(transformer_engine={}).connect(model, [], [])
    for plugin in (MoEPrecision(transformer_engine={"recipe": "current"}), MoEPrecision(transformer_engine={})):
        target = model if plugin.transformer_engine != TransformerEngineConfig() else tiny.TinyLM()
        with pytest.raises(ValueError, match=r"was set up with.*already.*build a new LightningModule"):
            plugin.connect(target, [], [])


def rank_one_has_another(version: str | None, recipe: Any) -> None:
    rank, world = rank_and_world()
    swap.DEVICES = ("cpu", "cuda")  # type: ignore[assignment]
    plugin = MoEPrecision(transformer_engine={"recipe": recipe})
    strategy = tiny.moe_ep(activation_checkpointing="full")
    trainer = tiny.trainer(strategy, devices=world, max_steps=1, plugins=[plugin])
    installed = fakes.VERSIONS[-1] if rank == 0 else version
    with nullcontext() if installed is None else fakes.installed(installed):
        trainer.fit(tiny.TinyLM(), tiny.loader(tiny.tokens(1), rank, world))


def test_a_rank_without_the_package_ends_all() -> None:
    zero, one = run_ranks_expecting_error(rank_one_has_another, 2, None, "current")
    assert "rank 1: transformer_engine needs the package" in zero
    assert "not installed: pip install" in one


def test_a_rank_with_a_release_that_lacks_an_option_ends_all() -> None:
    recipe = {"name": "mxfp8", "enable_2d_quantization": True}
    zero, one = run_ranks_expecting_error(rank_one_has_another, 2, fakes.VERSIONS[0], recipe)
    assert "rank 1: transformer_engine: recipe=" in zero
    assert "enable_2d_quantization" in one


# What stays in float32


class Watched(tiny.TinyLM):
    """Notes the dtypes of what must be float32."""

    def __init__(self, build: Any = tiny.qwen3_moe) -> None:
        super().__init__(tiny.sgd, build=build)
        self.dtypes: dict[str, set[torch.dtype]] = {}

    def note(self, what: str, *tensors: Tensor) -> None:
        self.dtypes.setdefault(what, set()).update(t.dtype for t in tensors if t.is_floating_point())

    def watch(self) -> None:
        for name, module in self.net.named_modules():
            if name.endswith(".mlp.gate"):
                module.register_forward_hook(lambda m, args, out: self.note("router", *out))
            if name.endswith(".experts"):
                module.register_forward_pre_hook(lambda m, args: self.note("rows", args[0]))

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        if not self.dtypes:
            self.watch()
        out = self.net(input_ids=batch, labels=batch)
        self.note("loss", out.loss)
        for name, parameter in self.net.named_parameters():
            if name in kept_in_float32(self.net):
                self.note("kept", parameter)
        return out.loss


def fit_watched(precision: str, family: str) -> dict[str, set[torch.dtype]]:
    rank, world = rank_and_world()
    module = Watched(partial(deepseek) if family == "deepseek" else tiny.qwen3_moe)
    trainer = tiny.trainer(tiny.moe_ep(), devices=world, max_steps=2, plugins=[MoEPrecision(precision)])  # type: ignore[arg-type]
    trainer.fit(module, tiny.loader(tiny.tokens(2), rank, world))
    for buffer_name, buffer in module.net.named_buffers():
        if buffer.is_floating_point():
            module.note("bias" if buffer_name.endswith("correction_bias") else "rotary", buffer)
    return module.dtypes


@pytest.mark.parametrize("family", ["qwen3", "deepseek"])
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_what_decides_is_float32(precision: str, family: str) -> None:
    for dtypes in run_ranks(fit_watched, 2, precision, family):
        assert dtypes["router"] == {torch.float32}, "logits, scores and weights"
        assert dtypes["loss"] == dtypes["rotary"] == {torch.float32}
        assert dtypes["rows"] == {torch.bfloat16}
        if family == "deepseek":
            assert dtypes["bias"] == {torch.float32}
            assert dtypes["kept"] == {torch.float32}, "of the router, which the model keeps in float32"


def test_statistics_of_norms_are_float32() -> None:
    norm = tiny.qwen3_moe().model.norm
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = norm(x.float())
    MoEPrecision("bf16-true").convert_module(norm)
    assert torch.equal(norm(x), exact.bfloat16())


def test_weights_that_the_model_keeps_in_float32_stay_so() -> None:
    model = nn.ModuleDict({"net": deepseek()})
    kept = kept_in_float32(model)
    assert "net.model.layers.1.mlp.gate.weight" in kept
    assert "net.model.layers.1.mlp.gate.e_score_correction_bias" in kept
    assert "net.model.layers.1.mlp.shared_experts.gate_proj.weight" not in kept
    MoEPrecision("bf16-true").convert_module(model.to(torch.bfloat16))
    dtypes = {name: t.dtype for name, t in (*model.named_parameters(), *model.named_buffers())}
    assert {dtypes[name] for name in kept} == {torch.float32}
    assert dtypes["net.lm_head.weight"] == torch.bfloat16


def test_the_strategy_takes_the_plugin() -> None:
    trainer = tiny.trainer(tiny.moe_ep(), plugins=[MoEPrecision("bf16-mixed", transformer_engine={"recipe": "block"})])
    assert isinstance(trainer.strategy, ExpertParallelStrategy)
    assert trainer.precision_plugin.transformer_engine == TransformerEngineConfig(recipe="block")
