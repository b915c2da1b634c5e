"""The result of an experts module that other ranks still send, so that its block can go on until it needs it.

A block that computes its shared expert after the routed ones, as DeepSeek-V3's do, then computes it while the rows of
the routed ones travel; in the backward pass it is the other way round, with the same overlap. A block that computes its
shared expert first, as Qwen2-MoE's do, has nothing left to compute: there is no overlap with it, and no cost.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

# What a tensor is, which is known before its numbers are; and views, which can wait with it.
_KNOWN = {
    getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "requires_grad", "layout", "_base")
} | {Tensor.size, Tensor.dim, Tensor.is_floating_point, Tensor.numel, Tensor.__len__}
_VIEWS = {Tensor.view, Tensor.reshape, torch.reshape}


class LateTensor(Tensor):
    """Becomes a tensor at its first use; until then it can be asked what it is, viewed and given hooks."""

    _finish: Callable[[], Tensor] | None
    _learns: bool
    _now: Tensor | None
    _hooks: OrderedDict[int, Callable[[Tensor], Any]]

    @staticmethod
    def __new__(cls, like: Tensor, shape: Sequence[int], requires_grad: bool, finish: Callable[[], Tensor]) -> Self:
        """Promise a tensor of this shape, with the dtype and on the device of ``like``, which ``finish`` waits for."""
        late: Self = Tensor._make_wrapper_subclass(
            cls, shape, dtype=like.dtype, device=like.device, requires_grad=requires_grad
        )
        if requires_grad:
            with torch._C.DisableTorchFunctionSubclass():
                late.register_hook(_refuse)
        late._finish, late._learns, late._now, late._hooks = finish, requires_grad, None, OrderedDict()
        return late

    @override
    def __init__(self, *_: Any) -> None:
        pass

    def now(self) -> Tensor:
        """Wait for the tensor."""
        if self._now is None:
            finish, self._finish = self._finish, None
            assert finish is not None
            # As where it was promised, wherever it is used first.
            with torch.inference_mode(False), torch.set_grad_enabled(self._learns):
                self._now = finish()
            if self._now.requires_grad != self._learns:
                raise RuntimeError(
                    f"the result of an experts module was promised with requires_grad={self._learns} and came with"
                    f" {self._now.requires_grad}; set overlap_shared_experts=False of the strategy"
                )
            for key in self._hooks:
                self._now.register_hook(lambda grad, key=key: self._call_hook(key, grad))
        return self._now

    def _call_hook(self, key: int, grad: Tensor) -> Any:
        hook = self._hooks.get(key)
        return None if hook is None else hook(grad)  # its handle has removed it

    def _add_hook(self, hook: Callable[[Tensor], Any]) -> RemovableHandle:
        handle = RemovableHandle(self._hooks)
        self._hooks[handle.id] = hook
        return handle

    @classmethod
    @override
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, LateTensor) and first._now is None:
            if func in _KNOWN:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            if func is Tensor.register_hook:
                return first._add_hook(*args[1:], **kwargs)
            of_a_dtype = any(isinstance(value, torch.dtype) for value in (*args[1:], *kwargs.values()))
            if func in _VIEWS and not of_a_dtype and (torch.is_grad_enabled() or not first._learns):
                shape = func(torch.empty(first.shape, device="meta"), *args[1:], **kwargs).shape
                return LateTensor(first, shape, first._learns, lambda: func(first.now(), *args[1:], **kwargs))
        args, kwargs = tree_map(on_time, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    @override
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise _past_the_overrides()


def _refuse(_: Tensor) -> None:
    # The graph of the tensor begins where somebody waits for it: a gradient that comes here would be lost.
    raise _past_the_overrides()


def _past_the_overrides() -> RuntimeError:
    return RuntimeError(
        "the result of an experts module was used past PyTorch's function overrides while other ranks still sent it, as"
        " an autograd.Function does; set overlap_shared_experts=False of the strategy"
    )


def on_time(value: Any) -> Any:
    """Wait for a value, if it is late."""
    return value.now() if isinstance(value, LateTensor) else value


def _inputs_on_time(_: nn.Module, args: Any, kwargs: Any) -> Any:
    return tree_map(on_time, (args, kwargs))


class LateScope:
    """The forward of the block around an experts module: nothing that is late leaves it."""

    def __init__(self, block: nn.Module) -> None:
        self.entered = False
        self._promised: list[LateTensor] = []
        self._forward = block.forward
        block.forward = self._within
        for module in block.modules():
            # FSDP2 puts the inputs of what it shards through an autograd.Function.
            if module is not block and isinstance(module, FSDPModule):
                module.register_forward_pre_hook(_inputs_on_time, prepend=True, with_kwargs=True)

    def promise(self, late: LateTensor) -> LateTensor:
        """Note a tensor that has to be here when the block ends."""
        self._promised.append(late)
        return late

    def _within(self, *args: Any, **kwargs: Any) -> Any:
        before, self.entered = self.entered, True
        outer, self._promised = self._promised, []
        try:
            result = tree_map(on_time, self._forward(*args, **kwargs))
            for late in self._promised:  # also what is hidden in an object, or not used
                late.now()
            return result
        finally:
            self.entered, self._promised = before, outer
