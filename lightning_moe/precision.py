"""Lightning's face for dtypes."""

from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, get_args

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.apply_func import apply_to_collection
from lightning.fabric.utilities.types import Steppable
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.plugins.precision.half import HalfPrecision
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_moe.experts import find_experts
from lightning_moe.experts.te import TransformerEngineBackend, outside_of_recipe
from lightning_moe.float32 import float32_units, kept_in_float32
from lightning_moe.parallel import DtypePolicy, clip_gradients_by_norm, clip_gradients_by_value, reshard
from lightning_moe.parallel.routed import RoutedExperts
from lightning_moe.parallel.structure import find_routers
from lightning_moe.te import TransformerEngineConfig
from lightning_moe.te.attention import check_attention
from lightning_moe.te.low_precision import LowPrecision
from lightning_moe.te.plan import ATTENTION, Plan, make_plan
from lightning_moe.te.recipes import is_delayed
from lightning_moe.te.swap import load_scaling_state, scaling_state, swap, unusable

PrecisionName = Literal["32-true", "bf16-true", "bf16-mixed"]
_SUPPORTED: tuple[str, ...] = get_args(PrecisionName)
_ROUTER_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_CONVERTED = "_lightning_moe_te_options"


class MoEPrecision(Precision):
    """The dtypes of a run under ``ExpertParallelStrategy``, and gradient clipping across its meshes.

    ``Trainer(precision=...)`` is enough: the strategy turns the plugin that Lightning makes of it into this one.

    Args:
        precision: ``"32-true"``; ``"bf16-true"``: weights, optimizer state and computation in bfloat16; or
            ``"bf16-mixed"``: float32 weights and optimizer state, computation in bfloat16. Gradients are summed over
            ranks in float32 in every case. In both, weights that a model of Transformers keeps in float32
            (``_keep_in_fp32_modules_strict``) stay in it.
        router_dtype: Dtype in which routers compute, whatever ``precision`` is, as a dtype or its name. Near-ties
            between experts flip in bfloat16.
        transformer_engine: Layers that Transformer Engine computes, and their low precision: a
            :class:`~lightning_moe.te.TransformerEngineConfig`, a mapping of its options, or ``None``. The dtypes above
            hold for everything else, and for the weights.

    Raises:
        ValueError: If an option has a value that is not allowed.
    """

    def __init__(
        self,
        precision: PrecisionName = "32-true",
        router_dtype: torch.dtype | str = torch.float32,
        transformer_engine: TransformerEngineConfig | dict[str, Any] | None = None,
    ) -> None:
        if precision not in _SUPPORTED:
            raise ValueError(f"precision={precision!r} is not supported by MoEPrecision; {_allowed()}")
        self.precision: PrecisionName = precision
        self.router_dtype = _dtype(router_dtype)
        self.transformer_engine = TransformerEngineConfig.of(transformer_engine)
        self.last_gradient_norm: Tensor | None = None
        self._module: nn.Module | None = None
        self._made_low_precision: LowPrecision | None = None
        self._cached: list[TransformerEngineBackend] = []

    @classmethod
    def from_plugin(cls, plugin: Precision) -> "MoEPrecision":
        """Turn a stock precision plugin of Lightning into the matching :class:`MoEPrecision`.

        Args:
            plugin: What ``Trainer(precision=...)`` or ``Trainer(plugins=...)`` made.

        Raises:
            ValueError: If there is no match.
        """
        if isinstance(plugin, cls):
            return plugin
        if type(plugin) in (Precision, MixedPrecision, HalfPrecision) and plugin.precision in _SUPPORTED:
            return cls(plugin.precision)  # type: ignore[arg-type]
        raise ValueError(
            f"precision={plugin.precision!r} ({type(plugin).__name__}) is not supported by ExpertParallelStrategy; "
            + _allowed()
        )

    @property
    def dtype_policy(self) -> DtypePolicy:
        """The dtypes of parameters, computation and reductions for FSDP2."""
        if self.precision == "32-true":
            return DtypePolicy(router_dtype=self.router_dtype)
        mixed = self.precision == "bf16-mixed"
        return DtypePolicy(
            param_dtype=torch.bfloat16,
            reduce_dtype=torch.float32,
            # The user's loss gets float32, as it would under autocast.
            output_dtype=torch.float32 if mixed else None,
            router_dtype=self.router_dtype,
        )

    @property
    def _stored_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.precision == "bf16-true" else torch.float32

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        if self.transformer_engine is not None:
            self._use_transformer_engine(module, self.transformer_engine)
        if self.precision == "bf16-true":
            kept = kept_in_float32(module) - self._not_kept(module)
            # Of buffers only those: rotary frequencies and correction biases lose their meaning in bfloat16.
            for name, parameter in module.named_parameters():
                if parameter.is_floating_point():
                    parameter.data = parameter.data.to(torch.float32 if name in kept else torch.bfloat16)
            for name, buffer in module.named_buffers():
                if name in kept and buffer.is_floating_point():
                    buffer.data = buffer.data.to(torch.float32)
        elif self.precision == "bf16-mixed":
            self._not_kept(module)
        return module

    def _not_kept(self, module: nn.Module) -> set[str]:
        """Parameters that the model keeps in float32, and that are sharded in one unit with others."""
        experts = find_experts(module)
        apart = [*find_routers(module, experts), *(found.module for found in experts)]
        _, impossible = float32_units(module, apart)
        if impossible:
            some = ", ".join(sorted(impossible)[:3]) + (", ..." if len(impossible) > 3 else "")
            rank_zero_warn(
                f"{type(module).__name__} wants {len(impossible)} parameters in float32 ({some}) that cannot be sharded"
                " apart from the rest: they compute in bfloat16. Use precision='32-true' where that is too coarse"
            )
        return impossible

    # Transformer Engine

    def plan(self, module: nn.Module) -> Plan:
        """Find out what Transformer Engine would compute of a model. Neither it nor a GPU is needed.

        Args:
            module: The LightningModule, before it is sharded.

        Raises:
            ValueError: If ``transformer_engine`` is not set, or its options do not fit the model.
        """
        if self.transformer_engine is None:
            raise ValueError("MoEPrecision(transformer_engine=...) is not set: nothing would be changed")
        experts = find_experts(module)
        return make_plan(
            module, self.transformer_engine, [found.module for found in experts], find_routers(module, experts)
        )

    def check_sharding(self, compile: bool, activation_checkpointing: str, experts_backend: str = "auto") -> None:
        """Refuse options of the strategy that Transformer Engine's layers do not go with.

        Raises:
            ValueError: If there is one.
        """
        options = self.transformer_engine
        if options is None:
            return
        if compile:
            raise ValueError(
                "compile=True cannot be combined with transformer_engine: its layers are kernels that torch.compile"
                " cannot look into, so every block would fall into pieces. Set compile=False, or leave"
                " transformer_engine out"
            )
        if options.cache_expert_weights and experts_backend != "te":
            raise ValueError(
                "transformer_engine: cache_expert_weights=True needs experts that Transformer Engine computes, and"
                f" experts_backend is {experts_backend!r}; set ExpertParallelStrategy(experts_backend='te'), or leave"
                " cache_expert_weights out"
            )
        if activation_checkpointing != "none" and is_delayed(options.recipe):
            raise ValueError(
                f"activation_checkpointing={activation_checkpointing!r} cannot be combined with"
                f" recipe={options.recipe!r}: the second forward would change the scales of delayed scaling once more."
                " Set recipe='current', or activation_checkpointing='none'"
            )

    def connect_experts(self, experts: Sequence[RoutedExperts]) -> list[str]:
        """Learn what computes the experts of the model.

        Args:
            experts: The forwards of its experts modules.

        Returns:
            Which of them the recipe does not reach, one line a reason.
        """
        options = self.transformer_engine
        if options is None or options.recipe is None:
            return []
        backends = [routed.backend for routed in experts]
        if options.cache_expert_weights:
            self._cached = [backend for backend in backends if isinstance(backend, TransformerEngineBackend)]
            for backend in self._cached:
                backend.keep_copies = True
        return outside_of_recipe(
            options.recipe, [(routed.name, routed.backend, routed.spec.mlp_shapes(routed.module)) for routed in experts]
        )

    def recompute_context(self) -> AbstractContextManager[Any]:
        """The context in which a block is computed again in the backward pass, as its first forward in a step was."""
        if self.transformer_engine is None or self.transformer_engine.recipe is None:
            return nullcontext()
        return self._low_precision().again()

    def _use_transformer_engine(self, module: nn.Module, options: TransformerEngineConfig) -> None:
        plan = self.plan(module)
        _raise_together(self._problem(plan, options))
        swap(module, plan)
        object.__setattr__(module, _CONVERTED, options)
        if plan.swapped:
            rank_zero_info(f"moe_ep: transformer_engine: {_in_one_line(plan, options)}")

    def _problem(self, plan: Plan, options: TransformerEngineConfig) -> str:
        """What is in the way on this rank; the ranks may have different releases."""
        if problem := unusable(options):
            return problem
        try:
            if options.recipe is not None:
                self._low_precision()
            check_attention([item.module for item in plan.swapped if item.target == ATTENTION])
        except (RuntimeError, ValueError) as error:
            return str(error)
        return ""

    def _low_precision(self) -> LowPrecision:
        if self._made_low_precision is None:
            assert self.transformer_engine is not None
            self._made_low_precision = LowPrecision(self.transformer_engine.recipe)
        return self._made_low_precision

    def _step_context(self, training: bool) -> AbstractContextManager[Any]:
        options = self.transformer_engine
        if options is None or options.recipe is None or not (training or options.quantize_evaluation):
            return nullcontext()
        return self._low_precision().on()

    @override
    def connect(self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]) -> Any:
        converted = getattr(model, _CONVERTED, None)
        if self.transformer_engine is not None and converted != self.transformer_engine:
            was = "without transformer_engine" if converted is None else f"with {converted}"
            raise ValueError(
                f"{type(model).__name__} was set up {was} already, and cannot be with {self.transformer_engine}; use"
                " the same options, or build a new LightningModule"
            )
        self._module = model
        for optimizer in optimizers if self._cached else ():
            # Not in optimizer_step, which an optimizer without Lightning around it does not come to.
            optimizer.register_step_post_hook(lambda *_: self._forget_copies())
        return super().connect(model, optimizers, lr_schedulers)

    def _forget_copies(self) -> None:
        for backend in self._cached:
            backend.forget_weights()

    @override
    @contextmanager
    def train_step_context(self) -> Generator[None, None, None]:
        with super().train_step_context(), self._step_context(training=True):
            yield

    @override
    @contextmanager
    def val_step_context(self) -> Generator[None, None, None]:
        with super().val_step_context(), self._step_context(training=False):
            yield

    @override
    @contextmanager
    def test_step_context(self) -> Generator[None, None, None]:
        with super().test_step_context(), self._step_context(training=False):
            yield

    @override
    @contextmanager
    def predict_step_context(self) -> Generator[None, None, None]:
        with super().predict_step_context(), self._step_context(training=False):
            yield

    @override
    def backward(  # type: ignore[override]
        self,
        tensor: Tensor,
        model: "pl.LightningModule",
        optimizer: Steppable | None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        # A step that calls manual_backward does so inside its own context, which must end before.
        outside = nullcontext() if self._made_low_precision is None else self._made_low_precision.off()
        with outside:
            super().backward(tensor, model, optimizer, *args, **kwargs)

    @override
    def state_dict(self) -> dict[str, Any]:
        # The scales of delayed scaling are equal on all ranks.
        low = self._made_low_precision
        if low is None or not low.delayed or self._module is None:
            return {}
        return {"delayed_scaling": scaling_state(self._module)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        low, saved = self._made_low_precision, state_dict.get("delayed_scaling")
        if saved and low is not None and low.delayed and self._module is not None:
            load_scaling_state(self._module, saved)

    # Dtypes and gradients

    @override
    @contextmanager
    def tensor_init_context(self) -> Generator[None, None, None]:
        before = torch.get_default_dtype()
        torch.set_default_dtype(self._stored_dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)

    @override
    @contextmanager
    def module_init_context(self) -> Generator[None, None, None]:
        with self.tensor_init_context():
            yield

    @override
    def convert_input(self, data: Any) -> Any:
        if self.precision != "bf16-true":
            return data
        return apply_to_collection(
            data, Tensor, lambda tensor: tensor.bfloat16() if tensor.is_floating_point() else tensor
        )

    @override
    def _after_closure(self, model: "pl.LightningModule", optimizer: Steppable) -> None:
        super()._after_closure(model, optimizer)
        # The update changes the shards; what a forward without a backward left gathered would go stale.
        reshard(model)

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        parameters = list(self.main_params(optimizer))
        self.last_gradient_norm = clip_gradients_by_norm(parameters, float(clip_val), _device_of(parameters))

    @override
    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        clip_gradients_by_value(self.main_params(optimizer), float(clip_val))


def _device_of(parameters: Sequence[Tensor]) -> torch.device:
    return parameters[0].device if parameters else torch.device("cpu")


def _dtype(value: torch.dtype | str) -> torch.dtype:
    """Turn ``"float32"`` or ``"torch.float32"`` into a dtype."""
    found = getattr(torch, value.removeprefix("torch."), None) if isinstance(value, str) else value
    if found not in _ROUTER_DTYPES:
        raise ValueError(f"router_dtype={value!r} must be 'float32', 'bfloat16', 'float16' or 'float64'")
    return found


def _raise_together(problem: str) -> None:
    """Raise on every rank what is wrong on one of them. Collective.

    Raises:
        RuntimeError: If there is a problem.
    """
    problems = [problem]
    if dist.is_initialized():
        problems = [""] * dist.get_world_size()
        dist.all_gather_object(problems, problem)
    if problem:
        raise RuntimeError(problem)
    for rank, other in enumerate(problems):
        if other:
            raise RuntimeError(f"rank {rank}: {other}")


def _in_one_line(plan: Plan, options: TransformerEngineConfig) -> str:
    """What was changed, and which linear layers the recipe cannot take."""
    counts: Mapping[str, int] = Counter(item.target for item in plan.swapped)
    text = ", ".join(f"{count} {target}" for target, count in counts.items())
    if options.recipe is not None:
        text += f", recipe {options.recipe!r}"
    unfit = [f"{row.name} ({row.count})" for row in plan.rows if not row.target and "needs widths" in row.reason]
    return text + (f"; left in the base precision, because of their widths: {', '.join(unfit)}" if unfit else "")


def _allowed() -> str:
    return f"set Trainer(precision=...) to one of {', '.join(map(repr, _SUPPORTED))}"
