"""Training steps: where they begin and end, which rows are theirs, and what they consist of."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from dsprof.schema import CAPTURE_GAP, CAPTURE_ON, CPU_SECONDS, STEPS_TAKEN

from ..capture import Capture
from .period import iteration_ends, rarest_regular
from .phases import Phases
from .rows import Int, derived_rows, ends, integers, issued, present, texts

UNNUMBERED = 0
"""The optimizer of a record that does not say which: of an old format, or of dsprof's engine."""
INSIDE_BACKWARD = -1
"""Any optimizer that is stepped inside backward. There each parameter may have its own, and some get no gradient: which
of them were stepped does not tell iterations apart."""


PHASES_ON_DEVICE = ("forward", "recompute", "backward", "optimizer")
"""Phases that are timed on a device's streams, each as one long kernel."""


@dataclass(frozen=True)
class _Units:
    """What is stepped together: optimizers between which there is no backward, with the backwards before them.

    end, count: when the last of its optimizers ended, and how many steps of optimizers there were.
    stepped:    (unit, number of the optimizer), each pair once.
    """

    end: Int
    count: Int
    stepped: npt.NDArray[np.int64]


def step_rows(rows: pd.DataFrame, phases: Phases, main: int) -> pd.DataFrame:
    """The `step` rows; `value` is the number of optimizer steps in each.

    A step ends with the last of the optimizers that step without a backward in between; with the backward, if they are
    stepped inside it; with the optimizer's step, if that runs backward in a closure. Of several optimizers that take
    turns, a step spans the pattern that repeats. Without any optimizer each backward ends a step, of value 0.

    A step of which records were given up is none; nor is what comes after them, where nobody counted steps meanwhile.
    """
    units = _units(rows, phases, main)
    last, first_start = _iterations(units), _first_start(phases)
    ended = units.end[last]
    # Where records overlap, as they should not, two may end at once: a step has a length.
    last = last[np.append(ended[1:] > ended[:-1], np.ones(len(ended[:1]), bool)) & (ended > first_start)]
    ended = units.end[last]
    steps = np.diff(np.cumsum(units.count)[last], prepend=0).astype(float)
    began = np.concatenate([[first_start], ended])[: len(ended)]
    on = _turned_on(rows)["start_ns"].to_numpy(np.int64)
    at = np.searchsorted(ended, on, "right")
    began[at[at < len(ended)]] = on[at < len(ended)]
    whole = np.ones(len(ended), bool)
    for gap in _gaps(rows):
        whole &= (ended <= gap.begin) | (began >= gap.end)
        whole[np.searchsorted(ended, gap.end, "right") :][:1] = False  # even if all that is seen of it came later
        if not gap.steps and (ended <= gap.begin).any():
            whole &= ended <= gap.begin
    return derived_rows("step", "step", began[whole], ended[whole], main, value=steps[whole])


@dataclass(frozen=True)
class _Gap:
    """A time whose records were given up, and how many steps the rank had counted at its end."""

    begin: int
    end: int
    steps: int


def _gaps(rows: pd.DataFrame) -> list[_Gap]:
    marks = _marks(rows, CAPTURE_GAP)
    if marks.empty:
        return []
    values = zip(marks["start_ns"].tolist(), ends(marks).tolist(), marks["value"].fillna(0).tolist(), strict=True)
    return [_Gap(begin, end, int(value)) for begin, end, value in values]


def _turned_on(rows: pd.DataFrame) -> pd.DataFrame:
    """Where the rank began to record anew: nothing is known of what came before."""
    return _marks(rows, CAPTURE_ON)


def _marks(rows: pd.DataFrame, name: str) -> pd.DataFrame:
    """When each mark of that name was, and what it says, in order."""
    at = np.flatnonzero(rows["kind"].to_numpy(object) == "mark")
    at = at[rows["name"].to_numpy(object)[at] == name]
    if not len(at):  # as nearly always
        return rows[:0]
    return rows[["start_ns", "dur_ns", "value"]].take(at).sort_values("start_ns")


