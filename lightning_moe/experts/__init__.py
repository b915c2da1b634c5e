"""What an experts module is, how it is found, and the backends that compute it.

One file a backend; a new one is added to ``_BACKENDS`` below.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from lightning_moe.experts.backend import ExpertsBackend
from lightning_moe.experts.grouped_mm import GroupedMMBackend
from lightning_moe.experts.loop import LoopBackend
from lightning_moe.experts.registry import FoundExperts, experts_spec, find_experts, register_experts
from lightning_moe.experts.spec import ExpertsMLP, ExpertsSpec, local_weight
from lightning_moe.optional import probe

__all__ = [
    "ExpertsBackend",
    "ExpertsMLP",
    "ExpertsSpec",
    "FoundExperts",
    "backend_options",
    "check_backend",
    "choose_backend",
    "experts_spec",
    "find_experts",
    "local_weight",
    "register_experts",
]


@dataclass(frozen=True)
class _Entry:
    """One backend: how it is built, and the reason why it is not usable here (empty where it is)."""

    build: Callable[[], ExpertsBackend] | None
    unusable: Callable[[], str]


def _te_unusable() -> str:
    found = probe("transformer_engine")
    if found.module is None:
        return f"transformer_engine is {found.reason}"
    return f"transformer_engine {found.version} is installed, but this version of lightning-moe has no backend for it"


_BACKENDS: dict[str, _Entry] = {
    "loop": _Entry(LoopBackend, lambda: ""),
    "grouped_mm": _Entry(GroupedMMBackend, lambda: ""),
    "te": _Entry(None, _te_unusable),
}


def backend_options() -> dict[str, str]:
    """List the experts backends.

    Returns:
        For each name an empty string where it is usable here, else the reason in one line.
    """
    return {name: entry.unusable() for name, entry in _BACKENDS.items()}


def check_backend(backend: str) -> None:
    """Check the name of a backend without building anything.

    Raises:
        ValueError: If there is no backend of that name.
        RuntimeError: If it is not usable here; the message holds the reason.
    """
    if backend == "auto":
        return
    if backend not in _BACKENDS:
        allowed = ", ".join(repr(name) for name in ("auto", *_BACKENDS))
        raise ValueError(f"experts_backend={backend!r} is not known; allowed are {allowed}")
    reason = _BACKENDS[backend].unusable()
    if reason:
        usable = ", ".join(repr(name) for name, entry in _BACKENDS.items() if not entry.unusable())
        raise RuntimeError(
            f"experts_backend={backend!r} is not usable here: {reason}. Usable are 'auto', {usable};"
            " `lightning-moe doctor` lists them all"
        )


def choose_backend(
    backend: str, spec: ExpertsSpec, module: torch.nn.Module, dtype: torch.dtype, device: torch.device
) -> tuple[ExpertsBackend | None, str]:
    """Choose what computes one experts module.

    Args:
        backend: The strategy's ``experts_backend``; ``"auto"`` is ``"grouped_mm"`` where it can, else ``"loop"``.
        spec: What describes the module.
        module: The module.
        dtype: Dtype in which it computes.
        device: Device on which it computes.

    Returns:
        The backend, ``None`` where ``spec.compute`` or ``spec.modules`` does it, and the reason why ``"auto"`` did not
        take the fast one (empty where it did).

    Raises:
        ValueError: If a backend that was named cannot compute this module.
    """
    check_backend(backend)
    if spec.compute is not None or spec.modules is not None:
        if backend != "auto":
            raise ValueError(
                f"experts_backend={backend!r} cannot compute {type(module).__name__}, which was registered with"
                " compute= or modules=; set experts_backend='auto', or register it with up=, down= and activation="
            )
        return None, ""
    assert spec.up is not None
    assert spec.down is not None
    shapes = (module.get_parameter(spec.up).shape, module.get_parameter(spec.down).shape)
    chosen = GroupedMMBackend() if backend == "auto" else _build(backend)
    reason = chosen.unsuitable(shapes, dtype, device)
    if not reason:
        return chosen, ""
    if backend == "auto":
        return LoopBackend(), reason
    raise ValueError(
        f"experts_backend={backend!r} cannot compute {type(module).__name__}: {reason};"
        " set experts_backend='auto' or 'loop'"
    )


def _build(name: str) -> ExpertsBackend:
    build = _BACKENDS[name].build
    assert build is not None
    return build()
