"""Results that other ranks still send, and results that recompute keeps."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class InFlight(Generic[T]):
    """What was sent off and need not have arrived. Nothing of it may be touched before :meth:`wait`.

    Args:
        finish: Waits for it, and makes the result of what came.
    """

    def __init__(self, finish: Callable[[], T]) -> None:
        self._finish: Callable[[], T] | None = finish

    def wait(self) -> T:
        """Wait, and hand the result over; once, so that this object does not keep it alive."""
        finish, self._finish = self._finish, None
        assert finish is not None, "it was handed over already"
        return finish()

    def then(self, change: Callable[[T], Any]) -> "InFlight[Any]":
        """What becomes of it by ``change`` when it has arrived."""
        return InFlight(lambda: change(self.wait()))


def arrived(value: T) -> InFlight[T]:
    """What is here already."""
    return InFlight(lambda: value)


class Keeper(ABC):
    """Keeps results of a forward, and hands them out again in its recomputation instead of computing them."""

    @abstractmethod
    def keep(self, compute: Callable[[], T]) -> T:
        """Compute and keep, or hand out what was kept."""

    @abstractmethod
    def keep_flight(self, send: Callable[[], InFlight[T]]) -> InFlight[T]:
        """Send and keep what arrives, or hand out what arrived before."""


KEEPER: ContextVar[Keeper | None] = ContextVar("lightning_moe_keeper", default=None)


def kept(compute: Callable[[], T]) -> T:
    """Compute something that selective recompute keeps: a collective, which every rank repeats or leaves out alike."""
    keeper = KEEPER.get()
    return compute() if keeper is None else keeper.keep(compute)


def kept_flight(send: Callable[[], InFlight[T]]) -> InFlight[T]:
    """The same for what takes its time to arrive."""
    keeper = KEEPER.get()
    return send() if keeper is None else keeper.keep_flight(send)
