"""What ``dispatch_chunks`` gains on a slow link, and what it costs on a fast one.

One experts layer, forward and backward, on two processes of one thread each, over a link whose speed is chosen so that
rows travel about as long as they are computed, and over one that costs nothing. The variants take turns; ratios of
medians are printed, and the largest difference of the results.

    python -m tests.benchmarks.overlap
"""

import argparse
import os
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_moe.experts import choose_backend, find_experts
from lightning_moe.nn import GroupedExperts
from lightning_moe.parallel.routed import RoutedExperts
from tests.dispatch.slow_link import Link, SlowLinkDispatcher
from tests.harness import run_ranks

CHUNKS = (1, 2, 4)


def layer(link: Link, chunks: int, sizes: dict[str, int]) -> RoutedExperts:
    """The forward of this rank's experts."""
    ranks = dist.get_world_size()
    torch.manual_seed(dist.get_rank())
    module = nn.ModuleList([GroupedExperts(sizes["experts"] // ranks, sizes["hidden"], sizes["width"])])
    (found,) = find_experts(module)
    backend, _ = choose_backend("grouped_mm", found.spec, found.module, torch.float32, torch.device("cpu"))
    dispatcher = SlowLinkDispatcher(link, deduplicate=False)
    dispatcher.setup(dist.group.WORLD, num_experts=sizes["experts"], hidden_size=sizes["hidden"], dtype=torch.float32)
    return RoutedExperts(found.module, found.spec, dispatcher, backend, torch.float32, chunks=chunks)


def step(routed: RoutedExperts, hidden: Tensor, index: Tensor, weights: Tensor) -> tuple[float, Tensor]:
    """Seconds of forward and backward, and the gradient of the tokens."""
    hidden.grad = None
    for parameter in routed.module.parameters():
        parameter.grad = None
    dist.barrier()
    start = time.perf_counter()
    routed(hidden, index, weights).square().mean().backward()
    seconds = time.perf_counter() - start
    assert hidden.grad is not None
    return seconds, hidden.grad


def measure(sizes: dict[str, int], rounds: int) -> dict[tuple[str, int], float]:
    """Median seconds by link and chunks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    generator = torch.Generator().manual_seed(rank)
    hidden = torch.randn(sizes["tokens"], sizes["hidden"], generator=generator).requires_grad_()
    index = torch.rand(sizes["tokens"], sizes["experts"], generator=generator).argsort(1)[:, : sizes["top_k"]]
    weights = torch.rand(index.shape, generator=generator)
    free, slow = Link(None), Link(None)
    calls: dict[tuple[str, int], Any] = {
        (name, chunks): layer(link, chunks, sizes)
        for name, link in (("no delay", free), ("slow", slow))
        for chunks in CHUNKS
    }
    alone = statistics.median([step(calls["no delay", 1], hidden, index, weights)[0] for _ in range(5)])
    rows = sizes["tokens"] * sizes["top_k"] // 2  # to the other rank, there and back, forward and backward
    speed = torch.tensor(4 * rows * sizes["hidden"] * 4 / alone)
    dist.broadcast(speed, 0)
    slow.bytes_per_second = float(speed)
    seconds: dict[tuple[str, int], list[float]] = {key: [] for key in calls}
    reference = step(calls["no delay", 1], hidden, index, weights)[1].clone()
    for _ in range(rounds):
        for key, call in calls.items():
            taken, gradient = step(call, hidden, index, weights)
            seconds[key].append(taken)
            torch.testing.assert_close(gradient, reference, rtol=1e-4, atol=1e-5 * float(reference.abs().max()))
    return {key: statistics.median(values) for key, values in seconds.items()}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=21)
    for name, default in (("tokens", 2048), ("hidden", 512), ("width", 512), ("experts", 8), ("top_k", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = vars(parser.parse_args())
    rounds = given.pop("rounds")
    medians = run_ranks(measure, 2, given, rounds, timeout=600)[0]
    print(given)
    for (link, chunks), seconds in medians.items():
        ratio = medians[link, 1] / seconds
        print(f"{link:>9}, dispatch_chunks={chunks}: {1e3 * seconds:7.1f} ms, {ratio:.3f} times as fast as in one part")


if __name__ == "__main__":
    main()
