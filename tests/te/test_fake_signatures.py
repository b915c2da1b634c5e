"""The stand-in of Transformer Engine has the signatures of the releases, as they were read from their sources."""

import inspect
import json
import os
from importlib import import_module
from typing import Any

import pytest

from tests.te import fakes
from tests.te.fakes.record_te import RECORD

_ENUMS_AND_CALLS = {"Format", "MMParams"}


def recorded(version: str) -> dict[str, list[list[Any]]]:
    return json.loads(RECORD.read_text())[version]["signatures"]


def find(te: Any, name: str) -> Any:
    """What a recorded name stands for in the stand-in."""
    if name.startswith("recipe."):
        return getattr(import_module("transformer_engine.common.recipe"), name.removeprefix("recipe."))
    if name.startswith("ops."):
        return getattr(import_module("transformer_engine.pytorch.norms"), f"{name.removeprefix('ops.')}Operation")
    found = te
    for part in name.split("."):
        found = getattr(found, part)
    return found


def default(text: str | None, value: Any) -> Any:
    """The recorded default as a value: its text names things of the library and of the standard library."""
    if text is None:
        return inspect.Parameter.empty
    recipes = vars(import_module("transformer_engine.common.recipe"))
    return eval(text, {"os": os, "torch": import_module("torch"), **recipes})


@pytest.mark.parametrize("version", fakes.VERSIONS)
def test_the_stand_in_has_the_signatures_of_the_release(version: str) -> None:
    with fakes.installed(version) as te:
        for name, signature in recorded(version).items():
            parameters = list(inspect.signature(find(te, name)).parameters.values())
            if inspect.isfunction(find(te, name)) and "." in find(te, name).__qualname__:
                parameters = parameters[1:]  # self of a method of a class
            got = [[p.name, p.kind.name] for p in parameters]
            assert got == [[parameter, kind] for parameter, kind, _ in signature], name
            for parameter, (_, _, text) in zip(parameters, signature, strict=True):
                assert parameter.default == default(text, parameter.default), f"{name}: {parameter.name}"


def test_the_record_holds_what_the_package_calls() -> None:
    for version in fakes.VERSIONS:
        names = set(recorded(version))
        assert {"GroupedLinear", "GroupedLinear.forward", "Linear", "autocast", "recipe.MXFP8BlockScaling"} <= names
