"""Router losses of CausalLM: at every layout and number of micro-batches those of one process on the whole batch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from lightning_moe.models import CausalLM
from lightning_moe.nn import RouterObserver, batch_balance_loss, router_z_loss, sequence_balance_loss
from tests.harness import run_ranks
from tests.models.tiny import FIELDS, LENGTH, Sequences, causal_lm, config, loader, sgd, trainer
from tests.tiny import moe_ep, whole

TOKENS = [16, 9, 2, 5, 16, 1, 3, 12]  # of each sequence; the rest is padding
VALID = [12, 9, 0, 4, 16, 0, 1, 10]  # of these have a label that counts
DEEPSEEK = {
    "config_class": "DeepseekV3Config",
    "config": {
        **{name: value for name, value in FIELDS.items() if name not in ("num_experts", "head_dim")},
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "first_k_dense_replace": 1,
    },
}
LOSSES: dict[str, dict[str, Any]] = {
    "batch": {"aux_loss_coef": 3.0},
    "sequence": {"aux_loss_coef": 3.0, "aux_loss_level": "sequence"},
    "z": {"z_loss_coef": 0.5},
}


class Padded(Sequences):
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        mask = (torch.arange(LENGTH) < TOKENS[index]).long()
        return {**super().__getitem__(index), "attention_mask": mask}


class RouterLossesOnly(CausalLM):
    """The gradients are those of the router losses alone."""

    def _token_losses(self, batch: Any) -> tuple[Tensor, Tensor]:
        losses, valid = super()._token_losses(batch)
        return losses * 0.0, valid


class Recorder(Callback):
    def __init__(self) -> None:
        self.gradients: dict[str, Tensor] = {}
        self.logged: list[dict[str, float]] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.gradients = {name: whole(p.grad) for name, p in pl_module.named_parameters() if p.grad is not None}

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        metrics = trainer.callback_metrics
        self.logged.append({name: float(metrics[name]) for name in metrics if name.startswith("train/")})


def build(cls: type[CausalLM] = RouterLossesOnly, checkpointing: bool = False, **options: Any) -> CausalLM:
    torch.manual_seed(0)
    model = cls(**{"config": dict(FIELDS), "config_class": "Qwen3MoeConfig", "optimizer": sgd, **options})
    model.network_config.initializer_range = 0.3
    model.configure_model()
    if checkpointing:
        model.model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def train(root: str, strategy: Any, world: int, micro_batches: int, model: CausalLM) -> dict[str, Any]:
    """Take one step on all eight sequences, each rank and micro-batch on its own part."""
    recorder = Recorder()
    run = trainer(
        root,
        max_steps=1,
        devices=world,
        strategy=strategy,
        accumulate_grad_batches=micro_batches,
        callbacks=[recorder],
    )
    mine = 8 // world
    rows = range(run.global_rank * mine, (run.global_rank + 1) * mine)
    run.fit(model, DataLoader(Subset(Padded(8, valid=VALID), rows), mine // micro_batches))
    assert RouterObserver(model.model), "routers are found in a sharded model too"
    trained = {name: whole(parameter) for name, parameter in model.named_parameters()}
    return {"gradients": recorder.gradients, "weights": trained, "logged": recorder.logged}


def cases() -> dict[str, dict[str, Any]]:
    found = {
        f"{network} {loss}": {**options, **LOSSES[loss]} for loss in LOSSES for network, options in NETWORKS.items()
    }
    found["with the main loss"] = {**LOSSES["batch"], **LOSSES["z"], "cls": CausalLM}
    found["checkpointing"] = {**LOSSES["batch"], **LOSSES["z"], "cls": CausalLM, "checkpointing": True}
    return found


NETWORKS: dict[str, dict[str, Any]] = {"qwen3": {}, "deepseek": DEEPSEEK}


def train_all(root: str, world: int, expert_parallel_size: int | None) -> dict[str, Any]:
    results = {}
    for name, options in cases().items():
        strategy = "auto" if expert_parallel_size is None else moe_ep(expert_parallel_size=expert_parallel_size)
        results[name] = train(root, strategy, world, 1, build(**options))
    return results


def assert_same(ours: dict[str, Any], reference: dict[str, Any], what: str) -> None:
    for kind in ("gradients", "weights"):
        assert ours[kind].keys() == reference[kind].keys()
        for name, tensor in reference[kind].items():
            error = (ours[kind][name] - tensor).abs().max() / tensor.abs().max().clamp_min(1e-12)
            assert error < 1e-5, f"{what}: {kind} of {name} differ by {error:.1e}"


def routers(result: dict[str, Any]) -> dict[str, Tensor]:
    return {name: gradient for name, gradient in result["gradients"].items() if name.endswith("mlp.gate.weight")}


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_ranks(train_all, 1, str(tmp_path_factory.mktemp("one")), 1, None)[0]


def test_router_losses_alone_train_the_routers(one_process: dict[str, Any]) -> None:
    for name, result in one_process.items():
        assert len(routers(result)) == (1 if "deepseek" in name else 2)
        for router, gradient in routers(result).items():
            assert gradient.abs().max() > 1e-4, f"{name}: {router}"


@pytest.mark.parametrize(("world", "expert_parallel_size"), [(2, 1), (2, 2), (4, 2)])
def test_same_as_one_process(
    one_process: dict[str, Any], tmp_path: Path, world: int, expert_parallel_size: int
) -> None:
    for rank in run_ranks(train_all, world, str(tmp_path), world, expert_parallel_size, timeout=200):
        assert rank.keys() == one_process.keys()
        for name, result in rank.items():
            assert_same(result, one_process[name], name)
            assert result["logged"][0] == pytest.approx(one_process[name]["logged"][0], rel=1e-5)


def test_checkpointing_changes_nothing(one_process: dict[str, Any]) -> None:
    assert_same(one_process["checkpointing"], one_process["with the main loss"], "checkpointing")
    assert one_process["checkpointing"]["logged"] == one_process["with the main loss"]["logged"]


def train_with_ddp(root: str) -> list[dict[str, Any]]:
    options = {**LOSSES["batch"], **LOSSES["z"], "cls": CausalLM}
    return [train(root, "ddp", 2, micro_batches, build(**options)) for micro_batches in (1, 4)]


def test_same_under_ddp(one_process: dict[str, Any], tmp_path: Path) -> None:
    for whole_batch, _ in run_ranks(train_with_ddp, 2, str(tmp_path)):
        assert_same(whole_batch, one_process["with the main loss"], "ddp")


def train_in_micro_batches(root: str) -> dict[str, Any]:
    return {
        f"{loss} {micro_batches}": train(root, moe_ep(), 2, micro_batches, build(**LOSSES[loss]))
        for loss in ("sequence", "z")
        for micro_batches in (2, 4)
    }


def test_sequence_level_and_z_loss_do_not_depend_on_micro_batches(one_process: dict[str, Any], tmp_path: Path) -> None:
    for micro_batches in (2, 4):
        for loss in ("sequence", "z"):
            ours = train(str(tmp_path), "auto", 1, micro_batches, build(**LOSSES[loss]))
            assert_same(ours, one_process[f"qwen3 {loss}"], f"{loss}, {micro_batches} micro-batches")
    for rank in run_ranks(train_in_micro_batches, 2, str(tmp_path)):
        for name, ours in rank.items():
            assert_same(ours, one_process[f"qwen3 {name.split()[0]}"], name)


def reference(micro_batches: int, losses: dict[str, Any]) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """What should be logged, and the gradients, from the losses by hand."""
    model, data = build(), Padded(8, valid=VALID)
    logged, total = [], torch.zeros(())
    for part in torch.arange(8).chunk(micro_batches):
        batch = torch.utils.data.default_collate([data[int(i)] for i in part])
        mask, tokens = batch["attention_mask"], (batch["labels"] != -100).sum(1)
        with RouterObserver(model.model).observe() as seen:
            model.model(input_ids=batch["input_ids"], attention_mask=mask)
        count = tokens.sum()
        shares = tokens / count if count else torch.zeros(len(tokens))
        z = (router_z_loss(seen, mask) * shares).sum()
        sequence = (sequence_balance_loss(seen, mask) * shares).sum()
        aux = sequence if losses.get("aux_loss_level") == "sequence" else batch_balance_loss(seen, mask)
        logged.append({"train/aux_loss": aux.item(), "train/z_loss": z.item()})
        loss = losses.get("aux_loss_coef", 0.0) * aux + losses.get("z_loss_coef", 0.0) * z
        total = total + loss * count / sum(VALID)
    total.backward()
    return logged, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("level", ["batch", "sequence"])
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_each_micro_batch_weighs_as_its_valid_tokens(level: str, micro_batches: int, tmp_path: Path) -> None:
    losses = {**LOSSES[level], **LOSSES["z"]}
    logged, gradients = reference(micro_batches, losses)
    ours = train(str(tmp_path), "auto", 1, micro_batches, build(**losses))
    for found, expected in zip(ours["logged"], logged, strict=True):
        assert found == pytest.approx({**expected, "train/loss": 0.0}, rel=1e-5)
    for name, gradient in gradients.items():
        scale = gradient.abs().max().clamp_min(1e-12)
        assert (ours["gradients"][name] - gradient).abs().max() / scale < 1e-5, name


def test_the_scale_of_the_batch_level_does_not_depend_on_the_number_of_micro_batches(tmp_path: Path) -> None:
    """A router without preferences, whose loss is 1 for any batch: what is added is the coefficient."""

    class Recording(RouterLossesOnly):
        added = 0.0

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.added += float(loss.detach()) / self.trainer.accumulate_grad_batches
            return loss

    for micro_batches in (1, 2, 4):
        model = build(Recording, aux_loss_coef=0.25)
        for layer in model.model.model.layers:
            torch.nn.init.zeros_(layer.mlp.gate.weight)
        run = trainer(tmp_path, max_steps=1, accumulate_grad_batches=micro_batches)
        run.fit(model, loader(8, 8 // micro_batches))
        assert model.added == pytest.approx(0.25, rel=1e-5)


def test_evaluation_has_no_router_losses(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    metrics = [
        run.validate(build(CausalLM, **options), loader(), verbose=False)[0] for options in ({}, LOSSES["batch"])
    ]
    assert metrics[0] == metrics[1]
    assert "train/aux_loss" not in metrics[1]


# What is refused


def test_options_are_checked() -> None:
    for name in ("aux_loss_coef", "z_loss_coef"):
        with pytest.raises(ValueError, match=rf"{name}=-0.1 must be 0 \(off\) or a positive number"):
            causal_lm(**{name: -0.1})
    with pytest.raises(ValueError, match="aux_loss_level='token' must be one of 'batch', 'sequence'"):
        causal_lm(aux_loss_level="token")
    with pytest.raises(ValueError, match="score function 'tanh'"):
        causal_lm(router_score_function="tanh")


def test_the_loss_of_transformers_and_ours_exclude_each_other(tmp_path: Path) -> None:
    config(output_router_logits=True, router_aux_loss_coef=0.02).save_pretrained(tmp_path / "both")
    config(output_router_logits=False, router_aux_loss_coef=0.02).save_pretrained(tmp_path / "one")
    with pytest.raises(ValueError, match=r"aux_loss_coef=0.1 of the model.*router_aux_loss_coef=0.02 in its config"):
        CausalLM(pretrained=str(tmp_path / "both"), aux_loss_coef=0.1)
    CausalLM(pretrained=str(tmp_path / "both"))
    CausalLM(pretrained=str(tmp_path / "one"), aux_loss_coef=0.1)
    with pytest.raises(ValueError, match=r"output_router_logits=True.*aux_loss_coef is over all ranks"):
        causal_lm(config={**FIELDS, "output_router_logits": True}, aux_loss_coef=0.1)


def test_a_network_without_routers_is_an_error_that_names_the_option() -> None:
    dense = {"config_class": "Qwen3Config", "config": {k: v for k, v in FIELDS.items() if "expert" not in k}}
    dense["config"].pop("moe_intermediate_size")
    with pytest.raises(ValueError, match=r"z_loss_coef=0.1: Qwen3ForCausalLM has no experts"):
        causal_lm(**dense, z_loss_coef=0.1).configure_model()
    causal_lm(**dense).configure_model()


def test_masks_of_pairs_of_tokens_are_refused(tmp_path: Path) -> None:
    class Pairs(Sequences):
        def __getitem__(self, index: int) -> dict[str, Tensor]:
            return {**super().__getitem__(index), "attention_mask": torch.ones(1, LENGTH, LENGTH)}

    with pytest.raises(ValueError, match=r"must be \[B, L\].*got \[4, 1, 16, 16\]"):
        trainer(tmp_path, max_steps=1).fit(build(**LOSSES["z"]), DataLoader(Pairs(4), 4))
