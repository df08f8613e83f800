"""Captures into the trace: one Parquet file a rank, and run.json beside them.

A rank whose capture is missing, empty, truncated or corrupt costs only itself: the rest is merged, and `run.json`
says what is missing. Merging again changes nothing.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa

from dsprof import regular_files
from dsprof.names import CaptureName
from dsprof.ondisk import COUNTERS_NAME, LARGEST_CHUNK
from dsprof.permissions import LINK
from dsprof.run import MOST_RANKS, RankInfo, RunError, RunFolder, RunInfo, from_known
from dsprof.schema import FLOPS_FACT, LOST_FACT, OOM_SNAPSHOT_NAME, SNAPSHOT_NAME

from .capture import CHUNK_NAME, Capture, read_capture
from .deep import add_deep
from .derive import missing_steps, trace_rows
from .files import brief, open_parquet, write_parquet
from .memory import save_memory
from .snapshot import read_snapshot

MERGE_VERSION = 12
"""Part of the signature that tells whether a Parquet file is up to date: raise it when merging changes."""
MOST_DIGITS = 6
"""Of a number of hosts."""
MAPPED_CHUNKS = 4
"""Those that a process may have mapped: the last three, and one that is prepared."""
TRACE_NAME = re.compile(r"rank(\d{5,6})\.parquet", re.ASCII)
DROPPED = (
    "{} records could not be written{} (disk full, or slower than the job): make room, lower --limit, or name another "
    "folder by --scratch DIR"
)
MEMORY = ("tmpfs", "ramfs")
"""File systems whose files are in memory."""
SIGNATURE = b"dsprof.signature"
RANK_INFO = b"dsprof.rank"
MOST_OF_IT = 100
"""Characters of what an error said by which it is known again: the capture's table of errors cuts it off."""


def merge(folder: RunFolder) -> RunInfo:
    """Bring trace/ and run.json up to date with capture/ and exits/, and return run.json's content.

    What cannot be written (a full disk, somebody else's folder) is a warning in it. Raises RunError when run.json is
    unreadable, or when there is neither a capture nor a trace.
    """
    return bring_up_to_date(folder)[0]


def bring_up_to_date(folder: RunFolder) -> tuple[RunInfo, dict[int, pd.DataFrame]]:
    """run.json's content, and the tables of the ranks whose Parquet file could not be written."""
    before = folder.read_info()
    info = folder.read_info()
    info.warnings = []
    captures = captures_by_rank(folder)
    merged = parquet_files(folder)
    if not captures and not merged and not folder.run_json.exists():
        raise RunError(f"{folder.path}: no capture and no trace in it; was the job started with dsprof?")
    exits, problems = folder.read_exits()
    info.exits = exits or info.exits
    for problem in problems:
        warn(info, problem)
    for name in folder.links():
        warn(info, f"{name}: {LINK}; put what it names into the folder itself")
    info.ranks, info.facts = [], []
    unwritten: dict[int, pd.DataFrame] = {}
    for rank in sorted(captures.keys() | merged.keys()):
        try:
            table = _merge_rank(folder, rank, captures.get(rank, []), info)
        except Exception as error:  # whatever is wrong with one rank, the others count
            warn(info, f"rank {rank}: its capture could not be merged ({type(error).__name__}: {brief(error)})")
        else:
            if table is not None:
                unwritten[rank] = table
    _note_errors(folder, info)
    _note_import(info)
    _note_missing(info)
    _note_hosts(folder, info)
    _note_notes(info)
    note_groups(info)
    info.hangs = folder.read_hangs() or info.hangs
    if info != before or not folder.run_json.exists():
        try:
            folder.write_info(info)
        except OSError as error:
            warn(info, f"run.json: not updated ({error.strerror})")
    return info, unwritten


