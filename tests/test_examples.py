"""The examples run as they are, and learn."""

import re
import sys
from pathlib import Path

import pytest

from tests.harness import ROOT, in_subprocess

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]


def last_loss(command: list[str], folder: Path) -> float:
    done = in_subprocess(command, timeout=180, cwd=folder)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (loss,) = re.findall(r"loss after \d+ steps: ([\d.]+)", done.stdout)
    return float(loss)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [[sys.executable], TORCHRUN])
def test_finetune_hf(tmp_path: Path, launcher: list[str]) -> None:
    script = ROOT / "examples" / "finetune_hf.py"
    assert len(script.read_text().splitlines()) < 60
    assert last_loss([*launcher, str(script), "--steps", "12"], tmp_path) < 4.5, "a random model is at 5.5"


@pytest.mark.slow
def test_custom_moe(tmp_path: Path) -> None:
    script = ROOT / "examples" / "custom_moe.py"
    assert last_loss([sys.executable, str(script), "--steps", "60"], tmp_path) < 0.2, "the variance is 0.3"


@pytest.mark.slow
def test_one_process(tmp_path: Path) -> None:
    script = ROOT / "examples" / "custom_moe.py"
    assert last_loss([sys.executable, str(script), "--steps", "150", "--devices", "1"], tmp_path) < 0.2
