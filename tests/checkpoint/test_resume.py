"""A resumed run is the unbroken one, bit for bit, on the layout that saved it."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, LearningRateFinder
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler

from lightning_moe.checkpoint.position import training_loaders
from lightning_moe.data.packing import ResumableLoader, ResumableSampler
from tests import tiny
from tests.checkpoint.resuming import Apart, Case, Model, Noisy, compare, fit
from tests.harness import run_ranks


def warmup(optimizer: torch.optim.Optimizer) -> Any:
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 20)
    return {"scheduler": schedule, "interval": "step"}


def one_cycle(optimizer: torch.optim.Optimizer) -> Any:
    return {"scheduler": torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20), "interval": "step"}


def plain_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def grouped(parameters: Any) -> torch.optim.Optimizer:
    """Groups in another order than that of the model, each with options of its own."""
    parameters = list(parameters)
    groups = [{"params": parameters[3:], "weight_decay": 0.0}, {"params": parameters[:3], "lr": 0.05}]
    return torch.optim.AdamW(groups, lr=0.02, amsgrad=True)


class Adaptive(torch.optim.Optimizer):
    """Keeps plain values, nested ones, a tensor that is no shard, and something in its groups that changes."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "speed": 1.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            group["speed"] *= 0.9
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["count"] = state.get("count", 0) + 1
                    state["inner"] = {"scales": torch.full((2,), 1.0 / state["count"]), "note": "a"}
                    local = p.grad.to_local()
                    state["local"] = state.get("local", torch.zeros_like(local)).mul(0.5).add(local)  # a plain shard
                    p.to_local().add_(
                        state["local"] * float(state["inner"]["scales"][0]), alpha=-group["lr"] * group["speed"]
                    )
        return loss


