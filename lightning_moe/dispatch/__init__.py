"""How rows reach their expert and come back. One file a dispatcher; a new one is added to ``_DISPATCHERS`` below."""

from collections.abc import Callable
from dataclasses import dataclass

from lightning_moe.dispatch.all_to_all import AllToAllDispatcher
from lightning_moe.dispatch.base import Dispatched, Dispatcher, DispatcherCaps
from lightning_moe.dispatch.local import LocalDispatcher
from lightning_moe.optional import probe

__all__ = ["Dispatched", "Dispatcher", "DispatcherCaps", "build_dispatcher", "dispatcher_options"]


@dataclass(frozen=True)
class _Entry:
    """One dispatcher: how it is built, and the reason why it is not usable here (empty where it is)."""

    build: Callable[[], Dispatcher] | None
    unusable: Callable[[], str]


def _no_adapter(package: str) -> Callable[[], str]:
    def reason() -> str:
        found = probe(package)
        if found.module is None:
            return f"{package} is {found.reason}"
        return f"{package} {found.version} is installed, but this version of lightning-moe has no adapter for it"

    return reason


_DISPATCHERS: dict[str, _Entry] = {
    "local": _Entry(LocalDispatcher, lambda: ""),
    "all_to_all": _Entry(AllToAllDispatcher, lambda: ""),
    "deepep": _Entry(None, _no_adapter("deep_ep")),
    "hybridep": _Entry(None, _no_adapter("deep_ep")),
    "nccl_ep": _Entry(None, _no_adapter("transformer_engine")),
}


def dispatcher_options() -> dict[str, str]:
    """List the dispatchers.

    Returns:
        For each name an empty string where it is usable here, else the reason in one line.
    """
    return {name: entry.unusable() for name, entry in _DISPATCHERS.items()}


def check_dispatcher(dispatcher: str | Dispatcher) -> None:
    """Check the name of a dispatcher without building anything.

    Raises:
        ValueError: If there is no dispatcher of that name.
        RuntimeError: If it is not usable here; the message holds the reason.
    """
    if isinstance(dispatcher, Dispatcher) or dispatcher == "auto":
        return
    if not isinstance(dispatcher, str) or dispatcher not in _DISPATCHERS:
        allowed = ", ".join(repr(name) for name in ("auto", *_DISPATCHERS))
        raise ValueError(f"dispatcher={dispatcher!r} is not known; allowed are {allowed} and a Dispatcher object")
    reason = _DISPATCHERS[dispatcher].unusable()
    if reason:
        usable = ", ".join(repr(name) for name, entry in _DISPATCHERS.items() if not entry.unusable())
        raise RuntimeError(
            f"dispatcher={dispatcher!r} is not usable here: {reason}. Usable are 'auto', {usable};"
            " `lightning-moe doctor` lists them all"
        )


def build_dispatcher(dispatcher: str | Dispatcher, expert_parallel_size: int) -> Dispatcher:
    """Turn the strategy's ``dispatcher`` option into an object.

    Args:
        dispatcher: A name, ``"auto"`` or a :class:`Dispatcher`, which is returned as it is.
        expert_parallel_size: Ranks that share the experts; ``"auto"`` is ``"local"`` for one rank and
            ``"all_to_all"`` for more.

    Raises:
        ValueError: If there is no dispatcher of that name, or ``"local"`` is asked to serve several ranks.
        RuntimeError: If it is not usable here; the message holds the reason.
    """
    check_dispatcher(dispatcher)
    if isinstance(dispatcher, Dispatcher):
        return dispatcher
    if dispatcher == "auto":
        dispatcher = "local" if expert_parallel_size == 1 else "all_to_all"
    if dispatcher == "local" and expert_parallel_size > 1:
        raise ValueError(
            f"dispatcher='local' keeps every expert on each rank, but expert_parallel_size={expert_parallel_size};"
            " set dispatcher='auto' or expert_parallel_size=1"
        )
    build = _DISPATCHERS[dispatcher].build
    assert build is not None
    return build()
