"""Losses on what routers decide, for any model with experts: load balancing, and small router logits."""

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_moe.experts import FoundExperts, find_experts
from lightning_moe.experts.peft import innermost
from lightning_moe.parallel.structure import find_routers

ScoreFunction = Literal["softmax", "sigmoid", "sqrtsoftplus"]
# Fields of a configuration that say how routers score experts.
_CONFIG_FIELDS = ("scoring_func", "expert_selection_fn")
# Routers of Transformers that return probabilities where others return logits, and the child that computes logits.
_LOGITS_OF = {"Gemma4TextRouter": "proj", "DiffusionGemmaTextRouter": "proj"}
# Routers of Transformers that return something else first, and whose experts are called without the choices.
_UNSUPPORTED = ("Llama4Router", "JetMoeTopKGating", "SwitchTransformersTop1Router", "NllbMoeTop2Router")


@dataclass(frozen=True)
class Routing:
    """What a router decided in one call.

    Attributes:
        logits: ``[T, E]`` router logits, differentiable.
        top_k_index: ``[T, K]`` integer experts that the tokens were sent to; -1 is a choice that was dropped.
        score_function: What turns logits into scores.
    """

    logits: Tensor
    top_k_index: Tensor
    score_function: ScoreFunction

    def probabilities(self) -> Tensor:
        """Return the scores over all experts, divided by their sum: ``[T, E]`` float32."""
        logits = self.logits.float()
        # Scores divided by their sum are the softmax of their logarithms, which does not underflow.
        if self.score_function == "sigmoid":
            logits = F.logsigmoid(logits)
        elif self.score_function == "sqrtsoftplus":
            logits = 0.5 * F.softplus(logits).clamp_min(1e-30).log()
        return logits.softmax(-1)

    def choices(self, valid: Tensor) -> Tensor:
        """Count the choices of each expert in each sequence.

        Args:
            valid: ``[B, L]`` float32 with ``B * L == T``: 1 for tokens that count, else 0.

        Returns:
            ``[B, E]`` float32.
        """
        index = self.top_k_index.reshape(valid.shape[0], -1)
        counted = valid.repeat_interleave(self.top_k_index.shape[-1], dim=1) * (index >= 0)
        counts = counted.new_zeros(valid.shape[0], self.logits.shape[-1])
        return counts.scatter_add_(1, index.long().clamp_min(0), counted)


class RouterObserver:
    """Sees what the routers of a model decide, as long as it is asked to.

    It works for every experts module that ``strategy="moe_ep"`` finds, sharded or not: logits are the (first) result of
    the router beside the experts, and choices are what the experts are called with. ::

        self.routers = RouterObserver(self.model)  # in configure_model
        ...
        with self.routers.observe() as routings:  # in training_step
            logits = self.model(tokens)
        balance = sequence_balance_loss(routings, mask).mean()

    Activation checkpointing must be non-reentrant. What is observed is the forward; what runs again for the backward
    pass is not. Add the losses to one that the routers' weights are part of anyway, as any loss on the model's output
    is: FSDP2 gathers the weights of a block when the gradient of its output arrives.

    Args:
        model: The model, before or after it is sharded.
        score_function: What turns logits into scores. ``"auto"`` takes the attribute ``score_function`` of the router,
            else what the model's configuration says, else the function that the router's own ``forward`` calls.

    Raises:
        ValueError: If the model has no experts, or experts without a router beside them, or if ``"auto"`` finds no
            answer or the score function is not known.
    """

    def __init__(self, model: nn.Module, score_function: ScoreFunction | Literal["auto"] = "auto") -> None:
        check_score_function(score_function)
        found = find_experts(model)
        if not found:
            raise ValueError(f"{type(model).__name__} has no experts that the strategy finds; see register_experts")
        self._layers = [_Layer.of(model, experts, score_function) for experts in found]

    @contextmanager
    def observe(self) -> Iterator[list[Routing]]:
        """Collect one :class:`Routing` for each call of an experts module inside the context, in order.

        Raises:
            RuntimeError: If no experts module was called, experts were called without their router, or under reentrant
                activation checkpointing, which detaches what is observed.
            ValueError: If a router's result is not ``[T, E]``.
        """
        routings: list[Routing] = []
        handles = [handle for layer in self._layers for handle in layer.watch(routings)]
        try:
            yield routings
        finally:
            for handle in handles:
                handle.remove()
        if not routings:
            raise RuntimeError("none of the model's routers ran while they were observed")


