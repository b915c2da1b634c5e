"""Recipes of low precision: their names, what they need, and what is said where it is not there."""

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_moe import MoEPrecision, optional
from lightning_moe.te import TransformerEngineConfig, swap
from lightning_moe.te.recipes import RECIPES, build_recipe, recipe_facts
from tests.te import fakes


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Without the check that there is a CUDA device."""
    monkeypatch.setattr(swap, "DEVICES", ("cpu", "cuda"))
    yield
    fakes.remove()


def convert(**options: Any) -> None:
    model = nn.ModuleDict({"layer": nn.Linear(32, 32)})
    MoEPrecision("bf16-mixed", transformer_engine=options).convert_module(model)


# Names and objects


@pytest.mark.parametrize("facts", RECIPES, ids=lambda facts: facts.name)
def test_each_recipe_has_two_names_and_can_be_an_object(facts: Any, anywhere: None) -> None:
    with fakes.installed() as te:
        made = build_recipe(facts.name)
        assert type(made).__name__ == facts.class_name
        assert type(build_recipe(facts.class_name)) is type(made)
        assert build_recipe(made) is made
        assert recipe_facts(facts.class_name) is recipe_facts(made) is facts
        convert(recipe=made)
        aligned = te.quantization.get_align_size_for_quantization(made)
        assert facts.rows % aligned == 0, "experts and linear layers are padded alike"


def test_a_recipe_takes_options_from_yaml() -> None:
    with fakes.installed():
        formats = import_module("transformer_engine.common.recipe").Format
        made = build_recipe({"name": "delayed", "amax_history_len": 16, "fp8_format": "E4M3"})
        assert (made.amax_history_len, made.fp8_format) == (16, formats.E4M3)
        by_class = {"class_path": "transformer_engine.common.recipe.DelayedScaling", "init_args": {"margin": 2}}
        assert build_recipe(by_class).margin == 2
        with pytest.raises(ValueError, match=r"amax_histroy_len"):
            build_recipe({"name": "delayed", "amax_histroy_len": 16})


def test_a_recipe_of_somebodys_own() -> None:
    with fakes.installed():
        base = import_module("transformer_engine.common.recipe").Recipe

        class Mine(base):  # type: ignore[valid-type,misc]
            quantization_alignment = 64

        assert recipe_facts(Mine()).width == 64
        assert TransformerEngineConfig(recipe=Mine()).recipe is not None


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("mxfp4", ["recipe='mxfp4'", "'nvfp4' (NVFP4BlockScaling)"]),
        ({"amax_history_len": 16}, ["has no 'name'"]),
        (7, ["recipe=7", "transformer_engine.common.recipe"]),
        (int, ["recipe=int is a class"]),
        ({"class_path": "my.package.DelayedScaling"}, ["class_path='my.package.DelayedScaling'", "as an object"]),
        ({"class_path": "DelayedScaling", "margin": 1}, ["'margin' beside class_path", "init_args"]),
    ],
)
def test_what_is_no_recipe_is_refused_at_once(recipe: Any, words: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        MoEPrecision(transformer_engine={"recipe": recipe})
    for word in words:
        assert word in str(error.value)


# What is not there


@pytest.mark.parametrize(
    ("capability", "recipe", "words"),
    [
        ((8, 0), "current", ["recipe='current'", "compute capability 8.9", "recipe=None"]),
        ((9, 0), "mxfp8", ["recipe='mxfp8'", "compute capability 10.0", "'delayed' or 'current' or 'block'"]),
        ((9, 0), "NVFP4BlockScaling", ["recipe='nvfp4'", "compute capability 10.0"]),
        ((8, 9), "block", ["recipe='block'", "compute capability 9.0", "CUDA 12.9"]),
        ((12, 0), "mxfp8", ["recipe='mxfp8'", "'nvfp4'"]),
    ],
)
def test_the_wrong_chip_is_named(anywhere: None, capability: tuple[int, int], recipe: str, words: list[str]) -> None:
    with fakes.installed(capability=capability), pytest.raises(RuntimeError) as error:
        convert(recipe=recipe)
    for word in words:
        assert word in str(error.value), str(error.value)
    with fakes.installed(capability=capability):
        convert()  # bfloat16 needs none


def test_the_device_is_named(anywhere: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H200")
    with (
        fakes.installed(capability=(9, 0)),
        pytest.raises(RuntimeError, match=r"this device is H200 with compute capability 9\.0"),
    ):
        convert(recipe="mxfp8")


def test_without_the_package() -> None:
    fakes.remove()
    with pytest.raises(RuntimeError, match=r"'transformer_engine', which is not installed: pip install .*\[te\]"):
        convert()


def test_a_package_that_cannot_be_imported_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "transformer_engine"
    package.mkdir()
    package.joinpath("__init__.py").write_text("raise OSError('libcuda.so.1: cannot open shared object file')")
    monkeypatch.syspath_prepend(str(tmp_path))
    optional.probe.cache_clear()
    try:
        with pytest.raises(RuntimeError, match=r"cannot be imported: OSError: libcuda\.so\.1"):
            convert()
    finally:
        sys.modules.pop("transformer_engine", None)
        optional.probe.cache_clear()


def test_without_a_gpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with fakes.installed(), pytest.raises(RuntimeError, match=r"no CUDA device here\. Run on a GPU, or leave"):
        convert()


def test_a_package_that_is_too_old(anywhere: None) -> None:
    with fakes.installed() as te:
        del te.autocast
        with pytest.raises(RuntimeError, match=r"has no autocast, 2\.16 has; upgrade"):
            convert()
    with fakes.installed() as te:
        del te.is_nvfp4_available
        with pytest.raises(RuntimeError, match=r"recipe='nvfp4' is not known to version.*upgrade"):
            convert(recipe="nvfp4")
    with fakes.installed():
        del import_module("transformer_engine.common.recipe").NVFP4BlockScaling
        with pytest.raises(RuntimeError, match=r"recipe='nvfp4' needs NVFP4BlockScaling.*upgrade"):
            convert(recipe="nvfp4")


def test_a_failed_set_up_leaves_the_model_as_it_was(anywhere: None) -> None:
    model = nn.ModuleDict({"layer": nn.Linear(32, 32)})
    with fakes.installed(capability=(9, 0)):
        with pytest.raises(RuntimeError):
            MoEPrecision(transformer_engine={"recipe": "mxfp8"}).convert_module(model)
        with pytest.raises(RuntimeError, match="marign"):
            MoEPrecision(transformer_engine={"recipe": {"name": "current", "marign": 1}}).convert_module(model)
    assert type(model["layer"]) is nn.Linear
