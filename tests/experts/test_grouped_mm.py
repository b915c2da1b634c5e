"""What the backend relies on in PyTorch's grouped product, and what it makes good."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_moe.experts import ExpertsMLP
from lightning_moe.experts.grouped_mm import GroupedMMBackend
from lightning_moe.experts.loop import LoopBackend
from lightning_moe.experts.peft import LowRank
from tests.experts.test_backends import COUNTS, E, H, I, gate

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu(1))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("transposed", [False, True])
def test_rows_after_the_last_offset_are_never_read(device: str, transposed: bool) -> None:
    counts, rest = [3, 0, 5, 1], 4
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(sum(counts) + rest, H, generator=generator).to(device, torch.bfloat16)
    rows[sum(counts) :] = torch.nan
    rows.requires_grad_()
    stored = torch.randn(E, *((H, I) if transposed else (I, H)), generator=generator).to(device, torch.bfloat16)
    stored.requires_grad_()
    weight = stored if transposed else stored.transpose(1, 2)
    offsets = torch.tensor(counts, device=device).cumsum(0, dtype=torch.int32)
    out = F.grouped_mm(rows, weight, offs=offsets)[: sum(counts)]
    gradient = torch.randn(sum(counts), I, generator=generator).to(device, torch.bfloat16)
    out.backward(gradient)
    assert rows.grad is not None
    assert stored.grad is not None
    assert out.isfinite().all()
    assert rows.grad[: sum(counts)].isfinite().all()
    assert stored.grad.isfinite().all(), "a gradient of a weight that sums over NaN rows"
    assert stored.grad.is_contiguous(), "FSDP2 would copy it before the reduction"
    assert not stored.grad[1].any()
    start = 0
    for expert, count in enumerate(counts):
        x = rows.detach()[start : start + count].float()
        expected = x.T @ gradient[start : start + count].float()
        mine = stored.grad[expert].float()
        torch.testing.assert_close(mine if transposed else mine.T, expected, rtol=2e-2, atol=2e-2)
        start += count


class Garbage(torch.autograd.Function):
    """A weight whose gradient is NaN for experts without rows, as a kernel that leaves memory unwritten may give."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, empty: Tensor) -> Tensor:
        ctx.save_for_backward(empty)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (empty,) = ctx.saved_tensors
        return grad.masked_fill(empty.view(-1, 1, 1), torch.nan), None


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("counts", COUNTS)
def test_no_rows_no_gradient_on_blackwell(monkeypatch: pytest.MonkeyPatch, counts: list[int], on_host: bool) -> None:
    product, empty = F.grouped_mm, torch.tensor(counts) == 0

    def with_garbage(rows: Tensor, weight: Tensor, *, offs: Tensor) -> Tensor:
        return product(rows, Garbage.apply(weight, empty), offs=offs)

    def gradients(backend: Any) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        leaves = [
            torch.randn(shape, generator=generator).requires_grad_()
            for shape in ((E, 2 * I, H), (E, H, I), (E, H, 2), (E, 2, 2 * I))
        ]
        up, down, first, second = leaves
        mlp = ExpertsMLP(up.transpose(1, 2), down.transpose(1, 2), gate, up_low_rank=LowRank(first, second))
        rows = torch.randn(sum(counts), H, generator=generator)
        backend(mlp, rows, torch.tensor(counts), counts if on_host else None).square().sum().backward()
        return [leaf.grad for leaf in leaves]  # type: ignore[misc]

    expected = gradients(LoopBackend())
    monkeypatch.setattr(F, "grouped_mm", with_garbage)
    if any(counts):
        assert any(g.isnan().any() for g in gradients(GroupedMMBackend())), "the stand-in of the kernel does nothing"
    monkeypatch.setattr(GroupedMMBackend, "fills_empty_gradients", lambda self, device: True)
    for ours, reference in zip(gradients(GroupedMMBackend()), expected, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-4)


def test_nothing_is_masked_elsewhere() -> None:
    assert not GroupedMMBackend().fills_empty_gradients(torch.device("cpu"))
