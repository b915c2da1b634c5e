"""DBRX: the weights of all experts one below the other in ``[E * I, H]``, in a submodule."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_moe.experts.spec import ExpertsSpec, local_weight
from lightning_moe.experts.undecorated.names import original_class

_WEIGHTS = ("mlp.w1", "mlp.v1", "mlp.w2")


def describe(module: nn.Module, parent: nn.Module | None) -> ExpertsSpec:
    """Describe a ``DbrxExperts``. Its weights are cut between experts only where every rank holds as many."""
    return ExpertsSpec(compute=_compute, weights=_WEIGHTS, count=_count, even=True, install=partial(_install, parent))


def _count(experts: Any) -> int:
    return experts.num_experts


def _compute(experts: Any, rows: Tensor, tokens_per_expert: Tensor) -> Tensor:
    # The module of one expert takes its weights as arguments: whatever it makes of them in this release.
    weights = zip(
        *(local_weight(experts, name).unflatten(0, (-1, experts.ffn_hidden_size)).unbind(0) for name in _WEIGHTS),
        strict=True,
    )
    parts = rows.split(tokens_per_expert.tolist())
    return torch.cat([experts.mlp(part, *own) for part, own in zip(parts, weights, strict=True)])


def _install(parent: Any, module: Any, forward: Callable[..., Tensor]) -> None:
    def call(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        choices = (*hidden_states.shape[:-1], top_k_index.shape[-1])
        return forward(hidden_states, top_k_index.view(choices), top_k_weights.view(choices))

    module.forward = call
    if original_class(parent, {"dbrx.DbrxFFN"}) is not None and parent.router.moe_jitter_eps is not None:
        # The router changes its input in place, and so that of the experts. A router that FSDP2 gathers by itself
        # cannot do that: the block does it for both.
        parent.register_forward_pre_hook(partial(_jitter, parent.router.moe_jitter_eps))
        parent.router.moe_jitter_eps = None


def _jitter(epsilon: float, block: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    hidden_states, *rest = args
    if block.training:
        hidden_states = hidden_states * torch.empty_like(hidden_states).uniform_(1.0 - epsilon, 1.0 + epsilon)
    return hidden_states, *rest
