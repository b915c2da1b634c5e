import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.cli import LightningCLI
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from lightning_moe.models import CausalLM
from tests.harness import ROOT, in_subprocess, run_ranks
from tests.models.tiny import FIELDS, LENGTH, VOCABULARY, Sequences, causal_lm, loader, sgd, trainer
from tests.tiny import whole


class Recorder(Callback):
    """Keeps the logged losses and learning rates, and the gradients of the first step."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.rates: list[float] = []
        self.gradients: dict[str, Tensor] = {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(trainer.callback_metrics["train/loss"]))
        self.rates.append(float(trainer.callback_metrics["lr"]))

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if not self.gradients:
            self.gradients = {name: whole(p.grad) for name, p in pl_module.named_parameters()}


def token_mean(model: CausalLM, data: Sequences) -> Tensor:
    logits = model.model(input_ids=data.inputs).logits
    return cross_entropy(logits.flatten(0, 1), data.labels.flatten())


def test_random_network_knows_nothing_and_then_learns(tmp_path: Path) -> None:
    torch.manual_seed(0)
    recorder = Recorder()
    model = causal_lm(schedule="constant", optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2))
    trainer(tmp_path, max_epochs=15, callbacks=[recorder]).fit(model, loader(4))
    assert recorder.losses[0] == pytest.approx(math.log(VOCABULARY), abs=0.1)
    assert recorder.losses[-1] < 0.5 * recorder.losses[0]
    assert model.flops_per_token(LENGTH) > 6 * sum(p.numel() for p in model.model.lm_head.parameters())


def test_loss_is_the_mean_over_valid_tokens(tmp_path: Path) -> None:
    valid = [3, 16, 0, 7]
    model, recorder = causal_lm(optimizer=sgd), Recorder()
    model.configure_model()
    data = Sequences(4, valid=valid)
    expected = token_mean(model, data)
    wanted = torch.autograd.grad(expected, list(model.parameters()))
    trainer(tmp_path, max_steps=1, callbacks=[recorder]).fit(model, DataLoader(data, 4))
    assert recorder.losses == pytest.approx([expected.item()])
    for gradient, other in zip(recorder.gradients.values(), wanted, strict=True):
        torch.testing.assert_close(gradient, other)


def test_batch_without_any_valid_token_trains_nothing(tmp_path: Path) -> None:
    model, recorder = causal_lm(optimizer=sgd), Recorder()
    trainer(tmp_path, max_steps=1, callbacks=[recorder]).fit(model, DataLoader(Sequences(2, valid=[0, 0]), 2))
    assert recorder.losses == [0.0]
    assert all(not gradient.any() for gradient in recorder.gradients.values())


VALID = [16, 9, 2, 5, 0, 0, 0, 1]  # a rank with 4 sequences has 32 or 1 of the 33 valid tokens


def train_part(rank_count: int, strategy: str, valid: list[int], root: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model, recorder = causal_lm(optimizer=sgd), Recorder()
    model.network_config.initializer_range = 0.2
    run = trainer(root, max_steps=3, devices=rank_count, strategy=strategy, callbacks=[recorder])
    data = Sequences(8, valid=valid)
    mine = len(data) // rank_count
    rows = range(run.global_rank * mine, (run.global_rank + 1) * mine)
    part = DataLoader(torch.utils.data.Subset(data, [*rows] * 3), mine)
    run.fit(model, part)
    trained = {name: whole(parameter) for name, parameter in model.named_parameters()}
    run.validate(model, part, verbose=False)
    metrics = {name: float(value) for name, value in run.callback_metrics.items()}
    return {"losses": recorder.losses, "gradients": recorder.gradients, "weights": trained, "metrics": metrics}


@pytest.mark.parametrize("strategy", ["ddp", "moe_ep"])
@pytest.mark.parametrize("valid", [VALID, [0] * 4 + [16] * 4], ids=["uneven", "none on rank 0"])
def test_two_ranks_train_on_the_mean_over_all_tokens(strategy: str, valid: list[int], tmp_path: Path) -> None:
    alone = train_part(1, "auto", valid, str(tmp_path))
    for rank in run_ranks(train_part, 2, 2, strategy, valid, str(tmp_path)):
        assert rank["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        assert rank["metrics"]["val/loss"] == pytest.approx(alone["metrics"]["val/loss"], rel=1e-5)
        for kind in ("gradients", "weights"):
            assert rank[kind].keys() == alone[kind].keys()
            for name, tensor in alone[kind].items():
                torch.testing.assert_close(rank[kind][name], tensor, rtol=1e-4, atol=1e-6, msg=f"{kind} of {name}")


def test_validation_and_test_weigh_every_token_the_same(tmp_path: Path) -> None:
    model = causal_lm()
    data = Sequences(6, valid=[1, 1, 16, 16, 16, 3])
    run = trainer(tmp_path)
    metrics = {**run.validate(model, DataLoader(data, 2), verbose=False)[0]}
    metrics.update(run.test(model, DataLoader(data, 5), verbose=False)[0])
    with torch.no_grad():
        expected = token_mean(model, data).item()
    assert metrics["val/loss"] == pytest.approx(expected, rel=1e-5)
    assert metrics["test/loss"] == pytest.approx(expected, rel=1e-5)
    assert metrics["val/perplexity"] == pytest.approx(math.exp(expected), rel=1e-5)


def test_prediction_is_the_mean_log_likelihood_of_each_sequence(tmp_path: Path) -> None:
    model = causal_lm()
    data = Sequences(3, valid=[16, 4, 0])
    found = torch.cat(trainer(tmp_path).predict(model, DataLoader(data, batch_size=2)))
    assert found.shape == (3,)
    for row, kept in ((0, 16), (1, 4)):
        with torch.no_grad():
            logits = model.model(input_ids=data.inputs[row : row + 1]).logits[0, :kept]
        assert found[row].item() == pytest.approx(-cross_entropy(logits, data.labels[row, :kept]).item(), rel=1e-5)
    assert found[2].isnan()


def test_other_batches_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"'input_ids' and 'labels'.*got \['tokens'\]"):
        trainer(tmp_path, max_steps=1).fit(causal_lm(), DataLoader([{"tokens": torch.zeros(4)}]))


def test_forward_needs_the_network() -> None:
    with pytest.raises(RuntimeError, match=r"call configure_model\(\)"):
        causal_lm()(torch.zeros(1, 4, dtype=torch.long))


def test_network_is_built_once(tmp_path: Path) -> None:
    model, run = causal_lm(), trainer(tmp_path, max_steps=2)
    run.validate(model, loader(), verbose=False)
    network = model.model
    run.fit(model, loader())
    assert model.model is network


# Optimizer and learning rate


def rates(root: Path, steps: int, checkpoint: str | None = None, **options: Any) -> tuple[list[float], Any]:
    recorder = Recorder()
    run = trainer(root, max_steps=steps, callbacks=[recorder])
    model = causal_lm(**{"optimizer": lambda p: torch.optim.SGD(p, lr=1.0), "min_lr_ratio": 0.0, **options})
    run.fit(model, loader(32, 2), ckpt_path=checkpoint)
    return recorder.rates, run


def test_learning_rate_follows_the_schedule(tmp_path: Path) -> None:
    found, _ = rates(tmp_path, 10, warmup_steps=4)
    expected = [0.2, 0.4, 0.6, 0.8, *(0.5 * (1 + math.cos(math.pi * step / 6)) for step in range(6))]
    assert found == pytest.approx(expected, abs=1e-6)
    found, _ = rates(tmp_path, 6, warmup_steps=1, schedule="constant")
    assert found == [0.5, 1, 1, 1, 1, 1]


def test_resumed_run_follows_its_own_length_from_the_first_step(tmp_path: Path) -> None:
    straight, _ = rates(tmp_path, 12)
    _, run = rates(tmp_path, 4)
    run.save_checkpoint(tmp_path / "at4.ckpt")
    resumed, _ = rates(tmp_path, 12, checkpoint=str(tmp_path / "at4.ckpt"))
    assert resumed == pytest.approx(straight[4:], abs=1e-6)


def test_length_by_epochs(tmp_path: Path) -> None:
    recorder = Recorder()
    model = causal_lm(optimizer=lambda p: torch.optim.SGD(p, lr=1.0), min_lr_ratio=0.0)
    trainer(tmp_path, max_epochs=2, accumulate_grad_batches=2, callbacks=[recorder]).fit(model, loader(8, 2))
    expected = [0.5 * (1 + math.cos(math.pi * step / 4)) for step in (0, 0, 1, 1, 2, 2, 3, 3)]
    assert recorder.rates == pytest.approx(expected, abs=1e-6)


def endless() -> Iterator[dict[str, Tensor]]:
    while True:
        yield from Sequences(4)


class Endless(torch.utils.data.IterableDataset):
    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return endless()


def test_cosine_over_an_unknown_length_is_an_error(tmp_path: Path) -> None:
    run = trainer(tmp_path, max_epochs=1, limit_val_batches=0)
    with pytest.raises(ValueError, match=r"schedule='cosine'.*max_steps.*schedule='constant'"):
        run.fit(causal_lm(warmup_steps=10**6), DataLoader(Endless(), 2))
    assert run.global_step == 0
    constant = trainer(tmp_path, max_time={"seconds": 0}, limit_val_batches=0)
    constant.fit(causal_lm(schedule="constant"), DataLoader(Endless(), 2))


class ResumableLoader:
    """Counts up, and goes on after the last batch when it is restored."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        while self.position < 100:
            self.position += 1
            yield {"input_ids": torch.full((1, 4), self.position % 50), "labels": torch.ones(1, 4, dtype=torch.long)}

    def __len__(self) -> int:
        return 100

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Seen(Callback):
    def __init__(self) -> None:
        self.batches: list[int] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.batches.append(int(batch["input_ids"][0, 0]))


