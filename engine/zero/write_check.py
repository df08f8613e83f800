"""Whether a script has written to parameters where torch does not count it: to their `.data`, or through numpy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import compress
from typing import Final, Protocol

import torch
from torch import Tensor

from ..tree import batches
from .shard import ShardedParam

BLOCK_BYTES: Final = 4096
"""A shard on a GPU has a checksum for each block of so many bytes."""
BATCH_BYTES: Final = 32 << 20
"""So many bytes of shards on a GPU are summed up by one kernel. A larger shard takes longer to read than its own kernel
takes to launch, and is not copied for it."""


class WriteCheck:
    """Looks whether the script has written to parameters where torch does not count it: to their `.data`, as
    `param.data.clamp_(...)` does, or through numpy. Only those whose masters are apart: others are written with their
    parameters. It compares checksums: the bits of this rank's shard as integers, added up. So elements that only change
    places are not seen, nor are changes that cancel in the sum, as when exactly half of a parameter's signs turn.

    On a GPU, where the host would have to wait for the answer, it is asked for when a step's first forward begins, and
    read at the step: a host that is ahead then waits for the beginning of the step, and its device has work meanwhile.
    """

    def __init__(self, params: Iterable[ShardedParam]) -> None:
        found = [p for p in params if p.persistent and p.trainable and not p.master_is_shard and p.shard.numel()]
        by_device: dict[torch.device, list[ShardedParam]] = {}
        for param in found:
            by_device.setdefault(param.shard.device, []).append(param)
        self._checksums: list[_Checksums] = [
            _OnGpu(params, device) if device.type == "cuda" else _OnHost(params) for device, params in by_device.items()
        ]
        self._params = found
        self._on_gpu = any(device.type == "cuda" for device in by_device)
        self._sums = self._present()
        self._asked: tuple[list[Tensor], _Comparison] | None = None
        """The sums when a forward began, and which of them were no longer the engine's."""
        self._since: tuple[_Comparison, set[ShardedParam]] | None = None
        """Which were written to between the forward of the last step and that, and which of these were overlooked if
        they were."""

    def ask(self) -> None:
        """A step's forward begins: have a GPU say at the step what has been written since the last one."""
        if self._on_gpu:
            now = self._present()
            self._asked = now, _Comparison(self._checksums, self._sums, now)

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
        answer = _Comparison(self._checksums, self._sums, now) if asked is None else asked[1]
        for param in answer.written():
            param.written()
        if asked is not None:
            overlooked = {param for param in self._params if not param.edited}
            self._since = _Comparison(self._checksums, asked[0], now), overlooked

    def note(self) -> None:
        """After masters have come to their parameters: these are as they should be."""
        self._sums = self._present()

    def _present(self) -> list[Tensor]:
        """The sums of each device's shards."""
        return [checksums.sums() for checksums in self._checksums]


class _Checksums(Protocol):
    """Of the shards on one device."""

    def sums(self) -> Tensor:
        """At least one sum a shard."""

    def params_of(self, differ: Sequence[bool]) -> Iterable[ShardedParam]:
        """The parameters of those sums that differ."""


class _OnHost:
    """A sum a parameter, which costs nothing but to read it."""

    def __init__(self, params: Sequence[ShardedParam]) -> None:
        self._params = params

    def sums(self) -> Tensor:
        return torch.stack([_words(param.shard).sum() for param in self._params])

    def params_of(self, differ: Sequence[bool]) -> Iterable[ShardedParam]:
        return compress(self._params, differ)


class _OnGpu:
    """To launch a kernel takes a host longer than its device takes to read a parameter. So shards are concatenated,
    each padded to whole blocks, and one kernel sums up all blocks: two launches in the place of one a parameter."""

    def __init__(self, params: Sequence[ShardedParam], device: torch.device) -> None:
        self._single: list[Tensor] = []
        """Shards that have one sum each. Their sums come first."""
        self._batches: list[list[Tensor]] = []
        """Each batch: shards in words of one size, and the padding of each."""
        of_single: list[ShardedParam] = []
        of_batches: list[ShardedParam] = []
        zeros = torch.zeros(BLOCK_BYTES, dtype=torch.uint8, device=device)
        by_word = sorted(params, key=lambda param: _words(param.shard).element_size())
        for same in batches(by_word, BATCH_BYTES, _padded_bytes, lambda param: _words(param.shard).dtype):
            if len(same) == 1:
                self._single.append(_words(same[0].shard))
                of_single += same
                continue
            self._batches.append([])
            for param in same:
                words = _words(param.shard)
                padding = zeros[: _padded_bytes(param) - words.nbytes].view(words.dtype)
                self._batches[-1] += [words, padding] if padding.numel() else [words]
                of_batches += [param] * (_padded_bytes(param) // BLOCK_BYTES)
        self._owners = [*of_single, *of_batches]
        """The parameter of each sum."""

    def sums(self) -> Tensor:
        of_single = [shard.sum().view(1) for shard in self._single]
        of_batches = [
            torch.cat(batch).view(-1, BLOCK_BYTES // batch[0].element_size()).sum(1, dtype=torch.int64)
            for batch in self._batches
        ]
        return torch.cat([*of_single, *of_batches])

    def params_of(self, differ: Sequence[bool]) -> Iterable[ShardedParam]:
        return dict.fromkeys(compress(self._owners, differ))


def _padded_bytes(param: ShardedParam) -> int:
    """Bytes of its shard in whole blocks."""
    return -(-param.shard.nbytes // BLOCK_BYTES) * BLOCK_BYTES


class _Comparison:
    """Which parameters' sums differ. On a GPU the comparison is enqueued, and read when the device has come to it."""

    def __init__(self, checksums: Sequence[_Checksums], before: Sequence[Tensor], now: Sequence[Tensor]) -> None:
        self._checksums = checksums
        self._differ = [_to_host(old != new) for old, new in zip(before, now, strict=True)]
        self._copied = [torch.cuda.Event() for sums in now if sums.is_cuda]
        for event in self._copied:
            event.record()

    def written(self) -> list[ShardedParam]:
        """Waits for the device to have compared."""
        for event in self._copied:
            event.synchronize()
        found = zip(self._checksums, self._differ, strict=True)
        return [param for checksums, differ in found if differ.any() for param in checksums.params_of(differ.tolist())]


def _to_host(values: Tensor) -> Tensor:
    """The values are there when their device has come to it."""
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda).copy_(values, non_blocking=True)


def _words(values: Tensor) -> Tensor:
    """Their bits as integers: 8 bytes in one where they are aligned, which is read forty times as fast."""
    size = values.element_size()
    aligned = all(number * size % 8 == 0 for number in (values.numel(), values.storage_offset()))
    return values.view(torch.int64 if aligned else {2: torch.int16, 4: torch.int32, 8: torch.int64}[size])
