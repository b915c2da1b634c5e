"""JetMoE: linear layers of many experts, which take rows sorted by expert, in its MLPs and around its attention.

A layer alone sends rows to their experts and the results back. The two of an MLP send once for both.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_moe.experts.grouped_mm import GroupedMMBackend
from lightning_moe.experts.peft import innermost
from lightning_moe.experts.spec import ExpertsSpec, local_weight
from lightning_moe.experts.undecorated.names import original_class


def describe(module: nn.Module, parent: nn.Module | None) -> ExpertsSpec:
    """Describe a ``JetMoeParallelExperts``."""
    layer: Any = module
    mlp: Any = parent
    if original_class(parent, {"jetmoe.JetMoeMoE"}) is None:
        return ExpertsSpec(compute=_compute, install=partial(_install_alone, parent), even=True)
    if layer is innermost(mlp.input_linear):
        return ExpertsSpec(compute=partial(_compute_mlp, mlp), install=partial(_install_mlp, mlp), even=True)
    return ExpertsSpec(compute=_compute, install=_install_second, even=True)


def _compute(layer: Any, rows: Tensor, tokens_per_expert: Tensor) -> Tensor:
    weight = local_weight(layer, "weight").transpose(1, 2)
    unsuitable = GroupedMMBackend().unsuitable((weight.shape,), rows.dtype, rows.device)
    if rows.shape[0] and not unsuitable:
        return F.grouped_mm(rows, weight, offs=tokens_per_expert.cumsum(0, dtype=torch.int32))
    parts = rows.split(tokens_per_expert.tolist())
    return torch.cat([part @ own for part, own in zip(parts, weight.unbind(0), strict=True)])


def _install_alone(parent: Any, layer: Any, forward: Callable[..., Tensor]) -> None:
    def call(inputs: Tensor, expert_size: Sequence[int]) -> Tensor:
        index_S1 = _expert_of_row(expert_size, inputs.device).unsqueeze(1)
        return forward(inputs, index_S1, torch.ones_like(index_S1, dtype=torch.float32))

    layer.forward = call
    if original_class(parent, {"jetmoe.JetMoeMoA"}) is not None:
        parent.map = partial(_map, parent)


def _map(attention: Any, layer_input: Tensor) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    """The queries, with gates in the dtype of the input: a router in float32 would make everything after it so."""
    queries, logits, (order, token, gates, expert_size) = type(attention).map(attention, layer_input)
    return queries, logits, (order, token, gates.to(layer_input.dtype), expert_size)


def _expert_of_row(expert_size: Sequence[int], device: torch.device) -> Tensor:
    sizes = torch.tensor(expert_size)
    return torch.arange(len(sizes)).repeat_interleave(sizes).to(device)


def _compute_mlp(mlp: Any, layer: Any, rows: Tensor, tokens_per_expert: Tensor) -> Tensor:
    gate, up = _compute(layer, rows, tokens_per_expert).chunk(2, dim=-1)
    # Called as a module, so that FSDP2 gathers its weight.
    return mlp.output_linear(mlp.activation(gate) * up, tokens_per_expert)


def _install_second(layer: Any, forward: Callable[..., Tensor]) -> None:
    layer.forward = partial(_compute, layer)


def _install_mlp(mlp: Any, layer: Any, forward: Callable[..., Tensor]) -> None:
    layer.forward = forward
    mlp.forward = partial(_forward_mlp, mlp)


def _forward_mlp(mlp: Any, layer_input: Tensor) -> Tensor:
    hidden_TH = layer_input.reshape(-1, mlp.input_size)
    order_S, _, gates_S, expert_size, _ = mlp.router(hidden_TH)
    choices = (hidden_TH.shape[0], mlp.router.top_k)
    # The router returns the choices sorted by expert; back to [T, K].
    position_S = torch.empty_like(order_S).scatter_(0, order_S, torch.arange(len(order_S), device=order_S.device))
    index_TK = _expert_of_row(expert_size, order_S.device)[position_S].view(choices)
    out_TH = mlp.input_linear(hidden_TH, index_TK, gates_S[position_S].view(choices))
    return out_TH.view(*layer_input.shape[:-1], mlp.input_size) + mlp.bias
