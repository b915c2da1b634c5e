"""Attention of Transformers' models by Transformer Engine, through the library's own registry of implementations."""

import ast
import copy
import inspect
import math
import textwrap
from functools import cache
from typing import Any, NamedTuple

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_moe.optional import probe, require

IMPLEMENTATION = "te"
_KEPT = "_lightning_moe_te_attention"
_WARNED = "_lightning_moe_te_mask_warned"
_KNOWN = frozenset({"dropout", "scaling", "sliding_window", "softcap", "is_causal"}) | {
    # Where tokens lie in their sequences and how long these are, which the mask says too.
    *("position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
    *("attention_mask", "layer_idx", "output_attentions"),
}
_REFUSED = ("position_bias", "s_aux", "indices", "head_mask", "score_mod")


def calls_registry(module: nn.Module) -> bool:
    """Whether the forward of a module looks its attention up in the registry of Transformers."""
    forward = inspect.unwrap(type(module).forward)
    code = getattr(forward, "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names and hasattr(module, "config")


def attention_reason(module: nn.Module) -> str:
    """Say why Transformer Engine cannot compute the attention of a module, an empty string where it can."""
    cls: Any = type(module)
    call = _read(cls)
    if call is None:
        return "its source, which says what it hands over, is not there"
    if getattr(module, "sinks", None) is not None or "s_aux" in call.keywords:
        return "attention sinks are a parameter of the model, and Transformer Engine has its own"
    if unknown := sorted(call.keywords - _KNOWN):
        return f"attention with {', '.join(unknown)}, which Transformer Engine does not have"
    if call.by_name:
        return "its mask depends on the name of the implementation"
    if getattr(module.config, "attention_chunk_size", None):
        return "attention in chunks"
    masks = inspect.unwrap(type(module).forward).__globals__
    if not getattr(module.config, "sliding_window", None):
        return ""
    in_call = "sliding_window" in call.keywords
    if not in_call and "create_sliding_window_causal_mask" in masks:
        return "attention in windows that are in its mask alone"
    if in_call and not any(name.startswith("create_") and "sliding_window" in name for name in masks):
        return "it hands over a window, and no mask with windows is made beside it"
    return ""


class _Call(NamedTuple):
    """How a class calls the implementation: the names it hands over, and whether it asks which one it is."""

    keywords: frozenset[str]
    by_name: bool


@cache
def _read(cls: Any) -> _Call | None:
    try:
        source = inspect.getsource(inspect.unwrap(cls.forward))
        forward, whole = (ast.parse(textwrap.dedent(text)) for text in (source, inspect.getsource(cls)))
    except (OSError, TypeError, SyntaxError):
        return None
    calls = [node for node in ast.walk(forward) if isinstance(node, ast.Call) and node.args]
    on_self = [call for call in calls if isinstance(call.args[0], ast.Name) and call.args[0].id == "self"]
    names = {keyword.arg for call in on_self for keyword in call.keywords}
    compared = [node.left for node in ast.walk(whole) if isinstance(node, ast.Compare)]
    by_name = any(isinstance(left, ast.Attribute) and left.attr == "_attn_implementation" for left in compared)
    return _Call(frozenset(name for name in names if name is not None), by_name)


def check_attention(modules: list[nn.Module]) -> None:
    """Refuse what the installed Transformer Engine is too old for.

    Raises:
        RuntimeError: If a model caps its attention logits and the installed version cannot.
    """
    te = require("transformer_engine", "transformer_engine: layers='attention'")
    if "softcap" in inspect.signature(te.DotProductAttention.__init__).parameters:
        return
    for module in modules:
        if _hands_over_softcap(module):
            raise RuntimeError(
                f"transformer_engine: {type(module).__name__} caps its attention logits, which version"
                f" {probe('transformer_engine').version} of the package cannot (2.20 can); upgrade it, or leave"
                " 'attention' out of layers"
            )


def use_transformer_engine(model: nn.Module, modules: list[nn.Module]) -> None:
    """Register the implementation with Transformers and choose it for these attention modules.

    The choice lies in configurations, which the user may have for other models too, or in hyperparameters: the model
    gets copies, which are related to each other as the originals are.

    Args:
        model: The model.
        modules: Attention modules in it.
    """
    if all(_chosen(module) for module in modules):
        return
    transformers: Any = require("transformers", "transformer_engine: layers='attention'")
    transformers.AttentionInterface.register(IMPLEMENTATION, attention_forward)
    transformers.AttentionMaskInterface.register(IMPLEMENTATION, attention_mask)
    copies: dict[int, Any] = {}
    for module in model.modules():
        config = vars(module).get("config")
        if isinstance(config, transformers.PreTrainedConfig):
            vars(module)["config"] = copy.deepcopy(config, copies)
    for module in modules:
        # The property would choose it for every model inside as well, also for those that are left alone.
        module.config._attn_implementation_internal = IMPLEMENTATION  # type: ignore[union-attr]


def _chosen(module: Any) -> bool:
    return getattr(module.config, "_attn_implementation_internal", None) == IMPLEMENTATION


def attention_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """Make the mask that :func:`attention_forward` takes.

    Arguments are those of ``transformers.masking_utils.sdpa_mask``.

    Returns:
        ``None`` where the attention is causal, or causal within the model's window, and no token is padding; else
        ``[B, 1, Q, K]``, true where a token is seen.
    """
    masking: Any = require("transformers", "transformer_engine: layers='attention'").masking_utils
    window, square = kwargs.get("local_size"), kwargs.get("q_length") == kwargs.get("kv_length")
    if window is not None and square and window == getattr(kwargs.get("config"), "sliding_window", None):
        # Transformer Engine knows windows; without its size the mask is left out for them too.
        whole = {**kwargs, "local_size": None}
        if kwargs.get("allow_is_causal_skip", True) and masking.sdpa_mask(*args, **whole) is None:
            return None
        kwargs["allow_is_causal_skip"] = False
    return masking.sdpa_mask(*args, **kwargs)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention by ``transformer_engine.pytorch.DotProductAttention``.

    Args:
        module: The attention module.
        query: ``[B, heads, Q, D]``.
        key: ``[B, groups, K, D]``.
        value: ``[B, groups, K, D_v]``.
        attention_mask: What :func:`attention_mask` made: ``[B, 1, Q, K]``, true where a token is seen, or ``None``.
        dropout: Probability that a weight is dropped.
        scaling: What the logits are multiplied by, ``1 / sqrt(D)`` by default.
        sliding_window: Tokens that a query sees, itself and those before it.
        softcap: Bound of the logits.
        is_causal: Whether a query sees only itself and what is before it; by default what the module says.
        **kwargs: What else a model hands over.

    Returns:
        ``[B, Q, heads, D_v]`` and, in the place of the weights, ``None``.

    Raises:
        ValueError: If the model asks for something that Transformer Engine does not compute.
    """
    _check_asked(module, kwargs)
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    kind, mask, window = _mask(module, query.shape[2], key.shape[2], attention_mask, causal, sliding_window)
    scale = 1 / math.sqrt(query.shape[-1]) if scaling is None else scaling
    layer = _layer(module, query.shape, key.shape, value.shape, dropout, scale, softcap)
    out = layer(
        *(tensor.transpose(1, 2).contiguous() for tensor in (query, key, value)),
        attention_mask=mask,
        attn_mask_type=kind,
        window_size=window,
    )
    return out.view(*out.shape[:2], query.shape[1], value.shape[-1]), None


def _mask(
    module: nn.Module,
    queries: int,
    keys: int,
    attention_mask: Tensor | None,
    causal: bool,
    sliding_window: int | None,
) -> tuple[str, Tensor | None, tuple[int, int]]:
    """What the package calls this kind of mask, the mask where one is handed over, and the window."""
    if attention_mask is not None:
        if attention_mask.dtype != torch.bool:
            raise ValueError(
                f"{type(module).__name__} makes a mask of its own in {attention_mask.dtype}, and Transformer Engine"
                " takes true and false; set transformer_engine with layers: [linear, norm]"
            )
        _warn_of_masks(module)
        return "arbitrary", ~attention_mask[..., :keys], (-1, -1)
    if not causal or queries == 1:
        return "no_mask", None, (-1, -1)
    if queries == keys:
        return "causal", None, (-1 if sliding_window is None else sliding_window - 1, 0)
    raise ValueError(
        f"{type(module).__name__}: Transformer Engine's attention does not take {queries} queries and {keys} keys"
        " without a mask; generate with the unchanged model, or leave 'attention' out of layers"
    )


def _check_asked(module: nn.Module, kwargs: dict[str, Any]) -> None:
    for name in _REFUSED:
        if kwargs.get(name) is not None:
            raise ValueError(
                f"{type(module).__name__}: Transformer Engine's attention has no {name}; set transformer_engine with"
                " layers: [linear, norm]"
            )
    if kwargs.get("output_attentions"):
        raise ValueError(
            "output_attentions=True needs attention weights, which Transformer Engine does not return; set"
            " transformer_engine with layers: [linear, norm]"
        )


def _warn_of_masks(module: nn.Module) -> None:
    if not vars(module).get(_WARNED):
        vars(module)[_WARNED] = True
        rank_zero_warn(
            "transformer_engine: this batch has padding or several sequences in a row, for which Transformer Engine has"
            " only its unfused attention: slow, and its memory grows with the square of the length. Pack without"
            " padding and position_ids, or set layers: [linear, norm] to keep the model's own attention"
        )


def _hands_over_softcap(module: nn.Module) -> bool:
    cls: Any = type(module)
    call = _read(cls)
    if call is None or "softcap" not in call.keywords:
        return False
    return any(getattr(module, name, None) for name in ("attn_logit_softcapping", "softcap"))


def _layer(
    module: nn.Module,
    query: Any,
    key: Any,
    value: Any,
    dropout: float,
    scale: float,
    softcap: float | None,
) -> nn.Module:
    """The layer of a module for these shapes. It has no parameters, and no place in the state of the model."""
    made: dict[tuple[Any, ...], nn.Module] = vars(module).setdefault(_KEPT, {})
    options = (query[1], (query[3], value[3]), key[1], dropout, scale, softcap)
    if options not in made:
        te: Any = require("transformer_engine", "transformer_engine: layers='attention'")
        made[options] = te.DotProductAttention(
            query[1],
            query[3] if query[3] == value[3] else (query[3], value[3]),
            num_gqa_groups=key[1],
            attention_dropout=dropout,
            qkv_format="bshd",
            attn_mask_type="causal",
            softmax_scale=scale,
            attention_type="self",
            **({"softcap": softcap} if softcap else {}),
        )
    return made[options].train(module.training)
