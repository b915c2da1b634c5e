"""What a backend is: it multiplies rows by the weights of the local experts and knows nothing of ranks."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from lightning_moe.experts.spec import ExpertsMLP


class ExpertsBackend(ABC):
    """Computes :class:`ExpertsMLP` on rows sorted by local expert.

    Attributes:
        alignment: The rows of each expert must be a multiple of this, and the dispatcher is asked for that. Backends
            whose kernels want padding do it themselves, since no dispatcher does yet.
        low_rank: It adds ``up_low_rank`` and ``down_low_rank`` to the rows; otherwise they are in the weights already.
    """

    name: str = ""
    alignment: int = 1
    low_rank: bool = False

    def unsuitable(self, mlp_shapes: tuple[torch.Size, ...], dtype: torch.dtype, device: torch.device) -> str:
        """Say why this backend cannot compute experts of these shapes.

        Args:
            mlp_shapes: Shapes of ``up`` and ``down`` as stored, one expert or all.
            dtype: Dtype of the computation.
            device: Device of the computation.

        Returns:
            The reason in one line, empty where it can.
        """
        return ""

    @abstractmethod
    def __call__(
        self, mlp: ExpertsMLP, rows: Tensor, tokens_per_expert: Tensor, tokens_per_expert_host: list[int] | None
    ) -> Tensor:
        """Compute the experts.

        Args:
            mlp: The weights of the local experts.
            rows: ``[R, H]`` sorted by local expert, in the dtype of the weights; ``R`` may be 0.
            tokens_per_expert: ``[E_local]`` int64 rows of each expert; sums to ``R``.
            tokens_per_expert_host: The same on the host, where it is known.

        Returns:
            ``[R, H]``. Every weight is in the graph: an expert without rows gets a zero gradient, not none.
        """
