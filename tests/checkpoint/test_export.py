"""``lightning-moe export``: equal bytes from the hub to training and back, in bounded memory, and errors with names."""

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3MoeForCausalLM

from lightning_moe.checkpoint import CheckpointError, export_checkpoint, load_pretrained
from lightning_moe.checkpoint.export import main
from lightning_moe.checkpoint.hub_write import HubFolder, SafetensorsFile
from lightning_moe.cli_errors import RefusedError
from lightning_moe.models import CausalLM
from tests import tiny
from tests.checkpoint import hub_models
from tests.checkpoint.hub_models import assert_same, tensors
from tests.harness import ROOT, run_ranks
from tests.models import tiny as causal


def export(*arguments: object) -> None:
    """Run the command in this process."""
    assert main([str(argument) for argument in arguments]) == 0


def refusal(*arguments: object) -> str:
    """Run the command in this process, and return why it is refused."""
    with pytest.raises(RefusedError) as refused:
        main([str(argument) for argument in arguments])
    return f"{refused.value.reason}. {refused.value.hint}"


class FromHub(pl.LightningModule):
    """A user's LightningModule that reads its network from a folder of the hub."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            config = AutoConfig.from_pretrained(self.folder)
            with torch.device("meta"):
                self.net = getattr(transformers, config.architectures[0])(config)
            load_pretrained(self, self.folder)

    def training_step(self, tokens: Tensor, index: int) -> Tensor:
        return self.net(input_ids=tokens, labels=tokens).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Two(pl.LightningModule):
    """A student and a teacher, built in ``__init__``, and a layer that is no network of Transformers."""

    def __init__(self, folder: str | None = None) -> None:
        super().__init__()
        self.teacher = tiny.qwen3_moe()
        self.student: Any = tiny.qwen3_moe() if folder is None else AutoModelForCausalLM.from_pretrained(folder)
        self.head = nn.Linear(2, 2)


def _round_trip(root: str, names: list[str], options: dict[str, Any]) -> None:
    for name in names:
        module = FromHub(f"{root}/hub/{name}")
        trainer = tiny.trainer(tiny.moe_ep(**options), int(os.environ["WORLD_SIZE"]), max_steps=0)
        trainer.fit(module, tiny.loader(tiny.tokens(1)))
        trainer.save_checkpoint(f"{root}/{name}.ckpt")


@pytest.mark.parametrize(
    ("world", "options", "names"),
    [
        (2, {"expert_parallel_size": 2}, list(hub_models.LAYOUTS)),
        (2, {"expert_parallel_size": 2, "save_distributed_checkpoint": False}, ["qwen3_moe", "gpt_oss"]),
        (4, {"expert_parallel_size": 2}, ["qwen3_moe", "gpt_oss"]),
    ],
)
def test_hub_to_training_to_hub_gives_equal_bytes(
    world: int, options: dict[str, Any], names: list[str], tmp_path: Path
) -> None:
    for name in names:
        hub_models.save(name, tmp_path / "hub" / name)
    run_ranks(_round_trip, world, str(tmp_path), names, options)
    for name in names:
        hub = tmp_path / "hub" / name
        assert (tmp_path / f"{name}.ckpt").is_dir() == options.get("save_distributed_checkpoint", True)
        export(
            *("--ckpt_path", tmp_path / f"{name}.ckpt", "--output", tmp_path / "out" / name),
            *("--pretrained", hub, "--max_shard_size", "30KB"),
        )
        assert_same(tensors(tmp_path / "out" / name), tensors(hub))
        for file in ("config.json", "generation_config.json"):
            assert (tmp_path / "out" / name / file).exists() == (hub / file).exists()
        assert json.loads((tmp_path / "out" / name / "config.json").read_text()) == json.loads(
            (hub / "config.json").read_text()
        )
        files = sorted((tmp_path / "out" / name).glob("*.safetensors"))
        index = json.loads((tmp_path / "out" / name / "model.safetensors.index.json").read_text())
        assert len(files) > 1
        for path in files:
            held = load_file(path)
            assert len(held) == 1 or sum(tensor.nbytes for tensor in held.values()) <= 30_000
            assert {n for n, shard in index["weight_map"].items() if shard == path.name} == held.keys()


# CausalLM


def train(root: Path, distributed: bool = True, **options: Any) -> tuple[Path, dict[str, Tensor]]:
    """Train a CausalLM in this process for a step from a folder with a tokenizer; its checkpoint and its weights."""
    hub = root / "hub"
    hub_models.save("qwen3_moe", hub)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (hub / name).write_text(name)
    generation = json.loads((hub / "generation_config.json").read_text())
    (hub / "generation_config.json").write_text(json.dumps({**generation, "max_new_tokens": 7}))
    module = CausalLM(**{"pretrained": str(hub), "optimizer": causal.sgd, **options})
    strategy: Any = tiny.moe_ep(save_distributed_checkpoint=distributed)
    trainer = causal.trainer(root, strategy=strategy, max_steps=1)
    trainer.fit(module, causal.loader(2, 2))
    trainer.save_checkpoint(root / "last.ckpt")
    return root / "last.ckpt", {name: tiny.whole(t) for name, t in module.model.state_dict().items()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    return train(tmp_path_factory.mktemp("trained"))


def test_a_checkpoint_of_causal_lm_needs_no_config(
    trained: tuple[Path, dict[str, Tensor]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, weights = trained
    export("--ckpt_path", checkpoint, "--output", tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert_same(loaded.state_dict(), weights)
    assert loaded.generation_config.max_new_tokens == 7
    assert (tmp_path / "out" / "tokenizer_config.json").read_text() == "tokenizer_config.json"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"
    ]  # fmt: skip
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert "Qwen3MoeForCausalLM" in capsys.readouterr().out


def test_a_dtype(trained: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    checkpoint, weights = trained
    export("--ckpt_path", checkpoint, "--output", tmp_path / "out", "--dtype", "bfloat16")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert_same(loaded.state_dict(), {name: tensor.bfloat16() for name, tensor in weights.items()})


def test_a_single_file_and_the_command_in_a_process_of_its_own(tmp_path: Path) -> None:
    checkpoint, weights = train(tmp_path, distributed=False, pretrained=None, config={"model_type": "qwen3_moe", **{
        key: value for key, value in causal.FIELDS.items() if key != "num_experts"}, "num_experts": 6})  # fmt: skip
    assert checkpoint.is_file()
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens" / "any-name.json").write_text("mine")
    command = [sys.executable, "-m", "lightning_moe", "export", "--ckpt_path", "last.ckpt", "--output", "out"]
    run = subprocess.run(
        [*command, "--tokenizer", "tokens/any-name.json"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict(), weights)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "mine"


def test_the_config_of_the_run(trained: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    checkpoint, weights = trained
    text = tmp_path / "text"
    text.mkdir()
    (text / "a.txt").write_text("words " * 200)
    config = tmp_path / "config.yaml"
    config.write_text(
        f"""
