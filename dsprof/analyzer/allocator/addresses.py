"""Where the device puts a segment. Of free blocks of one size the allocator takes the one at the lowest address, so a
prediction that is to be right to the byte needs it.

The rules are what was seen of cudaMalloc on an H100 (driver 580, `benchmarks/gpu_allocator.py`); NVIDIA states none.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

STRETCH: Final = 32 << 20
"""Addresses are reserved in multiples of it."""
TOP: Final = 1 << 56

Span = tuple[int, int]
"""First address, and bytes."""


class DeviceAddresses:
    """Addresses are reserved from the top down, for one segment a stretch of whole STRETCHes. What that leaves over
    takes later segments, which go to the lowest address where they fit. A stretch that is free as a whole is given up.
    """

    def __init__(self) -> None:
        self._bottom = TOP
        self._sizes: dict[int, int] = {}
        self._stretches: dict[int, int] = {}
        self._holes: list[Span] = []
        """Free in stretches, in order."""
        self._given_up: list[Span] = []

    def place(self, size: int) -> int:
        """The address of a new segment of so many bytes."""
        for at, (start, free) in enumerate(self._holes):
            if free >= size:
                self._holes[at : at + 1] = [(start + size, free - size)] if free > size else []
                break
        else:
            length = -(-size // STRETCH) * STRETCH
            start = self._reserve(length)
            self._stretches[start] = length
            if length > size:
                self._insert(self._holes, (start + size, length - size))
        self._sizes[start] = size
        return start

    def give_back(self, start: int) -> None:
        """The segment at an address; of one that was placed elsewhere nothing is known."""
        size = self._sizes.pop(start, None)
        if size is None:
            return
        hole = self._insert(self._holes, (start, size), apart=self._stretches)
        if self._stretches.get(hole[0]) == hole[1]:
            self._holes.remove(hole)
            del self._stretches[hole[0]]
            if self._insert(self._given_up, hole)[0] == self._bottom:
                self._bottom += self._given_up.pop(0)[1]

    def _reserve(self, length: int) -> int:
        for at in range(len(self._given_up) - 1, -1, -1):
            start, free = self._given_up[at]
            if free >= length:
                self._given_up[at : at + 1] = [(start, free - length)] if free > length else []
                return start + free - length
        self._bottom -= length
        return self._bottom

    @staticmethod
    def _insert(spans: list[Span], span: Span, apart: dict[int, int] | None = None) -> Span:
        """Into spans in order, joined with its neighbours, not across an address in `apart`; the span it is then."""
        start, size = span
        apart = apart or {}
        at = bisect_left(spans, span)
        if at < len(spans) and spans[at][0] == start + size and spans[at][0] not in apart:
            size += spans.pop(at)[1]
        if at and sum(spans[at - 1]) == start and start not in apart:
            at -= 1
            start, before = spans.pop(at)
            size += before
        spans.insert(at, (start, size))
        return start, size
