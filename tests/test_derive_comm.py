"""What is derived of communication: the waits of DDP's reducer, and purposes. And what odd records cost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from records import Record, capture_of, derive, of, phase
from synthetic import MS

from dsprof.analyzer.align.match import match_collectives
from dsprof.ondisk import FAMILIES, Family, Flag, State
from dsprof.schema import BACKWARD_DONE, COLUMNS, DTYPES, Kind
from dsprof.trace.derive import step_pattern, trace_rows
from dsprof.trace.derive.lanes import depths
from dsprof.trace.records import empty


def comm(name: str, issue: float, end: float | None, seq: int, **more: Any) -> Record:
    return (Kind.COMM, name, issue, end, {"seq": seq, **more})


def waits_of(rows: pd.DataFrame) -> list[tuple[Any, ...]]:
    """Name, group, seq, start and end in ms of the derived waits."""
    found = rows[(rows["kind"] == "wait") & (rows["source"] == "derived")]
    start = found["start_ns"] / MS
    return list(zip(*of_columns(found), start, start + found["dur_ns"].astype(float) / MS, strict=True))


def of_columns(rows: pd.DataFrame) -> list[list[Any]]:
    return [list(column) for column in zip(*of(rows, "name", "group", "seq"), strict=True)] or [[], [], []]


DONE = (Kind.MARK, BACKWARD_DONE, 30, 30, {})
BACKWARD = phase("backward", 10, 60)

# --- the waits of DDP's reducer -----------------------------------------------------------------


def test_ddp_waits_for_one_bucket_after_the_other_from_the_end_of_backward() -> None:
    rows = derive(
        BACKWARD, DONE,
        comm("all_reduce", 15, 25, 0), comm("all_reduce", 20, 40, 1),
        comm("all_reduce", 25, 39, 2), comm("all_reduce", 29, 55, 3),
    )  # fmt: skip
    assert waits_of(rows) == [("all_reduce", "0", 1, 30, 40), ("all_reduce", "0", 3, 40, 55)]
    waits = rows[rows["kind"] == "wait"]
    assert of(waits, "lane", "thread", "module", "depth", "purpose") == [("main", 7, None, 2, None)] * 2


def test_buckets_that_were_there_in_time_leave_the_last_without_length() -> None:
    rows = derive(BACKWARD, DONE, comm("all_reduce", 15, 25, 0), comm("all_reduce", 20, 29, 1))
    assert waits_of(rows) == [("all_reduce", "0", 1, 30, 30)]


def test_what_was_measured_cancels_its_own_collective_only() -> None:
    """A layer in backward that waits for itself, beside DDP."""
    rows = derive(
        BACKWARD, DONE,
        comm("all_gather", 12, 20, 0), (Kind.WAIT, "all_gather", 13, 20, {"group": "0", "seq": 0}),
        comm("all_reduce", 20, 50, 1),
        comm("all_reduce", 21, 58, 2), (Kind.WAIT, "all_reduce", 70, 71, {"group": "0", "seq": 2}),
        comm("all_reduce", 22, 45, 2, group="other"),
        (Kind.WAIT, "recv", 22, 23, {"group": "0", "seq": 1, "peer": 1, "tag": 0, "p2p": True}),
        (Kind.WAIT, "wait", 23, 24, {}),
    )  # fmt: skip
    assert waits_of(rows) == [("all_reduce", "0", 1, 30, 50)]


def test_a_wait_ends_with_its_backward() -> None:
    rows = derive(BACKWARD, DONE, comm("all_reduce", 20, 75, 0))
    assert waits_of(rows) == [("all_reduce", "0", 0, 30, 60)]


def test_outside_of_backward_nothing_is_waited_for() -> None:
    rows = derive(
        phase("forward", 0, 8), comm("broadcast", 2, 6, 0), BACKWARD, DONE, comm("all_reduce", 61, 75, 1),
        comm("send", 20, 50, 0, peer=1, tag=0, p2p=True),
    )  # fmt: skip
    assert waits_of(rows) == []


def test_a_collective_is_not_waited_for_before_it_is_issued() -> None:
    rows = derive(BACKWARD, DONE, comm("all_reduce", 20, 32, 0), comm("all_reduce", 35, 50, 1))
    assert waits_of(rows) == [("all_reduce", "0", 0, 30, 32), ("all_reduce", "0", 1, 35, 50)]


def test_without_the_mark_it_waits_from_the_last_issue() -> None:
    records = [BACKWARD, comm("all_reduce", 15, 50, 0), comm("all_reduce", 20, 58, 1, host_ns=MS)]
    assert waits_of(derive(*records)) == [
        ("all_reduce", "0", 0, 21, 50), ("all_reduce", "0", 1, 50, 58),
    ]  # fmt: skip
    unknown = (Kind.WAIT, "wait", 16, 17, {})
    assert waits_of(derive(*records, unknown)) == []
    computing = [phase("backward", 10, 90), *records[1:]]
    assert waits_of(derive(*computing)) == []


def test_without_the_mark_a_measured_wait_cancels_its_own_collective_only() -> None:
    measured = (Kind.WAIT, "all_reduce", 16, 17, {"group": "0", "seq": 0})
    rows = derive(BACKWARD, comm("all_reduce", 15, 17, 0), measured, comm("all_reduce", 20, 58, 1))
    assert waits_of(rows) == [("all_reduce", "0", 1, 20, 58)]


def test_of_several_marks_in_a_backward_the_last_counts() -> None:
    """Re-entrant checkpointing runs a backward of its own inside the outer one."""
    rows = derive(BACKWARD, (Kind.MARK, BACKWARD_DONE, 20, 20, {}), DONE, comm("all_reduce", 15, 55, 0))
    assert waits_of(rows) == [("all_reduce", "0", 0, 30, 55)]


def test_each_backward_has_its_own_mark() -> None:
    rows = derive(
        BACKWARD, DONE, comm("all_reduce", 15, 50, 0),
        phase("backward", 110, 160), (Kind.MARK, BACKWARD_DONE, 140, 140, {}), comm("all_reduce", 115, 150, 1),
        phase("backward", 210, 260), comm("all_reduce", 215, 258, 2),
    )  # fmt: skip
    assert waits_of(rows) == [
        ("all_reduce", "0", 0, 30, 50), ("all_reduce", "0", 1, 140, 150), ("all_reduce", "0", 2, 215, 258),
    ]  # fmt: skip


def test_a_backward_of_another_thread_waits_there() -> None:
    rows = derive(
        phase("forward", 0, 5), BACKWARD, phase("optimizer", 61, 62),
        phase("backward", 110, 160, thread=9), comm("all_reduce", 115, 158, 1, thread=9),
    )  # fmt: skip
    assert of(rows[rows["kind"] == "wait"], "lane", "thread", "seq") == [("thread.9", 9, 1)]


# --- purposes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "issue", "fact", "purpose"),
    [
        ("all_reduce", 20, None, "gradient"),
        ("reduce_scatter", 20, "fsdp", "gradient"),
        ("all_reduce", 5, None, "other"),
        ("all_gather", 5, None, "other"),
        ("all_gather", 5, "fsdp", "parameter"),
        ("all_gather", 20, "fsdp", "parameter"),
        ("all_gather", 70, "fsdp", "other"),
        ("broadcast", 5, "ddp", "buffer"),
        ("broadcast", 5, None, "other"),
        ("broadcast", 20, "ddp", "other"),
        ("barrier", 20, "ddp", "barrier"),
        ("all_to_all", 20, "fsdp", "other"),
    ],
)
def test_what_a_collective_is_for(name: str, issue: float, fact: str | None, purpose: str) -> None:
    facts = [] if fact is None else [{"fact": fact}]
    rows = derive(phase("forward", 0, 9), BACKWARD, comm(name, issue, issue + 1, 0), facts=facts)
    assert of(rows[rows["kind"] == "comm"], "purpose") == [(purpose,)]


def test_whole_numbers_are_no_gradients() -> None:
    """DDP reduces which parameters were unused."""
    numbers, gradients = (DTYPES.index(name) for name in ("int32", "float32"))
    rows = derive(
        BACKWARD, comm("all_reduce", 20, 21, 0, dtype=numbers), comm("all_reduce", 22, 23, 1, dtype=gradients)
    )
    assert of(rows[rows["kind"] == "comm"], "purpose") == [("other",), ("gradient",)]


def test_a_thread_of_the_scripts_communicates_for_nothing_that_trains() -> None:
    """Unlike one of the autograd engine's, which does in backward only."""
    rows = derive(
        phase("forward", 0, 9), BACKWARD, phase("optimizer", 70, 80),
        *(comm("all_reduce", at, at + 1, at, thread=9, bytes=4) for at in (5, 20, 75)),
        comm("all_reduce", 25, 26, 90, thread=8),
    )  # fmt: skip
    found = rows[rows["kind"] == "comm"]
    assert of(found, "thread", "purpose") == [(9, "other"), (9, "other"), (8, "gradient"), (9, "other")]


