"""Activation checkpointing of the blocks: their activations are computed again in the backward pass.

A token that the recomputation routed to another expert than the forward did would get the wrong gradient, or make ranks
wait for rows that nobody sends. So the choice of experts is always kept, whatever else is computed again.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Generic, Literal, NamedTuple, TypeVar, get_args

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from lightning_moe.in_flight import KEEPER, InFlight, Keeper, arrived
from lightning_moe.optional import loaded

ActivationCheckpointing = Literal["none", "full", "selective"]
CHECKPOINTING: tuple[str, ...] = get_args(ActivationCheckpointing)

# What "selective" keeps, besides what crosses ranks (`kept` of lightning_moe.in_flight): attention, whose results cost
# little memory for their time. Not those of linear layers: models change them in place, which a kept tensor does not
# survive.
_KEPT = "aten::_scaled_dot_product_"

_T = TypeVar("_T")
# Around the forward, and around its recomputation.
_Pair = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def check_mode(activation_checkpointing: object) -> None:
    """Check the strategy's option.

    Raises:
        ValueError: If there is no such mode.
    """
    if activation_checkpointing not in CHECKPOINTING:
        raise ValueError(
            f"activation_checkpointing={activation_checkpointing!r} is not known; allowed are"
            f" {', '.join(map(repr, CHECKPOINTING))}"
        )


def check_activation_checkpointing(mode: str, model: nn.Module, blocks: Iterable[nn.Module]) -> None:
    """Check the strategy's ``activation_checkpointing`` against a model.

    Raises:
        ValueError: If the model checkpoints its blocks itself, or has no blocks.
    """
    if mode == "none":
        return
    for name, module in model.named_modules():
        if getattr(module, "gradient_checkpointing", False) is True:
            raise ValueError(
                f"activation_checkpointing={mode!r}, but {name or type(model).__name__!r} checkpoints its blocks"
                " itself; leave out either the option or the call of gradient_checkpointing_enable()"
            )
    if not list(blocks):
        raise ValueError(
            f"activation_checkpointing={mode!r} found no repeated blocks in {type(model).__name__}; name their class in"
            " block_classes, or set activation_checkpointing='none'"
        )


def checkpoint_block(
    block: nn.Module,
    mode: ActivationCheckpointing,
    *,
    keep_routing: bool = True,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> None:
    """Let a block compute its activations again in the backward pass. Its parameters keep their names.

    Args:
        block: A module that is called with tensors; the random state of its forward is restored.
        mode: ``"full"`` keeps the inputs of the block and the choice of experts; ``"selective"`` also keeps the results
            of attention and of the communication between expert-parallel ranks.
        keep_routing: Keep the choice of experts. A compiled block cannot, and does the same twice by itself.
        around: Makes the context of the second computation, which a training step has around the first; it can be
            entered again.
    """
    if mode == "none":
        return
    full: Callable[[], _Pair] = _keep_routing if keep_routing else _keep_nothing
    keeping = full if mode == "full" else _keep_costly
    forward = block.forward

    def contexts() -> _Pair:
        first, again = keeping()
        return first, _Both(around(), again)

    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not (block.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        args = tuple(_without_cache(value) for value in args)
        kwargs = {name: _without_cache(value) for name, value in kwargs.items()}
        if kwargs.get("use_cache"):
            kwargs["use_cache"] = False
        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    block.forward = recomputed


def _without_cache(value: Any) -> Any:
    """Leave out a cache of keys and values, which training has no use for: recomputation would fill it twice."""
    transformers = loaded("transformers")
    return None if transformers is not None and isinstance(value, transformers.Cache) else value


def in_recompute() -> bool:
    """Whether this forward is a recomputation: it runs inside a backward pass, whoever checkpoints."""
    return torch._C._current_graph_task_id() != -1


def _keep_nothing() -> _Pair:
    return nullcontext(), nullcontext()


def _keep_costly() -> _Pair:
    tape: _Tape[list[_Kept]] = _Tape()
    forward, again = _keep_routing()
    return _Both(_Costly(tape, replay=False), forward), _Both(_Costly(tape, replay=True), again)


class _Both(AbstractContextManager[None]):
    """Two contexts as one, which can be entered again: a graph may be walked twice."""

    def __init__(self, outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> None:
        self._parts = (outer, inner)
        self._stack = ExitStack()

    @override
    def __enter__(self) -> None:
        self._stack = ExitStack()
        for part in self._parts:
            self._stack.enter_context(part)

    @override
    def __exit__(self, *error: Any) -> bool | None:
        return self._stack.__exit__(*error)


def _keep_routing() -> _Pair:
    tape: _Tape[Tensor] = _Tape()
    return _Choices(tape, replay=False), _Choices(tape, replay=True)


class _Tape(Generic[_T]):
    """What a forward keeps, in order, and how far its recomputation has come. A graph may be walked more than once."""

    def __init__(self) -> None:
        self._kept: list[_T] = []
        self._position = 0

    def rewind(self) -> None:
        self._position = 0

    def keep(self, what: _T) -> None:
        self._kept.append(what)

    def next(self) -> _T:
        self._position += 1
        return self._kept[self._position - 1]


class _Kept(NamedTuple):
    """A result in parts, and how often each tensor had been changed in place when it was kept."""

    what: str
    leaves: list[Any]
    versions: list[int]
    structure: TreeSpec


class _Costly(TorchDispatchMode, Keeper):
    """Keeps the results of the operators in ``_KEPT`` and what crosses ranks, and repeats them in the recomputation.

    PyTorch's own selective checkpointing wants every operator of both passes to be the same, but FSDP2 gathers
    weights in one that it still has in the other.
    """

    def __init__(self, tape: "_Tape[list[_Kept]]", *, replay: bool) -> None:
        super().__init__()
        self.tape = tape
        self.replay = replay
        self._before: Any = None

    @override
    def __enter__(self) -> Any:
        self.tape.rewind()
        self._before = KEEPER.set(self)
        return super().__enter__()

    @override
    def __exit__(self, *error: Any) -> Any:
        KEEPER.reset(self._before)
        return super().__exit__(*error)

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not func.name().startswith(_KEPT) or "backward" in func.name():
            return func(*args, **kwargs)
        return self._kept_as(func.name(), lambda: func(*args, **kwargs))

    @override
    def keep(self, compute: Callable[[], _T]) -> _T:
        def apart() -> _T:
            # Choices made inside, such as an order of rows, are not made again: they must not be on the other tape.
            with torch._C.DisableTorchFunction():
                return compute()

        return self._kept_as("a collective", apart)

    @override
    def keep_flight(self, send: Callable[[], InFlight[_T]]) -> InFlight[_T]:
        # Its place on the tape is that of its departure: rows need not arrive in the order in which they left.
        if self.replay:
            return arrived(_repeated(self.tape.next()))
        place: list[_Kept] = []
        self.tape.keep(place)
        with torch._C.DisableTorchFunction():
            flight = send()

        def arrive() -> _T:
            with torch._C.DisableTorchFunction():
                return _keep_in(place, "a collective", flight.wait())

        return InFlight(arrive)

    def _kept_as(self, what: str, compute: Callable[[], _T]) -> _T:
        if self.replay:
            return _repeated(self.tape.next())
        place: list[_Kept] = []
        self.tape.keep(place)
        return _keep_in(place, what, compute())


def _keep_in(place: list[_Kept], what: str, result: _T) -> _T:
    # The kept tensors hold no graph.
    leaves, structure = tree_flatten(result)
    leaves = _detached(leaves)
    place.append(_Kept(what, leaves, _versions(leaves), structure))
    return result


def _repeated(place: list[_Kept]) -> Any:
    (kept,) = place
    if _versions(kept.leaves) != kept.versions:
        raise RuntimeError(
            f"activation_checkpointing='selective' keeps the result of {kept.what}, but the model changed it in"
            " place; set activation_checkpointing='full'"
        )
    return tree_unflatten(_detached(kept.leaves), kept.structure)


def _detached(leaves: list[Any]) -> list[Any]:
    # Below autograd a detached tensor shares the version counter only with this key.
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def _versions(leaves: list[Any]) -> list[int]:
    return [leaf._version for leaf in leaves if isinstance(leaf, Tensor)]


# Functions that return values and the positions of these along a dimension.
_WITH_VALUES = {torch.topk, Tensor.topk, torch.sort, Tensor.sort, torch.max, Tensor.max, torch.min, Tensor.min}
# Functions that return positions alone.
_POSITIONS = {torch.argmax, Tensor.argmax, torch.argsort, Tensor.argsort, torch.multinomial, Tensor.multinomial}


class _Choices(TorchFunctionMode):
    """Keeps the choices that a forward makes with ``topk`` and its like, and repeats them in its recomputation.

    Watching functions costs a fraction of watching every operator of a block, as selective checkpointing does.
    """

    def __init__(self, tape: "_Tape[Tensor]", *, replay: bool) -> None:
        super().__init__()
        self.tape = tape
        self.replay = replay

    @override
    def __enter__(self) -> Any:
        self.tape.rewind()
        return super().__enter__()

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func not in _WITH_VALUES and func not in _POSITIONS:
            return func(*args, **kwargs)
        out = kwargs.pop("out", None)
        if func in _POSITIONS:
            if self.replay and func in (torch.multinomial, Tensor.multinomial):
                func(*args, **kwargs)  # what is drawn after it must be what the forward drew
            chosen = self._choice(lambda: func(*args, **kwargs))
            return chosen if out is None else out.resize_(chosen.shape).copy_(chosen)
        with torch.no_grad():
            result = None if self.replay else func(*args, **kwargs)
        if isinstance(result, Tensor) or (self.replay and self._is_reduction(func, args, kwargs)):
            # max and min of everything, or of two tensors
            return func(*args, **kwargs) if out is None else func(*args, **kwargs, out=out)
        return self._with_values(result, func, args, kwargs, out)

    @staticmethod
    def _is_reduction(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
        if func not in (torch.max, Tensor.max, torch.min, Tensor.min):
            return False
        return "dim" not in kwargs and not (len(args) > 1 and isinstance(args[1], int))

    def _with_values(self, result: Any, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> Any:
        scores: Tensor = args[0] if args else kwargs["input"]
        takes_count = func in (torch.topk, Tensor.topk)
        place = 2 if takes_count else 1
        dim = kwargs.get("dim", args[place] if len(args) > place and isinstance(args[place], int) else -1)
        index = self._choice(lambda: result[1])
        # max and min take the dimension away unless they are told to keep it.
        removed = index.ndim < scores.ndim
        # Both passes take the values in the same way, so that they keep the same tensors for the backward.
        values = scores.gather(dim, index.unsqueeze(dim) if removed else index)
        values = values.squeeze(dim) if removed else values
        if out is not None:
            for given, part in zip(out, (values, index), strict=True):
                given.resize_(part.shape).copy_(part)
            values, index = out
        return torch.return_types.topk((values, index)) if takes_count else _pair(func)((values, index))

    def _choice(self, choose: Callable[[], Tensor]) -> Tensor:
        if self.replay:
            return self.tape.next().clone()
        with torch.no_grad():  # the values of a sort, which nobody sees, would be saved for the backward
            chosen = choose()
        self.tape.keep(chosen.clone())  # a model may change its own in place
        return chosen


def _pair(func: Any) -> Callable[[tuple[Tensor, Tensor]], Any]:
    name = func.__name__
    return {"sort": torch.return_types.sort, "max": torch.return_types.max, "min": torch.return_types.min}[name]
