"""What Transformer Engine would compute of a model, found without Transformer Engine."""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from lightning_moe.float32 import kept_in_float32
from lightning_moe.optional import loaded
from lightning_moe.te.attention import attention_reason, calls_registry
from lightning_moe.te.norms import RMSNormFacts, rms_norm_facts
from lightning_moe.te.options import TransformerEngineConfig, check_patterns, matches
from lightning_moe.te.recipes import recipe_facts

LINEAR, RMS_NORM, LAYER_NORM, ATTENTION = "te.Linear", "te.RMSNorm", "te.LayerNorm", "te.DotProductAttention"
_KINDS = {LINEAR: "linear", RMS_NORM: "norm", LAYER_NORM: "norm", ATTENTION: "attention"}
EXPERTS = "experts: experts_backend decides what computes them"
MARK = "_lightning_moe_te"


@dataclass(frozen=True)
class Item:
    """What becomes of one module.

    Attributes:
        name: Its qualified name.
        module: The module.
        source: What it is now.
        target: The layer that takes its place, an empty string where it is left alone.
        reason: Why it is left alone.
        detail: What the layer needs to know beside its shapes.
    """

    name: str
    module: nn.Module = field(repr=False)
    source: str
    target: str = ""
    reason: str = ""
    detail: Any = None


@dataclass(frozen=True)
class Row:
    """Modules of repeated blocks of which the same becomes.

    Attributes:
        name: Their qualified name, with ``*`` in the place of numbers.
        source: What they are now.
        target: The layer that takes their place, an empty string where they are left alone.
        count: How many they are.
        reason: Why they are left alone, or what the layer is made to do.
    """

    name: str
    source: str
    target: str
    count: int
    reason: str


@dataclass(frozen=True)
class Plan:
    """What becomes of a model.

    Attributes:
        items: One for each module with parameters of its own, and for each attention.
    """

    items: tuple[Item, ...]

    @property
    def swapped(self) -> list[Item]:
        """The modules that Transformer Engine computes."""
        return [item for item in self.items if item.target]

    @property
    def rows(self) -> list[Row]:
        """The items, with repeated blocks as one row."""
        counts: dict[tuple[str, str, str, str], int] = {}
        for item in self.items:
            zero_centered = isinstance(item.detail, RMSNormFacts) and item.detail.zero_centered
            reason = "zero_centered_gamma" if item.target and zero_centered else item.reason
            key = (_collapsed(item.name), item.source, item.target, reason)
            counts[key] = counts.get(key, 0) + 1
        return [Row(name, source, target, count, reason) for (name, source, target, reason), count in counts.items()]


def make_plan(
    model: nn.Module,
    options: TransformerEngineConfig,
    experts: Collection[nn.Module] = (),
    routers: Collection[nn.Module] = (),
) -> Plan:
    """Decide for each module of a model whether Transformer Engine computes it.

    Args:
        model: The model, on any device, before it is sharded.
        options: What the user wants.
        experts: Its experts modules.
        routers: Its routers.

    Raises:
        ValueError: If a pattern matches nothing, or if nothing is left for Transformer Engine.
    """
    check_patterns(options, [name for name, _ in model.named_modules() if name])
    planner = _Planner(model, options, experts, routers)
    items = _all_or_none(planner.items())
    plan = Plan(tuple(items))
    already = any(item.reason == _ALREADY for item in items)
    if not plan.swapped and not already:
        first = {row.reason: row.name for row in reversed(plan.rows)}
        reasons = "; ".join(f"{name}: {reason}" for reason, name in first.items())
        raise ValueError(
            "transformer_engine: there is nothing in the model that Transformer Engine would compute"
            f" ({reasons}). Change layers, include or exclude, or leave transformer_engine out"
        )
    return plan


_ALREADY = "a layer of Transformer Engine already"


