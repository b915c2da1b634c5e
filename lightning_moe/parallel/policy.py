"""The dtypes of a run, as FSDP2 takes them."""

from dataclasses import dataclass

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy


@dataclass(frozen=True)
class DtypePolicy:
    """In which dtypes a sharded model computes.

    Attributes:
        param_dtype: Dtype of the unsharded weights and of the computation; ``None`` keeps that of the stored weights.
        reduce_dtype: Dtype in which gradients are summed over ranks; ``None`` keeps that of the gradients.
        output_dtype: Dtype of what a top-level module returns; ``None`` leaves it as it is.
        router_dtype: Dtype of the routers, from their weights to the top-k; ``None`` treats them like the rest.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    router_dtype: torch.dtype | None = None

    def inner(self) -> MixedPrecisionPolicy:
        """Policy of blocks and other modules inside a top-level one."""
        return MixedPrecisionPolicy(param_dtype=self.param_dtype, reduce_dtype=self.reduce_dtype)

    def outer(self) -> MixedPrecisionPolicy:
        """Policy of top-level modules, whose results the user's loss takes."""
        return MixedPrecisionPolicy(
            param_dtype=self.param_dtype, reduce_dtype=self.reduce_dtype, output_dtype=self.output_dtype
        )

    def experts(self) -> MixedPrecisionPolicy:
        """Policy of experts modules: inputs are not cast, so that float32 routing weights stay what they are."""
        return MixedPrecisionPolicy(
            param_dtype=self.param_dtype, reduce_dtype=self.reduce_dtype, cast_forward_inputs=False
        )

    def router(self) -> MixedPrecisionPolicy:
        """Policy of routers: weights and inputs in ``router_dtype``, results as they come."""
        return MixedPrecisionPolicy(param_dtype=self.router_dtype, reduce_dtype=self.reduce_dtype)

    def float32(self) -> MixedPrecisionPolicy:
        """Policy of modules that the model keeps in float32; it casts what they take and give by itself."""
        return MixedPrecisionPolicy(
            param_dtype=torch.float32, reduce_dtype=self.reduce_dtype, cast_forward_inputs=False
        )

    def routers_apart(self, stored: torch.dtype) -> bool:
        """Whether routers need a policy of their own.

        Args:
            stored: Dtype of the stored weights.
        """
        return self.router_dtype is not None and self.router_dtype != (self.param_dtype or stored)
