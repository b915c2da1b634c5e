"""DeepEP V2.5: ``deep_ep.EPBuffer``."""

from torch import Tensor
from typing_extensions import override

from lightning_moe.dispatch.deepep.v2 import V2Transport


class V25Transport(V2Transport):
    """As V2, but its handle keeps the index of the experts itself, which nobody may change until the backward pass."""

    class_name = "EPBuffer"

    @override
    def own_index(self, index: Tensor) -> Tensor:
        return super().own_index(index.clone())