def _numbers(rows: pd.DataFrame, steps: pd.DataFrame) -> Int:
    """The number of each step: from 0; after the capture was turned on, as many as had been taken until then, and after
    a gap one more, as one had begun in it."""
    numbers = np.arange(len(steps))
    on = _turned_on(rows)
    marks = [*zip(on["start_ns"].tolist(), on["value"].fillna(0).tolist(), np.zeros(len(on), int), strict=True)]
    marks += [(gap.end, gap.steps, 1) for gap in _gaps(rows)]
    if not marks:
        return numbers
    each = _counted_each(rows, steps)
    for when, taken, begun in sorted(marks):
        begin = int(np.searchsorted(ends(steps), when, "right"))
        numbers[begin:] = int(taken / each) + begun + np.arange(len(steps) - begin)
    return numbers


def _counted_each(rows: pd.DataFrame, steps: pd.DataFrame) -> float:
    """How many optimizers' steps the rank counts in each training step, by what it wrote now and then after one."""
    gauges = rows[rows["kind"] == "gauge"]
    counted = gauges.loc[gauges["name"] == STEPS_TAKEN, ["start_ns", "value"]].sort_values("start_ns")
    at = counted["start_ns"].to_numpy(np.int64)
    if not len(at):  # an older capture: it wrote this each time that it counted one
        at = np.sort(gauges.loc[gauges["name"] == CPU_SECONDS, "start_ns"].to_numpy(np.int64))
    taken = counted["value"].to_numpy(np.float64) if len(counted) else np.arange(1.0, len(at) + 1)
    if len(steps) > 1 and len(at):
        # By then; between two samples, and after the last one, as many as come between on the line.
        then = np.interp(ends(steps), at, taken)
        seen = (ends(steps) >= at[0]) & (ends(steps) <= at[-1])
        if seen.sum() > 1:
            return max(float(np.round(np.median(np.diff(then[seen])))), 1.0)
    return max(float(steps["value"].median()), 1.0)


def _units(rows: pd.DataFrame, phases: Phases, main: int) -> _Units:
    owner = phases.within("backward", "optimizer")
    top = np.flatnonzero(owner == np.arange(len(phases)))
    event = np.searchsorted(top, owner)  # of phases that have an owner
    is_backward, is_optimizer = phases.name == "backward", phases.name == "optimizer"
    has_backward = np.bincount(event[is_backward], minlength=len(top)) > 0
    inside = phases.name[top] == "backward"
    number = np.where(inside[event[is_optimizer]], INSIDE_BACKWARD, phases.number[is_optimizer])
    stepped = np.stack([event[is_optimizer], number], axis=1)

    # Those that a device's autograd thread steps.
    chosen = (texts(rows, "kind") == "phase") & (texts(rows, "name") == "optimizer") & present(rows, "dur_ns")
    elsewhere = np.flatnonzero(chosen & (integers(rows, "thread") != main))
    at = np.searchsorted(phases.start[top], rows["start_ns"].to_numpy(np.int64)[elsewhere], "right") - 1
    over = ends(rows)[elsewhere]
    within = (at >= 0) & inside[at] & (over <= phases.end[top][at]) if len(top) else np.zeros(len(at), bool)
    stepped = np.concatenate([stepped, np.stack([at[within], np.full(within.sum(), INSIDE_BACKWARD)], axis=1)])

    count = np.bincount(stepped[:, 0], minlength=len(top))
    end = np.maximum.accumulate(phases.end[top]) if len(top) else np.empty(0, np.int64)
    if not count.any():
        return _Units(end, count, np.empty((0, 2), np.int64))
    # A group is a backward with the optimizers after it; groups without any only accumulate. None spans a gap.
    begins = has_backward.copy()
    after = np.searchsorted(phases.start[top], [gap.end for gap in _gaps(rows)])
    begins[after[after < len(top)]] = True
    group = np.cumsum(begins) if has_backward.any() else np.arange(len(top))
    of_group = np.bincount(group, count) > 0
    unit_of_group: Int = np.cumsum(of_group) - of_group
    ends_unit = of_group[group] & np.append(group[1:] != group[:-1], True)
    unit: Int = unit_of_group[group]
    per_unit = np.bincount(unit, count)[: int(of_group.sum())].astype(np.int64)
    pairs = np.unique(np.stack([unit[stepped[:, 0]], stepped[:, 1]], axis=1), axis=0)
    return _Units(end[ends_unit], per_unit, pairs)


