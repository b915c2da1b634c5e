"""The dispatchers through the Python of the real libraries, whose compiled parts run on gloo here.

The released wheels are downloaded once and kept in a cache; of them only Python files are unpacked. Where that is not
possible the tests are skipped with the reason.

    LIGHTNING_MOE_TEST_CACHE          folder to keep them in; default: pytest's cache
    LIGHTNING_MOE_TEST_DOWNLOAD_MB    largest wheel to download, in MB; default 60, 0 for none
"""

import gc
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_moe.dispatch.deepep.v1 import V1Transport
from tests.dispatch.cases import SCENARIOS, Setting, expected, layer_of, scenarios_of, wrong
from tests.harness import run_ranks

WIDTH = 256


@dataclass(frozen=True)
class Wheel:
    """A release: what pip calls it, its SHA-256 and its size in MB."""

    requirement: str
    digest: str
    megabytes: int


# A build of DeepEP 2.1 by others; nothing but its Python is used.
DEEP_EP = Wheel(
    "tokenspeed-deepep==2.1.0.post20260810", "e44cc7c46112a9fbccbbbdc7812893d7dc9818b3950054e51ceb06d54507fd0b", 15
)
TRANSFORMER_ENGINE = Wheel(
    "transformer-engine==2.20.2", "7dcfad943a1a55b2612db9a0e43697fe98c70f4c42ec391ba3a0f872f6ce2094", 2
)


def unpacked(wheel: Wheel, cache: Path) -> Path:
    """A folder with the Python files of a release; the test is skipped where there is no way to get it."""
    folder = cache / wheel.requirement.replace("==", "-")
    if folder.is_dir():
        return folder
    allowed = float(os.environ.get("LIGHTNING_MOE_TEST_DOWNLOAD_MB", "60"))
    if wheel.megabytes > allowed:
        pytest.skip(f"{wheel.requirement} is {wheel.megabytes} MB: set LIGHTNING_MOE_TEST_DOWNLOAD_MB")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as temporary:
        download(wheel, Path(temporary))
        (archive,) = Path(temporary).glob("*.whl")
        made = Path(temporary) / "unpacked"
        with zipfile.ZipFile(archive) as opened:
            opened.extractall(made, [name for name in opened.namelist() if name.endswith(".py")])
        try:
            made.rename(folder)
        except OSError:  # another worker was faster
            shutil.rmtree(made, ignore_errors=True)
    return folder


def download(wheel: Wheel, to: Path) -> None:
    """With pip, which checks the digest."""
    requirement = to / "requirement.txt"
    requirement.write_text(f"{wheel.requirement} --hash=sha256:{wheel.digest}\n")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--no-input"]
    target = ["--python-version=3.12", "--platform=manylinux_2_28_x86_64", "--retries=1", "--timeout=15"]
    command = [*pip, *target, f"--dest={to}", f"--requirement={requirement}", "--disable-pip-version-check"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=40, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip(f"{wheel.requirement} was not downloaded within 40 s")
    assert "DO NOT MATCH THE HASHES" not in done.stderr, done.stderr
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        pytest.skip(f"{wheel.requirement} cannot be downloaded: {lines[-1] if lines else 'pip failed'}")


@pytest.fixture(scope="session")
def cache(request: pytest.FixtureRequest) -> Path:
    given = os.environ.get("LIGHTNING_MOE_TEST_CACHE")
    return Path(given) if given else Path(request.config.cache.mkdir("real-libraries"))


@pytest.fixture(scope="session")
def deep_ep(cache: Path) -> str:
    return str(unpacked(DEEP_EP, cache))


@pytest.fixture(scope="session")
def transformer_engine(cache: Path) -> str:
    return str(unpacked(TRANSFORMER_ENGINE, cache))


def begin(dtype: torch.dtype) -> Setting:
    dist.init_process_group("gloo")
    return Setting(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), WIDTH, dtype)


def every_case(dispatcher: Any, here: Setting) -> dict[str, list[str]]:
    """What is wrong on this rank, by scenario."""
    problems = {}
    for scenario in scenarios_of(dispatcher):
        got = SCENARIOS[scenario](lambda: layer_of(dispatcher, here), here)
        problems[scenario] = wrong(got, expected(scenario, here), here)
    return problems


def through_deep_ep(folder: str, api: str) -> tuple[dict[str, list[str]], dict[str, int]]:
    from tests.dispatch.fakes import compiled_deepep
    from tests.dispatch.test_deepep import on_cpu

    here = begin(torch.float32)
    package = compiled_deepep.install(folder)
    assert package.__file__.startswith(folder)
    dispatcher = on_cpu(api)
    if api == "v1":  # the package has both classes
        dispatcher.transports = (V1Transport,)  # type: ignore[misc]
    problems = every_case(dispatcher, here)
    gc.collect()
    assert not compiled_deepep.ROUTES, "handles that nobody needs"
    dispatcher.finalize()
    served = layer_of(dispatcher, here)
    hidden, index, weights, _ = here.inputs("random")
    d = served.dispatch(hidden, index, weights)
    assert type(d.state.way.handle.buffer) is getattr(package, {"v1": "Buffer", "v2": "ElasticBuffer"}[api])
    if api == "v2":
        handle = d.state.way.handle
        assert type(handle.handle) is package.EPHandle
        with pytest.raises(TypeError, match="'NoneType' and 'int'"):  # why send_again names the multiprocessors
            handle.buffer.dispatch(hidden.detach(), handle=handle.handle)
    dispatcher.finalize()
    return problems, dict(compiled_deepep.CALLS)


@pytest.mark.parametrize("api", ["v2", "v1"])
def test_deepep_through_its_own_python(api: str, deep_ep: str) -> None:
    for problems, calls in run_ranks(through_deep_ep, 2, deep_ep, api, timeout=45):
        assert problems
        assert not any(problems.values()), problems
        assert set(calls) == {"open", "dispatch", "dispatch again", "combine", "on its own stream", "destroy"}
        assert min(calls.values()) > 0


def through_transformer_engine(folder: str, options: dict[str, int]) -> tuple[dict[str, list[str]], dict[str, int]]:
    from tests.dispatch.fakes import compiled_te
    from tests.dispatch.test_nccl_ep import OnGloo

    here = begin(torch.bfloat16)
    ep = compiled_te.install(folder)
    assert ep.__file__.startswith(folder)
    dispatcher = OnGloo(**options)
    problems = every_case(dispatcher, here)
    dispatcher.finalize()
    assert not ep.is_ep_bootstrapped()
    return problems, dict(compiled_te.CALLS)


@pytest.mark.parametrize("options", [{}, {"max_tokens_per_rank": 64, "receive_capacity": 400}])
def test_nccl_ep_through_the_python_of_transformer_engine(options: dict[str, int], transformer_engine: str) -> None:
    for problems, calls in run_ranks(through_transformer_engine, 2, transformer_engine, options, timeout=45):
        assert problems
        assert not any(problems.values()), problems
        both_ways = {"dispatch", "combine", "dispatch backward", "combine backward"}
        assert set(calls) == {"initialize", *both_ways, "finalize"}
        assert calls["initialize"] == calls["finalize"]
