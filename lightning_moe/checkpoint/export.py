"""``lightning-moe export``: a checkpoint of Lightning as a folder that Transformers loads, in one process, on a CPU."""

import argparse
import errno
import importlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from typing_extensions import override

from lightning_moe.checkpoint.damage import CheckpointError, listed
from lightning_moe.checkpoint.hub_plan import HubPlan, differences
from lightning_moe.checkpoint.hub_write import (
    Files,
    HubFolder,
    Part,
    copy_tokenizer,
    divide,
    find_tokenizer,
    parse_size,
    size_of,
    tokenizer_files,
    write_configs,
    write_index,
)
from lightning_moe.checkpoint.named_network import from_folder, from_hyper_parameters, from_init_args, from_module
from lightning_moe.checkpoint.network import FoundNetwork, check_no_adapters
from lightning_moe.checkpoint.stored import StoredWeights, open_checkpoint
from lightning_moe.cli import ParsedCLI, check_config_file, config_files, quiet
from lightning_moe.cli_errors import RefusedError, terminable
from lightning_moe.models import CausalLM

_REPORT_S = 10.0

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_DESCRIPTION = """\
Write the network in a checkpoint as a folder in the format of the Hugging Face hub, which
transformers.AutoModelForCausalLM.from_pretrained(FOLDER) and the tools around it load: safetensors files, their index,
config.json, the generation config and the tokenizer's files.

The checkpoint may be a folder of a distributed save, on any layout, or a single file. One tensor is in memory at a
time, and no GPU is needed. The folder is there only once it is whole."""

_EPILOG = """\
A checkpoint of lightning_moe.models.CausalLM says itself which network it holds. For any other LightningModule give
--config with the config.yaml of the run, or --pretrained with a folder that holds the network's config.json.

exit codes: 0 written, 2 refused"""


def main(argv: list[str] | None = None) -> int:
    """Run ``lightning-moe export``.

    Args:
        argv: The arguments after the command.

    Returns:
        The exit code, 0.

    Raises:
        RefusedError: If the options, the checkpoint or the place for the folder cannot be used.
    """
    options = _parse(sys.argv[2:] if argv is None else argv)
    quiet()
    try:
        with terminable():
            print(_export(options))
    except (CheckpointError, ValueError, NotImplementedError, OSError, ImportError) as error:
        raise RefusedError(_reason(error).rstrip(". ")) from error
    except KeyboardInterrupt:
        return 130
    return 0


def export_checkpoint(
    ckpt_path: str | Path,
    output: str | Path,
    *,
    network: FoundNetwork | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    tokenizer: str | Path | None = None,
    overwrite: bool = False,
    report: Callable[[int, int], None] | None = None,
) -> list[Path]:
    """Write the network in a checkpoint in the format of the Hugging Face hub. No communication, no GPU.

    Args:
        ckpt_path: A checkpoint of Lightning: the folder of a distributed save, or a file.
        output: The folder to write.
        network: The network, ``None`` where the checkpoint is one of ``CausalLM`` and says it.
        dtype: Floating-point weights are cast to it; default: they are written as they are.
        max_shard_size: Bytes of a file at most, also as ``"5GB"``.
        tokenizer: A folder with a tokenizer, or a ``tokenizer.json``; default: the folder that the run began with.
        overwrite: Replace a model that ``output`` holds, once the new one is whole.
        report: Called with the bytes that are written and those of the whole, after each tensor.

    Returns:
        The files that hold the weights.

    Raises:
        CheckpointError: If the checkpoint is damaged, or none.
        FileExistsError: If ``output`` exists and may not be replaced.
        FileNotFoundError: If the checkpoint or the tokenizer does not exist.
        NotImplementedError: If the network is adapted by PEFT.
        OSError: If there is no space or no permission.
        ValueError: If the checkpoint does not hold this network.
    """
    parse_size(max_shard_size)
    folder = HubFolder(Path(output), overwrite)
    weights = open_checkpoint(Path(ckpt_path))
    found = network or from_hyper_parameters(weights.meta, weights.path)
    tokens = find_tokenizer(tokenizer, found.pretrained)
    return _write(weights, found, folder, dtype, max_shard_size, tokens, report)


