"""Shard a LightningModule: experts over the expert-parallel ranks, everything by FSDP2, block by block."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from lightning_moe.dispatch import Dispatcher
from lightning_moe.dispatch.budget import RowBudget
from lightning_moe.experts import ExpertsBackend, ExpertsSpec, FoundExperts, choose_backend
from lightning_moe.experts.peft import check_adapters, install_adapters, materialize_adapters
from lightning_moe.float32 import called, float32_units
from lightning_moe.mesh import Layout, Meshes, experts_per_rank
from lightning_moe.parallel.compile import check_compile, compile_block
from lightning_moe.parallel.initialize import copy_from_rank_zero, materialize, shared_random_state, take_expected
from lightning_moe.parallel.late import LateScope
from lightning_moe.parallel.policy import DtypePolicy
from lightning_moe.parallel.prefetch import no_backward_prefetch, prefetch
from lightning_moe.parallel.recompute import (
    ActivationCheckpointing,
    check_activation_checkpointing,
    checkpoint_block,
)
from lightning_moe.parallel.routed import RoutedExperts
from lightning_moe.parallel.structure import check_no_hidden_experts, find_blocks, find_roots, find_routers

_SHARDED = "_lightning_moe_sharded"


@dataclass(frozen=True)
class Sharded:
    """What was done to a module that is sharded.

    Attributes:
        layout: The sizes.
        policy: The dtypes.
        options: The strategy's other options.
        experts: The forwards of its experts modules.
        notes: What ``"auto"`` options fell back to, with the reason, one line each.
    """

    layout: Layout
    policy: DtypePolicy
    options: "ShardingOptions"
    experts: tuple[RoutedExperts, ...]
    notes: tuple[str, ...]

    def check_again(self, module: nn.Module, layout: Layout, policy: DtypePolicy, options: "ShardingOptions") -> None:
        """Check that what is asked of the module now is what was done to it.

        Raises:
            ValueError: If it is not.
        """
        if (self.layout, self.policy) != (layout, policy) or not self.options.same_as(options):
            raise ValueError(
                f"{type(module).__name__} is sharded already as {self.layout} with {self.policy} and"
                f" {self.options}, and cannot be sharded again as {layout} with {policy} and {options}; use the"
                " same options, or build a new LightningModule"
            )


@dataclass(frozen=True)
class ShardingOptions:
    """The strategy's options that decide how a module is sharded.

    Attributes:
        dispatcher: Where the dispatcher of each experts module comes from; two options with dispatchers of one class
            are the same.
        experts_backend: Name of the backend.
        reshard_after_forward: Free the gathered weights of a block after its forward and gather them again in backward.
        block_classes: Class names of the blocks, ``None`` to find them.
        activation_checkpointing: What the blocks compute again in the backward pass.
        compile: Compile the forward of each block.
        dispatch_chunks: Parts in which the tokens of a layer travel.
        overlap_shared_experts: Let a block go on while the results of its experts travel.
        prefetch_blocks: Blocks whose weights are gathered ahead of their forward.
        max_rows_per_rank: Rows that a rank computes at most in one forward of an experts module.
    """

    dispatcher: Dispatcher = field(repr=False)
    experts_backend: str
    reshard_after_forward: bool
    block_classes: Sequence[str] | None
    activation_checkpointing: ActivationCheckpointing = "none"
    compile: bool = False
    dispatch_chunks: int = 1
    overlap_shared_experts: bool = True
    prefetch_blocks: int | Literal["auto"] = "auto"
    max_rows_per_rank: int | None = None

    def same_as(self, other: "ShardingOptions") -> bool:
        """Whether a module that is sharded with other options needs no change."""
        mine, theirs = (replace(o, dispatcher=self.dispatcher) for o in (self, other))
        return mine == theirs and type(self.dispatcher) is type(other.dispatcher)


def already_sharded(module: nn.Module) -> Sharded | None:
    """Return what an earlier call of :func:`shard_module` did to a module, ``None`` if there was none."""
    return getattr(module, _SHARDED, None)


def shard_module(
    module: nn.Module,
    experts: Sequence[FoundExperts],
    build_meshes: Callable[[], Meshes],
    policy: DtypePolicy,
    options: ShardingOptions,
    device: torch.device,
    recompute_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Sharded:
    """Shard a LightningModule in place. Collective.

    What can be wrong with the module or the options is found before the first collective.

    Args:
        module: The LightningModule, on any device or on the meta device, the same on every rank.
        experts: Its experts modules.
        build_meshes: Makes the two views of the ranks; collective.
        policy: The dtypes.
        options: The strategy's options.
        device: The device of this rank.
        recompute_context: Makes the context in which blocks are computed again in the backward pass.

    Raises:
        ValueError: If an option does not fit the module; the message names it.
        RuntimeError: If the ranks have built different models.
    """
    if any(isinstance(submodule, FSDPModule) for submodule in module.modules()):
        raise ValueError(
            f"{type(module).__name__} is sharded by fully_shard already; ExpertParallelStrategy does that itself, so"
            " leave it out of configure_model()"
        )
    check_no_hidden_experts(module, experts, options.block_classes)
    roots = find_roots(module)
    blocks = find_blocks(module, experts, options.block_classes)
    check_activation_checkpointing(options.activation_checkpointing, module, [block for _, block in blocks])
    check_compile(options.compile, options.activation_checkpointing, device)
    check_adapters(module)
    backends, notes = _choose_backends(module, experts, policy, options, device)
    meshes = build_meshes()
    routed = [
        _route(found, backend, dtype, meshes, options)
        for found, (backend, dtype) in zip(experts, backends, strict=True)
    ]

    _shard_units(module, experts, blocks, roots, meshes, policy, options, device)
    _sum_gradients(module)
    prefetch(blocks, roots, options.prefetch_blocks, device)
    if any(0 in experts_per_rank(found.num_experts, meshes.layout.expert) for found in experts):
        no_backward_prefetch(module)
    if options.overlap_shared_experts and meshes.layout.expert > 1 and not options.compile:
        _overlap_shared_experts(module, experts, routed)
    for found, forward in zip(experts, routed, strict=True):
        found.spec.install(found.module, torch.compiler.disable(forward.__call__) if options.compile else forward)
    install_adapters(module, [found.module for found in experts], compiled=options.compile)
    _wrap_blocks([block for _, block in blocks], options, recompute_context)
    sharded = Sharded(meshes.layout, policy, options, tuple(routed), tuple(notes))
    object.__setattr__(module, _SHARDED, sharded)
    return sharded


def _wrap_blocks(
    blocks: Sequence[nn.Module], options: ShardingOptions, recompute_context: Callable[[], AbstractContextManager[Any]]
) -> None:
    """Compile the blocks, and let them compute again in the backward pass, as the options say."""
    for block in blocks:
        if options.compile:
            compile_block(block)
        checkpoint_block(
            block, options.activation_checkpointing, keep_routing=not options.compile, around=recompute_context
        )


def _shard_units(
    module: nn.Module,
    experts: Sequence[FoundExperts],
    blocks: Sequence[tuple[str, nn.Module]],
    roots: Sequence[tuple[str, nn.Module]],
    meshes: Meshes,
    policy: DtypePolicy,
    options: ShardingOptions,
    device: torch.device,
) -> None:
    """Give every rank the same weights, block by block, and cut them. Collective."""
    expected = take_expected(module)
    leave = {id(tensor) for weights in expected for tensor in weights.waiting()}
    copy_from_rank_zero(module, device)
    sharder = _Sharder(module, experts, meshes, policy, options, device, leave)
    with shared_random_state(device):
        materialize_adapters(module, device)
        for _, block in blocks:
            sharder.shard(block, policy.inner())
        for _, root in roots:
            # Resharded after the forward as the blocks are, where FSDP2 by itself would keep them gathered: a forward
            # that no backward follows would leave a copy behind that goes stale, and stand in for the parameters.
            sharder.shard(root, policy.outer())
    for weights in expected:
        weights.fill(device)


def _overlap_shared_experts(model: nn.Module, experts: Sequence[FoundExperts], routed: Sequence[RoutedExperts]) -> None:
    """Let the results of experts come late where their block has more to compute than them and their router."""
    for found, forward in zip(experts, routed, strict=True):
        block = found.parent
        if block is None or isinstance(block, pl.LightningModule):
            continue
        routers = find_routers(model, [found])
        beside = [child for child in block.children() if child is not found.module and child not in routers]
        if any(next(child.parameters(), None) is not None for child in beside):
            forward.scope = LateScope(block)


def _sum_gradients(module: nn.Module) -> None:
    """Sum the gradients over all ranks, for experts and dense weights alike.

    The 1/data-parallel size that turns the sum into a mean is in the loss. It is the one setting that is right for
    every layout and backend: a divide factor other than the group's size fails on gloo, and on a group of one rank
    divides twice.
    """
    for submodule in module.modules():
        if isinstance(submodule, FSDPModule):
            submodule.set_gradient_divide_factor(1.0)
            submodule.set_force_sum_reduction_for_comms(True)


def _choose_backends(
    model: nn.Module,
    experts: Sequence[FoundExperts],
    policy: DtypePolicy,
    options: ShardingOptions,
    device: torch.device,
) -> tuple[list[tuple[ExpertsBackend | None, torch.dtype]], list[str]]:
    """Choose what computes each experts module and in which dtype, with what ``"auto"`` fell back to."""
    chosen, notes = [], []
    for found in experts:
        dtype = policy.param_dtype or next(found.module.parameters()).dtype
        backend, reason = choose_backend(options.experts_backend, found.spec, found.module, dtype, device)
        chosen.append((backend, dtype))
        if policy.routers_apart(dtype) and not find_routers(model, [found]):
            notes.append(
                f"no router was found beside {found.name}: it computes in {str(dtype).removeprefix('torch.')} unless"
                " the model casts it"
            )
        if reason:
            notes.append(f"experts_backend='auto' takes 'loop' for {found.name}: {reason}")
    return chosen, notes


def _route(
    found: FoundExperts,
    backend: ExpertsBackend | None,
    dtype: torch.dtype,
    meshes: Meshes,
    options: ShardingOptions,
) -> RoutedExperts:
    """Set up the dispatcher of one experts module. Collective."""
    dispatcher = options.dispatcher.for_layer()
    dispatcher.setup(
        meshes.expert_group,
        num_experts=found.num_experts,
        hidden_size=found.spec.hidden_size(found.module),
        dtype=dtype,
        alignment=1 if backend is None else backend.alignment,
    )
    # One rank alone sends nothing that could travel meanwhile.
    chunks = options.dispatch_chunks if meshes.layout.expert > 1 else 1
    rows = options.max_rows_per_rank
    budget = None if rows is None else RowBudget(rows, found.num_experts, meshes.expert_group)
    return RoutedExperts(found.module, found.spec, dispatcher, backend, dtype, found.name, chunks, budget=budget)


class _Sharder:
    """Materialises and shards units, innermost first."""

    def __init__(
        self,
        model: nn.Module,
        experts: Sequence[FoundExperts],
        meshes: Meshes,
        policy: DtypePolicy,
        options: ShardingOptions,
        device: torch.device,
        leave: set[int],
    ) -> None:
        self.model = model
        self.experts = {id(found.module): found for found in experts}
        routers = find_routers(model, experts)
        self.routers = {id(router) for router in routers}
        self.float32, _ = float32_units(model, [*routers, *(found.module for found in experts)])
        self.meshes = meshes
        self.policy = policy
        self.reshard_after_forward = options.reshard_after_forward
        self.device = device
        self.leave = leave  # tensors that stay on the meta device
        self.done: set[int] = set()
        self.without_experts: set[nn.Parameter] = set()  # of a rank that no expert is left for

    def shard(self, unit: nn.Module, policy: MixedPrecisionPolicy) -> None:
        """Shard one unit: first the experts and routers inside, each as a unit of its own, then the rest."""
        if id(unit) in self.done:
            return
        materialize(unit, self.model, self.device, skip=self.done, leave=self.leave)
        for module in list(unit.modules()):
            if id(module) in self.done:
                continue
            if id(module) in self.experts:
                self._shard_experts(module)
            elif id(module) in self.routers and self._apart(module):
                # So small that gathering it again for the backward pass costs more than keeping it.
                self._fully_shard(module, self.policy.router(), False)
        self._shard_float32(unit)
        if id(unit) not in self.done:
            self._fully_shard(unit, policy, self.reshard_after_forward)

    def _shard_float32(self, unit: nn.Module) -> None:
        """Shard what the model keeps in float32, innermost first: a unit of FSDP2 has one dtype."""
        if self.policy.param_dtype in (None, torch.float32):
            return
        inside = {id(module) for module in unit.modules()}
        for module in self.float32:
            if id(module) not in inside or id(module) in self.done:
                continue
            for _, child in called(module):
                if id(child) not in self.done:
                    self._fully_shard(child, self.policy.inner(), self.reshard_after_forward)
            self._fully_shard(module, self.policy.float32(), self.reshard_after_forward)

    def _apart(self, router: nn.Module) -> bool:
        return self.policy.routers_apart(next(router.parameters()).dtype)

    def _shard_experts(self, module: nn.Module) -> None:
        # What an experts module has inside it (a norm of the results) is shared by all experts, hence dense.
        spec = self.experts[id(module)].spec
        for name, child in module.named_children():
            if not spec.holds_experts(name) and next(child.parameters(), None) is not None:
                self._fully_shard(child, self.policy.inner(), self.reshard_after_forward)
        keep_local_experts(module, spec, self.meshes)
        self.done.add(id(module))
        if self._place_empty(module):
            return
        fully_shard(
            module,
            mesh=self.meshes.experts_fsdp,
            mp_policy=self.policy.experts(),
            reshard_after_forward=self.reshard_after_forward,
            # Of experts that are modules dimension 0 is no expert, and any weight can be cut there.
            shard_placement_fn=partial(experts_placement, layout=self.meshes.layout) if spec.modules is None else None,
        )

    def _place_empty(self, module: nn.Module) -> bool:
        """Place the parameters of a rank that no expert is left for as FSDP2 does on the others.

        FSDP2 cannot gather nothing. All ranks that would gather with this one are without experts alike.
        """
        own = list(module.named_parameters(recurse=False))
        if not own or any(local_numel(parameter) for _, parameter in own):
            return False
        for name, parameter in own:
            placement = experts_placement(parameter, self.meshes.layout)
            local = parameter.detach().to_local()  # type: ignore[attr-defined]
            shard = local.chunk(self.meshes.layout.expert_shard, placement.dim)[0].clone()
            placed = DTensor.from_local(
                shard,
                self.meshes.experts_whole,
                [Replicate()] * (self.meshes.layout.replicate > 1) + [placement, Shard(0)],
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
            empty = nn.Parameter(placed, requires_grad=parameter.requires_grad)
            setattr(module, name, empty)
            self.without_experts.add(empty)
        return True

    def _fully_shard(self, module: nn.Module, policy: MixedPrecisionPolicy, reshard_after_forward: bool) -> None:
        fully_shard(
            module,
            mesh=self.meshes.dense_fsdp,
            mp_policy=policy,
            reshard_after_forward=reshard_after_forward,
            ignored_params=self.without_experts,
        )
        self.done.add(id(module))


def keep_local_experts(module: nn.Module, spec: ExpertsSpec, meshes: Meshes) -> None:
    """Cut the parameters of an experts module down to the experts of this rank. No communication.

    Args:
        module: An experts module whose own parameters ``[E, ...]`` are equal on all ranks.
        spec: What describes it. Experts that are modules of their own stay plain, those of other ranks are dropped.
        meshes: The views of the ranks. With ``expert > 1`` each parameter becomes a DTensor, ``Shard(0)`` over
            ``expert``, which keeps its name and its full shape.
    """
    size = meshes.layout.expert
    if size == 1:
        return
    if spec.modules is not None:
        held = experts_per_rank(spec.num_experts(module), size)
        spec.keep_modules(module, sum(held[: meshes.expert_rank]), held[meshes.expert_rank])
        return
    for name, parameter in spec.parameters(module).items():
        held = experts_per_rank(parameter.shape[0], size)
        # A copy, so that the storage of all experts is freed.
        local: Tensor = parameter.detach().narrow(0, sum(held[: meshes.expert_rank]), held[meshes.expert_rank]).clone()
        sharded = DTensor.from_local(
            local,
            meshes.expert,
            [Shard(0)],
            run_check=False,
            shape=parameter.shape,
            stride=parameter.detach().contiguous().stride(),
        )
        owner, _, own = name.rpartition(".")
        setattr(module.get_submodule(owner), own, nn.Parameter(sharded, requires_grad=parameter.requires_grad))


def experts_placement(parameter: nn.Parameter, layout: Layout) -> Shard:
    """Choose the dimension over which FSDP2 shards a parameter ``[E, ...]`` of stacked experts.

    Whole experts where each rank gets as many. Else a dimension inside the expert: with fewer experts than ranks most
    ranks would hold padding, and blocks of experts of different size cannot be cut a second time.

    Raises:
        ValueError: If the expert counts of the ranks differ and no dimension can be divided.
    """
    ranks = layout.expert_shard
    if ranks == 1 or parameter.shape[0] % (layout.expert * ranks) == 0:
        return Shard(0)
    for dim in range(1, parameter.ndim):
        if parameter.shape[dim] % ranks == 0:
            return Shard(dim)
    if parameter.shape[0] % layout.expert == 0:
        return Shard(0)
    raise ValueError(
        f"expert_parallel_size={layout.expert} does not divide {parameter.shape[0]} experts, and a weight of shape"
        f" {list(parameter.shape)} cannot be divided over the {ranks} ranks that hold the same experts; set"
        f" expert_parallel_size to a divisor of {parameter.shape[0]} or to {layout.shard}"
    )


def local_numel(tensor: Tensor) -> int:
    """Number of elements that this rank holds."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).numel()


def reshard(module: nn.Module) -> None:
    """Give back every gathered weight of a sharded module, so that its parameters are the shards. No communication."""
    for submodule in module.modules():
        if isinstance(submodule, FSDPModule):
            submodule.reshard()
