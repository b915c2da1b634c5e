"""A network of Transformers inside a LightningModule, and one like it on the meta device."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_moe.checkpoint.damage import listed
from lightning_moe.checkpoint.hub_plan import BUILT_IN
from lightning_moe.checkpoint.hub_write import config_parts, original_class, plain_config
from lightning_moe.optional import require

PURPOSE = "the Hugging Face format"
_ADAPTERS = (".lora_A.", ".lora_B.", ".lora_embedding_A.", ".base_layer.", ".modules_to_save.")


@dataclass(frozen=True)
class FoundNetwork:
    """A network of Transformers inside a LightningModule.

    Attributes:
        name: Its name there, an empty string where the names of its tensors have no prefix.
        model: The network; on the meta device where it could be built there.
        pretrained: The folder that it began with, if there is one.
    """

    name: str
    model: Any
    pretrained: Path | None = None

    def own(self, names: Sequence[str]) -> dict[str, str]:
        """Of the names in the LightningModule's state dict those of the network, by their names in the network."""
        prefix = f"{self.name}." if self.name else ""
        return {name.removeprefix(prefix): name for name in names if name.startswith(prefix)}


def find_network(root: nn.Module, name: str | None = None) -> FoundNetwork:
    """Find the network of Transformers in a module.

    Args:
        root: A LightningModule, on any device.
        name: Its name there, ``None`` where there is one only.

    Raises:
        ValueError: If there is none of that name, or not exactly one; or if it holds adapters of PEFT.
    """
    pretrained = require("transformers", PURPOSE).PreTrainedModel
    found: dict[str, nn.Module] = {}
    for path, module in root.named_modules():
        inside = any(path.startswith(f"{outer}.") or not outer for outer in found)
        if isinstance(module, pretrained) and not inside:
            found[path] = module
    listed = ", ".join(f"{path!r} ({type(module).__name__})" for path, module in found.items())
    if name is not None:
        try:
            chosen = root.get_submodule(name)
        except AttributeError:
            chosen = None
        if not isinstance(chosen, pretrained):
            what = "is not there" if chosen is None else f"is a {type(chosen).__name__}"
            raise ValueError(
                f"module {name!r} of {type(root).__name__} {what}; models of Transformers in it are {listed or 'none'}"
            )
        return FoundNetwork(name, chosen)
    if len(found) != 1:
        fix = f"name one of them with module: {listed}" if found else "only those have a Hugging Face format"
        raise ValueError(f"{type(root).__name__} holds {len(found)} models of Transformers; {fix}")
    path, module = next(iter(found.items()))
    return FoundNetwork(path, module)


def check_no_adapters(names: Iterable[str], where: str) -> None:
    """Refuse tensors of PEFT's adapters.

    Raises:
        NotImplementedError: If there are some; the message says what to do.
    """
    adapters = [name for name in names if any(part in f"{name}." for part in _ADAPTERS)]
    if adapters:
        raise NotImplementedError(
            f"{where} holds adapters of PEFT ({listed(adapters)}), which have no place in a model in the Hugging Face"
            " format. Load it into the LightningModule in one process, then save the adapter alone with the"
            " save_pretrained() of its PeftModel, or the whole model with that of merge_and_unload()"
        )


def meta_twin(network: Any) -> Any:
    """Build a network of the same class and configuration on the meta device, as the class makes it.

    What the strategy, FSDP2 or the user has done to the first one is not in it.
    """
    # Not the conversions with which its weights were loaded: those of quantized or renamed files have no way back.
    twin = on_meta(original_class(network), plain_config(network.config))
    twin.generation_config = getattr(network, "generation_config", None)
    return twin


def on_meta(cls: Any, config: Any) -> Any:
    """Build a network on the meta device, in bfloat16.

    So it takes no memory, and its dtypes tell which of its tensors the class wants in float32 whatever the dtype of the
    rest.

    Args:
        cls: A model class of Transformers.
        config: Its configuration, which becomes that of the network.
    """
    parts = config_parts(config)
    dtypes = [part.dtype for part in parts]
    before = torch.get_default_dtype()
    try:
        for part in parts:
            part.dtype = None  # a part that names one is built in that
        torch.set_default_dtype(BUILT_IN)
        with torch.device("meta"):
            return cls(config)
    finally:
        torch.set_default_dtype(before)
        for part, dtype in zip(parts, dtypes, strict=True):
            part.dtype = dtype
