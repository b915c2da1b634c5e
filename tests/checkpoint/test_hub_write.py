"""What is written in the hub's format is what Transformers itself writes, from whole and from sharded models."""

import json
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from lightning_moe.checkpoint import save_pretrained
from lightning_moe.checkpoint.hub_plan import Entry, HubPlan, saved_tensors
from lightning_moe.checkpoint.hub_write import (
    Files,
    HubFolder,
    SafetensorsFile,
    divide,
    file_names,
    parse_size,
    write_index,
)
from lightning_moe.checkpoint.network import meta_twin
from tests import tiny
from tests.checkpoint import hub_models
from tests.checkpoint.hub_models import assert_same, tensors
from tests.experts import test_undecorated as undecorated
from tests.families import FAMILIES, Family
from tests.harness import run_ranks, run_ranks_expecting_error

# Experts that are modules of their own, and experts beside some that compute nothing.
UNDECORATED = ["switch_transformers", "longcat_flash"]


class Wrapped(pl.LightningModule):
    """A user's LightningModule around a network, with a layer beside it."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.other = nn.Linear(1, 1)

    def training_step(self, batch: Any, index: int) -> Tensor:
        raise AssertionError("these tests do not train")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def build(name: str) -> Any:
    """Build one of the models, with the same weights every time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return undecorated.BUILDERS[name]() if name in UNDECORATED else hub_models.build(name)


def set_up(module: pl.LightningModule, **options: Any) -> pl.Trainer:
    """Shard a module as ``fit`` does, and train for no step."""
    trainer = tiny.trainer(tiny.moe_ep(**options), int(os.environ["WORLD_SIZE"]), max_steps=0)
    trainer.fit(module, tiny.loader(tiny.tokens(1)))
    return trainer


# The plan


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_tensors_converted_in_pieces_are_those_that_transformers_converts_at_once(family: Family) -> None:
    model: Any = family.build()
    state = model.state_dict()
    drawn = torch.get_rng_state()
    twin = meta_twin(model)
    assert all(tensor.is_meta for tensor in twin.state_dict().values())
    assert torch.equal(torch.get_rng_state(), drawn)  # a run that is saved draws the numbers that it would have drawn

    plan = HubPlan(twin, {name: tensor.dtype for name, tensor in state.items()})
    found: dict[str, Tensor] = {}
    for group in plan.groups:
        made = dict(plan.convert(group, {key: state[key] for key in group.keys}))
        assert {Entry(n, tuple(t.shape), t.dtype) for n, t in made.items()} == set(group.entries)
        assert not found.keys() & made.keys()
        found |= made

    untied = remove_tied_weights_from_state_dict(dict(state), model)
    assert saved_tensors(twin).keys() == untied.keys()
    assert_same(found, revert_weight_conversion(model, untied))
    assert plan.nbytes == sum(tensor.nbytes for tensor in found.values())


@pytest.mark.parametrize("name", ["qwen3_moe", "nemotron_h", "mixtral"])
def test_rows_of_stacked_experts_are_converted_alone(name: str) -> None:
    model = hub_models.build(name)
    state = model.state_dict()
    plan = HubPlan(meta_twin(model), {key: tensor.dtype for key, tensor in state.items()})
    stacked = [group for group in plan.groups if group.rows]
    assert {key.rpartition(".")[2] for group in stacked for key in group.keys} <= {
        "gate_up_proj", "up_proj", "down_proj"
    }  # fmt: skip
    assert stacked
    for group in stacked:
        (key,) = group.keys
        whole = dict(plan.convert(group, {key: state[key]}))
        parts: dict[str, Tensor] = {}
        for first, count in ((0, 1), (1, 2), (3, group.rows - 3)):
            part = dict(plan.convert(group, {key: state[key][first : first + count]}, first))
            assert {entry.name for entry in group.entries_of(first, count)} == part.keys()
            parts |= part
        assert_same(parts, whole)


