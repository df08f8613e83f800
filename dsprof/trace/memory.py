"""What a device's caching allocator held, and how it came to: side tables of a run, one set a rank.

    memory/rank00003.segments.parquet  .blocks.parquet  .history.parquet  .stacks.parquet

A segment is memory that the allocator got from the device; blocks are its parts. The history is what the allocator did
before, oldest first. A stack is a number; its frames are rows of `stacks`, innermost first.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

import pandas as pd
import pyarrow as pa

from dsprof import regular_files
from dsprof.run import RunError, RunFolder

from .files import brief, open_parquet, write_parquet

SEGMENTS_NAME: Final = re.compile(r"rank(\d{5,6})\.segments\.parquet", re.ASCII)
NO_STACK: Final = -1
DEFAULT_POOL: Final = "0.0"
"""Of what is in no private pool (a CUDA graph's, or a `torch.cuda.MemPool`'s)."""

STATES: Final = ("allocated", "pending", "free")
"""Of a block. Pending is what was freed while another stream may still use it."""
ACTIONS: Final = (
    "alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map", "segment_unmap", "oom",
    "snapshot",
)  # fmt: skip

TABLES: Final[Mapping[str, Mapping[str, str]]] = {
    "segments": {
        "device": "int32", "address": "int64", "bytes": "int64", "stream": "int64", "pool": "category",
        "small": "bool", "expandable": "bool", "stack": "int32",
    },
    "blocks": {
        "segment": "int32", "address": "int64", "bytes": "int64", "requested": "int64", "state": "category",
        "stack": "int32",
    },
    "history": {
        "device": "int32", "action": "category", "address": "int64", "bytes": "int64", "stream": "int64",
        "pool": "category", "time_us": "int64", "stack": "int32",
    },
    "stacks": {"stack": "int32", "function": "category", "file": "category", "line": "int32"},
}  # fmt: skip
"""Table -> column -> type. `blocks.segment` is a row of `segments`, blocks of one are by address. In `history`, `bytes`
of alloc and free are those that were asked for, `address` of oom is what the device had left; `pool` is empty where the
recording does not tell."""


@dataclass(frozen=True)
class Memory:
    """The tables of one rank (`TABLES`)."""

    segments: pd.DataFrame
    blocks: pd.DataFrame
    history: pd.DataFrame
    stacks: pd.DataFrame

    @classmethod
    def of(cls, **columns: Mapping[str, Any]) -> Memory:
        """Tables of these columns, table -> column -> values; what is left out is empty."""
        return cls(**{name: _typed(pd.DataFrame(columns.get(name, {})), name) for name in TABLES})


def save_memory(folder: RunFolder, rank: int, memory: Memory) -> None:
    """Write the tables. Raises OSError."""
    for name in TABLES:
        table = pa.Table.from_pandas(getattr(memory, name), preserve_index=False)
        write_parquet(_file(folder, rank, name), table)


class StoredMemory(Mapping[int, Memory]):
    """Rank -> tables of a run folder, read when they are asked for. Reading raises RunError."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        found = regular_files.files(folder.memory, "rank*.segments.parquet")
        self._ranks = sorted(int(match[1]) for path in found if (match := SEGMENTS_NAME.fullmatch(path.name)))

    def __iter__(self) -> Iterator[int]:
        return iter(self._ranks)

    def __len__(self) -> int:
        return len(self._ranks)

    def __getitem__(self, rank: int) -> Memory:
        if rank not in self._ranks:
            raise KeyError(rank)
        return Memory(**{item.name: self._read(rank, item.name) for item in fields(Memory)})

    def _read(self, rank: int, name: str) -> pd.DataFrame:
        path = _file(self._folder, rank, name)
        try:
            with open_parquet(path) as file:
                return _typed(file.read().to_pandas(), name)
        except Exception as error:  # pyarrow and pandas raise whatever a damaged file has them meet
            raise RunError(f"{path}: unreadable ({brief(error)}); import the snapshot again") from error


def _file(folder: RunFolder, rank: int, name: str) -> Path:
    return folder.memory / f"rank{rank:05d}.{name}.parquet"


def _typed(table: pd.DataFrame, name: str) -> pd.DataFrame:
    return table.reindex(columns=list(TABLES[name])).astype(dict(TABLES[name]))
