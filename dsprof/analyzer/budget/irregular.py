"""Ordinary training steps, and those that are not: because of evaluation, a checkpoint, compilation, a loader that
starts anew, or a stop of another kind.

What makes a step irregular is told by each rank's own work, not by the step's duration: waiting spreads one rank's stop
over all. Only the excess over the ordinary step is a cost; it is divided over the steps of the run.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import pandas as pd

from dsprof.run import RunInfo

from ..arrays import Bool, Float, Int
from ..columns import RankRows, as_rows
from .parts import OWN_WORK
from .step_budget import KNOWN

KINDS: Final = (*KNOWN, "data", "stop")

FEWEST_JUDGED: Final = 5
"""Of fewer steps nothing is sure."""
ENOUGH_STEPS: Final = 20
"""In a run that is to be judged: a warm-up, and several times FEWEST_JUDGED."""
WARM_UP_SHARE: Final = 4
MOST_WARM_UP: Final = 100
"""A quarter of the steps, and no more than these, are taken for warm-up."""
MOST_JUDGED: Final = 400
WINDOWS: Final = 8
"""Of a longer run, this many stretches of it are judged, which make MOST_JUDGED ordinary steps together."""

USUAL: Final = 0.4
"""What this share of the steps lacks is not usual: what every other step has makes it irregular, what most have not."""
LEAST_APART: Final = 0.02
"""Share of the typical step that evaluation, a checkpoint or compilation must take beyond what is usual."""
LEAST_RESTART: Final = 0.02
"""The same of a loader that starts anew."""
FEWEST_STEPS: Final = 8
LEAST_STOP_MS: Final = 20.0
"""Of fewer steps none is typical, and what takes less is no stop."""
STOP_STEPS: Final = 1.0
STOP_SPREADS: Final = 5.0
"""A stop takes a rank longer than its typical step by this many typical steps, and by this many times the distance of
the third quartile from the median, so that steps that just differ in length are none."""
APART: Final = 2.0
"""And the shortest stop is so many times as long beyond the typical step as the longest of the other steps: between
steps that just differ there is no such gap."""
RARE_SHARE: Final = 0.07
FEWEST_RARE: Final = 2
"""Stops are rare: what befalls more of the steps is how the job runs. Beside many short ones a few may be so much
longer that these are stops all the same."""
LARGER_INPUT: Final = 1.5
"""A rank that was given so many times its typical input did not stop: it had more to do."""

TABLE_COLUMNS: Final = ("rank", "step", "kind", "start_ns", "excess_ms")


@dataclass(frozen=True)
class Irregular:
    """steps:   [S] numbers of the steps looked at: those after warm-up that every rank completed
    ranks:      [R]
    own_ms:     kind -> [R, S], what each rank itself spent beyond what is usual; 0 in ordinary steps
    excess_ms:  kind -> [S], by how much the step was longer for it, mean over ranks
    ordinary:   [S] which of them are ordinary
    durations:  [S] ms, mean over ranks
    table:      TABLE_COLUMNS, one row per irregular step and kind, with the rank that spent most on it
    """

    steps: Int = field(default_factory=lambda: np.empty(0, np.int64))
    ranks: tuple[int, ...] = ()
    own_ms: dict[str, Float] = field(default_factory=dict)
    excess_ms: dict[str, Float] = field(default_factory=dict)
    ordinary: Bool = field(default_factory=lambda: np.empty(0, np.bool_))
    durations: Float = field(default_factory=lambda: np.empty(0))
    table: pd.DataFrame = field(default_factory=lambda: pd.DataFrame(columns=list(TABLE_COLUMNS)))

    @property
    def mean_ms(self) -> float:
        """A step with its share of all that is irregular, ms."""
        return float(self.durations.mean()) if len(self.durations) else 0.0

    def shares(self) -> dict[int, dict[str, float]]:
        """Step -> kind -> its part of the excess, from 0 to 1."""
        found: dict[int, dict[str, float]] = {}
        for index in np.flatnonzero(~self.ordinary).tolist():
            own = {kind: float(values[:, index].max()) for kind, values in self.own_ms.items()}
            whole = sum(own.values())
            if whole > 0:
                found[int(self.steps[index])] = {kind: ms / whole for kind, ms in own.items() if ms > 0}
        return found


def warm_up(count: int) -> int:
    """How many of the first steps are left out."""
    return min(count // WARM_UP_SHARE, MOST_WARM_UP)


def profiled_steps(run: RunInfo) -> frozenset[int]:
    """Steps that torch.profiler looked at on some rank (`--deep`): what that takes is in them, on all ranks."""
    return frozenset(
        step
        for fact in run.facts
        if fact.get("fact") == "deep"
        for step in fact.get("profiled") or ()
        if isinstance(step, int)
    )


def find_irregular(
    steps: pd.DataFrame, rows: pd.DataFrame | RankRows, profiled: Collection[int] = frozenset()
) -> Irregular:
    """Look at the steps that every rank completed, after warm-up. `steps`: rank, step, dur_ns, the budget's parts, and
    `<kind>_ms` of what is not training (`step_budget.step_budget`). Steps that were `profiled` are none of them."""
    rank, step = (steps[name].to_numpy(np.int64) for name in ("rank", "step"))
    numbers, times = np.unique(step, return_counts=True)
    every = np.unique(rank)
    common = numbers[times == len(every)]
    common = common[common >= warm_up(len(common))]
    common = common[~np.isin(common, list(profiled))]
    if len(common) == 0:
        return Irregular()
    ranks: tuple[int, ...] = tuple(every.tolist())
    inside = np.flatnonzero(np.isin(step, common))
    looked_at = steps.take(inside)
    at = np.searchsorted(every, rank[inside]), np.searchsorted(common, step[inside])
    rows = as_rows(rows)

    def wide(column: str) -> Float:
        table = np.zeros((len(ranks), len(common)))
        if column in looked_at:
            table[at] = looked_at[column].to_numpy(np.float64)
        return table

    duration = wide("dur_ns") / 1e6
    typical = float(np.median(duration))
    own: dict[str, Float] = {}
    for kind in KNOWN:
        spent = wide(f"{kind}_ms")
        of_most = np.quantile(spent, USUAL, axis=1, keepdims=True, method="lower")
        beyond = spent - of_most
        # What most steps have is how the job runs, though it takes longer in one than in another.
        own[kind] = np.where((beyond > LEAST_APART * typical) & (beyond > of_most), beyond, 0.0)
    loading = wide("data")
    beyond = loading - np.median(loading, axis=1, keepdims=True)
    restarted = _restarted(rows, every, common)
    own["data"] = np.where(restarted & (beyond > LEAST_RESTART * typical), beyond, 0.0)
    own["stop"] = _stops(
        np.sum([wide(part) for part in OWN_WORK], axis=0) - wide("apart_ms"), typical, rows, every, common
    )
    irregular = np.any([values > 0 for values in own.values()], axis=(0, 1))
    if irregular.all():  # then nothing is ordinary, and all of it is how the job runs
        irregular[:] = False
        own = {kind: np.zeros_like(values) for kind, values in own.items()}
    mean = duration.mean(axis=0)
    usual = float(mean[~irregular].mean())
    largest = {kind: values.max(axis=0) for kind, values in own.items()}
    whole = np.maximum(sum(largest.values(), np.zeros(len(common))), 1e-9)
    excess = {kind: np.clip(mean - usual, 0, None) * values / whole for kind, values in largest.items()}
    begun = np.zeros((len(ranks), len(common)), np.int64)
    begun[at] = looked_at["start_ns"].to_numpy(np.int64)
    return Irregular(common, ranks, own, excess, ~irregular, mean, _table(own, excess, common, ranks, begun))


def _restarted(rows: RankRows, ranks: Int, common: Int) -> Bool:
    """Whether a loader was started in each step, [R, S]."""
    started = np.flatnonzero(rows.are("kind", "phase") & rows.are("name", "loader_start"))
    return ~np.isnan(rows.by_step(np.ones(len(rows)), started, ranks, common))


def _stops(own: Float, typical: float, rows: RankRows, ranks: Int, common: Int) -> Float:
    """Own work beyond a rank's typical step, where that is a stop; else 0; ms, [R, S]."""
    middle, upper = np.percentile(own, [50, 75], axis=1)
    beyond: Float = own - middle[:, None]
    if own.shape[1] < FEWEST_STEPS:
        return np.zeros_like(own)
    limit = np.maximum(max(STOP_STEPS * typical, LEAST_STOP_MS), STOP_SPREADS * (upper - middle))
    stops = beyond > limit[:, None]
    if stops.any():
        beyond = np.where(_larger_input(rows, ranks, common), 0.0, beyond)
        stops = beyond > limit[:, None]
    most = int(max(FEWEST_RARE, RARE_SHARE * own.shape[1]))
    for mine, found in zip(beyond, stops, strict=True):
        falling = -np.sort(-mine)
        apart = (falling[:-1] >= APART * np.maximum(falling[1:], 0)) & found[np.argsort(-mine)][:-1]
        gaps = np.flatnonzero(apart[:most])  # what is above one of them befalls few enough of the steps
        found &= mine >= (falling[gaps[-1]] if len(gaps) else np.inf)
    return np.where(stops, beyond, 0.0)


