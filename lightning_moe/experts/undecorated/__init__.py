"""Experts classes of Hugging Face Transformers v5 that do not go through that library's experts interface.

One file a way of keeping or calling experts. A class is known by its name and the module that defines it, so that
Transformers is not imported for the answer. The forward of an instance is replaced, the parameters keep their names.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from lightning_moe.experts.spec import ExpertsSpec
from lightning_moe.experts.undecorated import dbrx, jetmoe, llama4, longcat_flash, module_dict, step3p7
from lightning_moe.experts.undecorated.names import original_class, short_name
from lightning_moe.optional import loaded


class _Known(NamedTuple):
    """A class as this package knows it.

    Attributes:
        describe: Describes an instance, given the module that holds it; ``None`` where it is called in a way that is
            not known or has no experts.
        call: Names of the arguments of its forward.
        parameters: Names of all its parameters, ``None`` where they depend on the model.
    """

    describe: Callable[[nn.Module, nn.Module | None], ExpertsSpec | None]
    call: tuple[str, ...]
    parameters: tuple[str, ...] | None


_CALL = ("hidden_states", "top_k_index", "top_k_weights")
_STACKED = ("gate_up_proj", "down_proj")
_KNOWN = {
    "step3p7.Step3p7Experts": _Known(step3p7.describe, _CALL, _STACKED),
    "longcat_flash.LongcatFlashExperts": _Known(longcat_flash.describe, _CALL, _STACKED),
    "dbrx.DbrxExperts": _Known(dbrx.describe, _CALL, ("mlp.w1", "mlp.v1", "mlp.w2")),
    "llama4.Llama4TextExperts": _Known(llama4.describe, ("hidden_states",), _STACKED),
    "switch_transformers.SwitchTransformersExperts": _Known(
        module_dict.describe_switch, ("hidden_states", "selected_experts", "routing_weights"), None
    ),
    "nllb_moe.NllbMoeExperts": _Known(
        module_dict.describe_nllb, ("hidden_states", "router_mask", "router_probs"), None
    ),
    "jetmoe.JetMoeParallelExperts": _Known(jetmoe.describe, ("inputs", "expert_size"), ("weight",)),
}


def experts_spec(module: nn.Module, parent: nn.Module | None) -> ExpertsSpec | None:
    """Describe an experts module of one of the classes above.

    Args:
        module: Any module.
        parent: The module that holds it, which some of these classes need; ``None`` for the model itself.

    Returns:
        ``None`` for every other module, also for one of a subclass with a forward of its own.

    Raises:
        NotImplementedError: If this release of Transformers calls the class, or keeps its weights, in another way.
    """
    if loaded("transformers") is None:
        return None
    cls = original_class(module, _KNOWN.keys())
    if cls is None:
        return None
    known = _KNOWN[short_name(cls)]
    _check(cls, module, known)
    return known.describe(module, parent)


def _check(cls: Any, module: nn.Module, known: _Known) -> None:
    call = tuple(inspect.signature(cls.forward).parameters)[1:]
    parameters = tuple(name for name, _ in module.named_parameters())
    if call != known.call or (known.parameters is not None and parameters and parameters != known.parameters):
        raise NotImplementedError(
            f"{cls.__name__} of this release of Transformers is called as ({', '.join(call)}) with the parameters"
            f" {', '.join(parameters)}; known is ({', '.join(known.call)}) with"
            f" {', '.join(known.parameters or ('any',))}. Describe it yourself:"
            f" lightning_moe.register_experts({cls.__name__}, ExpertsSpec(...))"
        )
