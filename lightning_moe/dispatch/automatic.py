"""What ``dispatcher="auto"`` is: the best library that all ranks have and that suits the model, the devices and links.

Each rank finds its own facts, the ranks exchange them once, and a pure function decides from all of them; so that the
decision is the same everywhere, also where a package is installed on some nodes only.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_moe.choices import Choice
from lightning_moe.dispatch.base import Dispatcher
from lightning_moe.dispatch.deepep.dispatchers import DeepEPDispatcher, HybridEPDispatcher
from lightning_moe.dispatch.deepep.v1 import V1Transport
from lightning_moe.optional import one_line, probe

# The libraries, the preferred one first.
LIBRARIES = {"deepep": "deep_ep", "nccl_ep": "transformer_engine", "hybridep": "deep_ep"}

_MIN_CAPABILITY = (9, 0)
_V1_NODE = 8  # ranks that DeepEP V1 takes for one node
_NETWORKS = Path("/sys/class/infiniband")
_RANKS_NAMED = 4


@dataclass(frozen=True)
class Needs:
    """What one experts module asks of a dispatcher.

    Attributes:
        name: Name of the module.
        num_experts: Experts of the whole module.
        hidden_size: Width of a row; 0 where it is not known.
        dtype: Dtype of a row.
    """

    name: str
    num_experts: int
    hidden_size: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Topology:
    """The expert-parallel ranks and what connects them; the same on every rank.

    Attributes:
        device_type: Where the ranks compute.
        ranks: Expert-parallel ranks, neighbours in the order of all ranks.
        ranks_per_node: Ranks of one node.
        backend: What connects all ranks, as ``torch.distributed.get_backend_config`` says it.
        capability: The lowest compute capability of their devices.
        unknown: Why the facts of some rank could not be found out; empty where they could.
        no_nvlink: Why it is not so that each of these ranks reaches the others of its node by NVLink; else empty.
        rdma: Whether each of them has a network device for RDMA that is up.
        gin_disabled: Whether DeepEP was told on each of them to do without a network.
        deepep_class: The class that ``dispatcher="deepep"`` uses; empty where there is none.
    """

    device_type: str
    ranks: int
    ranks_per_node: int
    backend: str = "cuda:nccl"
    capability: tuple[int, int] = (0, 0)
    unknown: str = ""
    no_nvlink: str = ""
    rdma: bool = False
    gin_disabled: bool = False
    deepep_class: str = ""

    @property
    def across_nodes(self) -> bool:
        """Whether some group of expert-parallel ranks has ranks on several nodes."""
        return self.ranks_per_node % self.ranks != 0


@dataclass(frozen=True)
class RankFacts:
    """What one rank knows of itself.

    Attributes:
        unusable: For each library why it is not usable on this rank or for this model, or an empty string.
        unknown: Why none of this could be found out; empty where it could.
        versions: For each library what would be used of it.
        device: Identity of its device.
        reaches: Devices that it reaches by NVLink; ``None`` where that cannot be found out.
        capability: Compute capability of its device.
        rdma: Whether it has a network device for RDMA that is up.
        gin_disabled: Whether DeepEP was told to do without a network.
        deepep_class: The class of the installed DeepEP that would be used; empty where there is none.
    """

    unusable: Mapping[str, str] = field(default_factory=dict)
    unknown: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    device: str = ""
    reaches: frozenset[str] | None = None
    capability: tuple[int, int] = (0, 0)
    rdma: bool = False
    gin_disabled: bool = False
    deepep_class: str = ""


@dataclass(frozen=True)
class Decision:
    """What ``"auto"`` is.

    Attributes:
        name: The dispatcher.
        reason: Why, and why nothing better, in one line.
    """

    name: str
    reason: str

    def __str__(self) -> str:
        return f"dispatcher='auto' takes {self.name!r}: {self.reason}"


def decide(topology: Topology, unusable: Mapping[str, str]) -> Decision:
    """Decide from facts that are the same on every rank.

    Args:
        topology: The ranks and what connects them.
        unusable: For each library why some rank or the model rules it out; empty or missing where nothing does.
    """
    if topology.ranks == 1:
        return Decision("local", "one rank holds every expert of a layer")
    passed_over: dict[str, list[str]] = {}
    chosen = ""
    for name in LIBRARIES:
        reason = unsuited(name, topology) or unusable.get(name, "")
        if not reason:
            chosen = name
            break
        passed_over.setdefault(reason, []).append(name)
    why = [f"passed over {_listed(names)}: {reason}" for reason, names in passed_over.items()]
    if chosen:
        links = "NVLink and RDMA" if topology.across_nodes else "NVLink"
        why.insert(0, f"all {topology.ranks} expert-parallel ranks have it and are connected by {links}")
    return Decision(chosen or "all_to_all", "; ".join(why))


def unsuited(name: str, topology: Topology) -> str:
    """Say why a library does not suit the devices and their links, or return an empty string.

    Args:
        name: One of :data:`LIBRARIES`.
        topology: The ranks and what connects them.
    """
    if topology.device_type != "cuda":
        return f"the ranks compute on {topology.device_type}, and these need CUDA"
    if "cuda:nccl" not in topology.backend:
        return f"these need process_group_backend='nccl', and the ranks are connected by {topology.backend!r}"
    if topology.unknown:
        return topology.unknown
    if topology.capability < _MIN_CAPABILITY:
        needed, found = (".".join(map(str, numbers)) for numbers in (_MIN_CAPABILITY, topology.capability))
        return f"their kernels need compute capability {needed} or higher, and some device has {found}"
    if topology.no_nvlink:
        return topology.no_nvlink
    if topology.across_nodes:
        reason = _unsuited_across_nodes(name, topology)
        if reason:
            return reason
    if name != "deepep":
        return ""
    if topology.deepep_class == V1Transport.class_name:
        several_nodes = topology.across_nodes or topology.ranks > _V1_NODE
        if several_nodes and topology.ranks_per_node != _V1_NODE:
            found_here = topology.ranks_per_node
            return f"{topology.deepep_class} of deep_ep takes {_V1_NODE} ranks for a node, and a node has {found_here}"
    elif topology.deepep_class and not topology.rdma and not topology.gin_disabled:
        return (
            f"{topology.deepep_class} of deep_ep looks for a network device for RDMA, and not every rank has one that"
            " is up; on one node the environment variable EP_DISABLE_GIN=1 lets it do without"
        )
    return ""


def _unsuited_across_nodes(name: str, topology: Topology) -> str:
    if topology.ranks % topology.ranks_per_node:
        return (
            f"groups of {topology.ranks} expert-parallel ranks lie across nodes of {topology.ranks_per_node} ranks"
            " unevenly"
        )
    if not topology.rdma:
        return "the expert-parallel ranks are on several nodes, and not each has a network device for RDMA that is up"
    if name == "hybridep":
        return "the expert-parallel ranks are on several nodes, which takes a build and settings of its own"
    return ""


# From the facts of each rank to those that all share


def merge(facts: Sequence[RankFacts], topology: Topology) -> tuple[Topology, dict[str, str]]:
    """Put the facts of all ranks together.

    Args:
        facts: Those of each rank.
        topology: What was known without them.

    Returns:
        The whole topology, and why a library is not usable on some rank.
    """
    unusable = {}
    for name in LIBRARIES:
        unusable[name] = _by_rank([rank.unusable.get(name, "") for rank in facts])
        versions = [rank.versions.get(name, "") for rank in facts]
        if not unusable[name] and len(set(versions)) > 1:
            other = next(rank for rank, version in enumerate(versions) if version != versions[0])
            unusable[name] = (
                f"the ranks have different versions: {versions[0]} on rank 0, {versions[other]} on rank {other}"
            )
    whole = replace(
        topology,
        capability=min(rank.capability for rank in facts),
        unknown=_by_rank([rank.unknown for rank in facts]),
        no_nvlink=_by_rank([_no_nvlink(rank, facts, topology) for rank in range(len(facts))]),
        rdma=all(rank.rdma for rank in facts),
        gin_disabled=all(rank.gin_disabled for rank in facts),
        deepep_class=facts[0].deepep_class,
    )
    return whole, unusable


def _no_nvlink(rank: int, facts: Sequence[RankFacts], topology: Topology) -> str:
    """Why a rank does not reach all ranks of its group and node by NVLink."""
    first, node = rank // topology.ranks * topology.ranks, rank // topology.ranks_per_node
    group = range(first, min(first + topology.ranks, len(facts)))
    others = [other for other in group if other != rank and other // topology.ranks_per_node == node]
    reaches = facts[rank].reaches
    if others and reaches is None:
        return "whether its GPU reaches the others of its node by NVLink cannot be found out"
    if all(facts[other].device in (reaches or ()) for other in others):
        return ""
    return "its GPU does not reach those of all other expert-parallel ranks of its node by NVLink"


def _by_rank(reasons: Sequence[str]) -> str:
    """The first reason with the ranks that it holds on, as far as these are not all."""
    first = next(filter(None, reasons), "")
    ranks = [str(rank) for rank, reason in enumerate(reasons) if reason == first]
    if not first or len(ranks) == len(reasons):
        return first
    more = len(ranks) - _RANKS_NAMED
    named = _listed(ranks) if more <= 0 else f"{', '.join(ranks[:_RANKS_NAMED])} and {more} more"
    return f"on rank{'s' * (len(ranks) > 1)} {named}: {first}"


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


# Where the facts come from


def decide_together(
    choices: Mapping[str, Choice[Dispatcher]],
    topology: Topology,
    device: torch.device,
    modules: Callable[[], Sequence[Needs]],
) -> Decision:
    """Decide for a model. Collective over all ranks, where there is something to decide: on CUDA and several ranks.

    Args:
        choices: The dispatchers.
        topology: What is known of the ranks without asking them: device type, backend and numbers.
        device: The device of this rank.
        modules: What the experts modules need; called where there is something to decide.
    """
    if topology.ranks == 1 or topology.device_type != "cuda":
        return decide(topology, {})
    # From here to the exchange nothing may raise: the other ranks would wait.
    mine = facts_of_rank(choices, topology.ranks, device, modules)
    facts = [mine] * dist.get_world_size()
    dist.all_gather_object(facts, mine)
    return decide(*merge(facts, topology))


def decide_here(choices: Mapping[str, Choice[Dispatcher]]) -> tuple[int, Decision]:
    """Decide for the devices of this machine, as if each had a rank and the model did not rule anything out.

    Args:
        choices: The dispatchers.

    Returns:
        The number of CUDA devices, and the decision; for several ranks on CPU where there are none.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < 2:
        return count, decide(Topology("cuda", 1, 1) if count else Topology("cpu", 2, 2), {})
    # What every library takes: many experts of a usual width.
    modules = [Needs("", 16 * count, 4096, torch.bfloat16)]
    facts = [facts_of_rank(choices, count, torch.device("cuda", index), lambda: modules) for index in range(count)]
    return count, decide(*merge(facts, Topology("cuda", count, count)))