trainer: {{accelerator: cpu, max_steps: 1}}
model:
  class_path: lightning_moe.models.CausalLM
  init_args: {{pretrained: {checkpoint.parent / "hub"}}}
data:
  class_path: lightning_moe.data.TextData
  init_args: {{path: {text}, tokenizer: {tmp_path / "tokens"}}}
"""
    )
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens" / "vocab.json").write_text("of the data")
    export("--ckpt_path", checkpoint, "--config", config, "--output", tmp_path / "out")
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict(), weights)
    assert (tmp_path / "out" / "vocab.json").read_text() == "of the data"
    assert not (tmp_path / "out" / "tokenizer.json").exists()


def test_a_folder_that_has_moved(tmp_path: Path) -> None:
    checkpoint, weights = train(tmp_path)
    (tmp_path / "hub").rename(tmp_path / "moved")
    said = refusal("--ckpt_path", checkpoint, "--output", tmp_path / "out")
    assert "is not a folder" in said
    assert "--pretrained names the folder where it lies now" in said
    export("--ckpt_path", checkpoint, "--output", tmp_path / "out", "--pretrained", tmp_path / "moved")
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict(), weights)


# Other LightningModules


def save(module: Any, path: Path) -> Path:
    """Write a checkpoint as plain Lightning does."""
    torch.save({"state_dict": module.state_dict(), "pytorch-lightning_version": pl.__version__}, path)
    return path


def config_of(path: Path, class_name: str, **arguments: Any) -> Path:
    section = {"class_path": f"tests.checkpoint.test_export.{class_name}", "init_args": arguments}
    path.write_text(json.dumps({"model": section, "trainer": {"accelerator": "cpu"}}))  # JSON is YAML
    return path


def test_several_networks_and_what_is_beside_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = Two()
    checkpoint = save(module, tmp_path / "two.ckpt")
    config = config_of(tmp_path / "config.yaml", "Two")
    common = ("--ckpt_path", checkpoint, "--output", tmp_path / "out")
    assert "does not say which network it holds" in refusal(*common)
    said = refusal(*common, "--config", config)
    assert "'teacher' (Qwen3MoeForCausalLM), 'student' (Qwen3MoeForCausalLM)" in said
    assert "'pupil' of Two is not there" in refusal(*common, "--config", config, "--module", "pupil")
    assert "'head' of Two is a Linear" in refusal(*common, "--config", config, "--module", "head")
    export(*common, "--config", config, "--module", "student")
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict(), module.student.state_dict())
    assert "left out, because they are not in 'student': head.bias, head.weight" in capsys.readouterr().out

    said = refusal(*common, "--overwrite", "--pretrained", tmp_path / "out")
    assert "several: 'student', 'teacher'; name one with --module" in said
    export(*common, "--overwrite", "--pretrained", tmp_path / "out", "--module", "teacher")
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict(), module.teacher.state_dict())
    assert "both say which network" in refusal(*common, "--config", config, "--pretrained", tmp_path / "out")


def test_a_module_that_loads_weights_when_it_is_built(tmp_path: Path) -> None:
    hub_models.save("qwen3_moe", tmp_path / "hub")
    module = Two(str(tmp_path / "hub"))
    nn.init.ones_(module.student.lm_head.weight)
    checkpoint = save(module, tmp_path / "two.ckpt")
    config = config_of(tmp_path / "config.yaml", "Two", folder=str(tmp_path / "hub"))
    export("--ckpt_path", checkpoint, "--output", tmp_path / "out", "--config", config, "--module", "student")
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict(), module.student.state_dict())


def test_adapters_are_refused(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    module: Any = Two()
    module.student = peft.get_peft_model(module.student, peft.LoraConfig(target_modules=["q_proj"]))
    checkpoint = save(module, tmp_path / "two.ckpt")
    config = config_of(tmp_path / "config.yaml", "Two")
    said = refusal(
        *("--ckpt_path", checkpoint, "--output", tmp_path / "out", "--config", config, "--module", "student"),
    )
    assert "holds adapters of PEFT" in said
    assert "merge_and_unload()" in said
    # What is not adapted can be written.
    export("--ckpt_path", checkpoint, "--output", tmp_path / "out", "--config", config, "--module", "teacher")


# Checkpoints that cannot be written


def test_another_model_is_refused_by_name(trained: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    checkpoint, _ = trained
    other: Any = tiny.qwen3_moe(num_experts=4, num_hidden_layers=3)
    other.save_pretrained(tmp_path / "other")
    said = refusal(
        *("--ckpt_path", checkpoint, "--output", tmp_path / "out", "--pretrained", tmp_path / "other"),
    )
    assert "does not hold the weights of this Qwen3MoeForCausalLM (under 'model' in it)" in said
    assert "tensors are missing: model.layers.2.input_layernorm.weight, " in said
    assert "tensors have another shape: model.layers.0.mlp.experts.down_proj [8, 32, 16] instead of [4, 32, 16]" in said
    assert not (tmp_path / "out").exists()


def test_tied_weights_that_differ_are_refused(tmp_path: Path) -> None:
    model = hub_models.build("lfm2_moe")
    hub_models.save("lfm2_moe", tmp_path / "hub")
    checkpoint = save(nn.ModuleDict({"net": model}), tmp_path / "x.ckpt")
    common = ("--ckpt_path", checkpoint, "--output", tmp_path / "out", "--pretrained", tmp_path / "hub")
    export(*common)
    assert "lm_head.weight" not in tensors(tmp_path / "out")
    state = {f"net.{name}": tensor for name, tensor in model.state_dict().items()}
    torch.save({"state_dict": {**state, "net.lm_head.weight": state["net.lm_head.weight"] + 1}}, checkpoint)
    assert "lm_head.weight and model.embed_tokens.weight should be one tensor" in refusal(*common, "--overwrite")
    torch.save({"state_dict": {k: t for k, t in state.items() if k != "net.lm_head.weight"}}, checkpoint)
    export(*common, "--overwrite")
    assert_same(tensors(tmp_path / "out"), tensors(tmp_path / "hub"))


def _flip(folder: Path) -> str:
    file = next(folder.glob("*.distcp"))
    content = bytearray(file.read_bytes())
    manifest = json.loads((folder / "manifest.json").read_text())
    end = 0
    for name, length, _ in manifest["files"][file.name]:
        end += length
        if name.endswith("layers.1.mlp.experts.down_proj") and name.startswith(("model.", "state_dict.")):
            content[end - 5000] ^= 1
    file.write_bytes(content)
    return r"layers\.1\.mlp\.experts\.down_proj do not fit their checksum"


def _cut(folder: Path) -> str:
    file = next(folder.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-1000])
    return rf"{file.name} is damaged: it has .* bytes instead of"


def _lose(folder: Path) -> str:
    file = next(folder.glob("*.distcp"))
    file.unlink()
    return rf"{file.name} is missing"


def _lose_list(folder: Path) -> str:
    (folder / ".metadata").unlink()
    return "file .metadata is missing"


@pytest.mark.parametrize("damage", [_flip, _cut, _lose, _lose_list])
def test_damage_is_found_and_nothing_is_written(
    damage: Callable[[Path], str], trained: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    checkpoint = tmp_path / "last.ckpt"
    shutil.copytree(trained[0], checkpoint)
    pattern = damage(checkpoint)
    with pytest.raises(CheckpointError, match=pattern):
        export_checkpoint(checkpoint, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]


def test_experts_that_no_rank_has_saved_are_missed(trained: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    """A folder of torch.distributed.checkpoint alone, with half of the experts of a layer."""
    state = {f"model.{name}": tensor for name, tensor in trained[1].items()}
    checkpoint = tmp_path / "x.ckpt"
    dcp.save({"state_dict": state}, checkpoint_id=checkpoint, no_dist=True)
    torch.save({"hyper_parameters": {"pretrained": str(trained[0].parent / "hub")}}, checkpoint / "meta.pt")
    export_checkpoint(checkpoint, tmp_path / "out")
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict(), trained[1])

    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    name = "state_dict.model.model.layers.1.mlp.experts.down_proj"
    (chunk,) = metadata.state_dict_metadata[name].chunks
    chunk.sizes = torch.Size([4, *chunk.sizes[1:]])
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"lacks a part of .*layers.1.mlp.experts.down_proj .* from 0 to 3"):
        export_checkpoint(checkpoint, tmp_path / "out2")
    assert not (tmp_path / "out2").exists()


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    common = ("--output", tmp_path / "out")
    assert "no checkpoint is there" in refusal("--ckpt_path", tmp_path / "none", *common)
    (tmp_path / "folder").mkdir()
    assert "is a folder, but no checkpoint" in refusal("--ckpt_path", tmp_path / "folder", *common)
    (tmp_path / "text").write_text("words")
    assert "is no checkpoint" in refusal("--ckpt_path", tmp_path / "text", *common)
    torch.save({"state_dict": tiny.qwen3_moe().state_dict(), "hyper_parameters": {"path": HubFolder}}, tmp_path / "x")
    assert "HubFolder" in refusal("--ckpt_path", tmp_path / "x", *common)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "text", "x"]


# Options and places


def test_options_that_cannot_be_used(trained: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    common = ("--ckpt_path", trained[0], "--output", tmp_path / "out")
    assert "--output" in refusal("--ckpt_path", trained[0])
    assert "invalid choice: 'int8'" in refusal(*common, "--dtype", "int8")
    assert "max_shard_size='much'" in refusal(*common, "--max_shard_size", "much")
    assert "the network of CausalLM is 'model'" in refusal(*common, "--module", "net")
    assert "tokenizer nowhere does not exist" in refusal(*common, "--tokenizer", "nowhere")
    assert "holds no tokenizer's files" in refusal(*common, "--tokenizer", tmp_path)
    assert "must be a folder with a config.json" in refusal(*common, "--pretrained", tmp_path)
    assert "does not exist" in refusal(*common, "--config", "nowhere.yaml")
    assert not list(tmp_path.iterdir())


def test_no_space_ahead_and_on_the_way(
    trained: tuple[Path, dict[str, Tensor]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, weights = trained
    common = ("--ckpt_path", checkpoint, "--output", tmp_path / "out")
    export(*common)
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
        said = refusal(*common, "--overwrite")
    assert "no space left for output" in said
    assert "1 KB are free" in said
    with monkeypatch.context() as patch:
        write, calls = SafetensorsFile.write, []

        def full(self: SafetensorsFile, name: str, tensor: Tensor) -> None:
            calls.append(name)
            if len(calls) > 20:
                raise OSError(28, "No space left on device")
            write(self, name, tensor)

        patch.setattr(SafetensorsFile, "write", full)
        assert "No space left on device" in refusal(*common, "--overwrite", "--max_shard_size", "20KB")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict(), weights)


def test_an_end_from_outside_leaves_nothing(
    trained: tuple[Path, dict[str, Tensor]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(self: SafetensorsFile, name: str, tensor: Tensor) -> None:
        assert [path.name for path in tmp_path.iterdir()] == [".out.partial"]
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(SafetensorsFile, "write", write)
    with pytest.raises(SystemExit) as stopped:
        main(["--ckpt_path", str(trained[0]), "--output", str(tmp_path / "out")])
    assert stopped.value.code == 128 + signal.SIGTERM
    assert not list(tmp_path.iterdir())


# Memory


def _peak(root: str) -> tuple[int, int, int]:
    """Bytes that an export takes beside what the process has, those of the largest tensor, and those of the model."""
    sizes: list[int] = []
    for name, layers in (("small", 1), ("large", 12)):
        config = causal.config(num_hidden_layers=layers, num_experts=32, hidden_size=128, moe_intermediate_size=128)
        config.architectures = ["Qwen3MoeForCausalLM"]
        config.save_pretrained(f"{root}/{name}")
        with torch.device("meta"):
            model = Qwen3MoeForCausalLM(config)
        state = {f"net.{key}": torch.zeros(tensor.shape) for key, tensor in model.state_dict().items()}
        dcp.save({"state_dict": state}, checkpoint_id=f"{root}/{name}.ckpt", no_dist=True)
        torch.save({}, f"{root}/{name}.ckpt/meta.pt")
        sizes = [tensor.nbytes for tensor in state.values()]
        del state
        before = _memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here on; the first time is for imports
        export(
            *("--ckpt_path", f"{root}/{name}.ckpt", "--output", f"{root}/{name}-out", "--pretrained", f"{root}/{name}")
        )
    return _memory("VmHWM") - before, max(sizes), sum(sizes)


def _memory(line: str) -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(entry.split()[1]) * 1024 for entry in status if entry.startswith(line))


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from /proc")
def test_memory_is_bounded_by_the_largest_tensor(tmp_path: Path) -> None:
    ((peak, largest, model),) = run_ranks(_peak, 1, str(tmp_path))
    assert model > 15 * largest
    # The tensor, the part of it that is read from a file, and what it becomes; and what the interpreter takes.
    assert peak < 4 * largest + 8e6, f"{peak / 1e6:.1f} MB, with {largest / 1e6:.1f} MB in the largest tensor"
