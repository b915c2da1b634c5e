"""Lightning's face for dtypes."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, get_args

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.apply_func import apply_to_collection
from lightning.fabric.utilities.types import Steppable
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.plugins.precision.half import HalfPrecision
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_moe.parallel import DtypePolicy, clip_gradients_by_norm, clip_gradients_by_value, reshard

PrecisionName = Literal["32-true", "bf16-true", "bf16-mixed"]
_SUPPORTED: tuple[str, ...] = get_args(PrecisionName)


class MoEPrecision(Precision):
    """The dtypes of a run under ``ExpertParallelStrategy``, and gradient clipping across its meshes.

    ``Trainer(precision=...)`` is enough: the strategy turns the plugin that Lightning makes of it into this one.

    Args:
        precision: ``"32-true"``; ``"bf16-true"``: weights, optimizer state and computation in bfloat16; or
            ``"bf16-mixed"``: float32 weights and optimizer state, computation in bfloat16. Gradients are summed over
            ranks in float32 in every case.
        router_dtype: Dtype in which routers compute, whatever ``precision`` is. Near-ties between experts flip in
            bfloat16.

    Raises:
        ValueError: If the precision is not supported.
    """

    def __init__(self, precision: PrecisionName = "32-true", router_dtype: torch.dtype = torch.float32) -> None:
        if precision not in _SUPPORTED:
            raise ValueError(f"precision={precision!r} is not supported by MoEPrecision; {_allowed()}")
        if not router_dtype.is_floating_point:
            raise ValueError(f"router_dtype={router_dtype} must be a floating-point dtype, for example torch.float32")
        self.precision: PrecisionName = precision
        self.router_dtype = router_dtype
        self.last_gradient_norm: Tensor | None = None

    @classmethod
    def from_plugin(cls, plugin: Precision) -> "MoEPrecision":
        """Turn a stock precision plugin of Lightning into the matching :class:`MoEPrecision`.

        Args:
            plugin: What ``Trainer(precision=...)`` or ``Trainer(plugins=...)`` made.

        Raises:
            ValueError: If there is no match.
        """
        if isinstance(plugin, cls):
            return plugin
        if type(plugin) in (Precision, MixedPrecision, HalfPrecision) and plugin.precision in _SUPPORTED:
            return cls(plugin.precision)  # type: ignore[arg-type]
        raise ValueError(
            f"precision={plugin.precision!r} ({type(plugin).__name__}) is not supported by ExpertParallelStrategy; "
            + _allowed()
        )

    @property
    def dtype_policy(self) -> DtypePolicy:
        """The dtypes of parameters, computation and reductions for FSDP2."""
        if self.precision == "32-true":
            return DtypePolicy(router_dtype=self.router_dtype)
        mixed = self.precision == "bf16-mixed"
        return DtypePolicy(
            param_dtype=torch.bfloat16,
            reduce_dtype=torch.float32,
            # The user's loss gets float32, as it would under autocast.
            output_dtype=torch.float32 if mixed else None,
            router_dtype=self.router_dtype,
        )

    @property
    def _stored_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.precision == "bf16-true" else torch.float32

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        if self.precision == "bf16-true":
            # Parameters only: rotary frequencies and correction biases are buffers, and lose their meaning in bfloat16.
            for parameter in module.parameters():
                if parameter.is_floating_point():
                    parameter.data = parameter.data.to(torch.bfloat16)
        return module

    @override
    @contextmanager
    def tensor_init_context(self) -> Generator[None, None, None]:
        before = torch.get_default_dtype()
        torch.set_default_dtype(self._stored_dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)

    @override
    @contextmanager
    def module_init_context(self) -> Generator[None, None, None]:
        with self.tensor_init_context():
            yield

    @override
    def convert_input(self, data: Any) -> Any:
        if self.precision != "bf16-true":
            return data
        return apply_to_collection(
            data, Tensor, lambda tensor: tensor.bfloat16() if tensor.is_floating_point() else tensor
        )

    @override
    def _after_closure(self, model: "pl.LightningModule", optimizer: Steppable) -> None:
        super()._after_closure(model, optimizer)
        # The update changes the shards; what a forward without a backward left gathered would go stale.
        reshard(model)

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        parameters = list(self.main_params(optimizer))
        self.last_gradient_norm = clip_gradients_by_norm(parameters, float(clip_val), _device_of(parameters))

    @override
    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        clip_gradients_by_value(self.main_params(optimizer), float(clip_val))


def _device_of(parameters: Sequence[Tensor]) -> torch.device:
    return parameters[0].device if parameters else torch.device("cpu")


def _allowed() -> str:
    return f"set Trainer(precision=...) to one of {', '.join(map(repr, _SUPPORTED))}"