def _checked_summary(rank: int, stored: bytes) -> dict[str, Any]:
    """What `_derive` or `save` wrote. Raises ValueError or TypeError where it cannot be that."""
    summary = regular_files.parse_json(stored)
    kinds = {"ranks": list, "facts": list, "versions": dict, "problems": list, "errors": list}
    if not isinstance(summary, dict) or not all(isinstance(summary.get(name), kind) for name, kind in kinds.items()):
        raise ValueError("its Parquet file does not tell what it holds; remove it where there is a capture")
    facts = [fact for fact in summary["facts"] if isinstance(fact, dict) and isinstance(fact.get("fact"), str)]
    return {"world_size": None, "cuda": False, **summary, "facts": [{**fact, "rank": rank} for fact in facts]}


def derive_anew(folder: RunFolder, rank: int) -> pd.DataFrame | None:
    """The rank's rows from its captures, whatever its Parquet file holds; None where there is no capture."""
    captures = captures_by_rank(folder).get(rank)
    return None if captures is None else _derive(rank, captures)[0]


def parquet_files(folder: RunFolder) -> dict[int, Path]:
    """rank -> file, in order."""
    found = regular_files.files(folder.trace, "rank*.parquet")
    return {int(match[1]): path for path in found if (match := TRACE_NAME.fullmatch(path.name))}


def captures_by_rank(folder: RunFolder) -> dict[int, list[tuple[int, Path]]]:
    """rank -> [(restart, capture folder)]."""
    found: dict[int, list[tuple[int, Path]]] = defaultdict(list)
    for path in regular_files.folders(folder.capture, "rank*"):
        name = CaptureName.of(path.name)
        if name:
            found[name.rank].append((name.restart, path))
    return found


def _merge_rank(folder: RunFolder, rank: int, folders: list[tuple[int, Path]], info: RunInfo) -> pd.DataFrame | None:
    """Write this rank's Parquet file unless it is up to date, and say in `info` what it holds.

    The table, if it could not be written. Without captures (somebody kept only the trace) the file stands as it is.
    """
    target = folder.trace / f"rank{rank:05d}.parquet"
    stored = _stored(target)
    signature = _signature([path for _, path in folders])
    if not folders or stored.get(SIGNATURE) == signature:
        add_rank(rank, _checked_summary(rank, stored[RANK_INFO]), info)
        return None
    rows, summary = _derive(rank, folders)
    summary["problems"] += _merge_snapshot(folder, rank, folders, summary["facts"])
    add_rank(rank, summary, info)
    table = pa.Table.from_pandas(rows, preserve_index=False)
    about = {SIGNATURE: signature, RANK_INFO: json.dumps(summary).encode()}
    try:
        write_parquet(target, table.replace_schema_metadata({**(table.schema.metadata or {}), **about}))
    except OSError as error:
        warn(info, f"trace/{target.name}: not written ({brief(error)}); the capture is analyzed all the same")
        return rows
    return None


