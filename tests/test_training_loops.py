"""Ways of training that leave weights gathered, ranks apart or files half written, if they are not minded."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_moe.nn import MoE
from tests import tiny
from tests.harness import run_ranks, run_ranks_expecting_error
from tests.test_strategy import fit, rank_and_world


class Manual(tiny.TinyLM):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class ForwardBeforeStep(Manual):
    """Looks at the model between backward and step, and after the step, without a backward."""

    def training_step(self, tokens: Tensor, index: int) -> None:
        optimizer = self.optimizers()
        for look_first in (True, False):
            loss = self.loss(tokens)
            self.manual_backward(loss)
            with torch.no_grad():
                seen = [self.loss(tokens)] if look_first else []
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                seen.append(self.loss(tokens))
            self.losses += [float(self.trainer.strategy.reduce(value.detach())) for value in (loss, *seen)]


class Probe(pl.Callback):
    def on_before_optimizer_step(self, trainer: pl.Trainer, module: Any, optimizer: Any) -> None:
        with torch.no_grad():
            module.net(input_ids=torch.ones(1, 4, dtype=torch.long))


class Adversaries(pl.LightningModule):
    """Two roots that train against each other; each is run without a backward of its own at times."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(8, 8), MoE(8, 8, 4, 2))
        self.critic = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        self.losses: list[float] = []

    def training_step(self, x: Tensor, index: int) -> None:
        first, second = self.optimizers()
        self.toggle_optimizer(first)
        loss = F.softplus(-self.critic(self.generator(x))).mean()
        self.manual_backward(loss)
        first.step()
        first.zero_grad()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        fake = F.softplus(self.critic(self.generator(x).detach())).mean() + F.softplus(-self.critic(x)).mean()
        self.manual_backward(fake)
        second.step()
        second.zero_grad()
        self.untoggle_optimizer(second)
        self.losses += [float(self.trainer.strategy.reduce(value.detach())) for value in (loss, fake)]

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(part.parameters(), lr=0.5) for part in (self.generator, self.critic)]


