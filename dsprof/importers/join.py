"""What several tools recorded of one job, as one trace.

A trace that dsprof captured is the ground, else one of torch.profiler or Nsight Systems, else Flight Recorder dumps. To
it come, rank by rank,

    of a profiler's trace   kernels, copies, launches, memory; and when collectives were on the device
    of Flight Recorder      what had not ended, and who had issued it where; lines and sizes of collectives
    of memory snapshots     what the allocators held

Collectives are the same by group and number. Tools count from different numbers on, and their clocks are others: of the
shifts by which names and sizes agree, the one that leaves the least scatter of the times counts, and the clocks' offset
is the median then. Where no number is shared, the steps stand for them. A rank that cannot be put beside the ground by
either is left out of that tool's trace, and a warning says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from dsprof.run import RunError, RunInfo
from dsprof.schema import COLUMNS, STANDSTILL
from dsprof.trace import Trace, concat_rows
from dsprof.trace.deep import beside, with_lanes_of

Int = npt.NDArray[np.int64]

PROFILERS: Final = ("kineto", "nsight", "chakra")
ORDER: Final = ("", "dsprof", *PROFILERS, "chrome", "straggler", "flight_recorder", "memory_snapshot")
"""Which of several traces is the ground; the first: a capture of dsprof's own."""
JOINED: Final = "joined"
"""Kind of the facts of what was joined to the ground."""
MOST_SHIFT: Final = 8
"""Numbers of collectives by which tools count differently, at most."""
FEWEST: Final = 3
"""Collectives, or steps, that tell a clock's offset."""
MOST_STEPS: Final = 100_000
"""By which numbers of steps may differ: beyond, none is tried."""
MOST_SCATTER_NS: Final = 20_000_000
"""Times of one thing differ by so much, at most, once the clocks agree."""
TIMES: Final = ("start_ns", "issue_ns", "arrival_ns")
FILLED: Final = ("bytes", "dtype", "site", "purpose")


@dataclass(frozen=True)
class Fit:
    """offset_ns: how far the other trace's clock is ahead of the ground's, on one rank. scatter_ns: of the single times
    about it. pairs: rows of the ground and of the other that are one collective. shifts: by group, what the ground
    counts it by more than the other."""

    offset_ns: float
    scatter_ns: float
    pairs: list[tuple[int, int]]
    shifts: Mapping[str, int]


def join_traces(traces: Sequence[Trace]) -> Trace:
    """One trace of several, of as many tools. Raises RunError where they are not of one job, or two of one tool."""
    ordered = sorted(traces, key=lambda trace: _place(trace.run.imported))
    kinds = [trace.run.imported for trace in ordered]
    if len(set(kinds)) < len(kinds) or sum(kind in PROFILERS for kind in kinds) > 1:
        raise RunError(
            "two traces of one kind cannot be joined: one capture of dsprof, one profiler's trace, one set of Flight "
            "Recorder dumps and one of memory snapshots can; import the others by themselves"
        )
    ground = ordered[0]
    rows = {rank: ground.read(rank) for rank in ground.ranks}
    facts, groups, memory = list(ground.run.facts), dict(ground.run.groups), dict(ground.memory)
    for other in ordered[1:]:
        if not set(other.ranks) & set(rows):
            raise RunError(
                f"ranks {_some(other.ranks)} of {_called(other)} are none of {_called(ground)} ({_some(tuple(rows))}): "
                "they are not of one job"
            )
        kind = other.run.imported
        warnings = _own_warnings(other)
        memory |= {rank: of for rank, of in other.memory.items() if rank in rows}
        groups = {**other.run.groups, **groups}
        if kind != "memory_snapshot":
            warnings += _add_rows(rows, other, kind)
        facts += _facts_of(other, rows, warnings)
    run = replace(ground.run, facts=facts, groups=groups, world_size=max(_size(trace.run) for trace in ordered))
    return Trace(run, Trace.of(run, pd.concat([*rows.values()], ignore_index=True)).source, memory)


