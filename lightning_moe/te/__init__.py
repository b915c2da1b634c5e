"""Transformer Engine's layers in the place of a model's own, and their low-precision recipes.

Everything but :mod:`~lightning_moe.te.swap` works without the package, so that ``lightning-moe doctor`` can say on any
machine what would become of a model.
"""

from lightning_moe.te.options import TransformerEngineConfig

__all__ = ["TransformerEngineConfig"]
