"""Hugging Face in: weights from safetensors files, of which each rank reads its own parts and no more.

A network on the meta device only remembers where its weights are (:func:`~lightning_moe.parallel.initialize.expect`).
The strategy shards it there, where it costs no memory, and then every rank reads what its shards show of the files,
through the conversions that Transformers has for the family, into the shards themselves.
"""

import copy
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_moe.checkpoint.conversion import (
    Conversion,
    convert,
    ignored_if_missing,
    is_plain,
    model_type_of,
    quantization_of,
    same_names,
)
from lightning_moe.checkpoint.damage import Ranks
from lightning_moe.checkpoint.lazy import Node
from lightning_moe.checkpoint.module_tensors import (
    Slot,
    allocate,
    local_part,
    local_window,
    slots_of,
    wanted_tensors,
)
from lightning_moe.checkpoint.safetensors_files import Reader, StoredFolder
from lightning_moe.experts.peft import innermost
from lightning_moe.optional import loaded
from lightning_moe.parallel.apply import reshard
from lightning_moe.parallel.initialize import expect

_REPORT = "_lightning_moe_load_report"
_LISTED = 5


@dataclass(frozen=True)
class LoadReport:
    """What :func:`load_pretrained` did.

    Attributes:
        folder: The folder.
        tensors: How many of the module's tensors have got weights from it.
        bytes_read: Bytes of tensors that this rank has read.
        bytes_stored: Bytes of all tensors in the folder.
        missing: Tensors of the module that the folder does not have.
        unexpected: Tensors of the folder that the module does not have.
        ignored: Those of which the network's class says that it does not need them.
        resized: Embeddings of which the folder has another number of rows; those that both have are read.
        deferred: The module is on the meta device: nothing is read until the strategy has sharded it, and then
            :func:`load_report` returns a report with what was read.
    """

    folder: str
    tensors: int
    bytes_read: int
    bytes_stored: int
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    resized: tuple[str, ...] = ()
    deferred: bool = False

    def __str__(self) -> str:
        mib = 1 << 20
        return (
            f"{self.tensors} tensors from {self.folder}: this rank read {self.bytes_read / mib:.1f} of"
            f" {self.bytes_stored / mib:.1f} MiB"
        )


def load_pretrained(
    module: nn.Module, folder: str | Path, *, prefix: str | None = None, strict: bool = True
) -> LoadReport:
    """Read the weights of a module from the safetensors files of a folder, as Transformers would.

    Three ways: on a module with memory, its tensors are written in place. On a module that ``strategy="moe_ep"`` has
    sharded, by all ranks together, each reads what its shards show. On a module on the meta device, in
    ``configure_model`` or before, the folder is remembered, and read as soon as the strategy has sharded the module:
    then no rank ever holds the whole of it. Only headers are read at that time, so that what is wrong is an error at
    once.

    Weights take the dtype that the module has. Of a model of Transformers, every conversion that the library has for
    the family is applied, and of fp8 and MXFP4 weights the quantization is undone. Any other module reads tensors of
    its own names.

    Args:
        module: A model of Transformers, or a module with exactly one inside (with or without adapters of PEFT, whose
            weights are left alone); or any other module.
        folder: A folder in the format of the Hugging Face hub: ``model.safetensors``, or
            ``model.safetensors.index.json`` with the files that it names.
        prefix: Name of the submodule that the weights are for, where ``module`` has several that could be meant.
        strict: Missing and unexpected tensors are errors. With ``False`` they are reported: missing ones keep the
            values that they have, or are initialized as without a folder; and of input and output embeddings with
            another number of rows, the rows that both have are read.

    Raises:
        FileNotFoundError: If the folder, or a file that its index names, does not exist.
        ValueError: If there are no safetensors files, if one is damaged, if tensors are missing, unexpected or of
            another shape, or if they are quantized in a way that cannot be undone: on every rank, and before anything
            is changed. Also if two tensors that the model has tied are different there, which only reading shows.
        OSError: If a file cannot be read.
    """
    target = _target(module, prefix)
    slots = slots_of(target)
    meta = any(slot.tensor.is_meta for same in slots.values() for slot in same)
    if meta:
        _check_strategy(module)
    sharded = any(isinstance(parameter, DTensor) for parameter in target.parameters())
    wanted = wanted_tensors(target, slots)
    ranks = _ranks(meta or sharded)
    with ranks.failing_together(f"load_pretrained({str(folder)!r})"):
        source = HubWeights(target, folder, strict, wanted)
    numbers = ranks.gather(source.fingerprint())
    if len(set(numbers)) > 1:
        other = next(rank for rank, number in enumerate(numbers) if number != numbers[0])
        raise ValueError(
            f"load_pretrained({str(folder)!r}): rank {other} sees other tensors there than rank 0; all ranks need the"
            " same folder"
        )
    if meta:
        expect(target, source)
        return source.report(0, deferred=True)
    return source.fill(None, together=sharded)