def facts_of_rank(
    choices: Mapping[str, Choice[Dispatcher]],
    ranks: int,
    device: torch.device,
    modules: Callable[[], Sequence[Needs]],
) -> RankFacts:
    """Find what this rank knows of itself. No communication; never raises, a failure becomes a reason.

    Args:
        choices: The dispatchers.
        ranks: Expert-parallel ranks.
        device: A CUDA device, with or without an index.
        modules: What the experts modules need.
    """
    try:
        needs = modules()
        unusable = {name: _unusable(choices[name], ranks, needs) for name in LIBRARIES}
        classes = [] if unusable["deepep"] else deepep_classes()
        mine = [kind.class_name for kind in DeepEPDispatcher.transports if kind.class_name in classes]
        index = torch.cuda.current_device() if device.index is None else device.index
        return RankFacts(
            unusable=unusable,
            versions={name: _version(name, mine) for name, reason in unusable.items() if not reason},
            device=_identity(index),
            reaches=_reached_by_nvlink(index),
            capability=torch.cuda.get_device_capability(index),
            rdma=_has_rdma(),
            gin_disabled=os.environ.get("EP_DISABLE_GIN", "0") not in ("", "0"),
            deepep_class=mine[0] if mine else "",
        )
    except Exception as error:
        return RankFacts(unknown=f"what is usable could not be found out: {one_line(error)}")


