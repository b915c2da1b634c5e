"""What a user of the strategy meets inside Lightning: hooks, stages, precision, checkpoints, launchers."""

import itertools
import os
import re
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from tests import tiny
from tests.harness import in_subprocess, run_ranks


def rank_and_world() -> tuple[int, int]:
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def fit(
    module: pl.LightningModule, strategy: Any, steps: int = 3, ckpt_path: str | None = None, **options: Any
) -> pl.Trainer:
    rank, world = rank_and_world()
    trainer = tiny.trainer(strategy, devices=world, max_steps=steps, **options)
    trainer.fit(module, tiny.loader(tiny.tokens(steps), rank, world), ckpt_path=ckpt_path)
    return trainer


# Stages


def all_stages_in_one_process() -> dict[str, Any]:
    """validate, fit, fit again, test and predict on one module: configure_model and setup run five times."""
    rank, world = rank_and_world()
    pl.seed_everything(0, verbose=False)
    module = tiny.TinyLM()
    data = tiny.tokens()
    trainer = tiny.trainer(tiny.moe_ep(expert_parallel_size=2), devices=world, max_epochs=1)
    before = trainer.validate(module, tiny.loader(data[:2], rank, world), verbose=False)[0]["val_loss"]
    trainer.fit(module, tiny.loader(data, rank, world), tiny.loader(data[:2], rank, world))
    validated_in_fit = float(trainer.callback_metrics["val_loss"])
    after = trainer.test(module, tiny.loader(data[:2], rank, world), verbose=False)[0]["test_loss"]
    loops = (trainer.validate_loop, trainer.test_loop, trainer.predict_loop)
    again = tiny.trainer(tiny.moe_ep(expert_parallel_size=2), devices=world, max_steps=2)
    again.fit(module, tiny.loader(data, rank, world))
    return {
        "before": before,
        "validated_in_fit": validated_in_fit,
        "after": after,
        "losses": module.losses,
        "inference_mode": [loop.inference_mode for loop in loops],
    }


def test_all_stages_in_one_process() -> None:
    first, second = run_ranks(all_stages_in_one_process, 2)
    assert first == second
    assert first["before"] == pytest.approx(first["losses"][0], rel=0.1)
    assert first["validated_in_fit"] == first["after"] < first["before"]
    assert len(first["losses"]) == 8
    assert first["inference_mode"] == [False, False, False]


def validate_then_fit_as_on_nccl() -> list[float]:
    """Lightning avoids inference_mode on gloo by asking for the backend; make it believe that there is none."""
    import lightning.pytorch.loops.utilities as utilities

    utilities._distributed_is_initialized = lambda: False
    rank, world = rank_and_world()
    module = tiny.TinyLM()
    trainer = tiny.trainer(tiny.moe_ep(), devices=world, max_steps=2)
    trainer.validate(module, tiny.loader(tiny.tokens(1), rank, world), verbose=False)
    trainer.fit(module, tiny.loader(tiny.tokens(2), rank, world))
    return module.losses


def test_validate_does_not_break_a_later_fit() -> None:
    assert all(len(losses) == 2 for losses in run_ranks(validate_then_fit_as_on_nccl, 2))


def predict_uneven(samples: int, batch_size: int) -> list[list[list[int]]]:
    _, world = rank_and_world()
    pl.seed_everything(0, verbose=False)
    module = tiny.TinyLM()
    data = tiny.tokens(1, samples)[0]
    trainer = tiny.trainer(tiny.moe_ep(expert_parallel_size=world), devices=world, use_distributed_sampler=True)
    return [batch.tolist() for batch in trainer.predict(module, DataLoader(data, batch_size=batch_size))]


@pytest.mark.parametrize(("samples", "batches"), [(5, [2, 1]), (7, [2, 2]), (2, [1, 1])])
def test_predict_with_uneven_batches_finishes(samples: int, batches: list[int]) -> None:
    """Lightning gives rank 0 one sample more, hence one batch more."""
    reference = [row for batch in run_ranks(predict_uneven, 1, samples, 2)[0] for row in batch]
    ranks = run_ranks(predict_uneven, 2, samples, 2, timeout=60)
    assert [len(rank) for rank in ranks] == batches
    rows = [[row for batch in rank for row in batch] for rank in ranks]
    assert rows == [reference[0::2], reference[1::2]], "every sample predicted once, by the rank that had it"


# Models


