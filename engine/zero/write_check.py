"""Whether a script has written to parameters where torch does not count it: to their `.data`, or through numpy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import compress
from typing import Final, Protocol

import torch
from torch import Tensor

from ..tree import batches
from .shard import ShardedParam

STRETCH: Final = 4096
"""Bytes of a shard on a GPU that have a sum of their own."""
PUT_TOGETHER: Final = 32 << 20
"""Bytes of shards on a GPU that are summed up at once. One that is larger takes longer to read than its kernel to
launch, and is not copied for it."""


class WriteCheck:
    """Looks whether the script has written to parameters where torch does not count it: to their `.data`, as
    `param.data.clamp_(...)` does, or through numpy. Only those whose masters are apart: others are written with their
    parameters. Sums over the bits of this rank's shard of each, so what only changes places is not seen.

    On a GPU, where the host would have to wait for the answer, it is asked for when a step's first forward begins, and
    read at the step: a host that is ahead then waits for the beginning of the step, and its device has work meanwhile.
    """

    def __init__(self, params: Iterable[ShardedParam]) -> None:
        found = [p for p in params if p.persistent and p.trainable and not p.master_is_shard and p.shard.numel()]
        places: dict[torch.device, list[ShardedParam]] = {}
        for param in found:
            places.setdefault(param.shard.device, []).append(param)
        self._places: list[_Place] = [
            _OnGpu(some, device) if device.type == "cuda" else _OnHost(some) for device, some in places.items()
        ]
        self._params = found
        self._on_gpu = any(device.type == "cuda" for device in places)
        self._sums = self._present()
        self._asked: tuple[list[Tensor], _Answer] | None = None
        """The sums when a forward began, and which of them were no longer the engine's."""
        self._since: tuple[_Answer, set[ShardedParam]] | None = None
        """Which were written to between the forward of the last step and that, and which of these were overlooked if
        they were."""

    def ask(self) -> None:
        """A step's forward begins: have a GPU say at the step what has been written since the last one."""
        if self._on_gpu:
            now = self._present()
            self._asked = now, _Answer(self._places, self._sums, now)

    def mark(self, *, step: bool = False) -> None:
        """Before masters are stepped or saved: have `take_edits` look at what was written to.

        Raises RuntimeError if the last `step` could not know in time of what was written."""
        since, self._since = self._since, None
        lost = [] if since is None else [param.name for param in since[0].written() if param in since[1]]
        if lost:
            raise RuntimeError(
                f"{lost[0]} was written to through .data, or another tensor of the same memory, between the "
                "forward of the last step and that, which has gone over it: write to the parameter itself, under "
                "torch.no_grad(), or between a step and the next forward"
            )
        now = self._present()
        asked, self._asked = self._asked if step else None, None
        answer = _Answer(self._places, self._sums, now) if asked is None else asked[1]
        for param in answer.written():
            param.written()
        if asked is not None:
            overlooked = {param for param in self._params if not param.edited}
            self._since = _Answer(self._places, asked[0], now), overlooked

    def note(self) -> None:
        """After masters have come to their parameters: these are as they should be."""
        self._sums = self._present()

    def _present(self) -> list[Tensor]:
        """The sums of each place."""
        return [place.sums() for place in self._places]


class _Place(Protocol):
    """Shards on one device."""

    def sums(self) -> Tensor:
        """Sums over their bits, at least one a shard."""

    def of(self, differ: Sequence[bool]) -> Iterable[ShardedParam]:
        """The parameters whose sums these are that differ."""


class _OnHost:
    """A sum a parameter, which costs nothing but to read it."""

    def __init__(self, params: Sequence[ShardedParam]) -> None:
        self._params = params

    def sums(self) -> Tensor:
        return torch.stack([_words(param.shard).sum() for param in self._params])

    def of(self, differ: Sequence[bool]) -> Iterable[ShardedParam]:
        return compress(self._params, differ)


class _OnGpu:
    """To launch a kernel takes a host longer than its device takes to read a parameter. So shards are put one behind
    the other, each beginning a stretch, and all stretches are summed up by one kernel: two launches in the place of one
    a parameter."""

    def __init__(self, params: Sequence[ShardedParam], device: torch.device) -> None:
        self._alone: list[Tensor] = []
        """Shards that have one sum each; before the others."""
        self._together: list[list[Tensor]] = []
        """Shards and what fills the last stretch of each; those of one list, in words of the same size, are summed up
        at once."""
        of_alone: list[ShardedParam] = []
        of_together: list[ShardedParam] = []
        nothing = torch.zeros(STRETCH, dtype=torch.uint8, device=device)
        by_word = sorted(params, key=lambda param: _words(param.shard).element_size())
        for same in batches(by_word, PUT_TOGETHER, _filled, lambda param: _words(param.shard).dtype):
            if len(same) == 1:
                self._alone.append(_words(same[0].shard))
                of_alone += same
                continue
            self._together.append([])
            for param in same:
                words = _words(param.shard)
                rest = nothing[: _filled(param) - words.nbytes].view(words.dtype)
                self._together[-1] += [words, rest] if rest.numel() else [words]
                of_together += [param] * (_filled(param) // STRETCH)
        self._owners = [*of_alone, *of_together]
        """Of each sum, whose it is."""

    def sums(self) -> Tensor:
        alone = [shard.sum().view(1) for shard in self._alone]
        together = [
            torch.cat(some).view(-1, STRETCH // some[0].element_size()).sum(1, dtype=torch.int64)
            for some in self._together
        ]
        return torch.cat([*alone, *together])

    def of(self, differ: Sequence[bool]) -> Iterable[ShardedParam]:
        return dict.fromkeys(compress(self._owners, differ))


def _filled(param: ShardedParam) -> int:
    """Bytes of its shard in whole stretches."""
    return -(-param.shard.nbytes // STRETCH) * STRETCH


class _Answer:
    """Of which parameters two sums differ; of those on a GPU it can be read when that has come to it."""

    def __init__(self, places: Sequence[_Place], before: Sequence[Tensor], now: Sequence[Tensor]) -> None:
        self._places = places
        self._differ = [_to_host(old != new) for old, new in zip(before, now, strict=True)]
        self._there = [torch.cuda.Event() for sums in now if sums.is_cuda]
        for event in self._there:
            event.record()

    def written(self) -> list[ShardedParam]:
        """Waits until it is there."""
        for event in self._there:
            event.synchronize()
        found = zip(self._places, self._differ, strict=True)
        return [param for place, differ in found if differ.any() for param in place.of(differ.tolist())]


def _to_host(values: Tensor) -> Tensor:
    """They are there when their device has come to it."""
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda).copy_(values, non_blocking=True)


def _words(values: Tensor) -> Tensor:
    """Their bits as integers: 8 bytes in one where they are aligned, which is read forty times as fast."""
    size = values.element_size()
    aligned = all(number * size % 8 == 0 for number in (values.numel(), values.storage_offset()))
    return values.view(torch.int64 if aligned else {2: torch.int16, 4: torch.int32, 8: torch.int64}[size])
