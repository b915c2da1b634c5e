"""The optimizer that language models are trained with by default, and which weights it decays."""

from typing import Any

import torch
from torch import nn


class AdamW(torch.optim.AdamW):
    """``torch.optim.AdamW`` with the defaults that language models are usually trained with.

    Args:
        params: Parameters or parameter groups.
        lr: Learning rate.
        betas: Decay rates of the two moments.
        weight_decay: Share of a weight that a step takes away, times the learning rate.
        **kwargs: What else ``torch.optim.AdamW`` takes.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 3e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.1,
        **kwargs: Any,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, weight_decay=weight_decay, **kwargs)


def decay_groups(module: nn.Module) -> list[dict[str, Any]]:
    """Split the trainable parameters into those that weight decay applies to, and those that it does not.

    Matrices and stacks of matrices decay. Norms and biases do not: everything of one dimension, and of a module that
    stacks its experts also the vectors, which are of two dimensions there (``[experts, features]``).

    Args:
        module: A module, sharded or not. A parameter that is shared counts once.

    Returns:
        One or two parameter groups for a ``torch.optim.Optimizer``. The first takes the optimizer's own
        ``weight_decay``, the second sets it to 0.
    """
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    seen: set[int] = set()
    for owner in module.modules():
        own = dict(owner.named_parameters(recurse=False))
        for name, parameter in own.items():
            if id(parameter) in seen or not parameter.requires_grad:
                continue
            seen.add(id(parameter))
            (decayed if _decays(name, parameter, own) else plain).append(parameter)
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": plain, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _decays(name: str, parameter: nn.Parameter, siblings: dict[str, nn.Parameter]) -> bool:
    if parameter.ndim < 2 or name == "bias":
        return False
    # Beside stacks of matrices [experts, rows, columns], what is [experts, features] holds one vector an expert.
    per_expert_vector = parameter.ndim == 2 and any(
        stack.ndim == 3 and stack.shape[0] == parameter.shape[0] for stack in siblings.values()
    )
    return not per_expert_vector
