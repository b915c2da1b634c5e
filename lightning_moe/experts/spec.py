"""What an experts module is: the description that turns a class into one that can be sharded and dispatched to."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class ExpertsMLP:
    """The computation that every backend knows: ``down(activation(up(x)))`` for each local expert.

    Attributes:
        up: ``[E_local, H, U]`` first weight, as ``x @ up[e]``; any strides. For gated experts ``U`` is twice the
            intermediate width.
        down: ``[E_local, I, H]`` second weight, as ``a @ down[e]``; any strides.
        activation: Maps ``[R, U]`` to ``[R, I]``, row by row.
        up_bias: ``[E_local, U]`` or ``None``.
        down_bias: ``[E_local, H]`` or ``None``.
        post: Maps the ``[R, H]`` results to ``[R, H]``, row by row, or ``None``.
    """

    up: Tensor
    down: Tensor
    activation: Callable[[Tensor], Tensor]
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    post: Callable[[Tensor], Tensor] | None = None

    @property
    def num_local_experts(self) -> int:
        """Experts whose weights these are."""
        return self.up.shape[0]


def replace_forward(module: nn.Module, forward: Callable[..., Tensor]) -> None:
    """Let one module instance call ``forward`` in place of the method of its class."""
    module.forward = forward


class LocalModules(nn.ModuleDict):
    """The entries of a ``ModuleList`` of experts that one rank holds, under the names that they had in it."""

    def __init__(self, experts: nn.ModuleList, first: int, count: int) -> None:
        super().__init__({str(index): experts[index] for index in range(first, first + count)})
        self.num_experts = len(experts)


ExpertsFunction = Callable[[Any, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class ExpertsSpec:
    """Describes an experts class to :func:`register_experts`.

    The class is called as ``experts(hidden_states [T, H], top_k_index [T, K], top_k_weights [T, K]) -> [T, H]`` and
    keeps its weights in parameters whose dimension 0 is the expert. Either name the two weights of an MLP, and any
    backend computes it, or give ``compute`` for anything else. A class that keeps each expert as a module of its own
    names the ``ModuleList`` in ``modules``.

    Args:
        up: Name of the first weight, ``[E, U, H]`` (``[E, H, U]`` with ``transposed``).
        down: Name of the second weight, ``[E, H, I]`` (``[E, I, H]`` with ``transposed``).
        activation: ``activation(module, rows [R, U]) -> [R, I]``, row by row.
        transposed: The weights are stored as ``[E, in, out]`` rather than ``[E, out, in]``.
        up_bias: Name of the first bias ``[E, U]``, if there is one.
        down_bias: Name of the second bias ``[E, H]``, if there is one.
        post: ``post(module, rows [R, H]) -> [R, H]`` after the second weight, row by row, if there is any; it may call
            submodules, whose parameters all experts share.
        compute: ``compute(module, rows [R, H], tokens_per_expert [E_local]) -> [R, H]`` on rows sorted by local
            expert. It gets the weights of this rank's experts from :func:`local_weight` and must leave every one of
            them in the graph, also those of experts without rows. Excludes the other arguments.
        modules: Name of a ``ModuleList`` whose entry ``e`` maps the rows of expert ``e``, ``[R, H]`` to ``[R, H]`` for
            any ``R``, 0 included. Each rank keeps its own entries under their names. Excludes the other arguments.

    Raises:
        ValueError: If not exactly one of the three ways is taken: ``up``, ``down`` and ``activation``; ``compute``; or
            ``modules``.
    """

    up: str | None = None
    down: str | None = None
    activation: Callable[[Any, Tensor], Tensor] | None = None
    transposed: bool = False
    up_bias: str | None = None
    down_bias: str | None = None
    post: Callable[[Any, Tensor], Tensor] | None = None
    compute: ExpertsFunction | None = None
    modules: str | None = None
    # How the module is made to call the dispatched computation; adapters of other libraries replace it.
    install: Callable[[nn.Module, Callable[..., Tensor]], None] = field(default=replace_forward, repr=False)

    def __post_init__(self) -> None:
        mlp = (self.up, self.down, self.activation)
        if self.compute is not None or self.modules is not None:
            others = (*mlp, self.up_bias, self.down_bias, self.post, self.compute and self.modules)
            if any(part is not None for part in others) or self.transposed:
                raise ValueError(
                    "ExpertsSpec: give either up=, down= and activation=, or compute=, or modules=, not both"
                )
        elif any(part is None for part in mlp):
            missing = ", ".join(n for n, p in zip(("up", "down", "activation"), mlp, strict=True) if p is None)
            raise ValueError(
                f"ExpertsSpec: {missing} missing; name both weights and the activation, or give compute= or modules="
            )

    def weight_names(self) -> tuple[str, ...]:
        """Names of the parameters that the spec mentions."""
        return tuple(name for name in (self.up, self.down, self.up_bias, self.down_bias) if name is not None)

    def num_experts(self, module: nn.Module) -> int:
        """Number of experts of a module that is not sharded yet, or is: a DTensor keeps its full shape.

        Raises:
            ValueError: If a parameter that the spec names is missing, or the parameters disagree about the number.
        """
        parameters = dict(module.named_parameters(recurse=False))
        if self.modules is not None:
            return self._num_modules(module, list(parameters))
        for name in self.weight_names():
            if name not in parameters:
                raise ValueError(
                    f"ExpertsSpec of {type(module).__name__} names the parameter {name!r}, which the module does not"
                    f" have; its parameters are {', '.join(map(repr, parameters)) or 'none'}"
                )
        sizes = {name: parameter.shape[0] if parameter.ndim else 0 for name, parameter in parameters.items()}
        if not sizes or len(set(sizes.values())) != 1 or 0 in sizes.values():
            raise ValueError(
                f"{type(module).__name__} is registered as an experts class, so dimension 0 of each of its own"
                f" parameters must be the expert; it has {sizes or 'no parameters'}. Move other parameters into a"
                " submodule"
            )
        if self.up is not None and self.down is not None:
            taken = self.hidden_size(module)
            returned = parameters[self.down].shape[2 if self.transposed else 1]
            if taken != returned:
                raise ValueError(
                    f"ExpertsSpec of {type(module).__name__}: {self.up!r} {list(parameters[self.up].shape)} takes rows"
                    f" of width {taken}, but {self.down!r} {list(parameters[self.down].shape)} returns {returned};"
                    f" weights are read as {'[E, in, out]' if self.transposed else '[E, out, in]'}, set"
                    f" transposed={not self.transposed} if they are stored the other way"
                )
        return next(iter(sizes.values()))

    def _num_modules(self, module: nn.Module, parameters: list[str]) -> int:
        experts = getattr(module, self.modules or "", None)
        if not isinstance(experts, nn.ModuleList | LocalModules) or not len(experts) or parameters:
            raise ValueError(
                f"ExpertsSpec of {type(module).__name__}: modules={self.modules!r} must name a ModuleList with one"
                " entry an expert, and the module may hold no parameters of its own; it is"
                f" {type(experts).__name__}, and the parameters are {', '.join(map(repr, parameters)) or 'none'}"
            )
        return experts.num_experts if isinstance(experts, LocalModules) else len(experts)

    def keep_modules(self, module: nn.Module, first: int, count: int) -> None:
        """Drop the entries of ``modules`` that other ranks hold; the rest keep their names."""
        assert self.modules is not None
        setattr(module, self.modules, LocalModules(getattr(module, self.modules), first, count))

    def run_modules(self, module: nn.Module, rows: Tensor, tokens_per_expert: list[int]) -> Tensor:
        """Let each local entry of ``modules`` map its rows ``[R, H]``, those without rows too."""
        assert self.modules is not None
        experts = getattr(module, self.modules).children()
        parts = rows.split(tokens_per_expert)
        return torch.cat([expert(part) for expert, part in zip(experts, parts, strict=True)])

    def hidden_size(self, module: nn.Module) -> int:
        """Width of the rows that the experts take, 0 where the spec does not say."""
        if self.up is None:
            return 0
        return module.get_parameter(self.up).shape[1 if self.transposed else 2]

    def mlp(self, module: nn.Module) -> ExpertsMLP:
        """Gather the local weights of a module with a two-weight spec into what backends take."""
        assert self.up is not None
        assert self.down is not None
        assert self.activation is not None
        activation, post = self.activation, self.post
        up, down = local_weight(module, self.up), local_weight(module, self.down)
        return ExpertsMLP(
            up=up if self.transposed else up.transpose(1, 2),
            down=down if self.transposed else down.transpose(1, 2),
            activation=lambda rows: activation(module, rows),
            up_bias=None if self.up_bias is None else local_weight(module, self.up_bias),
            down_bias=None if self.down_bias is None else local_weight(module, self.down_bias),
            post=None if post is None else lambda rows: post(module, rows),
        )


def local_weight(module: nn.Module, name: str) -> Tensor:
    """Return the part of an experts parameter that this rank holds, for use inside ``ExpertsSpec.compute``.

    Args:
        module: The experts module.
        name: Name of a parameter of its own.

    Returns:
        ``[E_local, ...]``, differentiable.
    """
    parameter = getattr(module, name)
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
