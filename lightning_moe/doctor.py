"""What this machine can run: ``lightning-moe doctor``."""

import argparse
import os
import platform
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

import torch
import torch.distributed as dist
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from lightning_moe.optional import one_line, probe

_GIB = 2**30


def main(argv: list[str] | None = None) -> int:
    """Run ``lightning-moe doctor``.

    Args:
        argv: The arguments after the command. With ``--config`` the others are those of ``lightning-moe fit``.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(
        prog="lightning-moe doctor",
        description="Show versions, devices, process-group backends, which dispatchers and experts backends are"
        " usable here, and what 'auto' takes. Send this along with a bug report.",
    )
    parser.add_argument(
        "-c",
        "--config",
        action="append",
        metavar="FILE",
        help="show what Transformer Engine would change in the model of a config of `lightning-moe fit` instead;"
        " options of fit may follow, such as --model.config.num_hidden_layers 2",
    )
    options, others = parser.parse_known_args(argv)
    if options.config:
        from lightning_moe.te.report import main as report_of_config

        return report_of_config([*(f"--config={file}" for file in options.config), *others])
    if others:
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    return run()


def run() -> int:
    """Print the report.

    Returns:
        The exit code, always 0: a missing optional package is not an error.
    """
    Console().print(report())
    return 0


def report() -> Group:
    """Build the report.

    Returns:
        Tables of versions, devices, process-group backends, dispatchers with what ``"auto"`` takes, and experts
        backends, readable at 80 columns.
    """
    from lightning_moe.dispatch import automatic_here, dispatcher_options
    from lightning_moe.experts import backend_options

    dispatchers = _choices("Dispatchers: how rows reach their expert (strategy option dispatcher=)", dispatcher_options)
    dispatchers.add_row("auto", Text(_safely(automatic_here)))

    return Group(
        _facts("Versions", versions()),
        _facts("Devices", devices()),
        _choices("Process-group backends", process_group_backends),
        dispatchers,
        _choices("Experts backends: what computes the rows (strategy option experts_backend=)", backend_options),
    )


def versions() -> dict[str, str]:
    """Collect the versions of everything that decides what works.

    Returns:
        Name to version, or to the reason why there is none.
    """
    return {
        "lightning-moe": _distribution("lightning-moe"),
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        "lightning": _distribution("lightning"),
        "transformers": _optional("transformers"),
        "transformer-engine": _optional("transformer_engine"),
        "deep-ep": _safely(_deepep),
        "CUDA": torch.version.cuda or "none: this torch is built without CUDA",
        "NCCL": _safely(_nccl_version),
    }


def devices() -> dict[str, str]:
    """Describe the processors.

    Returns:
        ``"CPU"`` with cores and memory in GiB, and one entry a CUDA device with name, memory and compute capability.
    """
    found = {"CPU": _safely(_cpu)}
    try:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    except Exception as error:
        found["CUDA"] = f"cannot be asked: {' '.join(str(error).split())}"
        return found
    for index in range(count):
        found[f"CUDA {index}"] = _safely(lambda index=index: _cuda_device(index))  # type: ignore[misc]
    if count == 0:
        found["CUDA"] = "no device"
    return found


def process_group_backends() -> dict[str, str]:
    """List the backends of torch.distributed.

    Returns:
        Name to an empty string where it is usable, else the reason.
    """
    if not dist.is_available():
        return dict.fromkeys(("gloo", "nccl"), "this torch is built without torch.distributed")
    gloo = "" if dist.is_gloo_available() else "this torch is built without gloo"
    if not dist.is_nccl_available():
        nccl = "this torch is built without NCCL"
    else:
        nccl = "" if torch.cuda.is_available() else "no CUDA device"
    return {"gloo": gloo, "nccl": nccl}


def _distribution(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed as a package"


def _optional(name: str) -> str:
    found = probe(name)
    return (found.version or "version unknown") if found.module is not None else found.reason


def _deepep() -> str:
    """The version, and which of its interfaces there are: they are what decides what works."""
    from lightning_moe.dispatch import deepep_classes

    if probe("deep_ep").module is None:
        return _optional("deep_ep")
    return f"{_optional('deep_ep')} with {', '.join(deepep_classes()) or 'no interface that is known here'}"


def _nccl_version() -> str:
    if not dist.is_available() or not dist.is_nccl_available():
        return "none: this torch is built without NCCL"
    return ".".join(str(part) for part in torch.cuda.nccl.version())


def _cpu() -> str:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    text = f"{usable} of {os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads"
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / _GIB
        text += f", {memory:.1f} GiB memory"
    return text


def _cuda_device(index: int) -> str:
    found = torch.cuda.get_device_properties(index)
    return f"{found.name}, {found.total_memory / _GIB:.1f} GiB, compute capability {found.major}.{found.minor}"


def _safely(ask: Callable[[], str]) -> str:
    """A doctor that falls ill over one question is of no use: any failure becomes the answer."""
    try:
        return ask()
    except Exception as error:
        return f"unknown ({one_line(error)})"


def _facts(title: str, facts: dict[str, str]) -> Table:
    table = _table(title)
    for name, text in facts.items():
        table.add_row(name, Text(text))
    return table


def _choices(title: str, ask: Callable[[], dict[str, str]]) -> Table:
    table = _table(title)
    try:
        options = ask()
    except Exception as error:
        options = {"all": f"cannot be asked: {one_line(error)}"}
    for name, reason in options.items():
        table.add_row(name, Text(f"not usable: {reason}", "yellow") if reason else Text("usable", "green"))
    return table


def _table(title: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", show_header=False, expand=True)
    table.add_column(no_wrap=True, width=18)
    table.add_column(ratio=1, overflow="fold")
    return table
