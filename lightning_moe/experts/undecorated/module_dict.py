"""Switch Transformers and NLLB-MoE: one module an expert, in a ``ModuleDict``, chosen by masks."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_moe.experts.peft import innermost
from lightning_moe.experts.spec import ITSELF, ExpertsSpec
from lightning_moe.experts.undecorated.names import original_class


def describe_switch(module: nn.Module, parent: nn.Module | None) -> ExpertsSpec:
    """Describe a ``SwitchTransformersExperts``."""
    return ExpertsSpec(modules=ITSELF, install=partial(_install, parent, _switch))


def describe_nllb(module: nn.Module, parent: nn.Module | None) -> ExpertsSpec:
    """Describe a ``NllbMoeExperts``.

    Raises:
        NotImplementedError: If this release computes something that is not known.
    """
    call = partial(_nllb, _chosen_by_nllb(original_class(module, {"nllb_moe.NllbMoeExperts"})))
    return ExpertsSpec(modules=ITSELF, post=_token_dropout, install=partial(_install, parent, call))


_BLOCKS = {"switch_transformers.SwitchTransformersSparseMLP", "nllb_moe.NllbMoeSparseMLP"}
_Call = Callable[[Any, Callable[..., Tensor], Tensor, Tensor, Tensor], Tensor]


def _install(parent: Any, call: _Call, module: Any, forward: Callable[..., Tensor]) -> None:
    module.forward = partial(call, module, forward)
    if original_class(parent, _BLOCKS) is not None:
        parent.router.forward = partial(_route, parent.router)
        _cast_per_call(parent.router)


def _route(router: Any, hidden_states: Tensor, *args: Any) -> Any:
    # The router of Switch Transformers adds noise to its input in place, or to a copy where it casts it. What FSDP2
    # hands to a router that it gathers by itself is a cast copy, but must not be changed in place.
    if isinstance(router, FSDPModule):
        hidden_states = hidden_states.clone()
    return type(router).forward(router, hidden_states, *args)


def _cast_per_call(router: Any) -> None:
    """Keep a router from casting its classifier for good, which would take the gathered weight out of FSDP2's hands."""
    classifier = router.classifier
    linear: Any = innermost(classifier)

    def forward(rows: Tensor) -> Tensor:
        bias = linear.bias
        return F.linear(rows, linear.weight.to(rows.dtype), None if bias is None else bias.to(rows.dtype))

    classifier.to = lambda dtype: classifier
    linear.forward = forward


def _switch(
    module: Any, experts: Callable[..., Tensor], hidden_states: Tensor, selected_experts: Tensor, weights: Tensor
) -> Tensor:
    """``selected_experts [T, 1, E]`` is one-hot, or all zeros for a token beyond the capacity of its expert."""
    index_T1 = selected_experts.argmax(dim=-1).masked_fill(~selected_experts.any(dim=-1), -1)
    return experts(hidden_states, index_T1, weights)


def _nllb(
    chosen: Callable[[Tensor, Tensor], Tensor],
    module: Any,
    experts: Callable[..., Tensor],
    hidden_states: Tensor,
    router_mask: Tensor,
    router_probs: Tensor,
) -> Tensor:
    """``router_probs [T, E]`` are the weights of up to two experts a token, zero for the others."""
    position_TK = router_probs.topk(min(2, module.num_experts), dim=-1).indices
    weights_TK = router_probs.gather(1, position_TK)
    index_TK = chosen(router_mask, position_TK).masked_fill(weights_TK == 0, -1)
    return experts(hidden_states, index_TK, weights_TK)


def _token_dropout(module: Any, rows: Tensor) -> Tensor:
    if not module.moe_token_dropout:
        return rows
    return module.token_dropout(rows) if module.training else rows * (1 - module.moe_token_dropout)


class _Times(nn.Module):
    """An expert that multiplies, by which its part in a sum is known."""

    def __init__(self, factor: int) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, rows: Tensor) -> Tensor:
        return rows * self.factor


def _chosen_by_nllb(original: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """Find out which experts the forward of the class runs for the weights at given positions.

    Transformers 5.11 to 5.24 read the mask of first choices, zeros and ones, as the numbers of the experts: expert 1
    runs for the first choice of each token, whichever it is, and expert 0 for the second. A model that is trained here
    must compute what the same model computes without the strategy, in that release and in one that does otherwise.

    Returns:
        A function of ``router_mask [T, E]`` and positions ``[T, K]`` that returns the experts ``[T, K]``.
    """
    three = original.__new__(original)
    nn.ModuleDict.__init__(three, {f"expert_{number}": _Times(1 + number) for number in range(3)})
    three.num_experts, three.moe_token_dropout = 3, 0.0
    # The first choice is expert 2 with weight 0.5, the second expert 1 with 0.25.
    mask = torch.tensor([[0, 0, 1]], device="cpu")
    probs = torch.tensor([[0.0, 0.25, 0.5]], device="cpu")
    result = float(original.forward(three, torch.ones(1, 1, device="cpu"), mask, probs))
    if result == 0.25 * 2 + 0.5 * 3:
        return lambda router_mask, position: position
    if result == 0.25 * 1 + 0.5 * 2:
        rank_zero_warn(
            f"{original.__name__} of this release of Transformers runs experts 0 and 1 for all tokens and never the"
            " others, because it reads its mask of choices as numbers of experts. strategy='moe_ep' computes the same"
        )
        return lambda router_mask, position: router_mask.gather(1, position)
    raise NotImplementedError(
        f"{original.__name__} of this release of Transformers computes something that is not known. Describe it"
        f" yourself: lightning_moe.register_experts({original.__name__}, ExpertsSpec(modules='.', ...))"
    )
