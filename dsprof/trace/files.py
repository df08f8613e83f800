"""How files of a run folder are written, and what an error said in a line."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from dsprof.atomic import replacing


def write_parquet(target: Path, table: pa.Table) -> None:
    """Replace `target` in one step. Raises OSError."""
    target.parent.mkdir(exist_ok=True)
    with replacing(target) as temporary:
        pq.write_table(table, temporary, compression="zstd")


def brief(error: BaseException) -> str:
    """The first line of what the error says."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
