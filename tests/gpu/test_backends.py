"""Backends on CUDA: what kernels do with empty experts, no rows at all, and many rows in bfloat16."""

import pytest
import torch

from lightning_moe.experts import ExpertsMLP
from lightning_moe.experts.grouped_mm import GroupedMMBackend
from lightning_moe.experts.loop import LoopBackend
from tests.experts.test_backends import gate

E, H, I = 4, 64, 128  # noqa: E741


def run(backend: object, counts: list[int], dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def weight(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * 0.1).to("cuda", dtype).requires_grad_()

    up, down, up_bias, down_bias = weight(E, 2 * I, H), weight(E, H, I), weight(E, 2 * I), weight(E, H)
    mlp = ExpertsMLP(up.transpose(1, 2), down.transpose(1, 2), gate, up_bias, down_bias)
    rows = weight(sum(counts), H)
    out = backend(mlp, rows, torch.tensor(counts, device="cuda"), counts)  # type: ignore[operator]
    out.backward(torch.ones_like(out))
    return [out, *(leaf.grad for leaf in (rows, up, down, up_bias, down_bias))]  # type: ignore[list-item]


@pytest.mark.gpu(1)
@pytest.mark.parametrize("counts", [[3, 0, 5, 1], [0, 0, 0, 0], [0, 7, 0, 1], [5000, 1, 0, 3000]])
def test_grouped_mm_is_the_loop_in_float32(counts: list[int]) -> None:
    if GroupedMMBackend().unsuitable((torch.Size([E, H, I]),), torch.bfloat16, torch.device("cuda")):
        pytest.skip("this GPU has no grouped_mm kernel")
    poison = [torch.full((1 << 22,), float("nan"), device="cuda") for _ in range(8)]
    del poison  # memory that a kernel leaves unwritten now holds NaN
    ours = run(GroupedMMBackend(), counts, torch.bfloat16)
    reference = run(LoopBackend(), counts, torch.float32)
    for a, b in zip(ours, reference, strict=True):
        assert a.isfinite().all()
        torch.testing.assert_close(a.float(), b, rtol=5e-2, atol=2e-2 * (1 + float(b.abs().max() if b.numel() else 0)))
    empty = [expert for expert, count in enumerate(counts) if count == 0]
    assert all(not gradient[empty].any() for gradient in ours[2:]), "no rows, no gradient"
