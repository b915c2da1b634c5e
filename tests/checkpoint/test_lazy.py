"""Any part of what operations make of stored tensors, read without the rest, is that part of what they make of all."""

import random
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from lightning_moe.checkpoint.lazy import Lazy, Stored
from lightning_moe.checkpoint.safetensors_files import Reader, StoredFolder

Tensors = Mapping[str, Tensor]


def stacked(tensors: Tensors) -> Tensor:
    gates, ups = (torch.stack([tensors[f"{kind}{i}"] for i in range(4)]) for kind in ("gate", "up"))
    return torch.cat([gates, ups], dim=1)


def interleaved(tensors: Tensors, dim: int = 1) -> Tensor:
    return tensors["cube"].reshape(6, 4, 2, 10).transpose(1, 2).reshape(6, 8, 10).contiguous()


def dequantized(tensors: Tensors) -> Tensor:
    blocks = tensors["matrix"].float().reshape(-1, 4, 12, 5, 2)
    scales = torch.arange(20.0).reshape(-1, 4, 5).unsqueeze(-1).unsqueeze(2)
    return (blocks * scales).to(torch.bfloat16).reshape(48, 10)


OPERATIONS: dict[str, Callable[[Tensors], Tensor]] = {
    "stored": lambda t: t["cube"],
    "one number": lambda t: t["number"],
    "stacked and joined": stacked,
    "transposed": lambda t: stacked(t).transpose(1, 2).contiguous(),
    "interleaved": interleaved,
    "half of interleaved": lambda t: torch.chunk(interleaved(t), 2, dim=1)[1].contiguous(),
    "permuted for rotation": lambda t: t["matrix"].view(4, 6, 2, 10).transpose(1, 2).reshape(48, 10),
    "a vector permuted": lambda t: t["vector"].view(2, 4, 2).transpose(1, 2).reshape(16),
    "every second row": lambda t: torch.cat([t["matrix"][:, :5], t["matrix"][:, 5:]], dim=1)[::2],
    "rows by index": lambda t: t["matrix"][[3, 1, 2]],
    "split": lambda t: torch.split(t["matrix"], [8, 40])[1],
    "one of many": lambda t: t["cube"].unbind(0)[3] + t["cube"][-1],
    "other dimensions": lambda t: t["cube"].permute(2, 0, 1).reshape(-1, 4, 2).unsqueeze(1).squeeze(1).flatten(0, 1),
    "dequantized": dequantized,
    "other dtype": lambda t: (t["half"].to(torch.float32) * t["vector"][:10] + 1).exp().to(torch.bfloat16),
    "other view of the bytes": lambda t: t["cube"].view(torch.int32),
    "reduced": lambda t: t["cube"].mean(1),
    "with a constant": lambda t: torch.cat([t["matrix"], torch.zeros(2, 10)]),
}


@pytest.fixture(scope="module")
def tensors(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The same tensors in memory and in a file."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"cube": (6, 8, 10), "half": (6, 8, 10), "matrix": (48, 10), "vector": (16,), "number": ()}
    shapes |= {f"{kind}{i}": (5, 7) for kind in ("gate", "up") for i in range(4)}
    made = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    made["half"] = made["half"].bfloat16()
    folder = tmp_path_factory.mktemp("lazy")
    save_file(made, folder / "model.safetensors")
    return made, {name: Lazy(Stored(tensor)) for name, tensor in StoredFolder.open(folder).tensors.items()}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_any_part_is_that_of_the_whole(operation: str, tensors: tuple[Tensors, Tensors]) -> None:
    there, later = tensors
    wanted, lazy = OPERATIONS[operation](there), OPERATIONS[operation](later)
    assert isinstance(lazy, Lazy)
    assert (lazy.shape, lazy.dtype) == (wanted.shape, wanted.dtype)
    chance = random.Random(0)
    for _ in range(40):
        window = [(0, size) for size in wanted.shape]
        for dim, size in enumerate(wanted.shape):
            if chance.random() < 0.6:
                start = chance.randint(0, size)
                window[dim] = (start, chance.randint(start, size))
        part = wanted[tuple(slice(*span) for span in window)]
        turned = torch.empty(part.shape[::-1], dtype=part.dtype).permute(tuple(reversed(range(part.ndim))))
        for out in (torch.empty(part.shape, dtype=part.dtype), torch.empty(part.shape, dtype=torch.float64), turned):
            with Reader() as reader:
                lazy.node.read(tuple(window), out, reader)
            assert torch.equal(out, part.to(out.dtype)), window


def test_only_the_bytes_of_the_part_are_read(tmp_path: Path) -> None:
    experts = {f"{kind}{i}": torch.randn(64, 256) for kind in ("gate", "up") for i in range(4)}
    save_file({**experts, "all": torch.randn(8, 64, 256)}, tmp_path / "model.safetensors")
    later = {name: Lazy(Stored(tensor)) for name, tensor in StoredFolder.open(tmp_path).tensors.items()}
    one = 64 * 256 * 4

    def read(lazy: Tensor, *window: tuple[int, int]) -> float:
        assert isinstance(lazy, Lazy)
        with Reader() as reader:
            lazy.node.value(window, reader)
        return reader.bytes_read / one

    assert read(stacked(later), (1, 3), (0, 128), (0, 256)) == 4  # two experts of two matrices
    assert read(stacked(later).transpose(1, 2), (1, 2), (0, 256), (0, 64)) == 1  # one matrix of one expert
    assert read(later["all"], (3, 5), (0, 64), (0, 256)) == 2
    assert read(later["all"], (3, 5), (32, 64), (0, 256)) == 1
    assert read(later["all"].reshape(8, 32, 2, 256).transpose(1, 2).reshape(8, 64, 256), (7, 8), (0, 9), (0, 9)) == 1


def test_writing_and_asking_for_values_are_refused(tensors: tuple[Tensors, Tensors]) -> None:
    matrix = tensors[1]["matrix"]
    with pytest.raises(NotImplementedError, match="writes into a tensor that is not read yet"):
        matrix.mul_(2)
    with pytest.raises(NotImplementedError, match="asks for the values"):
        matrix.sum().item()
