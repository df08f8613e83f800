"""What is derived from records: fields by their format, nested phases, what lies between them, steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from pandas.testing import assert_frame_equal
from records import Record, capture_of, derive, derived, of, phase
from synthetic import MS, write_capture

from dsprof.ondisk import Flag
from dsprof.schema import Kind
from dsprof.trace.capture import read_capture
from dsprof.trace.derive import derive as derive_table
from dsprof.trace.derive import step_pattern, trace_rows
from dsprof.trace.derive.records import measured_rows
from dsprof.trace.derive.rows import GIVEN

# --- fields -------------------------------------------------------------------------------------


def test_a_wait_names_what_it_waited_for() -> None:
    rows = derive(
        (Kind.WAIT, "all_reduce", 1, 2, {"group": "0", "seq": 7}),
        (Kind.WAIT, "recv", 2, 3, {"group": "dp", "seq": 0, "peer": 1, "tag": 5, "p2p": True}),
        (Kind.WAIT, "wait", 3, 4, {}),
    )
    assert of(rows, "name", "group", "seq", "peer", "tag", "root") == [
        ("all_reduce", "0", 7, None, None, None),
        ("recv", "dp", 0, 1, 5, None),
        ("wait", None, None, None, None, None),
    ]


def test_the_root_of_a_collective_is_no_peer() -> None:
    rows = derive(
        (Kind.COMM, "broadcast", 1, 2, {"root": 1}),
        (Kind.COMM, "all_reduce", 2, 3, {"seq": 1}),
        (Kind.COMM, "send", 3, 4, {"peer": 1, "tag": 2, "p2p": True}),
        (Kind.COMM, "gather", 4, 5, {"seq": 2}),
    )
    assert of(rows, "name", "root", "peer", "tag") == [
        ("broadcast", 1, None, None), ("all_reduce", None, None, None), ("send", None, 1, 2),
        ("gather", None, None, None),
    ]  # fmt: skip


def test_a_forward_says_whether_gradients_were_on() -> None:
    rows = derive(
        (Kind.PHASE, "forward", 1, 2, {"flags": Flag.GRAD}),
        (Kind.PHASE, "forward", 2.1, 3, {}),
        (Kind.PHASE, "optimizer", 3, 4, {"value": 2.0}),
    )
    measured = rows[rows["source"] == "measured"]
    assert of(measured, "name", "grad", "value") == [
        ("forward", True, None), ("forward", False, None), ("optimizer", None, 2.0),
    ]  # fmt: skip


def test_an_action_of_a_pipeline_schedule_has_its_place() -> None:
    rows = derive((Kind.PIPE, "F", 1, 2, {"stage": 2, "microbatch": 5, "flags": Flag.ENGINE}))
    columns = ("kind", "name", "stage", "microbatch", "lane", "group", "seq", "peer", "module")
    assert of(rows, *columns) == [("pipe", "F", 2, 5, "main", None, None, None, None)]


def test_records_are_read_back_whole(tmp_path: Path) -> None:
    capture = capture_of(
        (Kind.WAIT, "recv", 2, 3, {"group": "dp", "seq": 3, "peer": 1, "tag": 5, "p2p": True}),
        (Kind.WAIT, "wait", 3, 4, {}),
        (Kind.COMM, "broadcast", 4, 5, {"root": 1, "purpose": "buffer", "flags": Flag.START_MEASURED | Flag.ASYNC}),
        (Kind.COMM, "send", 4, None, {"peer": 1, "p2p": True, "stage": 3, "microbatch": 2}),
        (Kind.PHASE, "forward", 5, 6, {"flags": Flag.GRAD, "value": 0.0, "bytes": 0}),
        (Kind.MARK, "backward_done", 6, 6, {}),
        (Kind.PIPE, "F", 6, 7, {"stage": 0, "microbatch": 0, "flags": Flag.ENGINE}),
        (Kind.COPY, "read", 6, 7, {"lane": "io.nvme", "issue_ns": 5, "corr": 9, "module": "blocks.0"}),
        (Kind.GAUGE, "loss", 7, 7, {"value": 0.5}),
    )
    folder = write_capture(capture, tmp_path)
    read = read_capture(folder)
    assert read.records.tobytes() == capture.records.tobytes()
    assert (read.damaged, read.problems, read.format_version) == (0, [], 4)


# --- phases in between --------------------------------------------------------------------------


def test_a_closure_is_what_it_does_and_the_optimizer_the_rest() -> None:
    """Lightning: forward and backward run inside the optimizer's step."""
    rows = derive(
        phase("data", 0, 1),
        phase("optimizer", 1, 30, value=1.0), phase("forward", 2, 10), phase("backward", 14, 26),
        phase("data", 31, 32),
        phase("optimizer", 32, 60, value=1.0), phase("forward", 33, 40), phase("backward", 44, 56),
    )  # fmt: skip
    assert derived(rows) == [("loss", 10, 14), ("loss", 40, 44)]
    assert derived(rows, "step") == [("step", 0, 30), ("step", 30, 60)]
    first = rows[rows["step"] == 0]
    assert of(first, "name", "depth") == [
        ("step", 0), ("data", 1), ("optimizer", 1), ("forward", 2), ("loss", 2), ("backward", 2),
    ]  # fmt: skip