def train(what: str, options: dict[str, Any] | None) -> list[float]:
    rank, world = rank_and_world()
    pl.seed_everything(0, verbose=False)
    strategy = "auto" if options is None else tiny.moe_ep(**options)
    if what == "adversaries":
        module: Any = Adversaries()
        data = torch.randn(4, world * (8 // world), 8, generator=torch.Generator().manual_seed(2))
        mine = data.unflatten(1, (world, -1))[:, rank].flatten(0, 1)
        tiny.trainer(strategy, devices=world, max_epochs=1).fit(module, DataLoader(mine, batch_size=8 // world))
    elif what == "probe":
        module = tiny.TinyLM()
        fit(module, strategy, steps=5, callbacks=[Probe()])
    else:
        module = ForwardBeforeStep()
        tiny.trainer(strategy, devices=world, max_epochs=1).fit(module, tiny.loader(tiny.tokens(4), rank, world))
    return module.losses


# Without resharding every forward needs a backward before parameters change, which adversaries do not have.
@pytest.mark.parametrize(
    ("what", "reshard"),
    [
        ("forward before step", True),
        ("forward before step", False),
        ("probe", True),
        ("probe", False),
        ("adversaries", True),
    ],
)
def test_a_forward_without_a_backward_leaves_nothing_stale(what: str, reshard: bool) -> None:
    reference = run_ranks(train, 1, what, None)[0]
    ours = run_ranks(train, 2, what, {"expert_parallel_size": 2, "reshard_after_forward": reshard})[0]
    torch.testing.assert_close(ours, reference, rtol=2e-5, atol=1e-6)


class Watch(pl.Callback):
    def __init__(self) -> None:
        self.plain: list[str] = []

    def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.plain += [name for name, p in module.named_parameters() if not isinstance(p, DTensor)]


def fit_watched() -> list[str]:
    rank, world = rank_and_world()
    watch = Watch()
    trainer = tiny.trainer(tiny.moe_ep(), devices=world, max_epochs=1, callbacks=[watch])
    trainer.fit(tiny.TinyLM(), *(tiny.loader(tiny.tokens(2), rank, world) for _ in range(2)))
    return watch.plain


def test_parameters_are_shards_after_a_validation() -> None:
    """A callback that changes or keeps parameters must not get gathered copies."""
    assert run_ranks(fit_watched, 2) == [[], []]


class Raw(Manual):
    def training_step(self, tokens: Tensor, index: int) -> None:
        optimizer = self.optimizers()
        self.loss(tokens).backward()
        optimizer.step()


def fit_raw() -> None:
    fit(Raw(), tiny.moe_ep())


def test_a_bare_backward_is_refused() -> None:
    errors = run_ranks_expecting_error(fit_raw, 2, timeout=60)
    assert len(set(errors)) == 1
    assert "sum over 2 ranks, not the mean. Call self.manual_backward(loss)" in errors[0]
    run_ranks(fit_raw, 1)  # the sum over one rank is the mean


# Experts that nobody registered


class OldStyleMoE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        choice = self.gate(x).argmax(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (choice == number).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]))
        return x + out


class OldStyle(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), OldStyleMoE())

    def training_step(self, x: Tensor, index: int) -> Tensor:
        return self.net(x).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit_old_style(options: dict[str, Any]) -> None:
    _, world = rank_and_world()
    trainer = tiny.trainer(tiny.moe_ep(**options), devices=world, max_steps=1)
    trainer.fit(OldStyle(), DataLoader(torch.randn(4, 8), batch_size=2))


def test_unregistered_experts_are_refused_and_not_mixed() -> None:
    errors = run_ranks_expecting_error(fit_old_style, 2, {}, timeout=60)
    assert len(set(errors)) == 1
    for text in ("net.1: 'experts' is 4 modules of class Sequential beside 'gate'", "ExpertsSpec(modules='experts')"):
        assert text in errors[0]
    run_ranks(fit_old_style, 1, {"block_classes": ["Sequential"]})  # the user says that these are no experts


# Sharing and starting values


class Shared(pl.LightningModule):
    """A module inside two blocks, and a buffer whose values each rank draws in another order."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(8, 8)
        self.net = nn.Sequential(nn.Linear(8, 8), nn.ModuleDict())
        self.net[1] = nn.Sequential()
        self.net[1].layers = nn.ModuleList(nn.Sequential(shared, MoE(8, 8, 4, 2)) for _ in range(2))
        self.net[1].forward = self.run
        self.net.register_buffer(
            "order", torch.randperm(64, generator=torch.Generator().manual_seed(rank_and_world()[0]))
        )

    def run(self, x: Tensor) -> Tensor:
        for layer in self.net[1].layers:
            x = x + layer(x)
        return x

    def training_step(self, x: Tensor, index: int) -> Tensor:
        return self.net(x).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit_shared() -> list[int]:
    _, world = rank_and_world()
    pl.seed_everything(0, verbose=False)
    module = Shared()
    tiny.trainer(tiny.moe_ep(), devices=world, max_steps=2).fit(module, DataLoader(torch.randn(8, 8), batch_size=2))
    return module.net.order.tolist()


def test_a_module_in_two_blocks_and_a_buffer_in_another_order() -> None:
    first, second = run_ranks(fit_shared, 2)
    assert first == second == torch.randperm(64, generator=torch.Generator().manual_seed(0)).tolist()


class ParentInitializes(nn.Module):
    """Its own reset_parameters decides what its children start from, as many blocks of Transformers do."""

    def __init__(self, mask: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        if mask:
            self.register_buffer("mask", torch.ones(4, 4).tril().bool())

    def reset_parameters(self) -> None:
        nn.init.constant_(self.inner.weight, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class OnMeta(OldStyle):
    def __init__(self, mask: bool) -> None:
        super().__init__()
        self.net = nn.Module()
        self.mask = mask

    def configure_model(self) -> None:
        with torch.device("meta"):
            self.net = nn.Sequential(ParentInitializes(self.mask), nn.MultiheadAttention(8, 2))

    def training_step(self, x: Tensor, index: int) -> Tensor:
        return self.net[0](x).square().mean()


def fit_on_meta(mask: bool) -> dict[str, Tensor]:
    _, world = rank_and_world()
    module = OnMeta(mask)
    trainer = tiny.trainer(tiny.moe_ep(), devices=world, max_steps=0)
    trainer.fit(module, DataLoader(torch.randn(4, 8), batch_size=2))
    return tiny.weights(module)


def test_parents_initialize_their_children_on_the_meta_device() -> None:
    (weights,) = run_ranks(fit_on_meta, 1, False)
    assert (weights["net.0.inner.weight"] == 0.5).all()
    assert weights["net.1.in_proj_weight"].std() > 0.1
    errors = run_ranks_expecting_error(fit_on_meta, 2, True, timeout=60)
    assert all("ParentInitializes" in error and "initialises its mask" in error for error in errors)


# Predict, files


def predict_several(samples: list[int]) -> list[list[int]]:
    _, world = rank_and_world()
    pl.seed_everything(0, verbose=False)

    class PerLoader(tiny.TinyLM):
        def predict_step(self, tokens: Tensor, index: int, dataloader_idx: int = 0) -> list[int]:
            # Another number of forwards for each loader: ranks that are in different ones would never meet.
            for _ in range(dataloader_idx + 1):
                out = super().predict_step(tokens, index)
            return out[:, 0].tolist()

    loaders = [DataLoader(tiny.tokens(1, n, seed=n)[0], batch_size=1) for n in samples]
    trainer = tiny.trainer(tiny.moe_ep(expert_parallel_size=world), devices=world, use_distributed_sampler=True)
    return [[row for batch in loader for row in batch] for loader in trainer.predict(PerLoader(), loaders)]


def test_predict_with_several_uneven_loaders() -> None:
    whole = run_ranks(predict_several, 1, [5, 3])[0]
    for rank, result in enumerate(run_ranks(predict_several, 2, [5, 3], timeout=60)):
        assert result == [loader[rank::2] for loader in whole]


def save_where_it_cannot(path: str, step: str) -> None:
    from lightning_moe.checkpoint import in_place

    def fails(*args: Any, **options: Any) -> None:
        raise OSError("no space left")

    trainer = fit(tiny.TinyLM(), tiny.moe_ep(), steps=1)
    if step == "rename":  # rank 0 alone does that
        in_place.replace_path = fails
    trainer.save_checkpoint(path)


@pytest.mark.parametrize("step", ["write", "rename"])
def test_a_failing_save_fails_on_every_rank(tmp_path: Path, step: str) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / ("file/a.ckpt" if step == "write" else "a.ckpt")
    errors = run_ranks_expecting_error(save_where_it_cannot, 2, str(path), step, timeout=60)
    assert all("file" in error or "no space left" in error for error in errors)


def save_over(path: str) -> list[str]:
    trainer = fit(tiny.TinyLM(), tiny.moe_ep(), steps=1)
    for _ in range(2):
        trainer.save_checkpoint(path)
    trainer.strategy.barrier()
    return sorted(entry.name for entry in Path(path).parent.iterdir())


@pytest.mark.parametrize("before", ["nothing", "link", "dangling link", "file"])
def test_saving_replaces_what_was_there(tmp_path: Path, before: str) -> None:
    target, path = tmp_path / "elsewhere", tmp_path / "folder" / "a.ckpt"
    path.parent.mkdir()
    if before == "link":
        target.mkdir()
    if "link" in before:
        path.symlink_to(target)
    if before == "file":
        path.write_text("old")
    for entries in run_ranks(save_over, 2, str(path)):
        assert entries == ["a.ckpt"], "neither a partial nor an old one is left"
    assert path.is_dir()
    assert not path.is_symlink()
    assert (path / ".metadata").exists()