def test_a_thread_of_autograds_stays_one_where_a_backward_was_not_captured() -> None:
    """The begin of the last one was given up for the size limit."""
    backwards = [phase("backward", 100 * i, 100 * i + 60) for i in range(10)]
    sent = [comm("all_reduce", 100 * i + 20, 100 * i + 21, i, thread=8) for i in range(11)]
    rows = derive(*backwards, *sent)
    assert of(rows[rows["kind"] == "comm"], "purpose") == [("gradient",)] * 10 + [("other",)]


def test_small_gradients_of_a_closure_that_the_optimizer_runs_are_no_norm() -> None:
    """A bucket of 3 KiB is issued in the backward that is inside of the optimizer's step; a norm after it."""
    rows = derive(
        phase("optimizer", 0, 90), phase("forward", 1, 9), BACKWARD, DONE, comm("all_reduce", 29, 55, 0, bytes=3264),
        comm("all_reduce", 70, 71, 1, bytes=8),
    )  # fmt: skip
    assert of(rows[rows["kind"] == "comm"], "purpose") == [("gradient",), ("norm",)]
    assert waits_of(rows) == [("all_reduce", "0", 0, 30, 55)]


BY_HAND = (phase("forward", 0, 9), phase("backward", 10, 20), phase("optimizer", 40, 50))
"""A step between whose backward and optimizer a script communicates itself."""


