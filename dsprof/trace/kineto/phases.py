"""What the training thread did: its steps, and phases told from the profiler's annotations and the operators.

torch annotates the steps (ProfilerStep#N), loaders, DDP's forward and optimizers. The rest follows from the operators:
those of backward are named so, on whatever thread; what runs before a backward in its step is forward, between backward
and optimizer clip.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from .events import Annotation, Events
from .names import ANNOTATIONS

Int = npt.NDArray[np.int64]

STEP: Final = re.compile(r"ProfilerStep#(\d{1,9})$")
BACKWARD: Final = re.compile(r"autograd::engine::evaluate_function: |torch::autograd::AccumulateGrad|\w+Backward\d*$")
"""Operators of a backward; before torch 1.9 the nodes of the graph are not inside of another operator."""
DATA: Final = re.compile(r"enumerate\((DataLoader|DataPipe)\)#|.*DataLoader.*__next__$")
OPTIMIZER: Final = re.compile(r"Optimizer\.step#")
NO_PHASE: Final = re.compile(r"Optimizer\.zero_grad#|ProfilerStep#|DistributedDataParallel\.forward$")
"""Annotations of torch's that are neither a phase nor the user's."""
SAVES_IN_PYTHON: Final = re.compile(
    r"serialization\.py\(\d+\): save\b|distributed/checkpoint/\S+\(\d+\): save|"
    r"\(\d+\): save_(checkpoint|model|pretrained|state)"
)
"""Functions of Python that write a checkpoint, as a trace with stacks names them."""
SAVES: Final = re.compile(
    r"(sav|writ|dump)\w*[ _.:/-]*(\w+[ _.:/-]+)?(checkpoint|ckpt|state_?dict|snapshot)|"
    r"(checkpoint|ckpt)\w*[ _.:/-]*(sav|writ|dump)",
    re.IGNORECASE,
)
"""The user's annotations that say so."""
OLD_NOTE: Final = re.compile(r"[^\w.]")
"""What the names of old operators (aten::add, AddmmBackward) do not hold, beside `::`."""

FORWARD, BACKWARDS = range(2)
MOST_STRAY: Final = 2
"""So many operators between those of a backward are no forward."""


@dataclass(frozen=True)
class ProfiledSteps:
    """number, start_ns, end_ns: in order of time. `marked`: by the profiler, else all of the trace is one step."""

    number: Int
    start_ns: Int
    end_ns: Int
    marked: bool

    def of(self, when: Int) -> Int:
        """The number of the step that each moment is in, -1: none."""
        at = np.searchsorted(self.start_ns, when, "right") - 1
        inside = (at >= 0) & (when < self.end_ns[np.maximum(at, 0)])
        return np.where(inside, self.number[np.maximum(at, 0)], -1)


@dataclass(frozen=True)
class ThreadPhases:
    name: list[str]
    start_ns: Int
    end_ns: Int
    derived: list[bool]


def main_thread(events: Events) -> int:
    """The thread that trains, as an index: that of the steps, else of the optimizer, else the one that is longest in
    operators; -1: there is no thread."""
    for pattern in (STEP, OPTIMIZER):
        for note in events.annotations:
            if pattern.match(note.name):
                return note.thread
    if not len(events.ops):
        return int(events.calls["thread"][0]) if len(events.calls) else -1
    spent = np.bincount(events.ops["thread"], events.ops["dur_ns"])
    return int(spent.argmax())


def find_steps(events: Events, main: int) -> ProfiledSteps:
    found = []
    for note in events.annotations:
        match = STEP.match(note.name)
        if match and note.thread == main:
            found.append((note.start_ns, note.start_ns + note.dur_ns, int(match[1])))
    if not found:
        low, high = extent(events)
        return ProfiledSteps(np.array([0]), np.array([low]), np.array([high]), marked=False)
    found.sort()
    kept = [found[0]]
    for one in found[1:]:  # a step that a damaged trace tells twice
        if one[0] >= kept[-1][1] and one[2] not in {known[2] for known in kept[-4:]}:
            kept.append(one)
    start, end, number = (np.array(column, np.int64) for column in zip(*kept, strict=True))
    return ProfiledSteps(number, start, end, marked=True)


def extent(events: Events) -> tuple[int, int]:
    """When the first event begins and the last one ends; 0, 0 without any."""
    tables = [table for table in (events.ops, events.calls, events.device) if len(table)]
    notes = events.annotations
    lows = [int(table["start_ns"].min()) for table in tables] + [note.start_ns for note in notes]
    highs = [int((table["start_ns"] + table["dur_ns"]).max()) for table in tables]
    highs += [note.start_ns + note.dur_ns for note in notes]
    return (min(lows), max(highs)) if lows else (0, 0)


def outermost(start: Int, end: Int) -> Int:
    """Which of the spans of one thread are inside of no other, in order of time."""
    order = np.lexsort((-end, start))
    reach = np.maximum.accumulate(end[order])
    first = np.append(True, start[order][1:] >= reach[:-1])[: len(order)]
    chosen: Int = order[first]
    return chosen


def backward_names(events: Events) -> npt.NDArray[np.bool_]:
    return np.array([BACKWARD.match(name) is not None for name in events.names], bool)


