"""From the options of a model to a configuration of Transformers, with errors before any process group exists."""

import copy
import dataclasses
import difflib
import inspect
import re
import sys
from pathlib import Path
from typing import Any

from lightning_moe.checkpoint.safetensors_files import weight_map
from lightning_moe.optional import require

# What every configuration class takes beside its own fields.
_COMMON_FIELDS = frozenset({"attn_implementation", "experts_implementation", "rope_theta", "partial_rotary_factor"})
_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")
_OTHER_WEIGHT_FILES = ("*.bin", "*.pt", "*.pth", "*.bin.index.json")


def network_config(config: dict[str, Any] | None, config_class: str | None, pretrained: str | None) -> Any:
    """Build the configuration of a causal language model in one of three ways.

    Args:
        config: Fields of the configuration; with the key ``model_type`` they are enough.
        config_class: Name of a configuration class of Transformers that ``config`` are the fields of.
        pretrained: A folder with a ``config.json``.

    Returns:
        A ``transformers.PreTrainedConfig``.

    Raises:
        ModuleNotFoundError: If Transformers is not installed.
        ValueError: If not exactly one way is chosen, if a class, model type, field, folder or file does not exist, or
            if a field has a value that is not allowed.
    """
    transformers = require("transformers", "CausalLM")
    _check_one_way(config, config_class, pretrained)
    if pretrained is not None:
        _check_folder(Path(pretrained))
        built = transformers.AutoConfig.from_pretrained(pretrained, local_files_only=True)
        _causal_lm_class(transformers, type(built), f"pretrained={pretrained!r}")
        return built
    fields = dict(config or {})
    if config_class is not None:
        cls = _class_by_name(transformers, config_class)
    else:
        cls = _class_by_model_type(transformers, fields.pop("model_type"))
    model_class = _causal_lm_class(transformers, cls, f"config_class={cls.__name__!r}")
    _check_fields(fields, cls, model_class)
    try:
        return cls(**fields)
    except Exception as error:  # Transformers validates types with exceptions of its own
        raise ValueError(f"config: {cls.__name__} does not accept its fields: {error}") from error


def has_weights(folder: str) -> bool:
    """Say whether a folder holds weights as safetensors."""
    return any(any(Path(folder).glob(pattern)) for pattern in _WEIGHT_FILES)


def without_quantization(config: Any) -> Any:
    """Return a configuration for weights that are no longer quantized as their files are: itself where they are not."""
    if not any(hasattr(part, "quantization_config") for part in (config, config.get_text_config())):
        return config
    plain = copy.deepcopy(config)
    for part in (plain, plain.get_text_config()):
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    return plain


def generate_as_in(folder: str | Path, model: Any) -> None:
    """Give a model the generation config of a folder, which in old folders is a part of ``config.json``.

    Args:
        folder: The folder.
        model: A ``transformers.PreTrainedModel``.
    """
    if not model.can_generate():
        return
    files = [name for name in ("generation_config.json", "config.json") if (Path(folder) / name).is_file()]
    model.generation_config = require("transformers", "CausalLM").GenerationConfig.from_pretrained(
        str(folder), config_file_name=files[0], local_files_only=True, _from_model_config=files[0] == "config.json"
    )


def _check_one_way(config: dict[str, Any] | None, config_class: str | None, pretrained: str | None) -> None:
    by_type = config is not None and "model_type" in config
    ways = (
        "name the network in exactly one way: config_class with config (its fields), or config with the key model_type,"
        " or pretrained (a folder with config.json)"
    )
    if pretrained is not None and (config is not None or config_class is not None):
        given = " and ".join(name for name, value in (("config", config), ("config_class", config_class)) if value)
        raise ValueError(f"pretrained={pretrained!r} cannot be combined with {given or 'config'}; {ways}")
    if config_class is not None and by_type:
        raise ValueError(f"config_class={config_class!r} and config.model_type are both given; {ways}")
    if pretrained is None and config_class is None and not by_type:
        missing = "no network is named" if config is None else "config has no key model_type"
        raise ValueError(f"{missing}; {ways}")


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise ValueError(
            f"pretrained={str(folder)!r} is not a folder. Nothing is downloaded here: to use a model of the Hugging"
            " Face hub run `hf download ORGANISATION/MODEL --local-dir FOLDER` first and give that folder"
        )
    if not (folder / "config.json").is_file():
        raise ValueError(f"pretrained={str(folder)!r} holds no config.json")
    others = [path.name for pattern in _OTHER_WEIGHT_FILES for path in folder.glob(pattern)]
    if others and not has_weights(str(folder)):
        raise ValueError(
            f"pretrained={str(folder)!r} holds weights only as {', '.join(sorted(others)[:3])}; weights are read from"
            " safetensors files: convert them, or move them away to train from random weights"
        )
    for index in folder.glob("*.safetensors.index.json"):
        try:
            shards = set(weight_map(index).values())
        except ValueError as error:
            raise ValueError(f"pretrained={str(folder)!r}: {error}") from error
        missing = sorted(name for name in shards if not (folder / name).is_file())
        if missing:
            raise ValueError(
                f"pretrained={str(folder)!r} lacks {len(missing)} of the {len(shards)} files that {index.name} names,"
                f" for example {missing[0]}; was the download cut short?"
            )


