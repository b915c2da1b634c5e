"""One rank holds every expert: sort, and nothing to send."""

from typing import Any

from torch import Tensor
from typing_extensions import override

from lightning_moe.dispatch.base import Dispatched, Dispatcher, DispatcherCaps
from lightning_moe.dispatch.permute import (
    choices_to_rows,
    count_experts,
    make_routing,
    rows_to_tokens,
    sort_choices,
    tokens_to_rows,
)


class LocalDispatcher(Dispatcher):
    """Sorts rows by expert on one rank. Used for ``expert_parallel_size=1`` and outside of any strategy."""

    name = "local"
    caps = DispatcherCaps(max_ranks=1, expert_major=True)

    @override
    def dispatch(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Dispatched:
        counts = count_experts(top_k_index, self.num_experts)
        sorted_choices = sort_choices(top_k_index)
        counts_host: list[int] = counts.tolist()
        tokens_per_expert_host = counts_host[1:]
        routing = make_routing(top_k_index, sorted_choices, counts[1:], sum(tokens_per_expert_host))
        return Dispatched(
            rows=tokens_to_rows(hidden_states, routing),
            row_weights=choices_to_rows(top_k_weights.float(), routing),
            tokens_per_expert=routing.tokens_per_expert,
            tokens_per_expert_host=tokens_per_expert_host,
            choices_per_expert=routing.tokens_per_expert,
            state=routing,
        )

    @override
    def combine(self, expert_rows: Tensor, state: Any) -> Tensor:
        return rows_to_tokens(expert_rows, state)
