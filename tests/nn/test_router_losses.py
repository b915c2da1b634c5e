"""The losses on routers against the formulas written out, and what the observer sees of a model."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_moe.nn import (
    MoE,
    RouterObserver,
    Routing,
    batch_balance_loss,
    router_z_loss,
    sequence_balance_loss,
)

EXPERTS, CHOICES, LENGTH = 6, 2, 5


def routing(score_function: Any = "softmax", batch: int = 3, seed: int = 0) -> Routing:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(batch * LENGTH, EXPERTS, generator=generator).mul(2).requires_grad_()
    # Not the largest logits: where tokens went is what counts, also after a bias or a limit of groups.
    index = torch.rand(batch * LENGTH, EXPERTS, generator=generator).topk(CHOICES)[1]
    return Routing(logits, index, score_function)


def score(function: str, logit: float) -> float:
    if function == "softmax":
        return math.exp(logit)
    if function == "sigmoid":
        return 1 / (1 + math.exp(-logit))
    return math.sqrt(math.log(1 + math.exp(logit)))


def written_out(routings: list[Routing], counted: list[int]) -> tuple[float, float]:
    """The balance loss and the z-loss over the tokens of these positions, one number at a time."""
    balance, z = 0.0, 0.0
    for layer in routings:
        share, mean = [0.0] * EXPERTS, [0.0] * EXPERTS
        for t in counted:
            for e in layer.top_k_index[t].tolist():
                share[e] += 1 / (len(counted) * CHOICES)
            scores = [score(layer.score_function, logit) for logit in layer.logits[t].tolist()]
            for e in range(EXPERTS):
                mean[e] += scores[e] / sum(scores) / len(counted)
            z += math.log(sum(map(math.exp, layer.logits[t].tolist()))) ** 2 / len(counted) / len(routings)
        balance += EXPERTS * sum(f * p for f, p in zip(share, mean, strict=True)) / len(routings)
    return balance, z


def mask_of(lengths: list[int]) -> Tensor:
    return (torch.arange(LENGTH) < torch.tensor(lengths).unsqueeze(1)).long()


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_losses_are_the_formulas(score_function: str) -> None:
    layers = [routing(score_function, seed=seed) for seed in (0, 1)]
    lengths = [5, 2, 0]
    mask = mask_of(lengths)
    sequences = [[row * LENGTH + t for t in range(length)] for row, length in enumerate(lengths)]
    balance, z = sequence_balance_loss(layers, mask), router_z_loss(layers, mask)
    for row in (0, 1):
        expected = written_out(layers, sequences[row])
        assert (balance[row].item(), z[row].item()) == pytest.approx(expected, rel=1e-5)
    assert balance[2] == z[2] == 0
    expected = written_out(layers, [t for sequence in sequences for t in sequence])[0]
    assert batch_balance_loss(layers, mask).item() == pytest.approx(expected, rel=1e-5)


def test_parts_of_ranks_add_up_to_the_whole_batch() -> None:
    whole, mask = routing(batch=4), mask_of([5, 1, 4, 2])
    expected = batch_balance_loss([whole], mask)
    wanted = torch.autograd.grad(expected, whole.logits)[0]
    half = 2 * LENGTH
    parts = [
        Routing(whole.logits[rows], whole.top_k_index[rows], "softmax") for rows in (slice(0, half), slice(half, None))
    ]
    masks = [mask[:2], mask[2:]]
    sent: list[Tensor] = []
    for part, own in zip(parts, masks, strict=True):
        batch_balance_loss([part], own, lambda sums: sent.append(sums) or sums)  # type: ignore[func-returns-value]
    assert len(sent) == 2, "one reduction a batch"
    losses = [
        batch_balance_loss([part], own, lambda _: sent[0] + sent[1]) for part, own in zip(parts, masks, strict=True)
    ]
    assert (losses[0] + losses[1]).item() == pytest.approx(expected.item(), rel=1e-6)
    found = torch.autograd.grad(losses[0] + losses[1], whole.logits)[0]
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("choices", [1, 2, 3])
def test_perfect_balance_is_one_and_collapse_is_experts_over_choices(choices: int) -> None:
    tokens = torch.arange(EXPERTS)
    index = (tokens.unsqueeze(1) + torch.arange(choices)) % EXPERTS  # every expert is chosen `choices` times
    mask = torch.ones(1, EXPERTS)
    balanced = Routing(torch.zeros(EXPERTS, EXPERTS), index, "softmax")
    assert sequence_balance_loss([balanced], mask).item() == pytest.approx(1.0)
    assert batch_balance_loss([balanced], mask).item() == pytest.approx(1.0)
    # All tokens take experts 0..K-1 and give the others no probability: E * sum over K experts of (1/K) * P_e = E / K.
    logits = torch.full((EXPERTS, EXPERTS), -1e4)
    logits[:, :choices] = torch.randn(choices)
    collapsed = Routing(logits, torch.arange(choices).expand(EXPERTS, -1), "softmax")
    assert sequence_balance_loss([collapsed], mask).item() == pytest.approx(EXPERTS / choices)
    assert batch_balance_loss([collapsed], mask).item() == pytest.approx(EXPERTS / choices)


@pytest.mark.parametrize("loss", [sequence_balance_loss, batch_balance_loss, router_z_loss])
def test_padding_changes_nothing(loss: Any) -> None:
    layer, mask = routing(), mask_of([5, 2, 1])
    other = routing(seed=7)
    padding = (mask == 0).flatten().unsqueeze(1)
    changed = Routing(
        torch.where(padding, other.logits, layer.logits),
        torch.where(padding, other.top_k_index, layer.top_k_index),
        "softmax",
    )
    torch.testing.assert_close(loss([changed], mask), loss([layer], mask))
    gradient = torch.autograd.grad(loss([layer], mask).sum(), layer.logits)[0]
    assert not gradient[padding.flatten()].any()
    assert gradient[~padding.flatten()].abs().sum(1).min() > 0


def test_dropped_choices_do_not_count() -> None:
    layer = routing()
    dropped = Routing(layer.logits, layer.top_k_index.index_fill(1, torch.tensor([1]), -1), "softmax")
    first = Routing(layer.logits, layer.top_k_index[:, :1], "softmax")
    mask = torch.ones(3, LENGTH)
    torch.testing.assert_close(sequence_balance_loss([dropped], mask), sequence_balance_loss([first], mask) / 2)


def test_scores_that_underflow_keep_finite_gradients() -> None:
    for score_function in ("sigmoid", "sqrtsoftplus"):
        logits = torch.full((LENGTH, EXPERTS), -200.0, requires_grad=True)
        layer = Routing(logits, torch.zeros(LENGTH, 1, dtype=torch.long), score_function)  # type: ignore[arg-type]
        loss = sequence_balance_loss([layer], torch.ones(1, LENGTH)).sum()
        assert loss.item() == pytest.approx(1.0)
        assert torch.autograd.grad(loss, logits)[0].isfinite().all()


# The observer


class Net(nn.Module):
    """Two layers of ours, optionally under activation checkpointing."""

    def __init__(self, reentrant: bool | None = None, score_function: Any = "softmax") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([MoE(8, 16, EXPERTS, CHOICES, score_function=score_function) for _ in range(2)])
        self.reentrant = reentrant

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            if self.reentrant is None:
                hidden = hidden + layer(hidden)
            else:
                hidden = hidden + checkpoint(layer, hidden, use_reentrant=self.reentrant)
        return hidden


def hidden() -> Tensor:
    return torch.randn(3, LENGTH, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()


def test_observer_sees_each_layer_in_order_and_only_when_asked() -> None:
    net = Net(score_function="sigmoid")
    observer = RouterObserver(net)
    with observer.observe() as seen:
        net(hidden())
    net(hidden())
    assert len(seen) == 2
    logits, _, index = net.layers[0].router(hidden().flatten(0, 1))
    torch.testing.assert_close(seen[0].logits, logits)
    assert torch.equal(seen[0].top_k_index, index)
    assert {layer.score_function for layer in seen} == {"sigmoid"}
    assert seen[1].probabilities().sum(1).detach() == pytest.approx(torch.ones(3 * LENGTH))


def losses_and_gradients(reentrant: bool | None) -> tuple[Tensor, list[Tensor]]:
    net = Net(reentrant)
    mask = mask_of([5, 2, 1])
    with RouterObserver(net).observe() as seen:
        out = net(hidden())
    assert len(seen) == 2
    auxiliary = (
        batch_balance_loss(seen, mask) + sequence_balance_loss(seen, mask).sum() + router_z_loss(seen, mask).sum()
    )
    (out.square().mean() + auxiliary).backward()
    assert len(seen) == 2, "what runs again in the backward pass is not seen"
    return auxiliary.detach(), [parameter.grad for parameter in net.parameters() if parameter.grad is not None]


def test_activation_checkpointing_changes_nothing() -> None:
    plain, checkpointed = losses_and_gradients(None), losses_and_gradients(False)
    torch.testing.assert_close(checkpointed, plain)
    with pytest.raises(RuntimeError, match=r"TopKRouter have no gradient under reentrant.*use_reentrant=False"):
        losses_and_gradients(True)


def test_observer_needs_routers_that_it_can_see() -> None:
    with pytest.raises(ValueError, match="Linear has no experts"):
        RouterObserver(nn.Linear(2, 2))
    layer = MoE(8, 16, EXPERTS, CHOICES)
    del layer.router
    with pytest.raises(ValueError, match=r"'experts' needs one router beside it.*6 rows; found none"):
        RouterObserver(layer)
    net = Net()
    with pytest.raises(RuntimeError, match="none of the model's routers ran"), RouterObserver(net).observe():
        pass
    net(hidden())
    assert not net.layers[0].router._forward_hooks, "nothing is left behind"


def test_the_mask_must_fit_the_tokens() -> None:
    with pytest.raises(ValueError, match=r"must be \[B, L\].*routers saw \(15\); got \[3, 1, 5\]"):
        router_z_loss([routing()], torch.ones(3, 1, 5))
    with pytest.raises(ValueError, match=r"routers saw \(15\); got \[4, 5\]"):
        batch_balance_loss([routing()], torch.ones(4, 5))


# Models of Transformers


def transformers_model(kind: str) -> nn.Module:
    import transformers

    sizes = {
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 16,
        "moe_intermediate_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts_per_tok": 2,
    }
    special: dict[str, dict[str, Any]] = {
        "qwen3_moe": {"num_experts": 4},
        "gpt_oss": {"num_local_experts": 4},
        "deepseek_v3": {
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "first_k_dense_replace": 1,
        },
        "gemma4_text": {
            "num_experts": 4,
            "top_k_experts": 2,
            "enable_moe_block": True,
            "hidden_size_per_layer_input": 0,
        },
        "phimoe": {"num_local_experts": 4},
    }
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **sizes, **special[kind])
    return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(
    ("kind", "score_function", "layers"),
    [
        ("qwen3_moe", "softmax", 2),
        ("gpt_oss", "softmax", 2),
        ("deepseek_v3", "sigmoid", 1),
        ("gemma4_text", "softmax", 2),
    ],
)
def test_routers_of_transformers_are_understood(kind: str, score_function: str, layers: int) -> None:
    model = transformers_model(kind)
    with RouterObserver(model).observe() as seen:
        model(input_ids=torch.arange(16).view(2, 8))
    assert [(r.score_function, list(r.logits.shape), list(r.top_k_index.shape)) for r in seen] == [
        (score_function, [16, 4], [16, 2])
    ] * layers
    for layer in seen:
        assert (layer.logits < 0).any(), "logits, not probabilities"


def test_a_router_whose_scores_are_unclear_is_an_error_that_an_option_settles() -> None:
    model = transformers_model("phimoe")
    with pytest.raises(ValueError, match=r"cannot tell how PhimoeTopKRouter.*set\s+router_score_function of CausalLM"):
        RouterObserver(model)
    assert RouterObserver(model, "softmax")
    with pytest.raises(ValueError, match="score function 'tanh' must be one of 'auto', 'softmax'"):
        RouterObserver(model, "tanh")  # type: ignore[arg-type]
