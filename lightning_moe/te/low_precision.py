"""When low precision is on: in the forward of a training step, in its recomputation, and nowhere else."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch.distributed as dist
from typing_extensions import override

from lightning_moe.optional import require
from lightning_moe.te.recipes import PACKAGE, build_recipe


class LowPrecision:
    """Opens and closes ``te.autocast`` with one recipe.

    Attributes:
        recipe: The recipe object.

    Args:
        recipe: A recipe as in :class:`~lightning_moe.te.options.TransformerEngineConfig`, not ``None``.
    """

    def __init__(self, recipe: Any) -> None:
        self._te: Any = require(PACKAGE, "transformer_engine")
        self.recipe = build_recipe(recipe)
        self._open: Any = None

    @property
    def delayed(self) -> bool:
        """Whether the scales come from earlier steps."""
        return bool(self.recipe.delayed())

    def _autocast(self) -> Any:
        # Every rank computes the same layers on its own data: their magnitudes are those of the whole batch.
        group = dist.group.WORLD if self.delayed and dist.is_initialized() else None
        return self._te.autocast(enabled=True, recipe=self.recipe, amax_reduction_group=group)

    @contextmanager
    def on(self) -> Iterator[None]:
        """Low precision inside."""
        self._enter()
        try:
            yield
        finally:
            self._leave()

    @contextmanager
    def off(self) -> Iterator[None]:
        """The end of low precision, and its return: for a backward pass that a training step calls itself."""
        was_open = self._open is not None
        self._leave()
        try:
            yield
        finally:
            if was_open:
                self._enter()

    def again(self) -> AbstractContextManager[Any]:
        """Low precision for a recomputation in the backward pass; it can be entered again."""
        return _Again(lambda: nullcontext() if self._open is not None else self._autocast())

    def _enter(self) -> None:
        if self._open is None:
            self._open = self._autocast()
            self._open.__enter__()

    def _leave(self) -> None:
        if self._open is not None:
            opened, self._open = self._open, None
            opened.__exit__(None, None, None)


class _Again(AbstractContextManager[None]):
    """A context that is made when it is entered: it is handed over in the forward, when another one is open."""

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]) -> None:
        self._make = make
        self._inside: list[AbstractContextManager[Any]] = []

    @override
    def __enter__(self) -> None:
        context = self._make()
        context.__enter__()
        self._inside.append(context)

    @override
    def __exit__(self, *error: Any) -> bool | None:
        return self._inside.pop().__exit__(*error)