def reads_different_data() -> list[int]:
    _, world = rank_and_world()

    class Recorder(tiny.TinyLM):
        def training_step(self, batch: Tensor, index: int) -> Tensor:
            seen.extend(batch[:, 0].tolist())
            return super().training_step(batch, index)

    seen: list[int] = []
    data = torch.arange(16).unsqueeze(1).repeat(1, tiny.LENGTH)
    trainer = tiny.trainer(tiny.moe_ep(), devices=world, max_epochs=1, use_distributed_sampler=True)
    trainer.fit(Recorder(), DataLoader(data, batch_size=2))
    return seen


def test_every_rank_is_a_data_parallel_rank() -> None:
    ranks = run_ranks(reads_different_data, 4)
    assert sorted(itertools.chain.from_iterable(ranks)) == list(range(16))


class Configured(tiny.TinyLM):
    """Built in configure_model, on the meta device or not."""

    def __init__(self, meta: bool) -> None:
        super().__init__(build=torch.nn.Module)
        self.meta = meta
        self.calls = 0

    def configure_model(self) -> None:
        self.calls += 1
        if self.calls == 1:
            with torch.device("meta" if self.meta else "cpu"):
                self.net = tiny.qwen3_moe(tie_word_embeddings=self.meta)


def fit_configured(options: dict[str, Any], meta: bool) -> dict[str, Any]:
    rank, world = rank_and_world()
    pl.seed_everything(3, verbose=False)
    module = Configured(meta)
    trainer = tiny.trainer(tiny.moe_ep(**options), devices=world)
    trainer.validate(module, tiny.loader(tiny.tokens(1), rank, world), verbose=False)
    start = tiny.weights(module)
    tied = module.net.lm_head.weight is module.net.model.embed_tokens.weight
    buffers = dict(module.named_buffers())
    fit(module, tiny.moe_ep(**options))
    return {"start": start, "losses": module.losses, "calls": module.calls, "tied": tied, "buffers": buffers}


@pytest.mark.parametrize("meta", [False, True])
def test_configure_model_and_initial_weights_do_not_depend_on_the_layout(meta: bool) -> None:
    one = run_ranks(fit_configured, 1, {}, meta)[0]
    assert one["calls"] == 2
    assert one["tied"] == meta
    four = run_ranks(fit_configured, 4, {"expert_parallel_size": 2}, meta)
    for result in four:
        for name, weight in one["start"].items():
            assert torch.equal(result["start"][name], weight), name
        for name, buffer in one["buffers"].items():
            assert torch.equal(result["buffers"][name], buffer), name
        torch.testing.assert_close(result["losses"], one["losses"], rtol=1e-5, atol=0)
    experts = one["start"]["net.model.layers.0.mlp.experts.gate_up_proj"]
    assert torch.pdist(experts.flatten(1)).min() > 0.1, "no two experts may start equal"
    assert experts.std() == pytest.approx(0.2, rel=0.1)
    reference = tiny.qwen3_moe().model.rotary_emb.inv_freq
    assert torch.equal(one["buffers"]["net.model.rotary_emb.inv_freq"], reference)


def fit_without_seed(meta: bool) -> dict[str, Tensor]:
    rank, _ = rank_and_world()
    torch.manual_seed(rank)
    module = Configured(meta=True) if meta else tiny.TinyLM()
    fit(module, tiny.moe_ep(replicate_size=2))
    return tiny.weights(module)


@pytest.mark.parametrize("meta", [False, True])
def test_unseeded_ranks_start_from_rank_zero(meta: bool) -> None:
    """Every replica must hold the same weights, whatever each rank drew."""
    first, *others = run_ranks(fit_without_seed, 4, meta)
    for other in others:
        assert all(torch.equal(other[name], first[name]) for name in first)


class OwnForward(pl.LightningModule):
    """Layers that are children of the LightningModule itself, used in its own forward."""

    def __init__(self) -> None:
        super().__init__()
        from lightning_moe.nn import MoE

        self.embed = torch.nn.Embedding(tiny.VOCABULARY, 16)
        self.layers = torch.nn.ModuleList([MoE(16, 32, 4, 2, shared_expert=torch.nn.Linear(16, 16)) for _ in range(2)])
        self.head = torch.nn.Linear(16, tiny.VOCABULARY)
        self.losses: list[float] = []

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)

    def training_step(self, tokens: Tensor, index: int) -> Tensor:
        loss = torch.nn.functional.cross_entropy(self(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())
        self.losses.append(float(self.trainer.strategy.reduce(loss.detach())))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def fit_own_forward(ours: bool) -> list[float]:
    pl.seed_everything(0, verbose=False)
    module = OwnForward()
    fit(module, tiny.moe_ep(expert_parallel_size=2) if ours else "auto", steps=4)
    return module.losses


def test_a_lightning_module_with_its_own_forward_and_our_layer() -> None:
    reference = run_ranks(fit_own_forward, 1, False)[0]
    assert reference[-1] < reference[0]
    torch.testing.assert_close(run_ranks(fit_own_forward, 2, True)[0], reference, rtol=1e-5, atol=0)


class Manual(tiny.TinyLM):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, tokens: Tensor, index: int) -> None:
        optimizer = self.optimizers()
        for _ in range(2):
            loss = self.loss(tokens)
            self.losses.append(float(self.trainer.strategy.reduce(loss.detach())))
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()


