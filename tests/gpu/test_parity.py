"""The same promise on CUDA and NCCL: with one device or more, training is that of one process on the whole batch.

pytest tests/gpu                     on a machine with CUDA devices; elsewhere everything here is skipped
"""

from typing import Any

import pytest
import torch

from tests.harness import run_ranks
from tests.test_parity import assert_same, train

CUDA = {"accelerator": "cuda"}


def sizes(world: int) -> list[tuple[int, int]]:
    """(expert_parallel_size, replicate_size) of a number of devices."""
    expert = [size for size in (1, 2, 4, 8) if world % size == 0]
    return [(size, 1) for size in expert] + ([(world // 2, 2)] if world % 4 == 0 else [])


@pytest.mark.gpu(1)
def test_same_as_one_process_on_every_layout() -> None:
    world = max(size for size in (1, 2, 4, 8) if size <= torch.cuda.device_count())
    reference = run_ranks(train, 1, None, CUDA)[0]
    for expert, replicate in sizes(world):
        options: dict[str, Any] = {"expert_parallel_size": expert, "replicate_size": replicate}
        ranks = run_ranks(train, world, options, CUDA, timeout=300)
        # Products of other shapes round differently, and tf32 is off by default.
        assert_same(ranks[0], reference, tolerance=1e-4)
        for rank in ranks[1:]:
            assert [r["norms"] for r in rank] == [r["norms"] for r in ranks[0]]


@pytest.mark.gpu(1)
@pytest.mark.parametrize("options", [{"activation_checkpointing": "full"}, {"activation_checkpointing": "selective"}])
def test_recompute_is_exact(options: dict[str, Any]) -> None:
    world = max(size for size in (1, 2, 4, 8) if size <= torch.cuda.device_count())
    reference = run_ranks(train, 1, None, CUDA)[0]
    ours = run_ranks(train, world, {"expert_parallel_size": world, **options}, CUDA, timeout=300)[0]
    assert_same(ours, reference, tolerance=1e-4)


@pytest.mark.gpu(1)
def test_bf16_mixed_with_grouped_mm() -> None:
    world = max(size for size in (1, 2, 4, 8) if size <= torch.cuda.device_count())
    reference = run_ranks(train, 1, None, CUDA)[0]
    options = {"expert_parallel_size": world, "experts_backend": "grouped_mm"}
    ours = run_ranks(train, world, options, {**CUDA, "precision": "bf16-mixed"}, timeout=300)[0]
    for got, expected in zip(ours, reference, strict=True):
        torch.testing.assert_close(got["losses"], expected["losses"], rtol=3e-2, atol=0)