def unusable_reason(choice: Choice[Dispatcher]) -> str:
    """Say why a dispatcher is not usable here, or return an empty string. Never raises."""
    try:
        return choice.unusable()
    except Exception as error:
        return f"whether it is usable could not be found out: {one_line(error)}"


def _unusable(choice: Choice[Dispatcher], ranks: int, needs: Sequence[Needs]) -> str:
    reason = unusable_reason(choice)
    if reason:
        return reason
    assert choice.build is not None
    return refusal(choice.build(), ranks, needs)


def _version(name: str, deepep: Sequence[str]) -> str:
    package = f"{LIBRARIES[name]} {probe(LIBRARIES[name]).version}".rstrip()
    used = {"deepep": deepep[0] if deepep else "", "hybridep": HybridEPDispatcher.transports[0].class_name}
    return f"{used[name]} of {package}" if name in used else package


@dataclass(frozen=True)
class _Ranks:
    """Stands in for a process group that does not exist yet, as far as checks ask for it."""

    ranks: int
    group_name: str = "expert"

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return 0


def refusal(dispatcher: Dispatcher, ranks: int, needs: Sequence[Needs]) -> str:
    """Say why a dispatcher's own set-up would refuse a model, or return an empty string. No communication.

    Args:
        dispatcher: A new one, which is not used for anything else.
        ranks: Expert-parallel ranks.
        needs: What each experts module asks of it.
    """
    # Whether the device and the process group suit is asked elsewhere; there is no process group yet.
    dispatcher.caps = replace(dispatcher.caps, device_types=("cpu", "cuda"))
    group: Any = _Ranks(ranks)
    for module in needs:
        where = f" ({module.name})" * bool(module.name)
        if not module.hidden_size:
            return f"the width of the rows is not known before the first call{where}"
        try:
            dispatcher.for_layer().setup(
                group, num_experts=module.num_experts, hidden_size=module.hidden_size, dtype=module.dtype
            )
        except Exception as error:
            # What to do about it, which comes next, is what "auto" does.
            return f"{str(error).partition('; ')[0]}{where}"
    return ""


