"""What the records imply but do not say: steps, lanes, the phases in between, and waits inside C++.

Every row made here says `source = derived`.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import pandas as pd

from ..capture import Capture
from ..schema import COLUMNS
from .records import Int, measured_rows

FINALIZER_NS: Final = 5_000_000
FINALIZER_BYTES_PER_NS: Final = 0.5
"""After its last all-reduce DDP copies the gradients out. If backward goes on longer than this many bytes would
take, it was computing, not waiting."""


def trace_rows(capture: Capture, rank: int, restart: int) -> pd.DataFrame:
    """The trace table of one rank (columns of `schema.COLUMNS`), ordered by start."""
    rows = measured_rows(capture)
    main = _training_thread(rows)
    rows["lane"] = _lanes(rows, main)
    _tell_inner_waits(rows)
    steps = _steps(rows, main)
    on_gpu = any(fact["fact"] == "device" for fact in capture.facts)
    rows = pd.concat([rows, steps, *_between_phases(rows, main, on_gpu)], ignore_index=True)
    rows = pd.concat([rows, _backward_waits(rows)], ignore_index=True)
    rows["step"] = _step_of(rows, steps)
    rows["rank"], rows["restart"] = rank, restart
    rows["purpose"] = _purpose(rows)
    rows = rows.sort_values(["start_ns", "dur_ns"], ascending=[True, False], kind="stable", ignore_index=True)
    rows["depth"] = _depth(rows)
    return rows.reindex(columns=list(COLUMNS)).astype(COLUMNS)


def _training_thread(rows: pd.DataFrame) -> int:
    """The thread that steps the optimizer; before the first step, the one with most phases."""
    phases = rows[rows["kind"] == "phase"]
    for chosen in (phases[phases["name"] == "optimizer"], phases, rows):
        if len(chosen):
            return int(chosen["thread"].mode().iloc[0])
    return 0


def _lanes(rows: pd.DataFrame, main: int) -> pd.Series[str]:
    lane = pd.Series("main", index=rows.index, dtype=object)
    other = rows["thread"] != main
    lane[other] = "thread." + rows.loc[other, "thread"].astype(str)
    comm = rows["kind"] == "comm"
    lane[comm] = "comm." + rows.loc[comm, "group"].astype(str)
    told = rows["engine_lane"].notna()
    lane[told] = rows.loc[told, "engine_lane"]
    return lane


def _end(rows: pd.DataFrame) -> Int:
    """End of each row; of one that never ended, its start."""
    end: Int = (rows["start_ns"] + rows["dur_ns"].fillna(0)).to_numpy(np.int64)
    return end


def _main_phases(rows: pd.DataFrame, main: int) -> pd.DataFrame:
    """The training thread's completed phases in order, without those inside another one (an optimizer's closure)."""
    phases = rows[(rows["kind"] == "phase") & (rows["thread"] == main) & rows["dur_ns"].notna()]
    phases = phases.sort_values(["start_ns", "dur_ns"], ascending=[True, False])
    end = _end(phases)
    reached = np.maximum.accumulate(end) if len(end) else end
    outermost = np.ones(len(phases), bool)
    outermost[1:] = phases["start_ns"].to_numpy()[1:] >= reached[:-1]
    return phases[outermost].assign(end_ns=end[outermost])


def _steps(rows: pd.DataFrame, main: int) -> pd.DataFrame:
    """A step ends with its last optimizer: several that step without a backward in between share one."""
    phases = _main_phases(rows, main)
    if not (phases["name"] == "optimizer").any():
        return _derived(kind="step", name="step", start=np.empty(0, np.int64), end=np.empty(0, np.int64), thread=main)
    marks = phases[phases["name"].isin(["optimizer", "backward"])]
    is_step = (marks["name"] == "optimizer").to_numpy()
    backward_after = np.append(~is_step[1:], True)
    if is_step.all():  # no backward was seen: every optimizer step stands for itself
        backward_after[:] = True
    ends = marks["end_ns"].to_numpy(np.int64)[is_step & backward_after]
    first = int(phases["start_ns"].iloc[0])
    return _derived(kind="step", name="step", start=np.concatenate([[first], ends[:-1]]), end=ends, thread=main)


def _between_phases(rows: pd.DataFrame, main: int, on_gpu: bool) -> list[pd.DataFrame]:
    """Phases told by their neighbours.

    forward -> backward: the loss. backward -> optimizer: clipping, unscaling. forward -> forward: the loop between two
    modules. And where no DataLoader was seen in the whole run, what precedes the first forward of a micro-batch is how
    the loop gets its input.
    """
    phases = _main_phases(rows, main)
    names = phases["name"].to_numpy(object)
    start, end = phases["start_ns"].to_numpy(np.int64), phases["end_ns"].to_numpy(np.int64)
    found = []
    # A gap in which a pipeline stage sends or receives is neither the loss nor the loading of data.
    p2p = np.sort(rows.loc[rows["peer"].notna(), "issue_ns"].dropna().to_numpy(np.int64))

    def gaps(before: str, after: str, name: str) -> None:
        at = np.flatnonzero((names[:-1] == before) & (names[1:] == after) & (start[1:] > end[:-1]))
        at = at[np.searchsorted(p2p, end[at]) == np.searchsorted(p2p, start[at + 1])]
        found.append(_derived(kind="phase", name=name, start=end[at], end=start[at + 1], thread=main))

    if len(phases):
        gaps("forward", "backward", "loss")
        gaps("forward", "forward", "forward")
        gaps("backward", "optimizer", "clip")
        if "data" not in names and not on_gpu:  # there the gap may as well be a wait for the device
            gaps("optimizer", "forward", "data")
            gaps("backward", "forward", "data")
    return found


def _tell_inner_waits(rows: pd.DataFrame) -> None:
    """Give a wait of c10d's within a communication that the engine told of, such as a norm, what it told of that."""
    engine = rows["engine"].eq(True)
    comm = rows[(rows["kind"] == "comm") & engine & rows["dur_ns"].notna()].sort_values("start_ns", kind="stable")
    waits = rows[(rows["kind"] == "wait") & ~engine & rows["dur_ns"].notna()]
    for thread, inner in waits.groupby("thread"):
        around = comm[comm["thread"] == thread]
        at = np.searchsorted(around["start_ns"].to_numpy(np.int64), inner["start_ns"].to_numpy(np.int64), "right") - 1
        if around.empty:
            continue
        within = (at >= 0) & (_end(inner) <= _end(around)[at])
        told = ["purpose", "module", "stage", "microbatch"]
        rows.loc[inner.index[within], told] = around.iloc[at[within]][told].set_axis(inner.index[within])


