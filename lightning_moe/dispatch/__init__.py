"""How rows reach their expert and come back. One file a dispatcher; a new one is added to ``DISPATCHERS`` below."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from lightning_moe.choices import Choice, Choices
from lightning_moe.dispatch.all_to_all import AllToAllDispatcher
from lightning_moe.dispatch.automatic import (
    Needs,
    Topology,
    decide_here,
    decide_together,
    deepep_classes,
    unusable_reason,
)
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
    "Needs",
    "automatic_here",
    "build_dispatcher",
    "check_dispatcher",
    "choose_dispatcher",
    "deepep_classes",
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
    return {name: unusable_reason(choice) for name, choice in DISPATCHERS.choices.items()}


def check_dispatcher(dispatcher: str | Dispatcher) -> None:
    """Check the strategy's ``dispatcher`` option without building anything.

    Raises:
        ValueError: If there is no dispatcher of that name.
        RuntimeError: If it is not usable here; the message holds the reason.
    """
    if not isinstance(dispatcher, Dispatcher):
        DISPATCHERS.check(dispatcher)


def choose_dispatcher(
    dispatcher: str | Dispatcher,
    expert_parallel_size: int,
    *,
    device: torch.device,
    ranks_per_node: int,
    modules: Callable[[], Sequence[Needs]],
) -> tuple[Dispatcher, str]:
    """Turn the strategy's ``dispatcher`` option into an object for a model. Collective over all ranks.

    Args:
        dispatcher: A name, ``"auto"`` or a :class:`Dispatcher`, which is returned as it is.
        expert_parallel_size: Ranks that share the experts, neighbours in the order of all ranks.
        device: The device of this rank, of the same type on every rank.
        ranks_per_node: Ranks of one node.
        modules: What the experts modules need, the same on every rank; not called where that does not matter.

    Returns:
        The dispatcher, the same on every rank, and what ``"auto"`` took and why in one line, else an empty string.

    Raises:
        ValueError: If there is no dispatcher of that name, or ``"local"`` is asked to serve several ranks.
        RuntimeError: If it is not usable here; the message holds the reason.
    """
    if dispatcher != "auto":
        return build_dispatcher(dispatcher, expert_parallel_size), ""
    backend = dist.get_backend_config() if dist.is_available() and dist.is_initialized() else ""
    topology = Topology(device.type, expert_parallel_size, ranks_per_node, backend)
    decision = decide_together(DISPATCHERS.choices, topology, device, modules)
    return DISPATCHERS.build(decision.name), str(decision)


def automatic_here() -> str:
    """Say what ``dispatcher="auto"`` takes for the devices of this machine and a model that suits it, and why."""
    count, decision = decide_here(DISPATCHERS.choices)
    if count == 1:
        return "takes local: there is one GPU, and one rank holds every expert of a layer"
    ranks = f"{count} ranks, one a GPU of this machine" if count else "several ranks, local on one"
    return f"takes {decision.name} on {ranks}: {decision.reason}"


def build_dispatcher(dispatcher: str | Dispatcher, expert_parallel_size: int) -> Dispatcher:
    """Turn the strategy's ``dispatcher`` option into an object, without knowing the model and the machine.

    Args:
        dispatcher: A name, ``"auto"`` or a :class:`Dispatcher`, which is returned as it is.
        expert_parallel_size: Ranks that share the experts; ``"auto"`` is ``"local"`` for one rank and
            ``"all_to_all"``, which always works, for more.

    Raises:
        ValueError: If there is no dispatcher of that name, or ``"local"`` is asked to serve several ranks.
        RuntimeError: If it is not usable here; the message holds the reason.
    """
    if isinstance(dispatcher, Dispatcher):
        return dispatcher
    if dispatcher == "auto":
        dispatcher = "local" if expert_parallel_size == 1 else "all_to_all"
    if dispatcher == "local" and expert_parallel_size > 1:
        raise ValueError(
            f"dispatcher='local' keeps every expert on each rank, but expert_parallel_size={expert_parallel_size};"
            " set dispatcher='auto' or expert_parallel_size=1"
        )
    return DISPATCHERS.build(dispatcher)
