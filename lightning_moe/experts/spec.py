"""What an experts module is: the description that turns a class into one that can be sharded and dispatched to."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_moe.experts.peft import LowRank, low_rank, with_adapters
from lightning_moe.mesh import experts_per_rank


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
        up_low_rank: What LoRA adds to ``up``, ``None`` without LoRA or where it is in ``up`` already.
        down_low_rank: The same for ``down``.
    """

    up: Tensor
    down: Tensor
    activation: Callable[[Tensor], Tensor]
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    post: Callable[[Tensor], Tensor] | None = None
    up_low_rank: LowRank | None = None
    down_low_rank: LowRank | None = None

    @property
    def num_local_experts(self) -> int:
        """Experts whose weights these are."""
        return self.up.shape[0]


def replace_forward(module: nn.Module, forward: Callable[..., Tensor]) -> None:
    """Let one module instance call ``forward`` in place of the method of its class."""
    module.forward = forward


ExpertsFunction = Callable[[Any, Tensor, Tensor], Tensor]

ITSELF = "."
_NUM_EXPERTS = "_lightning_moe_num_experts"


def local_weight(module: nn.Module, name: str) -> Tensor:
    """Return the part of an experts parameter that this rank holds, for use inside ``ExpertsSpec.compute``.

    Args:
        module: The experts module.
        name: Name of a parameter of its own, or with a dot of one in a submodule.

    Returns:
        ``[E_local, ...]``, differentiable, with what LoRA adds to it.
    """
    return with_adapters(module, name, _stored_weight(module, name))


def partly_elsewhere(module: nn.Module) -> bool:
    """Whether a module has lost experts, which are modules of their own, to other ranks."""
    return hasattr(module, _NUM_EXPERTS)


def weight_shape(module: nn.Module, name: str) -> torch.Size:
    """Return the shape of a weight of all experts, also of one that something computes where a parameter was."""
    return _weight(module, name).shape


def _weight(module: nn.Module, name: str) -> Tensor:
    owner, _, own = name.rpartition(".")
    return getattr(module.get_submodule(owner), own)


