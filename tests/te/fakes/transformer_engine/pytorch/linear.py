"""One linear layer."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..device import place
from .base import TransformerEngineBaseModule, check_widths, normal
from .numerics import Product


class Linear(TransformerEngineBaseModule):
    """``y = x @ weight.T + bias``."""

    def __init__(
        self,
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
        parameters_split: Any = None,
        device: torch.device | str = "cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        save_original_input: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        assert tp_size == 1, "the stand-in has no tensor parallelism"
        assert parameters_split is None
        assert not fuse_wgrad_accumulation
        assert not delay_wgrad_compute
        self.in_features, self.out_features = in_features, out_features
        self.use_bias, self.return_bias = bias, return_bias
        where = {"device": place(device), "dtype": params_dtype or torch.get_default_dtype()}
        self.make_parameter("weight", torch.empty(out_features, in_features, **where), init_method or normal)
        if bias:
            self.make_parameter("bias", torch.empty(out_features, **where), nn.init.zeros_)
        else:
            self.bias = torch.empty(0, **where)
        self.reset_parameters(defer_init=torch.device(device).type == "meta")

    def forward(
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool | None = False,
        fp8_grad: bool | None = False,
    ) -> Any:
        inp = self.prepare_forward(inp)
        x = inp.reshape(-1, self.in_features).to(self.activation_dtype)
        if self.fp8:
            assert self.recipe is not None
            check_widths(self.recipe, x.shape)
            check_widths(self.recipe, self.weight.shape)
        weight = self.quantized_weight("weight", self.weight, 0, is_first_microbatch)
        out = Product.apply(x, self.weight, weight, self.quantizer(0, "input"), self.quantizer(0, "gradient"), None)
        out = out.view(-1, *inp.shape[1:-1], self.out_features)  # a vector comes back as one row
        if self.use_bias and not self.return_bias:
            out = out + self.bias.to(out.dtype)
        return (out, self.bias) if self.return_bias else out
