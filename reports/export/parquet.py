"""One Parquet file with the rows of all ranks on one clock (columns: docs/trace.md)."""

from __future__ import annotations

import json
from typing import IO, TYPE_CHECKING

from dsprof.exported import PARQUET

from .about import about_run
from .slices import Selection

if TYPE_CHECKING:
    from dsprof.analyzer.analysis import Analysis


def write(analysis: Analysis, file: IO[bytes], selection: Selection) -> int:
    """Write the run to `file`, a row group for each rank; how many rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    writer: pq.ParquetWriter | None = None
    count = 0
    for rank in selection.ranks:
        rows = selection.of(analysis.trace.read(rank))
        plain = {name: rows[name].astype("string") for name in rows if rows[name].dtype == "category"}
        table = pa.Table.from_pandas(rows.assign(**plain), preserve_index=False)
        if writer is None:
            told = json.dumps(about_run(analysis), default=str).encode()
            schema = table.schema.with_metadata({**(table.schema.metadata or {}), PARQUET: told})
            writer = pq.ParquetWriter(file, schema, compression="zstd")
        writer.write_table(table.cast(writer.schema))
        count += len(rows)
    if writer is not None:
        writer.close()
    return count
