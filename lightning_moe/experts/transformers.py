"""The experts classes of Hugging Face Transformers v5, found through that library's own registry.

Transformers decorates each experts class with ``use_experts_implementation``: the forward of the class then looks up
``config._experts_implementation`` in an ``ExpertsInterface``. A class is known by that, not by its name, and the
dispatched computation is one more entry of the interface. No model file is copied and no block is replaced.
"""

import re
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from lightning_moe.experts.spec import ExpertsSpec
from lightning_moe.optional import loaded, require

IMPLEMENTATION = "lightning_moe"
MINIMUM_VERSION = (5, 11)
_FORWARD = "_lightning_moe_forward"
# Compared by name: importing the class would import the library.
_INTERFACE = ("transformers.integrations.moe", "ExpertsInterface")


def experts_spec(module: nn.Module) -> ExpertsSpec | None:
    """Describe a module whose class goes through the experts interface of Transformers.

    Returns:
        ``None`` for every other module. Transformers is not imported for the answer: a model of its own has done that.

    Raises:
        RuntimeError: If the library is older than ``MINIMUM_VERSION``, or has made the model expert-parallel itself.
        NotImplementedError: If the class lays its experts out, or computes them, in a way that is not supported.
    """
    library = loaded("transformers")
    if library is None:
        return None
    if _interface(getattr(type(module), "forward", None)) is None:
        _check_not_hidden(library.__version__, module)
        return None
    _check_version(library.__version__, type(module))
    experts: Any = module
    up = "gate_up_proj" if experts.has_gate else "up_proj"
    spec = ExpertsSpec(
        up=up,
        down="down_proj",
        activation=_gate if experts.has_gate else _activation,
        transposed=experts.is_transposed,
        up_bias=f"{up}_bias" if experts.has_bias else None,
        down_bias="down_proj_bias" if experts.has_bias else None,
        post=_post_norm if getattr(experts, "has_post_expert_norm", False) else None,  # newer than the other flags
        install=_install,
    )
    _check_layout(experts, spec)
    return spec


def _interface(forward: Any) -> Any:
    """Return the experts interface that a class' forward looks itself up in, ``None`` where there is none."""
    for cell in getattr(forward, "__closure__", None) or ():
        value = cell.cell_contents
        if any((c.__module__, c.__name__) == _INTERFACE for c in type(value).__mro__):
            return value
    return None


def _check_version(version: str, cls: type) -> None:
    if _is_old(version):
        minimum = ".".join(map(str, MINIMUM_VERSION))
        raise RuntimeError(
            f"{cls.__name__} comes from Transformers {version}; experts of its models are supported from {minimum} on:"
            f" pip install --upgrade 'transformers>={minimum},<{MINIMUM_VERSION[0] + 1}'"
        )


def _is_old(version: str) -> bool:
    release = re.match(r"(\d+)\.(\d+)", version)
    return release is not None and (int(release[1]), int(release[2])) < MINIMUM_VERSION


def _check_not_hidden(version: str, module: nn.Module) -> None:
    """Refuse experts that would be taken for dense weights: those of an old library, and those of a subclass."""
    cls = type(module)
    if _is_old(version) and cls.__module__.startswith("transformers.models."):
        # Before the interface: stacked weights are what such a class is known by.
        stacked = [p.shape[0] for p in module.parameters(recurse=False) if p.ndim == 3 and p.shape[0] > 1]
        if len(stacked) > 1 and len(set(stacked)) == 1:
            _check_version(version, cls)
    for base in cls.__mro__:
        if _interface(vars(base).get("forward")) is not None:
            raise NotImplementedError(
                f"{cls.__name__} has a forward of its own in place of that of {base.__name__}, so that tokens could not"
                " be sent to their experts. Say what it computes: lightning_moe.register_experts("
                f"{cls.__name__}, ExpertsSpec(up=..., down=..., activation=...))"
            )


def _check_layout(experts: Any, spec: ExpertsSpec) -> None:
    """Refuse what the spec does not speak of: it would be left out of the computation, silently."""
    cls = type(experts)
    if getattr(experts, "_is_expert_parallel", False):
        raise RuntimeError(
            f"{cls.__name__} has been made expert-parallel by Transformers already; load the model without"
            " distributed_config or enable_expert_parallel and leave that to strategy='moe_ep'"
        )
    parameters = {name for name, _ in experts.named_parameters(recurse=False)} - set(spec.weight_names())
    children = {name for name, child in experts.named_children() if next(child.parameters(), None) is not None}
    if spec.post is not None:
        children.discard("post_expert_norm")
    if parameters or children:
        raise NotImplementedError(
            f"{cls.__name__} holds {', '.join(map(repr, sorted(parameters | children)))} beside"
            f" {', '.join(map(repr, spec.weight_names()))}, which experts of Transformers are not known to have."
            " Quantized experts cannot be trained: load the model with dequantized weights. For a class of your own:"
            f" lightning_moe.register_experts({cls.__name__}, ExpertsSpec(compute=...))"
        )


def _gate(experts: Any, rows: Tensor) -> Tensor:
    return experts._apply_gate(rows)


def _activation(experts: Any, rows: Tensor) -> Tensor:
    return experts.act_fn(rows)


def _post_norm(experts: Any, rows: Tensor) -> Tensor:
    return experts.post_expert_norm(rows)


def _install(module: nn.Module, forward: Callable[..., Tensor]) -> None:
    interface = _interface(type(module).forward)
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
