"""Weights from the hub format: equal to Transformers' own, and each rank reads no more than its part."""

import copy
import itertools
import json
import os
import weakref
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from lightning_moe.checkpoint import load_pretrained
from lightning_moe.checkpoint.hub_read import LoadReport, load_report
from tests import test_module_list, tiny
from tests.checkpoint import hub_models
from tests.harness import run_ranks


class Hub(pl.LightningModule):
    """A user's LightningModule that builds its network without memory and reads its weights from a folder."""

    def __init__(self, cls: Any, config: Any, folder: Any, **options: Any) -> None:
        super().__init__()
        self.build, self.folder, self.options = (lambda: cls(config)), folder, options

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            with torch.device("meta"):
                self.net = self.build()
            self.report = load_pretrained(self, self.folder, **self.options)

    def training_step(self, tokens: Tensor, index: int) -> Tensor:
        return self.net(input_ids=tokens, labels=tokens).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def world() -> int:
    return int(os.environ["WORLD_SIZE"])


def set_up(module: pl.LightningModule, precision: Any = "32-true", **strategy: Any) -> pl.Trainer:
    """Let the strategy shard a module, and train nothing."""
    trainer = tiny.trainer(tiny.moe_ep(**strategy), devices=world(), max_steps=0, precision=precision)
    trainer.fit(module, DataLoader([torch.zeros(1)]))
    return trainer


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def differences(mine: nn.Module, reference: nn.Module) -> list[str]:
    """Names of parameters and buffers that differ in a bit or in their dtype."""
    found = []
    for kind in ("named_parameters", "named_buffers"):
        theirs = dict(getattr(reference, kind)())
        ours = {name: whole(tensor).detach() for name, tensor in getattr(mine, kind)()}
        found += list(theirs.keys() ^ ours.keys())
        for name, tensor in theirs.items():
            if name in ours and not (ours[name].dtype == tensor.dtype and torch.equal(ours[name], tensor)):
                found.append(name)
    return found


# Equal to Transformers, in any layout


def read_layouts(root: str, cases: list[tuple[str, int]]) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, size in cases:
        folder = Path(root, name)
        reference = type(hub_models.build(name)).from_pretrained(folder, dtype=torch.float32)
        module = Hub(type(reference), type(reference).config_class.from_pretrained(folder), folder)
        set_up(module, expert_parallel_size=size)
        first = load_report(module)
        assert first is not None
        wrong = differences(module.net, reference)
        with torch.no_grad():
            for parameter in module.parameters():
                (parameter.to_local() if isinstance(parameter, DTensor) else parameter).zero_()
        again = load_pretrained(module, folder)  # on the sharded model
        wrong += differences(module.net, reference)
        assert again.bytes_read == first.bytes_read
        assert module.report.deferred
        results[f"{name} at expert_parallel_size={size}"] = (wrong, first.bytes_read / first.bytes_stored)
    return results


def test_every_layout_is_read_as_transformers_reads_it_and_by_halves(tmp_path: Path) -> None:
    for name in hub_models.LAYOUTS:
        hub_models.save(name, tmp_path / name, torch.bfloat16, shard="30KB")
    # Without expert parallelism the experts of a layer are one more weight that FSDP2 cuts along its first dimension.
    cases = [*((name, 2) for name in hub_models.LAYOUTS), *((name, 1) for name in ("qwen3_moe", "gpt_oss", "dbrx"))]
    for rank in run_ranks(read_layouts, 2, str(tmp_path), cases, timeout=200):
        for case, (wrong, share) in rank.items():
            assert not wrong, case
            assert share < 0.55, case


class Copied(Hub):
    """Reads one folder over another, and keeps a copy of the network, as for a reference or an average of weights."""

    def configure_model(self) -> None:
        super().configure_model()
        load_pretrained(self, Path(self.folder, "patch"), strict=False)
        self.reference = copy.deepcopy(self.net)