def _add_rows(rows: dict[int, pd.DataFrame], other: Trace, kind: str) -> list[str]:
    """Put the rows of another trace beside those of the ground; what is to be said of it."""
    fits = {rank: fit_clocks(rows[rank], other.read(rank)) for rank in other.ranks if rank in rows}
    known = {rank: fit for rank, fit in fits.items() if fit is not None}
    warnings = [
        f"rank {_some(unknown)}: neither collectives nor steps tell how the clocks of both traces are apart, so its "
        "rows are left out"
        for unknown in [tuple(rank for rank, fit in fits.items() if fit is None)]
        if unknown
    ]
    beyond = tuple(rank for rank in other.ranks if rank not in rows)
    if beyond:
        warnings.append(f"rank {_some(beyond)}: not in the trace that it is joined to, so it is left out")
    for rank, fit in known.items():
        moved = other.read(rank)
        moved = moved.assign(**{name: moved[name] - round(fit.offset_ns) for name in TIMES})
        if kind in PROFILERS:
            rows[rank] = _with_device(rows[rank], moved, fit.pairs)
        else:
            rows[rank] = _with_records(rows[rank], moved, fit)
    if known:
        pairs, scatter = sum(len(fit.pairs) for fit in known.values()), max(fit.scatter_ns for fit in known.values())
        warnings.append(
            f"joined by {pairs:,} collectives of {len(known)} rank{'s' * (len(known) > 1)}, whose times differ by "
            f"{scatter / 1e3:.3g} us in the median once the clocks agree"
        )
    return warnings


# --- clocks ---------------------------------------------------------------------------------------


def fit_clocks(ground: pd.DataFrame, other: pd.DataFrame) -> Fit | None:
    """How the clock of one rank's other trace is ahead of the ground's; None: nothing that both saw tells."""
    mine, theirs = _collectives(ground), _collectives(other)
    offsets: list[Int] = []
    pairs: list[tuple[int, int]] = []
    shifts: dict[str, int] = {}
    for group in sorted(mine.keys() & theirs.keys()):
        found = _best_shift(mine[group], theirs[group])
        if found is not None:
            shifts[group], apart, same = found
            offsets.append(apart)
            pairs += same
    if sum(map(len, offsets)) >= FEWEST:
        return _fit(np.concatenate(offsets), pairs, shifts)
    return _by_steps(ground, other)


def _fit(apart: Int, pairs: list[tuple[int, int]], shifts: Mapping[str, int]) -> Fit | None:
    middle = float(np.median(apart))
    scatter = float(np.median(np.abs(apart - middle)))
    return Fit(middle, scatter, pairs, shifts) if scatter <= MOST_SCATTER_NS else None