@pytest.mark.parametrize(
    ("sizes", "purposes", "clips"),
    [
        ((4,), ["norm"], True),
        ((128, 8), ["norm", "norm"], True),
        ((2048,), ["other"], False),
        ((1 << 20, 512), ["gradient", "gradient"], False),
        ((1 << 20, 4), ["gradient", "other"], False),
    ],
    ids=["norm", "some numbers", "either", "gradients", "gradients and the loss"],
)
def test_reductions_between_backward_and_optimizer_are_told_by_their_size(
    sizes: tuple[int, ...], purposes: list[str], clips: bool
) -> None:
    sent = [comm("all_reduce", 22 + i, 23 + i, i, bytes=size) for i, size in enumerate(sizes)]
    waits = [
        (Kind.WAIT, "all_reduce", 22.5 + i, 23 + i, {"group": "0", "seq": i}) for i in range(len(sizes))
    ]  # fmt: skip
    rows = derive(*BY_HAND, *sent, *waits)
    assert of(rows[rows["kind"] == "comm"], "purpose") == [(one,) for one in purposes]
    assert ((rows["kind"] == "phase") & (rows["name"] == "clip")).any() == clips


@pytest.mark.parametrize(
    ("sizes", "purposes"),
    [
        ((256, 32, 1024), ["gradient"] * 3),
        ((32, 256, 1024, 4), ["gradient"] * 3 + ["other"]),
        ((256, 32), ["other"] * 2),
        ((256, 32, 32), ["other"] * 3),
        ((1312,), ["other"]),
        ((12,), ["norm"]),
    ],
    ids=["gradients", "gradients and the loss", "too few", "other sizes", "flattened", "norms of each"],
)
def test_gradients_as_small_as_norms_are_told_by_all_of_their_sizes(
    sizes: tuple[int, ...], purposes: list[str]
) -> None:
    optimizer = {"fact": "optimizer", "number": 1, "class": "SGD", "parameters": 4, "gradients": [64, 8, 256, 1]}
    sent = [
        comm("all_reduce", 22 + i, 23 + i, i, bytes=size, dtype=DTYPES.index("float32"))
        for i, size in enumerate(sizes)
    ]  # fmt: skip
    rows = derive(*BY_HAND, *sent, facts=[optimizer])
    assert of(rows[rows["kind"] == "comm"], "purpose") == [(one,) for one in purposes]