def load_report(module: nn.Module) -> LoadReport | None:
    """Return what was read into a module, or one inside, the last time; ``None`` if nothing was."""
    for inner in module.modules():
        report: LoadReport | None = getattr(inner, _REPORT, None)
        if report is not None:
            return report
    return None


class HubWeights:
    """The weights that a folder has for a module.

    Args:
        module: The module.
        folder: The folder.
        strict: Missing and unexpected tensors are errors.
        wanted: What :func:`~lightning_moe.checkpoint.module_tensors.wanted_tensors` makes of the module.

    Raises:
        FileNotFoundError: As :func:`load_pretrained`.
        ValueError: As :func:`load_pretrained`.
    """

    def __init__(self, module: nn.Module, folder: str | Path, strict: bool, wanted: Mapping[str, Tensor]) -> None:
        self._module = module
        self._stored = StoredFolder.open(folder)
        slots = slots_of(module)
        network = isinstance(module, _pretrained_model())
        found = convert(module, self._stored, wanted) if network else same_names(self._stored, wanted)
        self._values: Mapping[str, Node] = found.values
        self._unexpected, self._ignored = tuple(found.unexpected), tuple(found.ignored)
        resizable = _resized(module, slots, wanted, found)
        self._resized = () if strict else resizable
        self._missing = _missing(module, slots, wanted, found)
        problems = [*found.problems, *self._mismatches(wanted, found)]
        if strict and self._missing:
            problems.append(f"{len(self._missing)} tensors of the model are missing there: {_listed(self._missing)}")
        if strict and self._unexpected:
            problems.append(
                f"{len(self._unexpected)} tensors there have no place in the model: {_listed(self._unexpected)}"
            )
        if problems:
            self._resized = resizable
            hopeless = bool(found.problems or self._mismatches(wanted, found))
            raise ValueError(self._explain(problems, found, wanted, hopeless))
        if self._missing or self._unexpected or self._resized:
            rank_zero_warn(
                f"{folder}: {len(self._missing)} tensors are missing and keep their initial values"
                f" ({_listed(self._missing)}); {len(self._unexpected)} are not used ({_listed(self._unexpected)});"
                f" {len(self._resized)} have another number of rows ({_listed(self._resized)})"
            )

    def fingerprint(self) -> int:
        """A number that differs, all but certainly, where the files hold other tensors; not where other values."""
        facts = sorted((t.name, t.file.name, str(t.dtype), t.shape, t.start) for t in self._stored.tensors.values())
        return zlib.crc32(repr(facts).encode())

    # What the strategy asks

    def waiting(self) -> list[Tensor]:
        """Tensors of the module on the meta device that :meth:`fill` will make.

        Raises:
            ValueError: If a shape has changed since the folder was read.
        """
        waiting = []
        for name, slots in slots_of(self._module).items():
            value = self._values.get(name)
            if value is None or name in self._resized:
                continue
            for slot in slots:
                if tuple(slot.tensor.shape) != value.shape:
                    raise ValueError(
                        f"{slot.name!r} has the shape {list(slot.tensor.shape)} now, and {list(value.shape)} in"
                        f" {self._stored.path}: change the model before load_pretrained, not after"
                    )
                if slot.tensor.is_meta:
                    waiting.append(slot.tensor)
        return waiting

    def fill(self, device: torch.device | None, together: bool = True) -> LoadReport:
        """Read this rank's part of every weight.

        Args:
            device: Where tensors on the meta device are made.
            together: All ranks do this, and an error on one of them is raised on all.

        Raises:
            OSError: If a file cannot be read.
        """
        reshard(self._module)
        slots = slots_of(self._module)
        what = f"reading {self._stored.path}"
        with _ranks(together).failing_together(what), Reader() as reader, torch.no_grad():
            done: dict[int, str] = {}
            for name in sorted(self._values, key=self._position):
                for slot in slots.get(name, ()):
                    allocate(slot, slots, device)
                    tensor = slot.tensor
                    if id(tensor) in done:
                        self._check_tied(name, done[id(tensor)], tensor, reader)
                        continue
                    done[id(tensor)] = name
                    self._read(name, tensor, reader)
        report = self.report(reader.bytes_read)
        object.__setattr__(self._module, _REPORT, report)
        rank_zero_info(f"load_pretrained: {report}")
        return report

    def report(self, bytes_read: int, deferred: bool = False) -> LoadReport:
        """Say what was done, or will be."""
        return LoadReport(
            folder=str(self._stored.path),
            tensors=len(self._values),
            bytes_read=bytes_read,
            bytes_stored=self._stored.nbytes,
            missing=self._missing,
            unexpected=self._unexpected,
            ignored=self._ignored,
            resized=self._resized,
            deferred=deferred,
        )

    def __deepcopy__(self, memo: Any) -> "HubWeights":
        other = copy.copy(self)
        other._module = copy.deepcopy(self._module, memo)  # in the memo already where its module is copied
        return other

    # Reading

    def _position(self, name: str) -> tuple[str, int]:
        sources = self._values[name].sources()
        return (str(sources[0].file), sources[0].start) if sources else ("", 0)

    def _read(self, name: str, tensor: Tensor, reader: Reader) -> None:
        place = local_part(tensor)
        if not place.numel():
            return
        window = local_window(tensor)
        if name in self._resized:  # the first rows
            rows = self._values[name].shape[0]
            first, last = window[0]
            last = max(first, min(last, rows))
            window, place = ((first, last), *window[1:]), place.narrow(0, 0, last - first)
        try:
            self._values[name].read(window, place, reader)
        except Exception as error:
            error.add_note(f"while reading {name!r} from {self._stored.path}")
            raise

    def _check_tied(self, name: str, first: str, tensor: Tensor, reader: Reader) -> None:
        """Compare two tensors of the folder that are one in the model."""
        if name == first or name in self._resized:
            return
        place = local_part(tensor)
        other = torch.empty_like(place)
        if place.numel():
            self._values[name].read(local_window(tensor), other, reader)
        if not torch.equal(place, other):
            raise ValueError(
                f"{self._stored.path} has different values for {first!r} and {name!r}, which the model has tied: set"
                " tie_word_embeddings=False in its config"
            )

    # What is wrong

    def _mismatches(self, wanted: Mapping[str, Tensor], found: Conversion) -> list[str]:
        problems = []
        for name, value in found.values.items():
            tensor = wanted[name]
            there = f"{_listed(found.sources.get(name, [name]), 2)} in {_files(value)}"
            if value.shape != tuple(tensor.shape) and name not in self._resized:
                problems.append(
                    f"{name!r} has the shape {list(tensor.shape)} in the model, and {list(value.shape)} there ({there})"
                )
            elif tensor.is_floating_point() and not is_plain(value.dtype):
                problems.append(
                    f"{name!r} is {_dtype(value.dtype)} there ({there}), which only the quantization_config of a"
                    " config.json beside it could explain"
                )
            elif value.dtype.is_floating_point and not tensor.is_floating_point():
                problems.append(f"{name!r} is {_dtype(tensor.dtype)} in the model, and {_dtype(value.dtype)} there")
        return problems

    def _explain(self, problems: Sequence[str], found: Conversion, wanted: Mapping[str, Tensor], hopeless: bool) -> str:
        shown = list(problems[:_LISTED])
        if len(problems) > _LISTED:
            shown.append(f"and {len(problems) - _LISTED} more of the kind")
        hints = []
        there, here = (
            model_type_of(self._stored.path),
            getattr(getattr(self._module, "config", None), "model_type", None),
        )
        if there is not None and here is not None and there != here:
            hints.append(f"its config.json says model_type={there!r}, and the model is {here!r}")
        elif len(found.values) < 0.5 * len(wanted):
            hints.append(self._another(wanted))
        if any("scale" in name for name in found.unexpected) and quantization_of(self._stored.path) is None:
            hints.append("the folder seems to hold quantized weights, but no config.json that says how")
        if not hopeless:
            hints.append("strict=False takes what fits (CausalLM: pretrained_strict=False)")
        return f"{self._stored.path} does not fit {type(self._module).__name__}: " + "; ".join([*shown, *hints])

    def _another(self, wanted: Mapping[str, Tensor]) -> str:
        """What a folder may be for that has next to nothing of what is wanted."""
        for name, _ in self._module.named_modules():
            if name and all(f"{name}.{key}" in wanted for key in self._stored.tensors):
                return f"all of them are tensors of {name!r} inside, so give prefix={name!r}"
        kind = type(self._module).__name__
        return f"most tensors of {kind} are not there, so the folder seems to be that of another model"


