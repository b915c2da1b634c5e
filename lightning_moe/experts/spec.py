"""What an experts module is: the description that turns a class into one that can be sharded and dispatched to."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

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


ExpertsFunction = Callable[[Any, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class ExpertsSpec:
    """Describes an experts class to :func:`register_experts`.

    The class is called as ``experts(hidden_states [T, H], top_k_index [T, K], top_k_weights [T, K]) -> [T, H]`` and
    keeps its weights in parameters whose dimension 0 is the expert. Either name the two weights of an MLP, and any
    backend computes it, or give ``compute`` for anything else.

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

    Raises:
        ValueError: If neither ``compute`` nor all of ``up``, ``down`` and ``activation`` are given, or both are.
    """

    up: str | None = None
    down: str | None = None
    activation: Callable[[Any, Tensor], Tensor] | None = None
    transposed: bool = False
    up_bias: str | None = None
    down_bias: str | None = None
    post: Callable[[Any, Tensor], Tensor] | None = None
    compute: ExpertsFunction | None = None
    # How the module is made to call the dispatched computation; adapters of other libraries replace it.
    install: Callable[[nn.Module, Callable[..., Tensor]], None] = field(default=replace_forward, repr=False)

    def __post_init__(self) -> None:
        mlp = (self.up, self.down, self.activation)
        if self.compute is not None:
            if any(part is not None for part in (*mlp, self.up_bias, self.down_bias, self.post)) or self.transposed:
                raise ValueError("ExpertsSpec: give either compute= or up=, down= and activation=, not both")
        elif any(part is None for part in mlp):
            missing = ", ".join(n for n, p in zip(("up", "down", "activation"), mlp, strict=True) if p is None)
            raise ValueError(f"ExpertsSpec: {missing} missing; name both weights and the activation, or give compute=")

    def weight_names(self) -> tuple[str, ...]:
        """Names of the parameters that the spec mentions."""
        return tuple(name for name in (self.up, self.down, self.up_bias, self.down_bias) if name is not None)

    def num_experts(self, module: nn.Module) -> int:
        """Number of experts of a module that is not sharded yet, or is: a DTensor keeps its full shape.

        Raises:
            ValueError: If a parameter that the spec names is missing, or the parameters disagree about the number.
        """
        parameters = dict(module.named_parameters(recurse=False))
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
        return next(iter(sizes.values()))

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
