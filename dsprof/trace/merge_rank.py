"""One rank's captures as its Parquet file, and what `run.json` says of it: what merging does rank by rank."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pandas as pd
import pyarrow as pa

from dsprof import regular_files
from dsprof.names import CaptureName
from dsprof.ondisk import COUNTERS_NAME, LARGEST_CHUNK
from dsprof.run import MOST_RANKS, RankInfo, RunError, RunFolder
from dsprof.schema import FLOPS_FACT, OOM_SNAPSHOT_NAME, SNAPSHOT_NAME

from .capture import CHUNK_NAME, Capture, read_capture
from .deep import add_deep
from .derive import missing_steps, trace_rows
from .files import brief, open_parquet, write_parquet
from .group_facts import pack
from .memory import save_memory
from .snapshot import read_snapshot

MERGE_VERSION: Final = 12
"""Part of the signature that tells whether a Parquet file is up to date: raise it when merging changes."""
MAPPED_CHUNKS: Final = 4
"""Those that a process may have mapped: the last three, and one that is prepared."""
SIGNATURE: Final = b"dsprof.signature"
RANK_INFO: Final = b"dsprof.rank"


@dataclass(frozen=True)
class MergedRank:
    """summary: what `run.json` says of the rank. rows: its table where the Parquet file could not be written, and
    problem: why not; None and empty: it is there."""

    summary: dict[str, Any]
    rows: pd.DataFrame | None = None
    problem: str = ""


@dataclass(frozen=True)
class MergeRank:
    """Bring a rank's Parquet file up to date. captures: rank -> its restarts and their folders; of one without any
    (somebody kept only the trace) the file stands as it is."""

    folder: RunFolder
    captures: Mapping[int, Sequence[tuple[int, Path]]]

    def __call__(self, rank: int) -> MergedRank:
        target = parquet_path(self.folder, rank)
        folders = self.captures.get(rank, ())
        stored = _stored(target)
        signature = _signature([path for _, path in folders])
        if not folders and RANK_INFO not in stored:
            raise RunError(f"trace/{target.name} is damaged, or not dsprof's, and the capture it was made of is gone")
        if not folders or stored.get(SIGNATURE) == signature:
            return MergedRank(_checked_summary(rank, stored[RANK_INFO]))
        rows, summary = derive_rank(rank, folders)
        summary["problems"] += _merge_snapshot(self.folder, rank, folders, summary["facts"])
        table = pa.Table.from_pandas(rows, preserve_index=False)
        about = {SIGNATURE: signature, RANK_INFO: json.dumps(summary).encode()}
        try:
            write_parquet(target, table.replace_schema_metadata({**(table.schema.metadata or {}), **about}))
        except OSError as error:
            why = f"trace/{target.name}: not written ({brief(error)}); the capture is analyzed all the same"
            return MergedRank(summary, rows, why)
        return MergedRank(summary)


def parquet_path(folder: RunFolder, rank: int) -> Path:
    return folder.trace / f"rank{rank:05d}.parquet"


def derive_rank(rank: int, folders: Sequence[tuple[int, Path]]) -> tuple[pd.DataFrame, dict[str, Any]]:
    """The rank's rows, of all its restarts, and what `run.json` says of it."""
    found: dict[int, list[Capture]] = defaultdict(list)
    for restart, path in folders:
        found[restart].append(read_capture(path))
    chosen = {restart: max(captures, key=lambda item: len(item.records)) for restart, captures in found.items()}
    # A helper program that inherited the rank's environment and trained something leaves a second capture.
    problems = [
        f"{len(captures)} processes captured as this rank ({', '.join(_process(item) for item in captures)}); "
        f"the longest capture, of {_process(chosen[restart])}, is used"
        for restart, captures in found.items()
        if len(captures) > 1
    ]
    tables = {restart: trace_rows(capture, rank, restart) for restart, capture in sorted(chosen.items())}
    deep_problems: list[str] = []
    for restart, capture in chosen.items():
        tables[restart], wrong = add_deep(capture, tables[restart])
        deep_problems += wrong
    summary = summarize(rank, chosen, tables)
    summary["problems"] += [*problems, *deep_problems]
    return pd.concat(tables.values(), ignore_index=True), summary


def summarize(rank: int, chosen: Mapping[int, Capture], tables: Mapping[int, pd.DataFrame]) -> dict[str, Any]:
    """What `run.json` says of a rank, by its captures and their rows, both by restart."""
    captures = list(chosen.values())
    return {
        "ranks": [vars(_describe(rank, restart, chosen[restart], table)) for restart, table in tables.items()],
        # Operations are rows of the trace, too many for `run.json`.
        "facts": pack(fact for capture in captures for fact in capture.facts if fact["fact"] != FLOPS_FACT),
        "versions": next((told for capture in captures if isinstance(told := capture.meta.get("versions"), dict)), {}),
        "world_size": next((size for capture in captures if (size := world_size_of(capture.meta)) is not None), None),
        "problems": [
            *(problem for capture in captures for problem in capture.problems),
            *(problem for restart, capture in chosen.items() for problem in missing_steps(capture, tables[restart])),
        ],
        "errors": [error for capture in captures for error in capture.errors],
        "cuda": any(fact["fact"] == "device" for capture in captures for fact in capture.facts),
    }


