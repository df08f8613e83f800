"""Going on from a checkpoint behind the samples that were taken, and with what each rank had of its own."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Numbers
from ranks import Ranks
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, SequentialSampler

from dsprof import engine as ds
from dsprof.engine import Engine
from dsprof.engine.data import RepeatingLoader, ShardedLoader


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(100))


class Rows(Dataset[Tensor]):
    """Some of each is noise that is drawn anew whenever it is read."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> Tensor:
        torch.rand(1)
        return torch.sin(torch.arange(6.0) * (index + 1))


class Normalized(nn.Module):
    """Its running statistics are each rank's own, and its loss depends on random numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(0.3), nn.Linear(5, 1))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(x)
        return found.square().mean()


def begin(stage: int, accumulate: int = 1, **data: Any) -> Engine:
    torch.set_num_threads(1)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulate,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage},
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ds.initialize(model=Normalized(), config=config, **data)[0]


def losses(engine: Engine, by_script: bool) -> Iterator[float]:
    """Of one step after the other, over as many epochs as it takes."""
    while not by_script:
        yield engine.train_batch().item()
    while True:
        for batch in engine.training_dataloader:
            loss = engine(batch)
            engine.backward(loss)
            engine.step()
            yield loss.item()


def resumed(rank: int, folder: Path, stage: int, by_script: bool, steps: int, size: int = 2) -> list[str]:
    """What differs between a training and the one that goes on from its checkpoint after `steps` steps, and what the
    second says of its data. One rank alone has workers that load."""

    def data() -> dict[str, Any]:
        if size == 1:
            return {"training_data": Rows(), "dist_init_required": False}  # this process is that of the tests
        return {"train_dataloader": ShardedLoader(Rows(), batch_size=2, rank=rank, world_size=size, num_workers=0)}

    torch.manual_seed(rank)
    first = begin(stage, **data())
    run = losses(first, by_script)
    list(itertools.islice(run, steps))
    first.save_checkpoint(folder)
    expected = list(itertools.islice(run, 6))
    buffers = {name: buffer.clone() for name, buffer in first.module.named_buffers()}
    first.destroy()

    again = begin(stage, **data())
    torch.manual_seed(99)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        again.load_checkpoint(folder)
        found = list(itertools.islice(losses(again, by_script), 6))
    wrong = [f"losses {found}, not {expected}"] if found != expected else []
    wrong += [name for name, buffer in again.module.named_buffers() if not torch.equal(buffer, buffers[name])]
    told = [str(one.message) for one in caught if "training data" in str(one.message)]
    again.destroy()
    return wrong + told


@pytest.mark.parametrize(("stage", "steps"), [(1, 4), (3, 8)])
def test_a_training_with_its_own_data_goes_on_bit_for_bit(ranks: Ranks, tmp_path: Path, stage: int, steps: int) -> None:
    """Of 6 micro-batches in an epoch: from the middle of the first, and of the second."""
    assert ranks.run(2, resumed, tmp_path, stage, False, steps) == [[], []]


def test_a_script_that_reads_the_data_goes_on_bit_for_bit_and_is_told(ranks: Ranks, tmp_path: Path) -> None:
    """From the end of an epoch, whose loop has still to notice that."""
    first, second = ranks.run(2, resumed, tmp_path, 1, True, 6)
    assert [text.split(",")[0] for text in first] == ["the training data go on in epoch 0 after 24 samples"]
    assert second == []


def test_a_training_with_workers_goes_on_bit_for_bit(tmp_path: Path) -> None:
    assert resumed(0, tmp_path, 0, False, 3, size=1) == []


# --- the loader by itself


def loader(dataset: Any = None, **options: Any) -> ShardedLoader:
    return ShardedLoader(dataset or Numbers(24), **{"batch_size": 2, "num_workers": 0, **options})


def drawn(*loaders: ShardedLoader) -> list[int]:
    """The samples of one pass, in the order in which ranks take them together."""
    passes = [[sample for batch in one for sample in batch.tolist()] for one in loaders]
    return [sample for row in zip(*passes, strict=True) for sample in row]


@pytest.mark.parametrize("dataset", [Numbers(24), Stream()])
@pytest.mark.parametrize(("ranks_after", "batch_after"), [(2, 2), (1, 2), (3, 1), (4, 3)])
def test_other_ranks_go_on_behind_the_same_samples(dataset: Any, ranks_after: int, batch_after: int) -> None:
    before = [loader(dataset, rank=rank, world_size=2) for rank in (0, 1)]
    whole = drawn(*before)
    taken = [iter(one) for one in before]
    for one in taken:
        list(itertools.islice(one, 3))
    states = [one.state_dict() for one in before]
    assert states[0] == states[1]
    assert states[0] is not None
    assert states[0]["samples"] == 12
    second = whole if isinstance(dataset, Stream) else drawn_of_epoch(1)
    after = [loader(dataset, rank=rank, world_size=ranks_after, batch_size=batch_after) for rank in range(ranks_after)]
    for one in after:
        one.announces = False
        one.load_state_dict(states[0])
        assert one.state_dict() == states[0]
    rest = drawn(*after)
    assert rest == second[12 : 12 + len(rest)]
    assert len(rest) == len(second[12:]) // ranks_after * ranks_after


def drawn_of_epoch(epoch: int) -> list[int]:
    alone = loader()
    alone.set_epoch(epoch)
    return drawn(alone)


def test_a_place_that_the_ranks_do_not_divide_is_reported() -> None:
    before = loader()
    next(iter(before))
    after = loader(rank=0, world_size=4)
    with pytest.warns(
        UserWarning, match="2 samples of epoch 0 were taken, which the 4 ranks do not divide: the last 2"
    ):
        after.load_state_dict(before.state_dict())
    assert drawn(after) == drawn_of_epoch(0)[::4]


def test_data_that_cannot_be_resumed_are_reported() -> None:
    before = loader()
    next(iter(before))
    state = before.state_dict()
    other = loader(Numbers(6))
    with pytest.warns(UserWarning, match="training_data has 6 samples and had 24: epoch 0 begins anew"):
        other.load_state_dict(state)
    assert len(drawn(other)) == 6
    with pytest.warns(UserWarning, match="the checkpoint does not say where the training data were"):
        loader().load_state_dict(None)
    own = loader(sampler=SequentialSampler(Numbers(24)))
    assert own.state_dict() is None
    with pytest.warns(UserWarning, match="its sampler is the script's own"):
        own.load_state_dict(state)


def test_scripts_that_skip_by_themselves_are_told_and_can_begin_anew() -> None:
    before = loader()
    list(itertools.islice(before, 3))
    state = before.state_dict()
    after = loader()
    after.load_state_dict(state)
    with pytest.warns(UserWarning, match="go on in epoch 0 after 6 samples, where the checkpoint was"):
        assert drawn(after) == drawn_of_epoch(0)[6:]
    assert drawn(after) == drawn_of_epoch(1)
    after.load_state_dict(state)
    after.rewind()
    assert drawn(after) == drawn_of_epoch(0)
    after.load_state_dict(state)
    after.set_epoch(2)
    assert drawn(after) == drawn_of_epoch(2)


def test_a_pass_under_way_goes_on_where_the_checkpoint_was() -> None:
    one = loader()
    one.announces = False
    endless = RepeatingLoader(one)
    expected = [next(endless).tolist() for _ in range(20)]
    early = loader()
    list(itertools.islice(early, 5))
    one.load_state_dict(early.state_dict())
    assert [next(endless).tolist() for _ in range(15)] == expected[5:]


def test_a_step_that_is_not_complete_takes_its_samples_again(tmp_path: Path) -> None:
    engine = begin(0, accumulate=3, train_dataloader=loader(Rows()), dist_init_required=False)
    for batch in itertools.islice(engine.training_dataloader, 5):
        engine.backward(engine(batch))
        engine.step()
    with pytest.warns(UserWarning, match="save_checkpoint in the middle of a step"):
        engine.save_checkpoint(tmp_path)
    again = begin(0, accumulate=3, train_dataloader=loader(Rows()), dist_init_required=False)
    again.load_checkpoint(tmp_path)
    state = again.training_dataloader.state_dict()
    assert state == {"of": 23, "epoch": 0, "samples": 6}
    again.load_checkpoint(tmp_path, load_module_only=True)
    again.destroy()
    engine.destroy()
