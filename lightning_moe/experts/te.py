"""Transformer Engine's grouped linear layer, in bfloat16 or, inside ``te.autocast``, in fp8.

The stacked weights of the experts module stay the parameters: FSDP2 shards them, checkpoints name them and the
optimizer updates them. A ``GroupedLinear`` is built on the meta device for its kernels and its scales alone, and each
call lends it one view of the gathered weights for each expert (:func:`torch.func.functional_call`), so that gradients
go to the stacked parameter. A weight of its own would be trained beside the sharded one, or not at all; a lent view
that stayed in the module would keep memory alive that FSDP2 frees after the forward.

Nothing here is in a checkpoint: the scales of delayed scaling start anew with a run.
"""

import inspect
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from typing_extensions import override

from lightning_moe.experts.backend import ExpertsBackend
from lightning_moe.experts.grouped_mm import add_bias
from lightning_moe.experts.spec import ExpertsMLP
from lightning_moe.optional import probe, require
from lightning_moe.te.recipes import recipe_facts

_PACKAGE = "transformer_engine"
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class TransformerEngineBackend(ExpertsBackend):
    """``transformer_engine.pytorch.GroupedLinear``, once for each of the two weights.

    The precision is that of the ``te.autocast`` in which it is called; without one it is the dtype of the rows. In low
    precision the rows of each expert are padded with zeros to the multiple that the recipe asks for. The result has no
    such rows, and they add nothing to any gradient, because what comes back for them is zero. Experts whose widths the
    recipe cannot take are computed in the dtype of the rows; the strategy lists them when it sets the model up.

    Scales of delayed scaling are not exchanged: each rank has other experts, and in uneven layouts other numbers of
    them.

    Attributes:
        keep_copies: Keep the low-precision copies of the weights from one call with gradients to the next, until
            :meth:`forget_weights`, which whoever changes a weight has to call. Otherwise each call makes its own.
    """

    name = "te"
    device_types: tuple[str, ...] = ("cuda",)

    def __init__(self) -> None:
        self.te: Any = require(_PACKAGE, f"experts_backend={self.name!r}")
        self.keep_copies = False
        self._layers: dict[tuple[Any, ...], nn.Module] = {}

    @override
    def unsuitable(self, mlp_shapes: tuple[torch.Size, ...], dtype: torch.dtype, device: torch.device) -> str:
        if device.type not in self.device_types:
            return f"Transformer Engine computes on CUDA, not on {device.type}"
        if dtype not in _DTYPES:
            names = ", ".join(str(d).removeprefix("torch.") for d in _DTYPES)
            return f"Transformer Engine computes in {names}, not in {str(dtype).removeprefix('torch.')}"
        return ""

    def forget_weights(self) -> None:
        """Free the copies of the weights that ``keep_copies`` kept."""
        for layer in self._layers.values():
            getattr(layer, "_fp8_workspaces", {}).clear()

    @override
    def __call__(
        self, mlp: ExpertsMLP, rows: Tensor, tokens_per_expert: Tensor, tokens_per_expert_host: list[int] | None
    ) -> Tensor:
        recipe = self._recipe()
        if recipe is not None and low_precision_unsuitable((mlp.up.shape, mlp.down.shape), recipe):
            with self.te.autocast(enabled=False):
                return self(mlp, rows, tokens_per_expert, tokens_per_expert_host)
        if recipe is None and tokens_per_expert_host is None and rows.shape[0] and self._takes_device_counts:
            return self._finish(mlp, self._mlp(mlp, rows, tokens_per_expert), tokens_per_expert)
        counts = tokens_per_expert.tolist() if tokens_per_expert_host is None else list(tokens_per_expert_host)
        multiple = 1 if recipe is None else self.te.quantization.get_align_size_for_quantization(recipe)
        padded, padded_counts = self._pad(rows, counts, multiple)
        with self._experts_autocast(recipe):
            out = self._mlp(mlp, padded, padded_counts)
        return self._finish(mlp, self._unpad(out, counts, multiple), tokens_per_expert)

    def _recipe(self) -> Any:
        """The recipe of the ``te.autocast`` around the call, ``None`` outside of one."""
        state = self.te.quantization.FP8GlobalStateManager
        return state.get_fp8_recipe() if state.is_fp8_enabled() else None

    def _experts_autocast(self, recipe: Any) -> AbstractContextManager[Any]:
        if recipe is None or not recipe.delayed() or not recipe.reduce_amax:
            return nullcontext()
        return self.te.autocast(enabled=True, recipe=replace(recipe, reduce_amax=False))

    @property
    def _takes_device_counts(self) -> bool:
        # Older releases copy counts to the host at each product, newer ones where their kernels do not take them.
        return "use_grouped_tensor" in inspect.signature(self.te.GroupedLinear.__init__).parameters

    def _pad(self, rows: Tensor, counts: list[int], multiple: int) -> tuple[Tensor, list[int]]:
        if rows.shape[0] == 0:
            # Zeros for the first expert: no kernel is asked for nothing, and every weight is in the graph.
            padded = torch.cat([rows, rows.new_zeros(multiple, rows.shape[1])])
            return padded, [multiple] + [0] * (len(counts) - 1)
        if multiple == 1:
            return rows, counts
        return self.te.Fp8Padding(len(counts), multiple)(rows, counts)

    def _unpad(self, out: Tensor, counts: list[int], multiple: int) -> Tensor:
        if not any(counts):
            return out[:0]
        return out if multiple == 1 else self.te.Fp8Unpadding(len(counts), multiple)(out, counts)

    def _mlp(self, mlp: ExpertsMLP, rows: Tensor, splits: list[int] | Tensor) -> Tensor:
        """Both products on rows ``[R, H]``; the second bias is left to :meth:`_finish`."""
        x = self._product("up", rows, mlp.up, splits)
        if mlp.up_bias is not None:
            # Not by the layer, whose bias gradients are sums in the dtype of the rows.
            x = add_bias(x, mlp.up_bias, torch.as_tensor(splits, dtype=torch.int64, device=rows.device))
        return self._product("down", mlp.activation(x), mlp.down, splits)

    def _finish(self, mlp: ExpertsMLP, rows: Tensor, tokens_per_expert: Tensor) -> Tensor:
        rows = add_bias(rows, mlp.down_bias, tokens_per_expert)
        return rows if mlp.post is None else mlp.post(rows)

    def _product(self, which: str, rows: Tensor, weight: Tensor, splits: list[int] | Tensor) -> Tensor:
        """``rows[i] @ weight[e]`` for a weight ``[E, in, out]``."""
        layer = self._layer(which, weight, rows, on_device=isinstance(splits, Tensor))
        # Stored as [E, out, in] it is what the layer takes; as [E, in, out] it is copied.
        views = _Views.apply(weight.transpose(1, 2).contiguous())
        # A micro-batch that is not the first takes the copies that are there, and makes those that are not.
        first = False if self.keep_copies and torch.is_grad_enabled() else None
        lent = {f"weight{expert}": view for expert, view in enumerate(views)}
        return functional_call(
            layer,
            lent,
            (rows.contiguous(), splits),
            {"is_first_microbatch": first},
            tie_weights=False,
            strict=True,
        )

    def _layer(self, which: str, weight: Tensor, rows: Tensor, *, on_device: bool) -> nn.Module:
        experts, width_in, width_out = weight.shape
        # Each weight has a layer of its own, because a layer keeps the scales of what it has seen.
        key = (which, experts, width_in, width_out, rows.dtype, rows.device, on_device)
        if key not in self._layers:
            options = {"use_grouped_tensor": on_device} if self._takes_device_counts else {}
            layer = self.te.GroupedLinear(
                experts, width_in, width_out, bias=False, params_dtype=rows.dtype, device="meta", **options
            )
            # Without biases it holds empty tensors in their places, and those would stay on the meta device.
            for expert in range(experts):
                setattr(layer, f"bias{expert}", rows.new_empty(0))
            self._layers[key] = layer
        return self._layers[key]


