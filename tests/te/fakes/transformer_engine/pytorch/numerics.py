"""Rounding to low precision, and the matrix product that uses it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_DTYPES = {448.0: torch.float8_e4m3fn, 57344.0: torch.float8_e5m2}
_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
Quantizer = Callable[[Tensor], Tensor]


def same(tensor: Tensor) -> Tensor:
    """No low precision."""
    return tensor


def rounded(tensor: Tensor, largest: float, scale: Tensor | None = None, block: int = 0) -> Tensor:
    """The values of a tensor after the format whose largest value is given, in float32.

    ``scale`` comes from elsewhere (delayed scaling); without it, it comes from the largest magnitude of the tensor, or
    of each ``block`` of values of the last dimension.
    """
    values = tensor.float()
    if block and values.shape[-1] % block == 0 and values.numel():
        return rounded_blocks(values, largest, block)
    if scale is None:
        amax = values.abs().amax() if values.numel() else values.new_zeros(())
        scale = largest / torch.where(amax > 0, amax, amax.new_tensor(largest))
    return _cast((values * scale).clamp(-largest, largest), largest) / scale


def rounded_blocks(values: Tensor, largest: float, block: int) -> Tensor:
    parts = values.unflatten(-1, (-1, block))
    amax = parts.abs().amax(-1, keepdim=True)
    scale = largest / torch.where(amax > 0, amax, torch.full_like(amax, largest))
    return (_cast((parts * scale).clamp(-largest, largest), largest) / scale).flatten(-2)


def _cast(values: Tensor, largest: float) -> Tensor:
    if largest in _DTYPES:
        return values.to(_DTYPES[largest]).float()
    levels = _FP4.to(values.device)
    nearest = (values.abs().unsqueeze(-1) - levels).abs().argmin(-1)
    return levels[nearest] * values.sign()


class Product(torch.autograd.Function):
    """``x @ w.T`` of quantised operands; the gradients come from the quantised gradient and the same operands."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        quantized: Tensor | None,
        forward: Quantizer,
        backward: Quantizer,
        late: Any,
    ) -> Tensor:
        low = forward is not same or quantized is not None
        xq, wq = forward(x), weight if quantized is None else quantized
        ctx.save_for_backward(xq, wq)
        ctx.backward_quantizer, ctx.dtypes, ctx.late = backward, (x.dtype, weight.dtype), late
        return (xq.float() @ wq.float().T).to(x.dtype) if low else xq @ wq.to(x.dtype).T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        xq, wq = ctx.saved_tensors
        gradient = ctx.backward_quantizer(grad).to(wq.dtype if wq.dtype.is_floating_point else grad.dtype)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = (gradient @ wq).to(ctx.dtypes[0])
        if ctx.needs_input_grad[1]:
            dw = (gradient.to(xq.dtype).T @ xq).to(ctx.dtypes[1])
            if ctx.late is not None:
                ctx.late(dw)
                dw = None
        return dx, dw, None, None, None, None
