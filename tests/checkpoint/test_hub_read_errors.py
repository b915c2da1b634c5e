"""What is wrong with a folder in the hub format is an error that names it, on every rank."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_moe.checkpoint import load_pretrained
from lightning_moe.checkpoint.safetensors_files import StoredFolder
from lightning_moe.models import CausalLM
from tests import tiny
from tests.checkpoint import hub_models
from tests.checkpoint.test_hub_read import Hub, differences, set_up
from tests.harness import run_ranks_expecting_error


def rewrite(folder: Path, change: Any) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


EXPERTS = "model.layers.1.mlp.experts"


def lose_one_expert(folder: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        for name in ("gate_proj", "up_proj", "down_proj"):
            del tensors[f"{EXPERTS}.2.{name}.weight"]

    rewrite(folder, change)


def lose_part_of_an_expert(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.pop(f"{EXPERTS}.2.up_proj.weight"))


def rename_an_expert(folder: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        for name in ("gate_proj", "up_proj", "down_proj"):
            tensors[f"{EXPERTS}.8.{name}.weight"] = tensors.pop(f"{EXPERTS}.2.{name}.weight")

    rewrite(folder, change)


def cut_short(folder: Path) -> None:
    file = folder / "model.safetensors"
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size - 1)


def pickles_only(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def index_names_a_missing_file(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    where = {
        "lm_head.weight": "model-00002-of-00002.safetensors",
        "model.norm.weight": "model-00001-of-00002.safetensors",
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


def index_names_a_missing_tensor(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    where = {"model.other.weight": "model-00001-of-00001.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


def remove(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))


def overwrite(content: bytes) -> Any:
    return lambda folder: (folder / "model.safetensors").write_bytes(content)


HEADER = b'{"lm_head.weight": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 4]}}'
DAMAGE: dict[str, tuple[Any, str]] = {
    "no folder": (remove, r"does not exist; name a folder.*hf download"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), r"holds no safetensors files"),
    "pickles only": (
        pickles_only,
        r"only as 'pytorch_model\.bin', which are pickles.*Convert them once.*save_pretrained",
    ),
    "missing file": (index_names_a_missing_file, r"lacks 1 of the 2 files .* model-00002-of-00002"),
    "missing in its file": (
        index_names_a_missing_tensor,
        r"00001\.safetensors holds 'model\.other\.weight', which it does not",
    ),
    "cut short": (cut_short, r"model\.safetensors is cut short: 'model\.norm\.weight' ends at byte"),
    "pointer": (overwrite(b"version https://git-lfs.github.com/spec/v1"), r"pointer of Git LFS: run `git lfs pull`"),
    "empty": (overwrite(b""), r"model\.safetensors is no whole safetensors file: it is empty"),
    "no file of the kind": (overwrite(b"PK\x03\x04" * 9), r"no whole safetensors file: it was cut short, or is"),
    "damaged header": (overwrite(len(HEADER).to_bytes(8, "little") + HEADER), r"damaged header.*'lm_head\.weight' of"),
    "missing expert": (lose_one_expert, rf"'{EXPERTS}\.2\.gate_proj\.weight' missing in "),
    "half an expert": (lose_part_of_an_expert, rf"'{EXPERTS}\.2\.up_proj\.weight' missing in "),
    "wrong number": (rename_an_expert, rf"'{EXPERTS}\.2\.down_proj\.weight' missing in "),
    "wrong shape": (
        lambda folder: rewrite(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(3)})),
        r"'model\.norm\.weight' has the shape \[32\] in the model, and \[3\] there \(.*in model\.safetensors\)",
    ),
    "wrong shape of one expert": (
        lambda folder: rewrite(
            folder, lambda tensors: tensors.update({f"{EXPERTS}.2.up_proj.weight": torch.ones(3, 32)})
        ),
        rf"'{EXPERTS}\.gate_up_proj' cannot be made of '{EXPERTS}\.0\.gate_proj\.weight'",
    ),
    "other numbers": (
        lambda folder: rewrite(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(32).int()})),
        r"'model\.norm\.weight' is int32 there",
    ),
    "missing": (
        lambda folder: rewrite(folder, lambda tensors: tensors.pop("model.norm.weight")),
        r"1 tensors of the model are missing there: 'model\.norm\.weight'.*strict=False takes what fits",
    ),
    "unexpected": (
        lambda folder: rewrite(folder, lambda tensors: tensors.update({"value_head.weight": torch.ones(3)})),
        r"1 tensors there have no place in the model: 'value_head\.weight'.*strict=False takes what fits",
    ),
    "twice": (
        lambda folder: rewrite(folder, lambda tensors: tensors.update({"norm.weight": torch.ones(32)})),
        r"'model\.norm\.weight' is in the folder twice, as 'model\.norm\.weight' and as 'norm\.weight'",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_wrong_is_named_and_nothing_is_changed(damage: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    model = hub_models.save("qwen3_moe", folder)
    change, message = DAMAGE[damage]
    change(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        load_pretrained(model, folder)
    assert all(bool((parameter == 7).all()) for parameter in model.parameters())


def test_another_model_or_number_of_experts(tmp_path: Path) -> None:
    hub_models.save("qwen3_moe", tmp_path)
    with pytest.raises(
        ValueError, match=r"does not fit MixtralForCausalLM.*missing there.*says model_type='qwen3_moe', and"
    ):
        load_pretrained(hub_models.build("mixtral"), tmp_path)
    fewer = hub_models.build("qwen3_moe", num_experts=4)
    with pytest.raises(
        ValueError, match=r"gate_up_proj' has the shape \[4, 32, 32\] in the model, and \[8, 32, 32\] there"
    ):
        load_pretrained(fewer, tmp_path)


def test_the_module_must_be_clear(tmp_path: Path) -> None:
    model = hub_models.save("qwen3_moe", tmp_path)
    both = nn.ModuleDict({"student": model, "teacher": hub_models.build("qwen3_moe")})
    with pytest.raises(ValueError, match=r"holds 2 models of Transformers \('student', 'teacher'\); say which one"):
        load_pretrained(both, tmp_path)
    with pytest.raises(ValueError, match=r"prefix='pupil' is no submodule of ModuleDict; its children are 'student'"):
        load_pretrained(both, tmp_path, prefix="pupil")
    assert load_pretrained(both, tmp_path, prefix="teacher").tensors == len(model.state_dict())
    assert not differences(both["teacher"], model)
    save_file(nn.Linear(2, 2).state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"tensors of '0' inside, so give prefix='0'"):
        load_pretrained(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 9)), tmp_path)


def test_other_strategies_cannot_wait(tmp_path: Path) -> None:
    model = hub_models.save("qwen3_moe", tmp_path)
    module = Hub(type(model), model.config, tmp_path)
    with pytest.raises(NotImplementedError) as caught:  # raised by Lightning's teardown, in the wake of
        tiny.trainer(max_steps=1).fit(module, DataLoader([torch.zeros(1)]))
    assert "only strategy='moe_ep' reads its weights later" in str(caught.value.__context__)


class Spoilt(Hub):
    """The files of one rank are gone, or are cut short once their headers were read."""

    def __init__(self, folder: str, when: str) -> None:
        model = hub_models.build("qwen3_moe")
        super().__init__(type(model), model.config, folder, strict=when != "others")
        self.when = when if os.environ["RANK"] == "1" else ""

    def configure_model(self) -> None:
        if self.when:
            self.folder = Path(self.folder, "of_one_rank")
        if self.when in ("weights", "others"):
            self.folder.mkdir()
            (self.folder / "model.safetensors").write_bytes((self.folder.parent / "model.safetensors").read_bytes())
        if self.when == "others":
            rewrite(self.folder, lambda tensors: tensors.pop("model.norm.weight"))
        super().configure_model()
        if self.when == "weights":
            cut_short(self.folder)


def read_spoilt(folder: str, when: str) -> None:
    set_up(Spoilt(folder, when), expert_parallel_size=2)


@pytest.mark.parametrize(
    ("when", "words"),
    [
        ("headers", "does not exist"),
        ("weights", "was replaced or changed"),
        ("others", "rank 1 sees other tensors"),
    ],
)
def test_what_one_rank_cannot_read_is_an_error_on_every_rank(when: str, words: str, tmp_path: Path) -> None:
    hub_models.save("qwen3_moe", tmp_path)
    first, second = run_ranks_expecting_error(read_spoilt, 2, str(tmp_path), when, timeout=60)
    assert words in second
    assert "failed on rank 1" in first or when == "others"
    assert words in first


def damaged(header: dict[str, Any] | str, data: int = 16) -> Any:
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    return overwrite(len(text).to_bytes(8, "little") + text + bytes(data))


def entry(start: Any, stop: Any, shape: Any = (2,), dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


@pytest.mark.parametrize(
    "write",
    [
        damaged({"a": entry(0, 8), "b": entry(4, 12)}, 12),  # overlapping
        damaged({"a": entry(0, 8), "b": entry(0, 8)}, 8),  # the same bytes twice
        damaged({"a": entry(0, 8), "b": entry(12, 20)}, 20),  # a hole between
        damaged({"a": entry(0, 8), "b": entry(4, 12), "c": entry(16, 24)}, 24),  # both, so that the sum is right
        damaged({"a": entry(0, 8)}, 9),  # something behind
        damaged("{" + ", ".join([f'"a": {json.dumps(entry(0, 8))}'] * 2) + "}", 8),  # a name twice
        damaged({"a": entry(0, 8, [2.0])}, 8),
        damaged({"a": entry(0.0, 8.0)}, 8),
        damaged({"a": entry(0, 0, [], "F4")}, 0),
        damaged("[" * 100_000, 0),
    ],
)
def test_a_header_that_lies_is_not_believed(write: Any, tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(ValueError, match=r"model\.safetensors has a damaged header"):
        StoredFolder.open(tmp_path)


def test_an_index_that_is_none_is_named(tmp_path: Path) -> None:
    hub_models.save("qwen3_moe", tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "model-00001-of-00001.safetensors")
    for text in ("{", "{}", "[1]", '{"weight_map": [1]}', '{"weight_map": {"a": 3}}', '{"weight_map": {"a": ".."}}'):
        (tmp_path / "model.safetensors.index.json").write_text(text)
        with pytest.raises(ValueError, match=r"pretrained=.*model\.safetensors\.index\.json"):
            CausalLM(pretrained=str(tmp_path))