class _Views(torch.autograd.Function):
    """``weight.unbind(0)``, whose gradient is not copied where the gradients of the views lie side by side already.

    They do: the layer computes them into one buffer.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> tuple[Tensor, ...]:
        return weight.unbind(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        first, step = gradients[0], gradients[0].numel()
        storage = first.untyped_storage().data_ptr()
        side_by_side = all(
            g.is_contiguous()
            and g.untyped_storage().data_ptr() == storage
            and g.storage_offset() == first.storage_offset() + expert * step
            for expert, g in enumerate(gradients)
        )
        if not side_by_side:
            return torch.stack(gradients)
        return first.as_strided((len(gradients), *first.shape), (step, *first.stride()))


def low_precision_unsuitable(mlp_shapes: Sequence[torch.Size], recipe: Any) -> str:
    """Say why experts of these shapes cannot be computed with a recipe, in one line; empty where they can.

    Args:
        mlp_shapes: Shapes of ``up`` and ``down``, one expert or all.
        recipe: A recipe of Transformer Engine, or its name.
    """
    facts = recipe_facts(recipe)
    unfit = sorted({width for shape in mlp_shapes for width in shape[-2:] if width % facts.width})
    if not unfit:
        return ""
    return f"{facts.class_name} needs widths that are multiples of {facts.width}, got {', '.join(map(str, unfit))}"


def outside_of_recipe(
    recipe: Any, experts: Iterable[tuple[str, ExpertsBackend | None, Sequence[torch.Size]]]
) -> list[str]:
    """Say which experts a recipe does not reach, one line a reason.

    Args:
        recipe: A recipe of Transformer Engine, or its name.
        experts: Name, backend and shapes of ``up`` and ``down`` of each experts module; without a backend it computes
            itself.
    """
    names: dict[str, list[str]] = {}
    for name, backend, shapes in experts:
        if isinstance(backend, TransformerEngineBackend):
            reason = low_precision_unsuitable(shapes, recipe)
        elif backend is None:
            reason = "their class computes them itself"
        else:
            reason = f"experts_backend={backend.name!r} knows no recipes, 'te' does"
        if reason:
            names.setdefault(reason, []).append(name)
    return [
        f"{recipe_facts(recipe).class_name} does not reach {len(some)} experts modules ({some[0]}"
        f"{', ...' if len(some) > 1 else ''}), which compute in the base precision: {reason}"
        for reason, some in names.items()
    ]


def te_unusable() -> str:
    """Say why the backend is not usable here in one line, empty where it is."""
    found = probe(_PACKAGE)
    if found.module is None:
        return ": ".join(filter(None, (f"{_PACKAGE} is {found.reason}", found.hint)))
    if not hasattr(found.module, "GroupedLinear") or not hasattr(found.module, "quantization"):
        return f"{_PACKAGE} {found.version} has no GroupedLinear that this version of lightning-moe knows; 2.16 has"
    if "cpu" not in TransformerEngineBackend.device_types and not torch.cuda.is_available():
        return "there is no CUDA device"
    return ""
