"""Micro-batches of this rank's share of a data set, as DeepSpeed's dataloader makes them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any, Final

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler
from torch.utils.data.distributed import DistributedSampler

WORKERS: Final = 2
"""Processes that load a rank's data by default: DeepSpeed has two a GPU."""

_END: Final = object()


@dataclass(frozen=True, slots=True)
class _DataPosition:
    """Where a training stood in its data."""

    epoch: int
    samples: int | None
    """Of that pass, what all ranks had taken; None before it began."""


@dataclass(slots=True)
class _Progress:
    """How far a pass is. Apart from it: the loader must not keep a pass alive, whose end ends its workers."""

    samples: int
    """Of all ranks."""
    over: bool = False


class ShardedLoader:
    """Micro-batches of `batch_size` samples, those of data-parallel rank `rank` of `world_size`.

    A data set with a length is shuffled, anew in every pass, and padded so that each rank gets as many samples;
    `sampler` replaces that and is then responsible for the split. An `IterableDataset` cannot be shuffled or counted:
    of every `world_size` samples in a row each rank takes the one at its place, and a last row that is not full is
    dropped, so that no rank goes on alone. Every rank therefore reads the whole stream, in one worker at most; a stream
    that splits itself belongs into a DataLoader of its own, which the engine takes as well.

    With `shares` ranks get unequally many samples of each micro-batch, one rank's after the other's: a data set is
    padded to whole micro-batches of all ranks. A rank whose share is 0 gets one, since it runs the model with the
    others; it is for whoever weighs its loss to leave that out.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        sampler: Sampler[Any] | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        num_workers: int = WORKERS,
        pin_memory: bool | None = None,
        seed: int = 0,
        shares: Sequence[int] | None = None,
    ) -> None:
        """`pin_memory`: by default where there is a GPU. `num_workers`: processes that load. `shares`: samples of each
        rank in a micro-batch, in the place of `batch_size` for all.

        Raises TypeError if `dataset` is neither kind of data set, ValueError for a sampler of a stream.
        """
        self.dataset = dataset
        self.batch_size = batch_size = batch_size if shares is None else max(1, shares[rank])
        self._in_all = batch_size * world_size if shares is None else sum(shares)
        """Samples of a micro-batch, over all ranks."""
        self.announces = True
        """Whether to warn where a pass goes on in the middle, for scripts that would skip its beginning themselves."""
        self._row = world_size if shares is None else 1
        """Samples of all ranks that are skipped together."""
        self._rank = rank
        self._resume: _DataPosition | None = None
        self._progress: _Progress | None = None
        if isinstance(dataset, IterableDataset):
            if sampler is not None:
                raise ValueError("an IterableDataset comes in its own order: leave the sampler out")
            dataset = _Rows(dataset, shares or [1] * world_size, rank)
            num_workers = min(num_workers, 1)
        elif not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
            raise TypeError(
                f"training_data is a {type(dataset).__name__}; give a data set with __getitem__ and __len__, or a "
                "torch.utils.data.IterableDataset"
            )
        elif sampler is None and shares is not None:
            sampler = _UnequalSampler(dataset, shares, rank, shuffle=shuffle, seed=seed, drop_last=drop_last)
        elif sampler is None:
            sampler = _CountingSampler(dataset, world_size, rank, shuffle=shuffle, seed=seed)
        self.data_sampler = sampler
        self._loader = DataLoader(
            dataset,
            batch_size=batch_size,
            sampler=sampler,
            collate_fn=collate_fn,
            drop_last=drop_last,
            num_workers=num_workers,
            pin_memory=torch.cuda.is_available() if pin_memory is None else pin_memory,
        )

    def __len__(self) -> int:
        """Micro-batches in a pass; TypeError for a stream that has no length."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return _EpochIterator(self)

    def set_epoch(self, epoch: int) -> None:
        """Have the next pass shuffle as that of `epoch`, and the ones after it count on."""
        if isinstance(self.data_sampler, DistributedSampler):
            self.data_sampler.set_epoch(epoch)

    def rewind(self) -> None:
        """Begin the next pass with its first sample, although a checkpoint was in the middle of it."""
        self._resume = None

    def state_dict(self, behind: int = 0) -> dict[str, Any] | None:
        """Where the pass stands, the same on all ranks; None with a `sampler` of the caller's, which alone knows.

        The last `behind` micro-batches count as if they had not been taken.
        """
        sampler = self.data_sampler
        if not isinstance(sampler, _CountingSampler | None):
            return None
        epoch = 0 if sampler is None else sampler.next
        about: dict[str, Any] = {"of": self._samples_in_all, "epoch": epoch, "samples": None}
        if self._resume is not None:
            samples = self._resume.samples if self._resume.epoch == epoch else None
            return {**about, "samples": samples}
        progress = self._progress
        if progress is None or progress.over or (sampler is not None and sampler.is_set):
            return about
        samples = max(0, progress.samples - behind * self._in_all)
        if sampler is not None:
            about["epoch"], samples = sampler.epoch, min(samples, sampler.total_size)
        return {**about, "samples": samples}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Go on where `state_dict` was asked: with the next pass, or with one that is under way.

        Another number of ranks or another batch size goes on behind the same samples. What cannot be is warned of.
        """
        sampler = self.data_sampler
        if not isinstance(sampler, _CountingSampler | None):
            return self._warn("its sampler is the script's own: the training data begin where that says")
        if state is None:
            return self._warn("the checkpoint does not say where the training data were: they go on as they are")
        length, samples, epoch = self._samples_in_all, state["samples"], state["epoch"]
        if sampler is not None:
            sampler.set_epoch(epoch)
        if length != state["of"]:
            self._warn(
                f"training_data has {_count(length)} samples and had {_count(state['of'])}: epoch {epoch} begins anew"
            )
            samples = None
        elif samples is not None and samples % self._row:
            self._warn(
                f"{samples} samples of epoch {epoch} were taken, which the {self._row} ranks do not divide: the "
                f"last {samples % self._row} of them come again"
            )
        self._resume = _DataPosition(epoch, None if samples is None else samples - samples % self._row)
        return None

    @property
    def _samples_in_all(self) -> int | None:
        """None of a stream: not every one knows."""
        return None if self.data_sampler is None else len(self.dataset)  # type: ignore[arg-type]

    def _warn(self, text: str) -> None:
        if self._rank == 0:
            warnings.warn(f"load_checkpoint: {text}", stacklevel=4)

    def _open(self) -> tuple[Iterator[Any], _Progress]:
        """The batches of the next pass, and where that begins."""
        place, self._resume = self._resume, None
        sampler = self.data_sampler
        epoch = sampler.begin() if isinstance(sampler, _CountingSampler) else 0
        resumed = place is not None and place.samples is not None and place.epoch == epoch
        skip = (place.samples or 0) if resumed and place is not None else 0
        if isinstance(sampler, _CountingSampler):
            sampler.skip = skip // self._row
        elif isinstance(self._loader.dataset, _Rows):
            self._loader.dataset.skip = skip
        if skip and self.announces and self._rank == 0:
            warnings.warn(
                f"the training data go on in epoch {epoch} after {skip} samples, where the "
                "checkpoint was: leave it out if the script skips them itself, or call "
                "engine.training_dataloader.rewind() before",
                stacklevel=4,
            )
        # A DataLoader draws the seed of its workers when a pass begins: this one had begun before.
        with torch.random.fork_rng(devices=()) if resumed else nullcontext():
            batches = iter(self._loader)
        self._progress = _Progress(skip)
        return batches, self._progress


class _EpochIterator:
    """One pass over a ShardedLoader, which knows how far it is."""

    def __init__(self, loader: ShardedLoader) -> None:
        self._loader = loader
        self._batches, self._progress = loader._open()

    def __iter__(self) -> _EpochIterator:
        return self

    def __next__(self) -> Any:
        if not self._progress.over and self._loader._resume is not None:
            self._batches, self._progress = self._loader._open()
        batch = _END if self._progress.over else next(self._batches, _END)
        if batch is _END:
            self._progress.over = True
            raise StopIteration
        self._progress.samples += self._loader._in_all
        return batch


class RepeatingLoader:
    """The batches of `loader`, over and over. Raises ValueError if a pass has none."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self._pass = iter(())

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        for _ in range(2):
            batch = next(self._pass, _END)
            if batch is not _END:
                return batch
            self._pass = iter(self.loader)
        raise ValueError(
            "RepeatingLoader: a pass over the loader gave no batch; it is empty, or an iterator that can be read only "
            "once (give the DataLoader or list itself)"
        )


