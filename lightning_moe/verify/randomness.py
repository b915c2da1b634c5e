"""What draws random numbers in a forward: ranks draw others than one process does."""

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

_NAMES = ("drop", "jitter")


def random_parts(model: nn.Module) -> list[str]:
    """List the rates of dropout and the like that are not zero, as ``module.attribute=rate``."""
    return [f"{name}.{attribute}={value}" for name, _, attribute, value in _rates(model)]


def switch_off(model: nn.Module) -> list[str]:
    """Set the rates of dropout and the like to zero.

    Covers the dropout modules of PyTorch, and rates that modules or their ``config`` keep as numbers under a name with
    "drop" or "jitter" in it, as those of Transformers do.

    Args:
        model: The model, sharded or whole.

    Returns:
        What was set, as :func:`random_parts` lists it.
    """
    found = list(_rates(model))
    for _, owner, attribute, _ in found:
        setattr(owner, attribute, 0.0)
    return [f"{name}.{attribute}={value}" for name, _, attribute, value in found]


def _rates(model: nn.Module) -> Iterator[tuple[str, Any, str, float]]:
    seen = set()
    for name, module in model.named_modules():
        owners = [(name, module), (f"{name}.config", getattr(module, "config", None))]
        for owner_name, owner in owners:
            if owner is None or id(owner) in seen or not hasattr(owner, "__dict__"):
                continue
            seen.add(id(owner))
            for attribute, value in vars(owner).items():
                by_name = any(part in attribute.lower() for part in _NAMES) and isinstance(value, float)
                if (by_name or (attribute == "p" and isinstance(owner, _DropoutNd))) and value > 0:
                    yield owner_name.lstrip("."), owner, attribute, value
