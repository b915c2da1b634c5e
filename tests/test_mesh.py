"""The arithmetic of layouts."""

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from lightning_moe.mesh import Layout, build_dense_mesh, build_meshes, resolve_expert_parallel_size
from tests.harness import run_ranks


@pytest.mark.parametrize(
    ("experts", "shard", "per_node", "expected"),
    [
        ({"a": 128}, 8, 8, 8),
        ({"a": 128}, 16, 8, 8),  # two nodes: stay inside one
        ({"a": 60}, 8, 8, 4),
        ({"a": 128, "b": 12}, 8, 8, 4),  # fits every layer
        ({"a": 128}, 2, 8, 2),  # a replica is smaller than a node
        ({"a": 7}, 4, 4, 1),
        ({}, 8, 8, 1),
        ({"a": 8}, 6, 6, 2),
    ],
)
def test_auto_size(experts: dict[str, int], shard: int, per_node: int, expected: int) -> None:
    assert resolve_expert_parallel_size("auto", experts, shard, per_node) == expected


def test_given_size() -> None:
    assert resolve_expert_parallel_size(4, {"a": 8}, 8, 2) == 4
    assert resolve_expert_parallel_size(4, {"a": 8, "b": 6}, 8, 8) == 4
    with pytest.raises(
        ValueError, match=r"expert_parallel_size=4 is larger than .* of 'b', which is 3. Allowed .* 1, 2"
    ):
        resolve_expert_parallel_size(4, {"a": 8, "b": 3}, 8, 8)
    with pytest.raises(ValueError, match="expert_parallel_size=True must be 'auto' or a divisor"):
        resolve_expert_parallel_size(True, {"a": 8}, 8, 8)


def test_sizes_multiply_up() -> None:
    layout = Layout(world_size=16, replicate=2, expert=4)
    assert (layout.shard, layout.expert_shard) == (8, 2)


def missed_collective(which: str) -> tuple[str, float]:
    dist.init_process_group("gloo")  # waits for half an hour by default
    timeout = timedelta(seconds=2)
    meshes = build_meshes(build_dense_mesh("cpu", 4, 2, timeout), 2, timeout)
    group = {"expert": meshes.expert_group, "shard": meshes.dense["shard"].get_group()}[which]
    start = time.monotonic()
    if int(os.environ["RANK"]) % 2:
        return "", 0.0
    try:
        dist.all_reduce(torch.ones(1), group=group)
    except RuntimeError as error:
        return str(error), time.monotonic() - start
    return "", 0.0


@pytest.mark.parametrize("which", ["expert", "shard"])
def test_groups_of_the_meshes_wait_as_long_as_the_user_says(which: str) -> None:
    first, _, third, _ = run_ranks(missed_collective, 4, which, timeout=60)
    for message, seconds in (first, third):
        assert "imed out" in message or "imeout" in message
        assert 1 < seconds < 20