def _write(
    weights: StoredWeights,
    found: FoundNetwork,
    folder: HubFolder,
    dtype: torch.dtype | None,
    max_shard_size: int | str,
    tokenizer: Path | None,
    report: Callable[[int, int], None] | None,
) -> list[Path]:
    own = _own_tensors(weights, found)
    plan = HubPlan(found.model, {key: weights.tensors[name].dtype for key, name in own.items()}, dtype)
    folder.check_space(plan.nbytes)
    parts = divide((entry for group in plan.groups for entry in group.entries), parse_size(max_shard_size))
    with folder:
        write_configs(folder.partial, found.model, plan.dtype)
        copy_tokenizer(folder.partial, tokenizer)
        _write_weights(folder.partial, plan, parts, weights, own, report)
        write_index(folder.partial, parts, sum(parameter.numel() for parameter in found.model.parameters()))
        folder.finish()
    return sorted(folder.output.glob("*.safetensors"))


def _own_tensors(weights: StoredWeights, found: FoundNetwork) -> dict[str, str]:
    """The names of the network's tensors in the checkpoint, by their names in the network."""
    own = found.own(list(weights.tensors))
    check_no_adapters(own.values(), f"ckpt_path {weights.path}")
    wrong = differences(found.model, {key: weights.tensors[name].shape for key, name in own.items()})
    if wrong:
        where = f"under {found.name!r} in it" if found.name else "in it"
        raise ValueError(
            f"ckpt_path {weights.path} does not hold the weights of this {type(found.model).__name__} ({where}):"
            f" {'; '.join(wrong)}. It is of another model, or damaged"
        )
    return own


def _write_weights(
    folder: Path,
    plan: HubPlan,
    parts: Sequence[Part],
    weights: StoredWeights,
    own: Mapping[str, str],
    report: Callable[[int, int], None] | None,
) -> None:
    _check_tied(plan, weights, own)
    files, written = Files(folder, parts), 0
    try:
        for group in plan.groups:
            tensors = {key: weights.read(own[key]) for key in group.keys}
            for name, tensor in plan.convert(group, tensors):
                files.write(name, tensor)
                written += tensor.nbytes
            del tensors
            if report is not None:
                report(written, plan.nbytes)
        files.close()
    finally:
        files.abandon()


def _check_tied(plan: HubPlan, weights: StoredWeights, own: Mapping[str, str]) -> None:
    """Refuse to leave a tensor out that has other values than the one which it should be the same as."""
    for name, kept in plan.tied.items():
        if name in own and kept in own and not torch.equal(weights.read(own[name]), weights.read(own[kept])):
            raise ValueError(
                f"ckpt_path {weights.path}: {name} and {kept} should be one tensor, as the network's configuration ties"
                " them, but they differ. Set tie_word_embeddings to false in the configuration"
            )


class _Options(argparse.ArgumentParser):
    """Raises what it cannot parse, in place of a page of usage."""

    @override
    def error(self, message: str) -> NoReturn:
        raise RefusedError(message, "`lightning-moe export --help` lists the options")


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = _Options(
        prog="lightning-moe export",
        usage="lightning-moe export --ckpt_path PATH --output FOLDER [options]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--ckpt_path", type=Path, required=True, metavar="PATH", help="the checkpoint, folder or file")
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="the folder to write")
    parser.add_argument("-c", "--config", action="append", default=[], metavar="FILE", help="config.yaml of the run")
    parser.add_argument(
        "--pretrained", type=Path, metavar="FOLDER", help="folder with the network's config.json, in place of --config"
    )
    parser.add_argument(
        "--module", metavar="NAME", help="where the network is in the LightningModule, if it has several"
    )
    parser.add_argument("--tokenizer", type=Path, metavar="PATH", help="folder with a tokenizer, or a tokenizer.json")
    parser.add_argument("--dtype", choices=sorted(DTYPES), help="cast the weights (default: as they were saved)")
    parser.add_argument(
        "--max_shard_size", default="5GB", metavar="SIZE", help="largest size of a file (default: 5GB, 5e9 bytes)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a model in FOLDER, once the new one is whole")
    return parser.parse_args(argv)


