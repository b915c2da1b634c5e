"""What ``dispatcher="auto"`` takes, over facts of machines that are pretended here and stand-ins of the libraries."""

import logging
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_moe import optional, strategy
from lightning_moe.dispatch import (
    Needs,
    automatic,
    automatic_here,
    build_dispatcher,
    choose_dispatcher,
    dispatcher_options,
)
from lightning_moe.dispatch.automatic import RankFacts, Topology, decide, merge, refusal
from tests import tiny
from tests.dispatch.fakes import deepep_gloo, nccl_ep
from tests.dispatch.test_deepep import RELEASES
from tests.harness import run_ranks

BF16 = torch.bfloat16
NODE = Topology("cuda", 8, 8, capability=(9, 0), rdma=True, deepep_class="ElasticBuffer")
V1 = replace(NODE, deepep_class="Buffer")
MISSING = {"deepep": "deep_ep is not installed", "hybridep": "deep_ep is not installed"}
NVLINK = "all 8 expert-parallel ranks have it and are connected by NVLink"


# From facts to a decision


@pytest.mark.parametrize(
    ("topology", "unusable", "name", "parts"),
    [
        (replace(NODE, ranks=1), {}, "local", ["one rank holds every expert"]),
        (Topology("cpu", 1, 2), {}, "local", []),
        (
            Topology("cpu", 2, 2),
            {},
            "all_to_all",
            ["passed over deepep, nccl_ep and hybridep: the ranks compute on cpu, and these need CUDA"],
        ),
        (NODE, {}, "deepep", [NVLINK]),
        (NODE, {"deepep": "D", "hybridep": "H"}, "nccl_ep", [NVLINK, "passed over deepep: D"]),
        (NODE, {"deepep": "D", "nccl_ep": "N"}, "hybridep", ["passed over deepep: D", "passed over nccl_ep: N"]),
        (NODE, {**MISSING, "nccl_ep": "N"}, "all_to_all", ["passed over deepep and hybridep: deep_ep is not", "N"]),
        (replace(NODE, no_nvlink="only PCIe"), {}, "all_to_all", ["deepep, nccl_ep and hybridep: only PCIe"]),
        (replace(NODE, unknown="no answer"), {}, "all_to_all", ["no answer"]),
        (replace(NODE, capability=(8, 0)), {}, "all_to_all", ["9.0 or higher, and some device has 8.0"]),
        (
            replace(NODE, backend="cpu:gloo,cuda:gloo"),
            {},
            "all_to_all",
            ["need process_group_backend='nccl', and the ranks are connected by 'cpu:gloo,cuda:gloo'"],
        ),
        # A network for RDMA: ElasticBuffer and EPBuffer look for one also inside a node, Buffer does not.
        (
            replace(NODE, rdma=False),
            {},
            "nccl_ep",
            ["passed over deepep: ElasticBuffer of deep_ep", "EP_DISABLE_GIN=1"],
        ),
        (replace(NODE, rdma=False, gin_disabled=True), {}, "deepep", [NVLINK]),
        (replace(V1, rdma=False), {}, "deepep", [NVLINK]),
        # Several nodes.
        (replace(NODE, ranks=16), {}, "deepep", ["connected by NVLink and RDMA"]),
        (replace(NODE, ranks=16, rdma=False), {}, "all_to_all", ["several nodes, and not each has a network device"]),
        (replace(NODE, ranks=16), {"deepep": "D", "nccl_ep": "N"}, "all_to_all", ["hybridep: the expert-parallel"]),
        (replace(V1, ranks=16), {}, "deepep", []),
        (replace(V1, ranks=16, ranks_per_node=4), {}, "nccl_ep", ["Buffer of deep_ep takes 8 ranks for a node"]),
        (replace(V1, ranks=16, ranks_per_node=16), {}, "nccl_ep", ["a node has 16"]),
        (replace(V1, ranks=4, ranks_per_node=4), {}, "deepep", []),
        (replace(NODE, ranks=12), {}, "all_to_all", ["groups of 12", "nodes of 8 ranks unevenly"]),
        (replace(NODE, ranks=4, ranks_per_node=6), {}, "all_to_all", ["groups of 4", "nodes of 6 ranks unevenly"]),
    ],
)
def test_the_decision(topology: Topology, unusable: dict[str, str], name: str, parts: list[str]) -> None:
    decision = decide(topology, unusable)
    assert decision.name == name, decision.reason
    for part in parts:
        assert part in decision.reason
    assert str(decision).startswith(f"dispatcher='auto' takes {name!r}: ")
    assert "\n" not in str(decision)