def test_gradients_of_some_numbers_each_are_no_clipping() -> None:
    optimizer = {"fact": "optimizer", "number": 1, "class": "SGD", "parameters": 2, "gradients": [16, 8]}
    sent = [comm("all_reduce", 22 + i, 23 + i, i, bytes=64 >> i, dtype=DTYPES.index("float32")) for i in range(2)]
    rows = derive(*BY_HAND, *sent, facts=[optimizer])
    assert of(rows[rows["kind"] == "comm"], "purpose") == [("gradient",)] * 2
    assert not (rows["name"] == "clip").any()


def test_gradients_are_reduced_by_hand_behind_a_backward_that_computes_again() -> None:
    again = phase("recompute", 12, 15)
    rows = derive(*BY_HAND, again, comm("all_reduce", 25, 26, 0, bytes=1 << 20))
    assert of(rows[rows["kind"] == "comm"], "purpose") == [("gradient",)]


def test_reductions_elsewhere_are_not_taken_for_hand_made_ones() -> None:
    later = [(kind, name, start + 100, end + 100, more) for kind, name, start, end, more in BY_HAND if end]
    after_the_step = comm("all_reduce", 60, 61, 0, bytes=1 << 20)
    of_another_thread = comm("all_reduce", 25, 26, 1, bytes=1 << 20, thread=9)
    rows = derive(*BY_HAND, after_the_step, of_another_thread, *later)
    assert of(rows[rows["kind"] == "comm"], "purpose") == [("other",), ("other",)]


def test_a_send_is_for_what_the_analyzer_finds_out() -> None:
    rows = derive(phase("forward", 0, 9), comm("send", 5, 6, 0, peer=1, tag=0, p2p=True))
    assert of(rows[rows["kind"] == "comm"], "purpose") == [("other",)]


# --- nesting, and odd records -------------------------------------------------------------------


def by_stack(start: list[int], end: list[int]) -> list[int]:
    """Depth of rows that nest, in order of start, longer first."""
    depth, under_way = [], list[int]()
    for begin, stop in zip(start, end, strict=True):
        under_way = [other for other in under_way if other > begin]
        depth.append(len(under_way))
        under_way.append(stop)
    return depth


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 8), st.sampled_from("abc")), max_size=40))
def test_depth_counts_what_is_still_open_in_the_lane(spans: list[tuple[int, int, str]]) -> None:
    spans.sort(key=lambda span: (span[0], -span[1]))
    rows = pd.DataFrame(spans, columns=["start_ns", "dur_ns", "lane"]).assign(kind="phase")
    rows["dur_ns"] = rows["dur_ns"].astype("Int64")
    found = depths(rows.astype({"start_ns": "int64"}))
    for lane in "abc":
        mine = [span for span in spans if span[2] == lane]
        expected = by_stack([span[0] for span in mine], [span[0] + span[1] for span in mine])
        assert found[[span[2] == lane for span in spans]].tolist() == expected


