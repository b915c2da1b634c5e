"""HybridEP: ``deep_ep.HybridEPBuffer``."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from typing_extensions import override

from lightning_moe.dispatch.deepep.shared import BufferTransport, known
from lightning_moe.dispatch.permute import Routing
from lightning_moe.dispatch.transport import Received
from lightning_moe.in_flight import InFlight, arrived

_ALIGN = 64  # ranks bring a multiple of this many tokens


@dataclass(frozen=True)
class Route:
    """What a dispatch leaves behind for the way back.

    Attributes:
        buffer: The buffer that it went through.
        handle: The library's own.
        index: ``[T, K]`` int64, where the weights of a token are in its row of weights of all experts.
        padded: Tokens of each rank with the padding.
        num_rows: Rows that came here.
    """

    buffer: Any
    handle: Any
    index: Tensor
    padded: int
    num_rows: int


class HybridTransport(BufferTransport):
    """Every rank brings as many tokens: they are padded with tokens that go nowhere.

    Rows arrive once for each expert and sorted by expert, so each is a visit of its own with one choice. The library
    has no call that leaves this rank to go on.
    """

    class_name = "HybridEPBuffer"
    hidden_multiple = 16
    capacity_multiple = 128

    @override
    def check(self) -> None:
        super().check()
        if self.layer.num_experts % 4:
            self.refuse("a number of experts that is a multiple of 4", f"{self.layer.num_experts}")

    @override
    def open(self, capacity: int, top_k: int) -> Any:
        num_sms = self.options.num_sms
        return self.buffer_class(
            group=self.layer.group,
            hidden_dim=self.layer.hidden_size,
            max_num_of_tokens_per_rank=-(-capacity // _ALIGN) * _ALIGN,
            num_local_experts=self.layer.num_local,
            **known(self.buffer_class, num_sms_dispatch_api=num_sms, num_sms_combine_api=num_sms),
            **known(self.buffer_class, explicitly_destroy=True),
        )

    @override
    def send(
        self, rows: Tensor, index: Tensor, weights: Tensor, choices_per_expert: Tensor, plan: None, asynchronous: bool
    ) -> InFlight[Received]:
        layer = self.layer
        key = (layer.group, layer.hidden_size, layer.num_local)
        most, capacity = self.agree(key, rows.shape[0], rows.device)
        padded = -(-max(most, 1) // _ALIGN) * _ALIGN
        weight_of_expert = torch.zeros(padded, layer.num_experts + 1, device=rows.device)
        # Added up, so that an expert that a token chooses twice counts twice. Column 0 takes the dropped choices.
        weight_of_expert[: rows.shape[0]].scatter_add_(1, index + 1, weights)
        chosen = torch.zeros_like(weight_of_expert, dtype=torch.bool)
        chosen[: rows.shape[0]].scatter_(1, index + 1, True)
        with self.shared.guard():
            buffer = self.buffer(key, index.shape[1], capacity)
            came, came_weights, _, counts, handle = buffer.dispatch_with_permute(
                hidden=_pad(rows, padded),
                routing_map=chosen[:, 1:].contiguous(),
                probs=weight_of_expert[:, 1:].contiguous(),
                **known(self.buffer_class.dispatch_with_permute, num_of_experts_per_rank=layer.num_local),
            )
        on_host: list[int] = counts.tolist()
        tokens_per_expert = counts.to(device=rows.device, dtype=torch.int64)
        num_rows = sum(on_host)
        return arrived(
            Received(
                rows=came,
                weights=came_weights.unsqueeze(1),
                # A row is a choice of its own, and they lie sorted.
                local=Routing(None, tokens_per_expert, num_rows, 1, complete=True),
                tokens_per_expert_host=on_host,
                handle=Route(buffer, handle, index, padded, num_rows),
            )
        )

    @override
    def send_again(self, rows: Tensor, handle: Route, asynchronous: bool) -> InFlight[Tensor]:
        with self.shared.guard():
            came: Tensor = handle.buffer.dispatch_with_permute(
                hidden=_pad(rows, handle.padded), handle=handle.handle, num_permuted_tokens=handle.num_rows
            )[0]
        return arrived(came)

    @override
    def bring_back(
        self, rows: Tensor, weights: Tensor | None, handle: Route, asynchronous: bool
    ) -> InFlight[tuple[Tensor, Tensor | None]]:
        num_tokens, valid = handle.index.shape[0], handle.index >= 0
        with self.shared.guard():
            back, of_experts = handle.buffer.combine_with_unpermute(
                hidden=rows.contiguous(),
                probs=None if weights is None else weights.float().reshape(-1).contiguous(),
                handle=handle.handle,
            )
        # Nothing says what it writes for a token that went nowhere, or for an expert that a token did not choose.
        back = torch.where(valid.any(1, keepdim=True), back[:num_tokens], 0.0)
        if weights is None:
            return arrived((back, None))
        return arrived((back, torch.where(valid, of_experts[:num_tokens].gather(1, handle.index.clamp_min(0)), 0.0)))


def _pad(rows: Tensor, padded: int) -> Tensor:
    """Add rows of zeros at the end."""
    return pad(rows, (0, 0, 0, padded - rows.shape[0])).contiguous()
