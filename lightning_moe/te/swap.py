"""Put Transformer Engine's layers where the plan wants them.

The parameters stay the same objects under the same names, so that optimizers, sharding and checkpoints see no
difference: a checkpoint of the plain model loads into one with these layers, and the other way round. The layers'
"extra state" is in no state dict, because it would make checkpoints differ, and loading one would unpickle it. Only
delayed scaling has any; :func:`scaling_state` hands it out as plain tensors, which ``MoEPrecision`` adds to Lightning's
checkpoint.
"""

import os
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lightning_moe.optional import probe, require
from lightning_moe.parallel.initialize import initializers
from lightning_moe.te.attention import use_transformer_engine
from lightning_moe.te.norms import RMSNormFacts
from lightning_moe.te.options import TransformerEngineConfig
from lightning_moe.te.plan import ATTENTION, LAYER_NORM, LINEAR, MARK, RMS_NORM, Item, Plan
from lightning_moe.te.recipes import PACKAGE, build_recipe, recipe_facts, unusable_recipe

# Devices that the layers run on.
DEVICES: tuple[str, ...] = ("cuda",)
_FIRST_VERSION = "2.16"
_VARIABLES = "extra_fp8_variables"
_UNPICKLE = "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_HOOK_OPTIONS = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")


def unusable(options: TransformerEngineConfig) -> str:
    """Say why Transformer Engine cannot be used here with these options, and the fix; an empty string if it can."""
    found = probe(PACKAGE)
    if found.module is None:
        hint = f": {found.hint}" if found.hint else "; `lightning-moe doctor` shows the versions"
        return (
            f"transformer_engine needs the package {PACKAGE!r}, which is {found.reason}{hint}. Or leave the option out"
        )
    if "cuda" in DEVICES and len(DEVICES) == 1 and not torch.cuda.is_available():
        return (
            "transformer_engine: its layers run on CUDA, and there is no CUDA device here. Run on a GPU, or leave the"
            " option out"
        )
    for name in ("Linear", "RMSNorm", "LayerNorm", "DotProductAttention", "autocast", "quantization"):
        if not hasattr(found.module, name):
            return (
                f"transformer_engine: version {found.version} of the package has no {name}, {_FIRST_VERSION} has;"
                " upgrade: pip install -U 'lightning-moe[te]'"
            )
    return "" if options.recipe is None else unusable_recipe(options.recipe)


def swap(model: nn.Module, plan: Plan) -> None:
    """Carry out a plan, in place. No communication.

    Args:
        model: The model, on any device, before it is sharded; parameters on the meta device stay there, and are
            initialized as those of the module that they come from.
        plan: What :func:`~lightning_moe.te.plan.make_plan` made for it.
    """
    te = require(PACKAGE, "transformer_engine")
    attention = [item.module for item in plan.swapped if item.target == ATTENTION]
    owners = initializers(model)
    made = {
        id(item.module): _made(te, item, owners.get(id(item.module)))
        for item in plan.swapped
        if item.target != ATTENTION
    }
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if id(child) in made:
                parent._modules[name] = made[id(child)]
    use_transformer_engine(model, attention)


def _made(te: ModuleType, item: Item, owner: nn.Module | None) -> nn.Module:
    """The layer for one module, with its parameters."""
    old: Any = item.module
    classes = _layer_classes(te)
    layer: Any
    if item.target == LINEAR:
        bias = old.bias is not None
        layer = classes[LINEAR](
            old.in_features, old.out_features, bias=bias, params_dtype=old.weight.dtype, device="meta"
        )
        if not bias:
            layer.bias = torch.empty(0)  # in its place it holds an empty tensor on the meta device, which would stay
    elif item.target == LAYER_NORM:
        layer = classes[LAYER_NORM](old.normalized_shape, eps=old.eps, dtype=old.weight.dtype, device="meta")
    else:
        assert isinstance(item.detail, RMSNormFacts)
        assert item.target == RMS_NORM
        layer = classes[RMS_NORM](
            old.weight.shape[0],
            eps=item.detail.eps,
            zero_centered_gamma=item.detail.zero_centered,
            dtype=old.weight.dtype,
            device="meta",
        )
    for name, parameter in list(old.named_parameters(recurse=False)):
        # Around the layer's own register_parameter, which would forget what it knows of this one.
        layer._parameters[name] = parameter
        old._parameters[name] = None
    for hooks in (*_HOOKS, *_HOOK_OPTIONS):
        # The same dictionaries, so that the handles that users hold still remove them.
        layer.__dict__[hooks] = old.__dict__[hooks]
    layer.__dict__.update({_ORIGINAL: old, _OWNER: owner})
    old.__dict__["forward"] = layer.forward  # for whoever holds it elsewhere, in a list for example
    return layer.train(old.training)


_ORIGINAL, _OWNER = "_lightning_moe_original", "_lightning_moe_initializer"