def find_phases(events: Events, main: int, steps: ProfiledSteps) -> ThreadPhases:
    """In order of time; they are disjoint."""
    told: list[tuple[int, int, str]] = []
    for note in events.annotations:
        if note.thread == main:
            name = told_by(note)
            if name:
                told.append((note.start_ns, note.start_ns + note.dur_ns, name))
    told = _disjoint(sorted(told, key=lambda one: (one[0], -one[1])))
    begin, finish = np.array([one[0] for one in told], np.int64), np.array([one[1] for one in told], np.int64)
    start, end, what = _operators(events, main)
    at = np.searchsorted(begin, start, "right") - 1
    inside = (at >= 0) & (start < np.append(finish, 0)[at]) if len(begin) else np.zeros(len(start), bool)
    start, end, what = start[~inside], end[~inside], what[~inside]
    what = _smoothed(what)
    # What stands between two of the same kind belongs to them, unless another phase or step begins there.
    cut = np.sort(np.concatenate([begin, steps.start_ns, steps.end_ns]))
    stretch = np.searchsorted(cut, start, "right")
    first = np.flatnonzero(np.append(True, (np.diff(what) != 0) | (np.diff(stretch) != 0))[: len(start)])
    phases = [(a, b, name, False) for a, b, name in told]
    if len(first):
        reach = np.maximum.reduceat(end, first)
        number = steps.of(start[first])
        runs = list(zip(start[first].tolist(), reach.tolist(), what[first].tolist(), number.tolist(), strict=True))
        following = np.searchsorted(begin, start[first])
        trains = bool((what == BACKWARDS).any())
        for index, (low, high, _, step) in enumerate(runs):
            later = [one for one in runs[index + 1 : index + 3] if one[3] == step]
            next_told = told[following[index]] if following[index] < len(told) else None
            limit = min([one[0] for one in later[:1]] + ([next_told[0]] if next_told else []) + [high])
            name = _named(runs, index, next_told, later) if trains else "forward"
            phases.append((low, max(limit, low), name, True))
    phases.sort()
    return ThreadPhases(
        [one[2] for one in phases], np.array([one[0] for one in phases], np.int64),
        np.array([one[1] for one in phases], np.int64), [one[3] for one in phases],
    )  # fmt: skip


def told_by(note: Annotation) -> str:
    """The phase that an annotation of torch's stands for; empty: none."""
    if DATA.match(note.name):
        return "data"
    if OPTIMIZER.match(note.name):
        return "optimizer"
    return "checkpoint" if SAVES.search(note.name) or SAVES_IN_PYTHON.search(note.name) else ""


def stands_among_operators(name: str) -> bool:
    """Whether an operator of this name is an annotation: torch's own stand among the operators in older traces."""
    return bool(
        name.startswith(ANNOTATIONS) or STEP.match(name) or DATA.match(name) or OPTIMIZER.match(name)
        or NO_PHASE.match(name)
    )  # fmt: skip


def stands_among_old_operators(name: str) -> bool:
    """The same of traces in which the user's stand there, too: what no operator can be called."""
    return "::" not in name and OLD_NOTE.search(name) is not None


def _disjoint(spans: list[tuple[int, int, str]]) -> list[tuple[int, int, str]]:
    """In order of time, those that begin after the one before has ended."""
    kept: list[tuple[int, int, str]] = []
    for one in spans:
        if not kept or one[0] >= kept[-1][1]:
            kept.append(one)
    return kept


def _operators(events: Events, main: int) -> tuple[Int, Int, Int]:
    """Start, end and kind of the operators inside no other: of backward on any thread, of anything else on the training
    thread; in order of time."""
    if not len(events.ops):
        return np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.int64)
    start = events.ops["start_ns"]
    end, thread = start + events.ops["dur_ns"], events.ops["thread"]
    is_backward = backward_names(events)[events.ops["name"]]
    parts = []
    for one in np.unique(thread).tolist():
        mine = np.flatnonzero((thread == one) & ((one == main) | is_backward))
        if len(mine):
            parts.append(mine[outermost(start[mine], end[mine])])
    chosen = np.concatenate(parts) if parts else np.empty(0, np.int64)
    chosen = chosen[np.argsort(start[chosen], kind="stable")]
    return start[chosen], end[chosen], np.where(is_backward[chosen], BACKWARDS, FORWARD)


def _smoothed(what: Int) -> Int:
    """Without stray operators within a backward: those of hooks, which are nodes of no graph."""
    first = np.flatnonzero(np.append(True, np.diff(what) != 0)[: len(what)])
    count = np.diff(np.append(first, len(what)))
    stray = (what[first] == FORWARD) & (count <= MOST_STRAY) if len(what) else np.zeros(0, bool)
    stray[:1] = stray[-1:] = False
    return np.where(np.repeat(stray, count), BACKWARDS, what)


def _named(
    runs: list[tuple[int, int, int, int]],
    index: int,
    next_told: tuple[int, int, str] | None,
    later: list[tuple[int, int, int, int]],
) -> str:
    """The phase of a run of operators: by what comes before and after it in its step."""
    _, _, kind, step = runs[index]
    if kind == BACKWARDS:
        return "backward"
    told_at = next_told[0] if next_told is not None and next_told[2] == "optimizer" else None
    optimizer_first = told_at is not None and (not later or told_at < later[0][0])
    before = index > 0 and runs[index - 1][2] == BACKWARDS and runs[index - 1][3] == step
    if before and optimizer_first:
        return "clip"
    return "forward" if any(one[2] == BACKWARDS for one in later) else "between"
