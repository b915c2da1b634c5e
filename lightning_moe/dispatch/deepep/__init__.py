"""DeepEP: dispatch and combine in kernels of the device, over NVLink and RDMA. One file for each of its four APIs."""

from lightning_moe.dispatch.deepep.dispatchers import (
    DeepEPDispatcher,
    HybridEPDispatcher,
    deepep_unusable,
    hybridep_unusable,
)

__all__ = ["DeepEPDispatcher", "HybridEPDispatcher", "deepep_unusable", "hybridep_unusable"]
