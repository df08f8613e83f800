"""Captures into the trace: one Parquet file a rank, and run.json beside them.

A rank whose capture is missing, empty, truncated or corrupt costs only itself: the rest is merged, and `run.json`
says what is missing. Merging again changes nothing.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Executor
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pandas as pd

from dsprof import regular_files
from dsprof.permissions import LINK
from dsprof.run import RankInfo, RunError, RunFolder, RunInfo, from_known, last_processes
from dsprof.schema import LOST_FACT, UNCAUGHT

from .capture import CHUNK_NAME
from .files import brief
from .group_facts import GROUP, StatedGroups
from .map_ranks import Observer, map_ranks
from .merge_rank import MergedRank, MergeRank, derive_rank, world_size_of

MOST_DIGITS = 6
"""Of a number of hosts."""
TRACE_NAME = re.compile(r"rank(\d{5,6})\.parquet", re.ASCII)
DROPPED = (
    "{} records could not be written{} (disk full, or slower than the job): make room, lower --limit, or name another "
    "folder by --scratch DIR"
)
MEMORY = ("tmpfs", "ramfs")
"""File systems whose files are in memory."""
CAPTURED_A_BYTE: Final = 8
"""Bytes of chunks that become one of Parquet, about."""
MOST_OF_IT = 100
"""Characters of what an error said by which it is known again: the capture's table of errors cuts it off."""


def merge(folder: RunFolder) -> RunInfo:
    """Bring trace/ and run.json up to date with capture/ and exits/, and return run.json's content.

    What cannot be written (a full disk, somebody else's folder) is a warning in it. Raises RunError when run.json is
    unreadable, or when there is neither a capture nor a trace.
    """
    return bring_up_to_date(folder)[0]


def bring_up_to_date(
    folder: RunFolder, executor: Executor | None = None, observer: Observer | None = None
) -> tuple[RunInfo, dict[int, pd.DataFrame]]:
    """run.json's content, and the tables of the ranks whose Parquet file could not be written. `executor`, `observer`:
    as in `map_ranks`. Ranks that an interrupted call had merged are not merged again."""
    before = folder.read_info()
    info = folder.read_info()
    info.warnings = []
    here = RunFolder(folder.path.absolute())  # another process may have another working directory
    captures = captures_by_rank(here)
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
    every = map_ranks(MergeRank(here, captures), sorted(captures.keys() | merged.keys()), executor, observer, "merge")
    stated = StatedGroups()
    for rank in sorted(every.found.keys() | every.failed.keys()):
        why = every.failed.get(rank) or _take(info, rank, every.found[rank], stated)
        if why:
            warn(info, f"rank {rank}: its capture could not be merged ({why})")
        elif (table := every.found[rank].rows) is not None:
            unwritten[rank] = table
    _note_uncaught(folder, info)
    _note_errors(folder, info)
    _note_import(info)
    _note_missing(info)
    _note_hosts(folder, info)
    _note_notes(info)
    _note_deep(info)
    note_groups(info)
    info.hangs = folder.read_hangs() or info.hangs
    if info == before and folder.run_json.exists():
        return before, unwritten  # of thousands of ranks, it lies together: `info` keeps the room of what lay around it
    try:
        folder.write_info(info)
    except OSError as error:
        warn(info, f"run.json: not updated ({error.strerror})")
    return info, unwritten


def _take(info: RunInfo, rank: int, merged: MergedRank, stated: StatedGroups) -> str:
    """Have `info` say what a rank holds; what is wrong with that, empty: nothing."""
    try:
        add_rank(rank, merged.summary, info, stated)
    except Exception as error:  # whatever is wrong with one rank, the others count
        return f"{type(error).__name__}: {brief(error)}"
    if merged.problem:
        warn(info, merged.problem)
    return ""


def derive_anew(folder: RunFolder, rank: int) -> pd.DataFrame | None:
    """The rank's rows from its captures, whatever its Parquet file holds; None where there is no capture."""
    captures = captures_by_rank(folder).get(rank)
    return None if captures is None else derive_rank(rank, captures)[0]


def size_of(folder: RunFolder) -> tuple[int, int]:
    """How many ranks a run has, and how many bytes of Parquet, about: of those that are not merged, what their captures
    will become. What cannot be looked at is left out."""
    merged, captures = parquet_files(folder), captures_by_rank(folder)
    found = sum(_disk_bytes([path]) for path in merged.values())
    for rank in captures.keys() - merged.keys():
        for _, path in captures[rank]:
            chunks = [chunk for chunk in regular_files.files(path) if CHUNK_NAME.fullmatch(chunk.name)]
            found += _disk_bytes(chunks) // CAPTURED_A_BYTE
    return len(merged.keys() | captures.keys()), found


