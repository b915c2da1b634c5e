"""What a checkpoint folder says of itself: who wrote it, which tensors it has, and the checksum of every byte."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lightning_moe.checkpoint.damage import CheckpointError, checksum_of

MANIFEST = "manifest.json"
FORMAT = 1


@dataclass(frozen=True)
class Part:
    """A run of bytes in a file; the parts of a file follow each other without a gap.

    Attributes:
        name: The tensor or value that lies there; in other files the name of the file.
        length: In bytes.
        checksum: The CRC-32 of the bytes.
    """

    name: str
    length: int
    checksum: int


@dataclass(frozen=True)
class TensorInfo:
    """A tensor in a checkpoint.

    Attributes:
        shape: Of the whole tensor, whatever its shards.
        dtype: As it is stored.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Manifest:
    """The content of ``manifest.json``.

    Attributes:
        model: Class of the LightningModule.
        layout: ``world_size``, ``expert_parallel_size`` and ``replicate_size`` of the run that wrote it.
        tensors: By their names in the checkpoint, for example ``model.net.weight``.
        files: The parts of each file of the folder, but for the manifest itself.
        versions: Of the packages that wrote it.
    """

    model: str
    layout: dict[str, int]
    tensors: dict[str, TensorInfo]
    files: dict[str, list[Part]]
    versions: dict[str, str] = field(default_factory=dict)

    def dump(self) -> bytes:
        """As JSON, whose last entry is the checksum of the rest."""
        content = {
            "format": FORMAT,
            "versions": self.versions,
            "model": self.model,
            "layout": self.layout,
            "tensors": {
                name: {"shape": list(info.shape), "dtype": str(info.dtype).removeprefix("torch.")}
                for name, info in self.tensors.items()
            },
            "files": {
                name: [[part.name, part.length, part.checksum] for part in parts] for name, parts in self.files.items()
            },
        }
        text = _text(content)
        return _text({**content, "crc32": checksum_of(text)})

    @classmethod
    def read(cls, path: Path) -> "Manifest":
        """Read the manifest of a folder.

        Raises:
            CheckpointError: If it is damaged, or of a newer version.
        """
        file = path / MANIFEST
        try:
            content = json.loads(file.read_bytes())
            stated = content.pop("crc32")
            version = content["format"]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{file} is damaged: it is no JSON of a checkpoint; use another checkpoint"
            ) from error
        if checksum_of(_text(content)) != stated:
            raise CheckpointError(f"{file} is damaged: its checksum does not fit; use another checkpoint")
        if version > FORMAT:
            raise CheckpointError(
                f"{path} was written by lightning-moe {content['versions']['lightning-moe']} in checkpoint format"
                f" {version}, and this version reads formats up to {FORMAT}; upgrade lightning-moe"
            )
        return cls(
            content["model"],
            content["layout"],
            {
                name: TensorInfo(tuple(info["shape"]), getattr(torch, info["dtype"]))
                for name, info in content["tensors"].items()
            },
            {name: [Part(*part) for part in parts] for name, parts in content["files"].items()},
            content["versions"],
        )


def written_by() -> dict[str, str]:
    """The versions of the packages that write a checkpoint now."""
    import lightning.pytorch as pl

    import lightning_moe

    return {"lightning-moe": lightning_moe.__version__, "lightning": pl.__version__, "torch": str(torch.__version__)}


def _text(content: dict[str, Any]) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode()
