"""LoRA that PEFT puts on the stacked weights of experts, ``LoraConfig(target_parameters=["mlp.experts.down_proj"])``.

PEFT wraps the experts module once for each weight. In the forward of a wrapper it replaces the weight by one with the
adapter added, for all experts, which a rank that holds some of them cannot do. Here the wrappers only say which
adapters are in use, and the experts add the products of the two factors for the rows of their own experts.

The factors stay what they are: dense parameters of the block around the experts. Every rank gathers them whole and uses
the parts of its own experts; the gradients of the other parts are zero, and the sum over all ranks is exact.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_moe.mesh import EXPERT, experts_per_rank
from lightning_moe.optional import loaded

_IN_USE = "_lightning_moe_adapters"


class LowRank(NamedTuple):
    """What is added to a weight ``[E_local, A, B]``: the product ``first[e] @ second[e]`` for each local expert.

    Attributes:
        first: ``[E_local, A, r]``.
        second: ``[E_local, r, B]``, with the scaling of the adapter in it.
    """

    first: Tensor
    second: Tensor

    def transposed(self) -> "LowRank":
        """What is added to the transposed weight ``[E_local, B, A]``."""
        return LowRank(self.second.transpose(1, 2), self.first.transpose(1, 2))


class _InUse(NamedTuple):
    wrapper: Any
    adapters: list[str]


# What the experts ask


def low_rank(module: nn.Module, name: str) -> LowRank | None:
    """Return what the adapters in use add to a 3-dimensional weight of the local experts, in the weight's orientation.

    Args:
        module: The experts module, while it is called.
        name: Name of the weight.

    Returns:
        The factors in the dtype of the weight, side by side where several adapters are in use; ``None`` without any.
    """
    in_use: _InUse | None = getattr(module, _IN_USE, {}).get(name)
    if in_use is None:
        return None
    weight = getattr(module, name)
    parts = [_factors(in_use.wrapper, adapter, weight) for adapter in in_use.adapters]
    if len(parts) == 1:
        return parts[0]
    first, second = zip(*parts, strict=True)
    return LowRank(torch.cat(first, dim=2), torch.cat(second, dim=1))


def with_adapters(module: nn.Module, name: str, weight: Tensor) -> Tensor:
    """Add what the adapters in use add to a parameter of the local experts.

    Args:
        module: The experts module, while it is called.
        name: Name of the parameter.
        weight: Its part ``[E_local, ...]`` on this rank.

    Returns:
        ``weight`` itself where no adapter is in use.
    """
    in_use: _InUse | None = getattr(module, _IN_USE, {}).get(name)
    if in_use is None:
        return weight
    if weight.ndim == 3:
        factors = low_rank(module, name)
        assert factors is not None
        return torch.baddbmm(weight, *factors)  # one tensor of that size, where product and sum would be two
    for adapter in in_use.adapters:  # a bias [E, U], to PEFT the matrix of a linear layer
        a, b, scaling = _weights(in_use.wrapper, adapter)
        first, count = _local_range(getattr(module, name), b.shape[0])
        weight = torch.addmm(weight, b.narrow(0, first, count).to(weight.dtype), a.to(weight.dtype), alpha=scaling)
    return weight


def _factors(wrapper: Any, adapter: str, weight: Tensor) -> LowRank:
    a, b, scaling = _weights(wrapper, adapter)
    experts = wrapper.num_experts
    first, count = _local_range(weight, experts)
    # PEFT stores [E * r, in] and [out, r * E]: the expert is outermost in the one and innermost in the other.
    a = a.unflatten(0, (experts, -1)).narrow(0, first, count).to(weight.dtype)
    b = b.unflatten(1, (-1, experts)).narrow(2, first, count).permute(2, 1, 0).to(weight.dtype)
    added = LowRank(a.transpose(1, 2), b.contiguous() * scaling)
    # PEFT's word for a weight that is [E, out, in] to it; older releases take every one for [E, in, out].
    return added.transposed() if getattr(wrapper, "_did_swap_in_out_features", False) else added


def _weights(wrapper: Any, adapter: str) -> tuple[Tensor, Tensor, float]:
    return wrapper.lora_A[adapter].weight, wrapper.lora_B[adapter].weight, wrapper.scaling[adapter]


def _local_range(parameter: Tensor, rows: int) -> tuple[int, int]:
    """First row of dimension 0 on this rank, and how many there are."""
    if not isinstance(parameter, DTensor):
        return 0, rows
    mesh = parameter.device_mesh
    assert mesh.mesh_dim_names is not None
    held = experts_per_rank(rows, mesh.size(mesh.mesh_dim_names.index(EXPERT)))
    rank = mesh.get_local_rank(EXPERT)
    return sum(held[:rank]), held[rank]


# What the strategy asks


def install_adapters(model: nn.Module, experts: Iterable[nn.Module], *, compiled: bool) -> None:
    """Let PEFT's wrappers around experts modules call them with their adapters in use.

    Args:
        model: The model.
        experts: Its experts modules.
        compiled: Whether the blocks are compiled; the experts are not.
    """
    known = {id(module): module for module in experts}
    for wrapper in _parameter_wrappers(model):
        module = known.get(id(wrapper.get_base_layer()))
        if module is None:
            continue
        # Not an attribute that nn.Module would see.
        object.__setattr__(module, _IN_USE, {})
        forward: Callable[..., Any] = partial(_forward, wrapper, module)
        wrapper.forward = torch.compiler.disable(forward) if compiled else forward
        wrapper.merge = partial(_refuse_merging, wrapper)
        wrapper.unmerge = partial(_refuse_merging, wrapper)


def _forward(wrapper: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if kwargs.get("adapter_names"):
        wrapper._check_forward_args(*args, **kwargs)  # an error: PEFT cannot mix adapters in one batch here
    kwargs.pop("adapter_names", None)
    adapters: list[str] = []
    if wrapper.disable_adapters:
        if wrapper.merged:
            _refuse_merging(wrapper)
    elif not wrapper.merged:
        adapters = [name for name in wrapper.active_adapters if name in wrapper.lora_A]
    if not adapters:
        return wrapper.base_layer(*args, **kwargs)
    in_use = getattr(module, _IN_USE)
    in_use[wrapper.parameter_name] = _InUse(wrapper, adapters)
    try:
        return wrapper.base_layer(*args, **kwargs)
    finally:
        del in_use[wrapper.parameter_name]


def _refuse_merging(wrapper: Any, *args: Any, **kwargs: Any) -> None:
    raise RuntimeError(
        f"the adapters of {wrapper.parameter_name!r} cannot be merged into experts that are sharded by"
        " strategy='moe_ep', nor taken out of them: save the adapter, load it into the model in one process without the"
        " strategy, and merge it there"
    )


def check_plain(name: str, module: nn.Module, allowed: Callable[[str], bool], error: Exception | None = None) -> None:
    """Refuse experts whose weights are not what they seem.

    Args:
        name: Qualified name of the module, for the message.
        module: The module.
        allowed: Whether PEFT may adapt what is in the child of that name.
        error: What went wrong because of that.

    Raises:
        ValueError: If its weights are parametrized, or PEFT adapts something inside that holds them.
    """
    parametrizations = getattr(module, "parametrizations", None)
    if isinstance(parametrizations, nn.ModuleDict):
        raise ValueError(
            f"the experts {name!r} have parametrizations (torch.nn.utils.parametrize) of"
            f" {', '.join(map(repr, parametrizations))}, which would compute the weights of all experts on every"
            " rank; remove them. LoRA adapts these weights by PEFT's LoraConfig(target_parameters=[...])"
        ) from error
    for inner_name, inner in module.named_modules():
        if _is_layer(inner) and not allowed(inner_name.partition(".")[0]):
            raise ValueError(
                f"PEFT adapts {inner_name!r} inside the experts {name!r} ({type(inner).__name__}), but only parameters"
                " that the experts module holds itself can have adapters; leave it out of target_parameters and"
                " target_modules"
            ) from error


def parent_of(model: nn.Module, name: str) -> nn.Module | None:
    """Return the module that holds another one. What PEFT wraps around a module does not count.

    Args:
        model: The model.
        name: Qualified name of the module in it; the model itself has no parent.
    """
    while name:
        name = name.rpartition(".")[0]
        parent = model.get_submodule(name)
        # A copy of a module that PEFT trains whole lies in a dictionary inside the wrapper.
        around = model.get_submodule(name.rpartition(".")[0]) if isinstance(parent, nn.ModuleDict) else parent
        if not _is_wrapper(around):
            return parent
    return None


def innermost(module: nn.Module) -> nn.Module:
    """Return what PEFT has wrapped, the module itself where it has wrapped nothing."""
    while _is_wrapper(module):
        wrapper: Any = module
        module = wrapper.original_module if hasattr(wrapper, "original_module") else wrapper.get_base_layer()
    return module


def _is_layer(module: nn.Module) -> bool:
    peft = loaded("peft")
    return peft is not None and isinstance(module, peft.tuners.tuners_utils.BaseTunerLayer)


def _is_wrapper(module: nn.Module) -> bool:
    peft = loaded("peft")
    return peft is not None and (_is_layer(module) or isinstance(module, peft.utils.other.AuxiliaryTrainingWrapper))


def _parameter_wrappers(model: nn.Module) -> Iterator[Any]:
    peft = loaded("peft")
    wrapper = getattr(peft.tuners.lora, "ParamWrapper", None) if peft is not None else None
    if wrapper is not None:
        yield from (module for module in model.modules() if isinstance(module, wrapper))


# Adapters on the meta device


def check_adapters(model: nn.Module) -> None:
    """Find adapters on the meta device that cannot be made there.

    Raises:
        ValueError: If the initial value of an adapter depends on weights that do not exist yet.
    """
    for name, layer, adapter in _on_meta(model):
        init = _initialization(model, adapter)
        lora = hasattr(layer, "reset_lora_parameters") and not getattr(layer, "use_dora", {}).get(adapter)
        if not lora or not (isinstance(init, bool) or init == "gaussian"):
            raise ValueError(
                f"{name}: the adapter {adapter!r} ({type(layer).__name__}, init_lora_weights={init!r}) was built on the"
                " meta device, where only LoRA with init_lora_weights=True, False or 'gaussian' and without DoRA can"
                " be; build the model on a real device"
            )


def materialize_adapters(model: nn.Module, device: torch.device) -> None:
    """Give real, initialised tensors to LoRA factors on the meta device, as PEFT initialises them.

    Left to the model around them, the second factor would not start at zero.

    Args:
        model: The model; :func:`check_adapters` has passed.
        device: Where the tensors go.
    """
    for _, layer, adapter in list(_on_meta(model)):
        for factors in (layer.lora_A, layer.lora_B):
            if adapter in factors:
                factors[adapter].to_empty(device=device)
                factors[adapter].reset_parameters()
        for factors in (layer.lora_embedding_A, layer.lora_embedding_B):
            if adapter in factors:
                empty = torch.randn(factors[adapter].shape, dtype=factors[adapter].dtype, device=device)
                factors[adapter] = nn.Parameter(empty, requires_grad=factors[adapter].requires_grad)
        layer.reset_lora_parameters(adapter, _initialization(model, adapter))


def _on_meta(model: nn.Module) -> Iterator[tuple[str, Any, str]]:
    """Name, layer and adapter of each adapter with a tensor on the meta device."""
    layers: list[tuple[str, Any]] = [(name, layer) for name, layer in model.named_modules() if _is_layer(layer)]
    for name, layer in layers:
        found = {
            adapter
            for part in (getattr(layer, kept, None) for kept in layer.adapter_layer_names)
            if isinstance(part, nn.ModuleDict | nn.ParameterDict)
            for adapter, value in part.items()
            if any(t.is_meta for t in (value.parameters() if isinstance(value, nn.Module) else [value]))
        }
        yield from ((name, layer, adapter) for adapter in sorted(found))


def _initialization(model: nn.Module, adapter: str) -> Any:
    for module in model.modules():
        configs = vars(module).get("peft_config")
        if isinstance(configs, dict) and adapter in configs:
            return getattr(configs[adapter], "init_lora_weights", None)
    return None
