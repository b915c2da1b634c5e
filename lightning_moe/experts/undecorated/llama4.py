"""Llama 4: every expert computes every token there, on an input that is zero where the router did not choose it.

An expert has no bias and maps zeros to zeros, with zero gradients of its weights, so that only the choices need to run.
The score scales the input of an expert, not its result: the rows are scaled before they are dispatched.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_moe.experts.spec import ExpertsSpec
from lightning_moe.experts.undecorated.names import original_class


def describe(module: nn.Module, parent: nn.Module | None) -> ExpertsSpec | None:
    """Describe a ``Llama4TextExperts`` inside its own block, whose forward is replaced as well.

    Returns:
        ``None`` inside any other module: how that one calls it is not known.
    """
    if original_class(parent, {"llama4.Llama4TextMoe"}) is None:
        return None
    return ExpertsSpec(
        up="gate_up_proj", down="down_proj", activation=_gate, transposed=True, install=partial(_install, parent)
    )


def _gate(experts: Any, rows: Tensor) -> Tensor:
    gate, up = rows.chunk(2, dim=-1)
    return up * experts.act_fn(gate)


def _install(block: Any, module: Any, forward: Callable[..., Tensor]) -> None:
    module.forward = forward
    block.forward = partial(_forward, block)


def _forward(block: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """What the block computes: ``[..., H]`` to ``[T, H]`` and the router logits ``[T, E]``."""
    hidden_TH = hidden_states.reshape(-1, block.hidden_dim)
    scores_TE, logits_TE = block.router(hidden_TH)
    index_TK = torch.topk(logits_TE, block.top_k, dim=1).indices
    scaled_TKH = hidden_TH.unsqueeze(1) * scores_TE.gather(1, index_TK).unsqueeze(2)
    index_S1 = index_TK.reshape(-1, 1)
    routed_SH = block.experts(scaled_TKH.flatten(0, 1), index_S1, torch.ones_like(index_S1, dtype=torch.float32))
    # A router in float32 makes float32 scores, which must not become the dtype of what follows.
    routed_TH = routed_SH.view(scaled_TKH.shape).sum(dim=1).to(hidden_TH.dtype)
    return block.shared_expert(hidden_TH) + routed_TH, logits_TE
