"""The README's first command, shortened: the loss falls, the logs hold what they should, and a resumed run goes on."""

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.harness import ROOT, in_subprocess

STEPS = 24


def shortened(folder: Path) -> Path:
    """The real config; only sizes and lengths differ."""
    config: dict[str, Any] = yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text())
    network = config["model"]["init_args"]["config"]
    assert network["num_experts"] >= 16
    assert network["num_experts_per_tok"] == 4
    network.update(hidden_size=64, num_hidden_layers=2, head_dim=16, moe_intermediate_size=32)
    config["model"]["init_args"].update(schedule="constant", warmup_steps=2)
    config["model"]["init_args"]["optimizer"]["init_args"]["lr"] = 1e-2
    config["data"]["init_args"]["sequence_length"] = 64
    config["trainer"].update(max_steps=STEPS, log_every_n_steps=1, val_check_interval=8, limit_val_batches=4)
    for callback in config["trainer"]["callbacks"]:
        if callback["class_path"].endswith("ContinueTraining"):
            callback["init_args"]["extra_steps"] = 4
        if callback["class_path"].endswith("ModelCheckpoint"):
            callback["init_args"]["every_n_train_steps"] = STEPS // 2
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def fit(folder: Path, *arguments: str) -> str:
    script = Path(sys.executable).parent / "lightning-moe"
    done = in_subprocess([script, "fit", "--config", "config.yaml", *arguments], timeout=180, cwd=folder)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """Tag -> step -> value of the newest run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    runs = sorted((folder / "runs" / "quickstart").glob("version_*"), key=lambda p: int(p.name.split("_")[1]))
    events = EventAccumulator(str(runs[-1]), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: {e.step: e.value for e in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


@pytest.mark.slow
def test_quickstart_learns_logs_and_resumes(tmp_path: Path) -> None:
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    for folder in (whole, halves):
        folder.mkdir()
        shortened(folder)

    printed = fit(whole)
    unbroken = scalars(whole)
    losses = unbroken["val/loss"]
    assert losses[0] == pytest.approx(math.log(256), abs=0.1), "a random model knows nothing"
    assert losses[max(losses)] < 3.5
    for tag in ("train/loss", "lr", "tps_per_gpu", "tflops_per_gpu", "peak_memory_gib"):
        assert len(unbroken[tag]) > STEPS // 2, tag
        assert all(value > 0 for value in unbroken[tag].values()), tag
    assert "2 ranks: expert_parallel_size=2 (experts sharded over 1), other weights sharded over 2" in printed
    for text in ("logs", "checkpoints", "tensorboard --logdir runs/quickstart", "--ckpt_path last"):
        assert text in printed

    fit(halves, "--trainer.max_steps", str(STEPS // 2))
    assert sorted(p.name for p in (halves / "runs").rglob("last.ckpt")) == ["last.ckpt"]
    fit(halves, "--ckpt_path", "last")
    resumed = scalars(halves)["train/loss"]
    assert sorted(resumed) == list(range(STEPS // 2, STEPS))
    assert resumed == {step: unbroken["train/loss"][step] for step in resumed}, "bit for bit on the same layout"

    # The run is over; the same command goes on all the same, as the config asks for.
    printed = fit(halves, "--ckpt_path", "last")
    assert "training goes on for 4 steps, to step 28" in printed
    assert sorted(scalars(halves)["train/loss"]) == list(range(STEPS, STEPS + 4))