def test_what_a_closure_s_optimizer_does_between_its_turns_is_its_own() -> None:
    """LBFGS, without a loader: only what is outside of it lies between optimizer and forward."""
    turn = [phase("forward", 1, 3), phase("backward", 4, 6), phase("forward", 8, 9), phase("backward", 9, 12)]
    later = [(kind, name, start + 20, end + 20, more) for kind, name, start, end, more in turn if end]
    rows = derive(phase("optimizer", 0, 13, value=1.0), *turn, phase("optimizer", 20, 33, value=1.0), *later)
    assert derived(rows) == [("loss", 3, 4), ("between", 13, 20), ("loss", 23, 24)]
    assert derived(rows, "step") == [("step", 0, 13), ("step", 13, 33)]
    assert rows.loc[rows["kind"] == "step", "value"].tolist() == [1, 1]


@pytest.mark.parametrize("name", ["checkpoint", "compile", "loader_start", "data"])
def test_nothing_is_derived_across_what_is_known(name: str) -> None:
    rows = derive(
        phase("forward", 0, 10), phase(name, 11, 12), phase("backward", 13, 20), phase(name, 21, 22),
        phase("optimizer", 23, 24),
    )  # fmt: skip
    assert derived(rows) == []


def test_between_optimizer_and_forward_is_called_so_only_where_no_loader_was_seen() -> None:
    turn = [phase("forward", 0, 10), phase("backward", 10, 30), phase("optimizer", 30, 35)]
    later = [phase("forward", 50, 60), phase("backward", 60, 70), phase("forward", 71, 80), phase("backward", 80, 85)]
    assert derived(derive(*turn, *later)) == [("between", 35, 50), ("between", 70, 71)]
    loading = phase("loader_start", 90, 91)
    assert derived(derive(*turn, *later, loading)) == []
    assert derived(derive(*turn, *later, facts=[{"fact": "device"}])) == []
    assert derived(derive(*turn, phase("checkpoint", 40, 41), *later)) == [("between", 70, 71)]


@pytest.mark.parametrize(
    ("length", "expected"),
    [(2.0, [("forward", 10, 12.0)]), (2.5, [])],
)
def test_between_two_forwards_only_what_is_short_is_forward(length: float, expected: list[Any]) -> None:
    """An environment that is stepped between two calls of the policy is no computation."""
    rows = derive(phase("forward", 0, 10), phase("forward", 10 + length, 20 + length))
    assert derived(rows) == expected


def test_many_brief_gaps_between_forwards_are_not_forward() -> None:
    few = [phase("forward", at, at + 0.5) for at in (0, 0.7, 10)]
    assert derived(derive(*few)) == [("forward", 0.5, 0.7)]
    many = [phase("forward", 0.7 * i, 0.7 * i + 0.5) for i in range(20)]
    assert derived(derive(*many)) == []


WAIT = {"group": "0", "seq": 0}


@pytest.mark.parametrize(
    ("inside", "expected"),
    [
        ([], ["loss", "clip"]),
        ([(Kind.WAIT, "recv", 11, 11.5, {**WAIT, "peer": 1, "tag": 0, "p2p": True})], ["clip"]),
        ([(Kind.COMM, "send", 22, 23, {"peer": 1, "tag": 0, "p2p": True})], ["loss"]),
        ([(Kind.WAIT, "all_gather", 11, 11.5, WAIT)], ["clip"]),
        ([(Kind.WAIT, "barrier", 21, 22, WAIT)], ["loss"]),
        ([(Kind.WAIT, "all_reduce", 21, 22, WAIT)], ["loss", "clip"]),
        ([(Kind.WAIT, "wait_tensor", 21, 22, {}), (Kind.COMM, "all_reduce", 21, 22, {})], ["loss", "clip"]),
        ([(Kind.WAIT, "wait_tensor", 21, 22, {}), (Kind.COMM, "all_gather", 21, 22, {})], ["loss"]),
        ([(Kind.WAIT, "barrier", 5, 6, WAIT)], ["loss", "clip"]),
        ([(Kind.WAIT, "barrier", 11, 11.5, {**WAIT, "thread": 8})], ["loss", "clip"]),
    ],
    ids=[
        "nothing",
        "recv",
        "send",
        "all_gather",
        "barrier",
        "norm",
        "functional norm",
        "gather",
        "elsewhere",
        "other thread",
    ],
)
def test_a_gap_in_which_a_rank_communicates_is_not_named_by_its_neighbours(
    inside: list[Record], expected: list[str]
) -> None:
    rows = derive(phase("forward", 0, 10), phase("backward", 12, 20), phase("optimizer", 24, 30), *inside)
    assert [name for name, _, _ in derived(rows)] == expected