def test_stacked_formats_have_no_rows() -> None:
    for name in ("gpt_oss", "granitemoe"):
        model = hub_models.build(name)
        plan = HubPlan(meta_twin(model), {key: tensor.dtype for key, tensor in model.state_dict().items()})
        assert not [group for group in plan.groups if group.rows]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_dtype_leaves_what_transformers_keeps_in_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    model = hub_models.save("deepseek_v3", tmp_path / "hub")
    AutoModelForCausalLM.from_pretrained(tmp_path / "hub", dtype=dtype).save_pretrained(tmp_path / "cast")
    state = model.state_dict()
    plan = HubPlan(meta_twin(model), {name: tensor.dtype for name, tensor in state.items()}, dtype)
    found = {n: t for g in plan.groups for n, t in plan.convert(g, {key: state[key] for key in g.keys})}
    assert_same(found, tensors(tmp_path / "cast"))
    assert {tensor.dtype for tensor in found.values()} == {dtype, torch.float32}
    assert plan.dtype == dtype


# Files


def test_a_file_takes_its_tensors_in_any_order(tmp_path: Path) -> None:
    values = {
        "flag": torch.tensor([True, False, True]),
        "half": torch.randn(3, 5).bfloat16(),
        "scalar": torch.tensor(4.5),
        "empty": torch.empty(0, 7),
        "double": torch.randn(2, 2, dtype=torch.float64),
        "transposed": torch.randn(4, 3).t(),
        "float8": torch.randn(5).to(torch.float8_e4m3fn),
        "count": torch.arange(3),
        "complex": torch.randn(2, dtype=torch.complex64),
    }
    file = SafetensorsFile(tmp_path / "x.safetensors", [Entry(n, tuple(t.shape), t.dtype) for n, t in values.items()])
    for name in reversed(values):
        file.write(name, values[name])
    file.close()
    assert (tmp_path / "x.safetensors").stat().st_size == file.size
    found = load_file(tmp_path / "x.safetensors")
    assert found.keys() == values.keys()
    for name, value in values.items():
        assert found[name].dtype == value.dtype
        assert found[name].shape == value.shape
        assert torch.equal(found[name].to(torch.complex128), value.to(torch.complex128))
    with safe_open(tmp_path / "x.safetensors", "pt") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_a_file_takes_nothing_but_its_tensors(tmp_path: Path) -> None:
    entries = [Entry("a", (2,), torch.float32), Entry("b", (2,), torch.float32)]
    file = SafetensorsFile(tmp_path / "x.safetensors", entries)
    with pytest.raises(ValueError, match=r"a is \[3\] torch.float32, its place is for \[2\] torch.float32"):
        file.write("a", torch.zeros(3))
    with pytest.raises(RuntimeError, match="lacks b"):
        file.close()
    with pytest.raises(ValueError, match="c: safetensors files cannot hold"):
        SafetensorsFile(tmp_path / "y.safetensors", [Entry("c", (1,), torch.complex128)])


def test_tensors_are_divided_into_files_and_indexed(tmp_path: Path) -> None:
    entries = [Entry(f"t{i}", (size,), torch.uint8) for i, size in enumerate((4, 6, 1, 12, 3))]
    parts = divide(entries, 10)
    assert [[entry.name for entry in part.entries] for part in parts] == [["t0", "t1"], ["t2"], ["t3"], ["t4"]]
    assert file_names(1) == ["model.safetensors"]
    assert file_names(2) == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    files = Files(tmp_path, parts)
    for entry in entries:
        files.write(entry.name, torch.full(entry.shape, 7, dtype=entry.dtype))
    files.close()
    write_index(tmp_path, parts, 26)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 26, "total_parameters": 26}
    for name, file in index["weight_map"].items():
        assert name in load_file(tmp_path / file)
    assert index["weight_map"].keys() == {entry.name for entry in entries}
    write_index(tmp_path / "none", parts[:1], 10)  # one file needs no index, and no folder for it


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("5GB", 5 * 10**9), ("1.5 MB", 1_500_000), ("2gib", 2**31), (7, 7), ("12", 12), ("30KB", 30000)],
)
def test_sizes(text: int | str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["5 apples", "", "-1GB", "0", 0, "GB", True])
def test_wrong_sizes(text: Any) -> None:
    with pytest.raises(ValueError, match=r"max_shard_size=.* must be a positive size"):
        parse_size(text)


# The folder


def _make(folder: Path, *names: str) -> Path:
    folder.mkdir()
    for name in names:
        (folder / name).write_text("old")
    return folder


def test_a_folder_is_there_once_it_is_whole(tmp_path: Path) -> None:
    output = tmp_path / "deep" / "model"
    with HubFolder(output) as folder:
        (folder.partial / "config.json").write_text("new")
        assert not output.exists()
        folder.finish()
    assert [path.name for path in output.iterdir()] == ["config.json"]
    assert [path.name for path in output.parent.iterdir()] == ["model"]


