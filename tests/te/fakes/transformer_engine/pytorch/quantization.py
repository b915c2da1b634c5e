"""Contexts and global state of low precision."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ..common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)
from ..device import DEVICE


def _answer(supported: bool, reason: str, return_reason: bool) -> bool | tuple[bool, str]:
    reason = "" if supported else reason
    return (supported, reason) if return_reason else supported


def is_fp8_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    reason = "Device compute capability 8.9 or higher required for FP8 execution."
    return _answer(DEVICE.cuda and DEVICE.capability >= (8, 9), reason, return_reason)


def is_mxfp8_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    reason = "Device compute capability 10.0 or higher required for MXFP8 execution."
    return _answer(DEVICE.cuda and (10, 0) <= DEVICE.capability < (12, 0), reason, return_reason)


def is_fp8_block_scaling_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    reason = "FP8 block scaled GEMM requires compute capability 9.0 or higher and CUDA >= 12.9."
    return _answer(DEVICE.cuda and DEVICE.capability >= (9, 0), reason, return_reason)


def is_nvfp4_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    reason = "Device compute capability 10.0 or higher required for NVFP4 execution."
    return _answer(DEVICE.cuda and DEVICE.capability >= (10, 0), reason, return_reason)


_CHECKS = {
    DelayedScaling: is_fp8_available,
    Float8CurrentScaling: is_fp8_available,
    Float8BlockScaling: is_fp8_block_scaling_available,
    MXFP8BlockScaling: is_mxfp8_available,
    NVFP4BlockScaling: is_nvfp4_available,
}


def get_default_recipe() -> Recipe:
    return MXFP8BlockScaling() if is_mxfp8_available() else DelayedScaling()


def get_align_size_for_quantization(recipe: Recipe) -> int:
    return 32 if recipe.mxfp8() else 128 if recipe.nvfp4() else 16


@dataclass
class _State:
    enabled: bool = False
    calibrating: bool = False
    recipe: Recipe | None = None
    group: Any = None
    parameters: bool = False
    depth: int = 0
    # Layers with a history of magnitudes, in the order of their first forward, with their recipe and group.
    histories: list[tuple[Any, Recipe, Any]] = field(default_factory=list)
    # What an observer sees: (recipe class, group, whether it was enabled) of each autocast, and each all-reduce.
    entered: list[tuple[str, Any, bool]] = field(default_factory=list)
    reductions: list[tuple[Any, int]] = field(default_factory=list)


class FP8GlobalStateManager:
    """The state of the process."""

    state = _State()

    @classmethod
    def reset(cls) -> None:
        cls.state = _State()

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return cls.state.enabled

    @classmethod
    def get_fp8_recipe(cls) -> Recipe:
        return get_default_recipe() if cls.state.recipe is None else cls.state.recipe

    @classmethod
    def get_fp8_group(cls) -> Any:
        return cls.state.group

    @classmethod
    def register(cls, layer: Any) -> None:
        """Remember a layer whose scales are delayed: it takes part in every later reduction."""
        if not any(known is layer for known, _, _ in cls.state.histories):
            cls.state.histories.append((layer, cls.get_fp8_recipe(), cls.state.group))

    @classmethod
    def reduce_and_update(cls) -> None:
        """One reduction for each recipe and group, over the layers seen so far; then new scales."""
        together: dict[str, list[tuple[Any, Recipe, Any]]] = {}
        for entry in cls.state.histories:
            together.setdefault(f"{entry[1]} {id(entry[2])}", []).append(entry)
        for entries in together.values():
            recipe, group = entries[0][1], entries[0][2]
            amax = torch.cat([layer.amax_history[0] for layer, _, _ in entries])
            ranks = dist.get_world_size(group) if dist.is_initialized() else 1
            if recipe.reduce_amax and ranks > 1:  # type: ignore[attr-defined]
                cls.state.reductions.append((group, amax.numel()))
                dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)
            parts = amax.split([layer.amax_history.shape[1] for layer, _, _ in entries])
            for (layer, _, _), part in zip(entries, parts, strict=True):
                layer.update_scales(part, recipe)


class autocast:
    """Low precision for the layers called inside."""

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Recipe | None = None,
        amax_reduction_group: Any = None,
        _graph: bool = False,
    ) -> None:
        self._wanted = (enabled, calibrating, recipe, amax_reduction_group)
        self._before: tuple[Any, ...] | None = None

    def __enter__(self) -> "autocast":
        if self._before is not None:
            raise RuntimeError("autocast context manager cannot be entered more than once concurrently")
        enabled, calibrating, recipe, group = self._wanted
        recipe = get_default_recipe() if recipe is None else recipe
        if enabled:
            available, reason = _CHECKS[type(recipe)](return_reason=True)  # type: ignore[misc]
            if not available:
                raise RuntimeError(reason)
        state = FP8GlobalStateManager.state
        self._before = (state.enabled, state.calibrating, state.recipe, state.group)
        state.enabled, state.calibrating, state.recipe, state.group = enabled, calibrating, recipe, group
        state.depth += 1
        state.entered.append((type(recipe).__name__, group, enabled))
        return self

    def __exit__(self, *_: object) -> None:
        state = FP8GlobalStateManager.state
        assert self._before is not None
        state.enabled, state.calibrating, state.recipe, state.group = self._before
        self._before = None
        state.depth -= 1
        if self._wanted[0] and state.depth == 0 and torch.is_grad_enabled():
            FP8GlobalStateManager.reduce_and_update()


def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Recipe | None = None,
    fp8_group: Any = None,
    _graph: bool = False,
) -> autocast:
    warnings.warn("fp8_autocast is deprecated, use autocast", DeprecationWarning, stacklevel=2)
    return autocast(enabled, calibrating, fp8_recipe, fp8_group, _graph)


@contextmanager
def quantized_model_init(
    enabled: bool = True, recipe: Recipe | None = None, preserve_high_precision_init_val: bool = False
) -> Iterator[None]:
    state = FP8GlobalStateManager.state
    before = (state.parameters, state.recipe)
    state.parameters, state.recipe = enabled, get_default_recipe() if recipe is None else recipe
    try:
        yield
    finally:
        state.parameters, state.recipe = before


@contextmanager
def fp8_model_init(
    enabled: bool = True, recipe: Recipe | None = None, preserve_high_precision_init_val: bool = False
) -> Iterator[None]:
    warnings.warn("fp8_model_init is deprecated, use quantized_model_init", DeprecationWarning, stacklevel=2)
    with quantized_model_init(enabled, recipe, preserve_high_precision_init_val):
        yield
