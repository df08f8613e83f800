"""The step graph of hand-written rows: what is waited for across steps, roots, actions, and points of one moment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import pytest

from dsprof.analyzer.align.broadcast_tree import tree_arrivals
from dsprof.analyzer.align.match import Matches, match_collectives
from dsprof.analyzer.align.steps import completed_steps
from dsprof.analyzer.budget.step_budget import label_time, step_budget
from dsprof.analyzer.columns import RankRows
from dsprof.analyzer.graph.build_graph import build_graph
from dsprof.analyzer.graph.find_chains import find_chains
from dsprof.analyzer.graph.replay import replay
from dsprof.analyzer.graph.step_graph import StepGraph
from dsprof.analyzer.graph.validate import check
from dsprof.analyzer.whatif import apply
from dsprof.analyzer.whatif.communications import ScaleLink
from dsprof.analyzer.whatif.select import Communications
from dsprof.analyzer.whatif.work import Change, LessWork, ScaleWork
from dsprof.run import RunInfo
from dsprof.schema import COLUMNS

MS = 1_000_000
Row = dict[str, Any]


def row(rank: int, step: int, kind: str, name: str, start: float, end: float, **columns: Any) -> Row:
    """From `start` to `end` ms, on the training thread unless it communicates."""
    given = {"rank": rank, "step": step, "kind": kind, "name": name, "start_ns": int(start * MS), **columns}
    lane = f"comm.{columns.get('group')}" if kind == "comm" else "main"
    return {"lane": lane, "dur_ns": int((end - start) * MS), "source": "measured", "ended": True, "restart": 0, **given}


def comm(rank: int, step: int, name: str, issue: float, end: float, seq: int, **columns: Any) -> Row:
    columns = {"group": "0", "purpose": "other", "bytes": 1000, **columns}
    return row(rank, step, "comm", name, issue, end, seq=seq, issue_ns=int(issue * MS), **columns)


def wait(rank: int, step: int, name: str, start: float, end: float, seq: int, **columns: Any) -> Row:
    return row(rank, step, "wait", name, start, end, seq=seq, **{"group": "0", **columns})


def table_of(rows: Sequence[Row]) -> pd.DataFrame:
    return pd.DataFrame(rows).reindex(columns=list(COLUMNS)).astype(COLUMNS)


def graph_of_rows(rows: Sequence[Row], judged_from: int = 0, run: RunInfo | None = None) -> StepGraph:
    table = table_of(rows)
    collectives = match_collectives(table, run)
    matches = Matches(collectives, tree_arrivals(RankRows(table), collectives, run))
    by_rank = {int(rank): mine for rank, mine in table.groupby("rank")}
    times = {rank: label_time(mine, collectives, rank, run, None, matches) for rank, mine in by_rank.items()}
    steps = step_budget(times, completed_steps(table))
    chains = {rank: find_chains(times[rank], mine, collectives, matches, run) for rank, mine in by_rank.items()}
    graph = build_graph(chains, collectives, steps.assign(ordinary=steps["step"] >= judged_from), run)
    assert graph is not None
    return graph


def gathered_ahead(steps: int = 6) -> list[Row]:
    """Each step of 20 ms issues a gather of 13 ms at its end, which the next one needs 5 ms after its start.

    So from the second on it stands still for 7 ms (one goes by between the issue and the end of the step).
    """
    rows: list[Row] = []
    begin = 0.0
    for step in range(steps):
        for rank in (0, 1):
            ready = begin + 5
            on = ready if step == 0 else begin + 12
            end = on + 15
            rows.append(row(rank, step, "step", "step", begin, end))
            rows.append(row(rank, step, "phase", "forward", begin, end))
            if step:
                rows.append(wait(rank, step, "all_gather", ready, on, step - 1))
            rows.append(comm(rank, step, "all_gather", end - 1, end + 12, step, purpose="parameter"))
        begin = end
    return rows


def test_what_a_step_leaves_for_the_next() -> None:
    graph = graph_of_rows(gathered_ahead())
    assert replay(graph).durations.tolist() == [20, 27, 27, 27, 27, 27]
    assert check(graph).error < 1e-12
    assert len(graph.cross_step_edges) == 5
    faster = apply(graph, [ScaleLink(latency=7 / 13, bandwidth=13 / 7)])
    assert replay(faster).durations == pytest.approx([20, 21, 21, 21, 21, 21])  # there 6 ms into the next step


def test_the_first_step_of_a_stretch_waits_as_it_was_measured() -> None:
    """Its gather was issued in a step that is not in the graph."""
    graph = graph_of_rows(gathered_ahead(), judged_from=2)
    assert graph.numbers.tolist() == [2, 3, 4, 5]
    assert replay(graph).durations.tolist() == [27, 27, 27, 27]
    assert len(graph.cross_step_edges) == 3


def test_a_rank_that_sends_in_the_step_before() -> None:
    """Rank 1 takes 10 ms a step and sends at its end; rank 0 needs that 2 ms into its next step, of 6 ms itself."""
    rows: list[Row] = []
    for step in range(5):
        rows.append(row(1, step, "step", "step", 10 * step, 10 * step + 10))
        rows.append(row(1, step, "phase", "forward", 10 * step, 10 * step + 10))
        rows.append(comm(1, step, "send", 10 * step + 10 - 0.001, 10 * step + 10, step, peer=0))
    begin = 0.0
    for step in range(1, 6):  # the steps of rank 0 are one later
        arrives = 10.0 * step
        on = max(begin + 2, arrives)
        rows.append(row(0, step - 1, "step", "step", begin, on + 4))
        rows.append(row(0, step - 1, "phase", "forward", begin, on + 4))
        rows.append(comm(0, step - 1, "recv", begin + 1, on, step - 1, peer=1))
        rows.append(wait(0, step - 1, "recv", begin + 2, on, step - 1, peer=1))
        begin = on + 4
    graph = graph_of_rows(rows)
    assert check(graph).error < 1e-9
    assert check(graph).contradicted == 0
    assert [round(float(ms)) for ms in (replay(graph).end - replay(graph).start)[0]] == [14, 10, 10, 10, 10]
    # With rank 1 two ms faster a step, so is rank 0 from the first message on.
    removed = np.zeros((2, 5))
    removed[1] = 2.0
    changed = apply(graph, [LessWork("a fault", Change({"compute": removed}), [np.array([True, True])])])
    assert [round(float(ms)) for ms in (replay(changed).end - replay(changed).start)[0]] == [12, 8, 8, 8, 8]


def test_who_waits_for_the_root_and_whom_the_root_waits_for() -> None:
    """Rank 0 broadcasts. It comes at 2, rank 1 at 5, rank 2 at 9; each has it 1 ms after it and the root are there, and
    the root goes on when all have."""
    rows: list[Row] = []
    came, left = (2.0, 5.0, 9.0), (10.0, 6.0, 10.0)
    for rank in range(3):
        rows.append(row(rank, 0, "step", "step", 0, left[rank] + 5))
        rows.append(row(rank, 0, "phase", "forward", 0, left[rank] + 5))
        rows.append(comm(rank, 0, "broadcast", came[rank], left[rank], 0, root=0))
        rows.append(wait(rank, 0, "broadcast", came[rank], left[rank], 0))
    graph = graph_of_rows(rows)
    assert (replay(graph).end[:, 0]).tolist() == [15, 11, 15]
    removed = np.zeros((3, 1))
    removed[2] = 7.0 / 9 * 14  # of 14 ms of work of rank 2, in proportion: 9 of it before the broadcast
    mended = apply(graph, [LessWork("a fault", Change({"compute": removed}), [np.ones(3, bool)])])
    # Rank 2 comes at 2, so the root waits for rank 1 only: until 6.
    assert replay(mended).end[:2, 0] == pytest.approx([11, 11])


def test_what_ended_when_the_next_began_came_before_it() -> None:
    """A wait that ends, and an issue, at the same nanosecond: the issue does not come before what was waited for."""
    rows = [row(0, 0, "step", "step", 0, 30), row(0, 0, "phase", "forward", 0, 30)]
    rows += [comm(0, 0, "all_reduce", 5, 15, 0), wait(0, 0, "all_reduce", 6, 15, 0)]
    rows += [comm(0, 0, "all_reduce", 15, 20, 1, group="1"), wait(0, 0, "all_reduce", 15, 20, 1, group="1")]
    graph = graph_of_rows(rows)
    slower = apply(graph, [ScaleLink(2.0, 0.5, Communications(groups=("0",)))])
    assert replay(slower).durations.tolist() == [40]  # 10 ms more before the second begins


def test_segments_know_the_action_they_are_of() -> None:
    rows = [row(0, 0, "step", "step", 0, 30), row(0, 0, "phase", "forward", 0, 30)]
    rows += [row(0, 0, "pipe", "F", 2, 8, stage=0, microbatch=0), row(0, 0, "pipe", "B", 8, 20, stage=0, microbatch=0)]
    (steps,) = graph_of_rows(rows).templates
    assert steps.structure.action.tolist() == ["", "F", "", "B", ""]
    assert steps.work.sum(axis=(1, 2)).tolist() == [2, 6, 0, 12, 10]


def read_from_disk(
    read_ms: float = 10, steps: int = 4, rank: int = 0, begin: float = 0, length: float = 0
) -> list[Row]:
    """A step computes for 2 ms, issues two reads of `read_ms` and 4 ms, computes for 6, needs both, computes for 8.

    `length`: of a step, if others make it longer.
    """
    rows: list[Row] = []
    for step in range(steps):
        needed = begin + 8
        first, second = begin + 2 + read_ms, begin + 6 + read_ms
        on = max(needed, second)
        end = max(on + 8, begin + length)
        rows += [row(rank, step, "step", "step", begin, end), row(rank, step, "phase", "optimizer", begin, end)]
        for name, start, over in (("read", begin + 2, first), ("read", first, second)):
            issued = int((begin + 2 + (name == "read" and start > begin + 2) / 1000) * MS)
            rows.append(row(rank, step, "copy", name, start, over, lane="io.nvme.read", issue_ns=issued, bytes=4096))
        rows.append(row(rank, step, "wait", "read", needed, on))
        begin = end
    return rows


def test_what_is_issued_to_a_lane_of_its_own_is_a_task() -> None:
    """The reads run one after the other, whatever the thread computes meanwhile."""
    graph = graph_of_rows(read_from_disk())
    (steps,) = graph.templates
    assert [(task.lane, task.kind, task.owner) for task in steps.structure.tasks] == [
        ("io.nvme.read of rank 0", "read", 0)
    ] * 2
    assert replay(graph).durations.tolist() == [24] * 4
    assert (check(graph).error, check(graph).contradicted) == (0, 0)
    assert steps.transfer[:, 0].tolist() == pytest.approx([10, 4], abs=1e-3)
    assert steps.work.sum() == pytest.approx(4 * 16)
    # Computing faster is of no use while the disk is slower; after the wait it is.
    halved = apply(graph, [ScaleWork({"optimizer": 0.5})])
    assert replay(halved).durations == pytest.approx([1 + 14 + 4] * 4)
    # With a disk twice as fast, the reads are over 1 ms after they are needed.
    assert replay(apply(graph, [ScaleWork({"offload": 0.5})])).durations == pytest.approx([2 + 7 + 8] * 4)
    reads = np.array([[0.1 if task.kind == "read" else 1.0] for task in steps.structure.tasks])
    hidden = graph.with_templates((steps.with_costs(transfer=steps.transfer * reads),))
    assert replay(hidden).durations == pytest.approx([16] * 4)


def test_a_lane_whose_order_is_not_that_of_issue_is_none() -> None:
    """Nothing is known of what it would do if it were faster: the wait stays the rank's own work."""
    rows = read_from_disk()
    for item in rows:
        if item["kind"] == "copy":
            item["issue_ns"] = item["start_ns"] + item["dur_ns"]
    rows[2]["issue_ns"] = rows[3]["issue_ns"] + 1
    graph = graph_of_rows(rows)
    assert [len(steps.structure.tasks) for steps in graph.templates] == [0]
    assert replay(graph).durations.tolist() == [24] * 4