def test_schedule_does_not_load_the_data_before_its_state_is_restored(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    save = ModelCheckpoint(dirpath=tmp_path, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    run = trainer(tmp_path, max_epochs=1, limit_train_batches=6, callbacks=[save], enable_checkpointing=True)
    run.fit(causal_lm(), ResumableLoader())
    seen = Seen()
    again = trainer(tmp_path, max_epochs=1, limit_train_batches=6, callbacks=[seen])
    again.fit(causal_lm(), ResumableLoader(), ckpt_path=str(tmp_path / "step=3.ckpt"))
    assert seen.batches[0] == 4


def test_default_optimizer(tmp_path: Path) -> None:
    run = trainer(tmp_path, max_steps=1)
    run.fit(causal_lm(), loader())
    assert isinstance(run.optimizers[0], torch.optim.AdamW)
    decayed, plain = run.optimizers[0].param_groups
    assert (decayed["initial_lr"], decayed["betas"], decayed["weight_decay"]) == (3e-4, (0.9, 0.95), 0.1)
    assert plain["weight_decay"] == 0.0


def test_norms_are_not_decayed(tmp_path: Path) -> None:
    model = causal_lm(optimizer=lambda p: torch.optim.SGD(p, lr=0.5, weight_decay=0.5), schedule="constant")
    model.configure_model()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    data = DataLoader(Sequences(2, valid=[0, 0]), 2)  # no gradient: only the decay moves weights
    trainer(tmp_path, max_steps=1).fit(model, data)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, before[name] * (1.0 if "norm" in name else 0.75))


# Checkpoints, precision, the meta device, the command line


def test_checkpoint_holds_only_plain_values_and_rebuilds_the_model(tmp_path: Path) -> None:
    model, run = causal_lm(), trainer(tmp_path, max_steps=1)
    run.fit(model, loader())
    path = tmp_path / "model.ckpt"
    run.save_checkpoint(path)
    torch.load(path, weights_only=True)
    again = CausalLM.load_from_checkpoint(path, weights_only=True)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name])


