"""Memory snapshots of CUDA: what `torch.cuda.memory._dump_snapshot` writes, with or without a recorded history.

The whole snapshot becomes the side tables of `dsprof.trace.Memory`, of one rank. The trace's own rows are `mem`
samples: `reserved`, what the allocator holds, and `requested`, what tensors asked for, at each change. A file does not
say which rank it is of: its name may.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd

from dsprof.names import new_run_id
from dsprof.run import RunError, RunInfo
from dsprof.schema import COLUMNS
from dsprof.trace import Memory, Trace
from dsprof.trace.snapshot import Snapshot, read_snapshot

from .assemble import rank_info
from .rank_names import last_number, rank_in

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
    return read_all([path])


def read_all(paths: Iterable[Path]) -> Trace:
    """The snapshots of several ranks. One that cannot be understood costs only itself, with a warning. Raises RunError
    where none can, and for names that do not tell the ranks."""
    ranks = _ranks(sorted(paths))
    found: dict[int, Snapshot] = {}
    refused: list[RunError] = []
    for rank, path in sorted(ranks.items()):
        try:
            found[rank] = read_snapshot(path)
        except RunError as error:
            refused.append(error)
    if not found:
        raise refused[0]
    of_all = [f"left out: {error}" for error in refused]
    facts: list[dict[str, Any]] = []
    for rank, snapshot in found.items():
        warnings = [*snapshot.warnings, *([] if facts else of_all)]
        file = ranks[rank].name
        facts += [
            {"fact": "import", "rank": rank, "format": "memory_snapshot", "file": file, "warnings": warnings},
            {"fact": "allocator", "rank": rank, "settings": snapshot.settings},
        ]
    rows = {rank: _samples(snapshot.memory, rank) for rank, snapshot in found.items()}
    first = next(iter(ranks.values()))
    name, source = (first.stem, first) if len(ranks) == 1 else (first.parent.name, first.parent)
    info = RunInfo(
        id=new_run_id(name), name=name, level="", command=["dsprof", "import", str(source)], world_size=max(ranks) + 1,
        facts=facts,
        ranks=[rank_info(rank, len(rows[rank])) for rank in found],
    )  # fmt: skip
    together = pd.concat(list(rows.values()), ignore_index=True)
    return Trace.of(info, together, {rank: snapshot.memory for rank, snapshot in found.items()})


def _ranks(paths: list[Path]) -> dict[int, Path]:
    """Rank -> file. Raises RunError where the names do not tell: one rank may have written several, at many steps."""
    if len(paths) == 1:
        return {rank_in(paths[0].name) or 0: paths[0]}
    told = [rank_in(path.name) for path in paths]
    if None in told or len(set(told)) < len(told):
        told = [last_number(path.name) for path in paths]
        if set(told) != set(range(len(paths))):
            raise RunError(
                f"{paths[0].parent} holds {len(paths)} memory snapshots whose names do not tell their ranks: name one "
                "of them, or call them rank0.pickle, rank1.pickle and so on"
            )
    return {rank: path for rank, path in zip(told, paths, strict=True) if rank is not None}


def _samples(memory: Memory, rank: int) -> pd.DataFrame:
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
    rows = rows.assign(rank=rank, restart=0, kind="mem", dur_ns=0, ended=True, source="imported")
    return rows.sort_values("start_ns", kind="stable", ignore_index=True).astype(dict(COLUMNS))
