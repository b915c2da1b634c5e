"""Lightning's face: the order of set-up, what each rank reads, backward, clipping, checkpoints, teardown."""

import atexit
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.utilities.distributed import _distributed_is_initialized
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_moe.attempts import leave_the_former_attempt
from lightning_moe.checkpoint import state
from lightning_moe.checkpoint.io import Checkpoints
from lightning_moe.checkpoint.position import Resumption, begin_training
from lightning_moe.dispatch import Dispatcher, check_dispatcher, choose_dispatcher
from lightning_moe.dispatch.budget import check_max_rows_per_rank
from lightning_moe.experts import FoundExperts, check_backend, find_experts
from lightning_moe.launcher import ScriptLauncher
from lightning_moe.loaders import EvenLoaders
from lightning_moe.mesh import (
    Layout,
    build_dense_mesh,
    build_meshes,
    check_expert_parallel_size,
    check_replicate_size,
    resolve_expert_parallel_size,
)
from lightning_moe.parallel import Sharded, ShardingOptions, already_sharded, experts_placement, shard_module
from lightning_moe.parallel.advice import check_trainer, needs_of, warn_coarse_buffers, warn_no_experts
from lightning_moe.parallel.prefetch import check_prefetch_blocks
from lightning_moe.parallel.recompute import ActivationCheckpointing, check_mode
from lightning_moe.parallel.routed import RoutedExperts, check_dispatch_chunks
from lightning_moe.parallel.watch import Watch
from lightning_moe.precision import MoEPrecision
from lightning_moe.signals import Signals


