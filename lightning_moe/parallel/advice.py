"""What the strategy asks and says of a Trainer and a model before it shards it."""

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_moe.dispatch import Needs
from lightning_moe.experts import FoundExperts
from lightning_moe.parallel.structure import find_routers


def check_trainer(module: "pl.LightningModule") -> None:
    """Refuse what cannot work beside the strategy.

    Raises:
        TypeError: For objects of the other package that ships the same code: they would be half connected, silently.
        ValueError: For callbacks that need the whole model.
    """
    trainer: Any = module.trainer
    for candidate in (module, *trainer.callbacks, *trainer.loggers, getattr(trainer, "datamodule", None)):
        if any(cls.__module__.split(".")[0] == "pytorch_lightning" for cls in type(candidate).__mro__):
            raise TypeError(
                f"{type(candidate).__name__} comes from the package pytorch_lightning, but the Trainer from"
                " lightning.pytorch; import it as `from lightning.pytorch import ...`"
            )
    for callback in trainer.callbacks:
        if isinstance(callback, WeightAveraging | StochasticWeightAveraging):
            raise ValueError(
                f"{type(callback).__name__} averages a copy of the whole model, which no rank holds under"
                " strategy='moe_ep'; remove the callback, or average saved checkpoints"
            )


def needs_of(experts: FoundExperts, dtype: torch.dtype | None) -> Needs:
    """What an experts module that is not sharded yet asks of a dispatcher."""
    width = experts.spec.hidden_size(experts.module)
    return Needs(experts.name, experts.num_experts, width, dtype or next(experts.module.parameters()).dtype)


def warn_no_experts(module: "pl.LightningModule") -> None:
    """Say that a model has no experts."""
    rank_zero_warn(
        f"strategy='moe_ep' found no experts in {type(module).__name__} and trains it with FSDP2 alone. If it has"
        " experts, teach the strategy their class:"
        " lightning_moe.register_experts(MyExperts, ExpertsSpec(up='...', down='...', activation=...))"
    )


def warn_coarse_buffers(module: "pl.LightningModule", experts: Sequence[FoundExperts]) -> None:
    """Point out buffers of routers, such as correction biases, that somebody cast: no cast brings their bits back."""
    routers = {id(router) for router in find_routers(module, experts)}
    for name, submodule in module.named_modules():
        if id(submodule) not in routers:
            continue
        for buffer_name, buffer in submodule.named_buffers(prefix=name):
            if buffer.dtype in (torch.bfloat16, torch.float16):
                rank_zero_warn(
                    f"{buffer_name} of a router is {str(buffer.dtype).removeprefix('torch.')}, in which near-ties"
                    " between experts cannot be told apart: leave the casting of the model to Trainer(precision=...),"
                    " which keeps the buffers in float32"
                )
