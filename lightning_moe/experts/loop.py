"""The slow reference: one expert after the other, in operations that work for every dtype and device."""

import torch
from torch import Tensor
from typing_extensions import override

from lightning_moe.experts.backend import ExpertsBackend
from lightning_moe.experts.peft import LowRank
from lightning_moe.experts.spec import ExpertsMLP


class LoopBackend(ExpertsBackend):
    """A Python loop over the local experts. Kept readable: every other backend is compared with it."""

    name = "loop"
    low_rank = True

    @override
    def __call__(
        self, mlp: ExpertsMLP, rows: Tensor, tokens_per_expert: Tensor, tokens_per_expert_host: list[int] | None
    ) -> Tensor:
        counts = tokens_per_expert.tolist() if tokens_per_expert_host is None else tokens_per_expert_host
        # unbind, not indexing: the backward pass of w[e] fills a whole [E, ...] tensor with zeros for each expert.
        up, down = mlp.up.unbind(0), mlp.down.unbind(0)
        up_bias = mlp.up_bias.unbind(0) if mlp.up_bias is not None else None
        down_bias = mlp.down_bias.unbind(0) if mlp.down_bias is not None else None
        up_added, down_added = _by_expert(mlp.up_low_rank), _by_expert(mlp.down_low_rank)
        results = []
        for expert, x in enumerate(rows.split(counts)):
            x = _product(x, up[expert], up_added[expert] if up_added else None)
            if up_bias is not None:
                x = x + up_bias[expert]
            x = _product(mlp.activation(x), down[expert], down_added[expert] if down_added else None)
            results.append(x if down_bias is None else x + down_bias[expert])
        out = torch.cat(results)
        return out if mlp.post is None else mlp.post(out)


def _by_expert(added: LowRank | None) -> list[tuple[Tensor, Tensor]]:
    return [] if added is None else list(zip(added.first.unbind(0), added.second.unbind(0), strict=True))


def _product(x: Tensor, weight: Tensor, added: tuple[Tensor, Tensor] | None) -> Tensor:
    if added is None:
        return x @ weight
    first, second = added
    return x @ weight + x @ first @ second
