"""What the ranks did together, matched by number, and by order where there is none."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
from made_up_pipeline import MadeUpPipeline

from dsprof.analyzer.align.backends import BACKENDS, backend_of
from dsprof.analyzer.align.match import COLLECTIVE_COLUMNS, match_collectives
from dsprof.analyzer.align.numbering import mismatches, number_by_order
from dsprof.run import RunInfo
from dsprof.schema import COLUMNS


def comm(rank: int, name: str, issue: int, end: int | None, seq: int | None = None, **more: Any) -> dict[str, Any]:
    length = None if end is None else end - issue
    return {
        "rank": rank, "restart": 0, "step": 0, "kind": "comm", "name": name, "group": "0", "seq": seq, "bytes": 8,
        "start_ns": issue, "issue_ns": issue, "dur_ns": length, "ended": True, "source": "measured", **more,
    }  # fmt: skip


def table(*rows: dict[str, Any]) -> pd.DataFrame:
    return pd.DataFrame(list(rows)).reindex(columns=list(COLUMNS)).astype(COLUMNS)


def of(matched: pd.DataFrame, *columns: str) -> list[tuple[Any, ...]]:
    return list(matched[list(columns)].itertuples(index=False, name=None))


def run_of(ranks: list[int]) -> RunInfo:
    return RunInfo(id="run", name="run", command=[], groups={"0": {"ranks": ranks, "size": len(ranks), "desc": ""}})


def test_what_has_a_number_is_matched_by_it() -> None:
    rows = table(
        comm(0, "all_reduce", 10, 30, 0), comm(0, "broadcast", 40, 45, 1, root=1),
        comm(1, "all_reduce", 20, 31, 0), comm(1, "broadcast", 38, 45, 1, root=1),
    )  # fmt: skip
    matched = match_collectives(rows)
    assert list(matched.columns) == list(COLLECTIVE_COLUMNS)
    assert of(matched, "seq", "name", "first_ns", "last_ns", "late_rank", "end_ns", "transfer_ns", "needs") == [
        (0, "all_reduce", 10, 20, 1, 31, 11, "all"),
        (1, "broadcast", 38, 40, 0, 45, 5, "root"),
    ]
    assert of(matched, "ranks", "root_rank", "root_ns") == [(2, -1, -1), (2, 1, 38)]
    assert number_by_order(rows) is rows
    assert mismatches(rows) == []


def test_a_rank_comes_when_its_stream_reaches_the_collective() -> None:
    """Both hosts ran ahead, rank 1's device was behind: it is late by 60, and the transfer takes 10."""
    rows = table(
        comm(0, "all_reduce", 2, 90, 0, start_ns=20, dur_ns=70, arrival_ns=20),
        comm(1, "all_reduce", 1, 90, 0, start_ns=80, dur_ns=10, arrival_ns=80),
    )  # fmt: skip
    matched = match_collectives(rows)
    assert of(matched, "first_ns", "last_ns", "late_rank", "transfer_ns") == [(20, 80, 1, 10)]


def test_arrivals_and_issues_are_not_mixed_within_a_collective() -> None:
    """Where one rank's arrival is not known, the issues of all count; where an issue is not known, what there is."""
    rows = table(
        comm(0, "all_reduce", 10, 95, 0, arrival_ns=80), comm(1, "all_reduce", 20, 95, 0),
        comm(0, "all_reduce", 11, 99, 1, arrival_ns=96), comm(1, "all_reduce", 21, 99, 1, issue_ns=None, arrival_ns=97),
        comm(0, "all_reduce", 12, 130, 2), comm(1, "all_reduce", 22, 130, 2, issue_ns=None, arrival_ns=110),
    )  # fmt: skip
    assert of(match_collectives(rows), "first_ns", "last_ns", "late_rank") == [(10, 20, 1), (96, 97, 1), (12, 110, 1)]


def test_the_root_comes_when_its_stream_reaches_the_broadcast() -> None:
    rows = table(
        comm(0, "broadcast", 5, 95, 0, root=0, arrival_ns=50), comm(1, "broadcast", 10, 95, 0, root=0, arrival_ns=20),
    )  # fmt: skip
    assert of(match_collectives(rows, run_of([0, 1])), "root_ns", "first_ns", "last_ns") == [(50, 20, 50)]


