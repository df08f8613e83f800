"""The trace: one flat table for the run, one Parquet file a rank.

capture  reads what a rank wrote
records  its records as arrays, of every format there was
derive/  records as rows, and what they imply; table to table, whoever recorded them
kineto/  traces of torch.profiler
deep     such a trace of a few steps, as rows of a capture
merge    captures into Parquet files and run.json (merge_rank: what is of one rank; group_facts: process groups, which
         all of their ranks state)
map_ranks  what is of one rank, done for all of them by an executor (packing: what tasks send back, in few bytes;
         packed_table: a large table that is seldom asked for)
memory   side tables: segments, blocks and history of a device's allocator
snapshot reads them from what torch dumps (plain_pickle: pickles that hold nothing but data)
files    how the folder's files are written
load     a run folder as a Trace, whose ranks are read one at a time (arrow_columns: its columns as those of the trace)
process_pool  processes in which the ranks of a large trace are analyzed
dask_cluster  workers of a Dask cluster that do it (cluster_worker: what they must have in common with this process)
save     a Trace as a run folder, for importers
strings  how pandas holds strings meanwhile
"""

from __future__ import annotations

from .derive import step_pattern, trace_rows
from .load import Source, Trace, concat_rows, load
from .memory import Memory
from .merge import merge
from .save import save

__all__ = ["Memory", "Source", "Trace", "concat_rows", "load", "merge", "save", "step_pattern", "trace_rows"]
