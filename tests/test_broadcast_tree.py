"""Who waits for whom in gloo's broadcasts, as real ones were seen to (4 ranks from rank 0, 6 from rank 1, each of them
late in turn), and what becomes of it in budget and graph."""

from __future__ import annotations

from typing import Any

import pytest
from test_build import comm, graph_of_rows, row, wait
from test_match import comm as matched
from test_match import run_of, table

from dsprof.analyzer.align.broadcast_tree import awaited_by, holds_up, tree_arrivals
from dsprof.analyzer.align.match import Matches, match_collectives
from dsprof.analyzer.columns import RankRows
from dsprof.analyzer.graph.replay import replay
from dsprof.analyzer.graph.validate import check
from dsprof.analyzer.whatif import apply
from dsprof.analyzer.whatif.work import ScaleWork

SEEN = {
    (4, 0): {0: {1, 2, 3}, 1: {0, 3}, 2: {0}, 3: {1}},
    (6, 1): {0: {2}, 1: {0, 2, 3, 4, 5}, 2: {0, 1, 4}, 3: {1}, 4: {2}, 5: {1}},
}
"""(Ranks, root) -> rank that came late -> who waited for it."""


@pytest.mark.parametrize(("size", "root"), SEEN)
def test_who_waits_for_a_late_rank(size: int, root: int) -> None:
    held = holds_up(tuple(range(size)), root)
    assert {late: set(held[late]) - {late} for late in range(size)} == SEEN[size, root]


@pytest.mark.parametrize("size", [2, 3])
def test_of_few_ranks_the_root_waits_for_all(size: int) -> None:
    awaited = awaited_by(tuple(range(size)), 0)
    assert {rank: set(of) for rank, of in awaited.items()} == {
        0: set(range(size)), **{member: {0, member} for member in range(1, size)}
    }  # fmt: skip


def test_ranks_of_a_group_are_ranks_of_the_job() -> None:
    held = holds_up((3, 7, 11, 15), 7)
    assert {rank: set(of) for rank, of in held.items()} == {
        7: {3, 7, 11, 15}, 11: {7, 11, 3}, 15: {7, 15}, 3: {11, 3}
    }  # fmt: skip


def test_when_whoever_a_rank_waits_for_has_come() -> None:
    came = (10, 20, 30, 90)
    rows = RankRows(table(*(matched(rank, "broadcast", came[rank], 100, 0, root=0) for rank in range(4))))
    collectives = match_collectives(rows, run_of([0, 1, 2, 3]))
    assert collectives["needs"].tolist() == ["tree"]
    matches = Matches(collectives, tree_arrivals(rows, collectives, run_of([0, 1, 2, 3])))
    found = matches.find(rows.table, run_of([0, 1, 2, 3]))
    assert matches.arrivals(found, rows.whole("rank")).tolist() == [30, 90, 30, 90]


def test_of_a_rank_that_was_not_captured_the_others_count() -> None:
    """Rank 3 has no trace: rank 1, which waits for it, waits for the root and itself as far as is known."""
    rows = RankRows(table(*(matched(rank, "broadcast", 10 * (rank + 1), 100, 0, root=0) for rank in range(3))))
    run = run_of([0, 1, 2, 3])
    collectives = match_collectives(rows, run)
    matches = Matches(collectives, tree_arrivals(rows, collectives, run))
    found = matches.find(rows.table, run)
    assert matches.arrivals(found, rows.whole("rank")).tolist() == [30, 20, 30]
    assert match_collectives(RankRows(rows.table.iloc[1:]), run)["needs"].tolist() == ["none"]  # nor was the root


def test_a_root_without_steps() -> None:
    """Rank 3 sends and has no steps in the graph: then nobody is known to wait for anybody."""
    rows: list[dict[str, Any]] = []
    for rank in range(4):
        rows += [
            *([] if rank == 3 else [row(rank, 0, "step", "step", 0, 30)]),
            comm(rank, 0, "broadcast", 5.0 + rank, 12, 0, root=3),
            *([] if rank == 3 else [wait(rank, 0, "broadcast", 5.0 + rank, 12, 0)]),
        ]
    graph = graph_of_rows(rows, run=run_of([0, 1, 2, 3]))
    assert len(graph.ranks) == 3
    assert replay(graph).durations == pytest.approx([30.0])


def test_a_group_whose_members_are_not_known_has_no_tree() -> None:
    rows = table(*(matched(rank, "broadcast", 10, 100, 0, root=0) for rank in range(4)))
    assert match_collectives(rows)["needs"].tolist() == ["root"]


def test_reduce_and_gather() -> None:
    """As gloo does them: of a reduce nobody goes on before all have come, of a gather each waits for the root."""
    rows = table(*(matched(rank, name, 10, 100, seq, root=0) for rank in (0, 1)
                   for seq, name in enumerate(("reduce", "gather", "scatter", "broadcast"))))  # fmt: skip
    found = match_collectives(rows, run_of([0, 1]))
    assert found.sort_values("seq")["needs"].tolist() == ["all", "root", "root", "root"]


def test_a_late_rank_at_the_end_of_a_branch_holds_up_one_other() -> None:
    """Rank 3 loads for 40 ms where the others load for 1, and each computes for 10 after the broadcast. Whatever rank 3
    saves, the ranks 0 and 2 have no longer steps for it: they wait for nobody who is late."""
    rows: list[dict[str, Any]] = []
    for step in range(4):
        begin = 100.0 * step
        for rank, loaded in enumerate((1.0, 1.0, 1.0, 40.0)):
            come = begin + loaded
            gone = begin + (41.0 if rank in (1, 3) else 2.0)
            rows += [
                row(rank, step, "step", "step", begin, begin + 60),
                row(rank, step, "phase", "data", begin, come),
                comm(rank, step, "broadcast", come, gone, step, root=0),
                wait(rank, step, "broadcast", come, gone, step),
                row(rank, step, "phase", "forward", gone, begin + 60),
            ]
    graph = graph_of_rows(rows, run=run_of([0, 1, 2, 3]))
    checked = check(graph, 0.01)
    assert checked.contradicted == 0
    assert replay(graph).durations == pytest.approx([60.0] * 4)
    faster = replay(apply(graph, [ScaleWork({"data": 0.0}, (3,))]))
    assert (faster.end - faster.start)[:, 0] == pytest.approx([60.0, 21.0, 60.0, 21.0], abs=0.01)
