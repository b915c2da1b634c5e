"""Linear layers side by side, and the padding of their rows."""

import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..device import place
from .base import TransformerEngineBaseModule, normal
from .numerics import Product
from .quantization import FP8GlobalStateManager, get_align_size_for_quantization

_SINGLE = "NVTE_GROUPED_LINEAR_SINGLE_PARAM"


class GroupedLinear(TransformerEngineBaseModule):
    """Each group of rows times a weight of its own: ``weight0`` to ``weight{num_gemms - 1}``."""

    takes_tensors = True

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable | None = None,
        rng_tracker_name: str | None = None,
        init_method: Callable | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: torch.device | str = "cuda",
        ub_overlap_rs: bool = False,
        ub_overlap_ag: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        name: str | None = None,
        use_grouped_tensor: bool | None = None,
    ) -> None:
        super().__init__(name)
        if ub_overlap_rs or ub_overlap_ag:
            raise ValueError("GroupedLinear doesn't support Userbuffer overlap.")
        assert tp_size == 1, "the stand-in has no tensor parallelism"
        assert not fuse_wgrad_accumulation
        if (single_grouped_weight or single_grouped_bias) and os.environ.get(_SINGLE, "0") != "1":
            warnings.warn(f"{_SINGLE} is not set: single grouped parameters are off", UserWarning, stacklevel=2)
            single_grouped_weight = single_grouped_bias = False
        self.num_gemms, self.in_features, self.out_features = num_gemms, in_features, out_features
        self.use_bias, self.return_bias, self.delay = bias, return_bias, delay_wgrad_compute
        self.single_grouped_weight, self.use_grouped_tensor = single_grouped_weight, bool(use_grouped_tensor)
        self.late: list[tuple[int, Tensor]] = []
        where: dict[str, Any] = {"device": place(device), "dtype": params_dtype or torch.get_default_dtype()}
        init = init_method or normal
        if single_grouped_weight:
            self.make_parameter("weight", torch.empty(num_gemms, out_features, in_features, **where), init)
        for gemm in range(num_gemms):
            if not single_grouped_weight:
                self.make_parameter(f"weight{gemm}", torch.empty(out_features, in_features, **where), init)
            if bias:
                self.make_parameter(f"bias{gemm}", torch.empty(out_features, **where), nn.init.zeros_)
            else:
                setattr(self, f"bias{gemm}", torch.empty(0, **where))
        self.reset_parameters(defer_init=torch.device(device).type == "meta")

    def forward(
        self,
        inp: Tensor,
        m_splits: Tensor,
        is_first_microbatch: bool | None = None,
        out: Tensor | None = None,
        dgrad_out: Tensor | None = None,
    ) -> Any:
        assert out is None
        assert dgrad_out is None
        return self.compute(inp, m_splits, is_first_microbatch)

    def compute(self, inp: Tensor, m_splits: Any, first: bool | None) -> Any:
        splits = self._splits(m_splits)
        inp = self.prepare_forward(inp, self.num_gemms)
        x = inp.reshape(-1, self.in_features).to(self.activation_dtype)
        rows = sum(splits)
        if x.shape[0] != rows and not (self.use_grouped_tensor and x.shape[0] > rows):
            raise RuntimeError(f"split sizes sum to {rows}, but there are {x.shape[0]} rows")
        if self.fp8:
            self._check_fp8(splits)
        weights = self._weights()
        parts = []
        for gemm, part in enumerate(x[:rows].split(splits)):
            weight = weights[gemm]
            if weight.device != x.device:
                raise RuntimeError(f"weight{gemm} is on {weight.device}, the input on {x.device}")
            quantized = self.quantized_weight(f"weight{gemm}", weight, gemm, first)
            late = (lambda dw, at=gemm: self.late.append((at, dw))) if self.delay else None
            result = Product.apply(
                part, weight, quantized, self.quantizer(gemm, "input"), self.quantizer(gemm, "gradient"), late
            )
            if self.use_bias and not self.return_bias:
                result = result + getattr(self, f"bias{gemm}").to(result.dtype)
            parts.append(result)
        # What the library does not write holds anything.
        parts.append(x.new_full((x.shape[0] - rows, self.out_features), torch.nan))
        result = torch.cat(parts).view(*inp.shape[:-1], self.out_features)
        return (
            (result, [getattr(self, f"bias{gemm}") for gemm in range(self.num_gemms)]) if self.return_bias else result
        )

    def _splits(self, m_splits: Any) -> list[int]:
        if self.single_grouped_weight and not self.use_grouped_tensor:
            raise RuntimeError("single_grouped_weight and single_grouped_bias require use_grouped_tensor=True")
        if isinstance(m_splits, Tensor):
            if not self.takes_tensors:
                raise TypeError("m_splits must be a list of integers")
            if m_splits.is_floating_point() or m_splits.shape != (self.num_gemms,):
                raise ValueError(f"Shape of splits tensor ({tuple(m_splits.shape)}) does not match {self.num_gemms}.")
            return m_splits.tolist()
        if self.use_grouped_tensor:
            raise ValueError("The native grouped_tensor path requires CUDA m_splits.")
        if len(m_splits) != self.num_gemms:
            raise ValueError(f"Number of splits ({len(m_splits)}) should match number of GEMMs ({self.num_gemms}).")
        return list(m_splits)

    def _check_fp8(self, splits: Sequence[int]) -> None:
        assert self.recipe is not None
        align = get_align_size_for_quantization(self.recipe)
        if any(split % align for split in splits):
            raise RuntimeError(f"rows of each group must be a multiple of {align} in low precision, got {splits}")
        width = 32 if self.recipe.mxfp8() else 16
        if self.in_features % width or self.out_features % width:
            raise RuntimeError(f"widths must be a multiple of {width}, got {self.in_features} and {self.out_features}")

    def _weights(self) -> list[Tensor]:
        if self.single_grouped_weight:
            return list(self.weight.unbind(0))
        return [getattr(self, f"weight{gemm}") for gemm in range(self.num_gemms)]

    def backward_dw(self) -> None:
        for gemm, gradient in self.late:
            self._weights()[gemm].grad = gradient
        self.late.clear()


class _Padding(nn.Module):
    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        self.num_gemms, self.align_size = num_gemms, align_size

    def padded(self, m_splits: list[int]) -> list[int]:
        assert isinstance(m_splits, list)
        assert len(m_splits) == self.num_gemms, "Number of splits should match number of GEMMs."
        if self.align_size is None:
            self.align_size = get_align_size_for_quantization(FP8GlobalStateManager.get_fp8_recipe())
        return [-(-rows // self.align_size) * self.align_size for rows in m_splits]


class Fp8Padding(_Padding):
    """Zeros after the rows of each group, up to a multiple."""

    def forward(self, inp: Tensor, m_splits: list[int]) -> tuple[Tensor, list[int]]:
        padded = self.padded(m_splits)
        if padded == m_splits:
            return inp, m_splits
        parts = zip(inp.split(m_splits), padded, strict=True)
        return torch.cat([nn.functional.pad(part, (0, 0, 0, rows - len(part))) for part, rows in parts]), padded


class Fp8Unpadding(_Padding):
    """The rows of each group without those that the padding added."""

    def forward(self, inp: Tensor, m_splits: list[int]) -> Tensor:
        padded = self.padded(m_splits)
        if padded == m_splits:
            return inp
        return torch.cat([part[:rows] for part, rows in zip(inp.split(padded), m_splits, strict=True)])
