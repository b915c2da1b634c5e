"""Which classes are experts modules, and where a model has them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from lightning_moe.experts import peft, undecorated
from lightning_moe.experts import transformers as transformers_adapter
from lightning_moe.experts.spec import ExpertsSpec

# A spec, or a function that describes one instance of the class.
_SPECS: dict[type[nn.Module], ExpertsSpec | Callable[[Any], ExpertsSpec]] = {}


@dataclass(frozen=True)
class FoundExperts:
    """An experts module of a model.

    Attributes:
        name: Its qualified name in the model.
        module: The module.
        spec: What describes it.
        num_experts: Experts of the whole module.
        parent: The module that holds it, where it is not the model itself. Wrappers of PEFT around it do not count.
    """

    name: str
    module: nn.Module
    spec: ExpertsSpec
    num_experts: int
    parent: nn.Module | None

    @property
    def num_choices(self) -> int:
        """What the router chooses among: the experts, and in some classes others that compute nothing."""
        return self.spec.num_choices(self.module)


def register_experts(cls: type[nn.Module], spec: ExpertsSpec | Callable[[Any], ExpertsSpec]) -> None:
    """Teach the strategy an experts class of your own.

    Args:
        cls: A module class that is called as
            ``experts(hidden_states [T, H], top_k_index [T, K], top_k_weights [T, K]) -> [T, H]``. Its subclasses are
            covered too.
        spec: Where its weights are and what it computes; or a function from an instance to that, for a class whose
            instances differ.

    Raises:
        TypeError: If ``cls`` is not a module class or ``spec`` not an :class:`ExpertsSpec`.
    """
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise TypeError(f"register_experts: cls must be a subclass of torch.nn.Module, got {cls!r}")
    if not (isinstance(spec, ExpertsSpec) or callable(spec)):
        raise TypeError(f"register_experts: spec must be an ExpertsSpec or a function that returns one, got {spec!r}")
    _SPECS[cls] = spec


def experts_spec(module: nn.Module, parent: nn.Module | None = None) -> ExpertsSpec | None:
    """Return what describes a module as experts, ``None`` where it is something else.

    Args:
        module: The module.
        parent: The module that holds it, if there is one; a few classes of Transformers are known inside it only.
    """
    for cls in type(module).__mro__:
        if cls in _SPECS:
            spec = _SPECS[cls]
            return spec if isinstance(spec, ExpertsSpec) else spec(module)
    return transformers_adapter.experts_spec(module) or undecorated.experts_spec(module, parent)


def find_experts(model: nn.Module) -> list[FoundExperts]:
    """Find the experts modules of a model, by type.

    Raises:
        ValueError: If a registered module does not have the parameters that its spec names, or something stands in for
            them.
    """
    return list(_walk(model))


def _walk(model: nn.Module) -> Iterator[FoundExperts]:
    for name, module in model.named_modules():
        parent, spec = peft.parent_of(model, name), None
        try:
            spec = experts_spec(module, parent)
            if spec is None:
                continue
            found = FoundExperts(name, module, spec, spec.num_experts(module), parent)
        except (NotImplementedError, ValueError) as error:
            peft.check_plain(name, module, partial(_may_be_adapted, spec), error)
            raise
        peft.check_plain(name, module, partial(_may_be_adapted, spec))
        yield found


def _may_be_adapted(spec: ExpertsSpec | None, child: str) -> bool:
    """Whether LoRA layers in a child are as good as in any module: in experts that are modules, and beside experts."""
    return spec is not None and (spec.modules is not None or not spec.holds_experts(child))
