"""Folders in the format of the Hugging Face hub: a tiny model of every way in which experts are laid out.

``FAMILIES`` has one family of each layout; :func:`save` writes its model as ``save_pretrained`` does.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests import families, tiny
from tests.experts import test_undecorated as undecorated
from tests.families import Family

# What lies in the files, and what it is in the model.
LAYOUTS: dict[str, str] = {
    "qwen3_moe": "one tensor an expert: stacked, gate and up joined",
    "mixtral": "the same under the names w1, w2, w3, in a block of another name",
    "deepseek_v3": "the same, a correction bias in float32, a dense layer, shared experts",
    "glm4_moe": "the same, a correction bias, shared experts",
    "gpt_oss": "stacked, transposed, gate and up interleaved, biases",
    "nemotron_h": "no gate; layers of other kinds between those with experts",
    "granitemoe": "stacked, gate and up joined",
    "dbrx": "experts one below the other in matrices",
    "ernie4_5_vl_moe": "experts for text and for images in one list, of different widths",
    "lfm2_moe": "one tensor an expert; embeddings tied to the head",
    "inkling": "interleaved in the files, joined in the model",
}
# Its head has two names that are one tensor.
TIED = "lfm2_moe"
BIG: dict[str, Any] = {
    **tiny.QWEN3_MOE,
    "vocab_size": 8192,
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 256,
    "num_experts": 16,
    "num_hidden_layers": 6,
}


@functools.cache
def family(name: str) -> Family:
    """The family of a layout."""
    return next(entry for entry in families.FAMILIES if entry.directory == name)


def build(name: str, **config: Any) -> Any:
    """Build the model of a layout, with the same weights every time."""
    if name != "dbrx":
        entry = family(name)
        return dataclasses.replace(entry, config={**entry.config, **config}).build()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return undecorated.dbrx()


def save(name: str, folder: Path, dtype: torch.dtype = torch.float32, shard: str = "50GB", **config: Any) -> Any:
    """Write the model of a layout into a folder in the format of the hub.

    Args:
        name: The layout.
        folder: The folder.
        dtype: Dtype of the parameters in the files.
        shard: The most that one file holds, as Transformers takes it.
        **config: Fields of the configuration that are not those of the family.

    Returns:
        The model as it is in the files.
    """
    model = build(name, **config)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.save_pretrained(folder, max_shard_size=shard)
    return model


def save_big(folder: Path) -> nn.Module:
    """Write a Qwen3-MoE of some 90 MiB, in several files."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = tiny.qwen3_moe(**BIG)
    model.save_pretrained(folder, max_shard_size="20MB")  # type: ignore[operator]
    return model


def tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors in the safetensors files of a folder."""
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Names, dtypes and bytes are equal."""
    assert found.keys() == expected.keys()
    different = [n for n, t in expected.items() if found[n].dtype != t.dtype or not torch.equal(found[n], t)]
    assert not different