def deepep_classes() -> list[str]:
    """The interfaces that the installed DeepEP has, in the order in which the dispatchers look for them."""
    package = probe("deep_ep").module
    known = [kind.class_name for kind in (*DeepEPDispatcher.transports, *HybridEPDispatcher.transports)]
    return [name for name in known if package is not None and getattr(package, name, None) is not None]


def _identity(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def _reached_by_nvlink(index: int) -> frozenset[str] | None:
    """The devices that this process sees and that one of them reaches by NVLink; ``None`` where nothing tells.

    Access to a peer alone does not tell: it works over PCIe, too.
    """
    links = _links_by_torch(index)
    if links is None:
        links = _links_by_nvml(index)
    if links is None:
        return None
    peers = [other for other in links if other != index and torch.cuda.can_device_access_peer(index, other)]
    return frozenset(_identity(other) for other in peers)


def _links_by_torch(index: int) -> list[int] | None:
    """Devices with NVLink to one, by the detector of torch's symmetric memory; ``None`` where there is none."""
    try:
        from torch._C._autograd import DeviceType
        from torch._C._distributed_c10d import _detect_dma_connectivity  # type: ignore[attr-defined]

        row = _detect_dma_connectivity(DeviceType.CUDA, "nvlink").matrix[index]
    except Exception:
        return None
    return [other for other, links in enumerate(row) if links]


def _links_by_nvml(index: int) -> list[int] | None:
    """The same by NVML, whose Python package torch.cuda loads where it is installed."""
    nvml: Any = sys.modules.get("pynvml")
    if nvml is None:
        return None
    try:
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByUUID(f"GPU-{_identity(i)}") for i in range(torch.cuda.device_count())]
        found = []
        for other, handle in enumerate(handles):
            if other != index:
                state = nvml.nvmlDeviceGetP2PStatus(handles[index], handle, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
                found += [other] * (state == nvml.NVML_P2P_STATUS_OK)
    except Exception:
        return None
    return found


def _has_rdma() -> bool:
    """Whether a network device for RDMA is up, InfiniBand or RoCE."""
    for port in _NETWORKS.glob("*/ports/*"):
        try:
            layer, state = ((port / name).read_text().strip() for name in ("link_layer", "state"))
        except OSError:
            continue
        if layer in ("InfiniBand", "Ethernet") and state.endswith("ACTIVE"):
            return True
    return False
