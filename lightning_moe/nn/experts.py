"""The experts of a Mixture-of-Experts layer, their weights stacked."""

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_moe.dispatch.local import LocalDispatcher
from lightning_moe.experts import ExpertsSpec, choose_backend, register_experts
from lightning_moe.parallel.routed import RoutedExperts

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu": F.gelu, "relu": F.relu}


class GroupedExperts(nn.Module):
    """``E`` feed-forward experts with stacked weights.

    Gated, an expert computes ``down(act(gate(x)) * up(x))`` (SwiGLU, arXiv:2002.05202), else ``down(act(up(x)))``. The
    parameters have the layout of Transformers v5: ``gate_up_proj [E, 2I, H]`` with the gate's rows first (``up_proj
    [E, I, H]`` if not gated) and ``down_proj [E, H, I]``.

    Args:
        num_experts: ``E``.
        hidden_size: Width ``H`` of a token.
        intermediate_size: Width ``I`` inside an expert.
        activation: ``"silu"``, ``"gelu"`` or ``"relu"``.
        gated: Multiply the activation by a second projection.

    Raises:
        ValueError: If the activation is not known.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        activation: Literal["silu", "gelu", "relu"] = "silu",
        gated: bool = True,
    ) -> None:
        super().__init__()
        if activation not in _ACTIVATIONS:
            raise ValueError(
                f"activation={activation!r} is not known; allowed are {', '.join(map(repr, _ACTIVATIONS))}"
            )
        self.activation = activation
        up = torch.empty(num_experts, (2 if gated else 1) * intermediate_size, hidden_size)
        if gated:
            self.gate_up_proj = nn.Parameter(up)
        else:
            self.up_proj = nn.Parameter(up)
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw each expert's weights from a normal distribution with standard deviation ``1 / sqrt(inputs)``."""
        for weight in self.parameters(recurse=False):
            nn.init.normal_(weight, std=weight.shape[2] ** -0.5)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Compute the weighted sum of each token's experts.

        Args:
            hidden_states: ``[T, H]``.
            top_k_index: ``[T, K]`` int64; -1 drops the choice.
            top_k_weights: ``[T, K]``.

        Returns:
            ``[T, H]`` in the dtype of ``hidden_states``.
        """
        # Runs outside of the strategy, which replaces this forward by one over all expert-parallel ranks.
        spec, weight = _spec(self), self.down_proj
        backend, _ = choose_backend("auto", spec, self, weight.dtype, weight.device)
        dispatcher = LocalDispatcher()
        dispatcher.setup(None, num_experts=weight.shape[0], hidden_size=weight.shape[1], dtype=weight.dtype)
        routed = RoutedExperts(self, spec, dispatcher, backend, weight.dtype)
        return routed(hidden_states, top_k_index, top_k_weights)


def _activate(experts: GroupedExperts, rows: Tensor) -> Tensor:
    activation = _ACTIVATIONS[experts.activation]
    if not hasattr(experts, "gate_up_proj"):
        return activation(rows)
    gate, up = rows.chunk(2, dim=-1)
    return activation(gate) * up


_GATED = ExpertsSpec(up="gate_up_proj", down="down_proj", activation=_activate)
_PLAIN = ExpertsSpec(up="up_proj", down="down_proj", activation=_activate)


def _spec(experts: GroupedExperts) -> ExpertsSpec:
    return _GATED if hasattr(experts, "gate_up_proj") else _PLAIN


register_experts(GroupedExperts, _spec)
