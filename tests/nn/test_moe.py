"""The layer in plain PyTorch, without any strategy."""

import pytest
import torch
import torch.nn.functional as F

from lightning_moe.nn import GroupedExperts, MoE, TopKRouter


@pytest.mark.parametrize("gated", [True, False])
def test_layer_is_the_weighted_sum_of_its_experts(gated: bool) -> None:
    torch.manual_seed(0)
    layer = MoE(8, 16, num_experts=4, top_k=2, gated=gated, shared_expert=torch.nn.Linear(8, 8))
    hidden = torch.randn(2, 3, 8)
    out = layer(hidden)
    assert out.shape == hidden.shape
    logits, weights, index = layer.router(hidden.flatten(0, 1))
    torch.testing.assert_close(
        weights, F.softmax(logits, -1).gather(1, index) / F.softmax(logits, -1).topk(2)[0].sum(1, True)
    )
    experts = layer.experts
    for t, x in enumerate(hidden.flatten(0, 1)):
        expected = layer.shared_expert(x)
        for k in range(2):
            e = int(index[t, k])
            if gated:
                gate, up = (experts.gate_up_proj[e] @ x).chunk(2)
                inner = F.silu(gate) * up
            else:
                inner = F.silu(experts.up_proj[e] @ x)
            expected = expected + weights[t, k] * (experts.down_proj[e] @ inner)
        torch.testing.assert_close(out.flatten(0, 1)[t], expected)


def test_sigmoid_scores_and_no_normalisation() -> None:
    router = TopKRouter(8, 4, 2, score_function="sigmoid", normalize=False)
    logits, weights, index = router(torch.randn(5, 8))
    torch.testing.assert_close(weights, logits.sigmoid().gather(1, index))
    assert (weights.diff(dim=1) <= 0).all()


def test_router_computes_in_float32_in_a_bfloat16_model_and_under_autocast() -> None:
    router = TopKRouter(8, 4, 2).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits, weights, _ = router(torch.randn(5, 8).bfloat16())
    assert logits.dtype == weights.dtype == torch.float32
    assert not torch.equal(logits, logits.bfloat16().float())


def test_no_tokens_and_dropped_choices() -> None:
    layer = MoE(8, 16, 4, 2)
    out = layer(torch.zeros(0, 8))
    out.sum().backward()
    assert out.shape == (0, 8)
    assert all(p.grad is not None and not p.grad.any() for p in layer.experts.parameters())
    experts = GroupedExperts(4, 8, 16)
    index = torch.tensor([[0, -1], [-1, -1]])
    out = experts(torch.randn(2, 8), index, torch.ones(2, 2))
    assert out[0].any()
    assert not out[1].any()


def test_bad_options() -> None:
    with pytest.raises(ValueError, match="top_k=5 must be between 1 and num_experts=4"):
        TopKRouter(8, 4, 5)
    with pytest.raises(ValueError, match="score_function='tanh' is not known"):
        TopKRouter(8, 4, 2, score_function="tanh")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="activation='tanh' is not known"):
        GroupedExperts(4, 8, 16, activation="tanh")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"hidden_states \[T, H\].*got \[2, 8\], \[3, 1\]"):
        GroupedExperts(4, 8, 16)(torch.zeros(2, 8), torch.zeros(3, 1, dtype=torch.long), torch.zeros(3, 1))
