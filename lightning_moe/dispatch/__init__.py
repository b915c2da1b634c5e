"""How rows reach their expert and come back. One file a dispatcher; a new one is added to ``DISPATCHERS`` below."""

from lightning_moe.choices import Choice, Choices
from lightning_moe.dispatch.all_to_all import AllToAllDispatcher
from lightning_moe.dispatch.base import Dispatched, Dispatcher, DispatcherCaps
from lightning_moe.dispatch.deepep import DeepEPDispatcher, HybridEPDispatcher, deepep_unusable, hybridep_unusable
from lightning_moe.dispatch.local import LocalDispatcher
from lightning_moe.dispatch.nccl_ep import NcclEpDispatcher, nccl_ep_unusable

__all__ = [
    "DeepEPDispatcher",
    "Dispatched",
    "Dispatcher",
    "DispatcherCaps",
    "HybridEPDispatcher",
    "NcclEpDispatcher",
    "build_dispatcher",
    "check_dispatcher",
    "dispatcher_options",
]

DISPATCHERS: Choices[Dispatcher] = Choices(
    "dispatcher",
    {
        "local": Choice(LocalDispatcher),
        "all_to_all": Choice(AllToAllDispatcher),
        "deepep": Choice(DeepEPDispatcher, deepep_unusable),
        "hybridep": Choice(HybridEPDispatcher, hybridep_unusable),
        "nccl_ep": Choice(NcclEpDispatcher, nccl_ep_unusable),
    },
    also=" and a Dispatcher object",
)


def dispatcher_options() -> dict[str, str]:
    """List the dispatchers.

    Returns:
        For each name an empty string where it is usable here, else the reason in one line.
    """
    return DISPATCHERS.options()


def check_dispatcher(dispatcher: str | Dispatcher) -> None:
    """Check the strategy's ``dispatcher`` option without building anything.

    Raises:
        ValueError: If there is no dispatcher of that name.
        RuntimeError: If it is not usable here; the message holds the reason.
    """
    if not isinstance(dispatcher, Dispatcher):
        DISPATCHERS.check(dispatcher)


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
    if isinstance(dispatcher, Dispatcher):
        return dispatcher
    if dispatcher == "auto":
        dispatcher = automatic_dispatcher(expert_parallel_size)
    if dispatcher == "local" and expert_parallel_size > 1:
        raise ValueError(
            f"dispatcher='local' keeps every expert on each rank, but expert_parallel_size={expert_parallel_size};"
            " set dispatcher='auto' or expert_parallel_size=1"
        )
    return DISPATCHERS.build(dispatcher)


def automatic_dispatcher(expert_parallel_size: int) -> str:
    """Choose what ``dispatcher="auto"`` is.

    Args:
        expert_parallel_size: Ranks that share the experts.
    """
    return "local" if expert_parallel_size == 1 else "all_to_all"
