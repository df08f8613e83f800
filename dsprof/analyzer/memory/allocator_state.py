"""What the allocators of a run's devices held in the end: by pool, and by the line of the script that allocated it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pandas as pd

from dsprof.trace import Memory
from dsprof.trace.memory import DEFAULT_POOL, NO_STACK

from ..allocator.alloc_conf import LARGE_SEGMENT, SMALL_SEGMENT

LIBRARIES: Final = ("/site-packages/", "/dist-packages/", "/lib/python3", "<", "/torch/")
"""Parts of file names that are not the user's."""
UNKNOWN: Final = "unknown"
UNRECORDED: Final = "no stack recorded"
NATIVE, NAMED, BACKWARD, LIBRARY, USERS = range(5)
"""What a frame says: nothing, an operator, a node of backward, a line of a library, of the user's: the last is best."""
OPERATOR: Final = re.compile(r"autograd::generated::(\w+)::apply|at::_ops::(\w+)::call")
MOST_HOLDERS: Final = 12
STATE_COLUMNS: Final = ("allocated", "pending", "split", "releasable")
"""What reserved memory is, as of `PoolUse`: together it is all of it."""
SEGMENT_COLUMNS: Final = ("segment", "pool", "stream", "reserved", *STATE_COLUMNS)


@dataclass(frozen=True)
class PoolUse:
    """One pool of one stream; sizes in bytes.

    allocated:  of blocks in use, and requested: what tensors asked for of it.
    pending:    freed, but another stream may still use it.
    releasable: free in whole segments, or pages of an expandable one.
    split:      free beside blocks in use, so neither released nor, for most sizes, used.
    """

    pool: str
    stream: int
    segments: int
    reserved: int
    allocated: int
    requested: int
    pending: int
    releasable: int
    split: int
    largest_free: int


@dataclass(frozen=True)
class Holder:
    """A line of the script (`train.py:12`), the function it is in, and what was allocated there and is in use."""

    site: str
    function: str
    bytes: int
    blocks: int


@dataclass(frozen=True)
class DeviceMemory:
    """What one rank's device held, largest first."""

    rank: int
    device: int
    pools: tuple[PoolUse, ...]
    holders: tuple[Holder, ...]

    def total(self, name: str) -> int:
        """Of a number of `PoolUse`, over its pools."""
        return sum(getattr(pool, name) for pool in self.pools)


def summarize_memory(memories: Mapping[int, Memory]) -> tuple[DeviceMemory, ...]:
    """By rank and device."""
    found = []
    for rank in sorted(memories):
        memory = memories[rank]
        places = sites_of(memory.stacks)
        devices = memory.segments["device"].to_numpy(np.int64)
        of_block = devices[memory.blocks["segment"].to_numpy(np.int64)]
        for device in sorted({*devices.tolist(), *memory.history["device"].tolist()}):
            blocks = memory.blocks[of_block == device]
            used = blocks[blocks["state"] == "allocated"]
            held: dict[int, tuple[int, int]] = {}
            for stack, size in zip(used["stack"].tolist(), used["bytes"].tolist(), strict=True):
                bytes_so_far, count = held.get(stack, (0, 0))
                held[stack] = bytes_so_far + size, count + 1
            pools = _pools(memory.segments, blocks)
            found.append(DeviceMemory(rank, device, pools, tuple(holders_of(held, places))))
    return tuple(found)


def segment_uses(memory: Memory, device: int) -> pd.DataFrame:
    """What each segment of a device is (SEGMENT_COLUMNS, sizes in bytes; those of STATE_COLUMNS sum to `reserved`), the
    largest first, and of those as large the one with most in use."""
    blocks = memory.blocks[memory.segments["device"].to_numpy(np.int64)[memory.blocks["segment"]] == device]
    by = _by_block(memory.segments, blocks).groupby("segment")
    table = by[["reserved", *STATE_COLUMNS]].sum().join(by[["pool", "stream"]].first())
    table = table.sort_values(["reserved", "allocated"], ascending=False, kind="stable").reset_index()
    return table[list(SEGMENT_COLUMNS)]


def _pools(segments: pd.DataFrame, blocks: pd.DataFrame) -> tuple[PoolUse, ...]:
    found = []
    for (pool, stream), part in _by_block(segments, blocks).groupby(["pool", "stream"]):
        sums = {name: int(part[name].sum()) for name in ("reserved", "requested", *STATE_COLUMNS)}
        found.append(
            PoolUse(
                str(pool), int(stream), int(part["segment"].nunique()), **sums,
                largest_free=int(part["largest_free"].max()),
            )
        )  # fmt: skip
    return tuple(sorted(found, key=lambda one: -one.reserved))


