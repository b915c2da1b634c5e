"""Rows and bytes that ``all_to_all`` sends with and without deduplication, for choices that real routers made.

A small Qwen3-MoE whose routers choose 8 of 128 experts, as those of Qwen3-30B-A3B do, learns for some steps from the
source code of Python's standard library. Then the choices of its last layer for text that it has not seen are sent over
8 ranks, with rows as wide as those of Qwen3-30B-A3B (2048, bfloat16), by the dispatcher itself.

    python -m tests.benchmarks.traffic
"""

import argparse
import os
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_moe.data import StdlibCode
from lightning_moe.dispatch.all_to_all import AllToAllDispatcher
from lightning_moe.experts import find_experts
from lightning_moe.models import CausalLM
from tests.harness import run_ranks

RANKS, EXPERTS, TOP_K, WIDTH = 8, 128, 8, 2048


def choices(steps: int, tokens_per_rank: int) -> list[Tensor]:
    """``[T, K]`` experts of each rank's tokens."""
    pl.seed_everything(0, verbose=False)
    config = {
        "vocab_size": 256,
        "hidden_size": 128,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "norm_topk_prob": True,
    }
    model = CausalLM(
        config=config, config_class="Qwen3MoeConfig", optimizer=lambda p: torch.optim.AdamW(p, 2e-3), aux_loss_coef=1e-3
    )
    data = StdlibCode(sequence_length=256, batch_size=4)
    silent: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(accelerator="cpu", max_steps=steps, limit_val_batches=0, enable_checkpointing=False, **silent)
    trainer.fit(model, data)
    seen: list[Tensor] = []
    experts = find_experts(model)[-1].module
    experts.register_forward_pre_hook(lambda _, args: seen.append(args[1].detach().clone()))
    with torch.no_grad():
        for batch in data.val_dataloader():
            model.validation_step(batch, 0)
            if sum(map(len, seen)) >= RANKS * tokens_per_rank:
                break
    index = torch.cat(seen)[: RANKS * tokens_per_rank]
    return list(index.long().chunk(RANKS))


def send(index: list[Tensor], deduplicate: bool) -> tuple[int, int]:
    """Rows and bytes that one rank sends to the others in a forward dispatch."""
    dist.init_process_group("gloo")
    mine = index[int(os.environ["RANK"])]
    dispatcher = AllToAllDispatcher(deduplicate)
    dispatcher.setup(dist.group.WORLD, num_experts=EXPERTS, hidden_size=WIDTH, dtype=torch.bfloat16)
    dispatcher.dispatch(torch.zeros(len(mine), WIDTH, dtype=torch.bfloat16), mine, torch.ones(mine.shape))
    return dispatcher.rows_sent, dispatcher.bytes_sent


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=512, help="of each rank")
    given = parser.parse_args()
    index = choices(given.steps, given.tokens)
    load = torch.bincount(torch.cat(index).flatten(), minlength=EXPERTS).float()
    print(f"{RANKS} ranks, top {TOP_K} of {EXPERTS} experts, {given.tokens} tokens a rank, rows of {WIDTH} bfloat16;")
    print(f"the busiest expert has {float(load.max() / load.mean()):.1f} times the mean load")
    totals = {}
    for deduplicate in (False, True):
        sent = run_ranks(send, RANKS, index, deduplicate, timeout=120)
        totals[deduplicate] = [sum(column) for column in zip(*sent, strict=True)]
        rows, total = totals[deduplicate]
        print(f"deduplicate={deduplicate!s:>5}: {rows:6d} rows, {total / 2**20:6.1f} MiB to other ranks")
    ratios = [once / each for once, each in zip(totals[True], totals[False], strict=True)]
    print(f"ratio: {ratios[0]:.3f} of the rows, {ratios[1]:.3f} of the bytes")


if __name__ == "__main__":
    main()
