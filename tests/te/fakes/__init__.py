"""Stand-ins of packages that the tests do without, and what puts them in the place of the packages."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType

from lightning_moe import optional

VERSIONS = ("2.16.1", "2.20.2")
_HERE = str(Path(__file__).parent)
_NAME = "transformer_engine"


def install(version: str = VERSIONS[-1], *, capability: tuple[int, int] = (10, 0)) -> ModuleType:
    """Put the stand-in of Transformer Engine where the package would be, with the signatures of a release.

    Args:
        version: The release.
        capability: Compute capability of the GPU that it claims to have.

    Returns:
        ``transformer_engine.pytorch``. ``quantization.FP8GlobalStateManager.state`` logs autocasts and reductions,
        ``import_module("transformer_engine.device").DEVICE`` is the GPU.
    """
    remove()
    sys.path.insert(0, _HERE)
    try:
        package, te = import_module(_NAME), import_module(f"{_NAME}.pytorch")
        recipes, old = import_module(f"{_NAME}.common.recipe"), import_module(f"{_NAME}.pytorch.release_2_16")
        import_module(f"{_NAME}.device").DEVICE.capability = capability
    finally:
        sys.path.remove(_HERE)
    package.__version__ = version
    if version == "2.16.1":
        te.GroupedLinear, te.DotProductAttention = old.GroupedLinear, old.DotProductAttention
        for name in ("MXFP8BlockScaling", "NVFP4BlockScaling"):
            te.quantization._CHECKS[getattr(old, name)] = te.quantization._CHECKS[getattr(recipes, name)]
            setattr(recipes, name, getattr(old, name))
            setattr(te.quantization, name, getattr(old, name))
    optional.probe.cache_clear()
    return te


def remove() -> None:
    """Take the stand-in away."""
    for name in [name for name in sys.modules if name == _NAME or name.startswith(f"{_NAME}.")]:
        del sys.modules[name]
    optional.probe.cache_clear()


@contextmanager
def installed(version: str = VERSIONS[-1], *, capability: tuple[int, int] = (10, 0)) -> Iterator[ModuleType]:
    """:func:`install` for the time of a ``with``."""
    try:
        yield install(version, capability=capability)
    finally:
        remove()
