"""`PYTORCH_CUDA_ALLOC_CONF`: the settings that decide how blocks are sized, split and given back."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

MiB: Final = 1 << 20

LEAST_BLOCK: Final = 512
"""Every size is a multiple of it."""
MOST_SMALL: Final = MiB
"""The largest block of a small pool."""
SMALL_SEGMENT: Final = 2 * MiB
LARGE_SEGMENT: Final = 20 * MiB
"""What a block below LEAST_LARGE is cut from; it is also the page of a large expandable segment."""
LEAST_LARGE: Final = 10 * MiB
ROUND_LARGE: Final = 2 * MiB
LEAST_MAX_SPLIT: Final = LARGE_SEGMENT
"""`max_split_size_mb` below it is refused by torch."""

POWERS: Final = 16
"""Sizes below 2 MiB, below 4 MiB, ..., and from 32 GiB on have their own divisions."""
PLAIN: Final = (0,) * POWERS


@dataclass(frozen=True)
class AllocatorSettings:
    """The settings the twin knows.

    max_split_bytes:      larger blocks are not split; None: all are.
    divisions:            [POWERS], of `roundup_power2_divisions`; 0 or 1: sizes are not rounded to powers of two.
    gc_threshold:         share of the allowed memory from which on old cached segments are given back; 0: never.
    expandable:           segments grow and shrink by pages.
    max_rounding_bytes:   by how much an unsplit block may exceed what is asked for.
    """

    max_split_bytes: int | None = None
    divisions: tuple[int, ...] = PLAIN
    gc_threshold: float = 0.0
    expandable: bool = False
    max_rounding_bytes: int = LARGE_SEGMENT

    @classmethod
    def of_snapshot(cls, told: Mapping[str, Any]) -> AllocatorSettings:
        """From a snapshot's `allocator_settings`. Raises ValueError for what no torch would write."""
        most = told.get("max_split_size", -1)
        divided = told.get("roundup_power2_divisions", {})
        if not isinstance(divided, Mapping):
            raise ValueError(f"roundup_power2_divisions is {divided!r}, no table")
        divisions = [int(divided.get(str(1 << power), 0)) for power in range(POWERS)]
        if any(one < 0 or one & (one - 1) for one in divisions):
            raise ValueError(f"roundup_power2_divisions are {divisions}, not all powers of two")
        rounding = told.get("max_non_split_rounding_size")
        if rounding is None:  # torch 2.11 says it in what was written only
            written = re.search(r"max_non_split_rounding_mb\s*:\s*(\d+)", str(told.get("PYTORCH_CUDA_ALLOC_CONF", "")))
            rounding = int(written[1]) * MiB if written else LARGE_SEGMENT
        return cls(
            max_split_bytes=None if int(most) <= 0 or int(most) >= 1 << 62 else int(most),
            divisions=tuple(divisions),
            gc_threshold=float(told.get("garbage_collection_threshold", 0.0)),
            expandable=bool(told.get("expandable_segments", False)),
            max_rounding_bytes=int(rounding) if int(rounding) > 0 else LARGE_SEGMENT,
        )

    def round_size(self, requested: int) -> int:
        """The size of the block that `requested` bytes get, before what cannot be split off is added."""
        if requested < LEAST_BLOCK:
            return LEAST_BLOCK
        divisions = self.divisions[min(max(requested.bit_length() - 21, 0), POWERS - 1)]
        if divisions > 1 and requested > LEAST_BLOCK * divisions:
            return _next_division(requested, divisions)
        return -(-requested // LEAST_BLOCK) * LEAST_BLOCK

    def __str__(self) -> str:
        """As it is written in PYTORCH_CUDA_ALLOC_CONF; empty where all is as by default."""
        words = []
        if self.expandable:
            words.append("expandable_segments:True")
        if self.max_split_bytes is not None:
            words.append(f"max_split_size_mb:{self.max_split_bytes // MiB}")
        if self.max_rounding_bytes != LARGE_SEGMENT:
            words.append(f"max_non_split_rounding_mb:{self.max_rounding_bytes // MiB}")
        if any(one > 1 for one in self.divisions):
            words.append(f"roundup_power2_divisions:{self._written_divisions()}")
        if self.gc_threshold:
            words.append(f"garbage_collection_threshold:{self.gc_threshold:g}")
        return ",".join(words)

    def _written_divisions(self) -> str:
        if len(set(self.divisions)) == 1:
            return str(self.divisions[0])
        # An entry holds for sizes up to the next larger one's, `>` for all beyond.
        pairs = [f"{1 << power}:{one}" for power, one in enumerate(self.divisions[:-1])]
        return f"[{','.join(pairs)},>:{self.divisions[-1]}]"


def segment_size(size: int) -> int:
    """What is asked of the device for a block of `size` bytes."""
    if size <= MOST_SMALL:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < LEAST_LARGE else -(-size // ROUND_LARGE) * ROUND_LARGE


def _next_division(size: int, divisions: int) -> int:
    """`size` rounded up to the next of so many equal parts between two powers of two."""
    if not size & (size - 1):
        return size
    floor = 1 << (size.bit_length() - 1)
    part = floor >> (divisions.bit_length() - 1)
    return floor << 1 if not part else -(-size // part) * part
