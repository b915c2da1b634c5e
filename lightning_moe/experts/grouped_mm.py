"""One grouped matrix product a weight, by PyTorch's own kernel."""

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from lightning_moe.experts.backend import ExpertsBackend
from lightning_moe.experts.spec import ExpertsMLP

# grouped_mm wants every row stride to be a multiple of this many bytes, on CPU too.
_STRIDE_BYTES = 16


class GroupedMMBackend(ExpertsBackend):
    """``torch.nn.functional.grouped_mm``: all local experts in one call, on CPU and CUDA."""

    name = "grouped_mm"

    @override
    def unsuitable(self, mlp_shapes: tuple[torch.Size, ...], dtype: torch.dtype, device: torch.device) -> str:
        allowed = (torch.bfloat16,) if device.type == "cuda" else (torch.float32, torch.bfloat16, torch.float16)
        if dtype not in allowed:
            names = ", ".join(str(d).removeprefix("torch.") for d in allowed)
            return f"grouped_mm computes in {names} on {device.type}, not in {str(dtype).removeprefix('torch.')}"
        for shape in mlp_shapes:
            for width in shape[-2:]:
                if width * dtype.itemsize % _STRIDE_BYTES:
                    return (
                        f"grouped_mm needs widths that are a multiple of {_STRIDE_BYTES // dtype.itemsize} in"
                        f" {str(dtype).removeprefix('torch.')}, got {width}"
                    )
        return ""

    @override
    def __call__(
        self, mlp: ExpertsMLP, rows: Tensor, tokens_per_expert: Tensor, tokens_per_expert_host: list[int] | None
    ) -> Tensor:
        offsets = tokens_per_expert.cumsum(0, dtype=torch.int32)
        x = _add_bias(F.grouped_mm(rows, mlp.up, offs=offsets), mlp.up_bias, tokens_per_expert)
        x = _add_bias(F.grouped_mm(mlp.activation(x), mlp.down, offs=offsets), mlp.down_bias, tokens_per_expert)
        return x if mlp.post is None else mlp.post(x)


def _add_bias(rows: Tensor, bias: Tensor | None, tokens_per_expert: Tensor) -> Tensor:
    """Add to each row the bias of its expert; ``[R, N]`` and ``[E_local, N]``."""
    if bias is None:
        return rows
    return rows + bias.repeat_interleave(tokens_per_expert, dim=0, output_size=rows.shape[0])
