import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer

from lightning_moe.data import PackedTokens, ResumableLoader, ResumableSampler
from lightning_moe.data.token_data_module import TokenDataModule, split_documents
from tests.harness import run_ranks, run_ranks_expecting_error

LENGTH = 4


class Numbered(TokenDataModule):
    """The first token of a window says which one it is; those to validate on begin at 10000."""

    def __init__(self, train=22, val=13, batch_size=2, val_fraction=0.1, **options):
        super().__init__(LENGTH, batch_size, val_fraction, options.get("seed", 0), options.get("num_workers", 0))
        self.train, self.val = train, val

    @property
    def vocab_size(self):
        return 20_000

    def load_datasets(self):
        train = PackedTokens(torch.arange(self.train * LENGTH + 1), LENGTH)
        if self.val_fraction == 0:
            return train, None
        self.check_validation_tokens(self.val * LENGTH + 1 if self.val else 0)
        return train, PackedTokens(10_000 + torch.arange(self.val * LENGTH + 1), LENGTH)


class Recorder(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.trained, self.validated = [], []

    def training_step(self, batch, batch_idx):
        assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64
        assert torch.equal(batch["input_ids"] + 1, batch["labels"])
        self.trained.append([int(row[0]) // LENGTH for row in batch["input_ids"]])
        return self.layer(torch.ones(1, 1)).mean()

    def validation_step(self, batch, batch_idx):
        self.validated.append([(int(row[0]) - 10_000) // LENGTH for row in batch["input_ids"]])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(data, devices=1, **options):
    options = {"max_epochs": 1, "num_sanity_val_steps": 0, "devices": devices, **options}
    options.setdefault("strategy", "ddp" if devices > 1 else "auto")
    trainer = Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    module = Recorder()
    trainer.fit(module, datamodule=data)
    return module.trained, module.validated, type(trainer.train_dataloader.sampler).__name__


def flat(batches):
    return [window for batch in batches for window in batch]


def _fit_two(options):
    return fit(Numbered(**options), devices=2)


def test_two_ranks_read_different_windows_and_equally_many():
    # 22 windows to train on, 13 to validate on; a step of both ranks takes 2 * 2
    ranks = run_ranks(_fit_two, 2, {})
    for place, steps, windows in ((0, 5, 22), (1, 3, 13)):
        assert [len(rank[place]) for rank in ranks] == [steps, steps]
        seen = flat(ranks[0][place]) + flat(ranks[1][place])
        assert len(set(seen)) == len(seen) == 4 * steps
        assert set(seen) <= set(range(windows))
    assert [rank[2] for rank in ranks] == ["ResumableSampler"] * 2  # Lightning left it in place


def test_one_process_reads_the_steps_of_two_ranks():
    ranks = run_ranks(_fit_two, 2, {})
    trained, validated, _ = fit(Numbered(batch_size=4))
    for place, alone in ((0, trained), (1, validated)):
        together = [sorted(a + b) for a, b in zip(ranks[0][place], ranks[1][place], strict=True)]
        assert together == [sorted(batch) for batch in alone]


def test_validation_is_the_same_in_every_epoch_and_training_is_not():
    trained, validated, _ = fit(Numbered(), max_epochs=2)
    assert validated[:6] == validated[6:]
    assert flat(validated[:6]) == list(range(12))
    assert trained[:11] != trained[11:]
    assert sorted(flat(trained[:11])) == sorted(flat(trained[11:])) == list(range(22))


def test_seed_draws_the_order():
    orders = [fit(Numbered(seed=seed))[0] for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]


def test_without_a_trainer():
    data = Numbered()
    with pytest.raises(RuntimeError, match=r"call setup\('fit'\)"):
        data.train_dataloader()
    data.setup("fit")
    loader = data.train_dataloader()
    assert isinstance(loader, ResumableLoader)
    assert isinstance(loader.sampler, ResumableSampler)
    batch = next(iter(loader))
    assert batch["input_ids"].shape == batch["labels"].shape == (2, LENGTH)


def test_workers_read_the_same():
    alone, with_workers = (fit(Numbered(num_workers=count), max_epochs=2)[:2] for count in (0, 1))
    assert alone == with_workers


def test_no_validation():
    trained, validated, _ = fit(Numbered(val_fraction=0))
    assert len(trained) == 11
    assert validated == []


@pytest.mark.parametrize("devices", [1, 2])
def test_overfitting_repeats_the_first_batches(devices):
    options = {"overfit_batches": 2, "max_epochs": 2}
    ranks = run_ranks(_overfit, 2, options) if devices == 2 else [fit(Numbered(), **options)]
    for trained, _, _ in ranks:
        assert len(trained) == 4
        assert trained[:2] == trained[2:]
    assert sorted(flat(batch for rank in ranks for batch in rank[0][:2])) == list(range(4 * devices))


def _overfit(options):
    return fit(Numbered(), devices=2, **options)


def test_too_little_to_train_on():
    with pytest.raises(ValueError, match=r"has 22 windows.*batch_size=32 on 1 ranks takes 32 windows a step"):
        fit(Numbered(batch_size=32))


def test_too_little_to_validate_on():
    with pytest.raises(ValueError, match=r"val_fraction=0\.1 leaves 13 windows.*batch_size=16 on 1 ranks takes 16"):
        fit(Numbered(batch_size=16))
    with pytest.raises(ValueError, match=r"val_fraction=0\.1 leaves 0 tokens.*fewer than the 5"):
        fit(Numbered(val=0))


def test_every_rank_says_that_there_is_too_little():
    errors = run_ranks_expecting_error(_fit_two, 2, {"batch_size": 8})
    assert all("val_fraction=0.1 leaves 13 windows" in error and "on 2 ranks takes 16" in error for error in errors)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"batch_size": 0}, "batch_size=0; it has to be 1 or more"),
        ({"seed": -1}, "seed=-1; it has to be 0 or more"),
        ({"num_workers": -1}, "num_workers=-1"),
        ({"val_fraction": 1.0}, r"val_fraction=1\.0; allowed: 0"),
        ({"val_fraction": -0.1}, r"val_fraction=-0\.1"),
    ],
)
def test_options_out_of_range(options, named):
    with pytest.raises(ValueError, match=named):
        Numbered(**options)


# ---------------------------------------------------------------------------------------------- split


def test_split_takes_whole_documents_up_to_the_share():
    sizes = [int(size) for size in np.random.default_rng(0).integers(1, 100, 500)]
    drawn = split_documents(sizes, 0.1, 0, "")
    share = sum(size for size, taken in zip(sizes, drawn, strict=True) if taken) / sum(sizes)
    assert 0.095 < share <= 0.1
    assert (split_documents(sizes, 0.1, 0, "") == drawn).all()
    assert (split_documents(sizes, 0.1, 1, "") != drawn).any()
    assert not split_documents(sizes, 0.0, 0, "").any()


def test_split_takes_the_smallest_document_where_none_fits():
    assert split_documents([50, 7, 90], 0.01, 0, "").tolist() == [False, True, False]


@pytest.mark.parametrize("sizes", [[], [5]])
def test_split_needs_two_documents(sizes):
    with pytest.raises(ValueError, match=r"val_fraction=0\.5 takes at least one whole document.*Do this"):
        split_documents(sizes, 0.5, 0, "Do this")
