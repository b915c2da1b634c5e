"""What Lightning pickles, read with ``weights_only=True``.

Tensors are never in a pickle that is needed. Beside them a checkpoint has the loops' progress, the states of callbacks,
learning-rate schedulers and the data module, and the hyperparameters of the model: whatever users put there. It is kept
to the file ``meta.pt`` of a folder. PyTorch's ``weights_only=True`` rebuilds plain values, containers and tensors; of
classes, those in :data:`ALLOWED` beside PyTorch's own list. None of them runs code of a file when it is rebuilt:

- paths, because ``save_hyperparameters()`` keeps the folders that a model is given;
- ``timedelta`` and ``datetime``, because callbacks keep intervals;
- ``Namespace``, which hyperparameters of older scripts are.
"""

import argparse
import datetime
import io
import pathlib
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.serialization import get_safe_globals, get_unsafe_globals_in_checkpoint, safe_globals

from lightning_moe.checkpoint.damage import CheckpointError, listed
from lightning_moe.optional import one_line

ALLOWED: tuple[Any, ...] = (
    pathlib.PosixPath,
    pathlib.PurePosixPath,
    pathlib.WindowsPath,
    pathlib.PureWindowsPath,
    datetime.timedelta,
    datetime.datetime,
    argparse.Namespace,
)


def not_allowed(content: io.BytesIO | Path) -> list[str]:
    """The classes in what ``torch.save`` wrote that :func:`load_safely` refuses."""
    with _allowing():
        return sorted(get_unsafe_globals_in_checkpoint(content))


def _allowing() -> safe_globals:
    """A context in which :data:`ALLOWED` are allowed; at its end, those that a user has allowed still are."""
    return safe_globals([found for found in ALLOWED if found not in get_safe_globals()])


def load_safely(source: Path | io.BytesIO, weights_only: bool | None, what: str = "", mmap: bool = False) -> Any:
    """Read what ``torch.save`` wrote, on the CPU.

    Args:
        source: A file, or its bytes.
        weights_only: ``False`` to unpickle whatever is there, from a source that you trust; ``None`` is ``True``.
        what: What it is, for messages; default: the file.
        mmap: Leave tensors in the file until they are used.

    Raises:
        CheckpointError: If it holds a class that is not allowed, or is damaged.
    """
    what = what or str(source)
    if isinstance(source, io.BytesIO):
        source.seek(0)
    try:
        if weights_only is False:
            return torch.load(source, map_location="cpu", weights_only=False, mmap=mmap)
        classes = not_allowed(source)
        if classes:
            raise CheckpointError(f"{what} holds {listed(classes)}. {advice(classes)}")
        if isinstance(source, io.BytesIO):
            source.seek(0)
        with _allowing():
            return torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)
    except (OSError, CheckpointError):
        raise
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{what} holds what is not rebuilt without running code ({_reason(error)}); keep it out of checkpoints, or"
            " turn it into plain values, dictionaries and lists"
        ) from error
    except Exception as error:  # a damaged file fails in any way
        raise CheckpointError(f"{what} is damaged ({one_line(error)})") from error


def advice(classes: list[str]) -> str:
    """What to do about classes that are not allowed."""
    module, _, name = classes[0].rpartition(".")
    return (
        "A pickle of it could run any code, so it is not rebuilt. Trust it by"
        f" `import {module}; torch.serialization.add_safe_globals([{module}.{name}])` before fit(), or keep it out of"
        " checkpoints: self.save_hyperparameters(ignore=[...]) for an argument of the model, plain values in the"
        " state_dict() of a callback. (weights_only=False of fit() does not reach a strategy in Lightning 2.6)"
    )


def _reason(error: pickle.UnpicklingError) -> str:
    """What PyTorch's unpickler objects to, without the advice around it."""
    _, found, rest = str(error).partition("WeightsUnpickler error:")
    return rest.strip().splitlines()[0] if found and rest.strip() else one_line(error)
