"""One grouped matrix product a weight, by PyTorch's own kernel."""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from lightning_moe.experts.backend import ExpertsBackend
from lightning_moe.experts.loop import LoopBackend
from lightning_moe.experts.peft import LowRank
from lightning_moe.experts.spec import ExpertsMLP

# grouped_mm wants every row stride to be a multiple of this many bytes, on CPU too.
_STRIDE_BYTES = 16
# Major compute capabilities with a kernel of their own; elsewhere PyTorch copies the offsets to the host and loops.
_GROUPED_CAPABILITIES = (9, 10)
_BLACKWELL = 10


class GroupedMMBackend(ExpertsBackend):
    """``torch.nn.functional.grouped_mm``: all local experts in one call, on CPU and CUDA."""

    name = "grouped_mm"
    low_rank = True

    @override
    def unsuitable(self, mlp_shapes: tuple[torch.Size, ...], dtype: torch.dtype, device: torch.device) -> str:
        allowed = (torch.bfloat16,) if device.type == "cuda" else (torch.float32, torch.bfloat16, torch.float16)
        if dtype not in allowed:
            names = ", ".join(str(d).removeprefix("torch.") for d in allowed)
            return f"grouped_mm computes in {names} on {device.type}, not in {str(dtype).removeprefix('torch.')}"
        if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] not in _GROUPED_CAPABILITIES:
            return (
                "this GPU has no grouped_mm kernel (Hopper and Blackwell do); PyTorch would wait for it at each product"
            )
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
        if rows.shape[0] == 0:
            # Nothing to group. The reference keeps every weight in the graph without asking a kernel for no rows.
            return LoopBackend()(mlp, rows, tokens_per_expert, tokens_per_expert_host)
        offsets = tokens_per_expert.cumsum(0, dtype=torch.int32)
        if self.fills_empty_gradients(rows.device) and (tokens_per_expert_host is None or 0 in tokens_per_expert_host):
            mlp = _without_empty_gradients(mlp, tokens_per_expert == 0)
        x = add_bias(_product(rows, mlp.up, mlp.up_low_rank, offsets), mlp.up_bias, tokens_per_expert)
        x = _product(mlp.activation(x), mlp.down, mlp.down_low_rank, offsets)
        x = add_bias(x, mlp.down_bias, tokens_per_expert)
        return x if mlp.post is None else mlp.post(x)

    def fills_empty_gradients(self, device: torch.device) -> bool:
        """Whether the kernel leaves anything in the weight gradient of an expert without rows, where zeros belong.

        It does on Blackwell (https://github.com/pytorch/pytorch/issues/172439).
        """
        return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= _BLACKWELL


class _NoGradientWhere(torch.autograd.Function):
    """A weight ``[E, ...]`` whose gradient is zero, not multiplied by zero, where ``empty [E]`` is true."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, empty: Tensor) -> Tensor:
        ctx.save_for_backward(empty)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (empty,) = ctx.saved_tensors
        return grad.masked_fill(empty.view(-1, 1, 1), 0.0), None


def _without_empty_gradients(mlp: ExpertsMLP, empty: Tensor) -> ExpertsMLP:
    def masked(weight: Tensor) -> Tensor:
        return _NoGradientWhere.apply(weight, empty) if weight.requires_grad else weight

    def low_rank(added: LowRank | None) -> LowRank | None:
        return None if added is None else LowRank(masked(added.first), masked(added.second))

    return replace(
        mlp,
        up=masked(mlp.up),
        down=masked(mlp.down),
        up_low_rank=low_rank(mlp.up_low_rank),
        down_low_rank=low_rank(mlp.down_low_rank),
    )


def _product(rows: Tensor, weight: Tensor, added: LowRank | None, offsets: Tensor) -> Tensor:
    out = F.grouped_mm(rows, weight, offs=offsets)
    if added is None:
        return out
    # The rank is a width too: zeros make it a multiple.
    padding = -added.first.shape[2] % (_STRIDE_BYTES // rows.dtype.itemsize)
    first, second = F.pad(added.first, (0, padding)), F.pad(added.second, (0, 0, 0, padding))
    return out + F.grouped_mm(F.grouped_mm(rows, first, offs=offsets), second, offs=offsets)


class _AddBias(torch.autograd.Function):
    """Add to each row the bias of its expert. The bias' gradient is summed in float32.

    Autograd's own would add up thousands of bfloat16 rows in bfloat16 on CUDA, where sums of ones stop at 256.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, bias: Tensor, tokens_per_expert: Tensor) -> Tensor:
        experts = torch.arange(bias.shape[0], device=bias.device)
        expert_of_row = experts.repeat_interleave(tokens_per_expert, output_size=rows.shape[0])
        ctx.save_for_backward(expert_of_row)
        ctx.num_experts, ctx.dtype = bias.shape[0], bias.dtype
        return rows + bias.index_select(0, expert_of_row)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (expert_of_row,) = ctx.saved_tensors
        bias = grad.new_zeros(ctx.num_experts, grad.shape[1], dtype=torch.float32)
        return grad, bias.index_add_(0, expert_of_row, grad.float()).to(ctx.dtype), None


def add_bias(rows: Tensor, bias: Tensor | None, tokens_per_expert: Tensor) -> Tensor:
    """Add to rows ``[R, W]``, sorted by expert, the bias ``[E, W]`` of each one's expert, if there is one.

    Args:
        rows: As many as ``tokens_per_expert`` sums up to.
        bias: Its gradient is summed in float32.
        tokens_per_expert: ``[E]`` int64.
    """
    return rows if bias is None else _AddBias.apply(rows, bias, tokens_per_expert)
