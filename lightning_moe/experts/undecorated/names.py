"""Classes of Transformers, known by name: importing one would import the library."""

from collections.abc import Set
from typing import Any

from torch import nn


def short_name(cls: type) -> str:
    """``"family.Class"`` of a class that ``transformers.models.family`` defines, else an empty string."""
    package, _, rest = cls.__module__.partition(".models.")
    return f"{rest.partition('.')[0]}.{cls.__name__}" if package == "transformers" else ""


def original_class(module: nn.Module | None, names: Set[str]) -> Any:
    """Find the class of Transformers whose forward a module runs.

    Args:
        module: Any module.
        names: Short names of the classes that count.

    Returns:
        The class, ``None`` where it is none of them or a subclass has a forward of its own.
    """
    actual: Any = type(module)
    for cls in actual.__mro__:
        if short_name(cls) in names:
            return cls if actual.forward is cls.forward else None
    return None