def read_copied(folder: str) -> list[str]:
    expected = hub_models.build("qwen3_moe")
    expected.load_state_dict({"model.norm.weight": torch.full((32,), 2.0)}, strict=False)
    module = Copied(type(expected), expected.config, folder)
    set_up(module, expert_parallel_size=2)
    return differences(module.net, expected) + differences(module.reference, expected)


def test_copies_of_a_network_that_waits_are_read_and_later_folders_win(tmp_path: Path) -> None:
    hub_models.save("qwen3_moe", tmp_path)
    (tmp_path / "patch").mkdir()
    save_file({"model.norm.weight": torch.full((32,), 2.0)}, tmp_path / "patch" / "model.safetensors")
    assert run_ranks(read_copied, 2, str(tmp_path), timeout=120) == [[], []]


def test_more_ranks_than_experts_and_uneven_shards(tmp_path: Path) -> None:
    for name in ("deepseek_v3", "gpt_oss"):
        hub_models.save(name, tmp_path / name)
    results = run_ranks(read_some, 3, str(tmp_path), timeout=120)
    for case in results[0]:
        assert not any(rank[case][0] for rank in results), case
        assert sum(rank[case][1] for rank in results) == pytest.approx(1.0, abs=0.05), case


def read_some(root: str) -> dict[str, Any]:
    results = {}
    for name, size in itertools.product(("deepseek_v3", "gpt_oss"), (3, 1)):
        folder = Path(root, name)
        reference = type(hub_models.build(name)).from_pretrained(folder, dtype=torch.float32)
        module = Hub(type(reference), reference.config, folder)
        set_up(module, expert_parallel_size=size)
        report = load_report(module)
        assert report is not None
        results[f"{name}, {size}"] = (differences(module.net, reference), report.bytes_read / report.bytes_stored)
    return results


def read_in_bfloat16(root: str) -> list[str]:
    reference = AutoModelForCausalLM.from_pretrained(root, dtype=torch.bfloat16)
    module = Hub(type(reference), reference.config, root)
    set_up(module, precision="bf16-true", expert_parallel_size=2)
    assert any(parameter.dtype == torch.bfloat16 for parameter in reference.parameters())
    assert any(tensor.dtype == torch.float32 for tensor in reference.state_dict().values())
    return differences(module.net, reference)


def test_dtypes_are_those_of_the_precision_and_of_what_the_model_keeps_in_float32(tmp_path: Path) -> None:
    hub_models.save("deepseek_v3", tmp_path)
    assert run_ranks(read_in_bfloat16, 2, str(tmp_path)) == [[], []]


# No more than its part


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that exist, and the most that there were."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and not isinstance(tensor, DTensor) and tensor.device.type == "cpu":
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: Any) -> None:
        key = id(storage)  # PyTorch keeps one object for each storage while it lives
        if key in self.known:
            return
        size = storage.nbytes()
        self.known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def bytes_read_by_this_process() -> int:
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["rchar"])


def measure(folder: str, options: dict[str, Any], precision: str) -> dict[str, Any]:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    module = Hub(Qwen3MoeForCausalLM, Qwen3MoeConfig(**hub_models.BIG), folder)
    before = bytes_read_by_this_process()
    with LiveBytes() as live:
        set_up(module, precision=precision, **options)
    read = bytes_read_by_this_process() - before
    report = load_report(module)
    assert report is not None
    shards = [p.to_local() if isinstance(p, DTensor) else p for p in module.parameters()]
    own = sum(shard.numel() * shard.element_size() for shard in shards)
    sizes = [p.numel() * p.element_size() for p in module.parameters()]
    return {
        "report": report,
        "read by the system": read,
        "shard": own,
        "beyond the shard": live.peak - own,
        "largest tensor": max(sizes),
        "model": sum(sizes),
    }