def test_between_actions_of_a_pipeline_rows_nest() -> None:
    """torch's schedules: an action holds a stage's forward or backward; the last stage's loss lies between two."""

    def action(name: str, start: float, end: float) -> Record:
        return (Kind.PIPE, name, start, end, {"stage": 1, "microbatch": 0, "flags": Flag.ENGINE})

    rows = derive(
        phase("optimizer", 0, 1),
        action("F", 5, 10), phase("forward", 6, 9),
        action("B", 12, 20), phase("backward", 13, 19),
        action("F", 20.1, 30), phase("forward", 20.2, 25), phase("forward", 25.1, 29),
        action("F", 30.1, 40), phase("forward", 30.2, 39),
    )  # fmt: skip
    assert derived(rows) == [
        ("between", 1, 5), ("loss", 9, 10), ("loss", 10, 12), ("loss", 12, 13), ("forward", 25, 25.1),
    ]  # fmt: skip


# --- steps --------------------------------------------------------------------------------------


def turns(*optimizers: int, start: float = 0.0) -> list[Record]:
    """A forward, backward and step (10 ms together) of each of these optimizers in turn."""
    found = []
    for turn, number in enumerate(optimizers):
        at = start + 10 * turn
        found += [phase("forward", at, at + 3), phase("backward", at + 3, at + 8)]
        found.append(phase("optimizer", at + 8, at + 10, value=float(number)))
    return found


def steps_of(rows: pd.DataFrame) -> list[tuple[float, float, float]]:
    """Start and end in ms, and optimizer steps in it."""
    steps = rows[rows["kind"] == "step"]
    end = (steps["start_ns"] + steps["dur_ns"]).astype(float) / MS
    return list(zip(steps["start_ns"] / MS, end, steps["value"], strict=True))


def test_optimizers_that_take_turns_make_one_step() -> None:
    assert steps_of(derive(*turns(1, 2, 1, 2))) == [(0, 20, 2), (20, 40, 2)]
    critic = (1, 1, 1, 1, 1, 2)
    rows = derive(*turns(*critic * 3, 1, 1))
    assert steps_of(rows) == [(0, 60, 6), (60, 120, 6), (120, 180, 6)]
    assert step_pattern(rows) == [(1, 5), (2, 1)]
    assert rows.loc[rows["start_ns"] >= 180 * MS, "step"].unique().tolist() == [3]  # what has only begun


def test_optimizers_without_numbers_step_one_by_one() -> None:
    """Captures of old formats do not say which optimizer it was."""
    records = [(kind, name, start, end, {}) for kind, name, start, end, _ in turns(1, 2, 1, 2)]
    rows = derive(*records)
    assert steps_of(rows) == [(0, 10, 1), (10, 20, 1), (20, 30, 1), (30, 40, 1)]
    assert step_pattern(rows) == [(0, 1)]


def test_optimizers_that_step_together_share_a_step() -> None:
    turn = [phase("forward", 0, 3), phase("backward", 3, 8)]
    turn += [phase("optimizer", 8, 9, value=1.0), phase("optimizer", 9, 10, value=2.0)]
    later = [(kind, name, start + 10, end + 10, more) for kind, name, start, end, more in turn if end]
    rows = derive(*turn, *later)
    assert steps_of(rows) == [(0, 10, 2), (10, 20, 2)]
    assert step_pattern(rows) == [(1, 1), (2, 1)]


def test_what_does_not_repeat_ends_with_the_rarest_regular_optimizer() -> None:
    order = [1, 1, 1, 2, 1, 1, 1, 1, 2, 1, 1, 2, 1, 1, 1, 2, 1, 1, 1, 1, 2]
    found = steps_of(derive(*turns(*order)))
    assert [round((end - start) / 10) for start, end, _ in found] == [4, 5, 3, 4, 5]


def test_what_is_stepped_at_random_stands_for_itself() -> None:
    order = [1, 1, 2, 1, 1, 1, 1, 1, 1, 3, 1, 2, 1]
    assert len(steps_of(derive(*turns(*order)))) == len(order)


def test_a_rare_second_optimizer_is_an_exception() -> None:
    order = ([1] * 40 + [2]) * 4
    assert len(steps_of(derive(*turns(*order)))) == len(order)


