"""The steps of each rank, under numbers that mean the same on all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from dsprof.schema import CAPTURE_GAP, CAPTURE_OFF, CAPTURE_ON
from dsprof.trace import Trace, step_pattern
from dsprof.trace.load import concat_rows

from ..arrays import Float
from ..columns import RankRows, as_rows
from ..text import count
from .match import numbers
from .participants import is_numbered


@dataclass(frozen=True)
class StepTime:
    """Durations of the ordinary training steps, in ms."""

    mean: float
    median: float
    p10: float
    p90: float


NOT_SHARED: Final = np.iinfo(np.int64).min
"""In the place of a difference, where one of the two has no such collective."""


def late_beginnings(rows: pd.DataFrame | RankRows) -> tuple[dict[int, int], list[str]]:
    """Rank -> by how many steps its numbers lag behind those of the rank that has most steps, where they do; and
    warnings of that.

    A rank whose first records are lost counts from a later step. The steps in which it issued the collectives it
    shares with the others tell how far it is off.
    """
    rows = as_rows(rows)
    shared = np.flatnonzero(is_numbered(rows) & ~rows.known("peer") & (rows.whole("step") >= 0))
    key, rank, step = numbers(rows, shared), rows.whole("rank")[shared], rows.whole("step")[shared]
    if not len(rank) or rank.min() == rank.max():
        return {}, []
    order = np.lexsort((key, rank))
    key, rank, step = key[order], rank[order], step[order]
    once = np.append(True, (np.diff(key) != 0) | (np.diff(rank) != 0))
    key, rank, step = key[once], rank[once], step[once]
    ranks, begins = np.unique(rank, return_index=True)
    stepped = np.sort(rows.whole("rank")[rows.are("kind", "step")])
    counts = np.searchsorted(stepped, ranks, "right") - np.searchsorted(stepped, ranks)
    most = int(ranks[counts.argmax()])
    low, high = np.searchsorted(rank, [most, most + 1])
    reference, known = step[low:high], key[low:high]
    at = np.minimum(np.searchsorted(known, key), len(known) - 1)
    off = np.where(known[at] == key, reference[at] - step, NOT_SHARED)
    shift, warnings = {}, []
    for one, mine in zip(ranks.tolist(), np.split(off, begins[1:]), strict=True):
        values, times = np.unique(mine[mine != NOT_SHARED], return_counts=True)
        by = int(values[times.argmax()]) if len(values) else 0
        if by and times.max() / times.sum() > 0.5:
            shift[one] = by
            warnings.append(f"rank {one}: its capture begins {count(by, 'step')} late; its steps were renumbered")
    return shift, warnings


def renumber_steps(rows: pd.DataFrame, late: Mapping[int, int]) -> pd.DataFrame:
    """Rows with the steps of the ranks in `late` numbered like those of the others."""
    if not late:
        return rows
    moved = rows["rank"].map(late).fillna(0).astype("int32")
    return rows.assign(step=rows["step"].where(rows["step"] < 0, rows["step"] + moved))


def completed_steps(rows: pd.DataFrame | RankRows) -> pd.DataFrame:
    """rank, step, start_ns, dur_ns, by rank and step."""
    rows = as_rows(rows)
    steps = np.flatnonzero(rows.are("kind", "step") & rows.known("dur_ns"))
    steps = steps[np.lexsort((rows.whole("step")[steps], rows.whole("rank")[steps]))]
    columns = rows.take_arrays(("rank", "step", "start_ns"), steps)
    return pd.DataFrame({**columns, "dur_ns": rows.whole("dur_ns")[steps]}, copy=False)


def no_steps() -> pd.DataFrame:
    """`completed_steps` of no rank."""
    return completed_steps(concat_rows([]))


def early_ends(steps: pd.DataFrame) -> list[str]:
    """Warnings of ranks whose steps end well before the others' do."""
    last = steps.groupby("rank")["step"].max()
    return [
        f"rank {rank}: its last complete step is {step}, the others' {last.max()}; what follows was not judged"
        for rank, step in last.items()
        if step < last.max() - max(FEW_BEHIND, LATE_SHARE * last.max())
    ]


def steps_taken(rows: pd.DataFrame | RankRows) -> int | None:
    """How many optimizer steps a rank took, as the marks say, where its capture was turned on or off while it ran
    (`schema.CAPTURE_ON`), or a part of it was given up; else None."""
    rows = as_rows(rows)
    turned = rows.are("kind", "mark") & rows.are("name", CAPTURE_ON, CAPTURE_OFF, CAPTURE_GAP)
    return int(np.nan_to_num(rows.real("value")[turned]).max()) if turned.any() else None