def _backward_waits(rows: pd.DataFrame) -> pd.DataFrame:
    """Waits that DDP's C++ reducer does inside backward: from the last issue to the last completion.

    Only where none was measured there: a wait in Python is told by `Work.wait` itself, and the engine's by the engine.
    """
    backward = rows[(rows["kind"] == "phase") & (rows["name"] == "backward") & rows["dur_ns"].notna()]
    others = ~rows["engine"].eq(True)
    comm = rows[(rows["kind"] == "comm") & others & rows["dur_ns"].notna()].sort_values("issue_ns")
    waits = rows[rows["kind"] == "wait"].sort_values("start_ns")
    issue = comm["issue_ns"].to_numpy(np.int64)
    back_on = issue + comm["host_ns"].fillna(0).to_numpy(np.int64)
    done, size = _end(comm), comm["bytes"].fillna(0).to_numpy(np.int64)
    waited = waits["start_ns"].to_numpy(np.int64)
    starts, ends = [], []
    for begin, end in zip(backward["start_ns"].to_numpy(np.int64), _end(backward), strict=True):
        first, last = np.searchsorted(issue, [begin, end])
        if first == last or np.diff(np.searchsorted(waited, [begin, end]))[0]:
            continue
        issued, completed = int(back_on[first:last].max()), int(done[first:last].max())
        copying = FINALIZER_NS + size[first:last].sum() / FINALIZER_BYTES_PER_NS
        if end - completed < copying:
            starts.append(issued)
            ends.append(min(max(completed, issued), int(end)))
    thread = int(backward["thread"].mode().iloc[0]) if len(backward) else 0
    # One without length is kept: it says where the rank would have waited, had the collective taken longer.
    return _derived("wait", "all_reduce", np.array(starts, np.int64), np.array(ends, np.int64), thread)


def _derived(kind: str, name: str, start: Int, end: Int, thread: int) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "kind": kind,
            "name": name,
            "lane": "main",
            "thread": thread,
            "start_ns": start,
            "dur_ns": pd.array(end - start, "Int64"),
            "source": "derived",
            "ended": True,
        }
    )


def _step_of(rows: pd.DataFrame, steps: pd.DataFrame) -> Int:
    """Step of each row by when it was issued; -1 before the first. What follows the last step belongs to the next."""
    if steps.empty:
        return np.full(len(rows), -1, np.int64)
    when = rows["issue_ns"].fillna(rows["start_ns"]).to_numpy(np.int64)
    ends = _end(steps)
    number: Int = np.searchsorted(ends, when, side="right").astype(np.int64)
    number[when < int(steps["start_ns"].iloc[0])] = -1
    is_step = (rows["kind"] == "step").to_numpy()
    number[is_step] = np.arange(int(is_step.sum()))
    return number


def _purpose(rows: pd.DataFrame) -> pd.Series[str]:
    """What a row is for: as the engine told, else, of a collective, as far as its place tells.

    Reductions issued inside backward carry gradients.
    """
    purpose = pd.Series(None, index=rows.index, dtype=object)
    comm = rows["kind"] == "comm"
    purpose[comm] = "other"
    purpose[comm & (rows["name"] == "barrier")] = "barrier"
    backward = rows[(rows["kind"] == "phase") & (rows["name"] == "backward")].sort_values("start_ns")
    if len(backward):
        begin = backward["start_ns"].to_numpy(np.int64)
        end = begin + backward["dur_ns"].fillna(np.iinfo(np.int64).max // 4).to_numpy(np.int64)
        when = rows["issue_ns"].fillna(0).to_numpy(np.int64)
        at = np.searchsorted(begin, when, side="right") - 1
        inside = (at >= 0) & (when <= end[np.maximum(at, 0)])
        reduces = rows["name"].isin(["all_reduce", "reduce_scatter", "reduce"])
        purpose[comm & inside & reduces] = "gradient"
    return rows["purpose"].fillna(purpose)


def _depth(rows: pd.DataFrame) -> Int:
    """Nesting within the lane; rows come ordered by start, longer first. Collectives' lanes may overlap: depth 0."""
    depth = np.zeros(len(rows), np.int64)
    start, end = rows["start_ns"].to_numpy(np.int64), _end(rows)
    codes = rows["lane"].astype("category").cat.codes.to_numpy()
    comm = (rows["kind"] == "comm").to_numpy()
    open_ends: dict[int, list[int]] = {}
    for index in range(len(rows)):
        if comm[index]:
            continue
        stack = open_ends.setdefault(int(codes[index]), [])
        while stack and stack[-1] <= start[index]:
            stack.pop()
        depth[index] = len(stack)
        stack.append(int(end[index]))
    return depth
