"""The compiled part of Transformer Engine's expert parallelism over gloo: what its real ``ep.py`` calls, on CPU.

The file ``transformer_engine/pytorch/ep.py`` is the released one. The rest of the package needs CUDA and Triton, and
stands aside: three modules of it are stand-ins with the few names that ``ep.py`` imports.
"""

import importlib
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_moe import optional
from tests.dispatch.fakes.compiled_deepep import without_a_device
from tests.dispatch.fakes.nccl_ep import Library

CALLS: Counter[str] = Counter()


class Compiled:
    """``transformer_engine_torch``; the signatures are those with which the Python calls it."""

    DType = SimpleNamespace(kFloat8E4M3=7)

    def __init__(self) -> None:
        self.library = Library((torch.bfloat16,), zero_tokens=True)

    def ep_initialize(
        self,
        comm,
        group_name,
        num_experts,
        max_tokens_per_rank,
        recv_capacity_per_rank,
        hidden_dim,
        max_num_sms,
        max_token_dtype,
        zero_copy,
        num_topk,
        drop_on_overflow,
        /,
    ) -> None:
        CALLS["initialize"] += 1
        assert comm == 1
        assert group_name
        self.library.bootstrap(
            dist.group.WORLD,
            num_experts=num_experts,
            max_tokens_per_rank=max_tokens_per_rank,
            recv_capacity_per_rank=recv_capacity_per_rank or None,
            hidden_dim=hidden_dim,
            max_num_sms=max_num_sms,
            max_token_dtype=max_token_dtype,
            zero_copy=zero_copy,
            num_topk=num_topk,
            drop_on_overflow=drop_on_overflow,
        )

    def ep_finalize(self) -> None:
        CALLS["finalize"] += 1
        self.library.finalize()

    def ep_get_zero_copy(self) -> bool:
        return False

    def ep_handle_mem_size(self, top_k, alignment, /) -> int:
        assert top_k == self.library.config["num_topk"]
        assert alignment in (0, 1)
        return 64

    def ep_prepare_and_dispatch(
        self,
        handle,
        index,
        tokens,
        weights,
        tokens_per_expert,
        total,
        top_k,
        alignment,
        recv_tokens=None,
        recv_topk_weights=None,
        recv_scale_inv=None,
        tokens_scale_inv=None,
    ) -> Any:
        CALLS["dispatch"] += 1
        assert recv_scale_inv is tokens_scale_inv is None
        assert index.shape == weights.shape == (len(tokens), top_k)
        assert all(t.is_contiguous() for t in (index, tokens, weights))
        capacity = self.library.config["recv_capacity_per_rank"]
        rows, row_weights, counts = self.library.dispatch(handle, index, tokens, weights, capacity)
        tokens_per_expert.copy_(counts)
        total.fill_(int(counts.sum()))
        if capacity is None:
            assert recv_tokens is None
            return [rows, row_weights]
        recv_tokens.copy_(rows)
        recv_topk_weights.copy_(row_weights)
        return None

    def ep_combine(self, handle: Tensor, rows: Tensor, result: Tensor, /) -> None:
        CALLS["combine"] += 1
        result.copy_(self.library.combine(handle, rows, len(result)))

    def ep_dispatch_bwd(self, handle, grad_rows, grad_row_weights, grad_tokens, grad_weights, /) -> None:
        CALLS["dispatch backward"] += 1
        tokens, weights = self.library.dispatch_backward(handle, grad_rows, grad_row_weights)
        grad_tokens.copy_(tokens)
        grad_weights.copy_(weights)

    def ep_combine_bwd(self, handle, grad, grad_rows, scale=None, grad_rows_scale=None, /) -> None:
        CALLS["combine backward"] += 1
        assert scale is grad_rows_scale is None
        grad_rows.copy_(self.library.combine_backward(handle, grad, len(grad_rows)))


def install(folder: str) -> Any:
    """Import the real ``ep.py`` of an unpacked release over this compiled part, in this process.

    Returns:
        The module ``transformer_engine.pytorch.ep``.
    """
    without_a_device()
    compiled: Any = ModuleType("transformer_engine_torch")
    made = Compiled()
    vars(compiled).update({name: getattr(made, name) for name in dir(made) if not name.startswith("__")})
    sys.modules["transformer_engine_torch"] = compiled
    here = Path(folder) / "transformer_engine"
    for name, path in (("transformer_engine", here), ("transformer_engine.pytorch", here / "pytorch")):
        package: Any = ModuleType(name)
        package.__path__ = [str(path)]
        sys.modules[name] = package
    for name, names in {
        "cpu_offload": {"mark_not_offload": lambda *_: None},
        "distributed": {"symm_mem_alloc": None, "release_symm_mem_pool": lambda: None},
        "quantized_tensor": {"QuantizedTensor": type("QuantizedTensor", (), {})},
    }.items():
        module = ModuleType(f"transformer_engine.pytorch.{name}")
        vars(module).update(names)
        sys.modules[module.__name__] = module
    _operators_on_cpu()
    ep: Any = importlib.import_module("transformer_engine.pytorch.ep")
    ep._check_nccl_runtime_version = lambda: None
    optional.probe.cache_clear()
    return ep


def _operators_on_cpu() -> None:
    """Let what the file asks of CUDA happen on CPU: operators, pinned memory and a barrier on a device."""
    library: Any = torch.library
    custom_op, empty, barrier = library.custom_op, torch.empty, dist.barrier
    library.custom_op = lambda name, *, device_types=None, **options: custom_op(name, **options)
    torch.empty = lambda *size, pin_memory=False, **options: empty(*size, **options)  # type: ignore[assignment]
    dist.barrier = lambda group=None, device_ids=None: barrier(group)  # type: ignore[assignment]