def _export(options: argparse.Namespace) -> str:
    if options.config and options.pretrained is not None:
        raise RefusedError("--config and --pretrained both say which network it is", "Give one of them")
    parse_size(options.max_shard_size)
    folder = HubFolder(options.output, options.overwrite)
    weights = open_checkpoint(options.ckpt_path)
    network, tokenizer = _network(options, weights)
    tokens = find_tokenizer(options.tokenizer, tokenizer, network.pretrained)
    dtype = None if options.dtype is None else DTYPES[options.dtype]
    files = _write(weights, network, folder, dtype, options.max_shard_size, tokens, _Progress())
    size = sum(file.stat().st_size for file in files)
    lines = [
        f"wrote {options.output}: {type(network.model).__name__}, {size_of(size)} in {len(files)}"
        f" file{'s' * (len(files) > 1)}"
    ]
    left_out = set(weights.tensors) - set(network.own(list(weights.tensors)).values())
    if left_out:
        lines.append(f"left out, because they are not in {network.name!r}: {listed(left_out)}")
    if not tokenizer_files(options.output):
        lines.append("no tokenizer was found; --tokenizer names one")
    return "\n".join(lines)


class _Progress:
    """Says now and then how far a long export is."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def __call__(self, written: int, whole: int) -> None:
        if time.monotonic() - self._last > _REPORT_S:
            self._last = time.monotonic()
            print(f"export: {size_of(written)} of {size_of(whole)} written", file=sys.stderr, flush=True)


def _network(options: argparse.Namespace, weights: StoredWeights) -> tuple[FoundNetwork, str | None]:
    """The network, and the tokenizer that the data of its run had."""
    tokenizer = _tokenizer_of(weights.meta.get("datamodule_hyper_parameters"))
    if options.pretrained is not None:
        return from_folder(options.pretrained, list(weights.tensors), options.module), tokenizer
    if not options.config:
        found = from_hyper_parameters(weights.meta, weights.path)
        if options.module not in (None, found.name):
            raise ValueError(f"module {options.module!r}: the network of CausalLM is {found.name!r}")
        return found, tokenizer
    arguments = [part for file in options.config for part in ("--config", file)]
    for file in config_files(arguments):
        check_config_file(file)
    config = ParsedCLI(["fit", *arguments]).config["fit"]
    source = ", ".join(options.config)
    model = config["model"].as_dict()
    data = config.get("data")
    tokenizer = _tokenizer_of(None if data is None else data.as_dict().get("init_args")) or tokenizer
    if _is_causal_lm(model["class_path"]):
        return from_init_args(model.get("init_args") or {}, source), tokenizer
    return from_module(model, source, options.module), tokenizer


def _tokenizer_of(arguments: Any) -> str | None:
    """What a data module calls its tokenizer, if that may be a path."""
    tokenizer = arguments.get("tokenizer") if isinstance(arguments, Mapping) else None
    return tokenizer if isinstance(tokenizer, str) and tokenizer != "bytes" else None


def _is_causal_lm(class_path: str) -> bool:
    module, _, name = class_path.rpartition(".")
    return issubclass(getattr(importlib.import_module(module), name), CausalLM)


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        if error.errno == errno.ENOSPC and not error.filename:
            return error.strerror
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return " ".join(str(error).split())