def _larger_input(rows: RankRows, ranks: Int, common: Int) -> Bool:
    """Whether each rank was given so much more than usual in each step that it did not stop, [R, S]."""
    forward = np.flatnonzero(rows.are("kind", "phase") & rows.are("name", "forward") & rows.known("value"))
    if not len(forward):
        return np.zeros((len(ranks), len(common)), bool)
    table = rows.by_step(rows.real("value"), forward, ranks, common)
    with np.errstate(invalid="ignore"):
        larger: Bool = table > LARGER_INPUT * np.nanmedian(np.where(np.isnan(table), 0.0, table), axis=1)[:, None]
    return larger


def _table(
    own: dict[str, Float], excess: dict[str, Float], common: Int, ranks: tuple[int, ...], begun: Int
) -> pd.DataFrame:
    """`begun`: when each rank began each step, [R, S]."""
    found = []
    for kind, values in own.items():
        for index in np.flatnonzero(values.max(axis=0) > 0).tolist():
            rank = int(values[:, index].argmax())
            begin = int(begun[rank, index])
            found.append((ranks[rank], int(common[index]), kind, begin, float(excess[kind][index])))
    table = pd.DataFrame(found, columns=list(TABLE_COLUMNS))
    return table.sort_values(["step", "kind"], ignore_index=True)


def mark_ordinary(steps: pd.DataFrame, irregular: Irregular) -> pd.DataFrame:
    """`steps` with the column `ordinary`: the steps that are judged. Of a long run those of WINDOWS stretches."""
    numbers = irregular.steps[irregular.ordinary]
    if len(numbers) > MOST_JUDGED:
        length = MOST_JUDGED // WINDOWS
        begins = np.linspace(0, len(numbers) - length, WINDOWS).astype(int)
        numbers = np.unique(np.concatenate([numbers[begin : begin + length] for begin in begins]))
    return steps.assign(ordinary=steps["step"].isin(numbers))
