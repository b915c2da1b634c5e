"""Norms."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..device import DEVICE, place


class _Norm(nn.Module):
    """Parameters and options of both norms."""

    with_bias = False

    def setup(self, shape: Any, eps: float, zero_centered_gamma: bool, device: Any, dtype: Any, sm_margin: Any) -> None:
        DEVICE.require()
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        self.shape = tuple(shape) if isinstance(shape, Iterable) else (shape,)
        where: dict[str, Any] = {"device": place(device), "dtype": dtype or torch.get_default_dtype()}
        self.weight = nn.Parameter(torch.empty(self.shape, **where))
        if self.with_bias:
            self.bias = nn.Parameter(torch.empty(self.shape, **where))
        if self.weight.device.type != "meta":
            self.reset_parameters()

    def reset_parameters(self) -> None:
        device = self.weight.device if self.weight.device.type != "meta" else place("cuda")
        start = 0.0 if self.zero_centered_gamma else 1.0
        self.weight = nn.Parameter(torch.full(self.shape, start, device=device, dtype=self.weight.dtype))
        if self.with_bias:
            self.bias = nn.Parameter(torch.zeros(self.shape, device=device, dtype=self.weight.dtype))

    def rounded(self, x: Tensor) -> Tensor:
        """The package computes in the dtype of its weight, whatever it is given."""
        return x.to(self.weight.dtype)

    def gamma(self) -> Tensor:
        return self.weight.float() + 1 if self.zero_centered_gamma else self.weight.float()

    def get_extra_state(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor | None) -> None:
        pass


def _legacy(shape: Any, hidden_size: Any, params_dtype: Any, kwargs: dict[str, Any]) -> Any:
    if (shape is None) == (hidden_size is None):
        raise RuntimeError("give `normalized_shape`, or `hidden_size` (deprecated)")
    if params_dtype is not None:
        if "dtype" in kwargs:
            raise RuntimeError("Both `dtype` and `params_dtype` (deprecated) kwargs are provided")
        kwargs["dtype"] = params_dtype
    return hidden_size if shape is None else shape


class LayerNormOperation(_Norm):
    """The base of :class:`LayerNorm`, which says what its ``**kwargs`` are."""

    with_bias = True

    def __init__(
        self,
        normalized_shape: Any,
        *,
        eps: float = 1e-05,
        device: Any = None,
        dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        sm_margin: Any = 0,
    ) -> None:
        super().__init__()
        self.setup(normalized_shape, eps, zero_centered_gamma, device, dtype, sm_margin)

    def forward(self, x: Tensor) -> Tensor:
        x = self.rounded(x)
        out = nn.functional.layer_norm(x.float(), self.shape, self.gamma(), self.bias.float(), self.eps)
        return out.to(x.dtype)


class LayerNorm(LayerNormOperation):
    """``(x - mean) / sqrt(var + eps) * weight + bias`` over the last dimensions."""

    def __init__(
        self,
        normalized_shape: Any = None,
        eps: float = 1e-05,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        shape = _legacy(normalized_shape, hidden_size, params_dtype, kwargs)
        super().__init__(shape, eps=eps, zero_centered_gamma=zero_centered_gamma, **kwargs)


class RMSNormOperation(_Norm):
    """The base of :class:`RMSNorm`, which says what its ``**kwargs`` are."""

    def __init__(
        self,
        normalized_shape: Any,
        *,
        eps: float = 1e-05,
        device: Any = None,
        dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        sm_margin: Any = 0,
    ) -> None:
        super().__init__()
        self.setup(normalized_shape, eps, zero_centered_gamma, device, dtype, sm_margin)

    def forward(self, x: Tensor) -> Tensor:
        x = self.rounded(x)
        values = x.float()
        dims = tuple(range(-len(self.shape), 0))
        return (values * (values.square().mean(dims, keepdim=True) + self.eps).rsqrt() * self.gamma()).to(x.dtype)


class RMSNorm(RMSNormOperation):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimensions."""

    def __init__(
        self,
        normalized_shape: Any = None,
        eps: float = 1e-05,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        shape = _legacy(normalized_shape, hidden_size, params_dtype, kwargs)
        super().__init__(shape, eps=eps, zero_centered_gamma=zero_centered_gamma, **kwargs)
