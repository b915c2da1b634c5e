"""The tensors of a module as a folder names them, and the part of each that this rank holds."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_moe.checkpoint.safetensors_files import Window, whole_window, window_shape
from lightning_moe.experts.spec import partly_elsewhere


class Slot(NamedTuple):
    """Where a module keeps a tensor.

    Attributes:
        module: The module that holds it.
        attribute: Its name there.
        name: Its qualified name in the module that is read into.
    """

    module: nn.Module
    attribute: str
    name: str

    @property
    def tensor(self) -> Tensor:
        """The tensor that is there now."""
        return getattr(self.module, self.attribute)


def slots_of(module: nn.Module) -> dict[str, list[Slot]]:
    """The tensors of a module's state dict, by the names that they have without PEFT; adapters are left out."""
    slots: dict[str, list[Slot]] = {}
    _collect(module, "", "", slots)
    return slots


def _collect(module: nn.Module, plain: str, full: str, slots: dict[str, list[Slot]]) -> None:
    children = {name: child for name, child in module._modules.items() if child is not None}
    # What PEFT puts around a module: its layers, and the wrapper of modules that it trains beside or in place of them.
    if "base_layer" in children and hasattr(module, "adapter_layer_names"):
        _collect(children["base_layer"], plain, f"{full}base_layer.", slots)
        return
    if "original_module" in children:
        _collect(children["original_module"], plain, f"{full}original_module.", slots)
        for name, child in children.get("modules_to_save", nn.Module()).named_children():
            _collect(child, plain, f"{full}modules_to_save.{name}.", slots)
        return
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None and name not in module._non_persistent_buffers_set:
            slots.setdefault(f"{plain}{name}", []).append(Slot(module, name, f"{full}{name}"))
    for name, child in children.items():
        _collect(child, f"{plain}{name}.", f"{full}{name}.", slots)


def wanted_tensors(module: nn.Module, slots: Mapping[str, Sequence[Slot]]) -> dict[str, Tensor]:
    """Make a tensor on the meta device for each one of the whole module, also of experts that only other ranks have.

    Collective where ranks have dropped experts that are modules of their own.
    """
    facts = {name: (tuple(s[0].tensor.shape), s[0].tensor.dtype) for name, s in slots.items()}
    if dist.is_initialized() and any(partly_elsewhere(inner) for inner in module.modules()):
        everywhere: list[dict[str, Any]] = [{}] * dist.get_world_size()
        dist.all_gather_object(everywhere, facts)
        facts = {name: fact for rank in everywhere for name, fact in rank.items()}
    return {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in facts.items()}


def local_window(tensor: Tensor) -> Window:
    """The part of a whole tensor that this rank holds.

    Raises:
        RuntimeError: If its placements are of a kind that is not known here.
    """
    if not isinstance(tensor, DTensor):
        return whole_window(tensor.shape)
    spans = list(whole_window(tensor.shape))
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    plain = [(dim, p) for dim, p in enumerate(tensor.placements) if p.is_shard()]
    # A second cut along the same dimension, which FSDP2 makes of what expert parallelism has cut before it.
    again = [(dim, p) for dim, p in enumerate(tensor.placements) if not p.is_shard() and not p.is_replicate()]
    for mesh_dim, placement in (*plain, *reversed(again)):
        dim = getattr(placement, "dim", None)
        if dim is None:
            raise RuntimeError(f"load_pretrained cannot read into a tensor that is placed as {tensor.placements}")
        start, stop = spans[dim]
        block = -(-(stop - start) // tensor.device_mesh.size(mesh_dim))
        start = min(start + block * coordinate[mesh_dim], stop)
        spans[dim] = (start, min(start + block, stop))
    window = tuple(spans)
    if window_shape(window) != tuple(local_part(tensor).shape):
        raise RuntimeError(
            f"load_pretrained cannot read into a tensor of shape {list(tensor.shape)} that is placed as"
            f" {tensor.placements}: this rank holds {list(local_part(tensor).shape)}, not {list(window_shape(window))}"
        )
    return window


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor; writing to it changes the tensor."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def allocate(slot: Slot, slots: Mapping[str, Sequence[Slot]], device: torch.device | None) -> None:
    """Give memory to a tensor on the meta device, in place, so that those who hold it hold the new one."""
    old = slot.tensor
    if not old.is_meta:
        return
    made: Tensor
    if isinstance(old, DTensor):
        local = torch.empty(old.to_local().shape, dtype=old.dtype, device=device)
        made = DTensor.from_local(
            local, old.device_mesh, old.placements, run_check=False, shape=old.shape, stride=old.stride()
        )
    else:
        made = torch.empty_like(old, device=device)
    if isinstance(old, nn.Parameter):
        torch.utils.swap_tensors(old, nn.Parameter(made, requires_grad=old.requires_grad))
    else:
        for other in (other for same in slots.values() for other in same if other.tensor is old):
            other.module._buffers[other.attribute] = made