def _disk_bytes(paths: Sequence[Path]) -> int:
    """What files take on the disk: a chunk is made as long as it can become."""
    found = 0
    for path in paths:
        with suppress(OSError):  # gone meanwhile
            status = path.stat()
            found += min(status.st_size, 512 * status.st_blocks)
    return found


def parquet_files(folder: RunFolder) -> dict[int, Path]:
    """rank -> file, in order."""
    found = regular_files.files(folder.trace, "rank*.parquet")
    return {int(match[1]): path for path in found if (match := TRACE_NAME.fullmatch(path.name))}


def captures_by_rank(folder: RunFolder) -> dict[int, list[tuple[int, Path]]]:
    """rank -> [(restart, capture folder)]."""
    found: dict[int, list[tuple[int, Path]]] = defaultdict(list)
    for name, path in folder.captures():
        found[name.rank].append((name.restart, path))
    return found


def add_rank(rank: int, summary: dict[str, Any], info: RunInfo, stated: StatedGroups) -> None:
    """`summary`: as `merge_rank.summarize` makes it. stated: the process groups that ranks before it stated."""
    described = [from_known(RankInfo, item) for item in summary["ranks"]]
    info.ranks += described
    info.facts += stated.new(summary["facts"])
    info.versions = {**summary["versions"], **info.versions}
    if info.world_size is None:
        info.world_size = world_size_of(summary)
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
    words = "ran on a GPU, whose streams were timed by events: of phases and communications, not of each kernel"
    deep = any(fact["fact"] == "deep" and not fact.get("given_up") for fact in facts)
    return f"{words} but those of the steps traced with torch.profiler" if deep else words


def _note_uncaught(folder: RunFolder, info: RunInfo) -> None:
    """What ended ranks that had no capture to tell it in (see `collectors.failures.before_capture`)."""
    told = folder.read_uncaught()
    known = {fact.get("rank") for fact in info.facts if fact.get("fact") == UNCAUGHT}
    for end in last_processes(info.exits):
        fact = told.get((end.host, end.pid))
        if fact is not None and end.rank not in known:
            info.facts.append({**fact, "fact": UNCAUGHT, "rank": end.rank})


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


def _note_deep(info: RunInfo) -> None:
    """Which steps dsprof traced by itself, why, and what it cost."""
    facts = [fact for fact in info.facts if fact["fact"] == "deep" and "share" in fact and not fact.get("given_up")]
    try:
        first, last = min(int(fact["first"]) for fact in facts), max(int(fact["last"]) for fact in facts)
        share = 100 * max(float(fact["share"]) for fact in facts)
        longer = [float(fact["longer_ms"]) for fact in facts if fact.get("longer_ms") is not None]
    except (KeyError, TypeError, ValueError):  # none, or of a run folder that somebody else made
        return
    steps = f"step {first} was" if first == last else f"steps {first} to {last} were"
    took = f"; that took {max(0.0, *longer):,.0f} ms longer than other steps" if longer else ""
    warn(
        info,
        f"{steps} traced with torch.profiler, as for {share:.0f} % of the step the device was in phases that its host "
        f"was still launching, and may have stood idle in them{took} (--deep never: no step is)",
    )


def note_groups(info: RunInfo) -> None:
    for fact in info.facts:
        if fact["fact"] == GROUP and fact.get("name") is not None:
            ranks = fact.get("ranks", [])
            if not isinstance(ranks, list):
                continue
            about = {"ranks": ranks, "size": len(ranks), "desc": fact.get("desc", "")}
            info.groups[str(fact["name"])] = about | ({"backend": fact["backend"]} if fact.get("backend") else {})


def warn(info: RunInfo, text: str) -> None:
    """Add a warning to run.json's content, once."""
    if not isinstance(info.warnings, _Warnings):
        info.warnings = _Warnings(info.warnings)
    info.warnings.add(text)


class _Warnings(list[str]):
    """Those of a run, of which each rank may give some: whether one was given already is not looked for in all."""

    _known: frozenset[str] | set[str] = frozenset()
    _looked = 0

    def add(self, text: str) -> None:
        if not self._looked <= len(self) or not isinstance(self._known, set):
            self._known, self._looked = set(), 0
        self._known.update(self[self._looked :])
        if text not in self._known:
            self.append(text)
            self._known.add(text)
        self._looked = len(self)