def measure_all(folder: str) -> list[dict[str, Any]]:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"expert_parallel_size": 2}, "32-true"),
        ({"expert_parallel_size": 1}, "32-true"),
        ({"expert_parallel_size": 2}, "bf16-true"),
    ]
    return [measure(folder, *case) for case in cases]


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="only Linux counts the bytes that a process reads")
def test_a_rank_reads_its_part_and_never_holds_more_than_a_tensor_beyond_it(tmp_path: Path) -> None:
    hub_models.save_big(tmp_path)
    stored = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    assert stored > 80 << 20
    for rank in run_ranks(measure_all, 2, str(tmp_path), timeout=120):
        for case in rank:
            report: LoadReport = case["report"]
            assert report.bytes_read == pytest.approx(stored / 2, rel=0.01)
            assert case["read by the system"] < 0.55 * stored  # with headers, and with all else that it has read
            assert case["shard"] == pytest.approx(case["model"] / 2, rel=0.01)
            assert 0 <= case["beyond the shard"] <= case["largest tensor"]


# Training after it


def fine_tune(folder: str, strategy: dict[str, Any] | None) -> dict[str, Any]:
    from lightning_moe.models import CausalLM
    from tests.models.tiny import sgd

    rank, ranks = (int(os.environ["RANK"]), world()) if strategy is not None else (0, 1)
    module = CausalLM(pretrained=folder, optimizer=sgd, schedule="constant", meta_device=strategy is not None)
    losses: list[float] = []

    class Losses(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *rest: Any) -> None:
            losses.append(float(trainer.callback_metrics["train/loss"]))

    chosen = "auto" if strategy is None else tiny.moe_ep(**strategy)
    trainer = tiny.trainer(chosen, devices=ranks, max_steps=3, callbacks=[Losses()])
    rows = tiny.tokens(3)
    batches = [
        {"input_ids": step[:, :-1].clone(), "labels": step[:, 1:].clone()}
        for step in rows.unflatten(1, (ranks, -1))[:, rank]
    ]
    trainer.fit(module, DataLoader(batches, batch_size=None))
    report = load_report(module)
    return {"losses": losses, "weights": tiny.weights(module), "training": module.model.training, "report": report}


