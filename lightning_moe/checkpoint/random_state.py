"""The random generators of a rank as tensors, so that a checkpoint holds them without pickled objects."""

import hashlib
import math
import random
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

_NO_GAUSS = math.nan  # numpy and Python keep the second number of a pair; neither ever keeps this one


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Take the states of all generators that a training step may draw from.

    Args:
        device: The device of this rank; only its own generator is taken.

    Returns:
        ``torch`` (uint8), ``numpy`` and ``python`` (int64), and ``cuda`` (uint8) on a GPU; all on the CPU.
    """
    drawn: Any = np.random.get_state(legacy=True)
    _, words, position, has_gauss, gauss = drawn
    _, internal, python_gauss = random.getstate()
    state = {
        "torch": torch.get_rng_state(),
        "numpy": _packed([*map(int, words), position], gauss if has_gauss else None),
        "python": _packed(internal, python_gauss),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: Mapping[str, Tensor], device: torch.device) -> None:
    """Put the generators where they were.

    Args:
        state: What :func:`random_state` returned. A generator that is not in it stays as it is.
        device: The device of this rank.
    """
    if "torch" in state:
        torch.set_rng_state(state["torch"].cpu())
    if "numpy" in state:
        (*words, position), gauss = _unpacked(state["numpy"])
        np.random.set_state(
            ("MT19937", np.array(words, dtype=np.uint32), position, int(gauss is not None), gauss or 0.0)
        )
    if "python" in state:
        internal, gauss = _unpacked(state["python"])
        random.setstate((3, tuple(internal), gauss))
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)


@contextmanager
def keeping_random_state(device: torch.device) -> Iterator[None]:
    """Draw inside what changes nothing outside."""
    before = random_state(device)
    try:
        yield
    finally:
        set_random_state(before, device)


def derived_random_state(state: Mapping[str, Tensor], number: int, device: torch.device) -> dict[str, Tensor]:
    """Derive the states of a rank that the saved run did not have.

    Args:
        state: The state of a rank that it had.
        number: Which of those that are derived from it, from 1.
        device: The device of this rank.

    Returns:
        States of generators that are seeded by a hash of both.
    """
    digest = hashlib.sha256(str(number).encode())
    for name in sorted(state):
        digest.update(state[name].cpu().contiguous().view(torch.uint8).numpy().tobytes())
    seed = int.from_bytes(digest.digest()[:8], "little") >> 1
    with keeping_random_state(device):
        torch.manual_seed(seed)  # of CUDA as well
        np.random.seed(seed % 2**32)
        random.seed(seed)
        return random_state(device)


def _packed(words: "list[int] | tuple[int, ...]", gauss: float | None) -> Tensor:
    bits = struct.unpack("<q", struct.pack("<d", _NO_GAUSS if gauss is None else gauss))[0]
    return torch.tensor([*words, bits], dtype=torch.int64)


def _unpacked(packed: Tensor) -> tuple[list[int], float | None]:
    *words, bits = packed.tolist()
    gauss = struct.unpack("<d", struct.pack("<q", bits))[0]
    return words, None if math.isnan(gauss) else gauss
