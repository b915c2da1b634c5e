"""The experts classes of Hugging Face Transformers v5, found through that library's own registry.

Transformers decorates each experts class with ``use_experts_implementation``: the forward of the class then looks up
``config._experts_implementation`` in an ``ExpertsInterface``. A class is known by that, not by its name, and the
dispatched computation is one more entry of the interface. No model file is copied and no block is replaced.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from lightning_moe.experts.spec import ExpertsSpec
from lightning_moe.optional import loaded, require

IMPLEMENTATION = "lightning_moe"
_FORWARD = "_lightning_moe_forward"
# Compared by name: importing the class would import the library.
_INTERFACE = ("transformers.integrations.moe", "ExpertsInterface")


def experts_spec(module: nn.Module) -> ExpertsSpec | None:
    """Describe a module whose class goes through the experts interface of Transformers.

    Returns:
        ``None`` for every other module. Transformers is not imported for the answer: a model of its own has done that.

    Raises:
        NotImplementedError: If the class lays its experts out in a way that is not supported.
    """
    if loaded("transformers") is None or _interface(type(module)) is None:
        return None
    experts: Any = module
    up = "gate_up_proj" if experts.has_gate else "up_proj"
    return ExpertsSpec(
        up=up,
        down="down_proj",
        activation=_gate if experts.has_gate else _activation,
        transposed=experts.is_transposed,
        up_bias=f"{up}_bias" if experts.has_bias else None,
        down_bias="down_proj_bias" if experts.has_bias else None,
        post=_post_norm if getattr(experts, "has_post_expert_norm", False) else None,  # newer than the other flags
        install=_install,
    )


def _interface(cls: type) -> Any:
    """Return the experts interface that the forward of a class looks itself up in, ``None`` where there is none."""
    closure = getattr(getattr(cls, "forward", None), "__closure__", None) or ()
    for cell in closure:
        value = cell.cell_contents
        if any((c.__module__, c.__name__) == _INTERFACE for c in type(value).__mro__):
            return value
    return None


def _gate(experts: Any, rows: Tensor) -> Tensor:
    return experts._apply_gate(rows)


def _activation(experts: Any, rows: Tensor) -> Tensor:
    return experts.act_fn(rows)


def _post_norm(experts: Any, rows: Tensor) -> Tensor:
    return experts.post_expert_norm(rows)


def _install(module: nn.Module, forward: Callable[..., Tensor]) -> None:
    interface = _interface(type(module))
    interface.register(IMPLEMENTATION, _call_installed)
    experts: Any = module
    # Not an attribute that nn.Module would see: the function holds process groups and belongs to no state dict.
    object.__setattr__(module, _FORWARD, forward)
    experts.config._experts_implementation_internal = IMPLEMENTATION


def _call_installed(experts: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    forward = getattr(experts, _FORWARD, None)
    if forward is None:
        # Another model built from the same config object, which the strategy does not know.
        grouped_mm = require("transformers", "this experts module").integrations.moe.grouped_mm_experts_forward
        return grouped_mm(experts, hidden_states, top_k_index, top_k_weights)
    return forward(hidden_states, top_k_index, top_k_weights)
