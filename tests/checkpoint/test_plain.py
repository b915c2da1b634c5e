"""To and from plain Lightning on one process: single files, folders made one file, models without a Trainer."""

import re
import runpy
import sys
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_moe.checkpoint import CheckpointError, load_from_checkpoint
from lightning_moe.nn import MoE, TopKRouter
from tests import tiny
from tests.checkpoint.layouts import SAVED_AFTER, loader
from tests.checkpoint.resuming import Case, Model, SaveAt, fit
from tests.checkpoint.test_resume import TwoOptimizers, grouped, plain_sgd, warmup
from tests.harness import run_ranks, run_ranks_expecting_error
from tests.test_module_list import HIDDEN, Experts


class Mixed(nn.Module):
    """A router and experts that are modules of their own, in a block."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, HIDDEN)
        self.router = TopKRouter(HIDDEN, 4, 2)
        self.experts = Experts(4)
        self.out = nn.Linear(HIDDEN, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens).flatten(0, 1)
        _, weights, index = self.router(hidden)
        hidden = hidden + self.experts(hidden, index, weights)
        return nn.functional.cross_entropy(self.out(hidden), tokens.roll(1, 1).flatten())


class Apart(Model):
    """Its experts exist on one rank each."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.net = Mixed()


def rest(rank: int, ranks: int) -> Any:
    """Goes on in the middle of the first epoch: in plain Lightning that is for the user to do."""
    whole = loader(rank, ranks)
    passes = []

    class Rest(list):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            whole.sampler.set_epoch(len(passes))  # type: ignore[attr-defined]
            batches = list(whole)[0 if passes else SAVED_AFTER :]
            passes.append(1)
            yield from batches

    return Rest(range(len(whole)))


MODELS = {
    "schedule": partial(Model, tiny.adamw, warmup, dropout=0.0),
    "groups": partial(Model, grouped, dropout=0.0),
    "no state": partial(Model, plain_sgd, dropout=0.0),
    "two optimizers": partial(TwoOptimizers, dropout=0.0),
    "experts apart": Apart,
}


def case(name: str, strategy: dict[str, Any] | None, batches: Any = loader, **trainer: Any) -> Case:
    if name == "two optimizers":
        trainer = {"max_steps": 2 * (SAVED_AFTER + 5), **trainer}  # each step of an optimizer counts
    return Case(MODELS[name], batches, after=SAVED_AFTER, strategy=strategy, trainer=trainer)


def run(name: str, strategy: dict[str, Any] | None, save_to: Path | None = None, load: Path | None = None) -> Any:
    """Losses, weights and moments of each parameter of a run from the beginning, or from a checkpoint."""
    callbacks = [] if save_to is None else [SaveAt(save_to, "on_train_batch_end", SAVED_AFTER)]
    batches = rest if load and strategy is None else loader
    trainer, module = fit(case(name, strategy, batches), 0 if load is None else 9, list(callbacks), load)
    moments = {}
    for optimizer in trainer.optimizers:
        for parameter, state in optimizer.state.items():
            (found,) = [name for name, p in module.named_parameters() if p is parameter]
            moments |= {f"{found} {key}": tiny.whole(value) for key, value in state.items() if torch.is_tensor(value)}
    return {"losses": module.losses, "weights": tiny.weights(module), "moments": moments, "rates": module.rates}


def run_each(names: list[str], *args: Any) -> dict[str, Any]:
    strategy, save_to, load = args
    return {n: run(n, strategy, save_to and save_to / n, load and load / n) for n in names}


EP2: dict[str, Any] = {"expert_parallel_size": 2}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("plain")
    return folder, run_ranks(run_each, 1, list(MODELS), None, folder, None)[0]


def assert_continues(resumed: list[dict[str, Any]], unbroken: dict[str, Any]) -> None:
    """What the ranks have together is what plain Lightning has."""
    assert len(resumed[0]["losses"]) == 5
    torch.testing.assert_close(resumed[0]["losses"], unbroken["losses"][SAVED_AFTER:], rtol=2e-6, atol=0)
    assert resumed[0]["rates"] == unbroken["rates"][-len(resumed[0]["rates"]) :]
    for kind in ("weights", "moments"):
        together = {name: value for rank in resumed for name, value in rank[kind].items()}
        torch.testing.assert_close(together, unbroken[kind], rtol=1e-4, atol=1e-5)


def test_a_file_of_plain_lightning_goes_on_sharded(plain: tuple[Path, dict[str, Any]]) -> None:
    ranks = run_ranks(run_each, 2, list(MODELS), EP2, None, plain[0])
    for name, unbroken in plain[1].items():
        assert_continues([rank[name] for rank in ranks], unbroken)


FILES = [name for name in MODELS if name != "experts apart"]


