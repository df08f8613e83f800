"""What a run's wall time went into: training steps, evaluation, checkpoints, compilation, start-up, the rest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import numpy as np
import pandas as pd

from dsprof.run import RunInfo
from dsprof.schema import TIME_KINDS

from ..arrays import Float, Int
from ..columns import RankRows, as_rows
from .intervals import Intervals
from .irregular import USUAL, Irregular
from .step_budget import KNOWN

PHASE_KIND: Final = {"checkpoint": "checkpointing", "compile": "compilation"}
LANDMARKS: Final = ("backward", "optimizer", "checkpoint", "compile")
"""Phases that end a stretch of evaluation, beside a forward with gradients."""


def spans_outside_training(rows: pd.DataFrame | RankRows) -> dict[str, Intervals]:
    """Kind -> when the training thread was not training but evaluating, saving or compiling; they do not overlap.
    `rows` are of one rank."""
    rows = as_rows(rows)
    there = np.flatnonzero(rows.are("kind", "phase") & rows.are("lane", "main") & rows.known("dur_ns"))
    start, length = rows.whole("start_ns")[there], rows.whole("dur_ns")[there]
    order = np.lexsort((-length, start))
    there, start, end = there[order], start[order], (start + length)[order]
    found = {"evaluation": _evaluation(rows, there, start, end)}
    for name, kind in PHASE_KIND.items():
        named = rows.are("name", name)[there]
        found[kind] = Intervals.union(start[named], end[named])
    found["checkpointing"] = found["checkpointing"] - found["compilation"]
    found["evaluation"] = found["evaluation"] - found["checkpointing"] - found["compilation"]
    return found


def _evaluation(rows: RankRows, there: Int, start: Int, end: Int) -> Intervals:
    """Stretches of forwards without gradients, with the loading before them and what follows until the next phase.
    `there`, `start`, `end`: the phases of the training thread, by start, the longer first."""
    without = rows.are("name", "forward")[there] & ~rows.true("grad", missing=True)[there]
    if not without.any():
        return Intervals.empty()
    names = rows.words("name", there)
    saved = np.maximum.accumulate(np.where(names == "checkpoint", end, np.iinfo(np.int64).min))
    without &= start >= saved  # the saving's own, such as a sample for the model's description
    if not without.any():
        return Intervals.empty()
    landmark = np.isin(names, LANDMARKS) | ((names == "forward") & ~without & ~rows.are("source", "derived")[there])
    # One landmark may lie around others (a closure's): what ends first before the stretch is where it begins.
    stretch = np.cumsum(landmark)
    counts = np.bincount(stretch[without], minlength=int(stretch[-1]) + 1)
    usual = _usual_count(rows.whole("step")[there[without]], rows)
    values = rows.real("value")[there]
    ended = np.maximum.accumulate(np.where(landmark, end, np.iinfo(np.int64).min))
    edges = np.searchsorted(stretch, np.arange(len(counts) + 1))
    begins, finishes = [], []
    for number in np.flatnonzero(counts > 2 * usual if usual else counts > 0).tolist():
        members = np.arange(edges[number], edges[number + 1])
        evaluating = members[without[members]]
        before, begin = int(ended[members[0]]), int(start[evaluating[0]])
        if landmark[: members[0] + 1].any() and before <= begin:
            begin = before
        if number == 0:  # before anything was trained: the set-up before it is start-up
            loading = members[(members < evaluating[0]) & np.isin(names[members], ["data", "loader_start"])]
            begin = int(start[loading[0]]) if len(loading) else int(start[evaluating[0]])
        last = int(evaluating[-1])
        loaders = set(values[members[(members < last) & (names[members] == "data")]].tolist())
        following = last + 1
        while following < len(names) and names[following] == "data" and values[following] in loaders:
            last, following = following, following + 1  # the loader that ends, and says so
        finish = int(end[last])
        if following < len(names):
            finish = max(finish, int(start[following]))
        begins.append(begin)
        finishes.append(finish)
    return Intervals.union(np.array(begins, np.int64), np.array(finishes, np.int64))


def _usual_count(without: Int, rows: RankRows) -> int:
    """How many forwards without gradients most steps have: those of a teacher or a rollout, which belong to the step. 0
    where they are evaluation's. `without`: the step of each."""
    steps = np.unique(rows.whole("step")[rows.are("kind", "step")])
    if not len(steps):  # a rank that never trains, such as a frozen first stage: this is its work
        return len(without)
    inside = np.sort(without)
    counts = np.searchsorted(inside, steps, "right") - np.searchsorted(inside, steps)
    return int(np.percentile(counts, 100 * USUAL, method="lower"))


