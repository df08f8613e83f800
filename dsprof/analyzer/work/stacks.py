"""Where training threads were, by samples of their stacks: the lines in which ranks differ, and those of a gap.

A sample stands for as much time as there is between two of them, on average. Only samples of a rank's own work count:
those within ordinary steps, and not while it waits for others.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Final

import numpy as np
import pandas as pd

from dsprof.schema import STACK, STACK_FACT

from ..arrays import Bool, Int
from ..budget.label import PHASE_PART, spans_of
from ..columns import is_one_of
from ..study import Study, once
from ..text import ms

FEWEST: Final = 5
"""Samples of which a line is told."""
SURE: Final = 3.0
"""Standard deviations that a difference between ranks is more than chance."""
MOST_OF: Final = 0.6
"""Of the difference at a line, that lies in one of those that it calls: the inner one is told."""
FRACTION_OF_LATE: Final = 0.3
"""Of what a rank is late by, that a difference between lines must explain to be told."""

Path = tuple[str, ...]
"""Frames from the outermost in: `file:line` of the script, `package/file.py:function` of libraries."""


@dataclass(frozen=True)
class Stacks:
    """Samples of one rank in ordinary steps.

    paths: of each sample; start_ns: when; own: whether it waited for nobody then
    a_sample_ms: what a sample is of a step, ms
    """

    paths: tuple[Path, ...]
    start_ns: Int
    own: Bool
    a_sample_ms: float


@dataclass(frozen=True)
class Line:
    """path: to it; ms: in it a step, on the ranks that it is about; others_ms: on the typical other one."""

    path: Path
    ms: float
    others_ms: float = 0.0

    @property
    def site(self) -> str | None:
        """`file:line`: the innermost line of the script on the way."""
        return next((frame for frame in reversed(self.path) if _is_line(frame)), None)

    @property
    def words(self) -> str:
        """`train.py:31 -> torch/_dynamo/eval_frame.py:compile_wrapper`."""
        lines = [frame for frame in self.path if _is_line(frame)][-1:]
        below = [frame for frame in self.path if not _is_line(frame)][-1:]
        return " → ".join([*(line.rpartition("/")[2] for line in lines), *below])


def _is_line(frame: str) -> bool:
    return frame.rpartition(":")[2].isdigit()


@once
def stacks_of(study: Study) -> Mapping[int, Stacks]:
    """Rank -> its samples; without ranks that have none."""
    gauges = study.of_kind("gauge")
    rows = gauges[is_one_of(gauges["name"], STACK)]
    paths: dict[int, dict[int, Path]] = defaultdict(dict)
    for fact in study.facts.get(STACK_FACT, []):
        paths[int(fact["rank"])][int(fact["number"])] = tuple(str(frame) for frame in fact.get("frames") or ())
    found: dict[int, Stacks] = {}
    if rows.empty:
        return found
    waited = study.waits.table()
    of_rank, steps_of, waits_of = (dict(iter(table.groupby("rank"))) for table in (rows, study.ordinary, waited))
    for rank in study.ranks:
        if rank not in of_rank or rank not in steps_of:
            continue
        mine, steps = of_rank[rank].sort_values("start_ns"), steps_of[rank]
        when = mine["start_ns"].to_numpy(np.int64)
        chosen = _within(when, steps)
        if not chosen.any():
            continue
        numbers = mine["value"].to_numpy(np.float64)[chosen].astype(int)
        waits = waits_of.get(rank, waited[:0])
        waiting = _within(when[chosen], waits.assign(dur_ns=waits["end_ns"] - waits["start_ns"]))
        found[rank] = Stacks(
            tuple(paths[rank].get(number, ()) for number in numbers.tolist()),
            when[chosen],
            ~waiting,
            float(steps["dur_ns"].mean()) / 1e6 * len(steps) / len(study.step_numbers) / int(chosen.sum()),
        )
    return found


def _within(when: Int, spans: pd.DataFrame) -> Bool:
    """Which moments are in any of these stretches of time (start_ns, dur_ns)."""
    of = spans_of(spans[["start_ns", "dur_ns"]].astype("int64"))
    inside: Bool = of.before(when + 1) - of.before(when) > 0
    return inside


def differing_line(study: Study, slow: Bool, late_ms: float) -> Line | None:
    """The innermost line in which the slow ranks, [R], are longer than the others by most of what they are late by;
    None: samples do not tell.

    The way down to it is by call paths. How much longer a rank is in a line is the difference of the line's totals,
    whoever calls it: where two ranks reach one line by different callers, what both spend there is no difference.
    """
    stacks = stacks_of(study)
    mine = [stacks[rank] for rank in study.ranks_where(slow) if rank in stacks]
    others = [stacks[rank] for rank in study.ranks_where(~slow) if rank in stacks]
    if not mine or not others:
        return None
    every = (*mine, *others)
    by_path, by_line = ([count(one, one.own) for one in every] for count in (by_prefix, by_last_line))

    def spent(counts: Sequence[Mapping[Path, int]], path: Path) -> tuple[float, float]:
        of = [each.get(path, 0) * one.a_sample_ms for each, one in zip(counts, every, strict=True)]
        return float(np.mean(of[: len(mine)])), float(np.median(of[len(mine) :]))

    def more(counts: Sequence[Mapping[Path, int]], path: Path) -> float:
        here, there = spent(counts, path)
        return here - there

    def surely(path: Path) -> bool:
        here, there = spent(by_line, path)
        unit = float(np.mean([one.a_sample_ms for one in mine]))
        count = (here + there) / unit
        return here >= FEWEST * unit and here - there > SURE * unit * math.sqrt(count / len(mine))

    prefixes = {path for counts in by_path[: len(mine)] for path in counts}
    difference = _net({path: more(by_path, path) for path in prefixes}, lambda line: more(by_line, line))
    path = _innermost(prefixes, difference.__getitem__)
    if path is None or not surely(last_line(path)) or difference[path] < FRACTION_OF_LATE * late_ms:
        return None
    return Line(path, *spent(by_line, last_line(path)))


def _net(by_path: Mapping[Path, float], of_line: Callable[[Path], float]) -> dict[Path, float]:
    """What of the difference at each path, ms, is one of its line as well.

    by_path: path -> by how much the slow ranks are longer there; of_line: the same of a line, whoever calls it. A path
    differs by no more than its part of what its line does, and by nothing that is only called from elsewhere: what the
    lines below it lose by that is taken from those above them, too.
    """
    rises: dict[Path, float] = defaultdict(float)
    for path, difference in by_path.items():
        line = last_line(path)
        if difference > 0 and all(last_line(prefix) != line for prefix in _prefixes(path[:-1])):
            rises[line] += difference
    found: dict[Path, float] = {}
    moved: dict[Path, float] = defaultdict(float)
    for path in sorted(by_path, key=len, reverse=True):
        difference, line = by_path[path], last_line(path)
        found[path] = difference - moved[path]
        if difference > 0 and rises[line] > 0:
            part = min(max(of_line(line), 0.0) / rises[line], 1.0)
            found[path] = min(found[path], part * difference)
        moved[path[:-1]] += difference - found[path]
    return found


def last_line(path: Path) -> Path:
    """The end of a path from the script's last line on: that line, and what it calls of libraries. A path that is all
    libraries' is its own."""
    last = max((place for place, frame in enumerate(path) if _is_line(frame)), default=0)
    return path[last:]