class ExpertParallelStrategy(ModelParallelStrategy):
    """Shards the experts of any LightningModule over the ranks, and everything else by FSDP2.

    Every rank reads different data. Losses, gradients, the gradient norm and the updated weights are those of one
    process on the whole batch, whatever the layout.

    Args:
        expert_parallel_size: Ranks that share the experts of one layer, or ``"auto"``: the largest number that divides
            every layer's expert count, the ranks of one node and those of one replica.
        replicate_size: Number of replicas of the whole sharded model (HSDP); a divisor of the number of ranks.
        dispatcher: How tokens reach their experts: ``"auto"``, ``"local"`` (one rank), ``"all_to_all"``, ``"deepep"``,
            ``"nccl_ep"``, ``"hybridep"``, or a ``Dispatcher`` object. ``"auto"`` is what suits all ranks best, and is
            logged with the reason.
        experts_backend: What multiplies the rows of the experts: ``"auto"``, ``"loop"``, ``"grouped_mm"`` or ``"te"``.
        reshard_after_forward: Free the gathered weights of a module after its forward, and gather them again in the
            backward pass: less memory, more communication. With ``False`` every forward must have its backward before
            the parameters are changed or read; a step of the optimizer sees to that itself.
        block_classes: Class names of the modules that are sharded as one unit each, ``None`` to find them.
        activation_checkpointing: ``"none"``; ``"full"``: each block keeps its input and the choice of experts, and
            computes the rest again in the backward pass; ``"selective"``: it also keeps the results of attention and
            of the communication between expert-parallel ranks. Recomputation routes exactly as the forward did.
        compile: ``torch.compile`` each block; the exchange of tokens and the experts stay outside of the graphs.
        dispatch_chunks: Parts in which the tokens of each layer travel: while the experts compute one, the next are on
            their way, where the dispatcher can. More parts hide more of the communication, and cost more and smaller
            products.
        overlap_shared_experts: Let a block that computes its shared expert after the routed ones do so while the
            results of these travel. Blocks that compute it first have nothing to gain.
        prefetch_blocks: How many blocks ahead weights are gathered in the forward pass, for one more block's weights of
            memory each; ``"auto"`` is 1 on CUDA and 0 on CPU. Blocks that ``training_step`` calls itself are left out.
        max_rows_per_rank: Rows (choices of tokens for experts) that a rank computes at most in one forward of an
            experts module, so that its memory is bounded, also in evaluation. Choices over it are dropped, those with
            the smallest routing weights first, and counted; ``None`` drops nothing.
        save_distributed_checkpoint: Every rank writes its shards into a folder; else rank 0 writes one file.
        save_asynchronously: Train on while a checkpoint is written, as soon as its state is copied to the memory of the
            host. A second save waits for the first, so take ``ModelCheckpoint(save_last="link")`` rather than ``True``.
            An error is raised at the next save, or at the end.
        process_group_backend: Backend of ``torch.distributed``, ``None`` for the device's own.
        timeout: How long a collective waits for a rank.

    Raises:
        ValueError: If an option has a value that is not allowed.
        RuntimeError: If a dispatcher or backend is not usable here; the message holds the reason.
    """

    def __init__(
        self,
        expert_parallel_size: int | Literal["auto"] = "auto",
        replicate_size: int = 1,
        dispatcher: str | Dispatcher = "auto",
        experts_backend: str = "auto",
        reshard_after_forward: bool = True,
        block_classes: Sequence[str] | None = None,
        activation_checkpointing: ActivationCheckpointing = "none",
        compile: bool = False,
        dispatch_chunks: int = 1,
        overlap_shared_experts: bool = True,
        prefetch_blocks: int | Literal["auto"] = "auto",
        max_rows_per_rank: int | None = None,
        save_distributed_checkpoint: bool = True,
        save_asynchronously: bool = False,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        super().__init__(
            data_parallel_size=1,
            tensor_parallel_size=1,
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        if isinstance(expert_parallel_size, str) and expert_parallel_size != "auto":
            raise ValueError(
                f"expert_parallel_size={expert_parallel_size!r} must be 'auto' or a positive number of ranks"
            )
        check_mode(activation_checkpointing)
        check_dispatch_chunks(dispatch_chunks)
        check_prefetch_blocks(prefetch_blocks)
        check_max_rows_per_rank(max_rows_per_rank)
        check_dispatcher(dispatcher)
        check_backend(experts_backend)
        self.expert_parallel_size = expert_parallel_size
        self.replicate_size = replicate_size
        self.dispatcher = dispatcher
        self.experts_backend = experts_backend
        self.reshard_after_forward = reshard_after_forward
        self.block_classes = block_classes
        self.activation_checkpointing: ActivationCheckpointing = activation_checkpointing
        self.compile = compile
        self.dispatch_chunks = dispatch_chunks
        self.overlap_shared_experts = overlap_shared_experts
        self.prefetch_blocks: int | Literal["auto"] = prefetch_blocks
        self.max_rows_per_rank = max_rows_per_rank
        self._sharded: Sharded | None = None
        self._backward_was_here = False
        self._watch = Watch()
        self._checkpoints = Checkpoints(self, save_distributed_checkpoint, save_asynchronously)
        self.resumption = Resumption()
        self._signals = Signals()
        self._loaders = EvenLoaders(self._watch, self.resumption, self._signals.before_batch)

    # What Lightning hands over

    @property
    @override
    def precision_plugin(self) -> MoEPrecision:
        plugin = self._precision_plugin
        return plugin if isinstance(plugin, MoEPrecision) else MoEPrecision()

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        self._precision_plugin = None if precision_plugin is None else MoEPrecision.from_plugin(precision_plugin)

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        # Expert-parallel ranks are data-parallel ranks.
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    @property
    def layout(self) -> Layout:
        """How the ranks are divided.

        Raises:
            RuntimeError: Before the model is set up.
        """
        if self._sharded is None:
            raise RuntimeError("the layout is known once the strategy has set the model up")
        return self._sharded.layout

    @property
    def experts(self) -> tuple[RoutedExperts, ...]:
        """The forwards of the experts modules, with what they have counted; empty before the model is set up."""
        return () if self._sharded is None else self._sharded.experts

    # Set-up

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if not self.cluster_environment.creates_processes_externally:
            self._launcher = ScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    @override
    def setup_environment(self) -> None:
        assert self.lightning_module is not None
        check_trainer(self.lightning_module)
        check_replicate_size(self.replicate_size, self.world_size)
        check_expert_parallel_size(self.expert_parallel_size, self.world_size // self.replicate_size)
        assert self.accelerator is not None
        self.accelerator.setup_device(self.root_device)
        leave_the_former_attempt(self.global_rank, self.world_size, self._timeout)
        self._setup_distributed()
        if dist.get_backend() == "gloo":
            # It aborts a process that exits with its group alive; for NCCL Lightning sees to that. Not in teardown:
            # fit, then test, share the group.
            atexit.unregister(_destroy_process_group)
            atexit.register(_destroy_process_group)
        if self._device_mesh is None:
            self._device_mesh = build_dense_mesh(
                self.root_device.type, self.world_size, self.replicate_size, self._timeout
            )
        self.lightning_module._device_mesh = self._device_mesh

    @override
    def setup(self, trainer: "pl.Trainer") -> None:
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self.accelerator.setup(trainer)
        self._checkpoints.attach(trainer)
        # FSDP2 cannot use weights that were gathered under inference_mode in a later fit.
        for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
            loop.inference_mode = False

        self._sharded = self._shard(self.lightning_module)
        self.model = self.lightning_module
        self.model_to_device()
        for experts in self._sharded.experts:
            experts.watch = self._watch
        self._signals.open(self._timeout)
        self._watch.start(self.lightning_module, [experts.name for experts in self._sharded.experts], self._timeout)
        self.barrier()

        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:
            self.setup_optimizers(trainer)
            self._check_optimizers()
        self.setup_precision_plugin()
        if fitting:
            _optimizers_to_device(self.optimizers, self.root_device)

    def _shard(self, module: "pl.LightningModule") -> Sharded:
        experts = find_experts(module)
        assert self._device_mesh is not None
        size = resolve_expert_parallel_size(
            self.expert_parallel_size,
            {found.name: found.num_experts for found in experts},
            self.world_size // self.replicate_size,
            self.num_processes,
        )
        self.precision_plugin.check_sharding(self.compile, self.activation_checkpointing, self.experts_backend)
        policy, before = self.precision_plugin.dtype_policy, already_sharded(module)
        if before is not None and self.dispatcher == "auto":
            dispatcher, why = before.options.dispatcher, ""
        else:
            dispatcher, why = choose_dispatcher(
                self.dispatcher,
                size,
                device=self.root_device,
                ranks_per_node=self.num_processes,
                modules=lambda: [needs_of(found, policy.param_dtype) for found in experts],
            )
        options = ShardingOptions(
            dispatcher,
            self.experts_backend,
            self.reshard_after_forward,
            self.block_classes,
            self.activation_checkpointing,
            self.compile,
            self.dispatch_chunks,
            self.overlap_shared_experts,
            self.prefetch_blocks,
            self.max_rows_per_rank,
        )
        layout = Layout(self.world_size, self.replicate_size, size)
        if before is not None:
            before.check_again(module, layout, policy, options)
            self.precision_plugin.connect_experts(before.experts)
            return before
        self._check_experts(experts, layout)
        if not experts:
            warn_no_experts(module)
        warn_coarse_buffers(module, experts)
        self.precision_plugin.convert_module(module)
        meshes = partial(build_meshes, self._device_mesh, size, self._timeout)
        sharded = shard_module(
            module, experts, meshes, policy, options, self.root_device, self.precision_plugin.recompute_context
        )
        rank_zero_info(f"moe_ep: {sharded.layout}; {len(experts)} experts modules, dispatcher {dispatcher.name!r}")
        notes = self._notes(sharded.layout, {found.num_experts for found in experts})
        notes += self.precision_plugin.connect_experts(sharded.experts)
        for note in filter(None, (why, *sharded.notes, *notes)):
            rank_zero_info(f"moe_ep: {note}")
        return sharded

    def _check_experts(self, experts: Sequence[FoundExperts], layout: Layout) -> None:
        apart = [found.name for found in experts if found.spec.modules is not None]
        if apart and layout.expert > 1 and not self._save_distributed_checkpoint:
            raise ValueError(
                f"save_distributed_checkpoint=False cannot gather the experts of {apart[0]!r}, which are modules that"
                f" exist on one of {layout.expert} ranks each; set save_distributed_checkpoint=True or"
                " expert_parallel_size=1"
            )
        for found in experts:
            found.spec.check_ranks(found.name, found.module, layout.expert)
            for parameter in found.module.parameters(recurse=False):
                experts_placement(parameter, layout)

    def _notes(self, layout: Layout, expert_counts: set[int]) -> list[str]:
        """What ``"auto"`` could not do, with the reason."""
        if self.expert_parallel_size != "auto" or layout.expert > 1 or layout.world_size == 1 or not expert_counts:
            return []
        counts = ", ".join(map(str, sorted(expert_counts)))
        return [
            f"expert_parallel_size='auto' is 1, so every rank gathers all experts of a layer: no larger number divides"
            f" the expert counts ({counts}), the ranks of a node ({self.num_processes}) and those of a replica"
            f" ({layout.shard})"
        ]

    def _check_optimizers(self) -> None:
        """Find optimizers that hold the weights of before: they would step on nothing, and the loss would be logged."""
        assert self.lightning_module is not None
        current = {id(parameter) for parameter in self.lightning_module.parameters()}
        for optimizer in self.optimizers:
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            stale = sum(id(parameter) not in current for parameter in parameters)
            if stale:
                raise ValueError(
                    f"{type(optimizer).__name__} was built before the model was sharded: {stale} of its"
                    f" {len(parameters)} parameters are no longer those of the model, so it would train nothing."
                    " Build it inside configure_optimizers() from self.parameters(); in a YAML config give the"
                    " optimizer to the model (`optimizer: OptimizerCallable`), not at the top level"
                )

    # Steps

    @override
    def on_train_start(self) -> None:
        assert self.lightning_module is not None
        self._signals.start(self.lightning_module.trainer)
        begin_training(self.lightning_module.trainer, self.resumption, self.root_device)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._watch.over("training_step", new_step=True):
            return super().training_step(*args, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._watch.over("validation_step", new_step=True):
            return super().validation_step(*args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._watch.over("test_step", new_step=True):
            return super().test_step(*args, **kwargs)

    @override
    def on_exception(self, exception: BaseException) -> None:
        if message := self._watch.explain(exception):  # from a hook, a callback or the end of an epoch
            exception.add_note(message)
        self._checkpoints.end_with(exception)
        super().on_exception(exception)

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        assert self.lightning_module is not None
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        # Gradients are summed over ranks. Each rank's loss is a mean over its own batch, all ranks are data-parallel,
        # so the mean over the whole batch is the sum of loss / world_size.
        scaled = closure_loss / self.world_size
        self._backward_was_here = True
        with self._watch.over("the backward pass"):
            self.precision_plugin.backward(scaled, self.lightning_module, optimizer, *args, **kwargs)
        closure_loss = self.precision_plugin.post_backward(closure_loss, self.lightning_module)
        self.post_backward(closure_loss)
        return closure_loss

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: "pl.LightningModule | nn.Module | None" = None,
        **kwargs: Any,
    ) -> Any:
        assert self.lightning_module is not None
        alone = self.world_size == 1  # the sum is the mean then
        if not (alone or self._backward_was_here or self.lightning_module.automatic_optimization):
            parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
            if any(parameter.grad is not None for parameter in parameters):
                raise RuntimeError(
                    f"{type(optimizer).__name__}.step() has gradients that loss.backward() made: they are the sum over"
                    f" {self.world_size} ranks, not the mean. Call self.manual_backward(loss) instead"
                )
        with self._watch.over("the optimizer step"):
            return super().optimizer_step(optimizer, closure, model, **kwargs)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        assert self.lightning_module is not None
        return self._loaders.process(dataloader, self.lightning_module.trainer, self.root_device, self._timeout)

    def on_predict_start(self) -> None:
        """Find out how many steps the other ranks take: in prediction Lightning repeats no sample to even them out."""
        assert self.lightning_module is not None
        self._loaders.start_prediction(self.lightning_module.trainer, self.root_device)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        def step() -> Any:
            with self._watch.over("predict_step", new_step=True):
                return super(ExpertParallelStrategy, self).predict_step(*args, **kwargs)

        prediction = step()
        self._loaders.end_predict_step(repeat=step)
        return prediction

    @override
    def reduce(
        self, tensor: Tensor | Any, group: Any | None = None, reduce_op: dist.ReduceOp | str | None = "mean"
    ) -> Tensor:
        """Reduce a tensor over ranks, without the barrier that Lightning puts before each reduction.

        Args:
            tensor: What to reduce; anything but a tensor is returned as it is.
            group: The ranks, ``None`` for all.
            reduce_op: ``"mean"``, ``"avg"``, or the name or value of a ``torch.distributed.ReduceOp``.
        """
        if not isinstance(tensor, Tensor) or not _distributed_is_initialized():
            return tensor
        mean = reduce_op is None or (isinstance(reduce_op, str) and reduce_op.lower() in ("mean", "avg"))
        op: Any = getattr(dist.ReduceOp, reduce_op.upper()) if isinstance(reduce_op, str) and not mean else reduce_op
        if mean:
            op = dist.ReduceOp.SUM
        # NCCL takes no tensors of the CPU, where users keep what they log.
        result = tensor.to(self.root_device, copy=True)
        if mean and not result.is_floating_point():
            result = result.float()
        dist.all_reduce(result, op=op, group=group)
        return (result / dist.get_world_size(group) if mean else result).to(tensor.device)

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Stack a tensor of every rank, ``[ranks, ...]``."""
        if sync_grads or not _distributed_is_initialized():
            return super().all_gather(tensor, group=group, sync_grads=sync_grads)
        mine = tensor.detach().to(self.root_device).contiguous()
        gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(gathered, mine, group=group)
        return torch.stack(gathered).to(tensor.device)

    # Checkpoints

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        self._checkpoints.check_all_save()
        return super().lightning_module_state_dict()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return state.optimizer_state(self, optimizer)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        self._checkpoints.save(checkpoint, filepath, storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        return self._checkpoints.load(checkpoint_path, weights_only)

    @override
    def remove_checkpoint(self, filepath: str | Path) -> None:
        self._checkpoints.remove(filepath)

    @override
    def on_train_end(self) -> None:
        self._checkpoints.finish()  # raises what went wrong with the last one

    @override
    def teardown(self) -> None:
        if self._sharded is not None:
            for experts in self._sharded.experts:
                experts.dispatcher.finalize()
        try:
            self._checkpoints.teardown()
        finally:
            super().teardown()


def _destroy_process_group() -> None:
    if _distributed_is_initialized():
        dist.destroy_process_group()