def _describe(rank: int, restart: int, capture: Capture, rows: pd.DataFrame) -> RankInfo:
    name = _capture_name(capture)
    steps = rows.loc[(rows["kind"] == "step") & rows["dur_ns"].notna(), "step"]
    clock = capture.meta.get("clock")
    return RankInfo(
        rank=rank,
        restart=restart,
        host=name.host,
        pid=name.pid,
        capture=capture.path.name,
        native=bool(capture.meta.get("native", False)),
        last_step=int(steps.max()) if len(steps) else -1,
        records=len(capture.records),
        dropped=capture.dropped,
        damaged=capture.damaged,
        errors=len(capture.errors),
        closed=bool(capture.meta.get("closed", False)),
        started_ns=_instant(clock, "process_start_ns"),
        opened_ns=_instant(capture.meta, "opened_ns"),
        closed_ns=_instant(capture.meta, "closed_ns"),
        clock=str(clock.get("id") or "") if isinstance(clock, dict) else "",
    )


def world_size_of(values: dict[str, Any]) -> int | None:
    size = values.get("world_size")
    return size if type(size) is int and 0 <= size <= MOST_RANKS else None


def _instant(values: Any, name: str) -> int | None:
    """A time that older captures do not have."""
    value = values.get(name) if isinstance(values, dict) else None
    return value if isinstance(value, int) else None


def _capture_name(capture: Capture) -> CaptureName:
    name = CaptureName.of(capture.path.name)
    assert name is not None  # as `_captures` has found it
    return name


def _process(capture: Capture) -> str:
    name = _capture_name(capture)
    return f"{name.pid} on {name.host}"


def _merge_snapshot(
    folder: RunFolder, rank: int, folders: Sequence[tuple[int, Path]], facts: list[dict[str, Any]]
) -> list[str]:
    """Write the side tables from the snapshot of the rank's last process, if it left one, and add to `facts` what it
    says of the allocator; what was odd about it. One that was taken when there was no memory left tells more than one
    of the end."""
    last = max(restart for restart, _ in folders)
    names = [path / name for name in (OOM_SNAPSHOT_NAME, SNAPSHOT_NAME) for restart, path in folders if restart == last]
    path = next((path for path in names if regular_files.is_file(path)), None)
    if path is None:
        return []
    try:
        snapshot = read_snapshot(path)
        save_memory(folder, rank, snapshot.memory)
    except (RunError, OSError) as error:
        return [f"{path.name}: not read ({brief(error)})"]
    facts.append({"fact": "allocator", "rank": rank, "settings": snapshot.settings, "file": path.name})
    return [f"{path.name}: {text}" for text in snapshot.warnings if path.name == SNAPSHOT_NAME]


def _checked_summary(rank: int, stored: bytes) -> dict[str, Any]:
    """What `derive_rank` or `save` wrote. Raises ValueError or TypeError where it cannot be that."""
    summary = regular_files.parse_json(stored)
    kinds = {"ranks": list, "facts": list, "versions": dict, "problems": list, "errors": list}
    if not isinstance(summary, dict) or not all(isinstance(summary.get(name), kind) for name, kind in kinds.items()):
        raise ValueError("its Parquet file does not tell what it holds; remove it where there is a capture")
    facts = [fact for fact in summary["facts"] if isinstance(fact, dict) and isinstance(fact.get("fact"), str)]
    return {"world_size": None, "cuda": False, **summary, "facts": [{**fact, "rank": rank} for fact in facts]}


def _signature(folders: list[Path]) -> bytes:
    """Changes when any file of the captures does. What is stored through a mapping need not change a file's time: of
    the files that are mapped the content counts."""
    digest = hashlib.sha256(f"merge {MERGE_VERSION}".encode())
    for folder in folders:
        files = regular_files.files(folder)
        mapped = [path for path in files if CHUNK_NAME.fullmatch(path.name)][-MAPPED_CHUNKS:]
        for path in files:
            status = path.stat()
            digest.update(f"\n{folder.name}/{path.name} {status.st_size} {status.st_mtime_ns}".encode())
            if path in mapped or path.name == COUNTERS_NAME:
                with suppress(OSError):  # larger than a chunk
                    digest.update(regular_files.read_bytes(path, LARGEST_CHUNK))
    return digest.hexdigest().encode()


def _stored(target: Path) -> dict[bytes, bytes]:
    try:
        with open_parquet(target) as file:
            return dict(file.schema_arrow.metadata or {})
    except Exception:  # whatever a damaged one has pyarrow meet
        return {}
