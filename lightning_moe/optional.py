"""The one place where packages that a user may not have are imported.

Nothing here runs on ``import lightning_moe``: a package is imported the first time that something asks for it, inside a
probe that survives every exception and keeps the reason. Packages with compiled parts fail in many ways besides
``ImportError`` (a missing CUDA driver, an undefined NCCL symbol, an assertion in their own set-up), and ``doctor`` and
the error messages must be able to say which.
"""

import importlib
import sys
from dataclasses import dataclass
from functools import cache
from types import ModuleType

# package -> (module to import, extra of this project that installs it)
_PACKAGES = {
    "transformers": ("transformers", "hf"),
    "safetensors": ("safetensors", "hf"),
    "datasets": ("datasets", "hf"),
    "tokenizers": ("tokenizers", "hf"),
    "peft": ("peft", "peft"),
    "tensorboard": ("tensorboard", "tensorboard"),
    "transformer_engine": ("transformer_engine.pytorch", "te"),
    "deep_ep": ("deep_ep", "deepep"),
}


@dataclass(frozen=True)
class Probe:
    """What an attempt to import a package found.

    Attributes:
        name: The package.
        module: The imported module, or ``None`` where the import failed.
        reason: Why the import failed, in one line; empty where it did not.
        hint: What installs the package, where the reason is that it is not there.
    """

    name: str
    module: ModuleType | None
    reason: str = ""
    hint: str = ""

    @property
    def version(self) -> str:
        """The version of the installed distribution, else what the module says of itself, else an empty string."""
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version(self.name.replace("_", "-"))
        except PackageNotFoundError:
            # Some modules come in distributions of several names.
            return str(getattr(self.module, "__version__", ""))

    @property
    def why(self) -> str:
        """Why the import failed, as a sentence with what to do about it."""
        verb = "" if self.reason.startswith("cannot") else "is "
        return ": ".join(filter(None, (f"{self.name} {verb}{self.reason}", self.hint)))


@cache
def probe(name: str) -> Probe:
    """Try to import an optional package, once.

    Args:
        name: One of the packages that the extras of this project name.

    Returns:
        The module, or the reason why there is none. The answer is kept for the life of the process.
    """
    target, extra = _PACKAGES[name]
    try:
        return Probe(name, importlib.import_module(target))
    except ModuleNotFoundError as error:
        if error.name == target.split(".")[0]:
            return Probe(name, None, "not installed", f"pip install 'lightning-moe[{extra}]'")
        return Probe(name, None, f"cannot be imported: {one_line(error)}")
    except (Exception, SystemExit) as error:
        return Probe(name, None, f"cannot be imported: {one_line(error)}")


def require(name: str, purpose: str) -> ModuleType:
    """Import an optional package that the caller cannot do without.

    Args:
        name: One of the packages that the extras of this project name.
        purpose: What needs it, as the subject of the error message, for example ``"CausalLM"``.

    Raises:
        ModuleNotFoundError: If the package cannot be imported; the message holds the reason and the fix.
    """
    found = probe(name)
    if found.module is None:
        text = ": ".join(filter(None, (found.reason, found.hint)))
        raise ModuleNotFoundError(f"{purpose} needs the package {name!r}, which is {text}", name=name)
    return found.module


def loaded(name: str) -> ModuleType | None:
    """Return an optional package if something in this process has imported it already, else ``None``."""
    return sys.modules.get(_PACKAGES[name][0])


def one_line(error: BaseException) -> str:
    """Say an exception in one line of at most some 200 characters, with its type."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__