def fit_manually(ours: bool) -> list[float]:
    pl.seed_everything(0, verbose=False)
    module = Manual()
    fit(module, tiny.moe_ep(expert_parallel_size=2) if ours else "auto", steps=6)
    return module.losses


def test_manual_optimization() -> None:
    reference = run_ranks(fit_manually, 1, False)[0]
    assert len(reference) == 6
    torch.testing.assert_close(run_ranks(fit_manually, 2, True)[0], reference, rtol=1e-5, atol=0)


# Precision


class OwnLoss(tiny.TinyLM):
    """Computes its loss outside of the model, on what the model returns."""

    def loss(self, tokens: Tensor) -> Tensor:
        logits = self.net(input_ids=tokens).logits
        self.dtypes["logits"] = logits.dtype
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        return self.__dict__.setdefault("_dtypes", {})


def fit_in(precision: str, ours: bool) -> dict[str, Any]:
    pl.seed_everything(0, verbose=False)
    module = OwnLoss(tiny.adamw)
    dtypes = module.dtypes
    if ours:
        mlp = module.net.model.layers[0].mlp
        mlp.experts.register_forward_hook(lambda m, args, out: dtypes.update(rows=args[0].dtype, weights=args[2].dtype))
        mlp.gate.register_forward_hook(lambda m, args, out: dtypes.update(router=out[0].dtype))
        mlp.experts.register_forward_pre_hook(lambda m, args: dtypes.update(experts=m.down_proj.dtype))
    trainer = fit(module, tiny.moe_ep(expert_parallel_size=2) if ours else "auto", precision=precision)
    parameters = {p.dtype for p in module.parameters()}
    moments = {s["exp_avg"].dtype for s in trainer.optimizers[0].state.values()}
    rotary = module.net.model.rotary_emb.inv_freq
    return {
        "losses": module.losses,
        "dtypes": dtypes,
        "parameters": parameters,
        "moments": moments,
        "rotary": rotary,
    }


@pytest.mark.parametrize(
    ("precision", "stored", "computed"),
    [
        ("32-true", torch.float32, torch.float32),
        ("bf16-mixed", torch.float32, torch.bfloat16),
        ("bf16-true", torch.bfloat16, torch.bfloat16),
    ],
)
def test_stock_precision_flags(precision: str, stored: torch.dtype, computed: torch.dtype) -> None:
    exact = run_ranks(fit_in, 1, "32-true", False)[0]["losses"]
    result = run_ranks(fit_in, 2, precision, True)[0]
    assert result["parameters"] == result["moments"] == {stored}
    assert result["dtypes"]["rows"] == result["dtypes"]["experts"] == computed
    assert result["dtypes"]["router"] == result["dtypes"]["weights"] == torch.float32
    assert torch.equal(result["rotary"], tiny.qwen3_moe().model.rotary_emb.inv_freq), "buffers keep their precision"
    assert result["dtypes"]["logits"] == (torch.bfloat16 if precision == "bf16-true" else torch.float32)
    torch.testing.assert_close(result["losses"], exact, rtol=1e-5 if computed == torch.float32 else 2e-2, atol=0)
    if computed == torch.bfloat16:
        assert result["losses"] != exact


# Checkpoints


def fit_and_save(options: dict[str, Any], path: str) -> dict[str, Any]:
    pl.seed_everything(0, verbose=False)
    module = tiny.TinyLM(tiny.adamw)
    trainer = fit(module, tiny.moe_ep(**options), steps=3)
    trainer.save_checkpoint(path)
    return {"weights": tiny.weights(module)}


def fit_on(options: dict[str, Any], path: str | None) -> dict[str, Any]:
    rank, world = rank_and_world()
    pl.seed_everything(1 if path else 0, verbose=False)
    module = tiny.TinyLM(tiny.adamw)
    trainer = tiny.trainer(tiny.moe_ep(**options), devices=world, max_steps=6)
    data = tiny.tokens(6)
    # Lightning knows that 3 of 6 batches are done, but a plain loader starts from its beginning.
    data = data.roll(3, 0) if path else data
    trainer.fit(module, tiny.loader(data, rank, world), ckpt_path=path)
    return {"losses": module.losses, "weights": tiny.weights(module)}