def test_a_group_has_two_workers() -> None:
    """Of three that are issued together the third waits for the first to end."""
    rows = table(*(comm(rank, "all_reduce", 10 + seq, 100 + 10 * seq, seq) for rank in (0, 1) for seq in range(3)))
    assert match_collectives(rows)["transfer_ns"].tolist() == [90, 99, 20]


def test_what_never_ended_or_has_no_group_is_not_matched() -> None:
    rows = table(comm(0, "all_reduce", 1, None, 0), comm(1, "all_reduce", 1, None, 0),
                 comm(0, "all_reduce", 1, 2, 0, group=None))  # fmt: skip
    assert match_collectives(rows).empty


def test_ranks_of_a_group_are_ranks_of_the_job() -> None:
    rows = table(comm(4, "broadcast", 1, 9, 0, root=1), comm(6, "broadcast", 5, 9, 0, root=1))
    matched = match_collectives(rows, run_of([4, 6]))
    assert of(matched, "root_rank", "root_ns", "late_rank") == [(6, 5, 6)]


def test_without_numbers_the_order_counts() -> None:
    rows = table(
        comm(0, "all_reduce", 10, 12), comm(0, "all_reduce", 20, 22), comm(0, "all_gather", 15, 17),
        comm(1, "all_reduce", 19, 22), comm(1, "all_gather", 11, 17), comm(1, "all_reduce", 9, 12),
    )  # fmt: skip
    numbered = number_by_order(rows)
    # In the order of rank 0; rank 1 issued them in that order too.
    assert numbered["seq"].tolist() == [0, 2, 1, 2, 1, 0]
    assert numbered["seq"].dtype == "Int32"
    assert of(match_collectives(numbered), "seq", "name", "ranks") == [
        (0, "all_reduce", 2), (1, "all_gather", 2), (2, "all_reduce", 2)
    ]  # fmt: skip
    assert mismatches(numbered) == []


def test_without_numbers_those_whose_launch_was_not_seen_are_ordered_by_their_stream() -> None:
    """Rank 0 launched its first one before the trace began, and the second one before the first one ran."""
    rows = table(
        comm(0, "all_reduce", 30, 35, issue_ns=None, arrival_ns=30),
        comm(0, "all_reduce", 40, 45, issue_ns=20, arrival_ns=40),
        comm(1, "all_reduce", 30, 35, issue_ns=10, arrival_ns=30),
        comm(1, "all_reduce", 41, 45, issue_ns=20, arrival_ns=41),
    )  # fmt: skip
    assert number_by_order(rows)["seq"].tolist() == [0, 1, 0, 1]


def test_another_order_of_names_on_another_rank_keeps_names_together() -> None:
    rows = table(comm(0, "all_reduce", 1, 5), comm(0, "all_gather", 2, 5),
                 comm(1, "all_gather", 1, 5), comm(1, "all_reduce", 2, 5))  # fmt: skip
    assert number_by_order(rows)["seq"].tolist() == [0, 1, 1, 0]


def test_numbers_go_on_after_those_that_are_there() -> None:
    rows = table(comm(0, "all_reduce", 1, 5, 7), comm(0, "all_gather", 2, 5),
                 comm(1, "all_gather", 2, 5), comm(1, "all_reduce", 1, 5, 7))  # fmt: skip
    assert number_by_order(rows)["seq"].tolist() == [7, 8, 8, 7]


def test_what_is_uneven_is_named_and_left_out() -> None:
    rows = table(
        comm(0, "all_reduce", 1, 5), comm(0, "all_reduce", 2, 5), comm(0, "barrier", 3, 5),
        comm(1, "all_reduce", 1, 5), comm(1, "barrier", 3, 5),
    )  # fmt: skip
    numbered = number_by_order(rows)
    assert numbered["seq"].isna().tolist() == [True, True, False, True, False]
    assert of(match_collectives(numbered), "name", "ranks") == [("barrier", 2)]
    assert mismatches(numbered) == [
        "all_reduce of group 0 has no number, and there are 1 on rank 1 and 2 on rank 0: they were not matched"
    ]


