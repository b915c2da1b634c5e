"""Every dispatcher that is usable here, on CUDA devices, against the dense computation of ``tests/dispatch/cases.py``.

    pytest tests/gpu/test_dispatchers.py           on a machine with CUDA devices; elsewhere skipped with the reason

The devices of one machine, as many as share the experts evenly. Several cases run in one group of processes: what one
leaves behind is there for the next. ``tests/gpu/dispatcher_table.py`` prints the same for any number of machines.
"""

import os

import pytest
import torch
import torch.distributed as dist

from lightning_moe.dispatch import dispatcher_options
from tests.dispatch.cases import SCENARIOS, E, Setting, build, expected, layer_of, scenarios_of, wrong
from tests.harness import run_ranks

WIDTH = 256  # a multiple of what every library takes


def world_of(devices: int) -> int:
    """How many ranks a number of devices makes: of them the experts need to hold the same number each."""
    return max(size for size in (1, 2, 4, 8) if size <= devices and E % size == 0)


def on_devices(name: str, dtype: torch.dtype) -> dict[str, list[str]]:
    """What is wrong on this rank, by scenario."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    # Products in bfloat16 may add up partial sums in bfloat16, which the tolerance does not allow for.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    dist.init_process_group("cpu:gloo,cuda:nccl")
    here = Setting(rank, world, WIDTH, dtype, "cuda")
    dispatcher = build(name, world)
    problems = {}
    for scenario in scenarios_of(dispatcher):
        got = SCENARIOS[scenario](lambda: layer_of(dispatcher, here), here)
        problems[scenario] = wrong(got, expected(scenario, here), here)
    dispatcher.finalize()
    return problems


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *(
            pytest.param(name, dtype, marks=pytest.mark.gpu(1))
            for name in ("all_to_all", "once")
            for dtype in (torch.float32, torch.bfloat16)
        ),
        *(pytest.param(name, torch.bfloat16, marks=pytest.mark.gpu(2)) for name in ("deepep", "hybridep", "nccl_ep")),
    ],
)
def test_same_as_dense(name: str, dtype: torch.dtype) -> None:
    if missing := dispatcher_options().get(name, ""):
        pytest.skip(f"dispatcher={name!r} is not usable here: {missing}")
    world = world_of(torch.cuda.device_count())
    for rank, found in enumerate(run_ranks(on_devices, world, name, dtype, timeout=240)):
        assert found
        problems = [f"{scenario}: {line}" for scenario, lines in found.items() for line in lines]
        assert not problems, f"rank {rank} of {world}:\n" + "\n".join(problems)


@pytest.mark.gpu(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_device_alone(dtype: torch.dtype) -> None:
    for problems in run_ranks(on_devices, 1, "local", dtype, timeout=120)[0].values():
        assert not problems