def linked(*devices: str, **changes: Any) -> list[RankFacts]:
    """A rank a device, each of which reaches all by NVLink."""
    reaches = frozenset(devices)
    return [RankFacts(device=d, reaches=reaches, capability=(9, 0), rdma=True, **changes) for d in devices]


def test_the_facts_of_all_ranks_count() -> None:
    two_nodes = [*linked("a", "b"), *linked("c", "d")]
    pairs, across = Topology("cuda", 2, 2), Topology("cuda", 4, 2)
    for start in (pairs, across):
        topology, unusable = merge(two_nodes, start)
        assert (topology.no_nvlink, topology.capability, topology.rdma) == ("", (9, 0), True)
        assert not any(unusable.values())
    wrong_pairs, _ = merge(two_nodes, Topology("cuda", 4, 4))
    assert "does not reach those of all other" in wrong_pairs.no_nvlink

    one_cut = [*two_nodes[:3], replace(two_nodes[3], reaches=frozenset())]
    assert merge(one_cut, pairs)[0].no_nvlink.startswith("on rank 3: its GPU does not reach")
    unknown = [replace(rank, reaches=None) for rank in two_nodes]
    assert merge(unknown, pairs)[0].no_nvlink == (
        "whether its GPU reaches the others of its node by NVLink cannot be found out"
    )
    older = [replace(two_nodes[0], capability=(8, 0), rdma=False), *two_nodes[1:]]
    topology, _ = merge(older, pairs)
    assert (topology.capability, topology.rdma) == ((8, 0), False)
    failed = [two_nodes[0], RankFacts(unknown="no driver"), *two_nodes[2:]]
    assert decide(*merge(failed, pairs)).reason.endswith("on rank 1: no driver")


def test_a_package_that_some_ranks_lack_is_used_by_none() -> None:
    facts = linked(*"abcdefgh", versions={"nccl_ep": "transformer_engine 2.20"})
    facts[1:7] = [replace(rank, unusable={"deepep": "not there"}) for rank in facts[1:7]]
    topology, unusable = merge(facts, Topology("cuda", 8, 8))
    assert unusable == {"deepep": "on ranks 1, 2, 3, 4 and 2 more: not there", "nccl_ep": "", "hybridep": ""}
    assert decide(topology, unusable).name == "nccl_ep"
    facts[5] = replace(facts[5], versions={"nccl_ep": "transformer_engine 2.17"})
    assert merge(facts, topology)[1]["nccl_ep"] == (
        "the ranks have different versions: transformer_engine 2.20 on rank 0, transformer_engine 2.17 on rank 5"
    )


# What a library's own set-up would refuse


PACKAGES = ("deep_ep", "transformer_engine")


