"""What a sharded experts module calls: dispatch, compute, weight, combine."""

import torch
from torch import Tensor, nn

from lightning_moe.dispatch import Dispatched, Dispatcher
from lightning_moe.dispatch.budget import RowBudget
from lightning_moe.experts import ExpertsBackend, ExpertsSpec, local_weight
from lightning_moe.in_flight import InFlight, arrived
from lightning_moe.parallel.late import LateScope, LateTensor
from lightning_moe.parallel.recompute import in_recompute
from lightning_moe.parallel.watch import Watch


def check_dispatch_chunks(dispatch_chunks: object) -> None:
    """Check the strategy's option.

    Raises:
        ValueError: If it is no number of parts.
    """
    if isinstance(dispatch_chunks, bool) or not isinstance(dispatch_chunks, int) or dispatch_chunks < 1:
        raise ValueError(f"dispatch_chunks={dispatch_chunks!r} must be a positive number of parts; 1 sends all at once")


class RoutedExperts:
    """The forward of one experts module over the ranks that share its experts.

    Args:
        module: The experts module; its own parameters are this rank's experts when it is called.
        spec: What describes it.
        dispatcher: Set up for this module.
        backend: What computes it; ``None`` where ``spec.compute`` or ``spec.modules`` does.
        dtype: Dtype in which it computes, the same on every rank, also on one that holds no expert.
        name: Qualified name of the module in its model, for messages.
        chunks: Parts in which the tokens travel: while one is computed, the next ones are on their way.
        scope: The forward of the block around the module, which may go on before the result is here; ``None`` waits.
        budget: What drops choices, so that no rank computes too many rows; ``None`` drops nothing.

    Attributes:
        watch: Where it marks that this rank is in it.
        load: ``[E]`` int64 choices of this rank's tokens for each expert of the whole module, dropped ones included,
            summed over the forwards in training mode; ``None`` before the first. Recomputed forwards and evaluation do
            not count.
        dropped: Scalar int64 choices of this rank's tokens that the budget dropped, summed alike.
    """

    def __init__(
        self,
        module: nn.Module,
        spec: ExpertsSpec,
        dispatcher: Dispatcher,
        backend: ExpertsBackend | None,
        dtype: torch.dtype,
        name: str = "",
        chunks: int = 1,
        scope: LateScope | None = None,
        budget: RowBudget | None = None,
    ) -> None:
        self.module = module
        self.spec = spec
        self.dispatcher = dispatcher
        self.backend = backend
        self.dtype = dtype
        self.name = name or type(module).__name__
        self.chunks = chunks
        self.scope = scope
        self.budget = budget
        self.hidden_size = spec.hidden_size(module)
        self.load: Tensor | None = None
        self.dropped: Tensor | None = None
        self.watch = Watch()
        self._in_forward, self._after_forward = f"forward of {self.name}", f"after the forward of {self.name}"
        self._in_backward = f"backward of {self.name}"

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Compute the experts of a batch of tokens.

        Args:
            hidden_states: ``[..., H]`` tokens of this rank, any number of them, in any float dtype.
            top_k_index: ``[..., K]`` integer expert of each choice over the whole module; -1 drops the choice.
            top_k_weights: ``[..., K]`` float routing weights.

        Returns:
            The weighted sum over the choices of each token, in the shape and dtype of ``hidden_states``.

        Raises:
            ValueError: If the shapes do not belong together.
        """
        if top_k_index.shape != top_k_weights.shape or top_k_index.shape[:-1] != hidden_states.shape[:-1]:
            raise ValueError(
                f"{type(self.module).__name__} takes hidden_states [T, H], top_k_index [T, K] and top_k_weights [T, K];"
                f" got {list(hidden_states.shape)}, {list(top_k_index.shape)} and {list(top_k_weights.shape)}"
            )
        if self.hidden_size and hidden_states.shape[-1] != self.hidden_size:
            raise ValueError(
                f"{type(self.module).__name__} got hidden_states of width {hidden_states.shape[-1]}, but its weight"
                f" {self.spec.up!r} takes {self.hidden_size}; is transposed={self.spec.transposed} right in its spec?"
            )
        hidden_TH = hidden_states.reshape(-1, hidden_states.shape[-1]).to(self.dtype)
        index_TK = top_k_index.reshape(-1, top_k_index.shape[-1]).long()
        weights_TK = top_k_weights.reshape(index_TK.shape)
        if self.spec.modules is not None and not (hidden_TH.requires_grad or weights_TK.requires_grad):
            # Experts that are modules can be frozen one by one, so that ranks differ in what needs a gradient. With
            # this all of them exchange gradients, or none.
            hidden_TH = hidden_TH.detach().requires_grad_(torch.is_grad_enabled())

        if not torch.compiler.is_compiling():
            self.watch.enter_forward(self._in_forward, self.name)
        if self.budget is not None:
            within = self.budget.apply(index_TK, weights_TK)
            index_TK = within.top_k_index
            self._count(within.chosen, within.dropped)
        homeward, learns = self._depart(hidden_TH, index_TK, weights_TK)
        if not torch.compiler.is_compiling():
            self.watch.place = self._after_forward

        def arrive() -> Tensor:
            parts = [flight.wait() for flight in homeward]
            out_TH = parts[0] if len(parts) == 1 else torch.cat(parts)
            if out_TH.requires_grad and not torch.compiler.is_compiling():
                out_TH.register_hook(self._mark_backward)
            out_TH = out_TH.to(hidden_states.dtype)
            # FSDP2 hooks into what a module returns and loses track of a view that is changed in place.
            return out_TH if hidden_states.ndim == 2 else out_TH.view(hidden_states.shape).clone()

        if not self._may_be_late():
            return arrive()
        assert self.scope is not None
        return self.scope.promise(LateTensor(hidden_states, hidden_states.shape, learns, arrive))

    def _may_be_late(self) -> bool:
        # A backward hook of the module, or of all modules, is an autograd.Function around its result.
        every = torch.nn.modules.module
        hooked = (
            self.module._backward_hooks
            or self.module._backward_pre_hooks
            or every._global_backward_hooks
            or every._global_backward_pre_hooks
        )
        return self.scope is not None and self.scope.entered and not hooked

    def _depart(self, hidden: Tensor, index: Tensor, weights: Tensor) -> tuple[list[InFlight[Tensor]], bool]:
        """Dispatch and compute; the results are on their way back.

        Returns:
            The results in parts, and whether they require a gradient.
        """
        if self.chunks > 1:
            return self._pipelined(hidden, index, weights)
        dispatched = self.dispatcher.dispatch(hidden, index, weights)
        rows = self._weighted(dispatched)
        if self._may_be_late():
            return [self.dispatcher.start_combine(rows, dispatched.state)], rows.requires_grad
        return [arrived(self.dispatcher.combine(rows, dispatched.state))], rows.requires_grad

    def _pipelined(self, hidden: Tensor, index: Tensor, weights: Tensor) -> tuple[list[InFlight[Tensor]], bool]:
        """Dispatch, compute and combine in parts, so that rows of the others travel while those of one are computed.

        All parts leave before the first is computed: their counts take one exchange and one wait for the host, and
        autograd walks the parts in the reverse order, with the same overlap.
        """
        # As many parts on every rank, whatever its number of tokens; some may be empty.
        sizes = [len(part) for part in torch.arange(len(hidden)).tensor_split(self.chunks)]
        parts = (tensor.split(sizes) for tensor in (hidden, index, weights))
        flights = self.dispatcher.start(list(zip(*parts, strict=True)))
        homeward, learns = [], False
        for flight in flights:
            dispatched = flight.wait()
            rows = self._weighted(dispatched)
            learns |= rows.requires_grad
            homeward.append(self.dispatcher.start_combine(rows, dispatched.state))
        return homeward, learns

    def _weighted(self, dispatched: Dispatched) -> Tensor:
        """Compute the rows that have come, and weight them."""
        if self.budget is None:
            self._count(dispatched.choices_per_expert)
        rows_RH = self._compute(dispatched.rows, dispatched.tokens_per_expert, dispatched.tokens_per_expert_host)
        # The weight takes the dtype of the rows: a float32 one would promote the whole [R, H] buffer.
        return rows_RH * dispatched.row_weights.to(rows_RH.dtype).unsqueeze(-1)

    def _count(self, chosen: Tensor, dropped: Tensor | None = None) -> None:
        if not self.module.training or in_recompute():
            return
        if self.load is None or self.dropped is None:
            self.load, self.dropped = torch.zeros_like(chosen), chosen.new_zeros(())
        self.load += chosen
        if dropped is not None:
            self.dropped += dropped

    def _mark_backward(self, _: Tensor) -> None:
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{self.name}: gradients of gradients (create_graph=True) are not supported by strategy='moe_ep';"
                " compute the penalty without create_graph, or train without the strategy"
            )
        self.watch.place = self._in_backward

    def _compute(self, rows: Tensor, tokens_per_expert: Tensor, tokens_per_expert_host: list[int] | None) -> Tensor:
        # The experts choose their own dtype: autocast knows nothing of grouped products.
        with torch.autocast(rows.device.type, enabled=False):
            if self.dispatcher.num_local_experts == 0:
                # More ranks than blocks of experts. The empty weights stay in the graph, as others without rows do.
                own = [local_weight(self.module, name) for name, _ in self.module.named_parameters(recurse=False)]
                rows = rows + sum(weight.sum() for weight in own)
                # Shared by all experts, hence gathered over all ranks: this one has to come, too.
                return rows if self.spec.post is None else self.spec.post(self.module, rows)
            if self.spec.modules is not None:
                counts = tokens_per_expert.tolist() if tokens_per_expert_host is None else tokens_per_expert_host
                return self.spec.run_modules(self.module, rows, counts)
            if self.backend is None:
                assert self.spec.compute is not None
                return self.spec.compute(self.module, rows, tokens_per_expert)
            mlp = self.spec.mlp(self.module, low_rank_apart=self.backend.low_rank)
            return self.backend(mlp, rows, tokens_per_expert, tokens_per_expert_host)
