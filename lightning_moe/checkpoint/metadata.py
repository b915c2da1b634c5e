"""The file ``.metadata`` of ``torch.distributed.checkpoint``, unpickled without running what it may hold."""

import io
import pathlib
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import Metadata
from typing_extensions import override

from lightning_moe.checkpoint.damage import CheckpointError

_OF_METADATA = {
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
    "_MEM_FORMAT_ENCODING",
}
_PATHS = {"Path", "PosixPath", "PurePath", "PurePosixPath", "PureWindowsPath"}


def read_metadata(path: Path) -> Metadata:
    """Read a metadata file.

    Args:
        path: The file.

    Raises:
        CheckpointError: If it is damaged, or holds anything but lists of tensors.
    """
    content = path.read_bytes()
    try:
        read = _Unpickler(io.BytesIO(content)).load()
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    except Exception as error:  # a damaged pickle fails in any way
        raise CheckpointError(f"{path} is damaged ({type(error).__name__}: {error}); use another checkpoint") from error
    if not isinstance(read, Metadata) or not read.storage_data:
        raise CheckpointError(f"{path} is damaged: it does not list the tensors; use another checkpoint")
    if read.storage_meta is None:
        read.storage_meta = metadata.StorageMeta()
    return read


class _Unpickler(pickle.Unpickler):
    """Knows the classes of such a file and no others, because a pickle may call whatever it names."""

    @override
    def find_class(self, module_name: str, global_name: str) -> Any:
        found: Any = None
        if module_name == "torch.distributed.checkpoint.metadata" and global_name in _OF_METADATA:
            found = getattr(metadata, global_name)
        elif (module_name, global_name) == ("torch.distributed.checkpoint.filesystem", "_StorageInfo"):
            found = filesystem._StorageInfo
        elif (module_name, global_name) == ("torch", "Size"):
            found = torch.Size
        elif module_name == "torch" and isinstance(getattr(torch, global_name, None), torch.dtype):
            found = getattr(torch, global_name)
        elif (module_name, global_name) == ("torch.serialization", "_get_layout"):
            found = torch.serialization._get_layout
        elif (module_name, global_name) == ("collections", "OrderedDict"):
            found = OrderedDict
        elif module_name in ("pathlib", "pathlib._local") and global_name in _PATHS:
            found = pathlib.PurePosixPath if "Windows" not in global_name else pathlib.PureWindowsPath
        if found is None:
            raise pickle.UnpicklingError(
                f"it holds {module_name}.{global_name}, which has no place in a list of tensors"
            )
        return found