@dataclass
class _Layer:
    """One experts module and its router."""

    experts: FoundExperts
    router: nn.Module
    score_function: ScoreFunction

    @classmethod
    def of(cls, model: nn.Module, experts: FoundExperts, score_function: ScoreFunction | Literal["auto"]) -> "_Layer":
        routers = find_routers(model, [experts])
        if len(routers) != 1:
            found = ", ".join(type(router).__name__ for router in routers) or "none"
            raise ValueError(
                f"{experts.name!r} needs one router beside it whose logits can be observed, a module with little more"
                f" than a matrix of {experts.num_experts} rows; found {found}"
            )
        router = innermost(routers[0])
        # FSDP2 makes a subclass of each class that it shards.
        names = [ancestor.__name__ for ancestor in type(router).__mro__]
        if unsupported := set(names) & set(_UNSUPPORTED):
            raise ValueError(
                f"{experts.name!r}: the losses on routers do not support {unsupported.pop()}, which does not return its"
                " logits first"
            )
        chosen = _score_function(model, experts, router) if score_function == "auto" else score_function
        child = next((_LOGITS_OF[name] for name in names if name in _LOGITS_OF), "")
        return cls(experts, router.get_submodule(child) if child else routers[0], chosen)

    def watch(self, routings: list[Routing]) -> Iterator[Any]:
        """Add to the list at each call of the experts, until the handles that come back are removed."""
        wants_gradients = torch.is_grad_enabled()
        logits: list[Tensor] = []

        def on_router(module: nn.Module, args: Any, output: Any) -> None:
            if wants_gradients and not torch.is_grad_enabled():
                raise RuntimeError(
                    f"the logits of {type(module).__name__} have no gradient under reentrant activation checkpointing;"
                    " use use_reentrant=False"
                    " (Transformers: gradient_checkpointing_kwargs={'use_reentrant': False})"
                )
            logits.append(output[0] if isinstance(output, tuple | list) else output)

        def on_experts(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            index = args[1] if len(args) > 1 else kwargs.get("top_k_index")
            if not logits:
                raise RuntimeError(f"{self.experts.name!r} was called without its router {type(self.router).__name__}")
            routings.append(self._routing(logits.pop(), index))

        yield self.router.register_forward_hook(on_router)
        yield self.experts.module.register_forward_pre_hook(on_experts, with_kwargs=True)

    def _routing(self, logits: Any, index: Any) -> Routing:
        if not isinstance(index, Tensor) or index.is_floating_point() or index.ndim < 2:
            raise ValueError(f"{self.experts.name!r} must be called with the choices of the tokens, top_k_index [T, K]")
        index_TK = index.detach().reshape(-1, index.shape[-1])
        expected = (index_TK.shape[0], self.experts.num_experts)
        if not isinstance(logits, Tensor) or not logits.is_floating_point() or logits.numel() != math.prod(expected):
            got = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise ValueError(
                f"{type(self.router).__name__}, the router of {self.experts.name!r}, must return its logits"
                f" {list(expected)} first; got {got}"
            )
        return Routing(logits.reshape(expected), index_TK, self.score_function)


def check_score_function(score_function: str) -> None:
    """Check the option of :class:`RouterObserver`.

    Raises:
        ValueError: If the score function is not known.
    """
    allowed = ("auto", *get_args(ScoreFunction))
    if score_function not in allowed:
        raise ValueError(f"the router score function {score_function!r} must be one of {', '.join(map(repr, allowed))}")


def _score_function(model: nn.Module, experts: FoundExperts, router: nn.Module) -> ScoreFunction:
    known = get_args(ScoreFunction)
    path = experts.name.split(".")[:-1]
    owners = [model.get_submodule(".".join(path[:depth])) for depth in range(len(path), -1, -1)]
    configs = [owner.config for owner in owners if hasattr(owner, "config")]
    says: list[Any] = [getattr(router, "score_function", None)]
    says += [getattr(config, field, None) for config in configs for field in _CONFIG_FIELDS]
    for answer in says:
        if answer in known:
            return answer
    code = getattr(inspect.unwrap(type(router).forward), "__code__", None)
    calls = [name for name in known if code is not None and name in code.co_names]
    if len(calls) == 1:
        return calls[0]
    raise ValueError(
        f"cannot tell how {type(router).__name__}, the router of {experts.name!r}, turns logits into scores; set"
        f" router_score_function of CausalLM, or score_function of RouterObserver, to one of"
        f" {', '.join(map(repr, known))}"
    )


def sequence_balance_loss(routings: Sequence[Routing], mask: Tensor) -> Tensor:
    """Compute the load-balancing loss of each sequence (DeepSeek-V3, arXiv:2412.19437, eq. 17-20), a mean over layers.

    In one layer it is ``E * sum_e f_e * P_e`` with ``f_e`` the share of the sequence's ``N * K`` choices that went to
    expert ``e``, which is detached, and ``P_e`` the mean of the expert's probability: 1 for a perfect balance whatever
    ``E`` and ``K``, and ``E / K`` where all tokens take the same ``K`` experts and give no other any probability.

    ``f_e`` counts where the tokens went, after expert biases and limits of groups, if the router has any. The mean over
    the sequences of a batch does not depend on how they are spread over ranks and micro-batches.

    Args:
        routings: What :meth:`RouterObserver.observe` collected.
        mask: ``[B, L]``, not 0 for tokens that count (the ``attention_mask``); all others are left out.

    Returns:
        ``[B]`` float32; 0 for a sequence in which no token counts.

    Raises:
        ValueError: If the routers did not see ``B * L`` tokens.
    """
    valid = _valid(routings, mask)
    tokens = valid.sum(1).clamp_min(1.0)
    losses = []
    for routing in routings:
        share = routing.choices(valid) / (tokens * routing.top_k_index.shape[-1]).unsqueeze(1)
        probabilities = routing.probabilities().view(*valid.shape, -1)
        mean = (probabilities * valid.unsqueeze(-1)).sum(1) / tokens.unsqueeze(1)
        losses.append(mean.shape[1] * (share * mean).sum(1))
    return torch.stack(losses).mean(0)


def batch_balance_loss(
    routings: Sequence[Routing], mask: Tensor, reduce: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Compute this rank's part of the load-balancing loss of a batch (Switch Transformer, arXiv:2101.03961, eq. 4-6).

    As :func:`sequence_balance_loss`, with ``f_e`` and ``P_e`` over all tokens of the batch, those of other ranks too.
    ``f_e`` and the number of tokens come from all ranks; ``P_e`` is a sum over tokens, of which each rank adds its own.
    So the sum of the parts, values and gradients, over ranks is what one process computes on the whole batch. Where
    gradients are averaged over ``W`` ranks, as by Lightning's strategies and by ``"moe_ep"``, add ``W`` times the part
    to the loss.

    The function of Transformers differs in three ways. Its ``f_e`` add up to ``K``, so it is ``K`` for a perfect
    balance, and a coefficient there does what one ``K`` times as large does here. It multiplies ``f`` and ``P`` after
    pooling all layers, where layers that are each out of balance can cancel. And it sees the tokens of one rank.

    Args:
        routings: What :meth:`RouterObserver.observe` collected.
        mask: ``[B, L]``, not 0 for tokens that count.
        reduce: Sums a tensor over ranks, for example ``partial(trainer.strategy.reduce, reduce_op="sum")``; ``None``
            for one process. It is called once, for the counts of all layers.

    Returns:
        A float32 scalar; 0 if no token counts on any rank.

    Raises:
        ValueError: If the routers did not see ``B * L`` tokens.
    """
    valid = _valid(routings, mask)
    local = [routing.choices(valid).sum(0) for routing in routings]
    sums = torch.cat([valid.sum().view(1), *local])
    if reduce is not None:
        sums = reduce(sums)
    tokens, *counts = sums.split([1, *(count.numel() for count in local)])
    tokens = tokens.clamp_min(1.0)
    losses = []
    for routing, count in zip(routings, counts, strict=True):
        share = count / (tokens * routing.top_k_index.shape[-1])
        # Divided by the tokens of all ranks: the parts of the ranks add up to the mean over them.
        mean = (routing.probabilities() * valid.view(-1, 1)).sum(0) / tokens
        losses.append(mean.numel() * (share * mean).sum())
    return torch.stack(losses).mean()


def router_z_loss(routings: Sequence[Routing], mask: Tensor) -> Tensor:
    """Compute the router z-loss of each sequence (ST-MoE, arXiv:2202.08906, eq. 5).

    It is the mean over tokens and layers of the squared ``logsumexp`` of the router logits, and keeps them small.

    Args:
        routings: What :meth:`RouterObserver.observe` collected.
        mask: ``[B, L]``, not 0 for tokens that count.

    Returns:
        ``[B]`` float32; 0 for a sequence in which no token counts.

    Raises:
        ValueError: If the routers did not see ``B * L`` tokens.
    """
    valid = _valid(routings, mask)
    tokens = valid.sum(1).clamp_min(1.0)
    squares = [routing.logits.float().logsumexp(-1).square().view(valid.shape) for routing in routings]
    return torch.stack([(square * valid).sum(1) / tokens for square in squares]).mean(0)


def _valid(routings: Sequence[Routing], mask: Tensor) -> Tensor:
    """Return which tokens count, ``[B, L]`` float32."""
    if not routings:
        raise ValueError("routings is empty: collect them in a forward inside RouterObserver.observe()")
    rows = {routing.logits.shape[0] for routing in routings}
    if mask.ndim != 2 or rows != {mask.numel()}:
        raise ValueError(
            f"the mask of the tokens that count must be [B, L] with one entry for each token that the routers saw"
            f" ({', '.join(map(str, sorted(rows)))}); got {list(mask.shape)}"
        )
    return (mask != 0).float()
