"""Smaller tables for the figures: what is drawn is limited here, and each limit is told in words."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from dsprof import gauges
from dsprof.analyzer.analysis import WAITING
from dsprof.trace import Trace, concat_rows

NS_PER_MS = 1e6


def step_ms(steps: pd.DataFrame) -> pd.Series:
    """Duration of each (rank, step), ms."""
    return steps["dur_ns"].astype(float) / NS_PER_MS


def own_work_ms(steps: pd.DataFrame) -> pd.Series:
    """Each step without the parts in which its rank stood still for others, ms."""
    waiting = steps[[part for part in WAITING if part in steps]].sum(axis=1)
    return (step_ms(steps) - waiting).clip(lower=0.0)


def by_step(steps: pd.DataFrame, values: pd.Series) -> pd.DataFrame:
    """`values` as a table with a row per rank and a column per step; NaN where a rank lacks a step."""
    table = pd.DataFrame({"rank": steps["rank"], "step": steps["step"], "value": values})
    return table.pivot_table(index="rank", columns="step", values="value", aggfunc="max").sort_index()


def excess(table: pd.DataFrame) -> pd.DataFrame:
    """By how much each rank exceeds the middle rank of its step; 0 where it does not.

    The middle is the lower median, so that of two ranks the slower one shows its whole lead over the other.
    With one rank it is that rank's own median step.
    """
    if len(table) == 1:
        middle = np.full(table.shape[1], np.nanmedian(table.to_numpy()))
    else:
        middle = table.quantile(0.5, interpolation="lower").to_numpy()
    return (table - middle).clip(lower=0.0)


def coarsen(table: pd.DataFrame, max_rows: int, max_columns: int) -> tuple[pd.DataFrame, int, int]:
    """`table` with neighbouring ranks and steps joined by their maximum, and how many make one row and one column.

    The labels are the first rank and step of each group.
    """
    rows = -(-len(table) // max_rows) if len(table) else 1
    columns = -(-table.shape[1] // max_columns) if table.shape[1] else 1
    joined = table.groupby(np.arange(len(table)) // rows).max() if rows > 1 else table.copy()
    if rows > 1:
        joined.index = table.index[::rows]
    if columns > 1:
        joined = joined.T.groupby(np.arange(table.shape[1]) // columns).max().T
        joined.columns = table.columns[::columns]
    return joined, rows, columns


def stretches(numbers: Sequence[int], gap: int = 1) -> list[tuple[int, int]]:
    """First and last number of each stretch of `numbers` in which neighbours are at most `gap` apart."""
    found: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        if found and number - found[-1][1] <= gap:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return found


def irregular_steps(irregular: pd.DataFrame) -> pd.DataFrame:
    """`Analysis.irregular` (rank, step, kind, excess_ms) by step: step, excess_ms in all, kind that took most of it,
    and parts: (kind, rank, excess_ms) of each, most first.
    """
    rows = []
    for step, of_step in irregular.sort_values("excess_ms", ascending=False).groupby("step"):
        parts = list(zip(of_step["kind"].astype(str), of_step["rank"], of_step["excess_ms"], strict=True))
        rows.append((step, float(of_step["excess_ms"].sum()), parts[0][0], parts))
    return pd.DataFrame(rows, columns=["step", "excess_ms", "kind", "parts"])


def pick_ranks(candidates: Sequence[int], wanted: Sequence[int], limit: int) -> list[int]:
    """At most `limit` of `candidates`: those in `wanted` first, then evenly spread over the rest; sorted."""
    if len(candidates) <= limit:
        return sorted(candidates)
    first = [rank for rank in dict.fromkeys(wanted) if rank in set(candidates)][:limit]
    rest = [rank for rank in sorted(candidates) if rank not in first]
    room = limit - len(first)
    spread = [rest[index * len(rest) // room] for index in range(room)] if room else []
    return sorted([*first, *spread])


def pack(starts: Sequence[float], ends: Sequence[float], limit: int) -> list[int]:
    """A lane for each interval, such that those of a lane do not overlap; beyond `limit` lanes they share the last.

    The intervals are given in the order of their starts.
    """
    free: list[float] = []
    lanes = []
    for start, end in zip(starts, ends, strict=True):
        lane = next((index for index, until in enumerate(free) if until <= start), len(free))
        lane = min(lane, limit - 1)
        if lane == len(free):
            free.append(end)
        else:
            free[lane] = max(free[lane], end)
        lanes.append(lane)
    return lanes


def device_gauges(trace: Trace, ranks: Sequence[int]) -> pd.DataFrame:
    """What the devices of these ranks told: rank, name (`dsprof.gauges`), start_ns, step, value, by rank and time."""
    columns = ("rank", "step", "kind", "name", "start_ns", "value")
    tables = []
    for rank in ranks:
        rows = trace.read(rank, columns)
        rows = rows[(rows["kind"] == "gauge") & rows["value"].notna()]
        tables.append(rows[rows["name"].astype(str).str.startswith(gauges.DEVICE)])
    told = concat_rows(tables, columns)
    return told.assign(name=told["name"].astype(str))[["rank", "step", "name", "start_ns", "value"]]