def test_a_member_that_has_none_counts() -> None:
    rows = table(comm(0, "all_reduce", 1, 5), comm(1, "all_reduce", 1, 5, 0))
    assert mismatches(number_by_order(rows, run_of([0, 1])), run_of([0, 1])) == [
        "all_reduce of group 0 has no number, and there are 0 on rank 1 and 1 on rank 0: they were not matched"
    ]
    # Rank 2 is of the group, but was not captured: nothing is known of it.
    rows = table(comm(0, "all_reduce", 1, 5), comm(1, "all_reduce", 1, 5))
    assert number_by_order(rows, run_of([0, 1, 2]))["seq"].tolist() == [0, 0]


@pytest.mark.parametrize("tag", [None, 3])
def test_messages_without_numbers_are_matched_in_order(tag: int | None) -> None:
    rows = table(
        comm(0, "send", 10, 15, peer=1, tag=tag), comm(0, "send", 20, 25, peer=1, tag=tag),
        comm(0, "recv", 30, 35, peer=1, tag=tag),
        comm(1, "recv", 8, 15, peer=0, tag=tag), comm(1, "recv", 22, 25, peer=0, tag=tag),
    )  # fmt: skip
    numbered = number_by_order(rows)
    assert numbered["seq"].astype(object).where(numbered["seq"].notna(), None).tolist() == [0, 1, None, 0, 1]
    suffix = "" if tag is None else " #3"
    assert of(match_collectives(numbered), "group", "seq", "first_ns", "last_ns") == [
        (f"0 0>1{suffix}", 0, 8, 10), (f"0 0>1{suffix}", 1, 20, 22)
    ]  # fmt: skip
    assert mismatches(numbered) == [
        f"send_recv of group 0 1>0{suffix} has no number, and there are 0 on rank 1 and 1 on rank 0: "
        "they were not matched"
    ]


def test_a_receive_from_anyone_is_not_numbered() -> None:
    rows = table(comm(0, "recv", 1, 5), comm(1, "recv", 1, 5))
    assert number_by_order(rows)["seq"].isna().all()


def test_what_a_group_does_is_its_backends() -> None:
    # Three that arrive together: gloo runs two at once, NCCL one; another has no number of workers.
    rows = table(*(comm(rank, "all_reduce", 10, 100 + 10 * seq, seq) for rank in (0, 1) for seq in range(3)))

    def transfers(backend: str | None) -> list[int]:
        about = {"ranks": [0, 1], **({"backend": backend} if backend else {})}
        run = RunInfo(id="run", name="run", command=[], groups={"0": about})
        return match_collectives(rows, run)["transfer_ns"].tolist()

    assert transfers(None) == transfers("gloo") == [90, 100, 20]
    assert transfers("nccl") == [90, 10, 10]
    assert transfers("unlimited") == [90, 100, 110]


@pytest.mark.parametrize(
    ("backend", "needs"),
    [("mpi", "eager"), ("gloo", "handed"), ("nccl", "handed"), ("", "handed"), (None, "handed")],
)
def test_who_takes_a_copy_of_a_message_is_known_by_its_backend(backend: str | None, needs: str) -> None:
    """Where torch chose it, or a tool does not tell it, it may be NCCL, whose senders only seem to be through early."""
    trace = MadeUpPipeline(blocking="eager", schedule="gpipe", link=lambda source, target: 6.0, steps=14).trace()
    trace.run.groups["0"]["backend"] = backend
    assert set(match_collectives(trace.rows, trace.run)["needs"]) == {needs}


@pytest.mark.parametrize("group", ["0", "0#2", "0 0>1", "0#2 0>1 #7"])
def test_the_backend_of_a_group_and_of_its_messages(group: str) -> None:
    def of(known: str) -> RunInfo:
        return RunInfo(id="run", name="run", command=[], groups={known: {"backend": "nccl"}})

    assert backend_of(group, of("0")) is BACKENDS["nccl"]
    assert backend_of(group, of("1")) is BACKENDS["gloo"]
