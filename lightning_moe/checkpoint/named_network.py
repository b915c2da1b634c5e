"""Which network of Transformers is in a checkpoint, by what the checkpoint, a config or a folder says."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LightningArgumentParser
from torch import nn

from lightning_moe.checkpoint.network import PURPOSE, FoundNetwork, find_network, meta_twin, on_meta
from lightning_moe.models.configuration import generate_as_in, network_config, without_quantization
from lightning_moe.optional import one_line, require

_log = logging.getLogger(__name__)

# What a checkpoint of CausalLM says of its network, among its hyperparameters.
_NETWORK = ("config", "config_class", "pretrained")
_CAUSAL_LM = "model"


def from_hyper_parameters(meta: Mapping[str, Any], path: Path) -> FoundNetwork:
    """Build the network that a checkpoint of ``CausalLM`` names in its hyperparameters.

    Args:
        meta: What the checkpoint holds beside weights.
        path: The checkpoint, for messages.

    Raises:
        ValueError: If it does not name one, or the folder that it names is no longer there.
    """
    parameters = meta.get("hyper_parameters") or {}
    if not any(parameters.get(name) for name in _NETWORK):
        raise ValueError(
            f"ckpt_path {path} does not say which network it holds, as one of lightning_moe.models.CausalLM does; give"
            " --config with the config.yaml of its run, or --pretrained with a folder that holds the network's"
            " config.json"
        )
    return _causal_lm(parameters, f"the hyperparameters in ckpt_path {path}")


def from_init_args(init_args: Mapping[str, Any], source: str) -> FoundNetwork:
    """Build the network that a config of ``CausalLM`` names.

    Args:
        init_args: The arguments of the class.
        source: The config file, for messages.

    Raises:
        ValueError: If it does not name one that exists.
    """
    return _causal_lm(init_args, source)


def _causal_lm(values: Mapping[str, Any], source: str) -> FoundNetwork:
    config, config_class, pretrained = (values.get(name) for name in _NETWORK)
    try:
        built = without_quantization(network_config(config, config_class, pretrained))
    except ValueError as error:
        moved = "; --pretrained names the folder where it lies now" if pretrained else ""
        raise ValueError(f"{source}: {error}{moved}") from error
    model = on_meta(_causal_lm_classes()[type(built)], built)
    folder = Path(pretrained) if pretrained else None
    if folder is not None:
        generate_as_in(folder, model)
    return FoundNetwork(_CAUSAL_LM, model, folder)


def _causal_lm_classes() -> Any:
    """The classes of causal language models, by those of their configurations."""
    return require("transformers", PURPOSE).models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING


def from_folder(folder: Path, names: Sequence[str], module: str | None = None) -> FoundNetwork:
    """Build the network that a folder's ``config.json`` describes, and find it among the tensors of a checkpoint.

    Args:
        folder: The folder.
        names: The names of the checkpoint's tensors.
        module: Its name in the LightningModule, ``None`` to find it.

    Raises:
        ValueError: If the folder describes none, or the checkpoint has none or several of that kind.
    """
    transformers = require("transformers", PURPOSE)
    if not (folder / "config.json").is_file():
        raise ValueError(f"pretrained {folder} must be a folder with a config.json")
    try:
        config = transformers.AutoConfig.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:
        raise ValueError(f"pretrained {folder}: config.json cannot be used ({one_line(error)})") from error
    config = without_quantization(config)
    named = [getattr(transformers, name, None) for name in getattr(config, "architectures", None) or ()]
    classes = [cls for cls in named if isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)]
    cls = classes[0] if classes else _causal_lm_classes().get(type(config), None)
    if cls is None:
        raise ValueError(
            f"pretrained {folder}: config.json is of a {type(config).__name__}, for which Transformers"
            f" {transformers.__version__} has no causal language model; name the class in its field `architectures`"
        )
    model = on_meta(cls, config)
    generate_as_in(folder, model)
    if module is None:
        module = _prefix(model, names, folder)
    return FoundNetwork(module, model, folder)


def _prefix(model: nn.Module, names: Sequence[str], folder: Path) -> str:
    """The one name under which all that is the network's may lie: where most of its tensors are."""
    own = list(model.state_dict())
    counts: dict[str, int] = {}
    for name in names:
        for key in own:
            if name == key or name.endswith(f".{key}"):
                prefix = name.removesuffix(key).removesuffix(".")
                counts[prefix] = counts.get(prefix, 0) + 1
    best = [prefix for prefix, count in counts.items() if count == max(counts.values())]
    if len(best) != 1:
        found = f"several: {', '.join(map(repr, sorted(best)))}; name one with --module" if best else "none"
        raise ValueError(f"pretrained {folder} describes a {type(model).__name__}; of it the checkpoint has {found}")
    return best[0]


def from_module(section: Mapping[str, Any], source: str, module: str | None = None) -> FoundNetwork:
    """Build the LightningModule that a config names, without memory, and find the network in it.

    Args:
        section: The config's section ``model``: ``class_path`` and ``init_args``.
        source: The config file, for messages.
        module: The network's name in the LightningModule, ``None`` to find it.

    Raises:
        ValueError: If the LightningModule cannot be built, or has no such network or several.
    """
    try:
        built = _build(section)
    except Exception as error:
        # Loading weights under the meta device is what Transformers refuses; then they are loaded for once.
        _log.warning("%s: %s is built in memory, because without it: %s", source, section["class_path"], error)
        try:
            built = _build(section, device="cpu")
        except Exception as again:
            raise ValueError(f"{source}: {section['class_path']} cannot be built: {one_line(again)}") from again
    found = find_network(built, module)
    return FoundNetwork(found.name, meta_twin(found.model))


def _build(section: Mapping[str, Any], device: str = "meta") -> LightningModule:
    parser = LightningArgumentParser()
    parser.add_lightning_class_args(LightningModule, "model", subclass_mode=True)
    with torch.device(device):
        built: LightningModule = parser.instantiate_classes(parser.parse_object({"model": dict(section)})).model
        built.configure_model()
    return built
