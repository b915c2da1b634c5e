"""Tensors that are read later: what is done to them is written down, and any part of the result can be had by itself.

Conversions of weights stack, join, turn and cut tensors. Here the file's tensors stand for themselves without a byte
read; the operations make a tree; and a part of the result is read by asking the tree, which asks the files for no more
than that part needs. What an operation is not known to do part by part is done as it is written, on whole operands.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from typing_extensions import override

from lightning_moe.checkpoint.safetensors_files import (
    Reader,
    StoredTensor,
    Window,
    in_pieces,
    whole_window,
    window_shape,
)

_aten = torch.ops.aten
# Elements that an elementwise operation computes at once.
_PIECE = 1 << 22


class Node(ABC):
    """A value that can be read in parts.

    Attributes:
        shape: Its shape.
        dtype: Its dtype.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        self.shape = tuple(shape)
        self.dtype = dtype

    def read(self, window: Window, out: Tensor, reader: Reader) -> None:
        """Write a part of the value into ``out``, which has the window's shape and any dtype, layout and device."""
        if out.numel():
            self._read(window, out, reader)

    @abstractmethod
    def _read(self, window: Window, out: Tensor, reader: Reader) -> None: ...

    @abstractmethod
    def sources(self) -> list[StoredTensor]:
        """The stored tensors that the value is made of."""

    def value(self, window: Window, reader: Reader) -> Tensor:
        """A part of the value, on the CPU."""
        out = torch.empty(window_shape(window), dtype=self.dtype)
        self.read(window, out, reader)
        return out


class Stored(Node):
    """A tensor in a file."""

    def __init__(self, tensor: StoredTensor) -> None:
        super().__init__(tensor.shape, tensor.dtype)
        self.tensor = tensor

    @override
    def _read(self, window: Window, out: Tensor, reader: Reader) -> None:
        reader.read(self.tensor, window, out)

    @override
    def sources(self) -> list[StoredTensor]:
        return [self.tensor]


