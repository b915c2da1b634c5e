"""Every backend against the loop, and the loop against each expert computed by hand."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_moe.experts import ExpertsMLP, ExpertsSpec, backend_options, choose_backend
from lightning_moe.experts.grouped_mm import GroupedMMBackend
from lightning_moe.experts.loop import LoopBackend

E, H, I = 4, 8, 16  # noqa: E741
COUNTS = [[3, 0, 5, 1], [0, 0, 0, 0], [0, 0, 7, 0]]


def gate(rows: Tensor) -> Tensor:
    gate, up = rows.chunk(2, dim=-1)
    return F.silu(gate) * up


def make(dtype: torch.dtype, bias: bool) -> tuple[ExpertsMLP, list[Tensor]]:
    generator = torch.Generator().manual_seed(0)

    def weight(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) * 0.3).to(dtype).requires_grad_()

    up, down = weight(E, 2 * I, H), weight(E, H, I)
    biases = [weight(E, 2 * I), weight(E, H)] if bias else [None, None]
    mlp = ExpertsMLP(up.transpose(1, 2), down.transpose(1, 2), gate, *biases, post=torch.tanh if bias else None)
    return mlp, [up, down, *(b for b in biases if b is not None)]


def run(backend: object, counts: list[int], dtype: torch.dtype, bias: bool, on_host: bool = True) -> list[Tensor]:
    mlp, leaves = make(dtype, bias)
    rows = torch.randn(sum(counts), H, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    out = backend(mlp, rows, torch.tensor(counts), counts if on_host else None)  # type: ignore[operator]
    (out * torch.arange(H).to(dtype)).sum().backward()
    assert all(leaf.grad is not None for leaf in (rows, *leaves)), "zero, not None, without rows"
    return [out.detach(), rows.grad, *(leaf.grad for leaf in leaves)]  # type: ignore[list-item]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("counts", COUNTS)
def test_loop_is_each_expert_by_hand(counts: list[int], bias: bool) -> None:
    (
        out,
        *_,
    ) = run(LoopBackend(), counts, torch.float32, bias)
    mlp, _ = make(torch.float32, bias)
    rows = torch.randn(sum(counts), H, generator=torch.Generator().manual_seed(1))
    start = 0
    for expert, count in enumerate(counts):
        for x, y in zip(rows[start : start + count], out[start : start + count], strict=True):
            hidden = x @ mlp.up[expert] + (mlp.up_bias[expert] if mlp.up_bias is not None else 0)
            expected = gate(hidden) @ mlp.down[expert] + (mlp.down_bias[expert] if mlp.down_bias is not None else 0)
            torch.testing.assert_close(y, torch.tanh(expected) if bias else expected)
        start += count


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_mm_is_the_loop(dtype: torch.dtype, counts: list[int], bias: bool, on_host: bool) -> None:
    ours = run(GroupedMMBackend(), counts, dtype, bias, on_host)
    reference = run(LoopBackend(), counts, dtype, bias, on_host)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 5e-2, "atol": 0.1}
    for a, b in zip(ours, reference, strict=True):
        torch.testing.assert_close(a, b, **tolerance)


def test_bias_gradients_of_many_rows_are_exact_in_bfloat16() -> None:
    rows = 3000  # ones added up in bfloat16 would stop at 256
    mlp = ExpertsMLP(
        up=torch.zeros(1, H, I, dtype=torch.bfloat16),
        down=torch.zeros(1, I, H, dtype=torch.bfloat16),
        activation=torch.tanh,
        up_bias=torch.zeros(1, I, dtype=torch.bfloat16, requires_grad=True),
        down_bias=torch.zeros(1, H, dtype=torch.bfloat16, requires_grad=True),
    )
    x = torch.zeros(rows, H, dtype=torch.bfloat16)
    GroupedMMBackend()(mlp, x, torch.tensor([rows]), None).backward(torch.ones(rows, H, dtype=torch.bfloat16))
    assert mlp.down_bias is not None
    assert (mlp.down_bias.grad == torch.tensor(float(rows)).bfloat16()).all()


class Mine(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.w1 = torch.nn.Parameter(torch.zeros(E, width, H))
        self.w2 = torch.nn.Parameter(torch.zeros(E, H, width))


SPEC = ExpertsSpec(up="w1", down="w2", activation=lambda module, rows: rows)


def test_auto_takes_what_can_compute_and_says_why_not() -> None:
    cpu = torch.device("cpu")
    backend, reason = choose_backend("auto", SPEC, Mine(16), torch.float32, cpu)
    assert backend is not None
    assert (backend.name, reason) == ("grouped_mm", "")
    backend, reason = choose_backend("auto", SPEC, Mine(50), torch.bfloat16, cpu)
    assert backend is not None
    assert backend.name == "loop"
    assert "multiple of 8 in bfloat16, got 50" in reason
    with pytest.raises(ValueError, match=r"experts_backend='grouped_mm' cannot compute Mine: .*got 50; set"):
        choose_backend("grouped_mm", SPEC, Mine(50), torch.bfloat16, cpu)
    backend, reason = choose_backend("auto", SPEC, Mine(16), torch.float64, cpu)
    assert backend is not None
    assert backend.name == "loop"
    own = ExpertsSpec(compute=lambda module, rows, counts: rows)
    assert choose_backend("auto", own, Mine(16), torch.float32, cpu) == (None, "")
    with pytest.raises(ValueError, match="registered with compute="):
        choose_backend("loop", own, Mine(16), torch.float32, cpu)


def test_options_say_why() -> None:
    options = backend_options()
    assert options["loop"] == options["grouped_mm"] == ""
    assert set(options) == {"loop", "grouped_mm", "te"}
