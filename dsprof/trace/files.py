"""How files of a run folder are written, and what an error said in a line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from dsprof import regular_files
from dsprof.atomic import replacing
from dsprof.permissions import make_folder

ROWS_FREE: Final = 1 << 20
"""Rows that a small file may say it has."""
MOST_ROWS_A_BYTE: Final = 2
"""A row takes some ten bytes in the trace of a real run, and never less than one."""


def write_parquet(target: Path, table: pa.Table) -> None:
    """Replace `target` in one step. Raises OSError."""
    make_folder(target.parent)
    with replacing(target) as temporary:
        pq.write_table(table, temporary, compression="zstd")


@contextmanager
def open_parquet(path: Path) -> Iterator[pq.ParquetFile]:
    """A Parquet file of a run folder. Raises OSError, ValueError or what pyarrow does, also where it says that it holds
    more rows than a file of its size can."""
    with regular_files.open_file(path) as source, pq.ParquetFile(source) as file:
        rows, size = file.metadata.num_rows, path.stat().st_size
        if rows > ROWS_FREE + MOST_ROWS_A_BYTE * size:
            raise ValueError(f"says that it has {rows:,} rows in {size:,} bytes")
        yield file


def brief(error: BaseException) -> str:
    """The first line of what the error says."""
    said = getattr(error, "strerror", None) or str(error)
    return (str(said).splitlines() or [type(error).__name__])[0][:200]
