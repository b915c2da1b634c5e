"""What ``import lightning_moe`` does, and does not."""

import sys
from pathlib import Path

import pytest

from tests.harness import in_subprocess

ROOT = Path(__file__).parent.parent
OPTIONAL = ["transformers", "datasets", "tokenizers", "safetensors", "transformer_engine", "deep_ep", "tensorboard"]
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in (ROOT / "lightning_moe").rglob("*.py")
)


def test_no_module_imports_an_optional_package_and_the_name_is_registered() -> None:
    code = f"""
import sys, importlib
import lightning.pytorch
before = set(sys.modules)
import lightning_moe
from lightning.pytorch.strategies import StrategyRegistry
assert "moe_ep" in StrategyRegistry
assert StrategyRegistry.get("moe_ep").__class__ is lightning_moe.ExpertParallelStrategy
for name in {MODULES!r}:
    importlib.import_module(name)
print([name for name in {OPTIONAL!r} if name in sys.modules and name not in before])
"""
    done = in_subprocess([sys.executable, "-c", code], cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_probe_keeps_the_reason() -> None:
    from lightning_moe import optional

    found = optional.probe("deep_ep")
    if found.module is not None:
        pytest.skip("deep_ep is installed")
    assert (found.reason, found.hint) == ("not installed", "pip install 'lightning-moe[deepep]'")
    with pytest.raises(ModuleNotFoundError, match="needs the package 'deep_ep', which is not installed: pip install"):
        optional.require("deep_ep", "the dispatcher")


def test_probe_survives_packages_that_break(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from lightning_moe import optional

    (tmp_path / "deep_ep.py").write_text("raise AssertionError('no NVSHMEM\\nfound')")
    monkeypatch.syspath_prepend(tmp_path)
    optional.probe.cache_clear()
    try:
        assert optional.probe("deep_ep").reason == "cannot be imported: AssertionError: no NVSHMEM found"
    finally:
        optional.probe.cache_clear()
