"""What the runs of a comparison are told, and where in the temporary folder each leaves what it saw."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

LAYOUT = "layout"


@dataclass(frozen=True)
class Plan:
    """What every run of one comparison does alike.

    Attributes:
        arguments: Those of ``lightning-moe fit``.
        steps: Optimizer steps.
        shrink: Whether the model is made smaller.
        no_dropout: Whether randomness in the forward is switched off.
        callbacks: Class names of the config's callbacks that take part.
    """

    arguments: tuple[str, ...]
    steps: int = 3
    shrink: bool = False
    no_dropout: bool = False
    callbacks: tuple[str, ...] = ()

    def write(self, folder: Path) -> None:
        """Leave the plan in the temporary folder."""
        write_json(folder / "plan.json", asdict(self))

    @classmethod
    def read(cls, folder: Path) -> "Plan":
        """Read what :meth:`write` has left."""
        values: dict[str, Any] = json.loads((folder / "plan.json").read_text())
        for name in ("arguments", "callbacks"):
            values[name] = tuple(values[name])
        return cls(**values)


@dataclass(frozen=True)
class Reference:
    """A run in one process.

    Attributes:
        by_rank: Each rank's batch is a micro-batch, and their losses are averaged; else the ranks' batches are one.
        rounded: The weights that it begins with are each moved by one rounding, which shows what rounding does.
        reseeded: It draws other random numbers, which shows whether it draws any.
    """

    by_rank: bool = False
    rounded: bool = False
    reseeded: bool = False

    @property
    def name(self) -> str:
        """Name of its folder, and of the run on the command line of its process."""
        parts = ["ranks" if self.by_rank else "whole", "rounded" * self.rounded, "reseeded" * self.reseeded]
        return "-".join(filter(None, parts))

    @classmethod
    def named(cls, name: str) -> "Reference":
        """The run of a name."""
        data, *changes = name.split("-")
        return cls(data == "ranks", "rounded" in changes, "reseeded" in changes)


def batches_folder(folder: Path) -> Path:
    """Where the ranks of the layout leave their batches."""
    return folder / "batches"


def batch_file(folder: Path, index: int, rank: int) -> Path:
    """Where a rank leaves its batch number ``index``."""
    return batches_folder(folder) / f"{index:05d}-{rank}.pt"


def write_json(path: Path, content: Any) -> None:
    """Write a file that is whole or not there."""
    unfinished = path.with_suffix(".partial")
    unfinished.write_text(json.dumps(content, indent=1))
    unfinished.rename(path)
