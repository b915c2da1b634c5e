import logging
import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from lightning_moe.data import PackedTokens, ResumableLoader, ResumableSampler


class Numbers(Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return index


def make_loader(count=40, batch_size=4, replicas=1, rank=0, seed=0, shuffle=True, num_workers=0, **options):
    data = Numbers(count)
    sampler = ResumableSampler(data, num_replicas=replicas, rank=rank, seed=seed, shuffle=shuffle)
    return ResumableLoader(data, batch_size, sampler, num_workers=num_workers, **options)


def take(loader, count=None):
    batches = []
    if count == 0:
        return batches
    for batch in loader:
        batches.append(batch.tolist())
        if len(batches) == count:
            break
    return batches


def flat(batches):
    return [item for batch in batches for item in batch]


# ---------------------------------------------------------------------------------------------- windows


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_windows_and_labels_are_exact(dtype):
    data = PackedTokens(torch.arange(12, dtype=dtype), sequence_length=4)
    assert len(data) == 2  # (12 - 1) // 4
    assert data[0]["input_ids"].tolist() == [0, 1, 2, 3]
    assert data[0]["labels"].tolist() == [1, 2, 3, 4]
    assert data[1]["input_ids"].tolist() == [4, 5, 6, 7]
    assert data[1]["labels"].tolist() == [5, 6, 7, 8]
    assert data[1]["input_ids"].dtype == data[1]["labels"].dtype == torch.int64
    with pytest.raises(IndexError):
        data[2]


@pytest.mark.parametrize(("tokens", "items"), [(5, 1), (8, 1), (9, 2), (13, 3)])
def test_number_of_windows(tokens, items):
    data = PackedTokens(torch.arange(tokens), sequence_length=4)
    assert len(data) == items
    assert len(data[items - 1]["labels"]) == 4


def test_changing_an_item_leaves_the_data_alone():
    data = PackedTokens(torch.arange(9), sequence_length=4)
    data[0]["input_ids"].fill_(-1)
    data[0]["labels"].fill_(-1)
    assert data[0]["input_ids"].tolist() == [0, 1, 2, 3]
    assert data[0]["labels"].tolist() == [1, 2, 3, 4]


def test_too_few_tokens_names_sequence_length():
    with pytest.raises(ValueError, match=r"sequence_length=8 needs at least 9 tokens.*there are 8"):
        PackedTokens(torch.arange(8), sequence_length=8)


def test_bad_tokens():
    with pytest.raises(TypeError, match=r"float32.*allowed: torch\.uint8, torch\.int32, torch\.int64"):
        PackedTokens(torch.zeros(9), sequence_length=4)
    with pytest.raises(ValueError, match=r"shape \[3, 3\].*flat"):
        PackedTokens(torch.zeros(3, 3, dtype=torch.int64), sequence_length=4)
    with pytest.raises(ValueError, match="sequence_length=0"):
        PackedTokens(torch.arange(9), sequence_length=0)


def test_mapped_file_is_mapped_again_where_it_is_unpickled(tmp_path):
    tokens = np.arange(100_001, dtype=np.int32)
    np.save(tmp_path / "tokens.npy", tokens)
    data = PackedTokens.from_file(tmp_path / "tokens.npy", sequence_length=10)
    pickled = pickle.dumps(data)
    assert len(pickled) < 10_000  # not the tokens
    copy = pickle.loads(pickled)
    assert len(copy) == len(data) == 10_000
    assert copy[9_999]["labels"].tolist() == list(range(99_991, 100_001))


# ---------------------------------------------------------------------------------------------- sampler


@pytest.mark.parametrize("replicas", [2, 3])
def test_ranks_are_disjoint_and_together_complete(replicas):
    data = Numbers(41)
    parts = [list(ResumableSampler(data, num_replicas=replicas, rank=rank)) for rank in range(replicas)]
    assert [len(part) for part in parts] == [41 // replicas] * replicas
    together = [index for part in parts for index in part]
    assert len(set(together)) == len(together) == 41 // replicas * replicas
    assert set(together) <= set(range(41))


def test_every_number_of_ranks_reads_the_same_steps():
    def steps(replicas, batch_size):
        loaders = [make_loader(48, batch_size, replicas, rank) for rank in range(replicas)]
        return [sorted(flat(batches)) for batches in zip(*map(take, loaders), strict=True)]

    assert steps(1, 8) == steps(2, 4) == steps(4, 2)


def test_order_depends_on_seed_and_epoch_and_not_on_their_sum():
    def order(seed, epoch):
        sampler = ResumableSampler(Numbers(50), num_replicas=1, rank=0, seed=seed)
        sampler.set_epoch(epoch)
        return tuple(sampler)

    orders = {(seed, epoch): order(seed, epoch) for seed in range(3) for epoch in range(3)}
    assert len(set(orders.values())) == 9
    assert order(1, 2) == orders[1, 2]
    assert all(sorted(indices) == list(range(50)) for indices in orders.values())


def test_without_shuffling_the_order_is_that_of_the_data():
    assert list(ResumableSampler(Numbers(7), num_replicas=2, rank=1, shuffle=False)) == [1, 3, 5]


def test_an_epoch_begins_in_its_middle_once():
    sampler = ResumableSampler(Numbers(20), num_replicas=2, rank=1)
    whole = list(sampler)
    sampler.start = 8
    assert list(sampler) == whole[4:]
    assert list(sampler) == whole
    assert len(sampler) == 10
    sampler.start = 8
    sampler.set_epoch(0)
    assert list(sampler) == whole[4:]
    sampler.start = 8
    sampler.set_epoch(1)
    assert len(list(sampler)) == 10


def test_sampler_is_one_that_lightning_leaves_in_place():
    assert isinstance(ResumableSampler(Numbers(4)), DistributedSampler)


def test_sampler_errors():
    with pytest.raises(ValueError, match="seed=-1"):
        ResumableSampler(Numbers(4), seed=-1)
    with pytest.raises(ValueError, match="rank 2"):
        ResumableSampler(Numbers(4), num_replicas=2, rank=2)


# ---------------------------------------------------------------------------------------------- loader


def test_loader_is_a_whole_epoch_of_whole_batches():
    loader = make_loader(count=23, batch_size=4)
    batches = take(loader)
    assert len(loader) == len(batches) == 5
    assert all(len(batch) == 4 for batch in batches)
    assert take(loader) == batches  # the same epoch again, from its first batch


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("done", [0, 1, 3, 9])
def test_next_batch_after_resuming_is_the_next_unseen_one(num_workers, done):
    whole = take(make_loader())
    first = make_loader(num_workers=num_workers)
    first.sampler.set_epoch(0)
    assert take(first, done) == whole[:done]
    state = first.state_dict()
    assert state["items"] == 4 * done

    second = make_loader(num_workers=num_workers)
    second.load_state_dict(pickle.loads(pickle.dumps(state)))
    assert second.state_dict() == state
    assert len(second) == 10
    second.sampler.set_epoch(state["epoch"])
    assert take(second) == whole[done:]
    assert second.state_dict()["items"] == 40


@pytest.mark.parametrize("num_workers", [0, 2])
def test_epochs_after_a_resumed_one_are_whole(num_workers):
    def epochs(loader, first, last):
        seen = []
        for epoch in range(first, last):
            loader.sampler.set_epoch(epoch)
            seen.append(take(loader))
        return seen

    options = {"num_workers": num_workers, "persistent_workers": num_workers > 0}
    whole = epochs(make_loader(**options), 0, 4)
    first = make_loader(**options)
    epochs(first, 0, 1)
    first.sampler.set_epoch(1)
    take(first, 3)

    second = make_loader(**options)
    second.load_state_dict(first.state_dict())
    assert epochs(second, 1, 4) == [whole[1][3:], whole[2], whole[3]]


def test_state_at_the_end_of_an_epoch():
    loader = make_loader()
    loader.sampler.set_epoch(2)
    take(loader)
    ended = loader.state_dict()
    assert (ended["epoch"], ended["items"]) == (2, 40)
    loader.sampler.set_epoch(3)
    begun = loader.state_dict()
    assert (begun["epoch"], begun["items"]) == (3, 0)

    whole = make_loader()
    whole.sampler.set_epoch(3)
    expected = take(whole)
    for state in (ended, begun):
        resumed = make_loader()
        resumed.load_state_dict(state)
        resumed.sampler.set_epoch(3)
        assert take(resumed) == expected


def test_a_resumed_run_can_be_interrupted_again():
    whole = take(make_loader())
    first = make_loader()
    take(first, 2)
    second = make_loader()
    second.load_state_dict(first.state_dict())
    take(second, 3)
    third = make_loader()
    third.load_state_dict(second.state_dict())
    assert take(third) == whole[5:]


def test_state_is_the_same_on_every_rank():
    loaders = [make_loader(replicas=2, rank=rank) for rank in range(2)]
    for loader in loaders:
        take(loader, 3)
    assert loaders[0].state_dict() == loaders[1].state_dict()
    assert loaders[0].state_dict()["items"] == 3 * 4 * 2


@pytest.mark.parametrize(("before", "after"), [((2, 4), (1, 4)), ((2, 4), (1, 8)), ((1, 4), (2, 2)), ((4, 1), (2, 1))])
def test_another_number_of_ranks_continues_with_what_is_unseen(before, after):
    seen = []
    for rank in range(before[0]):
        loader = make_loader(64, before[1], before[0], rank)
        seen += flat(take(loader, 3))
    state = loader.state_dict()

    rest = []
    for rank in range(after[0]):
        loader = make_loader(64, after[1], after[0], rank)
        loader.load_state_dict(state)
        rest.append(take(loader))
    assert len({len(batches) for batches in rest}) == 1
    assert sorted(seen + flat(flat(rest))) == list(range(64))

    whole = make_loader(64, after[0] * after[1])
    first_step = sorted(flat(batches[0] for batches in rest))
    assert first_step == sorted(take(whole)[len(seen) // (after[0] * after[1])])


def test_a_position_within_a_step_of_the_new_layout_is_rounded_down_and_said(caplog):
    first = make_loader(60, batch_size=3)
    seen = flat(take(first, 3))  # 9 items; steps of 4 from now on
    second = make_loader(60, batch_size=2, replicas=2, rank=0)
    with caplog.at_level(logging.INFO):
        second.load_state_dict(first.state_dict())
    assert "9 items into epoch 0" in caplog.text
    assert "continuing at 8" in caplog.text
    assert "1 items are seen again" in caplog.text
    assert second.state_dict()["items"] == 8
    assert take(second, 1)[0][0] == seen[8]


def test_nothing_is_said_when_nothing_is_rounded(caplog):
    first = make_loader()
    take(first, 3)
    with caplog.at_level(logging.INFO):
        make_loader().load_state_dict(first.state_dict())
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("options", "named"),
    [({"count": 44}, "dataset_items=40, and now it is 44"), ({"seed": 1}, "seed=0"), ({"shuffle": False}, "shuffle")],
)
def test_other_data_cannot_be_continued_in_the_middle(options, named):
    first = make_loader()
    take(first, 3)
    with pytest.raises(ValueError, match=named):
        make_loader(**options).load_state_dict(first.state_dict())


def test_other_data_can_follow_at_the_end_of_an_epoch():
    first = make_loader(count=42)
    take(first)
    second = make_loader(count=100)
    second.load_state_dict(first.state_dict())
    second.sampler.set_epoch(1)
    assert len(take(second)) == 25


def test_loader_errors():
    data = Numbers(8)
    with pytest.raises(TypeError, match=r"sampler is a SequentialSampler.*ResumableSampler"):
        ResumableLoader(data, 2, SequentialSampler(data))
    with pytest.raises(ValueError, match="does not take shuffle"):
        ResumableLoader(data, 2, ResumableSampler(data), shuffle=True)


def test_loader_is_a_dataloader_with_its_options():
    loader = make_loader(collate_fn=lambda batch: torch.tensor(batch) * 10)
    assert isinstance(loader, DataLoader)
    assert all(item % 10 == 0 for item in take(loader, 1)[0])
