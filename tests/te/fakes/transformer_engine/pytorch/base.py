"""What layers with weights share: parameters, quantisers, scales and their state."""

import os
import pickle
from typing import Any

import torch
from torch import Tensor, nn

from ..common.recipe import Recipe
from ..device import DEVICE
from .numerics import Quantizer, rounded, same
from .quantization import FP8GlobalStateManager

_OPT_IN = "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"


class TransformerEngineBaseModule(nn.Module):
    """Base of the layers. ``gemms`` matrix products have an input and a weight each."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__()
        DEVICE.require()
        self.name = name
        self.fp8 = False
        self.fp8_initialized = False
        self.fp8_meta: dict[str, Any] = {"fp8_checkpoint": False}
        self.primary_weights_in_fp8 = FP8GlobalStateManager.state.parameters
        self.activation_dtype: torch.dtype | None = None
        self._fp8_workspaces: dict[str, Tensor] = {}
        self._init_functions: dict[str, Any] = {}
        self.amax_history = self.scale = torch.empty(0)

    def make_parameter(self, name: str, tensor: Tensor, init: Any) -> None:
        self.register_parameter(name, nn.Parameter(tensor))
        self._init_functions[name] = init

    def reset_parameters(self, defer_init: bool | None = False) -> None:
        if defer_init:
            return
        for name, parameter in list(self.named_parameters(recurse=False)):
            tensor = parameter.detach()
            if tensor.device.type == "meta":
                tensor = torch.empty_like(tensor, device="cuda" if torch.cuda.is_available() else "cpu")
            with torch.no_grad():
                self._init_functions[name](tensor)
            setattr(self, name, nn.Parameter(tensor))

    def prepare_forward(self, inp: Tensor, gemms: int = 1) -> Tensor:
        if torch.is_autocast_enabled("cuda"):
            self.activation_dtype = torch.get_autocast_dtype("cuda")
        else:
            if self.activation_dtype != inp.dtype:
                for name, parameter in self.named_parameters():
                    if parameter.dtype != inp.dtype:
                        raise TypeError(
                            "Data types for parameters must match when outside of autocasted region. Found input dtype:"
                            f" {inp.dtype} and {name!r} dtype: {parameter.dtype}"
                        )
            self.activation_dtype = inp.dtype
        self.fp8 = FP8GlobalStateManager.is_fp8_enabled()
        if not self.fp8:
            self.fp8_initialized = False
            return inp.contiguous()
        recipe = FP8GlobalStateManager.get_fp8_recipe()
        if not self.fp8_initialized or recipe != self.recipe:
            if self.recipe is not None and type(recipe) is not type(self.recipe):
                self._fp8_workspaces.clear()
            self._allocate(recipe, 2 * gemms)
            self.fp8_meta["recipe"], self.fp8_initialized = recipe, True
        if recipe.delayed():
            FP8GlobalStateManager.register(self)
        return inp.contiguous()

    @property
    def recipe(self) -> Recipe | None:
        """The recipe of the last forward in low precision, or of the state that was loaded."""
        return self.fp8_meta.get("recipe")

    def _allocate(self, recipe: Recipe, places: int) -> None:
        """Room for scales and histories; histories that are there are cut or extended."""
        if not recipe.delayed():
            return
        length = recipe.amax_history_len  # type: ignore[attr-defined]
        if self.scale.numel() != places:
            self.amax_history, self.scale = torch.zeros(length, places), torch.ones(places)
        elif len(self.amax_history) != length:
            old = self.amax_history[:length]
            self.amax_history = torch.cat([old, torch.zeros(length - len(old), places)])

    def update_scales(self, amax: Tensor, recipe: Recipe) -> None:
        """New scales from the history; a layer that saw nothing keeps its own."""
        self.amax_history[0] = amax
        largest = self.amax_history.amax(0)
        top = recipe.fp8_format.value.max_fwd  # type: ignore[attr-defined]
        self.scale = torch.where(largest > 0, top / largest.clamp_min(1e-30) / 2**recipe.margin, self.scale)  # type: ignore[attr-defined]
        self.amax_history = self.amax_history.roll(-1, 0)
        self.amax_history[0] = 0

    def quantizer(self, gemm: int, tensor: str) -> Quantizer:
        """What quantises one operand (``"input"``, ``"weight"``, ``"gradient"``) of one of the products."""
        if not self.fp8:
            return same
        recipe = self.recipe
        assert recipe is not None
        value = (recipe.fp4_format if recipe.nvfp4() else recipe.fp8_format).value  # type: ignore[attr-defined]
        largest = float(value.max_bwd if tensor == "gradient" else value.max_fwd)
        block = 32 if recipe.mxfp8() else 16 if recipe.nvfp4() else 128 if recipe.float8_block_scaling() else 0
        if not recipe.delayed() or tensor == "gradient":
            return lambda t: rounded(t, largest, block=block)
        place = 2 * gemm + (tensor == "weight")

        def delayed(t: Tensor) -> Tensor:
            if t.numel():
                self.amax_history[0, place] = torch.maximum(self.amax_history[0, place], t.detach().abs().max().float())
            return rounded(t, largest, self.scale[place])

        return delayed

    def quantized_weight(self, name: str, weight: Tensor, gemm: int, first: bool | None) -> Tensor | None:
        """The quantised weight: from the cache, unless this is the first micro-batch or nothing is said of it."""
        if not self.fp8:
            return None
        if first is None:
            return self.quantizer(gemm, "weight")(weight.detach())
        if first or name not in self._fp8_workspaces:
            self._fp8_workspaces[name] = self.quantizer(gemm, "weight")(weight.detach())
        return self._fp8_workspaces[name]

    def get_extra_state(self) -> Tensor:
        if self.recipe is None or not self.recipe.delayed():
            return torch.empty(0, dtype=torch.uint8)
        state = {"recipe": self.recipe, "scale": self.scale, "amax_history": self.amax_history}
        return torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor | None) -> None:
        if state is None or state.numel() == 0:
            return
        if os.environ.get(_OPT_IN, "0") != "1":
            raise RuntimeError(f"{type(self).__name__}: loading pickled extra state is refused; set {_OPT_IN}=1")
        loaded = pickle.loads(state.cpu().numpy().tobytes())
        self.fp8_meta["recipe"] = loaded["recipe"]
        self._allocate(loaded["recipe"], loaded["scale"].numel())
        self.scale.copy_(loaded["scale"])
        self.amax_history.copy_(loaded["amax_history"])


def normal(tensor: Tensor) -> None:
    """The weights' default."""
    nn.init.normal_(tensor, 0.0, 0.023)


def check_widths(recipe: Recipe, shape: torch.Size) -> None:
    """Low precision needs rows and widths of certain multiples."""
    width = 32 if recipe.mxfp8() else 16
    if shape[:-1].numel() % 8 or shape[-1] % width:
        raise ValueError(
            "FP8 execution requires the product of all dimensions except the last to be divisible by 8 and the last"
            f" dimension to be divisible by {width}, but got tensor with dims={list(shape)}"
        )