class _Planner:
    """Looks at the modules of one model."""

    def __init__(
        self,
        model: nn.Module,
        options: TransformerEngineConfig,
        experts: Collection[nn.Module],
        routers: Collection[nn.Module],
    ) -> None:
        self.model = model
        self.options = options
        self.experts = {id(module) for module in experts}
        self.inside_experts = {id(inner) for module in experts for inner in module.modules()}
        self.routers = {id(inner) for module in routers for inner in module.modules()}
        self.float32 = kept_in_float32(model)
        self.facts = None if options.recipe is None else recipe_facts(options.recipe)
        self.owners: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self.owners.setdefault(id(parameter), []).append(name.rpartition(".")[0])
        self.adapted = {id(inner) for layer in _adapters(model) for inner in layer.modules()}

    def items(self) -> list[Item]:
        """One for each module with parameters of its own, and for each attention."""
        found = []
        for name, module in self.model.named_modules():
            if id(module) in self.inside_experts:
                if id(module) in self.experts:
                    found.append(self._left(name, module, EXPERTS))
                continue
            if calls_registry(module):
                found.append(self._attention(name, module))
            elif next(module.parameters(recurse=False), None) is not None:
                found.append(self._layer(name, module))
        return found

    def _left(self, name: str, module: nn.Module, reason: str) -> Item:
        return Item(name, module, type(module).__name__, reason=reason)

    def _attention(self, name: str, module: nn.Module) -> Item:
        reason = self._unwanted(name, ATTENTION) or attention_reason(module)
        if reason:
            return self._left(name, module, reason)
        return Item(name, module, type(module).__name__, ATTENTION)

    def _layer(self, name: str, module: nn.Module) -> Item:
        if reason := self._untouchable(name, module):
            return self._left(name, module, reason)
        target, detail, reason = self._target(module)
        if reason:
            return self._left(name, module, reason)
        reason = self._unwanted(name, target) or self._unsuitable(name, module, target)
        if reason:
            return self._left(name, module, reason)
        return Item(name, module, type(module).__name__, target, detail=detail)

    def _untouchable(self, name: str, module: nn.Module) -> str:
        """Why a module stays as it is, whatever its class."""
        if hasattr(module, MARK):
            return _ALREADY
        if id(module) in self.routers:
            return "router: it decides in router_dtype"
        if id(module) in self.adapted:
            return "part of an adapter layer of PEFT"
        own = [f"{name}.{parameter}" for parameter, _ in module.named_parameters(recurse=False)]
        if any(parameter in self.float32 for parameter in own):
            return "the model keeps it in float32"
        return ""

    def _target(self, module: nn.Module) -> tuple[str, Any, str]:
        """The layer for a module, what it needs to know, and the reason where there is none."""
        if isinstance(module, nn.Linear):
            other = type(module) is not nn.Linear
            return LINEAR, None, f"{type(module).__name__} extends nn.Linear" if other else ""
        if isinstance(module, nn.LayerNorm):
            if type(module) is not nn.LayerNorm:
                return LAYER_NORM, None, f"{type(module).__name__} extends nn.LayerNorm"
            return LAYER_NORM, None, "" if module.bias is not None else "te.LayerNorm always has a bias, this has none"
        facts = rms_norm_facts(module)
        if isinstance(facts, RMSNormFacts):
            return RMS_NORM, facts, ""
        return "", None, facts or "Transformer Engine has no such layer"

    def _unwanted(self, name: str, target: str) -> str:
        """Why the user does not want it."""
        if pattern := matches(name, self.options.exclude):
            return f"exclude={pattern!r}"
        if not matches(name, self.options.include):
            return "not in include"
        kind = _KINDS[target]
        return "" if kind in self.options.layers else f"layers leaves out {kind!r}"

    def _unsuitable(self, name: str, module: nn.Module, target: str) -> str:
        """Why the layer could not stand in for this module."""
        if "forward" in vars(module):
            return "somebody has replaced its forward"
        own = {name for name, _ in module.named_parameters(recurse=False)}
        if not own <= {"weight", "bias"} or module._buffers or module._modules:
            return "it has more than a weight and a bias"
        for parameter_name, parameter in module.named_parameters(recurse=False):
            if not parameter.is_floating_point():
                return f"its {parameter_name} is {str(parameter.dtype).removeprefix('torch.')}"
            others = [owner for owner in self.owners[id(parameter)] if self.model.get_submodule(owner) is not module]
            if others:
                return f"shares its {parameter_name} with {_collapsed(others[0])}"
        if target == LINEAR and self.facts is not None:
            out_features, in_features = module.weight.shape  # type: ignore[misc]
            if out_features % self.facts.width or in_features % self.facts.width:
                return (
                    f"{self.facts.class_name} needs widths that are multiples of {self.facts.width}, this has"
                    f" {in_features} and {out_features}"
                )
        return ""


def _adapters(model: nn.Module) -> list[nn.Module]:
    peft = loaded("peft")
    if peft is None:
        return []
    kinds = (peft.tuners.tuners_utils.BaseTunerLayer, peft.utils.other.AuxiliaryTrainingWrapper)
    return [module for module in model.modules() if isinstance(module, kinds)]


def _all_or_none(items: Sequence[Item]) -> list[Item]:
    """Leave alone all attention that shares a configuration with one that is left alone: the choice is made there."""
    left: dict[int, Item] = {}
    for item in items:
        if not item.target and calls_registry(item.module):
            left.setdefault(id(item.module.config), item)
    result = []
    for item in items:
        other = left.get(id(item.module.config)) if item.target == ATTENTION else None
        if other is not None:
            reason = (
                f"a model chooses one attention for all, and {_collapsed(other.name)} is left alone: {other.reason}"
            )
            item = Item(item.name, item.module, item.source, reason=reason)
        result.append(item)
    return result


def _collapsed(name: str) -> str:
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