# The module's side


def _missing(
    module: nn.Module, slots: Mapping[str, Sequence[Slot]], wanted: Mapping[str, Tensor], found: Conversion
) -> tuple[str, ...]:
    """Tensors that neither the folder has, nor under another name of theirs, nor that are of no consequence."""
    there = {id(slot.tensor) for name in found.values for slot in slots.get(name, ())}
    ignored = ignored_if_missing(module)
    return tuple(
        name
        for name in wanted
        if name not in found.values
        and not any(id(slot.tensor) in there for slot in slots.get(name, ()))
        and not (ignored is not None and ignored.search(name))
        and not any(problem.startswith(repr(name)) for problem in found.problems)
    )


def _resized(
    module: nn.Module, slots: Mapping[str, Sequence[Slot]], wanted: Mapping[str, Tensor], found: Conversion
) -> tuple[str, ...]:
    """Embeddings that the folder has with another number of rows."""
    embeddings: set[int] = set()
    for get in ("get_input_embeddings", "get_output_embeddings"):
        try:
            layer = getattr(module, get)()
        except (AttributeError, NotImplementedError):
            continue
        if isinstance(layer, nn.Module):
            embeddings.add(id(innermost(layer)))
    return tuple(
        name
        for name, value in found.values.items()
        if any(id(slot.module) in embeddings for slot in slots.get(name, ()))
        and value.shape != tuple(wanted[name].shape)
        and value.shape[1:] == tuple(wanted[name].shape[1:])
    )


