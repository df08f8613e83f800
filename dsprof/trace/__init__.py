"""The trace: one flat table for the run, one Parquet file a rank.

capture  reads what a rank wrote
derive/  records as rows, and what they imply; table to table, whoever recorded them
merge    captures into Parquet files and run.json
load     a run folder as a Trace
save     a Trace as a run folder, for importers
"""

from __future__ import annotations

from .derive import step_pattern, trace_rows
from .load import Trace, load
from .merge import merge
from .save import save

__all__ = ["Trace", "load", "merge", "save", "step_pattern", "trace_rows"]
