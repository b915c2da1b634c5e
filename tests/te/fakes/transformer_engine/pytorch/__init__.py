"""The layers and contexts, under the names of the newest release known here."""

from . import quantization
from .attention import DotProductAttention
from .base import TransformerEngineBaseModule
from .grouped_linear import Fp8Padding, Fp8Unpadding, GroupedLinear
from .linear import Linear
from .norms import LayerNorm, RMSNorm
from .quantization import (
    autocast,
    fp8_autocast,
    fp8_model_init,
    get_default_recipe,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
    quantized_model_init,
)

__all__ = [
    "DotProductAttention",
    "Fp8Padding",
    "Fp8Unpadding",
    "GroupedLinear",
    "LayerNorm",
    "Linear",
    "RMSNorm",
    "TransformerEngineBaseModule",
    "autocast",
    "fp8_autocast",
    "fp8_model_init",
    "get_default_recipe",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "quantization",
    "quantized_model_init",
]
