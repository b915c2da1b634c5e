"""Transformer Engine's recipes of low precision: their names, what they need, and how one is made."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from lightning_moe.optional import one_line, probe

PACKAGE = "transformer_engine"


@dataclass(frozen=True)
class RecipeFacts:
    """What a kind of recipe is called and what it needs.

    Attributes:
        name: Its short name, an empty string for a recipe of the user's own.
        class_name: Its class in ``transformer_engine.common.recipe``.
        needs: Devices that can compute it, in words.
        check: The function of ``transformer_engine.pytorch`` that says whether this device can.
        width: Multiple that both widths of a weight must be of.
        rows: Multiple that the number of tokens is padded to.
        summary: What it does, in a few words.
    """

    name: str
    class_name: str
    needs: str
    check: str
    width: int
    rows: int
    summary: str


# Widths: fp8 products take rows of 16 bytes; MXFP8 shares a scale among 32 values, along both dimensions of a weight,
# because the backward pass multiplies by its transpose; NVFP4 needs 16 bytes of two values each. Rows: the weight
# gradient is a product over the rows, so that they follow the widths; NVFP4's kernels take blocks of 128.
RECIPES: tuple[RecipeFacts, ...] = (
    RecipeFacts(
        "delayed",
        "DelayedScaling",
        "compute capability 8.9 or higher (Ada, Hopper, Blackwell)",
        "is_fp8_available",
        16,
        16,
        "fp8, one scale a tensor from the magnitudes of earlier steps",
    ),
    RecipeFacts(
        "current",
        "Float8CurrentScaling",
        "compute capability 8.9 or higher (Ada, Hopper, Blackwell)",
        "is_fp8_available",
        16,
        16,
        "fp8, one scale a tensor from its own magnitude",
    ),
    RecipeFacts(
        "block",
        "Float8BlockScaling",
        "compute capability 9.0 or higher (Hopper) and CUDA 12.9 or newer",
        "is_fp8_block_scaling_available",
        16,
        16,
        "fp8, one scale for 128 values or 128 x 128",
    ),
    RecipeFacts(
        "mxfp8",
        "MXFP8BlockScaling",
        "compute capability 10.0 or higher (Blackwell)",
        "is_mxfp8_available",
        32,
        32,
        "fp8, one scale for 32 values",
    ),
    RecipeFacts(
        "nvfp4",
        "NVFP4BlockScaling",
        "compute capability 10.0 or higher (Blackwell)",
        "is_nvfp4_available",
        32,
        128,
        "4 bits, one scale for 16 values",
    ),
)


def check_recipe(recipe: Any) -> None:
    """Check the option ``recipe`` without Transformer Engine.

    Raises:
        ValueError: If there is no recipe of that name.
    """
    if recipe is not None and not isinstance(recipe, type):
        recipe_facts(recipe)
        return
    if recipe is not None:
        raise ValueError(
            f"transformer_engine: recipe={recipe.__name__} is a class; give a recipe, or its name in quotes"
        )


def recipe_facts(recipe: Any) -> RecipeFacts:
    """Look up what a recipe needs, without Transformer Engine.

    Args:
        recipe: A name, a mapping with one, or a recipe object.

    Raises:
        ValueError: If there is no recipe of that name.
    """
    name, _ = _name_and_options(recipe)
    if name is not None:
        for facts in RECIPES:
            if name in (facts.name, facts.class_name):
                return facts
        allowed = ", ".join(f"{facts.name!r} ({facts.class_name})" for facts in RECIPES)
        raise ValueError(f"transformer_engine: recipe={name!r} is not known; allowed are {allowed}, a recipe or None")
    classes = [cls.__name__ for cls in type(recipe).__mro__]
    if "Recipe" not in classes:
        raise ValueError(
            f"transformer_engine: recipe={recipe!r} is not a recipe of transformer_engine.common.recipe; give one, or a"
            f" name: {', '.join(repr(facts.name) for facts in RECIPES)}"
        )
    for facts in RECIPES:
        if facts.class_name in classes:
            return facts
    # A recipe of the user's own says itself what its products need.
    multiple = int(getattr(recipe, "quantization_alignment", 128))
    return RecipeFacts("", classes[0], "what the recipe needs", "", multiple, multiple, "a recipe of your own")


def is_delayed(recipe: Any) -> bool:
    """Whether the scales of a recipe come from earlier steps; ``None`` has none. Without Transformer Engine."""
    return recipe is not None and recipe_facts(recipe).class_name == "DelayedScaling"


def build_recipe(recipe: Any) -> Any:
    """Make the recipe object. Transformer Engine must be there.

    Args:
        recipe: A name, a mapping with one, a recipe object or ``None``.

    Returns:
        The recipe, ``None`` for ``None``.

    Raises:
        RuntimeError: If the installed Transformer Engine does not have it.
        ValueError: If it does not take an option.
    """
    name, options = _name_and_options(recipe)
    if recipe is None or name is None:
        return recipe
    facts, module = recipe_facts(name), _recipes_module()
    cls = getattr(module, facts.class_name, None)
    if cls is None:
        raise RuntimeError(
            f"transformer_engine: recipe={name!r} needs {facts.class_name}, which version"
            f" {probe(PACKAGE).version} of the package does not have; upgrade: pip install -U 'lightning-moe[te]'"
        )
    for key in ("fp8_format", "fp4_format"):
        if isinstance(options.get(key), str):
            options[key] = module.Format[options[key].upper()]
    try:
        return cls(**options)
    except (TypeError, AssertionError, ValueError) as error:
        raise ValueError(f"transformer_engine: recipe={recipe!r} cannot be made: {one_line(error)}") from error


def unusable_recipe(recipe: Any) -> str:
    """Say why this device cannot compute a recipe, with the fix; an empty string where it can.

    Args:
        recipe: A name, a mapping with one, or a recipe object. Transformer Engine must be there.
    """
    facts = recipe_facts(recipe)
    te = probe(PACKAGE).module
    if not facts.check:
        return ""
    check = getattr(te, facts.check, None)
    if check is None:
        return (
            f"transformer_engine: recipe={facts.name!r} is not known to version {probe(PACKAGE).version} of the package"
            " (2.16 knows it); upgrade: pip install -U 'lightning-moe[te]'"
        )
    usable, reason = check(return_reason=True)
    if usable:
        return ""
    others = [other.name for other in RECIPES if getattr(te, other.check, lambda: False)()]
    fix = f"set recipe={' or '.join(map(repr, others))}, or None" if others else "set recipe=None for bfloat16"
    return (
        f"transformer_engine: recipe={facts.name!r} needs {facts.needs}; {device_in_words()}"
        f" (Transformer Engine: {reason or 'not available'}). {fix[0].upper()}{fix[1:]}"
    )


def device_in_words() -> str:
    """Name this process's device and its compute capability."""
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    major, minor = torch.cuda.get_device_capability()
    return f"this device is {torch.cuda.get_device_name()} with compute capability {major}.{minor}"


