"""From the tensors of a hub folder to those of a network, by the conversions that Transformers has for its family.

The library's converters are given :class:`~lightning_moe.checkpoint.lazy.Lazy` tensors, so that nothing is read here
and what comes out can be read in parts: of a converter that stacks 128 experts, a rank reads those that it holds.
"""

import copy
import importlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lightning_moe.checkpoint.lazy import Computed, Lazy, Node, Stored
from lightning_moe.checkpoint.safetensors_files import StoredFolder
from lightning_moe.optional import require

# Converters that work on each expert by itself, though not by operations that a lazy tensor can follow.
_BY_ROWS = ("Mxfp4Dequantize",)


@dataclass
class Conversion:
    """What of a folder goes where.

    Attributes:
        values: The value of each of the network's tensors that the folder has, by its name in the network.
        sources: The names in the folder that each is made of.
        unexpected: Names in the folder that go nowhere.
        ignored: Those among them that the network says it does not need.
        problems: What is wrong with a tensor, a sentence each.
    """

    values: dict[str, Node] = field(default_factory=dict)
    sources: dict[str, list[str]] = field(default_factory=dict)
    unexpected: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def same_names(stored: StoredFolder, wanted: Mapping[str, Tensor]) -> Conversion:
    """The conversion for a module that is no model of Transformers: its own names."""
    found = Conversion()
    for name, tensor in stored.tensors.items():
        if name in wanted:
            found.values[name], found.sources[name] = Stored(tensor), [name]
        else:
            found.unexpected.append(name)
    return found


def convert(network: Any, stored: StoredFolder, wanted: Mapping[str, Tensor]) -> Conversion:
    """Find out how the tensors of a folder become those of a model of Transformers. Nothing is read.

    Args:
        network: The model, on any device, sharded or not.
        stored: The folder.
        wanted: For each name of the network's state dict a tensor of its shape and dtype, on the meta device.

    Raises:
        ModuleNotFoundError: If Transformers is not installed.
        ValueError: If the folder is quantized in a way that Transformers cannot undo.
        RuntimeError: If the installed Transformers converts weights in another way than is known here.
    """
    library, quantizer = _Library(), _quantizer(stored)
    mapping = library.mapping(network, quantizer)
    groups, found = _group(library, mapping, network, stored, wanted)
    model = _Wanted(network, wanted)
    for group in groups.values():
        found.problems += _missing_numbers(group)
        try:
            for name, value in group.convert(model).items():
                if name in wanted:
                    found.values[name], found.sources[name] = value, group.names
                else:
                    found.unexpected += group.names
        except Exception as error:  # a converter may raise anything about tensors that it does not expect
            found.problems.append(
                f"{group.target!r} cannot be made of {_some(group.names)} ({_shapes(stored, group.names)}):"
                f" {type(error).__name__}: {error}"
            )
    if quantizer is None:
        network._weight_conversions = [entry for entry in mapping if entry.was_used()]  # what save_pretrained undoes
    return found


class _Library:
    """What is used of Transformers' weight conversion."""

    def __init__(self) -> None:
        version = require("transformers", "load_pretrained").__version__
        try:
            loading = importlib.import_module("transformers.core_model_loading")
            mappings = importlib.import_module("transformers.conversion_mapping")
            self.get_mapping: Any = mappings.get_model_conversion_mapping
            self.rename: Any = loading.rename_source_key
            self.sort_key: Any = loading.dot_natural_key
            self.renaming: Any = loading.WeightRenaming
            self.converter: Any = loading.WeightConverter
        except (ImportError, AttributeError) as error:
            raise RuntimeError(
                f"Transformers {version} converts weights in another way than load_pretrained knows ({error}); install"
                " transformers>=5.11,<6"
            ) from error

    def mapping(self, network: Any, quantizer: Any) -> list[Any]:
        if quantizer is None:
            return self.get_mapping(network)
        return self.get_mapping(network, hf_quantizer=quantizer)


