"""Micro-batches of this rank's share of a data set, as DeepSpeed's dataloader makes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler
from torch.utils.data.distributed import DistributedSampler

_END: Final = object()


class ShardedLoader:
    """Micro-batches of `batch_size` samples, those of data-parallel rank `rank` of `world_size`.

    A data set with a length is shuffled, anew in every pass, and padded so that each rank gets as many samples;
    `sampler` replaces that and is then responsible for the split. An `IterableDataset` cannot be shuffled or counted:
    of every `world_size` samples in a row each rank takes the one at its place, and a last row that is not full is
    dropped, so that no rank goes on alone. Every rank therefore reads the whole stream, in one worker at most; a stream
    that splits itself belongs into a DataLoader of its own, which the engine takes as well.
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
        num_workers: int = 2,
        pin_memory: bool | None = None,
        seed: int = 0,
    ) -> None:
        """`pin_memory`: by default where there is a GPU. `num_workers`: processes that load; DeepSpeed has two a GPU.

        Raises TypeError if `dataset` is neither kind of data set, ValueError for a sampler of a stream.
        """
        self.dataset = dataset
        self.batch_size = batch_size
        if isinstance(dataset, IterableDataset):
            if sampler is not None:
                raise ValueError("an IterableDataset comes in its own order: leave the sampler out")
            dataset = _EveryNth(dataset, rank, world_size)
            num_workers = min(num_workers, 1)
        elif not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
            raise TypeError(
                f"training_data is a {type(dataset).__name__}; give a data set with __getitem__ and __len__, or a "
                "torch.utils.data.IterableDataset"
            )
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
        return iter(self._loader)

    def set_epoch(self, epoch: int) -> None:
        """Have the next pass shuffle as that of `epoch`, and the ones after it count on."""
        if isinstance(self.data_sampler, DistributedSampler):
            self.data_sampler.set_epoch(epoch)


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


class _CountingSampler(DistributedSampler[Any]):
    """Begins with epoch 0 and goes on to the next with every pass, except to one that the caller has set."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_set = True

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self._is_set = True

    def __iter__(self) -> Iterator[Any]:
        if not self._is_set:
            self.epoch += 1
        self._is_set = False
        return super().__iter__()


class _EveryNth(IterableDataset[Any]):
    """Of every `n` samples in a row, the one at place `index`; samples at the end that are no full row are left."""

    def __init__(self, samples: IterableDataset[Any], index: int, n: int) -> None:
        self._samples = samples
        self._index = index
        self._n = n

    def __iter__(self) -> Iterator[Any]:
        for row in zip(*[iter(self._samples)] * self._n, strict=False):
            yield row[self._index]

    def __len__(self) -> int:
        return len(self._samples) // self._n  # type: ignore[arg-type]
