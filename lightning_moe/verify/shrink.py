"""A smaller model of the same kind, for a comparison that is quick and fits one device."""

from typing import Any

import torch
from lightning.pytorch import LightningModule

from lightning_moe.experts import find_experts
from lightning_moe.models import CausalLM
from lightning_moe.models.configuration import has_weights
from lightning_moe.optional import require

_LAYERS = 2
_WIDTH = 256  # of what is between the two matrices of an MLP; a multiple of what any kernel asks for
_WIDTHS = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")


def shrink(module: LightningModule) -> str:
    """Give a :class:`CausalLM` fewer layers and, with random weights, narrower MLPs, before its network is built.

    It keeps the first layers, at least two, and as many more as it takes to have one with experts. The vocabulary, the
    width of the hidden states, the heads and the number of experts stay.

    Args:
        module: The LightningModule of the config.

    Returns:
        What was done, in one line.

    Raises:
        ValueError: If it is another LightningModule, or its configuration has no number of layers.
    """
    if not isinstance(module, CausalLM):
        raise ValueError(
            f"--shrink makes lightning_moe.models.CausalLM smaller, and cannot know how for {type(module).__name__}:"
            " leave it out and set the sizes yourself, for example --model.init_args.num_layers 2"
        )
    config = module.network_config
    layers = getattr(config.get_text_config(), "num_hidden_layers", None)
    if config.get_text_config() is not config or not isinstance(layers, int):
        raise ValueError(
            f"--shrink needs num_hidden_layers in {type(config).__name__}, which does not have it: leave it out and set"
            " the sizes in model.init_args.config"
        )
    narrow = module.pretrained is None or not has_weights(module.pretrained)
    wanted = _has_experts(config)
    for kept in range(min(_LAYERS, layers), layers + 1):
        smaller = _smaller(config, layers, kept, narrow)
        if _has_experts(smaller) == wanted:
            break
    module.network_config = smaller
    module.pretrained_strict = False  # its other layers have no place any more
    widths = [
        f"{name} {getattr(smaller, name)} of {getattr(config, name)}"
        for name in _WIDTHS
        if getattr(smaller, name, None) != getattr(config, name, None)
    ]
    return f"--shrink: {', '.join([f'{kept} of {layers} layers', *widths])}"


def _smaller(config: Any, layers: int, kept: int, narrow: bool) -> Any:
    fields = config.to_dict()
    for name, value in fields.items():
        if _has_one_entry_a_layer(name, value) and len(value) == layers:
            fields[name] = value[:kept]
        elif narrow and name in _WIDTHS and isinstance(value, int):
            fields[name] = min(value, _WIDTH)
    fields["num_hidden_layers"] = kept
    return type(config).from_dict(fields)


def _has_one_entry_a_layer(name: str, value: Any) -> bool:
    """Whether a field lists the kinds of the layers, or which of them have experts."""
    return (isinstance(value, list | tuple) and "layer" in name) or (isinstance(value, str) and "pattern" in name)


def _has_experts(config: Any) -> bool:
    transformers = require("transformers", "CausalLM")
    with torch.device("meta"):
        return bool(find_experts(transformers.AutoModelForCausalLM.from_config(config)))