def _class_by_name(transformers: Any, name: str) -> type:
    cls = getattr(transformers, name, None)
    if isinstance(cls, type) and issubclass(cls, transformers.PreTrainedConfig):
        return cls
    known = {config.__name__ for config in _causal_lm_mapping(transformers)}
    raise ValueError(
        f"config_class={name!r} is not a configuration class of Transformers {transformers.__version__}"
        f"{_did_you_mean(name, known)}"
    )


def _class_by_model_type(transformers: Any, model_type: str) -> type:
    try:
        return type(transformers.AutoConfig.for_model(model_type))
    except ValueError:
        known = {config.model_type for config in _causal_lm_mapping(transformers)}
        raise ValueError(
            f"config.model_type={model_type!r} is not known to Transformers {transformers.__version__}"
            f"{_did_you_mean(str(model_type), known)}"
        ) from None


def _causal_lm_class(transformers: Any, cls: type, option: str) -> type:
    mapping = _causal_lm_mapping(transformers)
    if cls not in mapping:
        known = {config.__name__ for config in mapping}
        raise ValueError(
            f"{option}: Transformers has no causal language model for {cls.__name__}"
            f"{_did_you_mean(cls.__name__, known)}"
        )
    return mapping[cls]


def _causal_lm_mapping(transformers: Any) -> Any:
    """Return the mapping from configuration class to the class of its causal language model."""
    return transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING


def _check_fields(fields: dict[str, Any], cls: type, model_class: type) -> None:
    """Refuse fields that nothing would read: a configuration class of Transformers takes any name."""
    for name in ("dtype", "torch_dtype"):
        if fields.get(name) is not None:
            raise ValueError(
                f"config.{name}={fields[name]!r}: the dtype is the Trainer's; remove it and set Trainer(precision=...)"
            )
    if fields.get("output_router_logits"):
        raise ValueError(
            "config.output_router_logits=True asks for the auxiliary loss of Transformers, which CausalLM does not add:"
            " it would be a mean over each rank's own tokens, so that its gradient depended on the number of ranks."
            " Remove it; CausalLM's own aux_loss_coef is over all ranks"
        )
    known = _known_fields(cls, model_class)
    unknown = [name for name in fields if name not in known]
    if unknown:
        hints = "".join(f"\n  {name}{_did_you_mean(name, known)}" for name in unknown)
        raise ValueError(f"config: {cls.__name__} has no such field:{hints}")


def _known_fields(cls: type, model_class: type) -> set[str]:
    known = set(_COMMON_FIELDS) | set(getattr(cls, "attribute_map", {}))
    if dataclasses.is_dataclass(cls):
        known |= {field.name for field in dataclasses.fields(cls)}
    known |= {name for name in inspect.signature(cls).parameters if name not in ("self", "args", "kwargs")}
    known |= {name for name, value in inspect.getmembers(cls) if isinstance(value, property) and value.fset}
    # Models read some fields that their configuration class does not declare, as Qwen3-MoE its head_dim.
    source = inspect.getsource(sys.modules[model_class.__module__])
    known |= set(re.findall(r"""getattr\(\s*(?:self\.)?config,\s*["'](\w+)["']""", source))
    known |= set(re.findall(r"\bconfig\.([a-z]\w*)", source))
    return {name for name in known if not name.startswith("_")}


def _did_you_mean(name: str, known: set[str]) -> str:
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    return f"; the closest names are {', '.join(close)}" if close else ""