def test_a_failure_leaves_no_folders_around(tmp_path: Path) -> None:
    def fail() -> None:
        with HubFolder(tmp_path / "deep" / "deeper" / "model"):
            raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        fail()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("there", [(), ("config.json", "model.safetensors", "tokenizer.json", ".gitattributes")])
def test_a_failure_leaves_what_was_there(there: tuple[str, ...], tmp_path: Path) -> None:
    output = _make(tmp_path / "model", *there)

    def fail() -> None:
        with HubFolder(output, overwrite=True) as folder:
            (folder.partial / "config.json").write_text("new")
            raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        fail()
    assert {path.name: path.read_text() for path in output.iterdir()} == dict.fromkeys(there, "old")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_model_is_replaced_only_when_asked(tmp_path: Path) -> None:
    output = _make(tmp_path / "model", "config.json", "model-00001-of-00002.safetensors")
    with pytest.raises(FileExistsError, match=r"is not empty \(it holds config.json, .*add --overwrite"):
        HubFolder(output)
    (tmp_path / ".model.partial").mkdir()  # of a run that was killed
    with HubFolder(output, overwrite=True) as folder:
        assert not list(folder.partial.iterdir())
        (folder.partial / "config.json").write_text("new")
        folder.finish()
    assert {path.name: path.read_text() for path in output.iterdir()} == {"config.json": "new"}
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("mine", ["README.md", "LICENSE", "train.py"])
def test_what_a_user_has_put_beside_a_model_is_not_replaced(mine: str, tmp_path: Path) -> None:
    with pytest.raises(FileExistsError, match=rf"holds {mine} beside a model"):
        HubFolder(_make(tmp_path / "model", "config.json", "model.safetensors", mine), overwrite=True)


def test_the_source_of_a_network_is_a_part_of_its_model(tmp_path: Path) -> None:
    output = _make(tmp_path / "model", "config.json", "model.safetensors", "modeling_mine.py")
    (output / "config.json").write_text('{"auto_map": {"AutoModelForCausalLM": "modeling_mine.Mine"}}')
    with HubFolder(output, overwrite=True) as folder:
        (folder.partial / "config.json").write_text("{}")
        folder.finish()
    assert [path.name for path in output.iterdir()] == ["config.json"]


def test_nothing_but_a_model_is_replaced(tmp_path: Path) -> None:
    home = _make(tmp_path / "home", "config.json", "thesis.tex")
    with pytest.raises(FileExistsError, match=r"holds thesis.tex beside a model, which --overwrite would remove"):
        HubFolder(home, overwrite=True)
    files = _make(tmp_path / "files", "tokenizer.json")
    with pytest.raises(FileExistsError, match=r"holds no config.json"):
        HubFolder(files, overwrite=True)
    (tmp_path / "link").symlink_to(home)
    with pytest.raises(FileExistsError, match="exists and is no folder"):
        HubFolder(tmp_path / "link", overwrite=True)
    with pytest.raises(NotADirectoryError, match=r"would lie in .*tokenizer.json, which is a file"):
        HubFolder(files / "tokenizer.json" / "model")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_no_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(PermissionError, match="no permission to create anything in"):
        HubFolder(tmp_path / "model")


# Sharded models


def _write_all(root: str, names: list[str], options: dict[str, Any]) -> list[dict[str, int]]:
    """Write a model of each name from its shards; the files that this rank had open, with their sizes."""
    mine = []
    for name in names:
        model: Any = build(name)
        module = Wrapped(model)
        set_up(module, **options)
        mine.append(_recording(Path(root) / name, module))
    return mine


def _recording(folder: Path, module: nn.Module) -> dict[str, int]:
    written: dict[str, int] = {}

    class Recorded(SafetensorsFile):
        def __init__(self, path: Path, entries: Any) -> None:
            super().__init__(path, entries)
            written[path.name] = sum(".experts." in entry.name for entry in entries)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_moe.checkpoint.hub_write.SafetensorsFile", Recorded)
        save_pretrained(module, folder, max_shard_size="30KB")
    return written


# Tensors of 2 layers with 8 experts of 3 tensors each, by rank; expert-parallel ranks divide experts, replicas do not.
SHARES = {(2, 2): [24, 24], (4, 2, 2): [0, 0, 24, 24], (4, 2): [12, 12, 12, 12], (3, 3): [12, 18, 18]}


