"""What several tools recorded of one job, as one trace.

A trace that dsprof captured is the ground, else one of torch.profiler or Nsight Systems, else Flight Recorder dumps. To
it come, rank by rank,

    of a profiler's trace   kernels, copies, launches, memory; and when collectives were on the device
    of Flight Recorder      what had not ended, and who had issued it where; lines and sizes of collectives
    of memory snapshots     what the allocators held

Collectives are the same by group and number. Tools count from different numbers on, and their clocks are others: of the
shifts by which names and sizes agree, the one that leaves the least scatter of the times counts, and the clocks' offset
is the median then. Where another shift fits about as well, as in a job whose steps are all alike, what another group or
another rank tells decides; where nothing does, a warning says that the join is not sure. Where no number is shared, the
steps stand for them. A rank that cannot be put beside the ground by either is left out of that tool's trace, and a
warning says so.
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
AS_WELL: Final = 3.0
"""A shift that leaves no more than so many times the scatter of the best fits about as well: of a few collectives the
median deviation is itself known to a factor of two only."""
LEAST_SCATTER_NS: Final = 1_000.0
"""Less scatter than this tells no shift from another: times are told to a microsecond."""
MOST_SCATTER_NS: Final = 20_000_000
"""Times of one thing differ by so much, at most, once the clocks agree."""
TIMES: Final = ("start_ns", "issue_ns", "arrival_ns")
FILLED: Final = ("bytes", "dtype", "site", "purpose")


@dataclass(frozen=True)
class Fit:
    """offset_ns: how far the other trace's clock is ahead of the ground's, on one rank. scatter_ns: of the single times
    about it. pairs: rows of the ground and of the other that are one collective. shifts: by group, what the ground
    counts it by more than the other. also_ns: by how much the offset would be another if another shift, which fits
    about as well, is the true one, at most; None: there is none, so the fit is sure."""

    offset_ns: float
    scatter_ns: float
    pairs: list[tuple[int, int]]
    shifts: Mapping[str, int]
    also_ns: float | None = None


@dataclass(frozen=True)
class Shift:
    """A shift of a group's numbers by which names and sizes agree. apart: of each collective the other's time less the
    ground's, ns. pairs: rows of the ground and of the other. scatter_ns: of `apart`; infinite of too few."""

    by: int
    apart: Int
    pairs: list[tuple[int, int]]
    scatter_ns: float

    @property
    def offset_ns(self) -> float:
        return float(np.median(self.apart))


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
    sure = {group: by for fit in known.values() if fit.also_ns is None for group, by in fit.shifts.items()}
    for rank, fit in known.items():
        if fit.also_ns is not None and sure.keys() & fit.shifts.keys():  # a tool counts a group alike on all ranks
            known[rank] = fit_clocks(rows[rank], other.read(rank), sure) or fit
    warnings = [
        f"rank {_some(unknown)}: neither collectives nor steps tell how the clocks of both traces are apart, so its "
        "rows are left out"
        for unknown in [tuple(rank for rank, fit in fits.items() if fit is None)]
        if unknown
    ]
    beyond = tuple(rank for rank in other.ranks if rank not in rows)
    if beyond:
        warnings.append(f"rank {_some(beyond)}: not in the trace that it is joined to, so it is left out")
    unsure = {rank: fit.also_ns for rank, fit in known.items() if fit.also_ns is not None}
    if unsure:
        warnings.append(
            f"rank {_some(tuple(unsure))}: collectives of other numbers fit about as well, so the join is not sure: "
            f"its rows may be {max(unsure.values()) / 1e6:.3g} ms off, in another step. Record steps of unequal "
            "length, or communications of another kind, with both tools: the first steps, or an evaluation"
        )
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


def fit_clocks(ground: pd.DataFrame, other: pd.DataFrame, known: Mapping[str, int] | None = None) -> Fit | None:
    """How the clock of one rank's other trace is ahead of the ground's; None: nothing that both saw tells. `known`: by
    group, the shift that is known already."""
    mine, theirs = _collectives(ground), _collectives(other)
    fitting: dict[str, list[Shift]] = {}
    for group in sorted(mine.keys() & theirs.keys()):
        wanted = None if known is None else known.get(group)
        found = _fitting(mine[group], theirs[group], wanted)
        if found:
            fitting[group] = found
    also_ns = _decide(fitting)
    chosen = {group: found[0] for group, found in fitting.items()}
    if sum(len(shift.apart) for shift in chosen.values()) >= FEWEST:
        apart = np.concatenate([shift.apart for shift in chosen.values()])
        pairs = [pair for shift in chosen.values() for pair in shift.pairs]
        return _fit(apart, pairs, {group: shift.by for group, shift in chosen.items()}, also_ns)
    return _by_steps(ground, other)


def _decide(fitting: dict[str, list[Shift]]) -> float | None:
    """Put the shift that counts first in each group's list, and say by how much the offset may be wrong, None: it is
    sure. Groups of one trace have one clock: one that is sure decides for the others."""
    sure = [found[0] for found in fitting.values() if len(found) == 1 and len(found[0].apart) >= FEWEST]
    if sure:
        offset = float(np.median([shift.offset_ns for shift in sure]))
        for found in fitting.values():
            found.sort(key=lambda shift: abs(shift.offset_ns - offset))
        return None
    doubtful = [found for found in fitting.values() if len(found) > 1]
    return max((abs(shift.offset_ns - found[0].offset_ns) for found in doubtful for shift in found), default=None)


def _fit(
    apart: Int, pairs: list[tuple[int, int]], shifts: Mapping[str, int], also_ns: float | None = None
) -> Fit | None:
    scatter = _scatter(apart)
    return Fit(float(np.median(apart)), scatter, pairs, shifts, also_ns) if scatter <= MOST_SCATTER_NS else None


def _scatter(apart: Int) -> float:
    """Median deviation from the median, ns."""
    return float(np.median(np.abs(apart - np.median(apart))))


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


def _fitting(mine: pd.DataFrame, theirs: pd.DataFrame, wanted: int | None) -> list[Shift]:
    """The shifts of numbers by which two lists of collectives agree and that fit about as well as the best, the best
    first; of one that is known, that one."""
    found = []
    for by in range(-MOST_SHIFT, MOST_SHIFT + 1) if wanted is None else (wanted,):
        both = mine.join(theirs.set_axis(theirs.index + by).add_suffix("_other"), how="inner")
        if both.empty or (both["name"] != both["name_other"]).any() or _sizes_differ(both):
            continue
        apart = both["when_other"].to_numpy(np.int64) - both["when"].to_numpy(np.int64)
        pairs = list(zip(both["row"].tolist(), both["row_other"].tolist(), strict=True))
        found.append(Shift(by, apart, pairs, _scatter(apart) if len(apart) >= FEWEST else float("inf")))
    found.sort(key=lambda shift: (shift.scatter_ns, -len(shift.pairs), abs(shift.by)))
    if not found or found[0].scatter_ns == float("inf"):
        return found[:1]
    most = AS_WELL * max(found[0].scatter_ns, LEAST_SCATTER_NS)
    return [shift for shift in found if shift.scatter_ns <= most]


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
            found.append((_scatter(apart), abs(shift), apart))
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
