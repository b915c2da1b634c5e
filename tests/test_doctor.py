import importlib.metadata
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from lightning_moe import doctor, optional
from lightning_moe.cli import main
from lightning_moe.dispatch import dispatcher_options
from lightning_moe.experts import backend_options
from tests.dispatch.test_automatic import pretend_gpus
from tests.harness import ROOT, in_subprocess


def _text(renderable, width=80):
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(renderable)
    return console.export_text()


def test_the_command_prints_the_report(capsys):
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    for heading in ("Versions", "Devices", "Process-group backends", "Dispatchers", "Experts backends"):
        assert heading in text
    assert torch.__version__ in text
    assert importlib.metadata.version("lightning") in text


def test_the_report_fits_80_columns():
    assert max(len(line) for line in _text(doctor.report()).splitlines()) <= 80


def test_every_dispatcher_and_backend_is_listed_with_its_state():
    lines = _text(doctor.report(), width=300).splitlines()
    for name, reason in {**dispatcher_options(), **backend_options()}.items():
        (line,) = [line for line in lines if line.split("│")[1:2] and line.split("│")[1].strip() == name]
        assert (f"not usable: {reason}" if reason else " usable") in line


def test_gloo_is_usable_on_cpu():
    assert doctor.process_group_backends()["gloo"] == ""


def test_without_cuda_the_devices_say_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = doctor.devices()
    assert found["CUDA"] == "no device"
    assert "cores" in found["CPU"]


def test_a_cuda_device_is_described(monkeypatch):
    properties = type("Properties", (), {"name": "Some GPU", "total_memory": 80 * 2**30, "major": 9, "minor": 0})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    assert doctor.devices()["CUDA 0"] == "Some GPU, 80.0 GiB, compute capability 9.0"


def test_a_broken_driver_is_an_answer_and_not_a_crash(monkeypatch):
    def broken():
        raise RuntimeError("driver too old")

    monkeypatch.setattr(torch.cuda, "is_available", broken)
    assert doctor.devices()["CUDA"] == "cannot be asked: driver too old"


@pytest.mark.parametrize("error", [ModuleNotFoundError("No module", name="deep_ep"), OSError("undefined symbol: nccl")])
def test_a_missing_or_broken_package_is_a_reason(monkeypatch, error):
    def fail(name):
        raise error

    monkeypatch.setattr(optional.importlib, "import_module", fail)
    optional.probe.cache_clear()
    try:
        found = doctor.versions()
    finally:
        monkeypatch.undo()
        optional.probe.cache_clear()
    assert found["deep-ep"] == "not installed" or "undefined symbol: nccl" in found["deep-ep"]


def _install(folder: Path, module: str, code: str) -> None:
    """Write a module, and the packages around it."""
    path = folder.joinpath(*module.split("."))
    path.mkdir(parents=True)
    for package in list(path.parents)[: module.count(".")]:
        (package / "__init__.py").touch()
    (path / "__init__.py").write_text(code)


@pytest.fixture
def packages(monkeypatch, tmp_path):
    """A folder whose packages stand before those that are installed."""

    def imported():
        return [name for name in sys.modules if name.split(".")[0] in ("deep_ep", "transformer_engine")]

    for name in imported():
        monkeypatch.delitem(sys.modules, name)
    optional.probe.cache_clear()
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in imported():
        del sys.modules[name]
    monkeypatch.undo()
    optional.probe.cache_clear()


BREAKS = {
    "raise ImportError('undefined symbol: ncclCommQueryProperties')": (
        "ImportError: undefined symbol: ncclCommQueryProperties"
    ),
    "raise RuntimeError('a compiled\\npart is missing')": "RuntimeError: a compiled part is missing",
    "open('/no/such/libnvshmem.so')": "FileNotFoundError: [Errno 2] No such file or directory",
    "import ctypes; ctypes.CDLL('libcuda_of_nobody.so.1')": "OSError: libcuda_of_nobody.so.1",
    "assert False": "AssertionError",
    "assert False, 'no NVSHMEM'": "AssertionError: no NVSHMEM",
    "None % 2": "TypeError: unsupported operand",
    "import no_such_part": "ModuleNotFoundError: No module named 'no_such_part'",
    "{}['CUDA_HOME']": "KeyError: 'CUDA_HOME'",
    "raise SystemExit('no GPU')": "SystemExit: no GPU",
    "def :": "SyntaxError",
}


