"""Which checkpoint ``--ckpt_path last`` means."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

_MAY_DIFFER = {
    "model": {"optimizer", "lr_scheduler", "lr", "weight_decay", "warmup_steps", "schedule", "min_lr_ratio"},
    "data": {"num_workers", "pin_memory", "persistent_workers"},
}


@dataclass(frozen=True)
class Place:
    """A directory where earlier runs may have put checkpoints.

    Args:
        directory: The directory.
        config: The config that such a run has saved; ``None`` where the present config names the directory itself.
        pattern: The names of the checkpoints.
    """

    directory: Path
    config: Path | None = None
    pattern: str = "*.ckpt"


def newest_checkpoints(directories: Sequence[Path]) -> list[Path]:
    """List the whole checkpoints of some directories.

    Args:
        directories: Where ``*.ckpt`` files and ``*.ckpt`` directories (distributed checkpoints) may lie.

    Returns:
        Their paths, the newest first. A distributed checkpoint counts once its metadata is there: it is written last.
    """
    return _newest_first(path for directory in directories for path in directory.glob("*.ckpt"))


def _newest_first(paths: Iterable[Path]) -> list[Path]:
    times = {path: _marker(path).stat().st_mtime_ns for path in paths if _marker(path).exists()}
    return sorted(times, key=lambda path: times[path], reverse=True)


def _marker(path: Path) -> Path:
    return path / ".metadata" if path.is_dir() else path


def callback_directories(trainer: Trainer) -> list[Path]:
    """List the directories that the checkpoint callbacks of a Trainer write to."""
    directories = [getattr(callback, "dirpath", None) for callback in trainer.checkpoint_callbacks]
    return [Path(directory) for directory in directories if directory]


def checkpoint_places(trainer: Trainer) -> list[Place]:
    """List where earlier runs of a config may have put checkpoints, by the rules of ModelCheckpoint.

    Args:
        trainer: The Trainer of the run that starts now.

    Returns:
        The directories that exist, with the config that lies beside each.
    """
    places = [Place(directory) for directory in callback_directories(trainer)]
    root = Path(trainer.default_root_dir)
    for logger in trainer.loggers:
        saved = Path(logger.save_dir or root)
        runs = saved / str(logger.name)
        own_directory = isinstance(logger, TensorBoardLogger | CSVLogger)  # Lightning saves the config there, or above
        for run in sorted(runs.glob("*")):
            places.append(Place(run / "checkpoints", (run if own_directory else saved) / "config.yaml"))
    if not trainer.loggers:
        places.append(Place(root / "checkpoints", root / "config.yaml"))
    places += [Place(root, _config_before(path, places), path.name) for path in root.glob("hpc_ckpt_*.ckpt")]
    first = {(place.directory, place.pattern): place for place in reversed(places) if place.directory.is_dir()}
    return list(reversed(first.values()))


def _config_before(checkpoint: Path, places: Sequence[Place]) -> Path:
    """The config of the run that has saved a checkpoint into the root directory, as Lightning does on SLURM's signal.

    A run saves its config as it begins, so this is the newest config that is older than the checkpoint.
    """
    marker = _marker(checkpoint)
    end = marker.stat().st_mtime_ns if marker.exists() else 0
    times = {
        place.config: place.config.stat().st_mtime_ns for place in places if place.config and place.config.exists()
    }
    before = {config: time for config, time in times.items() if time <= end}
    return max(before, key=lambda config: before[config], default=checkpoint.parent / "config.yaml")


def newest_fitting(places: Sequence[Place], present: dict[str, Any]) -> tuple[Path | None, list[str]]:
    """Find the newest checkpoint of an earlier run with the model and the data of the present config.

    Args:
        places: The directories to look in.
        present: The present config, with defaults, as plain values.

    Returns:
        The checkpoint, or ``None``, and a line about each newer run that was passed over.
    """
    found = {path: place for place in reversed(places) for path in place.directory.glob(place.pattern)}
    reasons: dict[tuple[Path, Path], str] = {}
    for path in _newest_first(found):
        config = found[path].config
        if config is not None and (path.parent, config) in reasons:
            continue
        reason = None if config is None else _difference_of(config, present)
        if config is None or reason is None:
            return path, list(reasons.values())
        several = found[path].pattern == Place.pattern
        reasons[path.parent, config] = f"{_short(path.parent if several else path)} is passed over: {reason}"
    return None, list(reasons.values())


def _difference_of(config: Path, present: dict[str, Any]) -> str | None:
    try:
        saved = yaml.safe_load(config.read_text(encoding="utf-8"))
        sections = {name: _section(saved.get(name), config.parent) for name in _MAY_DIFFER}
    except FileNotFoundError:
        return "its run has saved no config.yaml"
    except (OSError, UnicodeDecodeError, yaml.YAMLError, AttributeError) as error:
        return f"{_short(config)} cannot be read ({type(error).__name__})"
    for name, may_differ in _MAY_DIFFER.items():
        found = _difference(name, sections[name], present.get(name), may_differ)
        if found is not None:
            key, then, now = found
            return f"its config has {key}: {_value(then)}, this one {_value(now)}"
    return None


def _section(value: Any, folder: Path) -> Any:
    """A section, also where the config names a file of its own for it, which is saved beside."""
    if isinstance(value, str) and value.endswith((".yaml", ".yml")) and (folder / value).is_file():
        return yaml.safe_load((folder / value).read_text(encoding="utf-8"))
    return value


def _difference(key: str, then: Any, now: Any, may_differ: set[str]) -> tuple[str, Any, Any] | None:
    if not (isinstance(then, dict) and isinstance(now, dict)):
        return None if then == now else (key, then, now)
    for name in [*then, *(name for name in now if name not in then)]:
        if name in may_differ:
            continue
        # only the arguments of the class itself are exempt, and not what happens to have such a name deeper down
        exempt = may_differ if name == "init_args" else set()
        if found := _difference(f"{key}.{name}", then.get(name), now.get(name), exempt):
            return found
    return None


def _value(value: Any) -> str:
    text = "nothing" if value is None else str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _short(path: Path) -> str:
    absolute = path.absolute()
    return str(absolute.relative_to(Path.cwd())) if absolute.is_relative_to(Path.cwd()) else str(absolute)