def by_last_line(stacks: Stacks, chosen: Bool) -> dict[Path, int]:
    """How many of the chosen samples are in each line, or below it, whatever called it; by `last_line`."""
    return _count(stacks, chosen, lambda path: {last_line(prefix) for prefix in _prefixes(path)})


def by_prefix(stacks: Stacks, chosen: Bool) -> dict[Path, int]:
    """How many of the chosen samples are in each line, or below it."""
    return _count(stacks, chosen, _prefixes)


def _prefixes(path: Path) -> list[Path]:
    return [path[:depth] for depth in range(1, len(path) + 1)]


def _count(stacks: Stacks, chosen: Bool, places: Callable[[Path], Iterable[Path]]) -> dict[Path, int]:
    """How many of the chosen samples each place has. places: of a path; asked once of each, as a long job has many
    samples of few."""
    found: dict[Path, int] = defaultdict(int)
    for path, samples in Counter(compress(stacks.paths, chosen.tolist())).items():
        for place in places(path):
            found[place] += samples
    return found


def _innermost(prefixes: Sequence[Path] | set[Path], weight: Callable[[Path], float]) -> Path | None:
    """From the outermost line with most weight, down while one that it calls has most of that."""
    below: dict[Path, list[Path]] = defaultdict(list)
    for path in sorted(prefixes):
        below[path[:-1]].append(path)
    here: Path = ()
    while below[here]:
        heaviest = max(below[here], key=weight)
        if here and weight(heaviest) < MOST_OF * weight(here):
            break
        here = heaviest
    return here or None


def outside_phases(study: Study) -> Line | None:
    """The line that most of the time outside the phases of the loop lies in, on the rank that has most of it; None:
    samples do not tell."""
    stacks = stacks_of(study)
    if not len(study.ordinary):
        return None
    rank = int(study.ordinary.groupby("rank")["other"].mean().idxmax())
    if rank not in stacks:
        return None
    one = stacks[rank]
    phases = study.training_phases
    known = [name for name, part in PHASE_PART.items() if part != "other"]
    phases = phases[(phases["rank"] == rank) & phases["name"].isin([*known, "checkpoint", "compile"])]
    return _line_of_most(one, one.own & ~_within(one.start_ns, phases))


def in_loader(study: Study, rank: int) -> Line | None:
    """The line that most of a rank's own time in its loaders lies in, without waiting for other ranks there; None:
    samples do not tell."""
    one = stacks_of(study).get(rank)
    if one is None:
        return None
    phases = study.training_phases
    loading = [name for name, part in PHASE_PART.items() if part == "data"]
    phases = phases[(phases["rank"] == rank) & phases["name"].isin(loading)]
    return _line_of_most(one, one.own & _within(one.start_ns, phases))


def _line_of_most(one: Stacks, chosen: Bool) -> Line | None:
    counts = by_prefix(one, chosen)
    path = _innermost(set(counts), lambda path: counts[path])
    if path is None or counts[path] < FEWEST or counts[path] < MOST_OF * int(chosen.sum()):
        return None
    return Line(path, counts[path] * one.a_sample_ms)


def told(line: Line, others: Sequence[int]) -> str:
    """`train.py:31 → f takes 49.0 ms more than on rank 0`."""
    whom = f"rank {others[0]}" if len(others) == 1 else "the others"
    return f"{line.words} takes {ms(line.ms - line.others_ms)} more than on {whom}"
