"""A run for other tools: each module writes one format.

perfetto   a `.pftrace` for ui.perfetto.dev: ranks as processes, lanes as tracks, flows between ranks, findings
chrome     JSON for chrome://tracing and whatever reads torch.profiler's traces
parquet    one table of all ranks on one clock, for pandas, DuckDB and Spark
about      what an export says of its run, for `dsprof import`
sarif      the findings at the lines that they blame, for code scanning and editors
slices     rows as slices that nest
"""

from __future__ import annotations

import importlib
from typing import IO, TYPE_CHECKING, Literal

from .perfetto import MissingPackage
from .slices import Selection

if TYPE_CHECKING:
    from dsprof.analyzer.analysis import Analysis

__all__ = ["Format", "MissingPackage", "Selection", "write"]


Format = Literal["perfetto", "chrome", "parquet", "sarif"]


def write(to: Format, analysis: Analysis, file: IO[bytes], selection: Selection) -> int:
    """Write a run in one of the formats; how many events, rows or findings. Raises MissingPackage."""
    count: int = importlib.import_module(f".{to}", __name__).write(analysis, file, selection)
    return count