def run_span(run: RunInfo, seen: Iterable[tuple[int, int]]) -> tuple[int, int] | None:
    """From when the job was started to when it ended, ns on the common clock; of a run without a launcher of ours from
    when the first process began to the last thing seen. None of a run of which nothing was.

    seen: of each rank, when its first row begins and its last one ends.
    """
    seen = list(seen)
    if not seen:
        return None
    first, last = min(begin for begin, _ in seen), max(end for _, end in seen)
    infos = {item.rank: item for item in run.ranks}
    host, clock = (infos[min(infos)].host, infos[min(infos)].clock_name) if infos else ("", "")
    if run.started_ns and run.ended_ns and run.host == host and run.started_ns <= first and last <= run.ended_ns:
        return run.started_ns, run.ended_ns
    here = [item for item in run.ranks if item.clock_name == clock]
    begun = [item.started_ns for item in here if item.started_ns and item.started_ns <= first]
    closed = [item.closed_ns for item in here if item.closed_ns and item.closed_ns >= last]
    return min([first, *begun]), max([last, *closed])


def divide_time(
    span: tuple[int, int],
    steps: pd.DataFrame,
    outside_training: Mapping[int, Mapping[str, Intervals]],
    irregular: Irregular,
) -> dict[str, float]:
    """Kind of TIME_KINDS -> s, mean over ranks; they sum to the span.

    Of a step that was irregular for an evaluation, a checkpoint or a compilation, on whichever rank, the excess over
    the rank's typical step belongs to that, on the ranks that waited too; what a loader that started anew or another
    stop has in it stays training's.
    """
    total = dict.fromkeys(TIME_KINDS, 0.0)
    begin, end = span
    ranks = sorted(outside_training)
    numbers, shares = _known_shares(irregular)
    rank_of, begins, lengths, step_of = (
        steps[name].to_numpy(np.int64) for name in ("rank", "start_ns", "dur_ns", "step")
    )
    is_ordinary = steps["ordinary"].to_numpy(bool)
    order = np.lexsort((begins, rank_of))
    edges = np.searchsorted(rank_of[order], [ranks, [rank + 1 for rank in ranks]])
    for rank, first_step, behind in zip(ranks, *edges.tolist(), strict=True):
        mine = order[first_step:behind]
        spans = outside_training[rank]
        starts = begins[mine]
        ends = starts + lengths[mine]
        first, last = (int(starts[0]), int(ends[-1])) if len(mine) else (end, end)
        outside = {kind: _within(of, [(begin, first), (last, end)]) for kind, of in spans.items()}
        before = sum(_within(of, [(begin, first)]) for of in spans.values())
        for kind, ns in outside.items():
            total[kind] += ns
        total["startup"] += max(first - begin, 0) - before
        total["rest"] += max(end - last, 0) - (sum(outside.values()) - before)
        duration = (ends - starts).astype(np.float64)
        ordinary = is_ordinary[mine]
        typical = (
            float(np.mean(duration[ordinary])) if ordinary.any() else float(np.median(duration)) if len(mine) else 0.0
        )
        own = {kind: (of.before(ends) - of.before(starts)).astype(np.float64) for kind, of in spans.items()}
        all_own = sum(own.values(), np.zeros(len(mine)))
        excess = np.minimum(np.maximum(duration - typical, all_own), duration)
        place = np.searchsorted(numbers, step_of[mine])
        told = np.append(numbers, -1)[place] == step_of[mine]
        for kind in KNOWN:
            share = np.append(shares[kind], 0.0)[place]
            assigned = np.where(told, excess * share, own.get(kind, 0.0))
            total[kind] += float(assigned.sum())
            duration = duration - assigned
        total["training"] += float(duration.sum())
        gaps = starts[1:] - ends[:-1]  # a rank whose records were lost in between
        total["rest"] += float(gaps.sum()) if len(gaps) else 0.0
    return {kind: float(ns) / 1e9 / max(len(ranks), 1) for kind, ns in total.items()}


def _known_shares(irregular: Irregular) -> tuple[Int, dict[str, Float]]:
    """The steps that were irregular for what is not training, in order, and the share of each kind in their excess."""
    found = {}
    for step, shares in sorted(irregular.shares().items()):
        known = [shares.get(kind, 0.0) for kind in KNOWN]
        if sum(known) > 0:
            found[step] = known
    table = np.array(list(found.values()), np.float64).reshape(-1, len(KNOWN))
    return np.array(list(found), np.int64), {kind: table[:, i] for i, kind in enumerate(KNOWN)}


def _within(spans: Intervals, stretches: list[tuple[int, int]]) -> float:
    found = 0
    for low, high in stretches:
        if high > low:
            edges: Int = np.array([low, high], np.int64)
            found += int(np.diff(spans.before(edges))[0])
    return float(found)