def test_a_slow_disk_of_one_rank() -> None:
    """Rank 0 stands still for nothing, rank 1 for 18 ms, and both communicate at the end of the step."""
    rows: list[Row] = []
    for rank, read_ms in ((0, 2.0), (1, 20.0)):
        mine = read_from_disk(read_ms, rank=rank, length=34)
        for step in range(4):
            arrived, gone = 34 * step + (16 if rank == 0 else 33.8), 34 * step + 33.9
            mine.append(comm(rank, step, "all_reduce", arrived, gone, step))
            mine.append(wait(rank, step, "all_reduce", arrived, gone, step))
        rows += mine
    graph = graph_of_rows(rows)
    assert check(graph).error < 1e-9
    for beyond in (False, True):
        removed = np.zeros((2, 4))
        removed[1] = 8.0
        change = Change({"offload": removed}, where_beyond_peers=beyond)
        mended = apply(graph, [LessWork("a fault", change, [np.ones(2, bool)])])
        assert replay(mended).durations == pytest.approx([26] * 4, abs=0.01)


def copy(rank: int, step: int, name: str, issue: float, start: float, end: float, corr: int) -> Row:
    lane = f"io.nvme.{name}"
    return row(rank, step, "copy", name, start, end, lane=lane, issue_ns=int(issue * MS), bytes=4096, corr=corr)