class _Of(Node):
    """A value made of others."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, children: Sequence[Node]) -> None:
        super().__init__(shape, dtype)
        self.children = list(children)

    @override
    def sources(self) -> list[StoredTensor]:
        return [tensor for child in self.children for tensor in child.sources()]


class _Stack(_Of):
    def __init__(self, shape: Sequence[int], children: Sequence[Node], dim: int) -> None:
        super().__init__(shape, children[0].dtype, children)
        self.dim = dim % len(shape)

    @override
    def _read(self, window: Window, out: Tensor, reader: Reader) -> None:
        inner = (*window[: self.dim], *window[self.dim + 1 :])
        start, stop = window[self.dim]
        for place, child in enumerate(self.children[start:stop]):
            child.read(inner, out.select(self.dim, place), reader)


class _Cat(_Of):
    def __init__(self, shape: Sequence[int], children: Sequence[Node], dim: int) -> None:
        super().__init__(shape, children[0].dtype, children)
        self.dim = dim % len(shape)

    @override
    def _read(self, window: Window, out: Tensor, reader: Reader) -> None:
        start, stop = window[self.dim]
        first = 0
        for child in self.children:
            last = first + child.shape[self.dim]
            begin, end = max(first, start), min(last, stop)
            if begin < end:
                part = (*window[: self.dim], (begin - first, end - first), *window[self.dim + 1 :])
                child.read(part, out.narrow(self.dim, begin - start, end - begin), reader)
            first = last


class _Permute(_Of):
    def __init__(self, child: Node, order: Sequence[int]) -> None:
        super().__init__([child.shape[dim] for dim in order], child.dtype, [child])
        self.order = list(order)

    @override
    def _read(self, window: Window, out: Tensor, reader: Reader) -> None:
        back = [self.order.index(dim) for dim in range(len(self.order))]
        self.children[0].read(tuple(window[dim] for dim in back), out.permute(back), reader)


class _Slice(_Of):
    def __init__(self, child: Node, dim: int, start: int, length: int, step: int = 1) -> None:
        shape = list(child.shape)
        shape[dim] = length
        super().__init__(shape, child.dtype, [child])
        self.dim, self.start, self.step = dim, start, step

    @override
    def _read(self, window: Window, out: Tensor, reader: Reader) -> None:
        first, last = window[self.dim]
        begin = self.start + first * self.step
        end = self.start + (last - 1) * self.step + 1
        part = (*window[: self.dim], (begin, end), *window[self.dim + 1 :])
        if self.step == 1:
            self.children[0].read(part, out, reader)
            return
        every = self.children[0].value(part, reader)
        out.copy_(every[(*[slice(None)] * self.dim, slice(None, None, self.step))])


class _Reshape(_Of):
    """Other dimensions for the same elements; those before and after the ones that change are passed through."""

    def __init__(self, child: Node, shape: Sequence[int]) -> None:
        super().__init__(shape, child.dtype, [child])
        old, new = child.shape, self.shape
        before = 0
        while before < min(len(old), len(new)) and old[before] == new[before]:
            before += 1
        after = 0
        while after < min(len(old), len(new)) - before and old[-1 - after] == new[-1 - after]:
            after += 1
        # Zeros multiply to the same whatever is beside them.
        self.before, self.after = (before, after) if math.prod(old) else (0, 0)

    @override
    def _read(self, window: Window, out: Tensor, reader: Reader) -> None:
        child = self.children[0]
        end = len(self.shape) - self.after
        old, new = child.shape[self.before : len(child.shape) - self.after], self.shape[self.before : end]
        # The rows of the result that the window has a part of, as a range of all elements in their order, and the rows
        # of the child which that range has a part of.
        axis, inner = _rows(new)
        first, last = window[self.before + axis] if axis >= 0 else (0, 1)
        old_axis, old_inner = _rows(old)
        begin, stop = first * inner // old_inner, -(-last * inner // old_inner)
        span = (
            whole_window(old)
            if old_axis < 0
            else (*[(0, 1)] * old_axis, (begin, stop), *whole_window(old[old_axis + 1 :]))
        )
        part = (*window[: self.before], *span, *window[end:])
        if window[self.before : end] == whole_window(new) and out.is_contiguous():
            child.read(part, out.view(window_shape(part)), reader)
            return
        value = child.value(part, reader)
        before, after = value.shape[: self.before], value.shape[value.ndim - self.after :]
        value = value.reshape(*before, -1, *after)
        value = value.narrow(self.before, first * inner - begin * old_inner, (last - first) * inner)
        rows = () if axis < 0 else (*new[:axis], last - first, *new[axis + 1 :])
        value = value.reshape(*before, *(rows or new), *after)
        for dim, (begin, stop) in enumerate(window[self.before : end]):
            if dim != axis:
                value = value.narrow(self.before + dim, begin, stop - begin)
        out.copy_(value)


def _rows(shape: Sequence[int]) -> tuple[int, int]:
    """The outermost dimension of more than one entry (-1: there is none), and the elements of each of its entries."""
    axis = next((dim for dim, size in enumerate(shape) if size > 1), -1)
    return axis, math.prod(shape[axis + 1 :]) if axis >= 0 else max(math.prod(shape), 1)


class _Elementwise(_Of):
    """An operation on each element by itself, of operands that are broadcast."""

    def __init__(self, like: Tensor, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self.function = function
        self.leaves, self.spec = tree_flatten((args, kwargs))
        super().__init__(like.shape, like.dtype, [leaf.node for leaf in self.leaves if isinstance(leaf, Lazy)])

    @override
    def _read(self, window: Window, out: Tensor, reader: Reader) -> None:
        in_pieces(window, out, _PIECE, lambda part, place: self._compute(part, place, reader))

    def _compute(self, window: Window, out: Tensor, reader: Reader) -> None:
        operands = [self._operand(leaf, window, reader) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        args, kwargs = tree_unflatten(operands, self.spec)
        out.copy_(self.function(*args, **kwargs))

    @staticmethod
    def _operand(leaf: Tensor, window: Window, reader: Reader) -> Tensor:
        own = window[len(window) - leaf.ndim :]
        part = tuple((0, 1) if size == 1 else span for size, span in zip(leaf.shape, own, strict=True))
        if isinstance(leaf, Lazy):
            return leaf.node.value(part, reader)
        return leaf[tuple(slice(*span) for span in part)]


class _Whole(_Of):
    """Any other operation: done on whole operands, for each part that is read."""

    def __init__(self, like: Tensor, function: Callable[..., Any], args: Any, kwargs: Any, place: int | None) -> None:
        self.function, self.args, self.kwargs, self.place = function, args, kwargs, place
        leaves, _ = tree_flatten((args, kwargs))
        super().__init__(like.shape, like.dtype, [leaf.node for leaf in leaves if isinstance(leaf, Lazy)])

    @override
    def _read(self, window: Window, out: Tensor, reader: Reader) -> None:
        def whole(leaf: Any) -> Any:
            return leaf.node.value(whole_window(leaf.shape), reader) if isinstance(leaf, Lazy) else leaf

        result = self.function(*tree_map(whole, self.args), **tree_map(whole, self.kwargs))
        value = result if self.place is None else result[self.place]
        out.copy_(value[tuple(slice(*span) for span in window)])


class Computed(_Of):
    """What a function makes of whole tensors, where the function cannot be followed operation by operation.

    Args:
        shape: Shape of the result.
        dtype: Its dtype.
        children: The operands.
        function: Makes the result of the operands' values.
        by_rows: Row ``i`` of the result depends on row ``i`` of each operand alone.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        children: Sequence[Node],
        function: Callable[[list[Tensor]], Tensor],
        by_rows: bool,
    ) -> None:
        super().__init__(shape, dtype, children)
        self.function, self.by_rows = function, by_rows

    @override
    def _read(self, window: Window, out: Tensor, reader: Reader) -> None:
        if not self.by_rows:
            self._compute(window, out, reader, whole_window(self.shape)[:1])
            return
        start, stop = window[0]
        for row in range(start, stop):  # one at a time: what is computed in between is larger than the result
            self._compute(((0, 1), *window[1:]), out.narrow(0, row - start, 1), reader, ((row, row + 1),))

    def _compute(self, window: Window, out: Tensor, reader: Reader, rows: Window) -> None:
        values = [child.value((*rows, *whole_window(child.shape[1:])), reader) for child in self.children]
        value = self.function(values)
        wanted = (*window_shape(rows), *self.shape[1:])
        if tuple(value.shape) != wanted:
            raise ValueError(f"a conversion makes {list(value.shape)} where {list(wanted)} is expected")
        out.copy_(value[tuple(slice(*span) for span in window)])


