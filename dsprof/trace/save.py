"""A Trace as a run folder: how an importer keeps what it has read."""

from __future__ import annotations

import json

import pyarrow as pa

from dsprof.permissions import make_named_folder
from dsprof.run import RunFolder

from .files import write_parquet
from .group_facts import pack
from .load import Trace
from .memory import save_memory
from .merge import merge
from .merge_rank import RANK_INFO, parquet_path


def save(folder: RunFolder, trace: Trace) -> None:
    """Make `folder` a run that holds this trace and no capture; `load` gives it back. Raises OSError.

    Facts and warnings are kept with their rank; of `run.ranks`, one each.
    """
    make_named_folder(folder.path)
    for described in trace.run.ranks:
        rank = described.rank
        summary = {
            "ranks": [vars(described)],
            "facts": pack(fact for fact in trace.run.facts if fact.get("rank") == rank),
            "versions": trace.run.versions,
            "world_size": trace.run.world_size,
            "problems": [],
            "errors": [],
            "cuda": False,
        }
        table = pa.Table.from_pandas(trace.read(rank), preserve_index=False)
        about = {**(table.schema.metadata or {}), RANK_INFO: json.dumps(summary).encode()}
        write_parquet(parquet_path(folder, rank), table.replace_schema_metadata(about))
    for rank, memory in trace.memory.items():
        save_memory(folder, rank, memory)
    folder.write_info(trace.run)
    merge(folder)
