"""What each module takes in forward, in backward and in what backward computes again, where every module was timed
(level full). Forwards without gradients are not part of it.

A module's calls are timed in forward. Backward is timed by what the autograd engine computes: each row says in which
call of a module it was prepared (`corr`), so what a module has called is found by the calls, not by names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from dsprof.schema import COUNTED, FLOPS, SHARDING
from dsprof.trace.load import join_categories

from ..arrays import Bool, Int
from ..budget.intervals import nest
from ..columns import RankRows, as_rows, may_hold

COLUMNS: Final = (
    "module", "calls", "ms", "own_ms", "backward_ms", "backward_own_ms", "recompute_ms", "gflop", "slowest_rank",
    "slowest_own_ms",
)  # fmt: skip
SUMS: Final = ("calls", "ns", "own_ns", "backward_ns", "backward_own_ns", "recompute_ns", "flops")
NOT_COUNTED: Final = "no whole step was counted: the sixth is, of a part of a run its second, or the last in it"
BACKWARD: Final = "backward"
RECOMPUTE: Final = "recompute"
NO_THREAD: Final = -1


def sum_modules(rows: pd.DataFrame | RankRows, rank: int) -> pd.DataFrame:
    """A row for each module of one rank, with the columns `rank`, `module` and SUMS. These are of a step, as the mean
    over whole steps after the first: calls, time in forward and in backward (ns; `own`: without the modules called
    inside), own time in recomputation, and own floating-point operations of forward and backward. Empty where no module
    was timed.

    backward_ns is NaN where the module made a part of the graph and was not seen to compute it. flops is NaN where no
    step was counted.
    """
    rows = as_rows(rows)
    if not rows.may_hold("kind", lambda kind: kind == "module"):
        return _nothing()
    step, ended = rows.whole("step"), rows.known("dur_ns")
    chosen = rows.are("kind", "module") & ~rows.are("name", SHARDING)
    again = rows.are("kind", "phase") & rows.are("name", RECOMPUTE)
    chosen = (chosen | again) & ended & (step >= 0)
    whole = np.unique(step[rows.are("kind", "step") & ended])  # none that a gap has cut
    first = step[chosen].min(initial=np.iinfo(np.int64).max)
    there = np.flatnonzero(chosen & (step > first))
    there = there[_among(step[there], whole)]
    in_forward = _in_forward(there, rows)
    numbers = np.unique(step[there[in_forward]])
    if not len(numbers):
        return _nothing()
    inside = _among(step[there], numbers)
    calls = _Calls(rows, there[inside], in_forward[inside])
    sums = {
        "calls": calls.by_name(calls.forward),
        "ns": calls.by_name(calls.forward & calls.topmost, calls.length),
        "own_ns": calls.by_name(calls.forward, calls.own),
        "backward_ns": calls.with_what_it_called(calls.backward),
        "backward_own_ns": calls.by_name(calls.backward, calls.own),
        "recompute_ns": calls.by_name(calls.again, calls.own),
    }
    sums = {name: of_names / len(numbers) for name, of_names in sums.items()}
    unseen = (sums["backward_ns"] == 0) & (calls.by_name(calls.forward, calls.nodes) != 0)
    for name in ("backward_ns", "backward_own_ns"):
        sums[name] = np.where(unseen, np.nan, sums[name])
    index = pd.Index(calls.names, name="module", dtype=object)
    counted = _operations(rows.table)
    sums["flops"] = (
        np.full(len(index), np.nan) if counted is None else counted.reindex(index).fillna(0.0).to_numpy(np.float64)
    )
    called = sums["calls"] > 0
    return _table(np.full(int(called.sum()), rank), pd.Categorical(index[called]), {
        name: of_names[called] for name, of_names in sums.items()
    })  # fmt: skip


def join_modules(tables: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """`sum_modules` of some ranks, and of those after them."""
    held = [table for table in tables if len(table)]
    if not held:
        return _nothing()
    numbers = {name: np.concatenate([table[name].to_numpy() for table in held]) for name in ("rank", *SUMS)}
    return _table(numbers.pop("rank"), join_categories([table["module"].array for table in held]), numbers)


def _table(rank: Int, module: pd.Categorical, sums: Mapping[str, npt.NDArray[Any]]) -> pd.DataFrame:
    """Of thousands of ranks there are millions of rows: a name is a category, and a time a float32."""
    narrow = {
        name: of_names.astype(np.float64 if name == "flops" else np.float32, copy=False)
        for name, of_names in sums.items()
    }
    return pd.DataFrame({"rank": rank.astype(np.int32, copy=False), "module": module, **narrow}, copy=False)


def _nothing() -> pd.DataFrame:
    return _table(np.empty(0, np.int64), pd.Categorical([]), dict.fromkeys(SUMS, np.empty(0)))


class _Calls:
    """Calls of modules, and what was computed in backward for them, as arrays by row.

    own: what of a row is in no other row; up: the call that it was made in, -1: none.
    forward, backward, again: which rows are calls in a forward for training, gradients, calls in a recomputation.
    topmost: calls that are not inside of a call of the same name.
    """

    def __init__(self, rows: RankRows, place: Int, in_forward: Bool) -> None:
        start, length = rows.whole("start_ns")[place], rows.whole("dur_ns")[place]
        thread = rows.whole("thread", NO_THREAD)[place]
        order = np.lexsort((-length, start, thread))
        place, self.forward = place[order], in_forward[order]
        is_call = rows.are("kind", "module")[place]
        self.backward = is_call & rows.are("purpose", BACKWARD)[place]
        is_call = is_call & ~self.backward
        self.length, parent = _nest_by_thread(start[order], length[order], thread[order])
        held = parent >= 0
        self.own = self.length - np.bincount(parent[held], self.length[held], len(parent)).astype(np.int64)
        codes, words = rows.codes("name")
        self.code, there = pd.factorize(codes[place])
        self.names = words[there].tolist()
        self.nodes = rows.real("value")[place]
        self._call = self._calls_by_number(rows.whole("corr", -1)[place], is_call)
        self.again = is_call & self._inside(parent, ~is_call)
        self.forward = self.forward & is_call & ~self.again
        # A recomputation belongs to the gradient that it is for, and that to the call that made it.
        outer = np.where((parent >= 0) & ~is_call[parent] & ~self.backward[parent], parent[parent], parent)
        self.up = np.where((outer >= 0) & self.backward[outer], self._call[outer], outer)
        self.topmost = is_call & ~self._inside_its_like()

    def by_name(self, chosen: Bool, values: npt.NDArray[np.generic] | None = None) -> npt.NDArray[np.float64]:
        """The sum of `values` over the chosen rows, without any their number, for each of `names`."""
        weights = None if values is None else values[chosen]
        return np.bincount(self.code[chosen], weights, len(self.names)).astype(np.float64)

    def with_what_it_called(self, chosen: Bool) -> npt.NDArray[np.float64]:
        """The own time of the chosen rows for each of `names`, and for all that its calls called."""
        total = np.zeros(len(self.names))
        own = self.own[chosen]
        call = self._call[chosen]
        unknown = call < 0
        np.add.at(total, self.code[chosen][unknown], own[unknown])
        while (call >= 0).any():
            here = (call >= 0) & self.topmost[call]
            np.add.at(total, self.code[call[here]], own[here])
            call = np.where(call >= 0, self.up[call], -1)
        return total

    @staticmethod
    def _calls_by_number(number: Int, is_call: Bool) -> Int:
        """The row of the call that each row bears the number of; -1: none. number: -1 of a row that bears none."""
        at = np.flatnonzero(is_call & (number >= 0))
        at = at[np.argsort(number[at], kind="stable")]
        if not len(at):
            return np.full(len(number), -1)
        place = np.minimum(np.searchsorted(number[at], number), len(at) - 1)
        return np.where((number[at][place] == number) & (number >= 0), at[place], -1)

    @staticmethod
    def _inside(parent: Int, marked: Bool) -> Bool:
        """Which rows are inside of a marked one."""
        found, at = np.zeros(len(parent), bool), parent
        while (at >= 0).any():
            found |= (at >= 0) & marked[at]
            at = np.where(at >= 0, parent[at], -1)
        return found

    def _inside_its_like(self) -> Bool:
        found, at = np.zeros(len(self.up), bool), self.up
        for _ in range(len(self.up)):  # damaged rows may form a circle
            if not (at >= 0).any():
                break
            found |= (at >= 0) & (self.code[at] == self.code)
            at = np.where(found | (at < 0), -1, self.up[at])
        return found


def _nest_by_thread(start: Int, length: Int, thread: Int) -> tuple[Int, Int]:
    """Length and parent of each row; the rows of a thread lie together, by start."""
    end = start + length
    parent = np.full(len(start), -1)
    edges = np.flatnonzero(np.diff(thread, prepend=np.nan, append=np.nan))
    for first, behind in pairwise(edges.tolist()):
        end[first:behind], inside = nest(start[first:behind], end[first:behind])
        parent[first:behind] = np.where(inside >= 0, inside + first, -1)
    return end - start, parent


def _in_forward(place: Int, rows: RankRows) -> Bool:
    """Which of the calls at these places began in a forward of their thread that was for training."""
    known = rows.are("kind", "phase") & rows.are("name", "forward") & rows.known("dur_ns") & rows.known("thread")
    trains = np.flatnonzero(known & rows.are("source", "measured") & rows.true("grad", missing=True))
    of_thread, first = rows.whole("thread", NO_THREAD)[trains], rows.whole("start_ns")[trains]
    last = first + rows.whole("dur_ns")[trains]
    found = np.zeros(len(place), bool)
    thread, start = rows.whole("thread", NO_THREAD)[place], rows.whole("start_ns")[place]
    for one in np.unique(of_thread).tolist():
        mine = np.flatnonzero(thread == one)
        begin, end = np.sort(first[of_thread == one]), np.sort(last[of_thread == one])
        # Outermost calls of a thread do not overlap.
        found[mine] = np.searchsorted(begin, start[mine], "right") > np.searchsorted(end, start[mine], "left")
    return found


def _among(step: Int, numbers: Int) -> Bool:
    """Which of these steps are among the numbers, which are in order."""
    at = np.searchsorted(numbers, step)
    found: Bool = np.append(numbers, -1)[at] == step
    return found


def counted_step(rows: pd.DataFrame) -> tuple[int, int] | str:
    """When the floating-point operations of one whole step of a rank were counted; or why none were.

    They were counted from one optimizer's step to the next. A step may be several of these: from wherever it begins, a
    turn of all of them is as good as any.
    """
    spans, found = _counted_spans(rows), 0
    if not spans:
        return NOT_COUNTED
    steps = rows.loc[rows["kind"] == "step", "value"].dropna()
    each = int(steps.median()) if len(steps) else 0
    for _, ended, stepped in spans:
        found += stepped
        if found and found == each:
            return spans[0][0], ended
    if each <= 1:
        return NOT_COUNTED
    return f"a step is {each} steps of optimizers, of which {found} were counted"


def _counted_spans(rows: pd.DataFrame) -> list[tuple[int, int, int]]:
    """When operations were counted, in order: begin, end, and how many steps of optimizers there were in between."""
    counted = (rows["kind"] == "gauge") & (rows["name"] == COUNTED)
    told = rows[["start_ns", "dur_ns", "value"]][counted].sort_values("start_ns")
    if len(told):
        starts, counts = told["start_ns"].to_numpy(np.int64), told["value"].to_numpy(np.int64)
        ends = starts + told["dur_ns"].to_numpy(np.int64)
        return [*zip(starts.tolist(), ends.tolist(), counts.tolist(), strict=True)]
    counted = _counted(rows)
    if counted.empty:
        return []
    # Captures of older versions: operations are records themselves, and the optimizers' beside them are counted.
    optimizers = (rows["kind"] == "phase") & (rows["name"] == "optimizer")
    stepped = np.sort(rows.loc[optimizers, "start_ns"].to_numpy(np.int64))
    spans = counted[["start_ns", "dur_ns"]].drop_duplicates().sort_values("start_ns").astype("int64")
    starts, ends = spans["start_ns"].to_numpy(), (spans["start_ns"] + spans["dur_ns"]).to_numpy()
    counts = np.searchsorted(stepped, ends, "right") - np.searchsorted(stepped, starts)
    return [*zip(starts.tolist(), ends.tolist(), counts.tolist(), strict=True)]


def _counted(rows: pd.DataFrame) -> pd.DataFrame:
    gauges = rows[["name", "module", "purpose", "start_ns", "dur_ns", "value"]][rows["kind"] == "gauge"]
    return gauges[gauges["name"].isin([name for name in gauges["name"].unique() if str(name).startswith(FLOPS)])]


def _operations(rows: pd.DataFrame) -> pd.Series[float] | None:
    """Floating-point operations of forward and backward by module, of the step that was counted; None without one."""
    if not may_hold(rows["name"], lambda name: name == COUNTED or name.startswith(FLOPS)):
        return None
    span = counted_step(rows)
    if isinstance(span, str):
        return None
    counted = _counted(rows)
    counted = counted[counted["purpose"].isin(["forward", BACKWARD]) & counted["module"].notna()]
    counted = counted[counted["start_ns"].between(*span)]
    found: pd.Series[float] = counted.groupby(counted["module"].astype(str))["value"].sum()
    return found


def module_times(sums: pd.DataFrame) -> pd.DataFrame:
    """COLUMNS, most own time first: a step, mean over the ranks that have the module, and the rank on which its own
    time, of forward and backward, is longest. `sums`: of all ranks."""
    if sums.empty:
        return pd.DataFrame(columns=list(COLUMNS))
    every = sums.astype(dict.fromkeys(SUMS, np.float64))
    every["both_ns"] = every["own_ns"] + every["backward_own_ns"].fillna(0)
    of_module = every.groupby("module", observed=True)
    mean, slowest = of_module.mean(), every.loc[of_module["both_ns"].idxmax()].set_index("module")
    found = pd.DataFrame(
        {
            "calls": mean["calls"],
            "ms": mean["ns"] / 1e6,
            "own_ms": mean["own_ns"] / 1e6,
            "backward_ms": mean["backward_ns"] / 1e6,
            "backward_own_ms": mean["backward_own_ns"] / 1e6,
            "recompute_ms": mean["recompute_ns"] / 1e6,
            "gflop": mean["flops"] / 1e9,
            "slowest_rank": slowest["rank"],
            "slowest_own_ms": slowest["both_ns"] / 1e6,
            "both": mean["both_ns"],
        }
    )
    found.index = found.index.astype(object)
    ordered = found.reset_index().sort_values(["both", "module"], ascending=[False, True], ignore_index=True)
    return ordered[list(COLUMNS)]