def _by_block(segments: pd.DataFrame, blocks: pd.DataFrame) -> pd.DataFrame:
    """What each block is: its pool, stream and segment, and its bytes in the columns that fit."""
    of = segments.iloc[blocks["segment"].to_numpy(np.int64)]
    start, size = blocks["address"].to_numpy(np.int64), blocks["bytes"].to_numpy(np.int64)
    begin, whole = of["address"].to_numpy(np.int64), of["bytes"].to_numpy(np.int64)
    page = np.where(of["small"], SMALL_SEGMENT, LARGE_SEGMENT)
    pages = (start + size - begin) // page * page - -(-(start - begin) // page) * page
    back = np.where(of["expandable"], np.maximum(pages, 0), np.where(size == whole, size, 0))
    state = blocks["state"].astype(str).to_numpy(object)
    free = state == "free"
    return pd.DataFrame(
        {
            "pool": [_pool_name(small, pool) for small, pool in zip(of["small"], of["pool"], strict=True)],
            "stream": of["stream"].to_numpy(np.int64), "segment": blocks["segment"].to_numpy(np.int64),
            "reserved": size,
            "allocated": np.where(state == "allocated", size, 0), "pending": np.where(state == "pending", size, 0),
            "requested": np.where(state == "allocated", blocks["requested"].to_numpy(np.int64), 0),
            "releasable": np.where(free, back, 0), "split": np.where(free, size - back, 0),
            "largest_free": np.where(free, size, 0),
        }
    )  # fmt: skip


def _pool_name(small: bool, pool: str) -> str:
    name = "small" if small else "large"
    return name if pool == DEFAULT_POOL else f"{name}, private {pool}"


def holders_of(held: Mapping[int, tuple[int, int]], places: Mapping[int, tuple[str, str]]) -> list[Holder]:
    """Stack -> (bytes, blocks) by the line of the script, largest first; the first MOST_HOLDERS."""
    by_place: dict[tuple[str, str], tuple[int, int]] = {}
    for stack, (size, count) in held.items():
        place = places.get(stack, (UNKNOWN, ""))
        bytes_so_far, blocks = by_place.get(place, (0, 0))
        by_place[place] = bytes_so_far + size, blocks + count
    ranked = sorted(by_place.items(), key=lambda item: -item[1][0])[:MOST_HOLDERS]
    return [Holder(site, function, size, count) for (site, function), (size, count) in ranked]


def sites_of(stacks: pd.DataFrame) -> dict[int, tuple[str, str]]:
    """Stack -> the innermost line of it that is the user's own (`/home/me/train.py:12`), and its function.

    Of one without such a line the innermost one of Python; of one without Python, such as backward's, the operator.
    """
    found: dict[int, tuple[int, str, str]] = {NO_STACK: (USERS, UNRECORDED, "")}
    kinds = {str(file): _kind(str(file)) for file in stacks["file"].cat.categories}
    operators = {str(name): OPERATOR.search(str(name)) for name in stacks["function"].cat.categories}
    columns: list[list[Any]] = [stacks[name].tolist() for name in ("stack", "function", "file", "line")]
    for stack, function, file, line in zip(*columns, strict=True):
        kind, operator = kinds[file], operators[function]
        if kind == NATIVE and operator is not None:
            kind = NAMED + (operator[1] is not None)
        if stack not in found or kind > found[stack][0]:
            site = f"{file}:{line}" if kind >= LIBRARY else UNKNOWN
            if operator is not None and kind in (NAMED, BACKWARD):
                site = f"{operator[1]}, in backward" if operator[1] else operator[2]
            found[stack] = kind, site, str(function)
    return {stack: (site, function if kind >= LIBRARY else "") for stack, (kind, site, function) in found.items()}


def site_of(frames: Sequence[Sequence[Any]]) -> tuple[str, str]:
    """Of a stack (function, file, line; innermost first) the innermost line that is the user's own, or of a library,
    and its function."""
    best = max(((_kind(str(file)), -at) for at, (_, file, _) in enumerate(frames)), default=(NATIVE, 0))
    if best[0] < LIBRARY:
        return UNKNOWN, ""
    function, file, line = frames[-best[1]]
    return f"{file}:{line}", str(function)


def _kind(file: str) -> int:
    if not file.endswith(".py"):
        return NATIVE
    return LIBRARY if any(part in file for part in LIBRARIES) else USERS
