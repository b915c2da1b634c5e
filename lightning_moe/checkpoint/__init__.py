"""Checkpoints: distributed folders and single files that are whole or not there, and the Hugging Face format.

Nothing here imports transformers or safetensors before a function that needs them is called.
"""

import importlib
from typing import Any

from lightning_moe.checkpoint.damage import CheckpointError

_LAZY = {
    "SavedFolder": "lightning_moe.checkpoint.folder",
    "load_from_checkpoint": "lightning_moe.checkpoint.plain",
    "export_checkpoint": "lightning_moe.checkpoint.export",
    "load_pretrained": "lightning_moe.checkpoint.hub_read",
    "save_pretrained": "lightning_moe.checkpoint.hub_live",
}

__all__ = [
    "CheckpointError",
    "SavedFolder",
    "export_checkpoint",
    "load_from_checkpoint",
    "load_pretrained",
    "save_pretrained",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