def _stored_weight(module: nn.Module, name: str) -> Tensor:
    weight = _weight(module, name)
    return weight.to_local() if isinstance(weight, DTensor) else weight


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
            any ``R``, 0 included; ``"."`` where the experts module is a ``ModuleList`` or ``ModuleDict`` itself. Each
            rank keeps its own entries under their names. Excludes the other arguments but ``post``.
        weights: Names of the parameters that ``compute`` uses, where they lie in submodules, such as ``"mlp.w1"``; its
            own parameters need no mention. ``up`` and ``down`` may have a dot as well.

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
    weights: tuple[str, ...] = ()
    # Adapters of classes that are not called, or do not keep their weights, as above replace what follows.
    # How the module is made to call the dispatched computation.
    install: Callable[[nn.Module, Callable[..., Tensor]], None] = field(default=replace_forward, repr=False)
    # How many experts there are, where dimension 0 of the weights does not say it.
    count: Callable[[Any], int] | None = field(default=None, repr=False)
    # How many a router chooses among, where some of them compute nothing and are no experts.
    choices: Callable[[Any], int] | None = field(default=None, repr=False)
    # What reads a weight of the experts of this rank, ``[E_local, ...]``, for a backend.
    local: Callable[[nn.Module, str], Tensor] = field(default=local_weight, repr=False)
    # Whether each rank must hold the same number of experts.
    even: bool = field(default=False, repr=False)

    def __post_init__(self) -> None:
        mlp = (self.up, self.down, self.activation)
        if self.weights and self.compute is None:
            raise ValueError("ExpertsSpec: weights= goes with compute=; give up= and down= otherwise")
        if self.compute is not None or self.modules is not None:
            others = (*mlp, self.up_bias, self.down_bias, self.compute and (self.modules or self.post))
            if any(part is not None for part in others) or self.transposed:
                raise ValueError(
                    "ExpertsSpec: give either up=, down= and activation=, or compute=, or modules=, not both"
                )
        elif any(part is None for part in mlp):
            missing = ", ".join(n for n, p in zip(("up", "down", "activation"), mlp, strict=True) if p is None)
            raise ValueError(
                f"ExpertsSpec: {missing} missing; name both weights and the activation, or give compute= or modules="
            )

    def mlp_shapes(self, module: nn.Module) -> tuple[torch.Size, ...]:
        """Shapes of ``up`` and ``down`` as stored, all experts; nothing where the spec names no such weights."""
        return tuple(weight_shape(module, name) for name in (self.up, self.down) if name is not None)

    def weight_names(self) -> tuple[str, ...]:
        """Names of the parameters that the spec mentions."""
        named = (self.up, self.down, self.up_bias, self.down_bias, *self.weights)
        return tuple(name for name in named if name is not None)

    def parameters(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """The parameters that hold experts, by name: the module's own, and those of submodules that the spec names."""
        found = dict(module.named_parameters(recurse=False))
        inside = dict(module.named_parameters()) if any("." in name for name in self.weight_names()) else {}
        return found | {name: inside[name] for name in self.weight_names() if name in inside}

    def holds_experts(self, child: str) -> bool:
        """Whether the child of that name holds experts, rather than something that all experts share."""
        if self.modules is not None:
            return self.modules in (ITSELF, child)
        return any(name.startswith(f"{child}.") for name in self.weight_names())

    def num_experts(self, module: nn.Module) -> int:
        """Number of experts of a module that is not sharded yet, or is: a DTensor keeps its full shape.

        Raises:
            ValueError: If a parameter that the spec names is missing, or the parameters disagree about the number.
        """
        parameters = self.parameters(module)
        if self.modules is not None:
            return self._num_modules(module, list(parameters))
        for name in self.weight_names():
            if name not in parameters:
                raise ValueError(
                    f"ExpertsSpec of {type(module).__name__} names the parameter {name!r}, which the module does not"
                    f" have; its parameters are {', '.join(map(repr, parameters)) or 'none'}"
                )
        shared = [n for n, _ in module.named_parameters() if self.holds_experts(n.partition(".")[0])]
        if set(shared) - set(parameters):
            raise ValueError(
                f"ExpertsSpec of {type(module).__name__} names {', '.join(map(repr, self.weight_names()))}, so that"
                f" {', '.join(map(repr, sorted(set(shared) - set(parameters))))} beside them would be cut too; move"
                " what all experts share into another submodule"
            )
        if self.count is not None:
            return self.count(module)
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

    def num_choices(self, module: nn.Module) -> int:
        """Number of rows of the router of a module: its experts, and what else the router may choose."""
        return self.num_experts(module) if self.choices is None else self.choices(module)

    def check_ranks(self, name: str, module: nn.Module, ranks: int) -> None:
        """Check that a module that is not sharded yet can be divided over a number of ranks.

        Args:
            name: Qualified name of the module, for the message.
            module: The module.
            ranks: The strategy's ``expert_parallel_size``.

        Raises:
            ValueError: If each rank must hold the same number of experts and cannot, or would have no row of a weight.
        """
        if not self.even:
            return
        num_experts = self.num_experts(module)
        rows = {parameter.shape[0] for parameter in self.parameters(module).values()}

        def fits(size: int) -> bool:
            # FSDP2 cannot keep a weight of which a rank has nothing.
            return num_experts % size == 0 and all(all(experts_per_rank(number, size)) for number in rows)

        if not fits(ranks):
            allowed = [size for size in range(1, num_experts + 1) if fits(size)]
            raise ValueError(
                f"expert_parallel_size={ranks} cannot divide {name!r} with its {num_experts} experts: the way in which"
                f" {type(module).__name__} keeps its weights asks for the same number on every rank; set"
                f" expert_parallel_size to one of {', '.join(map(str, allowed))}"
            )

    def _num_modules(self, module: nn.Module, parameters: list[str]) -> int:
        if hasattr(module, _NUM_EXPERTS):
            return getattr(module, _NUM_EXPERTS)
        experts = module if self.modules == ITSELF else getattr(module, self.modules or "", None)
        containers = (nn.ModuleList, nn.ModuleDict) if self.modules == ITSELF else nn.ModuleList
        if not isinstance(experts, containers) or not self._entries(experts) or parameters:
            raise ValueError(
                f"ExpertsSpec of {type(module).__name__}: modules={self.modules!r} must name a ModuleList with one"
                " entry an expert, and the module may hold no parameters of its own; it is"
                f" {type(experts).__name__}, and the parameters are {', '.join(map(repr, parameters)) or 'none'}"
            )
        return len(self._entries(experts))

    def _entries(self, container: nn.Module) -> list[tuple[str, nn.Module]]:
        """The experts among the entries of a container: one that is the experts module itself may hold other things."""
        entries = list(container.named_children())
        if self.modules == ITSELF:
            return [(name, entry) for name, entry in entries if next(entry.parameters(), None) is not None]
        return entries

    def keep_modules(self, module: nn.Module, first: int, count: int) -> None:
        """Drop the entries of ``modules`` that other ranks hold; the rest keep their names."""
        assert self.modules is not None
        container = module if self.modules == ITSELF else getattr(module, self.modules)
        entries = self._entries(container)
        object.__setattr__(module, _NUM_EXPERTS, len(entries))
        if self.modules == ITSELF:
            for name, _ in (*entries[:first], *entries[first + count :]):
                delattr(module, name)
        else:
            setattr(module, self.modules, nn.ModuleDict(dict(entries[first : first + count])))

    def run_modules(self, module: nn.Module, rows: Tensor, tokens_per_expert: list[int]) -> Tensor:
        """Let each local entry of ``modules`` map its rows ``[R, H]``, those without rows too."""
        assert self.modules is not None
        experts = self._entries(module if self.modules == ITSELF else getattr(module, self.modules))
        parts = rows.split(tokens_per_expert)
        out = torch.cat([expert(part) for (_, expert), part in zip(experts, parts, strict=True)])
        return out if self.post is None else self.post(module, out)

    def hidden_size(self, module: nn.Module) -> int:
        """Width of the rows that the experts take, 0 where the spec does not say."""
        if self.up is None:
            return 0
        return weight_shape(module, self.up)[1 if self.transposed else 2]

    def mlp(self, module: nn.Module, *, low_rank_apart: bool = False) -> ExpertsMLP:
        """Gather the local weights of a module with a two-weight spec into what backends take.

        Args:
            module: The experts module.
            low_rank_apart: Leave what LoRA adds to the two weights out of them, for a backend that adds it to the rows:
                no weight that is not trained gets a gradient then, and none is copied.
        """
        assert self.up is not None
        assert self.down is not None
        assert self.activation is not None
        activation, post = self.activation, self.post
        apart = low_rank_apart and self.local is local_weight
        read = _stored_weight if apart else self.local
        up, down = read(module, self.up), read(module, self.down)
        return ExpertsMLP(
            up=up if self.transposed else up.transpose(1, 2),
            down=down if self.transposed else down.transpose(1, 2),
            activation=lambda rows: activation(module, rows),
            up_bias=None if self.up_bias is None else self.local(module, self.up_bias),
            down_bias=None if self.down_bias is None else self.local(module, self.down_bias),
            post=None if post is None else lambda rows: post(module, rows),
            up_low_rank=self._low_rank(module, self.up) if apart else None,
            down_low_rank=self._low_rank(module, self.down) if apart else None,
        )

    def _low_rank(self, module: nn.Module, name: str) -> LowRank | None:
        added = low_rank(module, name)
        return added if added is None or self.transposed else added.transposed()
