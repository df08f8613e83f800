"""Memory snapshots of CUDA: what `torch.cuda.memory._dump_snapshot` writes, with or without a recorded history.

The whole snapshot becomes the side tables of `dsprof.trace.Memory`, of rank 0. The trace's own rows are `mem` samples:
`reserved`, what the allocator holds, and `requested`, what tensors asked for, at each change.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
import pandas as pd

from dsprof.names import new_run_id
from dsprof.run import RankInfo, RunInfo
from dsprof.schema import COLUMNS
from dsprof.trace import Memory, Trace
from dsprof.trace.snapshot import read_snapshot

DESCRIPTION: Final = "a CUDA memory snapshot (torch.cuda.memory._dump_snapshot)"

HEAD: Final = 256
"""Bytes at its beginning in which a snapshot names its first table."""
RESERVES: Final = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
REQUESTS: Final = {"alloc": 1, "free_requested": -1}


def recognizes(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            head = file.read(HEAD)
    except OSError:
        return False
    return head[:1] == b"\x80" and (b"segments" in head or b"device_traces" in head)


def read(path: Path) -> Trace:
    """The snapshot as a trace of one rank. Raises RunError for one that cannot be understood."""
    memory, settings, warnings = read_snapshot(path)
    rows = _samples(memory)
    facts = [
        {"fact": "import", "rank": 0, "format": "memory_snapshot", "file": path.name, "warnings": warnings},
        {"fact": "allocator", "rank": 0, "settings": settings},
    ]
    info = RunInfo(
        id=new_run_id(path.stem), name=path.stem, level="", command=["dsprof", "import", str(path)], world_size=1,
        facts=facts,
        ranks=[
            RankInfo(
                rank=0, restart=0, host="", pid=0, capture="", native=True, last_step=-1, records=len(rows), dropped=0,
                damaged=0, errors=0, closed=True,
            )
        ],
    )  # fmt: skip
    return Trace.of(info, rows, {0: memory})


def _samples(memory: Memory) -> pd.DataFrame:
    """`mem` rows: bytes reserved and requested after each change of them; the last one is the snapshot's own."""
    parts = [pd.DataFrame(columns=list(COLUMNS))]
    used = memory.blocks[memory.blocks["state"] == "allocated"]
    device = memory.segments["device"].to_numpy(np.int64)[used["segment"].to_numpy(np.int64)]
    last = {
        "reserved": memory.segments.groupby("device")["bytes"].sum(),
        "requested": used.groupby(device)["requested"].sum(),
    }
    devices = sorted({*memory.segments["device"], *memory.history["device"]})
    for number in devices:
        history = memory.history[memory.history["device"] == number]
        for name, signs in (("reserved", RESERVES), ("requested", REQUESTS)):
            events = history[history["action"].isin(list(signs))]
            change = events["bytes"].to_numpy(np.int64) * events["action"].astype(object).map(signs).to_numpy(np.int64)
            final = int(last[name].get(number, 0))
            value = final - int(change.sum()) + np.cumsum(change)
            when = events["time_us"].to_numpy(np.int64) * 1000
            if not len(when):
                value, when = np.array([final]), np.array([int(history["time_us"].max()) * 1000 if len(history) else 0])
            parts.append(
                pd.DataFrame({"name": name, "lane": f"cuda.{number}", "start_ns": when, "bytes": value, "step": -1})
            )
    rows = pd.concat([part for part in parts if len(part)] or parts, ignore_index=True).reindex(columns=list(COLUMNS))
    rows = rows.assign(rank=0, restart=0, kind="mem", dur_ns=0, ended=True, source="imported")
    return rows.sort_values("start_ns", kind="stable", ignore_index=True).astype(dict(COLUMNS))