@dataclass
class _Group:
    """Tensors of the folder that one converter takes together.

    Attributes:
        target: What they become, the first of it where there are several.
        converter: What makes it.
        tensors: The names in the folder, by the converter's pattern for them.
        stored: The folder.
    """

    target: str
    converter: Any
    tensors: dict[str, list[str]]
    stored: StoredFolder

    @property
    def names(self) -> list[str]:
        return [name for names in self.tensors.values() for name in names]

    def convert(self, model: "_Wanted") -> dict[str, Node]:
        """The value of each tensor that is made."""
        nodes = [Stored(self.stored.tensors[name]) for name in self.names]
        try:
            made = self._run(model, [Lazy(node) for node in nodes])
            if all(isinstance(tensor, Lazy) for tensor in made.values()):
                return {name: tensor.node for name, tensor in made.items()}
        except NotImplementedError:
            pass
        operations = getattr(self.converter, "operations", [])
        by_rows = bool(operations) and all(type(operation).__name__ in _BY_ROWS for operation in operations)
        like = model.get_parameter(self.target)
        # Which names come out is known for one-to-one and many-to-one converters.
        one = Computed(like.shape, like.dtype, nodes, partial(self._compute, model), by_rows)
        return {self.target: one}

    def _compute(self, model: "_Wanted", values: list[Tensor]) -> Tensor:
        made = self._run(model, values)
        return made[self.target].detach()

    def _run(self, model: "_Wanted", tensors: Sequence[Tensor]) -> dict[str, Any]:
        converter = copy.deepcopy(self.converter)
        values = iter(tensors)
        for pattern, names in self.tensors.items():
            for name in names:
                converter.add_tensor(self.target, name, pattern, next(values))
        made = converter.convert(self.target, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def _group(
    library: _Library, mapping: Sequence[Any], network: Any, stored: StoredFolder, wanted: Mapping[str, Tensor]
) -> tuple[dict[str, _Group], Conversion]:
    """Sort the folder's tensors by what they become, as the library does when it loads a model."""
    renamings = [entry for entry in mapping if isinstance(entry, library.renaming)]
    converters = [entry for entry in mapping if isinstance(entry, library.converter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix = network.base_model_prefix
    ignored = _ignored(network)
    groups: dict[str, _Group] = {}
    found = Conversion()
    for name in sorted(stored.tensors, key=library.sort_key):
        target, pattern = library.rename(name, renamings, converters, prefix, wanted)
        if target not in wanted and name in wanted:
            target, pattern = library.rename(name, [], [], prefix, wanted)
        if target not in wanted:
            becomes = [target]
            if pattern is not None:
                targets = by_pattern[pattern].target_patterns
                becomes = [target.replace(targets[0], other) for other in targets]
            known = ignored is not None and all(ignored.search(key) for key in becomes)
            (found.ignored if known else found.unexpected).append(name)
        elif pattern is not None:
            if target not in groups:
                groups[target] = _Group(target, by_pattern[pattern], {}, stored)
            groups[target].tensors.setdefault(pattern, []).append(name)
        elif target in groups:
            found.problems.append(f"{target!r} is in the folder twice, as {groups[target].names[0]!r} and as {name!r}")
        else:
            groups[target] = _Group(target, library.renaming(name, target), {name: [name]}, stored)
    return groups, found


def _ignored(network: Any) -> re.Pattern[str] | None:
    """What the network's class does not need of a folder, as the library knows it."""
    patterns = set(getattr(network, "_keys_to_ignore_on_load_unexpected", None) or ())
    buffers = [name for name, _ in network.named_buffers()]
    # Of old folders: the one has moved, the other is not saved any more.
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        patterns.add(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):
        patterns.add(r"(^|\.)position_ids$")
    return re.compile("|".join(f"(?:{pattern})" for pattern in sorted(patterns))) if patterns else None


def ignored_if_missing(network: Any) -> re.Pattern[str] | None:
    """The names that a folder for a network need not have."""
    patterns = set(getattr(network, "_keys_to_ignore_on_load_missing", None) or ())
    return re.compile("|".join(f"(?:{pattern})" for pattern in sorted(patterns))) if patterns else None


class _Wanted:
    """What converters ask of the model that they convert for: shapes and dtypes of whole tensors, and its config."""

    def __init__(self, network: Any, tensors: Mapping[str, Tensor]) -> None:
        self.config = network.config
        self.base_model_prefix = network.base_model_prefix
        self._tensors = tensors

    def get_parameter(self, name: str) -> Tensor:
        return self._tensors[name]

    def get_submodule(self, name: str) -> Any:
        inside = {
            key.removeprefix(f"{name}."): value for key, value in self._tensors.items() if key.startswith(f"{name}.")
        }
        return SimpleNamespace(**{key: value for key, value in inside.items() if "." not in key})


def _missing_numbers(group: _Group) -> list[str]:
    """Find a gap in numbered tensors that are stacked: the rest would be stacked in the wrong places."""
    problems = []
    for pattern, names in group.tensors.items():
        parts = [name.split(".") for name in names]
        if "*" not in pattern or len({len(part) for part in parts}) > 1:
            continue
        varying = [column for column in zip(*parts, strict=True) if len(set(column)) > 1]
        if len(varying) != 1 or not all(number.isdigit() for number in varying[0]):
            continue
        numbers = {int(number) for number in varying[0]}
        gaps = sorted(set(range(max(numbers) + 1)) - numbers)
        if gaps:
            column = next(place for place, column in enumerate(zip(*parts, strict=True)) if len(set(column)) > 1)
            lacking = [".".join((*parts[0][:column], str(gap), *parts[0][column + 1 :])) for gap in gaps]
            problems.append(f"{_some(lacking)} missing in {group.stored.tensors[names[0]].file.parent}")
    return problems


def _quantizer(stored: StoredFolder) -> Any:
    """What undoes the quantization of a folder, ``None`` where there is none."""
    options = quantization_of(stored.path)
    if options is None:
        return None
    require("transformers", "load_pretrained")
    auto = importlib.import_module("transformers.quantizers.auto")
    method = options.get("quant_method")
    example = next(iter(sorted(stored.tensors)), "")
    try:
        chosen = auto.AutoQuantizationConfig.from_dict(dict(options))
        if not hasattr(chosen, "dequantize"):
            raise ValueError(f"{type(chosen).__name__} has no way back to plain weights")
        chosen.dequantize = True
        quantizer = auto.AutoHfQuantizer.from_config(chosen, pre_quantized=True)
        operations = getattr(quantizer, "get_load_operations", None)  # newer than 5.11
        if operations is not None and "dequantize" not in operations():
            raise ValueError(f"{type(quantizer).__name__} has no way back to plain weights")
    except Exception as error:
        raise ValueError(
            f"the weights in {stored.path} are quantized (config.json: quant_method={method!r}; {example!r}, for"
            f" example), which cannot be trained and which Transformers cannot undo while it reads: {error}. Use the"
            " folder with the original weights"
        ) from error
    return quantizer


def quantization_of(folder: Path) -> Mapping[str, Any] | None:
    """What ``config.json`` says about quantized weights, ``None`` where it says nothing."""
    config = _config_of(folder)
    for part in (config, config.get("text_config")):
        if isinstance(part, dict) and isinstance(part.get("quantization_config"), dict):
            return part["quantization_config"]
    return None


def model_type_of(folder: Path) -> str | None:
    """The kind of model that ``config.json`` names, ``None`` where there is none."""
    return _config_of(folder).get("model_type")


def _config_of(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def is_plain(dtype: torch.dtype) -> bool:
    """Whether numbers of a dtype stand for themselves, rather than for what a quantization makes of them."""
    return dtype.is_floating_point and dtype.itemsize >= 2


def _shapes(stored: StoredFolder, names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(str(list(stored.tensors[name].shape)) for name in names))


def _some(names: Sequence[str], most: int = 3) -> str:
    return ", ".join(map(repr, names[:most])) + (f" and {len(names) - most} more" if len(names) > most else "")