@pytest.mark.parametrize("code", BREAKS)
def test_a_package_that_breaks_at_import_is_a_reason(packages, code):
    _install(packages, "deep_ep", code)
    _install(packages, "transformer_engine.pytorch", code)
    reason = f"cannot be imported: {BREAKS[code]}"
    found = doctor.versions()
    assert found["deep-ep"].startswith(reason)
    assert found["transformer-engine"].startswith(reason)
    lines = _text(doctor.report(), width=400).splitlines()
    for name in ("deepep", "hybridep", "nccl_ep"):
        assert any(name in line and "not usable" in line and reason in line for line in lines), name
    (auto,) = [line for line in lines if "│ auto " in line]
    assert "takes all_to_all on " in auto or "takes local" in auto


def test_the_command_survives_broken_packages(tmp_path):
    _install(tmp_path, "deep_ep", "assert False, 'no NVSHMEM'")
    _install(tmp_path, "transformer_engine.pytorch", "open('/no/such/lib.so')")
    argv = [sys.executable, "-m", "lightning_moe", "doctor"]
    done = in_subprocess(argv, env={"PYTHONPATH": f"{tmp_path}:{ROOT}", "COLUMNS": "300"}, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "cannot be imported: AssertionError: no NVSHMEM" in done.stdout
    assert "FileNotFoundError" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ("class Buffer: pass\nclass ElasticBuffer: pass", "version unknown with ElasticBuffer, Buffer"),
        ("__version__ = '2.5.0'\nclass EPBuffer: pass", "2.5.0 with EPBuffer"),
        ("class Buffer: pass\nclass HybridEPBuffer: pass", "version unknown with Buffer, HybridEPBuffer"),
        ("__version__ = '9'", "9 with no interface that is known here"),
    ],
)
def test_the_interfaces_of_deepep_are_shown(monkeypatch, packages, code, shown):
    def no_distribution(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", no_distribution)
    _install(packages, "deep_ep", code)
    assert doctor.versions()["deep-ep"] == shown


def test_what_auto_takes_on_this_machine(monkeypatch, packages):
    config = "get_dispatch_config = get_combine_config = staticmethod(lambda num_ranks: None)"
    _install(packages, "deep_ep", f"class Buffer:\n    {config}")
    pretend_gpus(monkeypatch, 4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", _gpu)
    text = _text(doctor.report(), width=300)
    assert "takes deepep on 4 ranks, one a GPU of this machine: all 4 expert-parallel ranks have it" in text
    pretend_gpus(monkeypatch, 4, links=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", _gpu)
    text = _text(doctor.report(), width=300)
    assert "takes all_to_all on 4 ranks, one a GPU of this machine: passed over deepep, nccl_ep and hybridep" in text
    assert "does not reach those of all other expert-parallel ranks of its node by NVLink" in text


def test_a_question_about_auto_that_breaks_is_an_answer(monkeypatch, packages):
    def broken():
        raise RuntimeError("driver too old")

    monkeypatch.setattr(torch.cuda, "device_count", broken)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    (auto,) = [line for line in _text(doctor.report(), width=200).splitlines() if "│ auto " in line]
    assert "unknown (RuntimeError: driver too old)" in auto
    monkeypatch.setattr(torch.cuda, "is_available", broken)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    text = _text(doctor.report(), width=200)
    assert text.count("driver too old") >= 3
    assert "not usable: cannot be asked: RuntimeError: driver too old" in text


def _gpu(index):
    properties = {"name": "Some GPU", "total_memory": 80 * 2**30, "major": 9, "minor": 0, "uuid": f"GPU {index}"}
    return type("Properties", (), properties)


@pytest.mark.gpu
def test_the_present_gpu_is_listed():
    assert torch.cuda.get_device_name(0) in doctor.devices()["CUDA 0"]
