"""What a lane does when, by the parts of a step: of rows that nest the innermost counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
import pandas as pd

from ..arrays import Int
from ..columns import Words, codes_of
from .intervals import Intervals, nest

Parts = dict[str, Intervals]
"""Part of the budget -> when."""

PHASE_PART: Final = {
    "data": "data",
    "loader_start": "data",
    "optimizer": "optimizer",
    "clip": "optimizer",
    "forward": "compute",
    "loss": "compute",
    "backward": "compute",
    "between": "other",
}
"""Phases that are not named belong to the one around them."""
NOTHING: Final = -1
"""Place of what is none: the part of a row that has no part, what a wait for something unknown was for."""


def spans_of(rows: pd.DataFrame) -> Intervals:
    """When any of `rows`, which have ended, was under way."""
    start = rows["start_ns"].to_numpy(np.int64)
    return Intervals.union(start, start + rows["dur_ns"].to_numpy(np.int64))


def innermost(phases: pd.DataFrame, parts: Mapping[str, str] = PHASE_PART) -> Parts:
    """Part -> when a phase of that part was the innermost one under way on the thread. `parts`: of each name."""
    names = tuple(dict.fromkeys(parts.values()))
    start = phases["start_ns"].to_numpy(np.int64)
    return innermost_of(start, start + phases["dur_ns"].to_numpy(np.int64), labels(phases["name"], parts, names), names)


def labels(column: pd.Series[str], parts: Mapping[str, str], names: tuple[str, ...]) -> Int:
    """Of each value its part's place in `names`, NOTHING: it has none."""
    return labels_of(*codes_of(column), parts, names)


def labels_of(codes: Int, words: Words, parts: Mapping[str, str], names: tuple[str, ...]) -> Int:
    """The same of values as `codes_of` has them."""
    places = [names.index(parts[word]) if word in parts else NOTHING for word in words.tolist()]
    return np.array([*places, NOTHING], np.int64)[codes]


def innermost_of(start: Int, end: Int, label: Int, names: tuple[str, ...]) -> Parts:
    """The same of intervals with labels, places in `names`; those without one are passed over."""
    start, end, label = start[label >= 0], end[label >= 0], label[label >= 0]
    order = np.lexsort((-end, start))
    start, end, label = start[order], end[order], label[order]
    end, parent = nest(start, end)
    # At each moment of a begin or an end, from then on: what begins, or what it was inside of; of several that end or
    # begin at once the outermost that ends and the innermost that begins, which is what comes last here.
    there = np.flatnonzero(end > start)
    when = np.concatenate([start[there], end[there]])
    turn = np.concatenate([there, -there - 1])
    then = np.concatenate([label[there], np.append(label, NOTHING)[parent[there]]])
    order = np.lexsort((turn, when))
    when, then = when[order], then[order]
    found = {}
    for place, name in enumerate(names):
        if name == "other":
            continue
        mine = np.flatnonzero(then[:-1] == place) if len(then) else np.empty(0, np.int64)
        found[name] = Intervals.union(when[mine], when[mine + 1])
    return found


def labelled(parts: Mapping[str, Intervals]) -> Intervals:
    """When any of them is."""
    result = Intervals.empty()
    for spans in parts.values():
        result = result | spans
    return result


def add(to: Parts, more: Mapping[str, Intervals]) -> None:
    """Paint `more` where nothing is labelled yet."""
    there = labelled(to)
    for part, spans in more.items():
        to[part] = to.get(part, Intervals.empty()) | (spans - there)