class NotInstalled:
    """Finds none of the packages, also where they are installed."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> None:
        if name.split(".")[0] in PACKAGES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@pytest.fixture
def patch() -> Iterator[pytest.MonkeyPatch]:
    """What a test installs and pretends is gone after it."""
    before = dict(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        yield patch
    remove_packages()
    sys.modules.update({name: module for name, module in before.items() if name.split(".")[0] in PACKAGES})
    optional.probe.cache_clear()


def remove_packages() -> None:
    for name in [name for name in sys.modules if name.split(".")[0] in PACKAGES]:
        del sys.modules[name]


def install(patch: pytest.MonkeyPatch, *releases: str) -> None:
    """Leave nothing but stand-ins of releases: of DeepEP, by the names of its tests, and of Transformer Engine."""
    patch.setattr(sys, "meta_path", [NotInstalled, *sys.meta_path])
    remove_packages()
    for release in releases:
        if release in RELEASES:
            deepep_gloo.install(RELEASES[release])
        else:
            nccl_ep.install(release)
    optional.probe.cache_clear()


def pretend_gpus(patch: pytest.MonkeyPatch, count: int, links: int = 18, tells: str = "torch") -> None:
    """A node of GPUs that reach each other; by NVLink where there are links, which torch or NVML tells of."""
    from torch._C import _distributed_c10d

    def detect(device_type: Any, connection: str) -> Any:
        assert connection == "nvlink"
        if tells != "torch":
            raise RuntimeError("DMA connectivity detector for cuda over nvlink is not available")
        return SimpleNamespace(matrix=[[links * (i != j) for j in range(count)] for i in range(count)])

    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: {f"GPU-{i}": i for i in range(count)}[uuid],
        nvmlDeviceGetP2PStatus=lambda one, other, capability: 0 if links and capability == "nvlink" else 5,
        NVML_P2P_CAPS_INDEX_NVLINK="nvlink",
        NVML_P2P_STATUS_OK=0,
    )
    patch.setattr(_distributed_c10d, "_detect_dma_connectivity", detect)
    patch.setitem(sys.modules, "pynvml", nvml if tells == "nvml" else None)
    patch.setattr(torch.cuda, "is_available", lambda: count > 0)
    patch.setattr(torch.cuda, "device_count", lambda: count)
    patch.setattr(torch.cuda, "get_device_capability", lambda index=None: (9, 0))
    patch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=index))
    patch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: True)
    patch.setattr(dist, "is_nccl_available", lambda: True)
    patch.setattr(torch.cuda.nccl, "version", lambda: (2, 30, 7))


@pytest.mark.parametrize(
    ("release", "name", "ranks", "model", "problem"),
    [
        ("v1", "deepep", 8, (64, 2048, BF16), ""),
        ("v1", "deepep", 6, (6, 2048, BF16), "supports 2, 4, 8 expert-parallel ranks, or more .*, got 6"),
        ("v1", "deepep", 40, (80, 2048, BF16), "or more that its configurations name, got 40"),
        ("v1", "deepep", 4, (6, 2048, BF16), "6 experts cannot be spread evenly over 4 ranks"),
        ("v1", "deepep", 2, (64, 2048, torch.float32), "moves rows of bfloat16, got torch.float32"),
        ("v1", "deepep", 2, (64, 2040, BF16), "a multiple of 16, got width 2040"),
        ("v1", "deepep", 2, (64, 0, BF16), "the width of the rows is not known before the first call"),
        ("v2", "deepep", 6, (60, 2048, BF16), ""),
        ("v2", "deepep", 2, (64, 2000, BF16), r"\(ElasticBuffer of deep_ep\).*a multiple of 256, got width 2000"),
        ("v2", "deepep", 2, (1024, 2048, BF16), "at most 256 experts a rank, got 512"),
        ("v2_5", "deepep", 16, (4096, 2048, BF16), "at most 2048 experts, got 4096"),
        ("hybrid", "hybridep", 8, (64, 2048, BF16), ""),
        ("hybrid", "hybridep", 2, (6, 2048, BF16), "multiple of 4, got 6"),
        ("2.20.2", "nccl_ep", 8, (64, 2048, BF16), ""),
        ("2.20.2", "nccl_ep", 2, (6, 2048, BF16), "multiple of 4 experts, got 6"),
        ("2.20.2", "nccl_ep", 2, (64, 2044, BF16), "multiple of 16 bytes, got hidden size 2044"),
        ("2.20.2", "nccl_ep", 2, (64, 2048, torch.float32), "moves rows of bfloat16, got torch.float32"),
    ],
)
def test_what_its_set_up_would_refuse(
    patch: pytest.MonkeyPatch,
    release: str,
    name: str,
    ranks: int,
    model: tuple[int, int, torch.dtype],
    problem: str,
) -> None:
    pretend_gpus(patch, 8)
    install(patch, release)
    fits, wanted = Needs("fits", 64, 2048, BF16), Needs("layers.0.experts", *model)
    found = refusal(build_dispatcher(name, ranks), ranks, [wanted] if ranks > 8 or 64 % ranks else [fits, wanted])
    if not problem:
        assert found == ""
        return
    assert re.search(problem, found), found
    assert found.endswith(" (layers.0.experts)")
    assert "; " not in found, "what to do about it is what auto does"


def test_layers_of_two_shapes_rule_out_what_keeps_one_context(patch: pytest.MonkeyPatch) -> None:
    pretend_gpus(patch, 2)
    install(patch, "2.20.2", "v1")
    layers = [Needs("first", 64, 2048, BF16), Needs("second", 32, 2048, BF16)]
    assert "all layers need the same number of experts" in refusal(build_dispatcher("nccl_ep", 2), 2, layers)
    assert refusal(build_dispatcher("deepep", 2), 2, layers) == ""


def test_an_explicit_dispatcher_still_raises(patch: pytest.MonkeyPatch) -> None:
    def choose(dispatcher: str) -> Any:
        return choose_dispatcher(dispatcher, 2, device=torch.device("cuda", 0), ranks_per_node=2, modules=list)

    pretend_gpus(patch, 2)
    install(patch, "v1")
    assert choose("deepep")[0].name == "deepep"
    assert choose("deepep")[1] == ""
    with pytest.raises(RuntimeError, match="dispatcher='nccl_ep' is not usable here: transformer_engine is not"):
        choose("nccl_ep")
    with pytest.raises(ValueError, match="dispatcher='local' keeps every expert on each rank"):
        choose("local")


# This machine


@pytest.mark.parametrize(
    ("gpus", "releases", "says"),
    [
        ({"count": 0}, ["v1"], "takes all_to_all on several ranks, local on one: passed over deepep, nccl_ep and"),
        ({"count": 1}, ["v1"], "takes local: there is one GPU"),
        ({"count": 4}, ["v1", "2.20.2"], "takes deepep on 4 ranks, one a GPU of this machine: all 4 expert-parallel"),
        ({"count": 4, "tells": "nvml"}, ["v1"], "takes deepep on 4 ranks"),
        ({"count": 4}, ["2.20.2"], "takes nccl_ep on 4 ranks"),
        ({"count": 4}, [], "takes all_to_all on 4 ranks, one a GPU of this machine: passed over deepep and hybridep"),
        ({"count": 3}, ["v1"], "takes all_to_all on 3 ranks"),
        ({"count": 4, "links": 0}, ["v1"], "passed over deepep, nccl_ep and hybridep: its GPU does not reach"),
        ({"count": 4, "links": 0, "tells": "nvml"}, ["v1"], "hybridep: its GPU does not reach"),
        ({"count": 4, "tells": "nothing"}, ["v1"], "by NVLink cannot be found out"),
    ],
)
def test_what_auto_is_here(patch: pytest.MonkeyPatch, gpus: dict[str, Any], releases: list[str], says: str) -> None:
    pretend_gpus(patch, **gpus)
    install(patch, *releases)
    assert says in automatic_here()


def test_peers_that_no_access_is_allowed_to_are_not_reached(patch: pytest.MonkeyPatch) -> None:
    pretend_gpus(patch, 4)
    install(patch, "v1")
    patch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: {one, other} != {0, 3})
    assert "on ranks 0 and 3: its GPU does not reach" in automatic_here()


def test_a_library_that_raises_when_asked_is_passed_over(patch: pytest.MonkeyPatch) -> None:
    class Package(ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise AssertionError("no driver")

    pretend_gpus(patch, 2)
    install(patch, "2.20.2")
    sys.modules["deep_ep"] = Package("deep_ep")
    assert dispatcher_options()["deepep"] == "whether it is usable could not be found out: AssertionError: no driver"
    assert "takes nccl_ep" in automatic_here()
    assert "passed over deepep: whether it is usable could not be found out" in automatic_here()


@pytest.mark.parametrize(
    ("ports", "up"),
    [
        ({}, False),
        ({"mlx5_0": ("InfiniBand", "4: ACTIVE")}, True),
        ({"mlx5_0": ("InfiniBand", "1: DOWN"), "mlx5_1": ("Ethernet", "4: ACTIVE")}, True),
        ({"mlx5_0": ("InfiniBand", "2: INIT"), "efa_0": ("Unspecified", "4: ACTIVE")}, False),
    ],
)
def test_a_network_for_rdma(
    patch: pytest.MonkeyPatch, tmp_path: Path, ports: dict[str, tuple[str, str]], up: bool
) -> None:
    for name, (layer, state) in ports.items():
        port = tmp_path / name / "ports" / "1"
        port.mkdir(parents=True)
        (port / "link_layer").write_text(layer + "\n")
        (port / "state").write_text(state + "\n")
    (tmp_path / "broken" / "ports" / "1").mkdir(parents=True)
    patch.setattr(automatic, "_NETWORKS", tmp_path)
    pretend_gpus(patch, 2)
    install(patch, "v2")
    assert ("takes deepep" in automatic_here()) == up


# Several ranks

MODEL = (Needs("experts", 8, 256, BF16),)
# What is installed on rank 0 and on rank 1; the dispatcher; what the reason says.
MACHINES: dict[str, tuple[list[str], list[str], str, str]] = {
    "both": (["v1"], ["v1"], "deepep", "all 2 expert-parallel ranks have it"),
    "one": (["v1"], [], "all_to_all", "passed over deepep: on rank 1: deep_ep is not installed"),
    "the other": ([], ["v1"], "all_to_all", "passed over deepep and hybridep: on rank 0: deep_ep is not"),
    "different packages": (["v1"], ["2.20.2"], "all_to_all", "nccl_ep: on rank 0: transformer_engine is not installed"),
    "the second best": (["v1", "2.20.2"], ["2.20.2"], "nccl_ep", "passed over deepep: on rank 1: deep_ep is not"),
    "two releases": (
        ["v2"],
        ["v1"],
        "all_to_all",
        "different versions: ElasticBuffer of deep_ep on rank 0, Buffer of deep_ep on rank 1",
    ),
    "a fault": (["v1"], ["v1"], "all_to_all", "on rank 1: what is usable could not be found out: TypeError: rank 1"),
    "float32": (["v1"], ["v1"], "all_to_all", "moves rows of bfloat16, got torch.float32 (experts)"),
}


def chosen_on_each_machine() -> dict[str, tuple[str, str]]:
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    found = {}
    for machine, (on_first, on_second, *_) in MACHINES.items():

        def model(machine: str = machine) -> tuple[Needs, ...]:
            if machine == "a fault" and rank == 1:
                raise TypeError("rank 1")
            return tuple(replace(need, dtype=torch.float32) for need in MODEL) if machine == "float32" else MODEL

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "get_backend_config", lambda group=None: "cuda:nccl")
            patch.setattr(automatic, "_has_rdma", lambda: True)
            pretend_gpus(patch, 2)
            install(patch, *(on_second if rank else on_first))
            device = torch.device("cuda", rank)
            dispatcher, why = choose_dispatcher("auto", 2, device=device, ranks_per_node=2, modules=model)
            found[machine] = dispatcher.name, why
    return found


def test_all_ranks_take_the_same() -> None:
    first, second = run_ranks(chosen_on_each_machine, 2, timeout=60)
    assert first == second
    for machine, (_, _, name, part) in MACHINES.items():
        taken, why = first[machine]
        assert taken == name, (machine, why)
        assert part in why, (machine, why)


# In a strategy


def fitted() -> dict[str, Any]:
    """Two fits of one module; what the strategy tells of the model, and what it logs of the dispatcher."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    asked: list[Any] = []
    lines: list[str] = []

    def choose(dispatcher: str, size: int, **facts: Any) -> Any:
        asked.append((dispatcher, size, facts["device"].type, facts["ranks_per_node"], facts["modules"]()))
        return choose_dispatcher(dispatcher, size, **facts)

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addHandler(Keep())
    logger.setLevel(logging.INFO)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strategy, "choose_dispatcher", choose)
        module = tiny.TinyLM()
        data = tiny.loader(tiny.tokens(steps=1), rank, world)
        trainer = tiny.trainer(tiny.moe_ep(expert_parallel_size=2), devices=world, max_epochs=1, precision="bf16-mixed")
        trainer.fit(module, data)
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module, data)
    return {"asked": asked, "log": [line for line in lines if "dispatcher" in line], "losses": module.losses}


def test_a_strategy_tells_what_its_model_needs_and_logs_the_reason_once() -> None:
    first, second = run_ranks(fitted, 2, timeout=60)
    names = [f"net.model.layers.{layer}.mlp.experts" for layer in (0, 1)]
    assert first["asked"] == second["asked"] == [("auto", 2, "cpu", 2, [Needs(name, 8, 32, BF16) for name in names])]
    assert len(first["losses"]) == 2
    assert second["log"] == []
    taken = [line for line in first["log"] if "dispatcher='auto' takes" in line]
    assert taken == [
        "moe_ep: dispatcher='auto' takes 'all_to_all': passed over deepep, nccl_ep and hybridep: the ranks compute on"
        " cpu, and these need CUDA"
    ]