def test_causal_lm_trains_from_a_folder_as_in_one_process(tmp_path: Path) -> None:
    hub_models.save("qwen3_moe", tmp_path)
    alone = fine_tune(str(tmp_path), None)
    for rank in run_ranks(fine_tune, 2, str(tmp_path), {"expert_parallel_size": 2}):
        assert rank["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        assert rank["training"]
        assert rank["report"].bytes_read == pytest.approx(rank["report"].bytes_stored / 2, rel=0.02)
        for name, weight in alone["weights"].items():
            torch.testing.assert_close(rank["weights"][name], weight, rtol=1e-4, atol=1e-6, msg=name)


# Modules of other kinds


class Adapted(Hub):
    """Adapters of PEFT, put on before or after the folder is named."""

    def __init__(self, cls: Any, config: Any, folder: Any, first: bool) -> None:
        super().__init__(cls, config, folder)
        self.first = first

    def configure_model(self) -> None:
        from peft import LoraConfig, get_peft_model

        if hasattr(self, "net"):
            return
        with torch.device("meta"):
            net = self.build()
        if not self.first:
            load_pretrained(net, self.folder)
        lora = {"target_parameters": ["experts.gate_up_proj"], "modules_to_save": ["lm_head"]}
        self.net = get_peft_model(net, LoraConfig(r=2, target_modules=["q_proj"], **lora))
        if self.first:
            load_pretrained(self, self.folder)


def read_others(root: str) -> None:
    reference = AutoModelForCausalLM.from_pretrained(f"{root}/qwen3_moe", dtype=torch.float32)
    theirs = reference.state_dict()
    for first in (True, False):
        module = Adapted(type(reference), reference.config, f"{root}/qwen3_moe", first)
        set_up(module, expert_parallel_size=2)
        seen = set()
        for name, parameter in module.net.named_parameters():
            value = whole(parameter).detach()
            if "lora_" in name:
                assert value.isfinite().all(), name
                assert ("lora_B" in name) == (not value.any()), name
                continue
            parts = [part for part in name.split(".") if part not in ("base_layer", "original_module")]
            plain = ".".join(parts).removeprefix("base_model.model.").replace("modules_to_save.default.", "")
            assert torch.equal(value, theirs[plain]), name
            seen.add(plain)
        assert seen == theirs.keys()

    # Experts that are modules of their own, in a network of the user's, beside other weights.
    module = Own(f"{root}/own")
    set_up(module, expert_parallel_size=2)
    saved = load_file(f"{root}/own/model.safetensors")
    for again in (False, True):
        if again:
            load_pretrained(module, f"{root}/own", prefix="net")
        for name, tensor in module.net.state_dict().items():
            assert torch.equal(whole(tensor), saved[name]), name
    assert whole(module.head.weight).isfinite().all()
    report = load_report(module)
    assert report is not None
    assert report.bytes_read < 0.55 * report.bytes_stored


class Own(tiny.TinyLM):
    def __init__(self, folder: str) -> None:
        super().__init__(build=lambda: None)  # type: ignore[arg-type, return-value]
        self.folder = folder

    def configure_model(self) -> None:
        if self.net is None:
            with torch.device("meta"):
                self.net = test_module_list.Net()
                self.head = nn.Linear(4, 4)
            load_pretrained(self, self.folder, prefix="net")


def test_adapters_and_networks_that_are_not_of_transformers(tmp_path: Path) -> None:
    hub_models.save("qwen3_moe", tmp_path / "qwen3_moe")
    (tmp_path / "own").mkdir()
    save_file(test_module_list.Net().state_dict(), tmp_path / "own" / "model.safetensors")
    run_ranks(read_others, 2, str(tmp_path))


def test_plain_model_is_filled_in_place(tmp_path: Path) -> None:
    saved = hub_models.save("gpt_oss", tmp_path)
    model = type(saved)(saved.config)
    held = list(model.parameters())
    report = load_pretrained(model, tmp_path)
    assert not differences(model, saved)
    assert all(mine is parameter for mine, parameter in zip(held, model.parameters(), strict=True))
    assert (report.bytes_read, report.deferred) == (report.bytes_stored, False)
    again = tmp_path / "again"
    model.save_pretrained(again)  # the names that the folder had
    assert load_file(again / "model.safetensors").keys() == load_file(tmp_path / "model.safetensors").keys()


# Tied weights and vocabularies


def test_tied_weights_may_lie_there_under_either_name_or_both(tmp_path: Path) -> None:
    saved = hub_models.save(hub_models.TIED, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    assert "lm_head.weight" not in tensors
    embedding = tensors.pop("model.embed_tokens.weight")

    def read(**more: Tensor) -> list[str]:
        save_file({**tensors, **more}, file, {"format": "pt"})
        model = type(saved)(saved.config)
        load_pretrained(model, tmp_path)
        return differences(model, saved)

    assert not read(**{"lm_head.weight": embedding.clone()})
    assert not read(**{"lm_head.weight": embedding.clone(), "model.embed_tokens.weight": embedding})
    with pytest.raises(ValueError, match=r"different values for .*lm_head.*tie_word_embeddings=False"):
        read(**{"lm_head.weight": embedding + 1, "model.embed_tokens.weight": embedding})
    with pytest.raises(ValueError, match=r"missing there: .*embed_tokens\.weight"):
        read()


def read_another_vocabulary(folder: str, more: int) -> LoadReport:
    saved = load_file(f"{folder}/model.safetensors")
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows = reference.config.vocab_size + more
    reference.config.vocab_size = rows
    module = Hub(type(reference), reference.config, folder, strict=False)
    set_up(module, expert_parallel_size=2)
    report = load_report(module)
    assert report is not None
    assert set(report.resized) == {"model.embed_tokens.weight", "lm_head.weight"}
    for name in report.resized:
        mine, theirs = whole(module.net.state_dict()[name]), saved[name]
        both = min(len(mine), len(theirs))
        assert len(mine) == rows
        assert torch.equal(mine[:both], theirs[:both])
        assert mine.isfinite().all()
    return report


def test_another_vocabulary_keeps_the_rows_that_both_have(tmp_path: Path) -> None:
    hub_models.save("qwen3_moe", tmp_path)
    for more in (7, -5):
        reports = run_ranks(read_another_vocabulary, 2, str(tmp_path), more)
        read, stored = sum(report.bytes_read for report in reports), reports[0].bytes_stored
        assert read == stored if more > 0 else read < stored, "what lies behind the rows is another tensor"
    model = hub_models.build("qwen3_moe")
    model.resize_token_embeddings(80)
    with pytest.raises(ValueError, match=r"embed_tokens\.weight' has the shape \[80, .*strict=False"):
        load_pretrained(model, tmp_path)


# Quantized folders


def quantized(folder: Path) -> dict[str, Any]:
    """Turn a folder's large weights into fp8 with a scale for each block of 16 x 16, as DeepSeek-V3's are."""
    file = folder / "model.safetensors"
    tensors = {}
    for name, tensor in load_file(file).items():
        if "proj" in name and tensor.ndim == 2 and not any(size % 16 for size in tensor.shape):
            rows, columns = (size // 16 for size in tensor.shape)
            tensors[name] = tensor.to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = torch.rand(rows, columns) + 0.5
        else:
            tensors[name] = tensor
    save_file(tensors, file, {"format": "pt"})
    options = {"quant_method": "fp8", "weight_block_size": [16, 16], "activation_scheme": "dynamic"}
    configure(folder, quantization_config=options)
    return tensors


def configure(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def mxfp4(folder: Path) -> None:
    """Turn the stacked experts of gpt-oss into blocks of four bits with a scale each, as the published ones are."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, width, out = tensors.pop(name).shape
        sizes = (experts, out, width // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*sizes, 16), dtype=torch.uint8, generator=generator)
        tensors[f"{name}_scales"] = torch.randint(120, 130, sizes, dtype=torch.uint8, generator=generator)
    save_file(tensors, file, {"format": "pt"})
    configure(folder, quantization_config={"quant_method": "mxfp4"})


def read_quantized(root: str) -> dict[str, Any]:
    from transformers import FineGrainedFP8Config, Mxfp4Config

    results = {}
    for name, undo in (("deepseek_v3", FineGrainedFP8Config), ("gpt_oss", Mxfp4Config)):
        folder = f"{root}/{name}"
        reference = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, quantization_config=undo(dequantize=True)
        )
        reference.float()  # older releases make bfloat16 of four bits
        config = type(reference.config).from_pretrained(folder)
        del config.quantization_config
        module = Hub(type(reference), config, folder)
        set_up(module, expert_parallel_size=2)
        report = load_report(module)
        assert report is not None
        results[name] = (differences(module.net, reference), report.bytes_read / report.bytes_stored)
    return results


def test_quantized_weights_become_plain_ones_expert_by_expert(tmp_path: Path) -> None:
    hub_models.save("deepseek_v3", tmp_path / "deepseek_v3")
    assert any(name.endswith("experts.3.up_proj.weight_scale_inv") for name in quantized(tmp_path / "deepseek_v3"))
    hub_models.save("gpt_oss", tmp_path / "gpt_oss", intermediate_size=32)
    mxfp4(tmp_path / "gpt_oss")
    for rank in run_ranks(read_quantized, 2, str(tmp_path)):
        for name, (wrong, share) in rank.items():
            assert not wrong, name
            assert share < 0.6, name


def test_quantization_that_cannot_be_undone_is_an_error(tmp_path: Path) -> None:
    saved = hub_models.save("deepseek_v3", tmp_path)
    configure(tmp_path, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(ValueError, match=r"quantized \(config.json: quant_method='gptq'.*'lm_head.weight'.*original"):
        load_pretrained(saved, tmp_path)
    quantized(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ValueError, match=r"weight_scale_inv'.*is float8_e4m3fn there|is float8_e4m3fn there"):
        load_pretrained(saved, tmp_path)
