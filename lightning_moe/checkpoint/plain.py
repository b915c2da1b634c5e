"""A checkpoint without a Trainer: a LightningModule from a folder, on one process."""

import os
from pathlib import Path
from typing import Any, TypeVar, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.saving import _load_state
from torch.distributed.checkpoint._nested_dict import set_element

from lightning_moe.checkpoint.folder import SavedFolder

T = TypeVar("T", "pl.LightningModule", "pl.LightningDataModule")


def load_from_checkpoint(
    cls: type[T],
    checkpoint_path: str | os.PathLike[str],
    strict: bool | None = None,
    weights_only: bool | None = None,
    **kwargs: Any,
) -> T:
    """Build a model, or a data module, from a checkpoint and its hyperparameters.

    It does what ``cls.load_from_checkpoint`` does, which reads single files alone, for folders as well. The whole model
    is on the CPU of this process, and no process group is needed.

    Args:
        cls: Class of the LightningModule or LightningDataModule.
        checkpoint_path: A folder that ``ExpertParallelStrategy`` has saved on any layout, or a file.
        strict: Whether the names of the weights must be those of the model; default: as the model says.
        weights_only: ``False`` to unpickle whatever is there, from a source that you trust.
        **kwargs: Arguments of the class, over those that were saved.

    Returns:
        The model with its weights.

    Raises:
        FileNotFoundError: If nothing is there.
        CheckpointError: If it is damaged, no checkpoint, or of another model.
    """
    path = Path(checkpoint_path)
    if not path.is_dir():
        return cls.load_from_checkpoint(path, map_location="cpu", strict=strict, weights_only=weights_only, **kwargs)
    folder = SavedFolder(path)
    folder.verify()
    checkpoint = folder.read_meta(weights_only)
    if issubclass(cls, pl.LightningModule):
        checkpoint["state_dict"] = read_model(folder)
    checkpoint.setdefault(cls.CHECKPOINT_HYPER_PARAMS_KEY, {}).update(kwargs)
    return cast(T, _load_state(cls, checkpoint, **_options(cls, strict), **kwargs))


def read_model(folder: SavedFolder) -> dict[str, Any]:
    """Read the whole state dict of the model.

    Args:
        folder: The folder.
    """
    paths = folder.metadata.planner_data or {name: tuple(name.split(".", 1)) for name in folder.tensors}
    room: dict[str, Any] = {}
    for name, path in paths.items():
        if path[0] in ("model", "state_dict"):
            info = folder.tensors.get(name)
            set_element(room, path, None if info is None else torch.empty(info.shape, dtype=info.dtype))
    folder.read(room)
    return dict(room.get("model", room.get("state_dict", {})))


def _options(cls: type[Any], strict: bool | None) -> dict[str, Any]:
    return {"strict": strict} if issubclass(cls, pl.LightningModule) else {}
