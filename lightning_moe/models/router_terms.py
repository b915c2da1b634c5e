"""The router losses of a LightningModule: which ones, how large, and what each adds to the loss of a step."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import Tensor, nn

from lightning_moe.nn.router_losses import (
    RouterObserver,
    Routing,
    ScoreFunction,
    batch_balance_loss,
    check_score_function,
    router_z_loss,
    sequence_balance_loss,
)

AuxLossLevel = Literal["batch", "sequence"]


@dataclass(frozen=True)
class RouterTerm:
    """One router loss of one micro-batch, as this rank sees it.

    Attributes:
        name: What it is logged as.
        coefficient: What it is multiplied by.
        local: This rank's part, a differentiable scalar.
        per_token: Whether the parts add up over ranks to tokens times the loss, rather than to the loss.
    """

    name: str
    coefficient: float
    local: Tensor
    per_token: bool

    def token_sum(self, tokens: Tensor) -> Tensor:
        """Return what this rank adds to its summed loss of tokens.

        Args:
            tokens: Valid tokens of the micro-batch over all ranks, a scalar.
        """
        weighed = self.local if self.per_token else self.local * tokens.to(self.local.dtype)
        return self.coefficient * weighed

    def mean(self, total: Tensor, tokens: Tensor) -> Tensor:
        """Return the loss over all ranks.

        Args:
            total: Sum of :attr:`local` over ranks.
            tokens: Valid tokens of the micro-batch over all ranks, at least 1.
        """
        return total / tokens if self.per_token else total


class RouterTerms:
    """The router losses that a model is trained with.

    Args:
        aux_loss_coef: Coefficient of the load-balancing loss.
        aux_loss_level: ``"batch"`` or ``"sequence"``.
        z_loss_coef: Coefficient of the router z-loss.
        score_function: What turns router logits into scores.

    Raises:
        ValueError: If an option has a value that is not allowed.
    """

    def __init__(
        self,
        aux_loss_coef: float,
        aux_loss_level: AuxLossLevel,
        z_loss_coef: float,
        score_function: ScoreFunction | Literal["auto"],
    ) -> None:
        self._options = {"aux_loss_coef": aux_loss_coef, "z_loss_coef": z_loss_coef}
        for name, value in self._options.items():
            if not 0 <= value < float("inf"):
                raise ValueError(f"{name}={value} must be 0 (off) or a positive number")
        if aux_loss_level not in get_args(AuxLossLevel):
            raise ValueError(
                f"aux_loss_level={aux_loss_level!r} must be one of {', '.join(map(repr, get_args(AuxLossLevel)))}"
            )
        check_score_function(score_function)
        self.aux_loss_coef = aux_loss_coef
        self.aux_loss_level = aux_loss_level
        self.z_loss_coef = z_loss_coef
        self.score_function: ScoreFunction | Literal["auto"] = score_function
        self._observer: RouterObserver | None = None

    @property
    def _set(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self._options.items() if value)

    def check_config(self, config: Any) -> None:
        """Refuse a configuration of Transformers that asks for that library's own load-balancing loss as well.

        Args:
            config: A ``transformers.PreTrainedConfig``.

        Raises:
            ValueError: If both are set.
        """
        for part in (config, config.get_text_config()):
            coefficient = getattr(part, "router_aux_loss_coef", None)
            if self._set and getattr(part, "output_router_logits", False) and coefficient:
                raise ValueError(
                    f"{self._set} of the model and output_router_logits=True with router_aux_loss_coef={coefficient}"
                    " in its config both ask for router losses; set config.output_router_logits to false (that of"
                    " Transformers sees one rank's tokens), or the coefficients of the model to 0"
                )

    def attach(self, network: nn.Module) -> None:
        """Find the routers of the network, if any loss needs them.

        Raises:
            ValueError: If there are none that can be observed; the message names the option.
        """
        if self._set:
            try:
                self._observer = RouterObserver(network, self.score_function)
            except ValueError as error:
                raise ValueError(f"{self._set}: {error}") from error

    def observe(self) -> AbstractContextManager[list[Routing]]:
        """Collect the routings of the forward inside the context, none if no loss needs them."""
        return nullcontext([]) if self._observer is None else self._observer.observe()

    def terms(
        self, routings: list[Routing], mask: Tensor, tokens: Tensor, reduce: Callable[[Tensor], Tensor]
    ) -> list[RouterTerm]:
        """Compute the losses. Collective for ``aux_loss_level="batch"``, once.

        Args:
            routings: What was observed; empty if no loss needs it.
            mask: ``[B, L]``, not 0 for tokens that are routed, rather than padding.
            tokens: ``[B]`` valid tokens of each sequence, its weight.
            reduce: Sums a tensor over ranks.
        """
        found = []
        if routings and self.aux_loss_coef:
            by_sequence = self.aux_loss_level == "sequence"
            if by_sequence:
                local = (sequence_balance_loss(routings, mask) * tokens).sum()
            else:
                local = batch_balance_loss(routings, mask, reduce)
            found.append(RouterTerm("aux_loss", self.aux_loss_coef, local, per_token=by_sequence))
        if routings and self.z_loss_coef:
            local = (router_z_loss(routings, mask) * tokens).sum()
            found.append(RouterTerm("z_loss", self.z_loss_coef, local, per_token=True))
        return found