def _target(module: nn.Module, prefix: str | None) -> nn.Module:
    """The module that the weights are for."""
    if prefix is not None:
        try:
            return module.get_submodule(prefix)
        except AttributeError:
            raise ValueError(
                f"load_pretrained: prefix={prefix!r} is no submodule of {type(module).__name__}; its children are"
                f" {', '.join(repr(name) for name, _ in module.named_children()) or 'none'}"
            ) from None
    kind = _pretrained_model()
    networks: dict[str, nn.Module] = {}
    for name, inner in module.named_modules():
        if isinstance(inner, kind) and not any(not outer or name.startswith(f"{outer}.") for outer in networks):
            networks[name] = inner
    if len(networks) > 1:
        raise ValueError(
            f"load_pretrained: {type(module).__name__} holds {len(networks)} models of Transformers"
            f" ({', '.join(map(repr, networks))}); say which one with prefix="
        )
    return next(iter(networks.values()), module)


def _pretrained_model() -> Any:
    """The class of Transformers' models, or an empty tuple where nothing has imported the library."""
    library = loaded("transformers")
    return () if library is None else library.PreTrainedModel


def _check_strategy(module: nn.Module) -> None:
    """Refuse a Trainer whose strategy would leave the weights on the meta device."""
    trainer = module._trainer if isinstance(module, pl.LightningModule) else None
    if trainer is None:
        return
    from lightning_moe.strategy import ExpertParallelStrategy

    if not isinstance(trainer.strategy, ExpertParallelStrategy):
        raise ValueError(
            f"load_pretrained: {type(module).__name__} is on the meta device, and only strategy='moe_ep' reads its"
            f" weights later; {type(trainer.strategy).__name__} does not. Choose that strategy, or build the model on"
            " a real device"
        )


def _ranks(together: bool) -> Ranks:
    if not together or not dist.is_initialized():
        return Ranks()
    return Ranks(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)


def _files(value: Node) -> str:
    names = list(dict.fromkeys(source.file.name for source in value.sources()))
    return _listed(names, 2, quote=False)


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _listed(names: Sequence[str], most: int = _LISTED, quote: bool = True) -> str:
    if not names:
        return "none"
    shown = ", ".join(repr(name) if quote else name for name in names[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")