def captured_part(steps: pd.DataFrame, taken: int) -> str:
    """Which steps (of `completed_steps`) were captured, in words, of a run that took so many until the capture was
    turned on or off for the last time."""
    numbers = np.unique(steps["step"].to_numpy(np.int64))
    parts = np.split(numbers, np.flatnonzero(np.diff(numbers) > 1) + 1)
    named = [f"{part[0]} to {part[-1]}" if len(part) > 1 else str(part[0]) for part in parts if len(part)]
    if named:
        return f"captured were steps {', '.join(named)}"
    return f"no whole step was captured: --steps, --delay, --duration or `dsprof capture` left none of {taken}"


def without_training(phases: pd.DataFrame, communicated_nothing: bool) -> str:
    """That what was seen on all ranks is no training, in words; empty where it may be, or nothing was seen."""
    trains = phases["name"].isin(["backward", "optimizer"]).any()
    if trains or (phases.empty and communicated_nothing):
        return ""
    return "neither a backward pass nor an optimizer's step was seen, so there is no training step to judge"


PATTERN_COLUMNS: Final = ("rank", "restart", "step", "kind", "name", "start_ns", "dur_ns", "value")
"""Columns of the trace that `step_pattern` looks at."""
MOST_OPTIMIZERS: Final = 6
"""Of more, such as one a parameter, it is only said how many there are."""
FEW_BEHIND: Final = 2
LATE_SHARE: Final = 0.02
"""A rank may be so many steps, or so large a share of them, behind the others at the end."""


def step_time(steps: pd.DataFrame) -> StepTime | None:
    """Of the ordinary steps; None without one."""
    ordinary = steps[steps["ordinary"]]
    if ordinary.empty:
        return None
    every = ordinary["dur_ns"].to_numpy(np.float64) / 1e6
    p10, median, p90 = np.percentile(every, [10, 50, 90])
    return StepTime(float(every.mean()), float(median), float(p10), float(p90))


LEAST_STEPS: Final = 10
"""A change lasts for at least so many steps, and is one against at least so many."""
LEAST_SHIFT: Final = 0.1
SURE: Final = 8.0
"""Standard errors of the difference of two means that noise never makes."""


def lasting_change(numbers: npt.NDArray[np.int64], durations: Float) -> tuple[int, float, float] | None:
    """The first step (of `numbers`) of a lasting change, and the median step before and after it in ms; None without.

    `durations`: ms of each. The split is the one that explains most of the variance; both sides must be steady, so
    that a slope or a wave is none.
    """
    count = len(durations)
    if count < 2 * LEAST_STEPS:
        return None
    low, high = np.percentile(durations, [2, 98])
    values = np.clip(durations, low, high)
    at = np.arange(LEAST_STEPS, count - LEAST_STEPS + 1)
    total = np.cumsum(values)
    before, after = total[at - 1] / at, (total[-1] - total[at - 1]) / (count - at)
    split = int(at[np.argmax(at * (count - at) * (after - before) ** 2)])
    first, second = values[:split], values[split:]
    left, right = float(np.median(first)), float(np.median(second))
    spread = np.sqrt(first.var() / len(first) + second.var() / len(second))
    if abs(right - left) < LEAST_SHIFT * min(left, right) or abs(second.mean() - first.mean()) < SURE * spread:
        return None
    if max(np.ptp(np.percentile(side, [10, 90])) for side in (first, second)) > abs(right - left) / 2:
        return None
    return int(numbers[split]), left, right


def describe_steps(steps: pd.DataFrame, trace: Trace) -> str:
    """What a step of this run is, where it is not what one expects: one optimizer's step after its backward. `steps`:
    rank and value of all ranks' steps."""
    steps = steps[steps["value"].notna()]
    if steps.empty:
        return ""
    if (steps["value"] == 0).all():
        return "one backward: no optimizer of torch.optim was seen to step"
    pattern = step_pattern(trace.read(int(steps["rank"].min()), PATTERN_COLUMNS))
    if len(pattern) < 2:
        return ""
    run = trace.run
    known = {fact.get("number"): str(fact.get("class")) for fact in run.facts if fact.get("fact") == "optimizer"}
    if len(pattern) > MOST_OPTIMIZERS:
        return f"an iteration of {sum(times for _, times in pattern)} steps of {len(pattern)} optimizers"
    parts = [f"{times} of {known.get(number, 'optimizer')} {number}" for number, times in pattern]
    return f"an iteration of {count(sum(times for _, times in pattern), 'optimizer step')}: {', '.join(parts)}"