NAMES = (
    "data", "forward", "backward", "optimizer", "all_reduce", "send", "0", BACKWARD_DONE, "checkpoint", "broadcast",
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, 120), st.integers(1, 60))
def test_whatever_was_recorded_becomes_a_table(seed: int, count: int, apart: int) -> None:
    """Unordered, overlapping, never ended, of any kind, in any number."""
    draw = np.random.default_rng(seed)
    records = empty(count)
    records["start_ns"] = draw.integers(1, apart * max(count, 1) + 2, count)
    records["end_ns"] = records["start_ns"] + draw.integers(0, 100, count)
    records["end_ns"][draw.random(count) < 0.2] = 0
    records["kind"] = draw.choice([2, 2, 2, 4, 4, 5, 6, 11, 12, 13], count)
    records["family"] = [draw.choice(FAMILIES[kind]) for kind in records["kind"]]
    records["name"], records["group"] = draw.integers(1, 11, count), draw.choice([0, 7], count)
    records["state"] = np.where(records["end_ns"] == 0, draw.integers(1, 3, count), State.DONE)
    records["flags"] = draw.choice([0, 0, Flag.ENGINE, Flag.GRAD], count)
    records["grad"] = draw.integers(-1, 2, count)
    communicates, p2p = np.isin(records["family"], [Family.COLLECTIVE, Family.P2P]), records["family"] == Family.P2P
    records["seq"] = np.where(communicates, draw.choice([0, 1, 2, -1], count), -1)
    records["peer"], records["tag"] = (np.where(p2p, draw.integers(0, 3, count), -1) for _ in range(2))
    records["stage"], records["microbatch"] = draw.integers(-1, 3, count), draw.integers(-1, 3, count)
    records["thread"] = draw.choice([7, 7, 7, 9], count)
    records["value"] = np.where(communicates, np.nan, draw.choice([np.nan, 0.0, 1.0, 2.0, -3.0, 1e300], count))
    records["issue_ns"] = np.where(records["kind"] == Kind.COMM, records["start_ns"], -1)
    capture = capture_of(facts=[{"fact": "fsdp"}, {"fact": "ddp"}])
    capture.records, capture.names = records, dict(enumerate(NAMES, 1))
    rows = trace_rows(capture, 0, 0)
    assert {name: str(dtype) for name, dtype in rows.dtypes.items()} == COLUMNS
    assert int((rows["source"] == "measured").sum()) == count
    assert rows["start_ns"].is_monotonic_increasing
    assert (rows["dur_ns"].dropna() >= 0).all()
    steps = rows[rows["kind"] == "step"]
    assert steps["step"].tolist() == list(range(len(steps)))
    assert ((steps["start_ns"] + steps["dur_ns"]).to_numpy()[:-1] == steps["start_ns"].to_numpy()[1:]).all()
    step_pattern(rows)


# --- when the chain that runs a communication was ready for it ------------------------------------


def test_on_gloo_a_rank_arrives_when_a_worker_takes_the_work() -> None:
    """Rank 0 issues all four at once; its two workers take the last two only when rank 1 has let them end the first."""
    taken, issued = Flag.ASYNC | Flag.START_MEASURED, {"issue_ns": 10 * MS}
    ranks = [
        [(0, 10, 30), (1, 10, 31), (2, 30, 40), (3, 31, 41)],
        [(0, 29, 30), (1, 29, 31), (2, 30, 40), (3, 31, 41)],
    ]
    rows = pd.concat(
        [
            trace_rows(
                capture_of(
                    *[comm("all_reduce", start, end, seq, flags=taken, **issued) for seq, start, end in of_rank],
                    comm("all_reduce", 50, 60, 4, flags=Flag.ASYNC), comm("all_reduce", 61, None, 5, flags=taken),
                ), rank, 0,
            )
            for rank, of_rank in enumerate(ranks)
        ],
        ignore_index=True,
    )  # fmt: skip
    told = [None if pd.isna(when) else when / MS for when in rows["arrival_ns"][rows["rank"] == 0]]
    assert told == [10, 10, 30, 31, None, 61]
    matched = match_collectives(rows)
    assert [(seq, first / MS, last / MS) for seq, first, last in of(matched, "seq", "first_ns", "last_ns")] == [
        (0, 10, 29), (1, 10, 29), (2, 30, 30), (3, 31, 31), (4, 50, 50),
    ]  # fmt: skip


