"""Experts classes of Transformers that do not go through its experts interface, against their own forward."""

import importlib
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.modeling_outputs import CausalLMOutput

from lightning_moe.dispatch.local import LocalDispatcher
from lightning_moe.experts import FoundExperts, experts_spec, find_experts
from lightning_moe.parallel.routed import RoutedExperts
from lightning_moe.precision import MoEPrecision
from tests import tiny
from tests.harness import run_ranks, run_ranks_expecting_error
from tests.test_parity import assert_same
from tests.test_strategy import fit

STEPS = 3
COMMON = {"vocab_size": tiny.VOCABULARY, "hidden_size": 32, "initializer_range": 0.2}
ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 4}
SEQ2SEQ = {"vocab_size": tiny.VOCABULARY, "d_model": 32, "num_experts": 4, "decoder_start_token_id": 0}


def classes(family: str, *names: str) -> list[Any]:
    module = importlib.import_module(f"transformers.models.{family}")
    return [getattr(module, name) for name in names]


def block_of(model: nn.Module, cls: str) -> Any:
    return next(module for module in model.modules() if type(module).__name__ == cls)


def step3p7() -> nn.Module:
    config, model = classes("step3p7", "Step3p7TextConfig", "Step3p7TextModel")
    sizes = {**COMMON, **ATTENTION, "num_hidden_layers": 2, "head_dim": 8, "intermediate_size": 32}
    # Bounds that cut something off in the first layer, and none in the second.
    limits = {
        "swiglu_limits": [0.05, 0.0],
        "mlp_layer_types": ["sparse", "sparse"],
        "share_expert_dim": 16,
        "sliding_window": 4,
    }
    return WithHead(
        model(config(**sizes, **limits, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16))
    )


def longcat_flash() -> nn.Module:
    config, model = classes("longcat_flash", "LongcatFlashConfig", "LongcatFlashForCausalLM")
    latent = {
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "head_dim": 8,
    }
    experts = {"n_routed_experts": 4, "zero_expert_num": 3, "moe_topk": 3, "expert_ffn_hidden_size": 16}
    return model(config(**COMMON, **ATTENTION, **latent, **experts, num_layers=2, ffn_hidden_size=32))


def dbrx(width: int = 24, num_experts: int = 4) -> nn.Module:
    config, model = classes("dbrx", "DbrxConfig", "DbrxForCausalLM")
    sizes = {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64, "vocab_size": tiny.VOCABULARY}
    experts = {"hidden_size": 32, "ffn_hidden_size": width, "moe_num_experts": num_experts, "moe_top_k": 2}
    attention = {"kv_n_heads": 4, "rope_theta": 10000.0, "clip_qkv": 8.0}
    result = model(config(**sizes, ffn_config=experts, attn_config=attention, initializer_range=0.2))
    if block_of(result, "DbrxRouter").layer.in_features != 32:
        return dbrx(32, num_experts)  # Transformers 5.11 takes the width of the experts for that of the tokens
    return result


def llama4() -> nn.Module:
    config, model = classes("llama4", "Llama4TextConfig", "Llama4ForCausalLM")
    sizes = {**COMMON, **ATTENTION, "num_hidden_layers": 2, "head_dim": 8, "intermediate_size": 16}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size_mlp": 32}
    return model(config(**sizes, **experts, pad_token_id=0))


