"""What an experts module is, how it is found, and the backends that compute it.

One file a backend; a new one is added to ``BACKENDS`` below.
"""

import torch

from lightning_moe.choices import Choice, Choices
from lightning_moe.experts.backend import ExpertsBackend
from lightning_moe.experts.grouped_mm import GroupedMMBackend
from lightning_moe.experts.loop import LoopBackend
from lightning_moe.experts.registry import FoundExperts, experts_spec, find_experts, register_experts
from lightning_moe.experts.spec import ExpertsMLP, ExpertsSpec, local_weight
from lightning_moe.experts.te import TransformerEngineBackend, te_unusable

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


BACKENDS: Choices[ExpertsBackend] = Choices(
    "experts_backend",
    {
        "loop": Choice(LoopBackend),
        "grouped_mm": Choice(GroupedMMBackend),
        "te": Choice(TransformerEngineBackend, te_unusable),
    },
)


def backend_options() -> dict[str, str]:
    """List the experts backends.

    Returns:
        For each name an empty string where it is usable here, else the reason in one line.
    """
    return BACKENDS.options()


def check_backend(backend: str) -> None:
    """Check the strategy's ``experts_backend`` option without building anything.

    Raises:
        ValueError: If there is no backend of that name.
        RuntimeError: If it is not usable here; the message holds the reason.
    """
    BACKENDS.check(backend)


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
    chosen = GroupedMMBackend() if backend == "auto" else BACKENDS.build(backend)
    reason = chosen.unsuitable(spec.mlp_shapes(module), dtype, device)
    if not reason:
        return chosen, ""
    if backend == "auto":
        return LoopBackend(), reason
    raise ValueError(
        f"experts_backend={backend!r} cannot compute {type(module).__name__}: {reason};"
        " set experts_backend='auto' or 'loop'"
    )