class TwoOptimizers(Model):
    """Steps by hand, and one of its optimizers has no state."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__(dropout=dropout)
        self.automatic_optimization = False

    def training_step(self, tokens: Tensor, index: int) -> None:
        first, second = self.optimizers()
        loss = super().training_step(tokens, index)
        first.zero_grad()
        second.zero_grad()
        self.manual_backward(loss)
        first.step()
        second.step()

    def configure_optimizers(self) -> Any:
        first, *rest = self.parameters()
        return tiny.adamw(rest), torch.optim.SGD([first], lr=0.1)


class Counting(Model):
    """Has a buffer that differs between the ranks and takes part in the loss, and a metric."""

    def __init__(self) -> None:
        from torchmetrics import MeanMetric

        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.mean = MeanMetric()
        self.mean.persistent(True)

    def training_step(self, tokens: Tensor, index: int) -> Tensor:
        self.seen += self.global_rank + 1
        self.mean.update(self.seen)
        return super().training_step(tokens, index) * (1 + self.seen / 10) * (1 + self.mean.mean_value / 10)


class Extra(nn.Module):
    """Has a state that is no parameter or buffer, a tensor that grows or a plain value."""

    def __init__(self, tensor: bool) -> None:
        super().__init__()
        self.tensor, self.seen = tensor, 0

    def forward(self) -> float:
        self.seen += 1
        return 1 + self.seen / 10

    def get_extra_state(self) -> Any:
        return torch.ones(self.seen) if self.tensor else {"seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.seen = len(state) if self.tensor else state["seen"]


class WithExtra(Model):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.ModuleList([Extra(True), Extra(False)])

    def training_step(self, tokens: Tensor, index: int) -> Tensor:
        return super().training_step(tokens, index) * self.extra[0]() * self.extra[1]()


class WithoutBase(Model):
    """Leaves what it does not train out of its checkpoints, as one may with adapters on a large model."""

    def __init__(self) -> None:
        super().__init__()
        self.strict_loading = False
        with torch.no_grad():
            self.net.embed.weight.copy_(torch.arange(128.0).view(16, 8).sin())
        self.net.embed.requires_grad_(False)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        for name in ("net.embed.weight", "net.out.weight"):
            del checkpoint["state_dict"][name]


class Several(Model):
    """Takes a batch of each of several dataloaders."""

    def training_step(self, batches: list[Tensor], index: int) -> Tensor:
        return super().training_step(torch.cat(batches), index)


def own_generator(rank: int, ranks: int) -> Any:
    generator = torch.Generator().manual_seed(5 + rank)
    return DataLoader(Noisy(12), sampler=RandomSampler(Noisy(12), True, 12, generator), batch_size=2)


def resumable(rank: int, ranks: int) -> Any:
    data = Noisy(24)
    return ResumableLoader(data, 2, ResumableSampler(data, num_replicas=ranks, rank=rank, seed=1))


class OwnPosition(DataLoader):
    """Counts for itself, as the StatefulDataLoader of torchdata does."""

    begin = handed = 0

    def __iter__(self) -> Any:
        iterator = super().__iter__()
        for _ in range(self.begin):
            next(iterator)
        self.handed, self.begin = self.begin, 0
        return self._count(iterator)

    def _count(self, iterator: Any) -> Any:
        for batch in iterator:
            self.handed += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"handed": self.handed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.begin = state_dict["handed"]


def batches_of_a_sampler(rank: int, ranks: int) -> Any:
    sampler = torch.utils.data.BatchSampler(RandomSampler(Noisy(12)), 2, drop_last=False)
    return DataLoader(Noisy(12, noise=True), batch_sampler=sampler)


def counting(rank: int, ranks: int) -> Any:
    return OwnPosition(Noisy(12)[rank::ranks], 2)


def small(rank: int, ranks: int) -> Any:
    return DataLoader(Noisy(12, noise=True), 2, shuffle=True)


def shuffled(rank: int, ranks: int, **options: Any) -> Any:
    return DataLoader(Noisy(24, noise="num_workers" not in options), 2, shuffle=True, **options)


def several(rank: int, ranks: int) -> Any:
    return [DataLoader(Noisy(length, noise=True), 2, shuffle=True) for length in (24, 16)]


SINGLE = {"save_distributed_checkpoint": False}
OWN = {"use_distributed_sampler": False}
VALIDATED = {"limit_val_batches": 2, "val_check_interval": 2}
ACCUMULATED = {"accumulate_grad_batches": 3, "max_steps": 4}
TWICE_COUNTED = {"max_steps": 18}  # each step of an optimizer counts
CASES = {
    "adamw, schedule": Case(partial(Model, tiny.adamw, warmup), strategy={"expert_parallel_size": 2}),
    "momentum": Case(partial(Model, tiny.sgd, one_cycle), strategy={"expert_parallel_size": 1}),
    "no state": Case(partial(Model, plain_sgd)),
    "no state, file": Case(partial(Model, plain_sgd), strategy=SINGLE),
    "groups": Case(partial(Model, grouped)),
    "state of its own": Case(partial(Model, Adaptive)),
    "state of its own, file": Case(partial(Model, Adaptive), strategy=SINGLE),
    "two optimizers": Case(TwoOptimizers, trainer=TWICE_COUNTED),
    "bf16-mixed": Case(trainer={"precision": "bf16-mixed", "gradient_clip_val": 0.1}),
    "bf16-true, file": Case(trainer={"precision": "bf16-true"}, strategy=SINGLE),
    "in the middle of a step": Case(after=5, trainer=ACCUMULATED),
    "in the middle of a step, file": Case(after=5, trainer=ACCUMULATED, strategy=SINGLE),
    "last batch": Case(after=6, loader=shuffled),
    "end of an epoch": Case(hook="on_train_epoch_end", loader=small),
    "begin of an epoch, file": Case(hook="on_train_epoch_start", after=3, loader=small, strategy=SINGLE),
    "noise, second epoch": Case(loader=small, trainer=OWN, after=8),
    "own generator": Case(loader=own_generator, trainer=OWN),
    "own generator, end of an epoch": Case(
        loader=own_generator,
        trainer={**OWN, "max_steps": -1, "max_epochs": 2},
        hook="on_train_epoch_end",
        after=6,
    ),
    "several loaders": Case(Several, several),
    "several loaders, end of an epoch": Case(Several, several, hook="on_train_epoch_end", after=6),
    "batch sampler": Case(loader=batches_of_a_sampler, trainer=OWN),
    "workers": Case(loader=partial(shuffled, num_workers=1, persistent_workers=True), after=3),
    "resumable loader": Case(loader=resumable, trainer=OWN),
    "loader with a position": Case(loader=counting, trainer=OWN),
    "loader with a position, end of an epoch": Case(loader=counting, trainer=OWN, hook="on_train_epoch_end", after=3),
    "epochs, validation": Case(trainer={**VALIDATED, "max_steps": -1, "max_epochs": 2}, after=5),
    "end of a validation": Case(trainer=VALIDATED, hook="on_validation_end"),
    "buffers": Case(Counting),
    "extra state": Case(WithExtra),
    "without the frozen base": Case(WithoutBase),
    "other numbers on each rank": Case(callbacks=lambda: [Apart()]),
}


def run_cases(folder: Path, names: list[str]) -> dict[str, Any]:
    results = {}
    for name in names:
        try:
            results[name] = compare(CASES[name], folder / name.replace(",", "").replace(" ", "_"))
        except Exception as error:
            results[name] = error
    return results


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(run_cases, 2, tmp_path_factory.mktemp("runs"), list(CASES), timeout=600)


@pytest.mark.parametrize("name", CASES)
def test_the_resumed_run_is_the_unbroken_one(runs: list[dict[str, Any]], name: str) -> None:
    for result in (ranks[name] for ranks in runs):
        if isinstance(result, Exception):
            raise result
        assert len(result["resumed"]) >= 2
        assert result["resumed"] == result["unbroken"]
        assert result["rates"][0] == result["rates"][1]
        assert all(result["weights"])


def find_a_rate(folder: Path) -> tuple[float, list[int]]:
    """The learning rate at the end, and how often the ranks asked each other whether to go on, by batch."""
    asked: list[int] = []

    class Asking(Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            (first, *_) = training_loaders(trainer)
            before = first._common.before_batch
            for loader in training_loaders(trainer):
                note = lambda t: (asked.append(len(module.losses)), before(t))  # noqa: E731
                object.__setattr__(loader._common, "before_batch", note)

    finder = LearningRateFinder(num_training_steps=5, update_attr=False)
    case = Case(partial(Model, partial(torch.optim.AdamW, lr=0.01)), trainer={"default_root_dir": folder})
    _, module = fit(case, 0, [finder])
    rate = module.rates[-1]
    asked.clear()
    fit(Case(Several, several), 0, [Asking()])
    return rate, asked


def test_a_finder_of_learning_rates_and_several_loaders_leave_the_run_alone(tmp_path: Path) -> None:
    for rate, asked in run_ranks(find_a_rate, 2, tmp_path, timeout=120):
        assert rate == 0.01, "not the last one that was tried"
        assert asked == sorted(set(asked)), "once a batch"
        assert len(asked) >= 9
