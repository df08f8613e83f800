"""The training thread's phases, how they nest, and what lies between two of them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from dsprof.schema import CAPTURE_GAP, LOADING

from .purpose import OF_ONE_NORM
from .rows import Int, derived_rows, ends, integers, issued, present, texts

NORM_WAITS: Final = ("all_reduce", "wait_tensor")
"""Waits for the reduction of a norm; of `wait_tensor` it depends on what was issued."""
SHORT_SHARE: Final = 0.1
SHORT_NS: Final = 200_000
MOST_SHORT: Final = 0.05
"""What lies between two forwards is the loop between two modules if it is no longer than a share of both together; or
if it is brief and all that is so brief is no more than a share of the run. Anything else (an environment that is
stepped, metrics, printing) may be no part of forward."""


@dataclass(frozen=True)
class Phases:
    """The completed phases of a thread by their start, the longer first, so that each comes after what it is inside of.

    parent: index of the phase that it is directly inside of; -1: of none.
    number: of the optimizer object, 0: unknown. `grad`: False where it is known that gradients were off.
    """

    name: npt.NDArray[np.object_]
    start: Int
    end: Int
    parent: Int
    number: Int
    grad: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.start)

    def within(self, *names: str) -> Int:
        """For each phase, the outermost one of these names that it is or is inside of; -1: none."""
        chosen = np.isin(self.name, names)
        owner = np.full(len(self), -1, np.int64)
        for i, parent in enumerate(self.parent.tolist()):
            owner[i] = owner[parent] if parent >= 0 and owner[parent] >= 0 else (i if chosen[i] else -1)
        return owner


def main_phases(rows: pd.DataFrame, main: int) -> Phases:
    """The phases of thread `main`."""
    at = np.flatnonzero((texts(rows, "kind") == "phase") & (integers(rows, "thread") == main) & present(rows, "dur_ns"))
    start, lasts = rows["start_ns"].to_numpy(np.int64)[at], integers(rows, "dur_ns")[at]
    order = np.lexsort((-lasts, start))
    at, start, end = at[order], start[order], (start + lasts)[order]
    name, value = texts(rows, "name")[at], rows["value"].to_numpy(np.float64, na_value=np.nan)[at]
    number = np.where((name == "optimizer") & ~np.isnan(value), value, 0).clip(0, np.iinfo(np.int32).max)
    return Phases(
        name=name,
        start=start,
        end=end,
        parent=_parents(start, end),
        number=number.astype(np.int64),
        grad=rows["grad"].to_numpy(bool, na_value=True)[at],
    )


def _parents(start: Int, end: Int) -> Int:
    parent = np.full(len(start), -1, np.int64)
    under_way: list[int] = []
    for i, begin in enumerate(start.tolist()):
        while under_way and end[under_way[-1]] <= begin:
            under_way.pop()
        if under_way:
            parent[i] = under_way[-1]
        under_way.append(i)
    return parent


def phases_between(
    rows: pd.DataFrame, phases: Phases, main: int, on_gpu: bool, gradients: Collection[int] = ()
) -> pd.DataFrame:
    """What lies between two phases at the same level of nesting, named by its neighbours. gradients: index of the rows
    that carry those.

    forward -> backward: the loss. backward -> optimizer: clipping, unscaling. forward -> forward, if it is short: the
    loop between two modules. And where no DataLoader was seen in the whole run, optimizer or backward -> forward:
    `between`, which is not known to be loading. A checkpoint or a compilation is a phase itself: nothing spans it.
    """
    order = np.argsort(phases.parent, kind="stable")
    before, after = order[:-1], order[1:]
    gap = (phases.parent[before] == phases.parent[after]) & (phases.start[after] > phases.end[before])
    kind, name, begins = texts(rows, "kind"), texts(rows, "name"), rows["start_ns"].to_numpy(np.int64)
    stops, issue_ns = ends(rows), integers(rows, "issue_ns", -1)
    lost = (kind == "mark") & (name == CAPTURE_GAP)
    for begin, stop in zip(begins[lost].tolist(), stops[lost].tolist(), strict=True):  # nobody knows what was there
        gap &= (phases.start[after] <= begin) | (phases.end[before] >= stop)
    before, after = before[gap], after[gap]
    start, end = phases.end[before], phases.start[after]
    first, second = phases.name[before], phases.name[after]
    optimizer = phases.within("optimizer")
    # An optimizer that runs forward and backward itself, in a closure, begins like a forward.
    runs_closure = np.isin(after, np.setdiff1d(optimizer[phases.name == "backward"], [-1]))
    parent = phases.parent[before]
    in_closure = (parent >= 0) & (optimizer[parent] >= 0)

    sends, of_main = present(rows, "peer"), integers(rows, "thread") == main
    waits, sent = (of_main & ~sends & (kind == one) for one in ("wait", "comm"))
    actions = (kind == "pipe") & (texts(rows, "lane") == "main")
    edges = np.unique(np.concatenate([begins[actions], stops[actions]]))
    # Where a rank sends or receives (a stage of a pipeline), the neighbours tell nothing.
    quiet = ~_any_between(issued(rows)[sends], start, end)
    no_wait = ~_any_between(begins[waits], start, end)
    # The norm of gradients that are partitioned is reduced while they are clipped.
    no_other_wait = ~_any_between(begins[waits & ~np.isin(name, NORM_WAITS)], start, end)
    of_norm = (name == "all_reduce") & (integers(rows, "bytes") <= OF_ONE_NORM)
    of_norm[list(gradients)] = False
    only_norm = no_other_wait & ~_any_between(issue_ns[sent & ~of_norm], start, end)
    in_one_action = ~_any_between(edges, start, end)

    named = {
        "loss": (first == "forward") & (second == "backward") & no_wait,
        "clip": (first == "backward") & (second == "optimizer") & ~runs_closure & only_norm,
        "forward": (first == "forward") & (second == "forward") & in_one_action & _short(phases, before, after),
    }
    if not on_gpu and not (kind == "phase")[np.isin(name, LOADING)].any():
        # Between the turns of a closure is the optimizer's own work. On a GPU it may as well be a wait for the device.
        ends_micro_batch = (first == "optimizer") | ((first == "backward") & in_one_action)
        named["between"] = ends_micro_batch & ((second == "forward") | runs_closure) & ~in_closure
    found = np.select([mask & quiet for mask in named.values()], list(named), "").astype(object)
    pieces = [
        (name, *piece)
        for name, begin, stop in zip(found, start.tolist(), end.tolist(), strict=True)
        if name
        for piece in _pieces(begin, stop, edges)[: 1 if name == "between" else None]
    ]
    bounds = np.array([piece[1:] for piece in pieces], np.int64).reshape(-1, 2)
    return derived_rows("phase", np.array([piece[0] for piece in pieces], object), bounds[:, 0], bounds[:, 1], main)


def _pieces(begin: int, stop: int, edges: Int) -> list[tuple[int, int]]:
    """A gap, divided where an action of the pipeline begins or ends: rows of a lane nest."""
    inside = edges[np.searchsorted(edges, begin, "right") : np.searchsorted(edges, stop)].tolist()
    return list(pairwise([begin, *inside, stop]))


def _short(phases: Phases, before: Int, after: Int) -> npt.NDArray[np.bool_]:
    """Which gaps between two forwards are part of them."""
    length = phases.start[after] - phases.end[before]
    duration = phases.end - phases.start
    brief = (phases.name[before] == "forward") & (phases.name[after] == "forward") & (length <= SHORT_NS)
    if brief.any() and length[brief].sum() > MOST_SHORT * (phases.end.max() - phases.start.min()):
        brief[:] = False
    short: npt.NDArray[np.bool_] = brief | (length <= SHORT_SHARE * (duration[before] + duration[after]))
    return short


def _any_between(moments: Int, start: Int, end: Int) -> npt.NDArray[np.bool_]:
    """Whether any of these moments is in [start, end)."""
    when = np.sort(moments)
    found: npt.NDArray[np.bool_] = np.searchsorted(when, start) != np.searchsorted(when, end)
    return found
