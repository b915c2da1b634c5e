"""`lightning-moe verify`: what agrees, what differs and where, and what it says when it cannot know."""

import dataclasses
import io
import json
import os
import sys
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import yaml
from lightning.pytorch.callbacks import ModelCheckpoint
from rich.console import Console
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_moe.cli import main
from lightning_moe.cli_errors import RefusedError
from lightning_moe.nn import MoE, TopKRouter
from lightning_moe.verify import run
from lightning_moe.verify.batches import MergeError, merge
from lightning_moe.verify.compare import Record, compare
from lightning_moe.verify.groups import GROUPS, parameter_groups
from lightning_moe.verify.judge import Judge
from lightning_moe.verify.plan import LAYOUT, Plan, Reference
from lightning_moe.verify.report import Verdict, show
from lightning_moe.verify.shrink import shrink
from tests.harness import ROOT, in_subprocess, run_ranks
from tests.models.tiny import FIELDS, causal_lm
from tests.test_module_list import HIDDEN as MODULES_HIDDEN
from tests.test_module_list import Experts

VOCABULARY, LENGTH, HIDDEN = 32, 8, 16


class Net(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.attention = nn.MultiheadAttention(HIDDEN, 2, batch_first=True)
        self.norm = nn.LayerNorm(HIDDEN)
        self.drop = nn.Dropout(dropout)
        self.moe = MoE(HIDDEN, 8, 4, 2, shared_expert=nn.Linear(HIDDEN, HIDDEN))
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.attention(x, x, x)[0]
        return self.head(x + self.moe(self.drop(self.norm(x))))


class Toy(pl.LightningModule):
    """One part of every group; ``fault`` goes wrong where there is more than one rank."""

    def __init__(self, fault: str = "", dropout: float = 0.0, adam: bool = False) -> None:
        super().__init__()
        self.net = Net(dropout)
        self.fault = fault
        self.adam = adam

    def configure_callbacks(self) -> list[pl.Callback]:
        return [ModelCheckpoint("saved", every_n_train_steps=1)]

    def on_fit_start(self) -> None:
        if self.fault == "router" and self.trainer.world_size > 1:
            self.net.moe.router.register_forward_hook(lambda module, args, out: (out[0], out[1].detach(), out[2]))

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        if self.fault == "crash":
            raise ValueError("a fault of the user's step")
        logits = self.net(batch["input_ids"])
        if self.fault == "forward":
            torch.manual_seed(self.global_rank)
            logits = logits * torch.rand(logits.shape)
        logits = logits * {"nothing": 0.0, "not a number": float("nan")}.get(self.fault, 1.0)
        self.logger.experiment.add_scalar("needs", "a logger", index)
        # A mean over this rank's own valid tokens.
        return cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.fault == "experts" and self.trainer.world_size > 1:
            for parameter in self.net.moe.experts.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(2)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.adam:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)
        return torch.optim.SGD(self.parameters(), lr=0.1)


