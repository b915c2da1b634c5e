import importlib.metadata

import pytest
import torch
from rich.console import Console

from lightning_moe import doctor, optional
from lightning_moe.cli import main
from lightning_moe.dispatch import dispatcher_options
from lightning_moe.experts import backend_options


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


@pytest.mark.gpu
def test_the_present_gpu_is_listed():
    assert torch.cuda.get_device_name(0) in doctor.devices()["CUDA 0"]
