"""Attention, unfused."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..device import place
from .base import TransformerEngineBaseModule

_MASKS = ("no_mask", "causal", "causal_bottom_right", "arbitrary", "padding", "padding_causal")


class DotProductAttention(TransformerEngineBaseModule):
    """``softmax(q @ k.T * scale) @ v``; the heads of the result are merged."""

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        softcap: float = 0.0,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Callable | None = None,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: Any = None,
        cp_global_ranks: Any = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool | None = False,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        channels = kv_channels if isinstance(kv_channels, int) else kv_channels[0]
        self.num_attention_heads, self.num_gqa_groups = num_attention_heads, num_gqa_groups or num_attention_heads
        assert num_attention_heads % self.num_gqa_groups == 0
        self.attention_dropout, self.qkv_format, self.attn_mask_type = attention_dropout, qkv_format, attn_mask_type
        self.window_size, self.softcap, self.channels = window_size, softcap, channels
        self.softmax_scale = 1.0 / math.sqrt(channels) if softmax_scale is None else softmax_scale
        self.softmax_type = softmax_type
        if softmax_type == "learnable":
            sinks = torch.zeros(num_attention_heads, device=place("cuda"))
            self.make_parameter("softmax_offset", sinks, torch.nn.init.zeros_)
        else:
            self.softmax_offset = None if softmax_type == "vanilla" else torch.zeros(num_attention_heads)

    def forward(
        self,
        query_layer: Tensor | None = None,
        key_layer: Tensor | None = None,
        value_layer: Tensor | None = None,
        attention_mask: Any = None,
        qkv_format: str | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        softcap: float | None = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        fast_zero_fill: bool = True,
        inference_params: Any = None,
        pad_between_seqs: bool | None = None,
        fp8_output: bool | None = False,
        bf16_backward: bool | None = False,
        num_splits: int | None = 1,
        score_mod: Callable | None = None,
        score_mod_bprop: Callable | None = None,
        score_mod_tensors: Any = None,
        score_mod_bprop_tensors: Any = None,
        qkv_layer: Tensor | None = None,
        kv_layer: Tensor | None = None,
        qkv_interleave_dim: int = -3,
        thd_attention_policies: Any = None,
        thd_attention_policy_dispatch: str = "auto",
    ) -> Tensor:
        return self.compute(
            query_layer,
            key_layer,
            value_layer,
            layout=qkv_format or self.qkv_format,
            mask_type=(attn_mask_type or self.attn_mask_type).replace(",", "_"),
            mask=attention_mask,
            window=window_size or self.window_size,
            lengths=(cu_seqlens_q, cu_seqlens_kv),
            bias=core_attention_bias if core_attention_bias_type == "post_scale_bias" else None,
            softcap=self.softcap if softcap is None else softcap,
        )

    def compute(
        self,
        query: Any,
        key: Any,
        value: Any,
        *,
        layout: str,
        mask_type: str,
        mask: Any,
        window: tuple[int, int] | None,
        lengths: tuple[Any, Any],
        bias: Tensor | None,
        softcap: float,
    ) -> Tensor:
        for tensor, heads in ((query, self.num_attention_heads), (key, self.num_gqa_groups)):
            if tensor.dtype not in (torch.float16, torch.bfloat16, torch.float32):
                raise TypeError(f"DotProductAttention does not take {tensor.dtype}")
            if tensor.shape[-2] != heads:
                raise ValueError(f"expected {heads} heads in {list(tensor.shape)}, layout {layout}")
        if layout == "thd":
            return self._packed(query, key, value, mask_type, window, lengths)
        if layout == "sbhd":
            query, key, value = (t.transpose(0, 1) for t in (query, key, value))
        out = self._attend(query, key, value, self._hidden(query, key, mask_type, mask, window, lengths), bias, softcap)
        return out.transpose(0, 1) if layout == "sbhd" else out

    def _hidden(
        self, query: Tensor, key: Tensor, mask_type: str, mask: Any, window: Any, lengths: tuple[Any, Any]
    ) -> Tensor:
        """``[b or 1, 1 or h, q, k]`` true where a position is not seen."""
        if mask_type not in _MASKS:
            raise ValueError(f"attn_mask_type {mask_type!r} is not supported")
        rows, columns = query.shape[1], key.shape[1]
        shift = columns - rows if "bottom_right" in mask_type or mask_type in ("no_mask", "arbitrary") else 0
        distance = torch.arange(columns)[None, :] - torch.arange(rows)[:, None] - shift
        hidden = (distance > 0) if "causal" in mask_type else torch.zeros(rows, columns, dtype=torch.bool)
        left, right = window or (-1, -1)
        hidden = hidden | ((distance < -left) if left >= 0 else False) | ((distance > right) if right >= 0 else False)
        hidden = hidden[None, None].to(query.device)
        if mask_type == "arbitrary":
            return hidden | mask
        if "padding" in mask_type:
            if mask is None:
                own = lengths[1].diff()
                mask = (torch.arange(columns)[None, :] >= own[:, None])[:, None, None]
            return hidden | (mask[1] if isinstance(mask, tuple) else mask)
        assert mask is None, "this mask type takes no attention_mask"
        return hidden

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, hidden: Tensor, bias: Tensor | None, softcap: float
    ) -> Tensor:
        times = self.num_attention_heads // self.num_gqa_groups
        q = query.float().transpose(1, 2)
        k, v = (t.float().transpose(1, 2).repeat_interleave(times, 1) for t in (key, value))
        scores = q @ k.transpose(2, 3) * self.softmax_scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        if bias is not None:
            scores = scores + bias
        scores = scores.masked_fill(hidden, -torch.inf)
        if self.softmax_offset is not None:
            sink = self.softmax_offset.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, sink], -1)
        chances = scores.softmax(-1).nan_to_num(0.0)[..., : key.shape[1]]
        chances = torch.dropout(chances, self.attention_dropout, self.training)
        return (chances @ v).transpose(1, 2).flatten(2).to(query.dtype)

    def _packed(
        self, query: Tensor, key: Tensor, value: Tensor, mask_type: str, window: Any, lengths: tuple[Any, Any]
    ) -> Tensor:
        assert mask_type in ("padding", "padding_causal"), "thd takes a padding mask"
        own = mask_type.removeprefix("padding").removeprefix("_") or "no_mask"
        parts = zip(
            *(t.split(n.diff().tolist()) for t, n in zip((query, key, value), (*lengths, lengths[1]), strict=True)),
            strict=True,
        )
        results = []
        for part in parts:
            q, k, v = (t[None] for t in part)
            results.append(self._attend(q, k, v, self._hidden(q, k, own, None, window, lengths), None, self.softcap)[0])
        return torch.cat(results)