def switch_transformers() -> nn.Module:
    config, model = classes(
        "switch_transformers", "SwitchTransformersConfig", "SwitchTransformersForConditionalGeneration"
    )
    sizes = {"d_kv": 8, "d_ff": 24, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
    # So few that some tokens have no expert.
    routing = {"expert_capacity": 3, "router_jitter_noise": 0.0}
    sparse = {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
    return model(config(**SEQ2SEQ, **sizes, **routing, **sparse))


def nllb_moe() -> nn.Module:
    config, model = classes("nllb_moe", "NllbMoeConfig", "NllbMoeForConditionalGeneration")
    sides = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in {
            "layers": 2,
            "ffn_dim": 23,
            "attention_heads": 4,
            "sparse_step": 2,
            "layerdrop": 0.0,
        }.items()
    }
    no_dropout = {"dropout": 0.0, "attention_dropout": 0.0, "moe_token_dropout": 0.0}
    # The capacity counts the tokens of a batch, which differ between ranks and one process.
    result = model(config(**SEQ2SEQ, **sides, **no_dropout, expert_capacity=10_000, init_std=0.2))
    for name, parameter in result.named_parameters():
        # A bias of all keys changes nothing: its gradient is rounding noise, which cannot be compared.
        parameter.requires_grad_(not name.endswith("k_proj.bias"))
    return result


def jetmoe() -> nn.Module:
    config, model = classes("jetmoe", "JetMoeConfig", "JetMoeForCausalLM")
    sizes = {"num_hidden_layers": 2, "num_key_value_heads": 2, "kv_channels": 8, "intermediate_size": 24}
    return model(config(**COMMON, **sizes, num_local_experts=4, num_experts_per_tok=2))


BUILDERS: dict[str, Callable[[], nn.Module]] = {
    function.__name__: function  # type: ignore[attr-defined]
    for function in (step3p7, longcat_flash, dbrx, llama4, switch_transformers, nllb_moe, jetmoe)
}
# Experts modules of each model above.
FOUND = {
    "step3p7": 2,
    "longcat_flash": 2,
    "dbrx": 2,
    "llama4": 2,
    "switch_transformers": 2,
    "nllb_moe": 2,
    "jetmoe": 8,  # two linear layers around each attention and two in each MLP
}
FAMILIES = [name for name in BUILDERS if importlib.util.find_spec(f"transformers.models.{name}")]


class WithHead(nn.Module):
    """A language model around one that returns hidden states."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.head = nn.Linear(32, tiny.VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        logits = self.head(self.model(input_ids=input_ids).last_hidden_state)
        return CausalLMOutput(loss=nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))


def train(
    families: list[str], options: dict[str, Any] | None, settings: dict[str, Any] | None = None
) -> dict[str, dict[str, Any]]:
    return {family: train_one(family, options, settings or {}) for family in families}


def train_one(family: str, options: dict[str, Any] | None, settings: dict[str, Any]) -> dict[str, Any]:
    pl.seed_everything(0, verbose=False)
    module = tiny.TinyLM(tiny.sgd, build=BUILDERS[family], keep_gradients=True)
    plain = {name: value.shape for name, value in module.state_dict().items()}
    strategy = "auto" if options is None else tiny.moe_ep(**options)
    fit(module, strategy, steps=STEPS, gradient_clip_val=1.0, **settings)
    return {
        "losses": module.losses,
        "norms": module.norms,
        "gradients": module.gradients,
        "weights": tiny.weights(module),
        "plain": plain,
        "state": {name: value.shape for name, value in module.state_dict().items()},
        "held": {found.name: held(found) for found in find_experts(module)},
    }


def held(found: FoundExperts) -> dict[str, tuple[int, int]]:
    """Rows of each stacked weight of this rank and of all, or the experts that are modules."""
    if found.spec.modules is not None:
        own = sum(next(child.parameters(), None) is not None for child in found.module.children())
        return {"modules": (own, found.num_experts)}
    parameters = found.spec.parameters(found.module)
    return {
        name: ((p.to_local() if isinstance(p, DTensor) else p).shape[0], p.shape[0]) for name, p in parameters.items()
    }


def merged(ranks: list[dict[str, dict[str, Any]]], family: str) -> dict[str, Any]:
    """One result of all ranks: those that keep experts as modules hold different ones."""
    result = dict(ranks[0][family])
    for kind in ("gradients", "weights", "state"):
        result[kind] = {name: value for rank in ranks for name, value in rank[family][kind].items()}
    return result


@pytest.fixture(scope="module")
def one_process() -> dict[str, dict[str, Any]]:
    """Plain Lightning and the forwards of Transformers."""
    return run_ranks(train, 1, FAMILIES, None)[0]


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, dict[str, Any]]]:
    return run_ranks(train, 2, FAMILIES, {"expert_parallel_size": 2}, timeout=200)


@pytest.mark.parametrize("family", FAMILIES)
def test_same_as_its_own_forward(
    one_process: dict[str, dict[str, Any]], two_ranks: list[dict[str, dict[str, Any]]], family: str
) -> None:
    assert_same([merged(two_ranks, family)], [one_process[family]])


@pytest.mark.parametrize("family", FAMILIES)
def test_each_rank_holds_its_share(two_ranks: list[dict[str, dict[str, Any]]], family: str) -> None:
    ours = merged(two_ranks, family)
    assert ours["state"] == ours["plain"], "a checkpoint keeps its keys and shapes"
    assert len(ours["held"]) == FOUND[family]
    for name in ours["held"]:
        first, second = (rank[family]["held"][name] for rank in two_ranks)
        for weight, (rows, whole) in first.items():
            assert (rows, second[weight][0]) == (-(-whole // 2), whole // 2), f"{name}.{weight}"


def test_unused_rows_of_longcat_flash_keep_their_values(two_ranks: list[dict[str, dict[str, Any]]]) -> None:
    ours = merged(two_ranks, "longcat_flash")
    for name in ("net.model.layers.0.mlp.experts.gate_up_proj", "net.model.layers.1.mlp.experts.gate_up_proj"):
        assert ours["weights"][name].shape[0] == 7
        assert not ours["gradients"][name][4:].any()
        assert (ours["gradients"][name][:4].flatten(1).norm(dim=1) > 0).all()


def test_without_expert_parallelism(one_process: dict[str, dict[str, Any]]) -> None:
    families = ["longcat_flash", "dbrx"]
    ranks = run_ranks(train, 2, families, {"expert_parallel_size": 1}, timeout=200)
    for family in families:
        assert_same([merged(ranks, family)], [one_process[family]])


def test_mixed_precision(one_process: dict[str, dict[str, Any]]) -> None:
    """Routers compute in float32 apart from the rest; no score may carry that dtype into what follows."""
    ranks = run_ranks(train, 2, FAMILIES, {"expert_parallel_size": 2}, {"precision": "bf16-mixed"}, timeout=200)
    for family in FAMILIES:
        # bfloat16 has 8 bits: the losses, around 5, are some 0.02 apart.
        torch.testing.assert_close(ranks[0][family]["losses"], one_process[family]["losses"], rtol=0.01, atol=0)


def fit_switch_transformers(router_dtypes: list[torch.dtype]) -> list[list[float]]:
    results = []
    for dtype in router_dtypes:
        pl.seed_everything(0, verbose=False)
        module = tiny.TinyLM(tiny.sgd, build=switch_transformers)
        for router in module.modules():
            if hasattr(router, "jitter_noise"):
                router.jitter_noise = 0.01
        fit(module, tiny.moe_ep(expert_parallel_size=2), steps=STEPS, plugins=[MoEPrecision("bf16-mixed", dtype)])
        results.append(module.losses)
    return results


def test_routers_that_cast_their_weight_and_change_their_input(one_process: dict[str, dict[str, Any]]) -> None:
    expected = one_process["switch_transformers"]["losses"]
    for losses in run_ranks(fit_switch_transformers, 2, [torch.float32, torch.bfloat16])[0]:
        torch.testing.assert_close(losses, expected, rtol=0.01, atol=0)


# What cannot be


def uneven() -> None:
    fit(tiny.TinyLM(build=partial(dbrx, num_experts=3)), tiny.moe_ep(expert_parallel_size=2))


def test_experts_that_cannot_be_divided() -> None:
    first, second = run_ranks_expecting_error(uneven, 2, timeout=60)
    assert first == second
    for part in ("ValueError", "expert_parallel_size=2", "blocks.0.ffn.experts", "3 experts", "one of 1, 3"):
        assert part in first


def test_a_class_that_changed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = dbrx()
    (experts,) = classes("dbrx.modeling_dbrx", "DbrxExperts")
    monkeypatch.setattr(experts, "forward", lambda self, hidden_states, routes: hidden_states)
    with pytest.raises(
        NotImplementedError, match=r"called as \(hidden_states, routes\).*register_experts\(DbrxExperts"
    ):
        find_experts(model)


def test_forwards_of_users_are_left_alone() -> None:
    model = llama4()
    experts = model.model.layers[0].feed_forward.experts  # type: ignore[union-attr, index]
    assert experts_spec(experts, model.model.layers[0].feed_forward) is not None  # type: ignore[union-attr, index]
    assert experts_spec(experts, nn.Sequential(experts)) is None, "a block of the user calls it in a way of its own"

    class Own(type(experts)):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor) -> Tensor:
            return hidden_states

    experts.__class__ = Own
    assert len(find_experts(model)) == 1


# What the parity above leaves out


def install_locally(model: nn.Module) -> None:
    for found in find_experts(model):
        dispatcher = LocalDispatcher()
        dispatcher.setup(None, num_experts=found.num_experts, hidden_size=32, dtype=torch.float32)
        found.spec.install(found.module, RoutedExperts(found.module, found.spec, dispatcher, None, torch.float32))


def test_the_noise_of_dbrx_reaches_its_experts() -> None:
    torch.manual_seed(0)
    model = dbrx()
    block = block_of(model, "DbrxFFN")
    block.router.moe_jitter_eps = 0.5
    hidden, results = torch.randn(2, 5, 32), []
    for _ in range(2):
        torch.manual_seed(1)
        results.append(block(hidden.clone()))  # the router changes it in place
        install_locally(model)
    torch.testing.assert_close(results[1], results[0])
    torch.manual_seed(2)
    assert not torch.allclose(block(hidden), results[0])
    model.eval()
    torch.testing.assert_close(block(hidden), block(hidden))


@pytest.mark.filterwarnings("ignore:NllbMoeExperts")
def test_token_dropout_of_nllb_moe() -> None:
    torch.manual_seed(0)
    model = nllb_moe().eval()
    block = block_of(model, "NllbMoeSparseMLP")
    block.experts.moe_token_dropout = block.experts.token_dropout.p = 0.25
    hidden = torch.randn(2, 5, 32)
    expected = block(hidden)
    install_locally(model)
    torch.testing.assert_close(block(hidden), expected)
    model.train()
    assert not torch.allclose(block(hidden), block(hidden)), "in training results drop out at random"


def test_nllb_moe_of_a_release_that_runs_the_chosen_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Any, hidden_states: Tensor, router_mask: Tensor, router_probs: Tensor) -> Tensor:
        experts = [self[f"expert_{number}"] for number in range(self.num_experts)]
        return sum(expert(hidden_states) * router_probs[:, n, None] for n, expert in enumerate(experts))

    torch.manual_seed(0)
    model = nllb_moe()
    block = block_of(model, "NllbMoeSparseMLP")
    hidden = torch.randn(2, 5, 32)
    with pytest.warns(UserWarning, match="experts 0 and 1 for all tokens"):
        find_experts(model)
    before = block(hidden)
    monkeypatch.setattr(classes("nllb_moe.modeling_nllb_moe", "NllbMoeExperts")[0], "forward", forward)
    expected = block(hidden)
    install_locally(model)
    torch.testing.assert_close(block(hidden), expected)
    assert not torch.allclose(before, expected)
