"""Norms are known by what they compute: every model family has a class of its own for the same formula."""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_TOLERANCE = 1e-4


@dataclass(frozen=True)
class RMSNormFacts:
    """What an RMSNorm computes.

    Attributes:
        eps: What is added to the mean square.
        zero_centered: It multiplies by ``1 + weight``.
    """

    eps: float
    zero_centered: bool


def rms_norm_facts(module: nn.Module) -> RMSNormFacts | str:
    """Find out whether a module computes ``x / sqrt(mean(x^2) + eps)`` times ``weight`` or ``1 + weight``.

    It is tried on a few random numbers, with a weight of the same size; the module itself is not touched, and may be on
    any device.

    Args:
        module: A module.

    Returns:
        What it computes; a reason in one line where it is a norm, but another one; an empty string where it does not
        look like a norm.
    """
    own = dict(module.named_parameters(recurse=False))
    if list(own) != ["weight"] or own["weight"].ndim != 1 or any(True for _ in module.children()):
        return ""
    inputs = [p for p in inspect.signature(type(module).forward).parameters.values() if p.name != "self"]
    named = "norm" in type(module).__name__.lower()
    if len(inputs) != 1 or inputs[0].kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
        return "its forward takes more than what it normalizes" if named else ""
    epsilons = {value for value in vars(module).values() if isinstance(value, float) and 0 < value < 0.1}
    if not epsilons:
        return "it has no fixed epsilon" if named else ""
    width = own["weight"].shape[0]
    try:
        with torch.device("cpu"):
            found = _compare(module, width, sorted(epsilons))
    except Exception:
        return "it cannot be tried on random numbers" if named else ""
    return found if found or not named else "it computes something else than x / rms(x) * weight"


@torch.no_grad()
def _compare(module: nn.Module, width: int, epsilons: list[float]) -> RMSNormFacts | str:
    generator = torch.Generator().manual_seed(0)
    weight = torch.rand(width, generator=generator, dtype=torch.float32) + 0.5
    unit = torch.randn(2, width, generator=generator, dtype=torch.float32)
    for eps in epsilons:
        # Once where the epsilon does not matter, and once where it is as large as the mean square.
        x = torch.stack([unit, unit * eps**0.5])
        got = _forward_with(module, weight, x)
        if not isinstance(got, Tensor) or got.shape != x.shape:
            return ""
        normal = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
        for zero_centered in (False, True):
            wanted = normal * (weight + 1 if zero_centered else weight)
            if torch.allclose(got.float(), wanted, rtol=_TOLERANCE, atol=1e-6):
                coarse = _forward_with(module, weight.bfloat16(), unit.bfloat16())
                if coarse.dtype != torch.bfloat16:
                    return f"its result is {str(coarse.dtype).removeprefix('torch.')} for bfloat16"
                return RMSNormFacts(eps, zero_centered)
    return ""


def _forward_with(module: nn.Module, weight: Tensor, x: Tensor) -> Any:
    """The forward of a module's class with another weight."""
    double = object.__new__(type(module))
    double.__dict__.update(vars(module))
    double.__dict__["_parameters"] = {"weight": nn.Parameter(weight, requires_grad=False)}
    return type(module).forward(double, x)
