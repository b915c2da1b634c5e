"""What a user says about Transformer Engine, and which modules the patterns mean."""

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Any

from lightning_moe.te.recipes import check_recipe

LAYERS = ("linear", "norm", "attention")


@dataclass(frozen=True)
class TransformerEngineConfig:
    """Which layers Transformer Engine computes, and in which precision.

    A pattern is a qualified module name, or its end, with ``*`` and ``?``: ``"lm_head"``, ``"layers.0"`` or
    ``"*.self_attn.q_proj"``. It means the module and everything inside it.

    Args:
        layers: Kinds of layers: ``"linear"``, ``"norm"`` and ``"attention"``.
        include: Patterns of modules; others are left alone.
        exclude: Patterns of modules that are left alone all the same.
        recipe: Low precision of the linear layers in training: ``"delayed"``, ``"current"``, ``"block"``, ``"mxfp8"``
            or ``"nvfp4"``, the name of a recipe class of Transformer Engine, such a name with options
            (``{"name": "delayed", "amax_history_len": 16}``), or a recipe object. ``None``: the precision of the rest.
        quantize_evaluation: Use the recipe in validation, test and prediction too.
        cache_expert_weights: With ``experts_backend="te"`` and ``accumulate_grad_batches``, keep the low-precision
            copies of the experts' weights from the first micro-batch of an optimizer step to its last, instead of
            making them in each: for memory of one or two bytes a weight of all experts that a rank computes. Whoever
            changes a weight between those micro-batches must not set it. The linear
            layers never keep theirs: under FSDP2 Transformer Engine makes them from the gathered weights.

    Raises:
        ValueError: If an option has a value that is not allowed.
    """

    layers: Sequence[str] = LAYERS
    include: Sequence[str] = ("*",)
    exclude: Sequence[str] = ()
    recipe: Any = None
    quantize_evaluation: bool = False
    cache_expert_weights: bool = False

    def __post_init__(self) -> None:
        for name in ("layers", "include", "exclude"):
            value = getattr(self, name)
            if not isinstance(value, list | tuple) or not all(isinstance(entry, str) for entry in value):
                raise ValueError(
                    f"transformer_engine: {name}={value!r} must be a list of strings, like"
                    f" {[value] if isinstance(value, str) else [LAYERS[0] if name == 'layers' else 'lm_head']}"
                )
            object.__setattr__(self, name, tuple(value))
        unknown = [layer for layer in self.layers if layer not in LAYERS]
        if unknown or not self.layers:
            raise ValueError(
                f"transformer_engine: layers={list(self.layers)!r} must name one or more of"
                f" {', '.join(map(repr, LAYERS))}"
            )
        check_recipe(self.recipe)
        for name in ("quantize_evaluation", "cache_expert_weights"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"transformer_engine: {name}={getattr(self, name)!r} must be True or False")
        for name in ("quantize_evaluation", "cache_expert_weights"):
            if self.recipe is None and getattr(self, name):
                raise ValueError(
                    f"transformer_engine: {name}=True needs a recipe; set recipe='mxfp8' (or another), or leave {name}"
                    " out"
                )
        if self.recipe is not None and "linear" not in self.layers:
            raise ValueError(
                f"transformer_engine: recipe={self.recipe!r} is for linear layers, which layers={list(self.layers)!r}"
                " leaves out; add 'linear' or leave the recipe out"
            )

    @classmethod
    def of(cls, value: "TransformerEngineConfig | Mapping[str, Any] | None") -> "TransformerEngineConfig | None":
        """Take the options as an object or as a mapping.

        Raises:
            TypeError: If the value is neither.
            ValueError: If the mapping has an option that does not exist.
        """
        if value is None or isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise TypeError(
                f"transformer_engine={value!r} must be a TransformerEngineConfig, a mapping of its options, or None"
            )
        options = dict(value)
        if set(options) <= {"class_path", "init_args"} and options:
            if str(options.get("class_path", "")).rpartition(".")[2] != cls.__name__:
                raise ValueError(
                    f"transformer_engine: class_path={options.get('class_path')!r} must be"
                    f" 'lightning_moe.te.{cls.__name__}', or left out"
                )
            options = dict(options.get("init_args") or {})
        known = [field.name for field in fields(cls)]
        for name in options:
            if name not in known:
                raise ValueError(f"transformer_engine: there is no option {name!r}{_close(name, known)}")
        return cls(**options)


def matches(name: str, patterns: Sequence[str]) -> str:
    """Return the first pattern that means a module or a module around it, an empty string where none does.

    Args:
        name: Qualified name of the module.
        patterns: Patterns as in :class:`TransformerEngineConfig`.
    """
    parts = name.split(".")
    around = [".".join(parts[: end + 1]) for end in range(len(parts))]
    for pattern in patterns:
        if any(fnmatchcase(outer, pattern) or fnmatchcase(outer, f"*.{pattern}") for outer in around):
            return pattern
    return ""


def check_patterns(options: TransformerEngineConfig, names: Collection[str]) -> None:
    """Refuse patterns that mean nothing.

    Args:
        options: The options.
        names: Qualified names of all modules of the model.

    Raises:
        ValueError: If a pattern matches no module; the message holds names that are close to it.
    """
    for option in ("include", "exclude"):
        for pattern in getattr(options, option):
            if not any(matches(name, [pattern]) for name in names):
                raise ValueError(
                    f"transformer_engine: {option}={pattern!r} matches no module of the model"
                    f"{_close(pattern, _endings(names))}; `lightning-moe doctor --config FILE.yaml` lists the modules"
                )


def _endings(names: Collection[str]) -> list[str]:
    """Every end of every name, without repeated blocks."""
    found: dict[str, None] = {}
    for name in names:
        parts = ["*" if part.isdigit() else part for part in name.split(".")]
        for start in range(len(parts)):
            found.setdefault(".".join(parts[start:]))
    return list(found)


def _close(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    if not close and len(known) <= 8:
        return f"; there are {', '.join(map(repr, known))}"
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
