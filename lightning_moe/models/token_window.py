"""Gradients of the mean over all tokens of an optimizer step, however they are spread over its micro-batches."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class TokenWindow:
    r"""Counts the valid tokens of the micro-batches of one optimizer step, and corrects its gradients at the end.

    Let ``S_m`` be the summed loss of micro-batch ``m`` over all ranks and ``n_m`` its tokens, ``N`` the tokens of the
    step, ``A`` the Trainer's ``accumulate_grad_batches``. Wanted is the gradient of ``sum_m S_m / N``, but ``N`` is
    known only after the last micro-batch. So each micro-batch is divided by the same number ``d``, the tokens of the
    first one that has any, and Lightning divides it by ``A``, also where the last step of an epoch has fewer
    micro-batches. What has been accumulated is then the gradient of ``sum_m S_m / (A * d)``, and the factor::

        A * d / N

    is what is missing. It is 1 where ``A`` micro-batches have ``d`` tokens each. Micro-batches before the first one
    with tokens have gradients of zero, whatever they were divided by; so has a step without any, where no factor is
    needed.
    """

    def __init__(self) -> None:
        self._divisor: Tensor | None = None
        self._total: Tensor | None = None

    def reset(self) -> None:
        """Begin an optimizer step."""
        self._divisor = self._total = None

    def add(self, tokens: Tensor) -> Tensor:
        """Count a micro-batch.

        Args:
            tokens: Its valid tokens over all ranks, a floating-point scalar.

        Returns:
            What its summed loss is to be divided by, at least 1.
        """
        if self._divisor is None or self._total is None:
            self._divisor = self._total = tokens
        else:
            self._divisor = torch.where(self._divisor > 0, self._divisor, tokens)
            self._total = self._total + tokens
        return self._divisor.clamp(min=1.0)

    def factor(self, accumulate_grad_batches: int) -> float:
        """Return what the gradients are to be multiplied by. Waits for the device.

        Args:
            accumulate_grad_batches: What each micro-batch's loss was divided by besides.
        """
        if self._divisor is None or self._total is None:
            return 1.0
        divisor, total = torch.stack([self._divisor, self._total]).tolist()
        return accumulate_grad_batches * divisor / total if total else 1.0


@torch.no_grad()
def scale_gradients(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Multiply all gradients by a number, in place, those of sharded parameters too. No communication.

    Args:
        parameters: Parameters; those without a gradient are left out.
        factor: The number.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    local = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
    if local := [gradient for gradient in local if gradient.numel()]:
        torch._foreach_mul_(local, factor)