def endless(loader: Iterable[Any]) -> RepeatingLoader:
    """The batches of an engine's loader, drawn by the engine itself: no script skips any of them."""
    if isinstance(loader, ShardedLoader):
        loader.announces = False
    return RepeatingLoader(loader)


class _CountingSampler(DistributedSampler[Any]):
    """Begins with epoch 0 and goes on to the next with every pass, except to one that the caller has set."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.is_set = True
        self.skip = 0
        """Samples that the next iterator leaves out at its beginning."""

    @property
    def next(self) -> int:
        """The epoch of the next pass."""
        return self.epoch + (not self.is_set)

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self.is_set = True

    def begin(self) -> int:
        """Go on to the epoch of the next pass."""
        super().set_epoch(self.next)
        self.is_set = False
        return self.epoch

    def __iter__(self) -> Iterator[Any]:
        skip, self.skip = self.skip, 0
        return islice(super().__iter__(), skip, None)


class _UnequalSampler(_CountingSampler):
    """Of all samples in their order, in rows of a micro-batch of all ranks, those that are `rank`'s; behind the last,
    the first ones fill up the row, or with `drop_last` a row that is not full is left."""

    def __init__(
        self, dataset: Any, shares: Sequence[int], rank: int, *, shuffle: bool, seed: int, drop_last: bool
    ) -> None:
        super().__init__(dataset, 1, 0, shuffle=shuffle, seed=seed)
        self._row, self._mine, self._drops = sum(shares), _part(shares, rank), drop_last

    def __len__(self) -> int:
        rows: int = self.total_size // self._row if self._drops else -(-self.total_size // self._row)
        return rows * len(range(self._row)[self._mine])

    def __iter__(self) -> Iterator[Any]:
        start, self.skip = self.skip, 0
        order = list(super().__iter__())
        missing = 0 if self._drops else (start - len(order)) % self._row
        order = [*order[start:], *islice(cycle(order), missing)]
        for at in range(0, len(order) - self._row + 1, self._row):
            yield from order[at : at + self._row][self._mine]


class _Rows(IterableDataset[Any]):
    """Of every sum of `shares` samples in a row, those that are `rank`'s; samples at the end that are no full row are
    left."""

    def __init__(self, samples: IterableDataset[Any], shares: Sequence[int], rank: int) -> None:
        self._samples = samples
        self._row, self._mine = sum(shares), _part(shares, rank)
        self.skip = 0
        """Samples that the next iterator leaves out at its beginning."""

    def __iter__(self) -> Iterator[Any]:
        return self._read(self.skip)

    def _read(self, skip: int) -> Iterator[Any]:
        samples = islice(self._samples, skip, None)
        for row in zip(*[samples] * self._row, strict=False):
            yield from row[self._mine]

    def __len__(self) -> int:
        rows: int = len(self._samples) // self._row  # type: ignore[arg-type]
        return rows * len(range(self._row)[self._mine])


def _part(shares: Sequence[int], rank: int) -> slice:
    """Where the samples of `rank` are in a row of all ranks'; one of the row for a rank without any."""
    start = min(sum(shares[:rank]), sum(shares) - 1)
    return slice(start, start + max(1, shares[rank]))


def _count(samples: int | None) -> str:
    return "an unknown number of" if samples is None else str(samples)