def test_bf16_true_builds_bfloat16_weights(tmp_path: Path) -> None:
    model = causal_lm(optimizer=sgd)
    trainer(tmp_path, max_steps=1, precision="bf16-true").fit(model, loader())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_meta_device_needs_a_strategy_that_initializes(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"meta_device=True needs Trainer\(strategy='moe_ep'\)"):
        trainer(tmp_path, max_steps=1).fit(causal_lm(meta_device=True), loader())


def train_from_meta(root: str) -> list[float]:
    recorder = Recorder()
    model = causal_lm(meta_device=True)
    trainer(root, max_steps=2, devices=2, strategy="moe_ep", callbacks=[recorder]).fit(model, loader(8, 2))
    assert not any(tensor.is_meta for tensor in model.state_dict().values())
    return recorder.losses


def test_meta_device_under_the_strategy(tmp_path: Path) -> None:
    for losses in run_ranks(train_from_meta, 2, str(tmp_path)):
        assert losses[0] == pytest.approx(math.log(VOCABULARY), abs=0.1)


def test_command_line_builds_it_from_yaml(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    fields = "\n".join(f"    {name}: {value}" for name, value in FIELDS.items())
    file.write_text(
        "model:\n  config_class: Qwen3MoeConfig\n  warmup_steps: 3\n  config:\n    rms_norm_eps: 1e-5\n"
        + fields
        + "\n  optimizer:\n    class_path: torch.optim.SGD\n    init_args:\n      lr: 0.25\n"
    )
    arguments = ["--config", str(file), "--model.config.num_hidden_layers", "1", "--trainer.logger", "false"]
    cli = LightningCLI(CausalLM, run=False, args=arguments, save_config_callback=None)
    cli.model.configure_model()
    assert len(cli.model.model.model.layers) == 1
    assert cli.model.model.config.rms_norm_eps == 1e-5
    optimizer = cli.model.optimizer([{"params": list(cli.model.parameters())}])
    assert isinstance(optimizer, torch.optim.SGD)
    assert optimizer.defaults["lr"] == 0.25


def test_command_line_shows_the_default_optimizer_and_overrides_parts_of_it() -> None:
    code = (
        "from lightning.pytorch.cli import LightningCLI; from lightning_moe.models import CausalLM;"
        " LightningCLI(CausalLM, args=['fit', '--model.optimizer.lr', '0.5', '--print_config'])"
    )
    shown = in_subprocess([sys.executable, "-W", "ignore", "-c", code], cwd=ROOT).stdout
    optimizer = yaml.safe_load(shown)["model"]["optimizer"]
    assert optimizer["class_path"] == "lightning_moe.models.optimizer.AdamW"
    assert optimizer["init_args"].items() >= {"lr": 0.5, "betas": [0.9, 0.95], "weight_decay": 0.1}.items()


def test_without_transformers_the_import_works_and_the_model_says_what_to_install() -> None:
    code = (
        "import sys, lightning.pytorch\n"  # Lightning's torchmetrics imports transformers where it is installed
        "sys.modules['transformers'] = sys.modules['datasets'] = None\n"
        "import lightning_moe.callbacks, lightning_moe.flops, lightning_moe.models\n"
        "lightning_moe.models.CausalLM(config_class='Qwen3MoeConfig')"
    )
    result = in_subprocess([sys.executable, "-W", "ignore", "-c", code], cwd=ROOT)
    assert "ModuleNotFoundError: CausalLM needs the package 'transformers'" in result.stderr.splitlines()[-1]


def test_a_vocabulary_that_is_too_small_for_the_data(tmp_path: Path) -> None:
    class Data(LightningDataModule):
        vocab_size = 1000

        def train_dataloader(self) -> DataLoader:
            return loader()

    with pytest.raises(ValueError, match=r"config.vocab_size=\d+ is too small for the data: Data has tokens up to 999"):
        trainer(tmp_path, max_steps=1).fit(causal_lm(), Data())