class TwoOptimizers(pl.LightningModule):
    """Steps two optimizers by hand, one of them that of experts which exist on one rank each."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.embed = nn.Embedding(VOCABULARY, MODULES_HIDDEN)
        self.moe = nn.ModuleDict({"router": TopKRouter(MODULES_HIDDEN, 4, 2), "experts": Experts(4)})
        self.head = nn.Linear(MODULES_HIDDEN, VOCABULARY)

    def training_step(self, batch: dict[str, Tensor], index: int) -> None:
        for optimizer in self.optimizers():
            x = self.embed(batch["input_ids"]).flatten(0, 1)
            _, weights, chosen = self.moe["router"](x)
            loss = cross_entropy(self.head(x + self.moe["experts"](x, chosen, weights)), batch["labels"].flatten())
            for known in self.optimizers():
                known.zero_grad()
            # Where the loader ends has to be the same, also where it has no length.
            self.manual_backward(2 * loss if self.trainer.is_last_batch else loss)
            optimizer.step()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        of_experts = {id(parameter) for parameter in self.moe["experts"].parameters()}
        others = [parameter for parameter in self.parameters() if id(parameter) not in of_experts]
        return [torch.optim.SGD(self.moe["experts"].parameters(), lr=0.1), torch.optim.SGD(others, lr=0.1)]


class Rows(Dataset[dict[str, Tensor]]):
    """Every second row, hence all rows of rank 1 of two, has fewer labels that count, or is shorter."""

    def __init__(self, count: int, kind: str) -> None:
        tokens = torch.randint(0, VOCABULARY, (count, LENGTH + 1), generator=torch.Generator().manual_seed(0))
        self.rows = [{"input_ids": row[:-1], "labels": row[1:].clone()} for row in tokens]
        for row in self.rows[1::2]:
            if kind == "uneven":
                row["labels"][3:] = -100
            if kind == "ragged":
                row.update({name: tokens[:5] for name, tokens in row.items()})

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.rows[index]


class Stream(IterableDataset[dict[str, Tensor]]):
    """Rows of each rank in an order of its own, of unknown number."""

    def __init__(self, rows: Rows, rank: int, ranks: int) -> None:
        self.rows = [rows[index] for index in range(rank, len(rows), ranks)]

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter(self.rows)


class Data(pl.LightningDataModule):
    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.kind = kind
        self.calls = 0

    def train_dataloader(self) -> DataLoader:
        rows = Rows(24, self.kind)
        if self.kind:
            return DataLoader(Stream(rows, self.trainer.global_rank, self.trainer.world_size), batch_size=4)
        return DataLoader(rows, batch_size=4, shuffle=True)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.calls += 1
        # Twice would be another batch.
        return {**batch, "input_ids": (batch["input_ids"] + 7 * self.calls) % VOCABULARY}


def config(model: str = "Toy", data: str = "", trainer: dict[str, Any] | None = None, **init_args: Any) -> str:
    """Write a config for two ranks into the present folder."""
    strategy = {"class_path": "lightning_moe.ExpertParallelStrategy", "init_args": {"expert_parallel_size": 2}}
    common = {"accelerator": "cpu", "devices": 2, "strategy": strategy, "max_epochs": 4, "gradient_clip_val": 0.05}
    content = {
        "seed_everything": 0,
        "trainer": {**common, **(trainer or {})},
        "model": {"class_path": f"{__name__}.{model}", "init_args": init_args},
        "data": {"class_path": f"{__name__}.Data", "init_args": {"kind": data}},
    }
    Path("run.yaml").write_text(yaml.safe_dump(content))
    return "run.yaml"


def carry_out(argv: list[str]) -> int:
    return run.main(argv)


@pytest.fixture
def verify(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Verdict]:
    """Judge a config as the command does, with processes that start faster; then look at what was left."""
    monkeypatch.chdir(tmp_path)

    def start(folder: Path, names: list[str]) -> None:
        codes = run_ranks(carry_out, 2 if LAYOUT in names else 1, [str(folder), *names], timeout=100)
        assert not any(codes)

    def judged(name: str, *arguments: str, steps: int = 2, **options: Any) -> Verdict:
        folder = tmp_path / "records"
        folder.mkdir()
        Plan(("--config", name, *arguments), steps, **options).write(folder)
        verdict = Judge(folder, None, start).verdict()
        assert sorted(os.listdir(tmp_path)) == ["records", "run.yaml"], "a run must leave nothing in the user's folder"
        return verdict

    return judged


def failed(verdict: Verdict, quantity: str) -> list[str | None]:
    return [row.group for row in verdict.comparison.failed if row.quantity == quantity]


def printed(verdict: Verdict, folder: Path) -> str:
    text = io.StringIO()
    show(verdict, Record(folder / LAYOUT), "Toy", Console(file=text))
    return text.getvalue()


def test_a_layout_agrees_over_epochs_of_unknown_length_with_accumulation_and_adam(
    verify: Callable[..., Verdict], tmp_path: Path
) -> None:
    # Three batches an epoch and rank, so that the second step of each comes early and the third is in the next epoch.
    name = config(data="stream", trainer={"accumulate_grad_batches": 2}, adam=True)
    verdict = verify(name, steps=3)
    assert (verdict.kind, verdict.exit_code) == ("same", 0), verdict.text
    rows = verdict.comparison.rows
    for quantity in ("gradient", "weight change"):
        assert {row.group for row in rows if row.quantity == quantity} == set(GROUPS)
    assert [row.step for row in rows if row.quantity == "loss"] == [1, 2, 3]
    assert max(row.error for row in rows if row.quantity != "weight change") < 1e-5
    assert min(row.layout for row in rows) > 0
    text = printed(verdict, tmp_path / "records")
    for shown in (
        "gradient, shared experts",
        "weight change, router",
        "gradient norm, step 3",
        "expert_parallel_size=2",
    ):
        assert shown in text
    assert "SAME: 2 ranks train as one process" in text

    layout, one = (Record(tmp_path / "records" / folder) for folder in (LAYOUT, "whole"))
    assert layout.epochs == [0, 0, 0, 1, 1]
    assert compare(layout, one, None, tolerance=1e-12).failed, "--tolerance is what decides"
    assert not compare(one, one, None, tolerance=1e-12).failed


@pytest.mark.parametrize(
    ("fault", "groups", "said"),
    [
        # What lies below the router changes with it.
        ("router", ["embeddings", "attention", "router", "norms"], "differ: router (none under the layout), "),
        ("experts", ["experts"], "the gradients of these differ: experts (2 times that of one process)"),
        ("forward", None, "the forward differs: loss of step 1"),
    ],
)
def test_a_fault_is_found_and_the_part_that_it_is_in_is_named(
    verify: Callable[..., Verdict], fault: str, groups: list[str] | None, said: str
) -> None:
    verdict = verify(config(fault=fault))
    assert (verdict.kind, verdict.exit_code) == ("different", 1), verdict.text
    assert said in verdict.text
    if groups is not None:
        assert failed(verdict, "gradient") == groups
        (row,) = [row for row in verdict.comparison.failed if (row.quantity, row.group) == ("gradient", fault)]
        assert row.worst is not None
        assert row.worst.startswith(f"net.moe.{fault}.")


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("nothing", "every gradient of one process is zero, so that there is nothing to compare"),
        ("not a number", "the loss of one process is nan at step 1"),
    ],
)
def test_equal_nothings_are_not_called_the_same(verify: Callable[..., Verdict], fault: str, said: str) -> None:
    with pytest.raises(RefusedError) as refused:
        verify(config(fault=fault))
    assert said in refused.value.reason


def test_a_loss_that_is_a_mean_over_each_ranks_tokens_is_told_from_a_fault(verify: Callable[..., Verdict]) -> None:
    verdict = verify(config(data="uneven"))
    assert (verdict.kind, verdict.exit_code) == ("same_by_rank", 0), verdict.text
    assert "The strategy is exact, but the loss of the model is a mean over each rank's own" in verdict.text
    assert any("one process on the whole batch differs" in note for note in verdict.notes)


def test_batches_that_cannot_be_joined_are_taken_one_after_the_other(verify: Callable[..., Verdict]) -> None:
    verdict = verify(config(data="ragged", trainer={"accumulate_grad_batches": 2}))
    assert (verdict.kind, verdict.exit_code) == ("same_by_rank", 0), verdict.text
    assert "batch['input_ids'] differs in more than its dimension 0: [4, 8] torch.int64 on rank 0" in verdict.notes[0]
    assert "Nothing is known about one process on the whole batch" in verdict.text


def test_a_fault_is_not_taken_for_a_mean_over_each_ranks_tokens(verify: Callable[..., Verdict]) -> None:
    verdict = verify(config(data="uneven", fault="experts"))
    assert (verdict.kind, verdict.exit_code) == ("different", 1), verdict.text


def test_random_numbers_in_the_forward_are_recognized(verify: Callable[..., Verdict], tmp_path: Path) -> None:
    verdict = verify(config(dropout=0.3))
    assert (verdict.kind, verdict.exit_code) == ("random", 2), verdict.text
    assert "--no-dropout: net.drop.p=0.3" in verdict.text
    (tmp_path / "records").rename(tmp_path / ".." / "before")
    verdict = verify("run.yaml", no_dropout=True)
    assert verdict.kind == "same", verdict.text
    assert "--no-dropout set 1 rates to 0: net.drop.p=0.3" in verdict.notes


def test_optimizers_that_are_stepped_by_hand_and_experts_on_one_rank_each(
    verify: Callable[..., Verdict], tmp_path: Path
) -> None:
    verdict = verify(config("TwoOptimizers", data="stream", trainer={"gradient_clip_val": None}), steps=4)
    assert verdict.kind == "same", verdict.text
    records = [Record(tmp_path / "records" / folder) for folder in (LAYOUT, "whole")]
    names = {f"moe.experts.mlps.{expert}.1.weight" for expert in range(4)}
    for record in records:
        assert record.optimizers == ["SGD", "SGD"]
        assert names < set(record.gradients.names()) == set(record.changes.names())
        assert len(record.norms) == len(record.losses) == 4


def test_coarse_precision_is_judged_by_what_its_rounding_does(verify: Callable[..., Verdict]) -> None:
    verdict = verify(config(fault="experts", trainer={"precision": "bf16-mixed"}))
    assert verdict.kind == "different", verdict.text
    assert failed(verdict, "gradient") == ["experts"]
    rows = {row.group: row for row in verdict.comparison.rows if row.quantity == "gradient"}
    assert all(row.result != "FAIL" and row.error > 1e-4 for group, row in rows.items() if group != "experts")
    assert any("--trainer.precision 32-true shows the most" in note for note in verdict.notes)


# The command itself


@pytest.mark.slow
def test_the_command_verifies_a_causal_lm_and_leaves_only_its_json(tmp_path: Path) -> None:
    content: dict[str, Any] = yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text())
    content["model"]["init_args"]["config"] = {**FIELDS, "vocab_size": 256, "num_hidden_layers": 3}
    content["data"]["init_args"]["sequence_length"] = 16
    (tmp_path / "quick.yaml").write_text(yaml.safe_dump(content))
    command = [
        sys.executable,
        "-m",
        "lightning_moe",
        "verify",
        "--config",
        "quick.yaml",
        "--json",
        "out.json",
        "--shrink",
    ]
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    environment = {"PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)}
    done = in_subprocess([*command, "--steps", "2"], timeout=200, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SAME: 2 ranks train as one process" in done.stdout
    assert "note: --shrink: 2 of 3 layers" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    written = json.loads((tmp_path / "out.json").read_text())
    assert (written["verdict"], written["exit_code"], written["ranks"], written["steps"]) == ("same", 0, 2, 2)
    assert written["optimizers"] == ["AdamW"]
    groups = {row["group"] for row in written["rows"] if row["quantity"] == "gradient"}
    assert groups == set(GROUPS) - {"shared experts"}
    assert all(row["result"] == "ok" and row["name"] in done.stdout for row in written["rows"])
    assert {path.name for path in tmp_path.iterdir()} == {"quick.yaml", "out.json", "tmp"}
    assert not [path for path in temporary.iterdir() if path.name.startswith("lightning-moe-verify")]


def test_a_run_that_fails_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    one = ["--trainer.devices", "1", "--trainer.strategy", "auto"]
    assert main(["verify", "--config", config(fault="crash"), *one]) == 2
    lines = capfd.readouterr().err.splitlines()
    assert any("ValueError: a fault of the user's step" in line for line in lines), "the traceback is shown"
    assert lines[-1].startswith("lightning-moe: error: the run of the layout failed with exit code 1. What it printed")


def test_a_run_that_hangs_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["verify", "--config", config(), "--timeout", "1"]) == 2
    assert "lightning-moe: error: the layout ran past --timeout 1 s" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "no config is given. Give one: lightning-moe verify --config FILE.yaml"),
        (["--config", "absent.yaml"], "config file 'absent.yaml' does not exist. Config files in .: "),
        (["--config", "bad.yaml"], "config file bad.yaml, line 2, column 1"),
        (["--config", "run.yaml", "--steps", "0"], "argument --steps: '0' must be a whole number from 1 up"),
        (["--config", "run.yaml", "--tolerance", "2"], "argument --tolerance: '2' must be a number above 0"),
        (["--config", "run.yaml", "--json", "absent/x"], "argument --json: 'absent/x' must be a file in a folder"),
        (["--config", "run.yaml", "--callbacks", "Missing"], "--callbacks Missing: no such callback in the config"),
        (["--config", "run.yaml", "--trainer.num_nodes", "2"], "trainer.num_nodes=2: verify runs on one machine"),
        (["--config", "run.yaml", "--ckpt_path", "x.ckpt"], "ckpt_path 'x.ckpt': verify begins at step 0"),
        (["--config", "run.yaml", "--trainer.devicez", "2"], "unknown option on the command line: --trainer.devicez"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, arguments: list[str], expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    config()
    Path("bad.yaml").write_text("trainer:\n\tdevices: 1\n")
    assert main(["verify", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert expected in line


def test_it_is_not_started_once_for_each_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert main(["verify", "--config", config()]) == 2
    assert "Run it without torchrun or srun" in capsys.readouterr().err


def test_the_help_says_what_it_does(capsys: Any) -> None:
    assert main(["verify", "--help"]) == 0
    text = capsys.readouterr().out
    for part in ("--steps", "--shrink", "--no-dropout", "--tolerance", "--json", "exit codes: 0 the same, 1 different"):
        assert part in text


# Parts


@dataclasses.dataclass(frozen=True)
class Sample:
    tokens: Tensor
    name: str


Pair = namedtuple("Pair", ["left", "right"])


def test_batches_are_joined_whatever_they_are_made_of() -> None:
    def batch(rank: int) -> Any:
        x = torch.full((2, 3), rank)
        texts = [f"text {rank}"]
        return {"pair": Pair(x, [x, None]), "sample": Sample(x, "same"), "texts": texts, "scale": torch.tensor(2.0)}

    joined = merge([batch(0), batch(1)])
    expected = torch.tensor([[0] * 3] * 2 + [[1] * 3] * 2)
    assert isinstance(joined["pair"], Pair)
    for tensor in (joined["pair"].left, joined["pair"].right[0], joined["sample"].tokens):
        torch.testing.assert_close(tensor, expected)
    assert joined["sample"].name == "same"
    assert joined["texts"] == ["text 0", "text 1"]
    assert float(joined["scale"]) == 2.0


@pytest.mark.parametrize(
    ("batches", "expected"),
    [
        ([{"x": torch.tensor(1)}, {"x": torch.tensor(2)}], r"batch\['x'\] \(Tensor\) has no dimension 0 and differs"),
        ([[torch.zeros(2, 3)], [torch.zeros(2, 4)]], r"batch\[0\] differs in more than its dimension 0: \[2, 3\]"),
        ([{"x": 1}, {"y": 1}], "batch has other keys"),
        ([(1,), [1]], "batch is list or tuple, depending on the rank"),
        ([(1,), (1, 2)], "batch has 1 or 2 entries"),
    ],
)
def test_batches_that_cannot_be_joined_are_an_error(batches: list[Any], expected: str) -> None:
    with pytest.raises(MergeError, match=expected):
        merge(batches)


DEEPSEEK = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 600,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 3,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}


def test_shrinking_keeps_a_layer_with_experts() -> None:
    module = causal_lm(config=DEEPSEEK, config_class="DeepseekV3Config")
    said = shrink(module)
    assert said == "--shrink: 4 of 6 layers, intermediate_size 256 of 600, moe_intermediate_size 256 of 512"
    module.configure_model()
    groups = parameter_groups(module)
    assert set(groups.values()) == set(GROUPS)
    assert groups["model.model.layers.3.mlp.shared_experts.up_proj.weight"] == "shared experts"
    assert groups["model.model.layers.3.mlp.gate.weight"] == "router"
    assert groups["model.model.layers.0.mlp.up_proj.weight"] == "other"
    assert groups["model.model.layers.0.self_attn.kv_a_layernorm.weight"] == "norms"
    assert groups["model.model.layers.0.self_attn.kv_b_proj.weight"] == "attention"


def test_shrinking_cuts_what_has_one_entry_a_layer() -> None:
    # "silu" has one letter a layer.
    module = causal_lm(config={**FIELDS, "num_hidden_layers": 4, "hidden_act": "silu"})
    assert shrink(module) == "--shrink: 2 of 4 layers"
    layers = ["sliding_attention", "full_attention"] * 2
    module = causal_lm(
        config={
            "model_type": "gpt_oss",
            "hidden_size": 32,
            "num_hidden_layers": 4,
            "layer_types": layers,
            "head_dim": 8,
        },
        config_class=None,
    )
    shrink(module)
    assert module.network_config.layer_types == layers[:2]


def test_only_a_causal_lm_can_be_made_smaller() -> None:
    with pytest.raises(ValueError, match="cannot know how for Toy: leave it out and set the sizes yourself"):
        shrink(Toy())


def test_the_name_of_a_run_holds_what_it_is() -> None:
    for reference in (Reference(), Reference(True), Reference(rounded=True), Reference(True, reseeded=True)):
        assert Reference.named(reference.name) == reference