def test_optimizers_inside_backward_end_the_step_with_it() -> None:
    """One for each parameter; not every parameter has a gradient each time."""
    records = []
    for step, stepped in enumerate([(1, 2, 3), (1, 3), (1, 2, 3), (2,)]):
        at = 20 * step
        records += [phase("forward", at, at + 5), phase("backward", at + 5, at + 15)]
        records += [phase("optimizer", at + 6 + n, at + 6.5 + n, value=float(n)) for n in stepped]
    rows = derive(*records)
    assert steps_of(rows) == [(0, 15, 3), (15, 35, 2), (35, 55, 3), (55, 75, 1)]
    assert set(of(rows[rows["name"] == "optimizer"], "depth")) == {(2,)}
    on_a_device = [
        (*record[:4], {**record[4], "thread": 9}) if record[1] == "optimizer" else record for record in records
    ]
    assert steps_of(derive(*on_a_device)) == steps_of(rows)


def test_accumulating_before_optimizers_inside_backward() -> None:
    rows = derive(
        phase("backward", 0, 5), phase("backward", 5, 10), phase("optimizer", 7, 8, value=1.0),
        phase("backward", 10, 15), phase("backward", 15, 20), phase("optimizer", 17, 18, value=1.0),
    )  # fmt: skip
    assert steps_of(rows) == [(0, 10, 1), (10, 20, 1)]


def test_without_any_optimizer_backward_ends_the_step() -> None:
    rows = derive(phase("forward", 0, 3), phase("backward", 3, 8), phase("forward", 9, 12), phase("backward", 12, 18))
    assert steps_of(rows) == [(0, 8, 0), (8, 18, 0)]
    assert step_pattern(rows) == []


def test_accumulation_in_lightning_ends_with_the_closure() -> None:
    rows = derive(
        phase("forward", 0, 3), phase("backward", 3, 8),
        phase("optimizer", 8, 20, value=1.0), phase("forward", 9, 12), phase("backward", 12, 18),
        phase("forward", 20, 23), phase("backward", 23, 28),
        phase("optimizer", 28, 40, value=1.0), phase("forward", 29, 32), phase("backward", 32, 38),
    )  # fmt: skip
    assert steps_of(rows) == [(0, 20, 1), (20, 40, 1)]


def test_the_first_step_begins_with_its_input() -> None:
    """Not with a checkpoint that is loaded, a compilation or the evaluation that Lightning begins with."""
    before = [
        phase("loader_start", 0, 1), phase("data", 1, 2), phase("forward", 2, 5, flags=0),
        phase("data", 5, 6), phase("forward", 6, 9, flags=0),
        phase("checkpoint", 10, 20), phase("loader_start", 21, 22),
    ]  # fmt: skip
    rows = derive(*before, phase("data", 23, 24), phase("compile", 24, 28), *turns(1, 1, start=30))
    assert [start for start, _, _ in steps_of(rows)] == [23, 40]
    assert rows.loc[rows["start_ns"] < 23 * MS, "step"].unique().tolist() == [-1]
    rows = derive(*before, *turns(1, start=30), phase("compile", 30, 32))
    assert [start for start, _, _ in steps_of(rows)] == [30]


def test_an_inference_has_no_steps() -> None:
    rows = derive(phase("data", 0, 1), phase("forward", 1, 3, flags=0), phase("data", 3, 4))
    assert steps_of(rows) == []
    assert (rows["step"] == -1).all()
    assert step_pattern(rows) == []


# --- rows of other tools -------------------------------------------------------------------------


def test_rows_of_another_tool_are_derived_alike() -> None:
    """What it leaves out, or has in other types, changes nothing."""
    turn = [phase("forward", 0, 10), phase("backward", 12, 30), phase("optimizer", 31, 40)]
    reduce = (Kind.COMM, "all_reduce", 15, 29, {})
    capture = capture_of(*turn, reduce, facts=[{"fact": "ddp"}])
    rows = measured_rows(capture)
    assert list(rows) == list(GIVEN)
    left_out = ["lane", "engine", "stage", "microbatch", "module", "purpose", "peer", "tag", "root", "value", "ended"]
    other = rows.drop(columns=left_out).astype({"kind": "category", "name": "category", "dur_ns": "int64"})
    expected = trace_rows(capture, 0, 0)
    assert_frame_equal(derive_table(other, {"ddp"}), expected)
    assert_frame_equal(
        derive_table(rows, {"ddp"}, rank=3, restart=1), expected.assign(rank=np.int32(3), restart=np.int16(1))
    )
    with pytest.raises(KeyError, match="rows without thread"):
        derive_table(rows.drop(columns="thread"), ())
