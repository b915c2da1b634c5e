"""The arithmetic of layouts."""

import pytest

from lightning_moe.mesh import Layout, resolve_expert_parallel_size


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
    with pytest.raises(
        ValueError, match="expert_parallel_size=4 does not divide the number of experts of 'b', which is 6"
    ):
        resolve_expert_parallel_size(4, {"a": 8, "b": 6}, 8, 8)
    with pytest.raises(ValueError, match="expert_parallel_size=True must be 'auto' or a divisor"):
        resolve_expert_parallel_size(True, {"a": 8}, 8, 8)


def test_sizes_multiply_up() -> None:
    layout = Layout(world_size=16, replicate=2, expert=4)
    assert (layout.shard, layout.expert_shard) == (8, 2)
