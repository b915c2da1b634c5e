"""Training FLOPs a token of a decoder-only transformer, dense or Mixture-of-Experts, read from its configuration.

The convention, which every figure made from these numbers carries:

* One multiply-add is two FLOPs and the backward costs twice the forward, so a weight that a token meets costs six.
* Of the routed experts only the ``top_k`` that a token visits count, whatever the load of each.
* Causal attention is counted at the half that has to be computed (``causal=True``), as Megatron-LM, MaxText and
  torchtitan do. ``causal=False`` counts the whole square, as PaLM, OLMo-core and the FLOP counter of PyTorch do.
* The embedding look-up, norms, activations and the softmax are not counted, nor is work that is done twice, such as the
  recomputation of activations: FLOPs of the model, not of the hardware.
* The router's matrix multiplication is reported but not part of the total, as in Megatron-LM, so that figures compare
  with the published ones (it is 0.3 % of Qwen3-30B-A3B).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

CONVENTION = "active weights and the causal half of attention, without router and recomputation"

# A feed-forward without a gate has two matrices, not three. No field says so: the activation does, or the family.
_UNGATED_ACTIVATIONS = frozenset({"relu", "relu2", "xielu"})
_UNGATED_FAMILIES = frozenset({"gpt_neox", "phi", "starcoder2", "biogpt"})

_FULL_ATTENTION = frozenset({"full_attention", "attention", "global"})
_WINDOWED_ATTENTION = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}

# Fields that say of a configuration that it multiplies matrices which the formula does not know.
_UNREADABLE = (
    ("index_topk", "sparse attention with an indexer"),
    ("index_n_heads", "sparse attention with an indexer"),
    ("indexer_n_heads", "sparse attention with an indexer"),
    ("o_lora_rank", "a low-rank output projection"),
    ("attn_output_gate", "gated attention"),
    ("conv_L_cache", "convolutions"),
    ("is_moe", "experts that are rows of an embedding"),
    ("moe_latent_size", "experts in a latent space"),
    ("zero_expert_num", "experts without computation"),
    ("enable_moe_block", "a dense and a sparse block side by side"),
    ("loop_layer_index_start", "layers that run more than once"),
    ("n_recurrent_loops", "layers that run more than once"),
    ("H_cycles", "layers that run more than once"),
    ("type_vocab_size", "an encoder"),
)
# Families with gated attention or another block that none of their fields mentions.
_UNREADABLE_FAMILIES = frozenset({"afmoe", "beam", "mimo_v2_flash"})


@dataclass(frozen=True)
class TransformerFlops:
    """Training FLOPs (forward and backward) a token, by component.

    Attributes:
        attention_projections: Query, key, value and output projections of all layers.
        attention_scores: The two products of attention, queries with keys and weights with values.
        dense_mlp: Feed-forward blocks of the layers without experts.
        routed_experts: The ``top_k`` experts that a token visits.
        shared_experts: Experts that every token visits.
        lm_head: The projection onto the vocabulary.
        router: The router's projection; not part of ``total``.
        sequence_length: Tokens that attend to each other.
        causal: Whether attention is counted at its causal half.
    """

    attention_projections: float
    attention_scores: float
    dense_mlp: float
    routed_experts: float
    shared_experts: float
    lm_head: float
    router: float
    sequence_length: int
    causal: bool

    @property
    def total(self) -> float:
        """The sum that TFLOPS figures are made from: everything but the router."""
        experts = self.dense_mlp + self.routed_experts + self.shared_experts
        return self.attention_projections + self.attention_scores + experts + self.lm_head


def transformer_flops_per_token(config: Any, sequence_length: int, *, causal: bool = True) -> TransformerFlops:
    """Count the training FLOPs of one token of a decoder-only transformer.

    Args:
        config: A configuration of Transformers (or any object with the same field names) of a dense or MoE decoder.
        sequence_length: Tokens in the sequence that a token attends within.
        causal: Count the causal half of attention (the default), or the whole square.

    Raises:
        ValueError: If a field that the formula needs is missing, or if the configuration has layers that the formula
            does not know; the message names the field.
    """
    if sequence_length < 1:
        raise ValueError(f"sequence_length must be at least 1, got {sequence_length}")
    if hasattr(config, "get_text_config"):
        config = config.get_text_config(decoder=True)
    _refuse_unreadable(config)
    hidden, layers = _need(config, "hidden_size"), _need(config, "num_hidden_layers")
    projections, width = _attention(config, hidden)
    attended = sum(_attended_tokens(config, layer, layers, sequence_length, causal) for layer in range(layers))
    dense, routed, shared, router = _feed_forward(config, hidden, layers)
    return TransformerFlops(
        attention_projections=6.0 * layers * projections,
        # One product costs 2 * width * attended forward, and three times that with the backward. With
        # width = queries + values and all S tokens attended this is the 12 * L * q * S of the literature, 6 if causal.
        attention_scores=6.0 * width * attended,
        dense_mlp=6.0 * dense,
        routed_experts=6.0 * routed,
        shared_experts=6.0 * shared,
        lm_head=6.0 * hidden * _need(config, "vocab_size"),
        router=6.0 * router,
        sequence_length=sequence_length,
        causal=causal,
    )


def _first(config: Any, *names: str) -> Any:
    """Return the first of the named fields that is set, else ``None``."""
    for name in names:
        try:
            value = getattr(config, name, None)
        except RuntimeError as error:  # what Transformers raises for a field that differs between layers
            raise ValueError(f"FLOPs of {type(config).__name__} are unknown: {error}") from error
        if value is not None:
            return value
    return None


def _need(config: Any, *names: str) -> int:
    value = _first(config, *names)
    if not isinstance(value, int):
        found = "is missing" if value is None else f"is {value!r}, not one number for all layers"
        raise ValueError(f"FLOPs of {type(config).__name__} are unknown: the field {' or '.join(names)} {found}")
    return value


def _refuse_unreadable(config: Any) -> None:
    """Raise for a configuration whose layers the formula does not cover: a wrong figure is worse than none."""
    if getattr(config, "model_type", None) in _UNREADABLE_FAMILIES:
        raise ValueError(f"FLOPs of {type(config).__name__} are unknown: the formula does not cover this model_type")
    for name, meaning in _UNREADABLE:
        if getattr(config, name, None):
            raise ValueError(f"FLOPs of {type(config).__name__} are unknown: the field {name} means {meaning}")
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        unknown = sorted(set(kinds) - _FULL_ATTENTION - _WINDOWED_ATTENTION.keys())
        if unknown:
            raise ValueError(f"FLOPs of {type(config).__name__} are unknown: the field layer_types holds {unknown}")
    elif mixer := next((name for name in vars(config) if name.startswith(("mamba_", "ssm_", "state_size"))), None):
        raise ValueError(
            f"FLOPs of {type(config).__name__} are unknown: the field {mixer} means layers of another kind"
        )


def _attention(config: Any, hidden: int) -> tuple[int, int]:
    """Return the projection weights of one attention layer, and the widths of its two products added up."""
    heads = _need(config, "num_attention_heads")
    if getattr(config, "kv_lora_rank", None):
        # Multi-head latent attention: queries and keys have a part without and a part with rotary embedding, and keys
        # and values come from a common latent vector. The rotary part of the key is shared by all heads.
        rope, latent = _need(config, "qk_rope_head_dim"), _need(config, "kv_lora_rank")
        query, value = _need(config, "qk_nope_head_dim") + rope, _need(config, "v_head_dim")
        rank = _first(config, "q_lora_rank")
        weights = hidden * heads * query if rank is None else rank * (hidden + heads * query)
        weights += hidden * (latent + rope) + latent * heads * (query - rope + value) + heads * value * hidden
        return weights, heads * (query + value)
    head_dim = _first(config, "head_dim") or hidden // heads
    value_dim = _first(config, "v_head_dim") or head_dim
    key_heads = _first(config, "num_key_value_heads") or heads
    # H x q for the queries, H x kv for the keys and for the values, q x H for the output.
    weights = hidden * (heads * head_dim + key_heads * head_dim + key_heads * value_dim + heads * value_dim)
    return weights, heads * (head_dim + value_dim)


def _attended_tokens(config: Any, layer: int, layers: int, length: int, causal: bool) -> float:
    """Return how many tokens a token of one layer attends to, in the mean over the sequence."""
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        windowed = getattr(config, "use_sliding_window", True)
        window = _first(config, "sliding_window") if windowed else None
        chunk = None
    else:
        field = _WINDOWED_ATTENTION.get(kinds[layer % len(kinds)])
        size = _need(config, field) if field is not None else None
        window, chunk = (size, None) if field == "sliding_window" else (None, size)
    if chunk is not None:
        length = min(length, chunk)
    window = length if window is None else min(length, window)
    if not causal:
        return float(window)
    # The token at position t sees min(t, w) tokens; the mean of that over t = 1..S is w - w^2 / (2 S), up to the
    # diagonal, which the convention leaves out. Without a window (w = S) it is S / 2.
    return window - window * window / (2 * length)


def _feed_forward(config: Any, hidden: int, layers: int) -> tuple[int, int, int, int]:
    """Return the weights that a token meets in all layers: dense, routed experts, shared experts, router."""
    activation = _first(config, "hidden_act", "hidden_activation")
    ungated = activation in _UNGATED_ACTIVATIONS or getattr(config, "model_type", None) in _UNGATED_FAMILIES
    matrices = 2 if ungated else 3
    experts = _first(config, "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    if getattr(config, "is_moe", None) is False:
        experts = None
    sparse = [bool(experts) and is_sparse for is_sparse in _sparse_layers(config, layers)]
    n_sparse = sum(sparse)
    dense = routed = shared = router = 0
    if n_sparse < layers:
        width = _need(config, "intermediate_size_mlp", "prefix_dense_intermediate_size", "intermediate_size")
        dense = (layers - n_sparse) * matrices * hidden * width
    if n_sparse:
        width = _need(config, "moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size")
        top_k = _need(config, "num_experts_per_tok", "top_k", "moe_k", "moe_topk", "num_experts_per_token")
        routed = n_sparse * matrices * hidden * width * top_k
        shared_width, gate = _shared_experts(config, width)
        # A shared expert that a sigmoid gates has one more row of weights.
        shared = n_sparse * (matrices * hidden * shared_width + (hidden if gate else 0))
        router = n_sparse * hidden * experts
    return dense, routed, shared, router


def _shared_experts(config: Any, expert_width: int) -> tuple[int, bool]:
    """Return the width of all shared experts of a layer together, and whether a sigmoid gates them."""
    if width := _first(config, "shared_expert_intermediate_size"):
        return width, True
    if width := _first(config, "shared_intermediate_size", "moe_shared_expert_intermediate_size"):
        return width, False
    if str(getattr(config, "model_type", "")).startswith("llama4"):
        return expert_width, False  # always one, without a field that says so
    names = ("n_shared_experts", "num_shared_experts", "num_shared_expert", "moe_num_shared_experts")
    return (_first(config, *names) or 0) * expert_width, False


def _sparse_layers(config: Any, layers: int) -> list[bool]:
    """Return which layers hold experts, if the model has any."""
    rules: list[Callable[[int], bool]] = []
    if (kinds := _first(config, "mlp_layer_types")) is not None:
        rules.append(lambda layer: kinds[layer] != "dense")
    elif (listed := _first(config, "moe_layers")) is not None:
        rules.append(lambda layer: layer in listed)
    else:
        first_sparse = _first(config, "first_k_dense_replace", "num_dense_layers", "moe_layer_start_index") or 0
        last_sparse = _first(config, "moe_layer_end_index")
        last_sparse = layers - 1 if last_sparse is None or last_sparse < 0 else last_sparse
        rules.append(lambda layer: first_sparse <= layer <= last_sparse)
        # Qwen counts its period from 1; ERNIE counts it from 1 as well, under another name.
        period = _first(config, "decoder_sparse_step", "moe_layer_interval") or 1
        rules.append(lambda layer: (layer + 1) % period == 0)
        dense_layers = _first(config, "mlp_only_layers") or ()
        rules.append(lambda layer: layer not in dense_layers)
    return [all(rule(layer) for rule in rules) for layer in range(layers)]