def test_what_the_step_before_left_in_a_lane_is_not_counted_twice() -> None:
    """A write of 25 ms, issued 10 ms into the step and waited for, after one of 50 ms that the step before has issued
    5 ms before its end."""
    rows: list[Row] = []
    begin = free = 0.0
    for step in range(6):
        written = max(begin + 10, free) + 25
        on = max(begin + 50, written)
        rows += [row(0, step, "step", "step", begin, on + 10), row(0, step, "phase", "optimizer", begin, on + 10)]
        rows.append(copy(0, step, "write", begin + 10, written - 25, written, 2 * step))
        rows.append(row(0, step, "wait", "write", begin + 50, on, corr=2 * step))
        free = max(on + 5, written) + 50
        rows.append(copy(0, step, "write", on + 5, free - 50, free, 2 * step + 1))
        begin = on + 10
    graph = graph_of_rows(rows)
    assert graph.measured.tolist() == [60, 80, 80, 80, 80, 80]
    assert check(graph).error < 1e-9
    # Half as fast, the writes of 75 ms a step take 37.5: only the second one is still under way at the next step's 10.
    assert replay(apply(graph, [ScaleWork({"offload": 0.5})])).durations == pytest.approx([60] * 6)


def test_a_slow_disk_is_where_a_rank_takes_longer_than_its_peers() -> None:
    """Both work for 1 ms, issue a read, work for 14, need it, and work for 1: it takes 3 ms on rank 0, 36 on rank 1.

    What makes rank 1 late, 22 ms, is taken off in proportion to what its work consists of, but goes from the disk.
    """
    rows: list[Row] = []
    for rank, read_ms in ((0, 3.0), (1, 36.0)):
        for step in range(4):
            begin = 40.0 * step
            here = begin + max(15, 1 + read_ms) + 1
            rows += [row(rank, step, "step", "step", begin, begin + 40)]
            rows += [row(rank, step, "phase", "optimizer", begin, here)]
            rows.append(copy(rank, step, "read", begin + 1, begin + 1, begin + 1 + read_ms, step))
            rows.append(row(rank, step, "wait", "read", begin + 15, here - 1, corr=step))
            rows.append(comm(rank, step, "all_reduce", here, begin + 39.9, step))
            rows.append(wait(rank, step, "all_reduce", here, begin + 39.95, step))
    graph = graph_of_rows(rows)
    late = np.array([[0.0], [22.0]]) * np.ones(4)
    change = Change({"optimizer": late * 16 / 38, "offload": late * 22 / 38}, where_beyond_peers=True)
    assert replay(apply(graph, [LessWork("a fault", change, [np.ones(2, bool)])])).durations == pytest.approx(
        [18] * 4, abs=0.2
    )