@pytest.mark.parametrize(
    ("world", "options"),
    [
        (2, {"expert_parallel_size": 2}),
        (4, {"expert_parallel_size": 2, "replicate_size": 2}),
        (4, {"expert_parallel_size": 2}),
        (3, {"expert_parallel_size": 3}),
    ],
)
def test_sharded_models_are_written_as_transformers_writes_the_whole(
    world: int, options: dict[str, int], tmp_path: Path
) -> None:
    names = [*hub_models.LAYOUTS, *UNDECORATED] if world == 2 else ["qwen3_moe", "gpt_oss"]
    written = run_ranks(_write_all, world, str(tmp_path), names, options)
    for position, name in enumerate(names):
        build(name).save_pretrained(tmp_path / "transformers" / name)
        assert_same(tensors(tmp_path / name), tensors(tmp_path / "transformers" / name))
        for file in ("config.json", "generation_config.json"):
            theirs = tmp_path / "transformers" / name / file
            assert theirs.exists() == (tmp_path / name / file).exists()
            if theirs.exists():
                assert json.loads((tmp_path / name / file).read_text()) == json.loads(theirs.read_text())
        files = [set(of_rank[position]) for of_rank in written]
        assert sum(map(len, files)) == len(set().union(*files)) == len(list((tmp_path / name).glob("*.safetensors")))
        assert all(files[:2])
    # Of experts that have tensors of their own each rank has written its own, and not one rank all.
    experts = sorted(sum(of_rank[names.index("qwen3_moe")].values()) for of_rank in written)
    assert experts == SHARES[world, *options.values()]


def _fail_on_rank_1(root: str) -> None:
    module = Wrapped(hub_models.build("qwen3_moe"))
    set_up(module, expert_parallel_size=2)
    if module.global_rank == 1:

        def write(self: Any, name: str, tensor: Tensor) -> None:
            raise OSError(28, "No space left on device")

        SafetensorsFile.write = write  # type: ignore[method-assign]
    save_pretrained(module, Path(root) / "model", max_shard_size="30KB")


def test_a_rank_that_cannot_write_stops_all_and_leaves_nothing(tmp_path: Path) -> None:
    first, second = run_ranks_expecting_error(_fail_on_rank_1, 2, str(tmp_path))
    assert "No space left on device" in second
    assert "failed on rank 1: No space left on device" in first
    assert not list(tmp_path.iterdir())


def test_one_process_without_a_strategy(tmp_path: Path) -> None:
    model = hub_models.build("lfm2_moe")
    save_pretrained(Wrapped(model), tmp_path / "model", dtype=torch.bfloat16)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert loaded.dtype == torch.bfloat16
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    whole = {name: tensor.to(loaded.state_dict()[name].dtype) for name, tensor in model.state_dict().items()}
    assert_same(loaded.state_dict(), whole)


def test_what_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Linear holds 0 models of Transformers; only those have"):
        save_pretrained(nn.Linear(2, 2), tmp_path / "model")
    two = nn.ModuleDict({"teacher": tiny.qwen3_moe(), "student": tiny.qwen3_moe()})
    with pytest.raises(ValueError, match=r"holds 2 models .* name one .*'teacher' \(Qwen3MoeForCausalLM\), 'student'"):
        save_pretrained(two, tmp_path / "model")
    with pytest.raises(ValueError, match="module 'pupil' of ModuleDict is not there; models of Transformers in it"):
        save_pretrained(two, tmp_path / "model", name="pupil")
    save_pretrained(two, tmp_path / "model", name="student")
    with pytest.raises(FileExistsError, match="is not empty"):
        save_pretrained(two, tmp_path / "model", name="student")
    changed = tiny.qwen3_moe()
    changed.lm_head = nn.Linear(32, 80, bias=False)
    with pytest.raises(ValueError, match=r"not what its configuration says.*lm_head.weight \[80, 32\] instead of \[64"):
        save_pretrained(changed, tmp_path / "changed")
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(tiny.qwen3_moe(), peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(NotImplementedError, match=r"net.base_model.model holds adapters of PEFT .*merge_and_unload"):
        save_pretrained(nn.ModuleDict({"net": adapted}), tmp_path / "adapted")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
