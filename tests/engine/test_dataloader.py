"""Each rank's share of a data set, in micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from models import Numbers
from torch import Tensor
from torch.utils.data import IterableDataset, SequentialSampler, get_worker_info

from dsprof.engine.data import RepeatingLoader, ShardedLoader


class Stream(IterableDataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count))


class Counted(Stream):
    def __len__(self) -> int:
        return self.count


class Workers(IterableDataset[int]):
    """Yields the number of workers that read it, as a stream that splits itself would ask."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        yield from [0 if info is None else info.num_workers] * 4


def loader(dataset: Any, **options: Any) -> ShardedLoader:
    return ShardedLoader(dataset, **{"batch_size": 2, "num_workers": 0, **options})


def batches(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def samples(loader: Any) -> list[int]:
    return torch.cat(list(loader)).tolist()


def test_ranks_share_the_samples() -> None:
    assert [batches(loader(Numbers(7), shuffle=False, rank=rank, world_size=2)) for rank in (0, 1)] == [
        [[0, 2], [4, 6]],
        [[1, 3], [5, 0]],  # the first sample again, so that ranks have as many
    ]


def test_each_pass_shuffles_anew_and_alike_on_all_ranks() -> None:
    ranks = [loader(Numbers(8), rank=rank, world_size=2, seed=3) for rank in (0, 1)]
    passes = [[samples(one) for one in ranks] for _ in range(3)]
    assert all(sorted(first + second) == list(range(8)) for first, second in passes)
    assert len({tuple(first) for first, _ in passes}) == 3

    again = loader(Numbers(8), rank=0, world_size=2, seed=3)
    assert [samples(again) for _ in range(2)] == [passes[0][0], passes[1][0]]
    assert samples(loader(Numbers(8), rank=0, world_size=2, seed=4)) != passes[0][0]


def test_an_epoch_that_is_set_is_the_next_pass() -> None:
    first = loader(Numbers(8))
    passes = [batches(first) for _ in range(4)]
    second = loader(Numbers(8))
    second.set_epoch(2)
    assert [batches(second), batches(second)] == passes[2:]
    second.set_epoch(0)
    assert batches(second) == passes[0]
    assert second.data_sampler is not None
    second.data_sampler.set_epoch(0)  # type: ignore[attr-defined]
    assert [batches(second), batches(second)] == passes[:2]


def test_the_last_batch_may_be_dropped() -> None:
    assert batches(loader(Numbers(5), shuffle=False)) == [[0, 1], [2, 3], [4]]
    assert batches(loader(Numbers(5), shuffle=False, drop_last=True)) == [[0, 1], [2, 3]]
    assert len(loader(Numbers(5))) == 3
    assert len(loader(Numbers(5), drop_last=True)) == 2
    assert len(loader(Numbers(5), world_size=2, rank=1)) == 2


def test_collate_and_sampler_are_the_callers() -> None:
    def collate(samples: list[int]) -> Tensor:
        return torch.tensor(samples) * 10

    dataset = Numbers(4)
    mine = loader(dataset, collate_fn=collate, sampler=SequentialSampler(dataset), rank=1, world_size=2)
    assert batches(mine) == [[0, 10], [20, 30]]
    mine.set_epoch(1)  # which this sampler does not know
    assert batches(mine) == [[0, 10], [20, 30]]


def test_workers_load_the_same() -> None:
    alone = loader(Numbers(9), seed=5)
    helped = loader(Numbers(9), seed=5, num_workers=1)
    assert [batches(helped), batches(helped)] == [batches(alone), batches(alone)]


def test_a_stream_is_split_by_rows() -> None:
    ranks = [batches(loader(Stream(11), rank=rank, world_size=3)) for rank in range(3)]
    assert ranks == [[[0, 3], [6]], [[1, 4], [7]], [[2, 5], [8]]]  # 9 and 10 are no full row
    assert batches(loader(Stream(11), rank=0, world_size=3, drop_last=True)) == [[0, 3]]
    assert len(loader(Counted(11), rank=0, world_size=3)) == 2
    with pytest.raises(TypeError):
        len(loader(Stream(11)))


@pytest.mark.parametrize("workers", [0, 1, 4])
def test_a_stream_has_one_reader(workers: int) -> None:
    assert batches(loader(Workers(), num_workers=workers)) == [[min(workers, 1)] * 2] * 2


def test_what_is_no_data_set() -> None:
    with pytest.raises(TypeError, match="training_data is a generator; give a data set with __getitem__ and __len__"):
        loader(i for i in range(3))
    with pytest.raises(ValueError, match="an IterableDataset comes in its own order: leave the sampler out"):
        loader(Stream(3), sampler=SequentialSampler(Numbers(3)))


def test_repeating_goes_on_with_the_next_epoch() -> None:
    passes = loader(Numbers(4))
    expected = [*batches(passes), *batches(passes), *batches(passes)]
    endless = RepeatingLoader(loader(Numbers(4)))
    assert [next(endless).tolist() for _ in range(6)] == expected
    assert iter(endless) is endless


def test_repeating_a_list() -> None:
    endless = RepeatingLoader([None, 1])
    assert [next(endless) for _ in range(5)] == [None, 1, None, 1, None]


@pytest.mark.parametrize("nothing", [[], iter([])])
def test_repeating_nothing(nothing: Any) -> None:
    with pytest.raises(ValueError, match="a pass over the loader gave no batch"):
        next(RepeatingLoader(nothing))


def test_repeating_what_can_be_read_once() -> None:
    endless = RepeatingLoader(iter([1]))
    assert next(endless) == 1
    with pytest.raises(ValueError, match="an iterator that can be read only once"):
        next(endless)