@pytest.mark.parametrize("beyond", [False, True])
@pytest.mark.parametrize("lag", [0, 2])
def test_a_wait_for_what_the_step_before_has_issued(beyond: bool, lag: float) -> None:
    """A read of 30 ms, issued 10 ms before the end of a step and needed 5 ms into the next; the thread is woken `lag`
    after it."""
    rows: list[Row] = []
    begin, read = 0.0, 0.0
    for step in range(6):
        on = begin + 5 if step == 0 else read + lag
        if step:
            rows.append(row(0, step, "wait", "read", begin + 5, on, corr=step - 1))
        read = on + 40 + 30
        rows.append(copy(0, step, "read", on + 40, on + 40, read, step))
        rows += [row(0, step, "step", "step", begin, on + 50), row(0, step, "phase", "optimizer", begin, on + 50)]
        begin = on + 50
    graph = graph_of_rows(rows)
    assert graph.measured.tolist() == [55, *[70 + lag] * 5]
    assert check(graph).error < 1e-9
    for ms in (15 + lag, -5):
        removed = np.full((1, 6), float(ms))
        removed[0, 0] = 0
        changed = apply(
            graph, [LessWork("a fault", Change({"offload": removed}, where_beyond_peers=beyond), [np.ones(1, bool)])]
        )
        assert replay(changed).durations == pytest.approx([55, *[70 + lag - ms] * 5])


def test_a_copy_that_began_before_it_was_issued_is_no_task() -> None:
    rows = [row(0, 0, "step", "step", 0, 30), row(0, 0, "phase", "optimizer", 0, 30)]
    rows += [copy(0, 0, "read", 25, 10, 20, 1), row(0, 0, "wait", "read", 10, 20, corr=1)]
    graph = graph_of_rows(rows)
    assert check(graph).contradicted == 0
    assert replay(graph).durations.tolist() == [30]


def test_copies_in_another_order_each_step_are_no_tasks() -> None:
    """No two steps would be alike, and no wait could be compared."""
    rows: list[Row] = []
    for step in range(4):
        begin = 40.0 * step
        rows += [row(0, step, "step", "step", begin, begin + 40), row(0, step, "phase", "optimizer", begin, begin + 40)]
        at = begin + 1
        for i in range(step):  # as many written without being waited for as there are buffers free
            rows.append(copy(0, step, "write", at, at, at + 1, 10 * step + i))
            at += 1
        rows.append(copy(0, step, "read", begin + 10, begin + 10, begin + 20, 10 * step + 9))
        rows.append(row(0, step, "wait", "read", begin + 12, begin + 20, corr=10 * step + 9))
    graph = graph_of_rows(rows)
    assert [(len(steps.numbers), steps.structure.tasks) for steps in graph.templates] == [(4, ())]
    assert replay(graph).durations.tolist() == [40] * 4
