"""Memory that files are read to and written from: page-aligned, as O_DIRECT wants it, and used again and again."""

from __future__ import annotations

import contextlib
import ctypes
from collections import deque
from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from ..comm.lane import LaneTicket
from ..hooks import MemoryPart, holds_memory

PAGE: Final = 4096
"""Bytes. No disk has larger logical blocks, which addresses, offsets and lengths must be multiples of."""


def round_up(nbytes: int, unit: int = PAGE) -> int:
    """The next multiple of `unit`."""
    return -(-nbytes // unit) * unit


def aligned(nbytes: int, pin: bool = False) -> Tensor:
    """Host memory [nbytes], uint8, that begins on a page and ends with one; page-locked with `pin`."""
    nbytes = round_up(nbytes)
    with torch.inference_mode(False):  # it is used again, by training
        memory = torch.empty(nbytes + PAGE, dtype=torch.uint8, pin_memory=pin)
    start = -memory.data_ptr() % PAGE
    return memory[start : start + nbytes]


def as_bytes(memory: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, as system calls take them. The tensor must stay alive meanwhile."""
    return memoryview((ctypes.c_char * memory.nbytes).from_address(memory.data_ptr())).cast("B")


def hollow(shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """What stands for a tensor that is elsewhere: shape and dtype, one element of memory.

    Reading it gives NaN (0 for integers), and writing to it is an error.
    """
    floating = dtype.is_floating_point or dtype.is_complex
    return torch.full((), torch.nan if floating else 0, dtype=dtype).expand(shape)


class Buffer:
    """Memory of a pool."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.fence: torch.cuda.Event | None = None
        """After it the device reads this memory no longer."""

    def view(self, start: int, dtype: torch.dtype, shape: torch.Size | tuple[int, ...]) -> Tensor:
        """A tensor in this memory, from byte `start`, which its element size must divide."""
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        return self.memory[start : start + nbytes].view(dtype).view(shape)


class Pool:
    """At most `count` buffers, made when they are first needed, and made larger when that is asked for.

    `device` is where what passes through them is used; for a GPU they are page-locked, unless `pin` is false. `part` is
    what passes, for `hooks.memory_held`.
    """

    def __init__(self, part: MemoryPart, count: int, device: torch.device, pin: bool = True) -> None:
        self._part = part
        self._count = count
        self._device = device
        self._pin = pin and device.type == "cuda"
        self._made = 0
        self._free: list[Buffer] = []
        self._leaving: deque[tuple[Buffer, LaneTicket]] = deque()
        holds_memory(self)

    def take(self, nbytes: int, wait: bool = True) -> Buffer | None:
        """A buffer of at least `nbytes`, what is in it undefined; None if there is none now, or with `wait` none to
        wait for. Raises what a write from it raised.
        """
        needed = wait and not self._free and self._made == self._count
        if self._leaving and (needed or self._leaving[0][1].done):
            buffer, ticket = self._leaving.popleft()
            self._free.append(buffer)
            if needed:
                ticket.wait()
            else:
                ticket.check()
        if not self._free:
            if self._made == self._count:
                return None
            self._made += 1
            return Buffer(aligned(nbytes, self._pin))
        buffer = self._free.pop()
        if buffer.fence is not None:
            buffer.fence.synchronize()
            buffer.fence = None
        if buffer.memory.nbytes < nbytes:
            buffer.memory = aligned(0)  # frees the old before the new is there
            buffer.memory = aligned(nbytes, self._pin)
        return buffer

    def settle(self) -> None:
        """Wait for the writes under way. What they raise, who began them has from their tickets."""
        while self._leaving:
            buffer, ticket = self._leaving.popleft()
            with contextlib.suppress(Exception):
                ticket.wait()
            self._free.append(buffer)

    def memory(self) -> Iterator[tuple[MemoryPart, Tensor]]:
        """The buffers that nobody has taken."""
        for buffer in (*self._free, *(leaving for leaving, _ in self._leaving)):
            yield self._part, buffer.memory

    def enlarge(self, buffer: Buffer, nbytes: int) -> None:
        """Make a buffer in use larger; what is in it stays. Views of the old memory are no longer part of it."""
        if buffer.memory.nbytes < nbytes:
            memory = aligned(nbytes, self._pin)
            memory[: buffer.memory.nbytes].copy_(buffer.memory)
            buffer.memory = memory

    def give(self, buffer: Buffer, after: LaneTicket | None = None) -> None:
        """Give a buffer back, free as soon as the write `after` is over, and copies to the device that have begun."""
        if self._device.type == "cuda":
            buffer.fence = torch.cuda.Event()
            buffer.fence.record()
        if after is None:
            self._free.append(buffer)
        else:
            self._leaving.append((buffer, after))