def test_a_single_file_goes_on_in_plain_lightning(tmp_path: Path, plain: tuple[Path, dict[str, Any]]) -> None:
    run_ranks(run_each, 2, FILES, {**EP2, "save_distributed_checkpoint": False}, tmp_path, None)
    resumed = run_ranks(run_each, 1, FILES, None, None, tmp_path)[0]
    for name in FILES:
        assert_continues([resumed[name]], plain[1][name])


def test_a_folder_that_lightning_made_one_file_goes_on_in_plain_lightning(
    tmp_path: Path, plain: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_ranks(run_each, 2, list(MODELS), EP2, tmp_path / "folders", None)
    (tmp_path / "files").mkdir()
    for name in MODELS:
        source, target = tmp_path / "folders" / name, tmp_path / "files" / name
        monkeypatch.setattr(sys, "argv", ["consolidate_checkpoint", str(source), "--output_file", str(target)])
        runpy.run_module("lightning.pytorch.utilities.consolidate_checkpoint", run_name="__main__")
    resumed = run_ranks(run_each, 1, list(MODELS), None, None, tmp_path / "files")[0]
    for name in MODELS:
        assert_continues([resumed[name]], plain[1][name])


# Without a Trainer


class WithOptions(Model):
    def __init__(self, dropout: float = 0.5, name: str = "a") -> None:
        super().__init__(dropout=dropout)
        self.save_hyperparameters()
        self.name = name


class Stateful(pl.LightningDataModule):
    def __init__(self, size: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.position = 0

    def train_dataloader(self) -> Any:
        return loader(self.trainer.global_rank, self.trainer.world_size)

    def state_dict(self) -> dict[str, Any]:
        return {"position": 7}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.position = state_dict["position"]


def save_with_options(folder: Path) -> dict[str, Tensor]:
    from tests.test_strategy import rank_and_world

    module = WithOptions(0.25, "b")
    trainer = tiny.trainer(tiny.moe_ep(**EP2), rank_and_world()[1], max_steps=1)
    trainer.fit(module, datamodule=Stateful(5))
    trainer.save_checkpoint(folder / "whole")
    trainer.save_checkpoint(folder / "weights", weights_only=True)
    return tiny.weights(module)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    folder = tmp_path_factory.mktemp("folders")
    return folder, run_ranks(save_with_options, 2, folder)[0]


@pytest.mark.parametrize("kind", ["whole", "weights"])
def test_a_model_is_built_from_a_folder(folders: tuple[Path, dict[str, Tensor]], kind: str) -> None:
    module = load_from_checkpoint(WithOptions, folders[0] / kind)
    assert (module.net.dropout, module.name) == (0.25, "b")
    assert all(torch.equal(parameter, folders[1][name]) for name, parameter in module.named_parameters())
    assert load_from_checkpoint(WithOptions, folders[0] / kind, name="c").name == "c"


def test_a_data_module_is_built_from_a_folder(folders: tuple[Path, dict[str, Tensor]]) -> None:
    data = load_from_checkpoint(Stateful, folders[0] / "whole")
    assert (data.hparams.size, data.position) == (5, 7)


def test_what_is_no_model_of_a_folder_is_said(folders: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"net\.embed\.weight"):
        load_from_checkpoint(TwoLayers, folders[0] / "whole")
    with pytest.raises(CheckpointError, match="is a folder, but no checkpoint"):
        load_from_checkpoint(WithOptions, tmp_path)
    with pytest.raises(FileNotFoundError):
        load_from_checkpoint(WithOptions, tmp_path / "nothing")


class TwoLayers(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)


def test_a_file_is_read_by_the_same_call(plain: tuple[Path, dict[str, Any]]) -> None:
    module = load_from_checkpoint(Model, plain[0] / "schedule")
    assert module.net.embed.weight.shape == (16, 8)


# Changes


def with_precision(folder: Path, before: str, after: str) -> dict[str, Any]:
    path = folder / f"{before} {after}"
    first, _ = fit(Case(partial(Model, dropout=0.0), loader, trainer={"precision": before, "max_steps": 3}), 0, [])
    first.save_checkpoint(path)
    changed = Case(partial(Model, dropout=0.0), loader, trainer={"precision": after, "max_steps": 6})
    trainer, module = fit(changed, 9, [], path)
    (optimizer,) = trainer.optimizers
    moments = {v.dtype for state in optimizer.state.values() for key, v in state.items() if key != "step"}
    return {"losses": module.losses, "dtypes": {p.dtype for p in module.parameters()}, "moments": moments}


PRECISIONS = ["32-true", "bf16-mixed", "bf16-true"]


def with_each_precision(folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    return {(a, b): with_precision(folder, a, b) for a in PRECISIONS for b in PRECISIONS}


def test_the_precision_may_change(tmp_path: Path) -> None:
    found = run_ranks(with_each_precision, 2, tmp_path)[0]
    exact = found["32-true", "32-true"]["losses"]
    for (before, after), result in found.items():
        stored = torch.bfloat16 if after == "bf16-true" else torch.float32
        assert result["dtypes"] == result["moments"] == {stored}, (before, after)
        torch.testing.assert_close(result["losses"], exact, rtol=2e-2, atol=0)


def add_a_schedule(folder: Path) -> list[float]:
    first, _ = fit(Case(trainer={"max_steps": 3}), 0, [])
    first.save_checkpoint(folder / "a")
    _, module = fit(Case(partial(Model, tiny.adamw, warmup), trainer={"max_steps": 6}), 9, [], folder / "a")
    return module.rates


def test_a_schedule_may_be_added(tmp_path: Path) -> None:
    rates = run_ranks(add_a_schedule, 2, tmp_path)[0]
    assert rates == pytest.approx([0.01 * step / 20 for step in (1, 2, 3)])


# What does not fit


def one_group(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02, amsgrad=True)


def fewer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(parameters)[2:], lr=0.02)


class Wider(Model):
    """Experts are wider, a bias is missing, and a layer is new."""

    def __init__(self) -> None:
        super().__init__()
        self.net.layers = nn.ModuleList([MoE(8, 16, 4, 2)])
        self.net.norm = nn.LayerNorm(8, bias=False)
        self.net.more = nn.Linear(2, 2)


# Saved by the first, loaded by the second
BAD: dict[str, tuple[Any, Any, str]] = {
    "weights alone": (Model, Model, "holds the weights of a model alone .*save_weights_only=True"),
    "two optimizers": (Model, TwoOptimizers, "state of 1 optimizers, and configure_optimizers.. returns 2 now"),
    "one group": (
        partial(Model, grouped),
        partial(Model, one_group),
        "in parameter groups with different options, and now they are in one",
    ),
    "fewer": (Model, partial(Model, fewer), r"has 'net\.embed\.weight' and 1 more, which the optimizer has not now"),
    "more": (partial(Model, fewer), Model, r"knows nothing of 'net\.embed\.weight' and 1 more"),
    "another model": (
        Model,
        Wider,
        r"2 missing \(net\.more\.bias, net\.more\.weight\); 1 unexpected \(net\.norm\.bias\); 2 of another shape",
    ),
}


def load_bad(folder: Path) -> dict[tuple[str, bool], str]:
    found = {}
    for name, (before, after, _) in BAD.items():
        for distributed in (True, False):
            strategy = {**EP2, "save_distributed_checkpoint": distributed}
            path = folder / f"{name} {distributed}"
            trainer, _ = fit(Case(before, strategy=strategy, trainer={"max_steps": 1}), 0, [])
            trainer.save_checkpoint(path, weights_only=name == "weights alone")
            try:
                fit(Case(after, strategy=strategy, trainer={"max_steps": 2}), 0, [], path)
            except Exception as error:
                found[name, distributed] = f"{type(error).__name__}: {error}"
    return found


def test_what_does_not_fit_is_said_on_every_rank(tmp_path: Path) -> None:
    for errors in run_ranks(load_bad, 2, tmp_path):
        for name, (_, _, message) in BAD.items():
            for distributed in (True, False):
                error = errors[name, distributed]
                assert re.search(message, error, re.DOTALL), error
                assert name in error, "the checkpoint"


def test_the_groups_of_a_plain_optimizer_have_no_names(tmp_path: Path, plain: tuple[Path, dict[str, Any]]) -> None:
    (error,) = run_ranks_expecting_error(run, 1, "schedule", {}, None, plain[0] / "groups")
    assert re.search(r"groups of \[\d+, 3\] parameters without names, .* groups of \[\d+\]", error), error


def save_language_model(folder: Path) -> dict[str, Tensor]:
    from tests.models.tiny import causal_lm
    from tests.models.tiny import loader as token_loader
    from tests.test_strategy import rank_and_world

    module = causal_lm()
    trainer = tiny.trainer(tiny.moe_ep(**EP2), rank_and_world()[1], max_steps=1, limit_val_batches=0)
    trainer.fit(module, token_loader(8, 2))
    trainer.save_checkpoint(folder / "a")
    return tiny.weights(module)


def test_the_language_model_is_built_from_a_folder(tmp_path: Path) -> None:
    from lightning_moe.models import CausalLM

    weights = run_ranks(save_language_model, 2, tmp_path)[0]
    module = CausalLM.load_from_checkpoint(tmp_path / "a", warmup_steps=3)
    assert module.warmup_steps == 3
    assert all(torch.equal(parameter, weights[name]) for name, parameter in module.named_parameters())