def _iterations(units: _Units) -> Int:
    """Index of the last unit of each step."""
    count = len(units.end)
    numbers, index = np.unique(units.stepped[:, 1], return_inverse=True)
    if len(numbers) < 2:
        return np.arange(count)
    steps = np.zeros((len(numbers), count), bool)
    steps[index, units.stepped[:, 0]] = True
    _, symbols = np.unique(steps, axis=1, return_inverse=True)
    for found in (iteration_ends(symbols.reshape(-1)), rarest_regular(steps)):
        if found is not None:
            return found
    return np.arange(count)


def _first_start(phases: Phases) -> int:
    """Where the first step begins: with its input, not with what comes before, such as an evaluation."""
    works = np.flatnonzero(np.isin(phases.name, ("forward", "backward", "optimizer")))
    if not len(works):
        return 0
    names = phases.name[works]
    evaluates = (names == "forward") & ~phases.grad[works] & (np.append(names[1:], "") != "backward")
    first = int(works[np.argmin(evaluates)])
    while phases.parent[first] >= 0:
        first = int(phases.parent[first])
    outer = np.flatnonzero(phases.parent[:first] < 0)
    others = np.flatnonzero(np.isin(phases.name[outer], ("forward", "checkpoint")))
    own = outer[int(others[-1]) + 1 :] if len(others) else outer
    loads = own[phases.name[own] == "data"]
    return int(phases.start[loads[0]]) if len(loads) else int(phases.start[first])


def step_of(rows: pd.DataFrame, steps: pd.DataFrame) -> Int:
    """Step of each row by when it was issued; -1 before the first. What follows the last step belongs to the next."""
    if steps.empty:
        return np.full(len(rows), -1, np.int64)
    numbers = _numbers(rows, steps)
    numbers = np.append(numbers, numbers[-1] + 1)
    when = issued(rows)
    following = np.searchsorted(ends(steps), when, side="right")
    number: Int = numbers[following]
    # Between the last step before a gap and the first one after it lie the step that the gap begins in, and the one
    # that it ends in.
    starts = np.append(steps["start_ns"].to_numpy(np.int64), np.iinfo(np.int64).max)
    for gap in _gaps(rows):
        after = int(np.searchsorted(ends(steps), gap.end, "right"))
        between = (following == after) & (when < starts[after])
        before = between & (when < gap.end)
        number[before] = numbers[after - 1] + 1 if after else -1
        number[between & ~before & (after < len(steps))] = numbers[after] - 1
    number[when < int(steps["start_ns"].iloc[0])] = -1
    is_step = texts(rows, "kind") == "step"
    number[is_step] = numbers[:-1]
    return number