def _merge_snapshot(
    folder: RunFolder, rank: int, folders: list[tuple[int, Path]], facts: list[dict[str, Any]]
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


def _derive(rank: int, folders: list[tuple[int, Path]]) -> tuple[pd.DataFrame, dict[str, Any]]:
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
        "facts": [fact for capture in captures for fact in capture.facts if fact["fact"] != FLOPS_FACT],
        "versions": next((told for capture in captures if isinstance(told := capture.meta.get("versions"), dict)), {}),
        "world_size": next((size for capture in captures if (size := _world_size(capture.meta)) is not None), None),
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


def _world_size(values: dict[str, Any]) -> int | None:
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


def add_rank(rank: int, summary: dict[str, Any], info: RunInfo) -> None:
    described = [from_known(RankInfo, item) for item in summary["ranks"]]
    info.ranks += described
    info.facts += summary["facts"]
    info.versions = {**summary["versions"], **info.versions}
    if info.world_size is None:
        info.world_size = _world_size(summary)
    for problem in dict.fromkeys(summary["problems"]):
        warn(info, f"rank {rank}: {problem}")
    for item in described:
        if item.damaged:
            warn(info, f"rank {rank}: {item.damaged} damaged records were left out")
        if item.dropped:
            warn(info, f"rank {rank}: {DROPPED.format(item.dropped, _written_first(summary))}")
    # Of what could not be installed the facts say what is lost (`_note_notes`).
    because = [str(fact.get("because"))[:MOST_OF_IT] for fact in summary["facts"] if fact["fact"] == LOST_FACT]
    for error in dict.fromkeys(summary["errors"]):
        if any(why in error for why in because):
            continue
        warn(info, f"rank {rank}: error inside dsprof, without effect on the job: {error}")
    if summary["cuda"]:
        warn(info, f"rank {rank}: {_of_device(summary)}")


def _written_first(summary: dict[str, Any]) -> str:
    """Where the capture was written before it was copied, in words; empty: into the run folder itself."""
    for fact in summary["facts"]:
        if fact["fact"] == "written_first":
            kind = fact.get("file_system")
            memory = " in memory" if kind in MEMORY else ""
            return f" to {str(fact.get('folder'))[:MOST_OF_IT]}{memory}"
    return ""


def _of_device(summary: dict[str, Any]) -> str:
    """What is known of what its device did."""
    facts = summary["facts"]
    if not any(fact["fact"] == "device_times" for fact in facts):
        off = any(fact["fact"] == "without" and "device-times" in fact.get("collectors", ()) for fact in facts)
        why = "the collector device-times was switched off" if off else "it was recorded without the native helper"
        return f"ran on a GPU, of which only the host's side was timed, as {why}"
    return "ran on a GPU, whose streams were timed by events: of phases and communications, not of each kernel"


def _note_errors(folder: RunFolder, info: RunInfo) -> None:
    """Failures before there was a capture to note them in (see `collectors.capture.without_capture`)."""
    for process, lines in folder.read_errors():
        for line in lines:
            warn(info, f"process {process}: {line}")


def _note_import(info: RunInfo) -> None:
    """What was odd about the trace of another tool (see `dsprof.importers`)."""
    for fact in info.facts:
        if fact["fact"] in ("import", "joined") and isinstance(fact.get("warnings"), list):
            for text in fact["warnings"]:
                warn(info, f"{fact.get('file', 'import')}: {text}")


def _note_missing(info: RunInfo) -> None:
    expected = info.world_size or 0
    missing = sorted(set(range(expected)) - {item.rank for item in info.ranks})
    if missing:
        warn(info, f"no capture of rank {_some(missing)} ({len(info.ranks)} of {expected} captured)")


def _note_hosts(folder: RunFolder, info: RunInfo) -> None:
    """Of a run of several hosts those that took no part, or whose end is not known."""
    fewest = info.nnodes.partition(":")[0]
    if not fewest.isdecimal() or len(fewest) > MOST_DIGITS:
        return
    parts = folder.read_hosts()
    met = [part for part in parts if part.node is not None]
    if not met:
        warn(info, f"the {info.nnodes} hosts of the job never met; came: {', '.join(part.host for part in parts)}")
    elif len(met) < int(fewest):
        warn(info, f"{len(met)} of {fewest} hosts took part: {', '.join(part.host for part in met)}")
    for part in met:
        if part.ended is None and info.ended is not None:
            warn(info, f"host {part.host}: had not ended when the verdict was drawn; what is there of its ranks counts")


def _some(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")


def _note_notes(info: RunInfo) -> None:
    """What ranks said of how they were captured, and of what could not be, each once."""
    said: dict[str, list[int]] = defaultdict(list)
    for fact in info.facts:
        if fact["fact"] in ("note", LOST_FACT) and isinstance(fact.get("rank"), int):
            text = fact.get("text") if fact["fact"] == "note" else f"{fact.get('because')}: {fact.get('what')}"
            said[str(text)].append(fact["rank"])
    for text, ranks in said.items():
        warn(info, f"rank {_some(sorted(set(ranks)))}: {text}")


def note_groups(info: RunInfo) -> None:
    for fact in info.facts:
        if fact["fact"] == "group" and fact.get("name") is not None:
            ranks = fact.get("ranks", [])
            if not isinstance(ranks, list):
                continue
            about = {"ranks": ranks, "size": len(ranks), "desc": fact.get("desc", "")}
            info.groups[str(fact["name"])] = about | ({"backend": fact["backend"]} if fact.get("backend") else {})


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


def warn(info: RunInfo, text: str) -> None:
    """Add a warning to run.json's content, once."""
    if text not in info.warnings:
        info.warnings.append(text)
