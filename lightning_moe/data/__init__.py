"""Training data: packed windows of tokens, loaders that resume exactly, and two data modules built on them."""

from lightning_moe.data.packing import PackedTokens, ResumableLoader, ResumableSampler
from lightning_moe.data.stdlib_code import StdlibCode
from lightning_moe.data.text import TextData

__all__ = ["PackedTokens", "ResumableLoader", "ResumableSampler", "StdlibCode", "TextData"]