@pytest.mark.parametrize("distributed", [True, False])
def test_a_resumed_run_goes_on_as_the_unbroken_one(tmp_path: Path, distributed: bool) -> None:
    options = {"expert_parallel_size": 2, "save_distributed_checkpoint": distributed}
    path = str(tmp_path / "a.ckpt")
    unbroken = run_ranks(fit_on, 4, options, None)[0]
    run_ranks(fit_and_save, 4, options, path)
    assert Path(path).is_dir() == distributed
    resumed = run_ranks(fit_on, 4, options, path)[0]
    assert resumed["losses"] == unbroken["losses"][3:], "equal bits on the same layout"
    assert all(torch.equal(resumed["weights"][n], w) for n, w in unbroken["weights"].items())
    other = run_ranks(fit_on, 2, {"expert_parallel_size": 1, "save_distributed_checkpoint": distributed}, path)[0]
    torch.testing.assert_close(other["losses"], unbroken["losses"][3:], rtol=1e-5, atol=0)


# Launchers

SCRIPT = r"""
import atexit
import os
import torch.distributed as dist

def say(text):
    os.write(1, f"{text}\n".encode())  # in one piece, which two processes cannot mix

# Registered first, so it runs last: gloo aborts some of the processes that leave with their group alive.
atexit.register(lambda: say(f"group alive at exit: {dist.is_initialized()}"))
import lightning.pytorch as pl
import torch
from lightning_moe import ExpertParallelStrategy
from tests import tiny

if __name__ == "__main__":
    torch.set_num_threads(1)
    pl.seed_everything(0)
    module = tiny.TinyLM()
    trainer = tiny.trainer(
        "moe_ep", devices=2, precision="bf16-mixed", gradient_clip_val=1.0, accumulate_grad_batches=2, max_steps=2
    )
    trainer.fit(module, tiny.loader(tiny.tokens(4), trainer.global_rank, trainer.world_size))
    say(f"rank {trainer.global_rank} of {trainer.world_size}: {module.losses[-1]:.4f}")
"""


@pytest.mark.parametrize(
    "launcher", [[sys.executable], [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]]
)
def test_lightnings_launcher_and_torchrun(tmp_path: Path, launcher: list[str]) -> None:
    """Also: no process aborts at exit, as gloo does when its group is not destroyed."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    root = str(Path(__file__).parent.parent)
    done = in_subprocess([*launcher, script], timeout=120, env={"PYTHONPATH": root}, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    losses = re.findall(r"rank \d of 2: ([\d.]+)", done.stdout)
    assert len(losses) == 2
    assert losses[0] == losses[1]
    assert done.stdout.count("group alive at exit: False") == 2
    assert "terminate called" not in done.stderr


def sharded_as() -> dict[str, str]:
    module = tiny.TinyLM()
    fit(module, tiny.moe_ep(expert_parallel_size=2, replicate_size=2), steps=1)
    parameters = {name: p for name, p in module.named_parameters() if isinstance(p, DTensor)}
    return {name: " ".join(p.device_mesh.mesh_dim_names) + f" {tuple(p.shape)}" for name, p in parameters.items()}


def test_names_and_full_shapes_stay_and_experts_lie_on_their_mesh() -> None:
    found = run_ranks(sharded_as, 4)[0]
    assert found.keys() == {name for name, _ in tiny.TinyLM().named_parameters()}
    for name, text in found.items():
        mesh = "replicate expert_shard expert" if ".experts." in name else "replicate shard"
        assert text.startswith(mesh), (name, text)
    assert found["net.model.layers.0.mlp.experts.down_proj"].endswith("(8, 32, 16)")


def test_a_distributed_checkpoint_becomes_one_file_of_plain_weights(tmp_path: Path) -> None:
    """What the README shows to get a trained model out."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    trained = run_ranks(fit_and_save, 2, {"expert_parallel_size": 2}, str(tmp_path / "a.ckpt"))[0]["weights"]
    dcp_to_torch_save(str(tmp_path / "a.ckpt"), str(tmp_path / "weights.pt"))
    state = torch.load(tmp_path / "weights.pt")["model"]
    module = tiny.TinyLM()
    module.load_state_dict(state)
    assert all(torch.equal(weight, trained[name]) for name, weight in module.named_parameters())
    module.net.save_pretrained(tmp_path / "folder")
    loaded = type(module.net).from_pretrained(tmp_path / "folder")
    tokens = tiny.tokens(1, 2)[0]
    torch.testing.assert_close(loaded(input_ids=tokens).logits, module.net(input_ids=tokens).logits)