def _name_and_options(recipe: Any) -> tuple[str | None, dict[str, Any]]:
    """The name of a recipe that is not made yet, with its options."""
    if isinstance(recipe, str):
        return recipe, {}
    if not isinstance(recipe, Mapping):
        return None, {}
    if "class_path" in recipe:
        package, _, name = str(recipe["class_path"]).rpartition(".")
        if package not in ("", f"{PACKAGE}.common.recipe", f"{PACKAGE}.pytorch"):
            raise ValueError(
                f"transformer_engine: recipe has class_path={recipe['class_path']!r}; allowed are the classes of"
                f" {PACKAGE}.common.recipe. Give a recipe of your own as an object, from Python"
            )
        if unknown := sorted(set(recipe) - {"class_path", "init_args"}):
            raise ValueError(
                f"transformer_engine: recipe={dict(recipe)!r} has {', '.join(map(repr, unknown))} beside class_path;"
                " options of a recipe belong under init_args"
            )
        return name, dict(recipe.get("init_args") or {})
    options = dict(recipe)
    name = options.pop("name", None)
    if not isinstance(name, str):
        raise ValueError(
            f"transformer_engine: recipe={dict(recipe)!r} has no 'name'; give one, like {{'name': 'delayed'}}"
        )
    return name, options


def _recipes_module() -> ModuleType:
    te = probe(PACKAGE).module
    assert te is not None
    return importlib.import_module(f"{te.__name__.rpartition('.')[0]}.common.recipe")