def end_with_the_device(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows, with steps that end when the device is through with the phases that were issued in them.

    A host that waits for its device every tenth step is nine steps ahead by then: between the ends of its own steps
    lies the time it takes to launch one, and once in ten steps the rest of all of them. A step whose phases were not
    seen to end is left out. Steps without a phase on a device (before it is timed; replayed from a CUDA graph) end on
    the host.

    rows: with lanes and steps, of one process.
    """
    kernels = texts(rows, "kind") == "kernel"
    if not kernels.any():
        return rows
    phase = kernels & rows["name"].isin(PHASES_ON_DEVICE) & rows["device"].eq(True)
    if not phase.any():
        return rows
    at = rows.index[rows["kind"] == "step"]
    number = rows["step"][at]
    seen = rows["dur_ns"][phase].notna().groupby(rows["step"][phase]).all()
    told = (rows["start_ns"] + rows["dur_ns"])[phase].groupby(rows["step"][phase]).max()
    unseen = number.isin(seen.index[~seen])
    start, host = rows["start_ns"][at].to_numpy(np.int64), ends(rows.loc[at])
    end = np.maximum(host, number.map(told).fillna(0).to_numpy(np.int64))
    end = np.maximum.accumulate(np.where(unseen, host, end))
    start = np.maximum(start, np.append(np.int64(0), end[:-1]))
    rows.loc[at, "start_ns"], rows.loc[at, "dur_ns"] = start, pd.array(np.maximum(end - start, 0), "Int64")
    return rows.drop(at[unseen | (end <= start)]).reset_index(drop=True)


def missing_steps(capture: Capture, rows: pd.DataFrame) -> list[str]:
    """In words, for each gap of the capture, which steps of the trace (`rows` of one process) it took."""
    whole = rows[(rows["kind"] == "step") & rows["dur_ns"].notna()]
    marked = sorted(_gaps(rows), key=lambda gap: gap.begin)
    found = []
    for chunks, gap in zip((gap for gap in capture.gaps if gap.before < len(capture.records)), marked, strict=False):
        before, after = whole["step"][ends(whole) <= gap.begin], whole["step"][whole["start_ns"] >= gap.end]
        first, last = int(before.max()) + 1 if len(before) else 0, int(after.min()) - 1 if len(after) else None
        which = f"what follows step {first - 1} is" if last is None else count_steps(first, last)
        why = (
            f"at its size limit (--limit) the capture gave up the oldest of its middle, {chunks.chunks} MiB"
            if chunks.given_up
            else "their records are lost"
        )
        found.append(f"{which} missing: {why}")
    return found


def count_steps(first: int, last: int) -> str:
    return f"step {first} is" if first == last else f"steps {first} to {last} are"


def step_pattern(rows: pd.DataFrame) -> list[tuple[int, int]]:
    """What most steps consist of: each optimizer's number and how often it is stepped, in order of its first step.

    rows: of the trace, of any number of ranks. Optimizers without a number are 0. Empty: steps without an optimizer,
    or no step at all.
    """
    ended = rows["dur_ns"].notna().to_numpy(bool)
    whole = np.flatnonzero((rows["kind"] == "step").to_numpy(bool) & ended)
    if not len(whole):
        return []
    process = np.stack([rows[name].to_numpy(np.int64) for name in ("rank", "restart")])
    every, times = np.unique(process[:, whole], axis=1, return_counts=True)
    of_process = (process == every[:, [times.argmax()]]).all(axis=0)
    step = rows["step"].to_numpy(np.int64)
    whole = whole[of_process[whole]]
    updates = (rows["kind"] == "phase").to_numpy(bool) & (rows["name"] == "optimizer").to_numpy(bool) & ended
    stepped = np.flatnonzero(updates & of_process & np.isin(step, step[whole]))
    value = rows["value"].to_numpy(np.float64, na_value=np.nan)[stepped]
    number = np.where(np.isnan(value), UNNUMBERED, value).astype(np.int64)
    order = np.lexsort((number, rows["start_ns"].to_numpy(np.int64)[stepped], step[stepped]))
    of_steps: dict[int, Counter[int]] = {}
    for at, optimizer in zip(step[stepped][order].tolist(), number[order].tolist(), strict=True):
        of_steps.setdefault(at, Counter())[optimizer] += 1
    found = Counter(tuple(of_step.items()) for of_step in of_steps.values())
    found[()] = len(whole) - found.total()
    return list(found.most_common(1)[0][0])
