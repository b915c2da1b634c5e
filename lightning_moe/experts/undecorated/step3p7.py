"""Step 3.7: the usual experts, without the decorator; the bound of the gate differs by layer."""

from typing import Any

from torch import Tensor, nn

from lightning_moe.experts.spec import ExpertsSpec


def describe(module: nn.Module, parent: nn.Module | None) -> ExpertsSpec:
    """Describe a ``Step3p7Experts``."""
    return ExpertsSpec(up="gate_up_proj", down="down_proj", activation=_gate)


def _gate(experts: Any, rows: Tensor) -> Tensor:
    return experts._apply_gate(rows)