class _Swapped:
    """What the layers do otherwise than their classes in Transformer Engine."""

    # What initializes whole models by the class of their modules does not know these.
    initializes_itself = True
    # PyTorch asks the class whether there is extra state.
    get_extra_state = nn.Module.get_extra_state
    set_extra_state = nn.Module.set_extra_state

    def _as_before(self, *args: Any) -> Any:
        """Compute as the module that was here before."""
        own: dict[str, Any] = self.__dict__
        original = own[_ORIGINAL]
        double = object.__new__(type(original))
        double.__dict__.update(vars(original))
        double.__dict__["_parameters"] = own["_parameters"]
        return type(original).forward(double, *args)

    def reset_parameters(self, *args: Any, **kwargs: Any) -> None:
        """Initialize as the module that was here before."""
        original: Any = self.__dict__.get(_ORIGINAL)
        if original is None:  # while the layer is built
            super().reset_parameters(*args, **kwargs)  # type: ignore[misc]
            return
        own: dict[str, Any] = self.__dict__["_parameters"]
        empty = dict.fromkeys(own)
        original._parameters.update(own)
        try:
            owner = self.__dict__[_OWNER]
            if owner is not None:
                owner._init_weights(original)
            elif hasattr(original, "reset_parameters"):
                original.reset_parameters()
        finally:
            original._parameters.update(empty)


@cache
def _layer_classes(te: ModuleType) -> dict[str, type[nn.Module]]:
    # Not named after what they are: Transformers initializes by name whatever is called a norm.
    class TELinear(_Swapped, te.Linear):  # type: ignore[name-defined]
        """Pads the tokens to what the recipe around it needs; what is added is zero, and so is what comes back."""

        base: ClassVar[Any] = te.Linear

        def forward(self, inp: Tensor, *args: Any, **kwargs: Any) -> Any:
            missing = -(inp.numel() // max(inp.shape[-1], 1)) % _rows(te)
            if not missing and inp.ndim > 1:
                return super().forward(inp, *args, **kwargs)
            rows = inp.reshape(-1, inp.shape[-1])
            padded = torch.cat([rows, rows.new_zeros(missing, rows.shape[1])])
            out = super().forward(padded, *args, **kwargs)[: rows.shape[0]]
            return out.reshape(*inp.shape[:-1], out.shape[-1])

    class _Norm(_Swapped):
        """Leaves the precision alone: the package's norms would round their input to the dtype of the weight."""

        def forward(self, inp: Tensor) -> Any:
            weight: Tensor = self.weight  # type: ignore[attr-defined]
            return super().forward(inp) if inp.dtype == weight.dtype else self._as_before(inp)  # type: ignore[misc]

    class TERms(_Norm, te.RMSNorm):  # type: ignore[name-defined]
        base: ClassVar[Any] = te.RMSNorm

    class TELayerwise(_Norm, te.LayerNorm):  # type: ignore[name-defined]
        base: ClassVar[Any] = te.LayerNorm

    for cls in (TELinear, TERms, TELayerwise):
        setattr(cls, MARK, True)
    return {LINEAR: TELinear, RMS_NORM: TERms, LAYER_NORM: TELayerwise}


def _rows(te: ModuleType) -> int:
    """The multiple of rows that a product needs now: 1 outside of low precision."""
    state: Any = te.quantization.FP8GlobalStateManager
    return recipe_facts(state.get_fp8_recipe()).rows if state.is_fp8_enabled() else 1


# The state of delayed scaling


def scaling_state(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Collect the scales and histories of delayed scaling.

    Returns:
        Tensors on the CPU and plain values by the qualified name of the layer; empty for every other recipe, which has
        no state.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, layer in _linear_layers(model):
        recipe, before = layer.fp8_meta.get("recipe"), layer.fp8
        if recipe is None or not recipe.delayed():  # it has not computed in low precision, or has no state
            continue
        layer.fp8 = True  # an evaluation in between must not make the layer forget that it has a state
        layer.fp8_meta["recipe"] = build_recipe("delayed")  # that of the run may hold functions, which do not pickle
        try:
            packed = type(layer).base.get_extra_state(layer)
        finally:
            layer.fp8, layer.fp8_meta["recipe"] = before, recipe
        if packed is not None and packed.numel():
            # Written by this process a moment ago.
            state = pickle.loads(packed.cpu().numpy().tobytes())
            tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
            plain = state.get(_VARIABLES, {}).items()
            if tensors:  # a layer that has not computed in low precision has none
                variables = {key: value for key, value in plain if isinstance(value, bool | int | float | str)}
                found[name] = {**tensors, _VARIABLES: variables}
    return found


def load_scaling_state(model: nn.Module, state: Mapping[str, Mapping[str, Any]]) -> None:
    """Give the layers back what :func:`scaling_state` collected.

    Args:
        model: The model.
        state: What was collected; layers that the model does not have are passed over.
    """
    layers = dict(_linear_layers(model))
    with _may_unpickle():
        for name, saved in state.items():
            if name in layers:
                # The layer gets histories as long as those of the run that saved them, and cuts or extends them to
                # what its recipe wants when it computes.
                length = max(t.shape[0] for key, t in saved.items() if key.startswith("amax_history"))
                recipe = build_recipe({"name": "delayed", "amax_history_len": length})
                whole = {"recipe": recipe, _VARIABLES: {}, **saved}
                packed = torch.frombuffer(bytearray(pickle.dumps(whole)), dtype=torch.uint8)
                type(layers[name]).base.set_extra_state(layers[name], packed)


def _linear_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        if hasattr(module, MARK) and hasattr(module, "fp8"):
            yield name, module


@contextmanager
def _may_unpickle() -> Iterator[None]:
    """Let the layers unpickle what this process has pickled itself."""
    before = os.environ.get(_UNPICKLE)
    os.environ[_UNPICKLE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_UNPICKLE]
        else:
            os.environ[_UNPICKLE] = before
