"""The router: which experts a token goes to, and with what weight."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class TopKRouter(nn.Module):
    """Token-choice top-k routing: each token takes the ``top_k`` experts of highest score.

    Logits, scores and top-k are computed in float32 whatever the dtype of the model: near-ties flip in bfloat16.

    Args:
        hidden_size: Width ``H`` of a token.
        num_experts: ``E``.
        top_k: Experts a token, ``K``.
        score_function: ``"softmax"`` over the experts (Switch Transformer, arXiv:2101.03961) or ``"sigmoid"`` of each
            (DeepSeek-V3, arXiv:2412.19437).
        normalize: Divide the weights of a token by their sum.

    Raises:
        ValueError: If ``top_k`` is not between 1 and ``num_experts``, or the score function is not known.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        score_function: Literal["softmax", "sigmoid"] = "softmax",
        normalize: bool = True,
    ) -> None:
        super().__init__()
        if not 1 <= top_k <= num_experts:
            raise ValueError(f"top_k={top_k} must be between 1 and num_experts={num_experts}")
        if score_function not in ("softmax", "sigmoid"):
            raise ValueError(f"score_function={score_function!r} is not known; allowed are 'softmax' and 'sigmoid'")
        self.top_k = top_k
        self.score_function = score_function
        self.normalize = normalize
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights from a normal distribution with standard deviation ``1 / sqrt(H)``."""
        # Logits of a token with unit variance then have unit variance.
        nn.init.normal_(self.weight, std=self.weight.shape[1] ** -0.5)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Route tokens.

        Args:
            hidden_states: ``[T, H]``.

        Returns:
            Router logits ``[T, E]`` float32, weights ``[T, K]`` float32 and expert indices ``[T, K]`` int64.
        """
        with torch.autocast(hidden_states.device.type, enabled=False):
            logits_TE = F.linear(hidden_states.float(), self.weight.float())
            scores_TE = logits_TE.softmax(-1) if self.score_function == "softmax" else logits_TE.sigmoid()
            weights_TK, index_TK = scores_TE.topk(self.top_k, dim=-1)
            if self.normalize:
                # A sigmoid can underflow to 0 for every expert; the floor keeps the quotient finite.
                weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True).clamp_min(1e-20)
        return logits_TE, weights_TK, index_TK