# --- tensor parallelism by hand -----------------------------------------------------------------


def purposes_of(rows: pd.DataFrame) -> list[tuple[Any, ...]]:
    return of(rows[rows["kind"] == "comm"], "name", "purpose")


def layers(forward: list[tuple[str, int]], backward: list[tuple[str, int]], group: str = "tp") -> list[Record]:
    """Collectives of one group, each a name and bytes, in a forward and in a backward."""
    issued = [*((5 + 0.1 * i, one) for i, one in enumerate(forward)),
              *((20 + 0.1 * i, one) for i, one in enumerate(backward))]  # fmt: skip
    return [
        comm(name, at, at + 0.05, seq, bytes=size, group=group) for seq, (at, (name, size)) in enumerate(issued)
    ]  # fmt: skip


REDUCE, SCATTER, GATHER = "all_reduce", "reduce_scatter", "all_gather"


@pytest.mark.parametrize(
    ("forward", "backward"),
    [
        ([(REDUCE, 4096)] * 2, [(REDUCE, 4096)] * 2),  # Megatron's f and g
        ([(REDUCE, 4096), (REDUCE, 512)], [(REDUCE, 4096)]),  # and the loss over a vocabulary that is divided
        ([(GATHER, 4096), (SCATTER, 4096)] * 2, [(GATHER, 4096), (SCATTER, 4096)] * 2),  # along the sequence
    ],
)
def test_a_group_that_reduces_the_same_in_forward_and_backward_is_tensor_parallel(
    forward: list[tuple[str, int]], backward: list[tuple[str, int]]
) -> None:
    gradients = layers([], [(REDUCE, 1 << 20)] * 3, group="dp")
    rows = derive(phase("forward", 0, 9), BACKWARD, *layers(forward, backward), *gradients)
    assert set(of(rows[rows["kind"] == "comm"], "group", "purpose")) == {("tp", "tensor-parallel"), ("dp", "gradient")}


@pytest.mark.parametrize(
    ("forward", "backward", "facts", "purposes"),
    [
        # A loss that is averaged in forward, beside gradients; one number.
        ([(REDUCE, 4)], [(REDUCE, 4), (REDUCE, 4096)], (), ["other", "gradient", "gradient"]),
        # Statistics of batches, beside gradients that are larger.
        ([(REDUCE, 512)] * 2, [(REDUCE, 512), (REDUCE, 512), (REDUCE, 1 << 20)], (), ["other"] * 2 + ["gradient"] * 3),
        # FSDP gathers in forward, and reduces nothing there.
        ([(GATHER, 4096)] * 2, [(GATHER, 4096), (SCATTER, 4096)], ("fsdp",), ["parameter"] * 3 + ["gradient"]),
        # Features of all ranks for a loss that compares them.
        ([(GATHER, 4096)], [(SCATTER, 4096)], (), ["other", "gradient"]),
        # One sum in forward, and as large a gradient among several.
        ([(REDUCE, 4096)], [(REDUCE, 4096)] * 4, (), ["other"] + ["gradient"] * 4),
    ],
)
def test_what_else_is_communicated_in_forward_is_not(
    forward: list[tuple[str, int]], backward: list[tuple[str, int]], facts: tuple[str, ...], purposes: list[str]
) -> None:
    said = [{"fact": fact} for fact in facts]
    rows = derive(phase("forward", 0, 9), BACKWARD, *layers(forward, backward), facts=said)
    assert [purpose for _, purpose in purposes_of(rows)] == purposes