class Lazy(Tensor):
    """A tensor whose value is read later. Operations on it make others of its kind.

    Raises:
        NotImplementedError: By an operation that writes into a tensor or asks for its values.
    """

    node: Node

    @staticmethod
    def __new__(cls, node: Node, strides: Sequence[int] | None = None) -> "Lazy":
        """Make a tensor of the node's shape, with strides as if it had been computed."""
        options: dict[str, Any] = {} if strides is None else {"strides": tuple(strides)}
        cpu = torch.device("cpu")
        lazy = Tensor._make_wrapper_subclass(cls, torch.Size(node.shape), dtype=node.dtype, device=cpu, **options)
        lazy.node = node
        return lazy

    @override
    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Lazy({list(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            raise NotImplementedError(f"{func} writes into a tensor that is not read yet")
        if any("Tensor" not in str(returned.type) for returned in func._schema.returns):
            raise NotImplementedError(f"{func} asks for the values of a tensor that is not read yet")
        shapes = tree_map(_on_meta, (args, kwargs))
        shapes[1].pop("device", None)
        like = func(*shapes[0], **shapes[1])
        several = isinstance(like, list | tuple)
        results = list(like) if several else [like]
        nodes = _nodes(func, args, kwargs, results, several)
        made = [Lazy(node, result.stride()) for node, result in zip(nodes, results, strict=True)]
        return made if several else made[0]


def _on_meta(leaf: Any) -> Any:
    if isinstance(leaf, Lazy):
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
    return leaf.to("meta") if isinstance(leaf, Tensor) else leaf


def _nodes(func: Any, args: Any, kwargs: Mapping[str, Any], results: list[Tensor], several: bool) -> list[Node]:
    """What each result of an operation is."""
    packet = func.overloadpacket
    rule = _RULES.get(packet)
    if rule is not None and _lazy_operands(args):
        nodes = rule(args, kwargs, results)
        if nodes is not None:
            return nodes
    if not several and (torch.Tag.pointwise in func.tags or packet == _aten._to_copy):
        # On the CPU, whatever the model's device: the result is copied there.
        return [_Elementwise(results[0], func, args, {**kwargs, **({"device": "cpu"} if "device" in kwargs else {})})]
    return [_Whole(r, func, args, kwargs, place if several else None) for place, r in enumerate(results)]


def _lazy_operands(args: Any) -> bool:
    first = args[0]
    return all(isinstance(item, Lazy) for item in first) if isinstance(first, list | tuple) else isinstance(first, Lazy)


def _argument(args: Any, kwargs: Mapping[str, Any], place: int, name: str, default: Any = None) -> Any:
    return args[place] if len(args) > place else kwargs.get(name, default)


def _same(args: Any, kwargs: Any, results: list[Tensor]) -> list[Node] | None:
    return [args[0].node]


def _reshaped(args: Any, kwargs: Any, results: list[Tensor]) -> list[Node] | None:
    if results[0].dtype != args[0].dtype:  # a view of the bytes as another dtype
        return None
    return [_Reshape(args[0].node, results[0].shape)]


def _stacked(args: Any, kwargs: Any, results: list[Tensor]) -> list[Node] | None:
    nodes = [item.node for item in args[0]]
    if len({node.dtype for node in nodes}) > 1:
        return None
    return [_Stack(results[0].shape, nodes, _argument(args, kwargs, 1, "dim", 0))]


def _joined(args: Any, kwargs: Any, results: list[Tensor]) -> list[Node] | None:
    nodes = [item.node for item in args[0]]
    dims = {len(node.shape) for node in nodes}  # an empty vector goes with anything
    if len({node.dtype for node in nodes}) > 1 or len(dims) > 1:
        return None
    return [_Cat(results[0].shape, nodes, _argument(args, kwargs, 1, "dim", 0))]


def _transposed(args: Any, kwargs: Any, results: list[Tensor]) -> list[Node] | None:
    order = list(range(args[0].ndim))
    first, second = (args[1], args[2]) if len(args) > 2 else (-1, -2)
    if order:
        order[first], order[second] = order[second], order[first]
    return [_Permute(args[0].node, order)]


def _permuted(args: Any, kwargs: Any, results: list[Tensor]) -> list[Node] | None:
    return [_Permute(args[0].node, [dim % args[0].ndim for dim in args[1]])]


def _sliced(args: Any, kwargs: Any, results: list[Tensor]) -> list[Node] | None:
    dim, start, step = (
        _argument(args, kwargs, place, name, default)
        for place, name, default in ((1, "dim", 0), (2, "start", None), (4, "step", 1))
    )
    size = args[0].shape[dim]
    start = 0 if start is None else min(max(start + size if start < 0 else start, 0), size)
    return [_Slice(args[0].node, dim % args[0].ndim, start, results[0].shape[dim], step)]


def _narrowed(args: Any, kwargs: Any, results: list[Tensor]) -> list[Node] | None:
    dim, start = args[1], args[2]
    start = start + args[0].shape[dim] if start < 0 else start
    return [_Slice(args[0].node, dim % args[0].ndim, start, results[0].shape[dim])]


def _selected(args: Any, kwargs: Any, results: list[Tensor]) -> list[Node] | None:
    dim, index = args[1] % args[0].ndim, args[2]
    index = index + args[0].shape[dim] if index < 0 else index
    return [_Reshape(_Slice(args[0].node, dim, index, 1), results[0].shape)]


def _split(args: Any, kwargs: Any, results: list[Tensor]) -> list[Node] | None:
    dim = _argument(args, kwargs, 2, "dim", 0) % args[0].ndim
    nodes: list[Node] = []
    start = 0
    for result in results:
        nodes.append(_Slice(args[0].node, dim, start, result.shape[dim]))
        start += result.shape[dim]
    return nodes


def _unbound(args: Any, kwargs: Any, results: list[Tensor]) -> list[Node] | None:
    dim = _argument(args, kwargs, 1, "dim", 0) % args[0].ndim
    return [_Reshape(_Slice(args[0].node, dim, i, 1), result.shape) for i, result in enumerate(results)]


_Rule = Callable[[Any, Any, list[Tensor]], list[Node] | None]
_RULES: Mapping[Any, _Rule] = {
    **dict.fromkeys((_aten.clone, _aten.detach, _aten.alias, _aten.contiguous, _aten.lift_fresh), _same),
    **dict.fromkeys(
        (_aten.view, _aten._unsafe_view, _aten.reshape, _aten._reshape_alias, _aten.unsqueeze, _aten.squeeze), _reshaped
    ),
    _aten.stack: _stacked,
    _aten.cat: _joined,
    **dict.fromkeys((_aten.transpose, _aten.t), _transposed),
    _aten.permute: _permuted,
    _aten.slice: _sliced,
    _aten.narrow: _narrowed,
    _aten.select: _selected,
    **dict.fromkeys((_aten.split, _aten.split_with_sizes), _split),
    _aten.unbind: _unbound,
}
