"""A whole Mixture-of-Experts layer: router, experts and an optional shared expert."""

from typing import Literal

from torch import Tensor, nn

from lightning_moe.nn.experts import GroupedExperts
from lightning_moe.nn.router import TopKRouter


class MoE(nn.Module):
    """Replaces the feed-forward layer of a transformer block.

    Args:
        hidden_size: Width ``H`` of a token.
        intermediate_size: Width ``I`` inside an expert.
        num_experts: ``E``.
        top_k: Experts a token.
        shared_expert: A module ``[..., H] -> [..., H]`` that every token takes besides, added to the result.
        activation: ``"silu"``, ``"gelu"`` or ``"relu"``.
        gated: Multiply the activation by a second projection.
        score_function: ``"softmax"`` or ``"sigmoid"``.
        normalize: Divide the weights of a token by their sum.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        shared_expert: nn.Module | None = None,
        activation: Literal["silu", "gelu", "relu"] = "silu",
        gated: bool = True,
        score_function: Literal["softmax", "sigmoid"] = "softmax",
        normalize: bool = True,
    ) -> None:
        super().__init__()
        self.router = TopKRouter(hidden_size, num_experts, top_k, score_function, normalize)
        self.experts = GroupedExperts(num_experts, hidden_size, intermediate_size, activation, gated)
        self.shared_expert = shared_expert

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Compute the layer.

        Args:
            hidden_states: ``[..., H]``.

        Returns:
            The same shape and dtype.
        """
        tokens_TH = hidden_states.reshape(-1, hidden_states.shape[-1])
        _, weights_TK, index_TK = self.router(tokens_TH)
        out = self.experts(tokens_TH, index_TK, weights_TK).view(hidden_states.shape)
        return out if self.shared_expert is None else out + self.shared_expert(hidden_states)
