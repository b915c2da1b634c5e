"""HubCheckpoint writes what Transformers loads while a sharded model trains, and nothing that is not whole."""

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from lightning_moe.callbacks import HubCheckpoint
from lightning_moe.checkpoint.hub_write import SafetensorsFile
from lightning_moe.models import CausalLM
from tests import tiny
from tests.checkpoint import hub_models
from tests.harness import run_ranks, run_ranks_expecting_error
from tests.models import tiny as causal


def loaded(folder: Path) -> dict[str, Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[n], tensor) for n, tensor in expected.items())


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


class Watching(HubCheckpoint):
    """Keeps the weights of each step that it saves."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seen: dict[str, dict[str, Tensor]] = {}

    def _save(self, trainer: Any, module: Any) -> None:
        self.seen[f"step-{trainer.global_step}"] = {n: tiny.whole(t) for n, t in module.model.state_dict().items()}
        super()._save(trainer, module)


def fit(
    root: str, callback: HubCheckpoint | None, max_steps: int = 5, ckpt_path: str | None = None, **model: Any
) -> Any:
    """Train on two ranks that share the experts."""
    module = causal.causal_lm(optimizer=causal.sgd, **model)
    trainer = causal.trainer(
        root,
        strategy=tiny.moe_ep(expert_parallel_size=2),
        devices=2,
        max_steps=max_steps,
        callbacks=[callback] if callback else [],
        accumulate_grad_batches=2,
    )
    trainer.fit(module, causal.loader(64, 2), ckpt_path=ckpt_path)
    return trainer


def _train_and_go_on(root: str) -> dict[str, dict[str, Tensor]]:
    first = Watching(every_n_train_steps=2, keep_last=2, max_shard_size="20KB")
    pl.seed_everything(0)
    fit(root, first).save_checkpoint(f"{root}/last.ckpt")
    pl.seed_everything(0)
    weights = fit(root, None).lightning_module.model.state_dict()
    assert same({name: tiny.whole(tensor) for name, tensor in weights.items()}, first.seen["step-5"])
    second = Watching(every_n_train_steps=2, keep_last=2)
    fit(root, second, 6, f"{root}/last.ckpt")
    pretrained = Watching(dirpath=f"{root}/other", dtype="bfloat16", tokenizer=f"{root}/tokens")
    fit(root, pretrained, 1, config=None, config_class=None, pretrained=f"{root}/from")
    return {**first.seen, **second.seen, "other": pretrained.seen["step-1"]}


def test_folders_are_written_while_two_ranks_train(tmp_path: Path) -> None:
    hub_models.save("qwen3_moe", tmp_path / "from")
    (tmp_path / "from" / "generation_config.json").write_text(json.dumps({"max_new_tokens": 9}))
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens" / "tokenizer.json").write_text("{}")
    seen, _ = run_ranks(_train_and_go_on, 2, str(tmp_path))
    assert seen.keys() == {"step-2", "step-4", "step-5", "step-6", "other"}
    assert names(tmp_path / "hub") == ["step-5", "step-6"]  # the run that went on knows of those before
    for name in ("step-5", "step-6"):
        assert same(loaded(tmp_path / "hub" / name), seen[name])
    assert not same(seen["step-5"], seen["step-6"])
    assert len(list((tmp_path / "hub" / "step-5").glob("*.safetensors"))) > 2
    assert (tmp_path / "hub" / "step-6" / "model.safetensors").exists()

    assert names(tmp_path / "other") == ["step-1"]
    other = AutoModelForCausalLM.from_pretrained(tmp_path / "other" / "step-1")
    assert same(other.state_dict(), {name: tensor.bfloat16() for name, tensor in seen["other"].items()})
    assert other.generation_config.max_new_tokens == 9
    assert (tmp_path / "other" / "step-1" / "tokenizer.json").exists()


def _fail_on_rank_1(root: str) -> None:
    class Full(HubCheckpoint):
        def _save(self, trainer: Any, module: Any) -> None:
            if trainer.global_rank == 1 and trainer.global_step == 4:

                def write(file: Any, name: str, tensor: Tensor) -> None:
                    raise OSError(28, "No space left on device")

                SafetensorsFile.write = write  # type: ignore[method-assign, assignment]
            super()._save(trainer, module)

    fit(root, Full(every_n_train_steps=2, max_shard_size="20KB"))


def test_a_full_disk_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    first, second = run_ranks_expecting_error(_fail_on_rank_1, 2, str(tmp_path))
    assert "No space left on device" in second
    assert "step-4 failed on rank 1: No space left on device" in first
    assert names(tmp_path / "hub") == ["step-2"]


# One process, without a strategy of this package


def alone(root: Path, module: CausalLM, *callbacks: HubCheckpoint, **options: Any) -> None:
    trainer = causal.trainer(root, **{"max_steps": 4, "callbacks": list(callbacks), **options})
    trainer.fit(module, causal.loader(4, 2))


def test_any_strategy(tmp_path: Path) -> None:
    module = causal.causal_lm(optimizer=causal.sgd)
    half = HubCheckpoint(dirpath=str(tmp_path / "half"), dtype="float16")
    alone(tmp_path, module, HubCheckpoint(every_n_epochs=2), half)
    assert names(tmp_path / "hub") == ["step-4"]  # two epochs of two steps, and the end
    assert loaded(tmp_path / "half" / "step-4")["lm_head.weight"].dtype == torch.float16
    assert same(loaded(tmp_path / "hub" / "step-4"), module.model.state_dict())


def test_what_is_there_already_stays(tmp_path: Path) -> None:
    for number in (1, 2):
        module = causal.causal_lm(optimizer=causal.sgd)
        alone(tmp_path, module, HubCheckpoint(dirpath=str(tmp_path / "models")))
        assert len(names(tmp_path / "models")) == number
    assert names(tmp_path / "models") == ["step-4", "step-4-v1"]
    assert same(loaded(tmp_path / "models" / "step-4-v1"), module.model.state_dict())


def test_a_trial_run_writes_nothing(tmp_path: Path) -> None:
    alone(tmp_path, causal.causal_lm(), HubCheckpoint(dirpath=str(tmp_path / "models")), fast_dev_run=True)
    assert not (tmp_path / "models").exists()


def test_the_tokenizer_of_the_data_module(tmp_path: Path) -> None:
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens" / "vocab.json").write_text("{}")

    class Data(pl.LightningDataModule):
        tokenizer = str(tmp_path / "tokens")

        def train_dataloader(self) -> Any:
            return causal.loader(4, 2)

    trainer = causal.trainer(tmp_path, max_steps=1, callbacks=[HubCheckpoint()])
    trainer.fit(causal.causal_lm(), datamodule=Data())
    assert (tmp_path / "hub" / "step-1" / "vocab.json").exists()


def test_mistakes_are_told_before_training(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="tokenizer nowhere does not exist"):
        alone(tmp_path, causal.causal_lm(), HubCheckpoint(tokenizer="nowhere"))
    with pytest.raises(ValueError, match=r"module 'net' of CausalLM is not there; .*'model' .Qwen3MoeForCausalLM"):
        alone(tmp_path, causal.causal_lm(), HubCheckpoint(module="net"))
    changed = causal.causal_lm()
    changed.configure_model()
    changed.model.lm_head = torch.nn.Linear(32, 99, bias=False)
    with pytest.raises(ValueError, match=r"not what its configuration says.* lm_head.weight \[99, 32\] instead of"):
        alone(tmp_path, changed, HubCheckpoint())
    assert not names(tmp_path)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"every_n_train_steps": 0}, "every_n_train_steps=0 must be a whole number from 1 up"),
        ({"every_n_epochs": True}, "every_n_epochs=True must be"),
        ({"keep_last": -1}, "keep_last=-1 must be"),
        ({"save_on_train_end": False}, "HubCheckpoint would never save: set every_n_train_steps or every_n_epochs"),
        ({"dtype": "int8"}, "dtype='int8' is not known; allowed are 'float32', 'bfloat16', 'float16', or None"),
        ({"max_shard_size": "much"}, "max_shard_size='much' must be a positive size"),
    ],
)
def test_wrong_options(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        HubCheckpoint(**options)


def _two_runs(root: str) -> list[list[str]]:
    """A callback in a second run, and a run that goes on in another place."""
    callback = HubCheckpoint(dirpath=f"{root}/both", keep_last=1)
    fit(root, callback, 1).save_checkpoint(f"{root}/last.ckpt")
    first = names(Path(root, "both"))
    fit(root, callback, 1)
    second = names(Path(root, "both"))
    fit(root, HubCheckpoint(dirpath=f"{root}/both", keep_last=1), 2, f"{root}/last.ckpt")
    third = names(Path(root, "both"))
    elsewhere = HubCheckpoint(dirpath=f"{root}/both", keep_last=1)
    elsewhere.load_state_dict({"written": [f"{root}/original/step-1"], "last_step": 1})
    Path(root, "original/step-1").mkdir(parents=True, exist_ok=True)
    elsewhere.setup = lambda *_, **__: None  # type: ignore[method-assign]
    fit(root, elsewhere, 2)
    return [first, second, third, names(Path(root, "original"))]


def test_a_second_run_writes_again_and_leaves_what_is_elsewhere(tmp_path: Path) -> None:
    first, second, third, original = run_ranks(_two_runs, 2, str(tmp_path), timeout=120)[0]
    assert first == ["step-1"]
    assert second == ["step-1", "step-1-v1"], "the first run's stays, the second has its own"
    assert "step-2" in third
    assert "step-1" not in third, "of the run that goes on, the last one is kept"
    assert original == ["step-1"]