def _collectives(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """By group: `name`, `bytes`, `when` (the host asked), by number; each number once."""
    comm = rows[(rows["kind"] == "comm") & rows["group"].notna() & rows["seq"].notna() & rows["peer"].isna()]
    when = comm["issue_ns"].fillna(comm["start_ns"])
    table = pd.DataFrame(
        {"group": comm["group"].astype(str), "seq": comm["seq"].astype("int64"), "name": comm["name"].astype(str),
         "bytes": comm["bytes"], "when": when.astype("int64"), "row": comm.index}
    )  # fmt: skip
    table = table.drop_duplicates(["group", "seq"])
    return {str(group): of.set_index("seq").sort_index() for group, of in table.groupby("group")}


def _best_shift(mine: pd.DataFrame, theirs: pd.DataFrame) -> tuple[int, Int, list[tuple[int, int]]] | None:
    """The shift of numbers that fits best, and of the collectives that are the same then the times apart and the
    rows."""
    best: tuple[tuple[float, float], int, Int, list[tuple[int, int]]] | None = None
    for shift in sorted(range(-MOST_SHIFT, MOST_SHIFT + 1), key=abs):
        shifted = theirs.set_axis(theirs.index + shift)
        both = mine.join(shifted.add_suffix("_other"), how="inner")
        if both.empty or (both["name"] != both["name_other"]).any() or _sizes_differ(both):
            continue
        apart = both["when_other"].to_numpy(np.int64) - both["when"].to_numpy(np.int64)
        scatter = float(np.median(np.abs(apart - np.median(apart)))) if len(apart) >= FEWEST else float("inf")
        key = (scatter, -len(both))
        if best is None or key < best[0]:
            best = key, shift, apart, list(zip(both["row"].tolist(), both["row_other"].tolist(), strict=True))
    return best[1:] if best is not None else None


def _sizes_differ(both: pd.DataFrame) -> bool:
    known = both["bytes"].notna() & both["bytes_other"].notna()
    return bool((both["bytes"][known] != both["bytes_other"][known]).any())


def _by_steps(ground: pd.DataFrame, other: pd.DataFrame) -> Fit | None:
    """By when steps begin: the profiler may count them from another number on."""
    mine, theirs = (rows[(rows["kind"] == "step")].set_index("step")["start_ns"] for rows in (ground, other))
    mine, theirs = mine[~mine.index.duplicated()], theirs[~theirs.index.duplicated()]
    found: list[tuple[float, int, Int]] = []
    if mine.empty or theirs.empty:
        return None
    low, high = int(mine.index.min() - theirs.index.max()), int(mine.index.max() - theirs.index.min())
    for shift in range(low, high + 1) if high - low <= MOST_STEPS else ():
        both = mine.to_frame("mine").join(theirs.set_axis(theirs.index + shift).rename("other"), how="inner")
        if len(both) >= max(FEWEST, min(len(mine), len(theirs))):
            apart = (both["other"] - both["mine"]).to_numpy(np.int64)
            found.append((float(np.median(np.abs(apart - np.median(apart)))), abs(shift), apart))
    return _fit(min(found, key=lambda one: one[:2])[2], [], {}) if found else None


# --- rows -----------------------------------------------------------------------------------------


def _with_device(ground: pd.DataFrame, found: pd.DataFrame, pairs: Sequence[tuple[int, int]]) -> pd.DataFrame:
    """The ground with what was on the device. A collective of both gets the times of its kernel; a kernel of none that
    the ground has stays a kernel, so that no collective is there twice."""
    found = with_lanes_of(found, ground)
    on_device = (found["kind"] == "comm") & found["arrival_ns"].notna()
    ground = ground.astype({"lane": object})
    matched = [(row, other) for row, other in pairs if on_device[other]]
    for row, other in matched:
        kernel = found.loc[other]
        ground.loc[row, ["start_ns", "dur_ns", "arrival_ns", "lane", "corr", "ended"]] = [
            kernel["start_ns"], kernel["dur_ns"], kernel["arrival_ns"], kernel["lane"], kernel["corr"], True,
        ]  # fmt: skip
    rest = found[on_device].drop(index=[other for _, other in matched])
    rest = rest.assign(kind="kernel", group=None, seq=pd.NA, arrival_ns=pd.NA)
    return beside(ground.astype({"lane": "category"}), found, rest)


def _with_records(ground: pd.DataFrame, found: pd.DataFrame, fit: Fit) -> pd.DataFrame:
    """The ground with what only the records of collectives tell: lines and sizes, and what had not ended."""
    ground = ground.astype(dict.fromkeys(FILLED, object))
    for row, other in fit.pairs:
        for name in FILLED:
            if pd.isna(ground.at[row, name]) and not pd.isna(found.at[other, name]):
                ground.at[row, name] = found.at[other, name]
    left = found[(found["kind"] == "comm") & ~found["ended"].fillna(True).to_numpy(bool)]
    left = left.drop(index=[other for _, other in fit.pairs if other in left.index])
    shift = left["group"].astype(str).map(fit.shifts).fillna(0).astype("Int32")
    left = left.assign(seq=left["seq"] + shift.where(left["peer"].isna(), 0))
    rows = concat_rows([ground.astype(COLUMNS), left.assign(rank=ground["rank"].iloc[0]).astype(COLUMNS)])
    return rows.sort_values("start_ns", kind="stable", ignore_index=True)


# --- run.json -------------------------------------------------------------------------------------


def _place(kind: str) -> int:
    return ORDER.index(kind) if kind in ORDER else len(ORDER)


def _size(run: RunInfo) -> int:
    return run.world_size or 0


def _called(trace: Trace) -> str:
    return trace.run.imported.replace("_", " ") or "the capture"


def _own_warnings(other: Trace) -> list[str]:
    imported = (fact for fact in other.run.facts if fact.get("fact") == "import")
    return [str(text) for fact in imported for text in fact.get("warnings", [])]


def _facts_of(other: Trace, rows: Mapping[int, Any], warnings: list[str]) -> Iterator[dict[str, Any]]:
    files = [str(fact.get("file", "")) for fact in other.run.facts if fact.get("fact") == "import"]
    yield {"fact": JOINED, "rank": min(rows), "format": other.run.imported or "dsprof", "file": (files or [""])[0],
           "warnings": warnings}  # fmt: skip
    for fact in other.run.facts:
        if fact.get("fact") in ("group", "allocator", STANDSTILL) and fact.get("rank") in rows:
            yield fact


def _some(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, list(ranks)[:8])) + (", ..." if len(ranks) > 8 else "")
