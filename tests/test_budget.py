"""Where a step went, by lane: small tables with literal times, in ms."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from captures import open_recorder

from dsprof.analyzer.align.match import match_collectives
from dsprof.analyzer.align.steps import completed_steps
from dsprof.analyzer.budget.intervals import Intervals
from dsprof.analyzer.budget.step_budget import RankTime, label_time, step_budget
from dsprof.collectors.frameworks import dsprof_engine
from dsprof.engine.config.zero import AioConfig
from dsprof.engine.hooks import Hooks
from dsprof.engine.offload.disk import Disk, aligned
from dsprof.schema import BUDGET_PARTS, COLUMNS
from dsprof.trace.capture import read_capture
from dsprof.trace.derive import trace_rows

MS = 1_000_000


def row(kind: str, name: str, start: float, end: float, lane: str = "main", **more: Any) -> dict[str, Any]:
    return {
        "rank": 0, "restart": 0, "step": 0, "kind": kind, "name": name, "lane": lane, "start_ns": int(start * MS),
        "dur_ns": int((end - start) * MS), "ended": True, "source": "measured", **more,
    }  # fmt: skip


def comm(seq: int, issue: float, end: float, lane: str = "comm.0", **more: Any) -> dict[str, Any]:
    about = {"group": "0", "seq": seq, "bytes": 8, "issue_ns": int(issue * MS), **more}
    return row("comm", "all_reduce", issue, end, lane, **about)


def table(*rows: dict[str, Any]) -> pd.DataFrame:
    return pd.DataFrame(list(rows)).reindex(columns=list(COLUMNS)).astype(COLUMNS)


def time_of(
    *rows: dict[str, Any], outside_training: dict[str, Intervals] | None = None
) -> tuple[pd.DataFrame, RankTime]:
    """The table of all ranks, and rank 0 labelled."""
    every = table(*rows)
    collectives = match_collectives(every)
    return every, label_time(every[every["rank"] == 0], collectives, 0, outside_training=outside_training)


def budget(*rows: dict[str, Any], step: int = 0) -> dict[str, float]:
    """The parts of one step of rank 0 that are not 0; they sum to the step."""
    every, time = time_of(*rows)
    steps = step_budget({0: time}, completed_steps(every[every["rank"] == 0]))
    parts = steps[list(BUDGET_PARTS)].sum(axis=1)
    assert parts.tolist() == pytest.approx((steps["dur_ns"] / MS).tolist())
    one = steps[steps["step"] == step].iloc[0]
    return {part: round(float(one[part]), 6) for part in BUDGET_PARTS if one[part]}


STEP = row("step", "step", 0, 100)


# --- the training thread ------------------------------------------------------------------------


def test_main_alone() -> None:
    assert budget(
        STEP,
        row("phase", "data", 0, 5),
        row("phase", "forward", 5, 40),
        row("pause", "gc", 10, 13),
        row("phase", "backward", 40, 80),
        comm(0, 60, 78), comm(0, 70, 78, rank=1),
        row("wait", "all_reduce", 65, 78, group="0", seq=0),
        row("phase", "optimizer", 85, 95),
    ) == {
        "compute": 59, "peer_wait": 5, "comm_exposed": 8, "data": 5, "optimizer": 10, "pause": 3, "other": 10,
    }  # fmt: skip


def test_a_wait_is_for_what_it_names_whatever_overlaps_on_its_lane() -> None:
    """Number 1 is under way from 30 to 90 beside number 0, which is what the thread waits for."""
    assert budget(
        STEP,
        row("phase", "backward", 0, 100),
        comm(0, 20, 70), comm(0, 60, 70, rank=1),
        comm(1, 30, 90), comm(1, 95, 96, rank=1),
        row("wait", "all_reduce", 50, 70, group="0", seq=0),
    ) == {"compute": 80, "peer_wait": 10, "comm_exposed": 10}  # fmt: skip


def test_a_lane_that_nobody_waits_for_paints_nothing() -> None:
    assert budget(
        STEP,
        row("phase", "backward", 0, 60),
        row("phase", "optimizer", 60, 100),
        row("copy", "write", 10, 90, "io.nvme.write"),
        row("phase", "optimizer", 5, 55, "thread.7"),
        row("kernel", "gemm", 0, 50, "cuda.7"),
        comm(0, 20, 70), comm(0, 60, 70, rank=1),
    ) == {"compute": 60, "optimizer": 40}  # fmt: skip


# --- lanes that the training thread waits for ---------------------------------------------------


def test_a_wait_for_a_read_from_disk_is_offload() -> None:
    """A wait has the name of the copy it is for. It is no wait for the all-reduce that ended meanwhile."""
    assert budget(
        STEP,
        row("phase", "backward", 0, 40),
        row("phase", "optimizer", 40, 100),
        comm(0, 30, 50), comm(0, 31, 50, rank=1),
        row("copy", "read", 45, 58, "io.nvme.read", purpose="optimizer"),
        row("wait", "read", 44, 60, purpose="optimizer"),
        row("phase", "tile", 60, 70),
        row("copy", "write", 71, 99, "io.nvme.write", purpose="optimizer"),
        row("wait", "write", 90, 100, purpose="optimizer"),
    ) == {"compute": 40, "optimizer": 34, "offload": 26}  # fmt: skip


def test_a_wait_for_disk_is_not_for_the_unknown() -> None:
    _, time = time_of(
        STEP,
        row("phase", "optimizer", 0, 100),
        row("copy", "read", 10, 20, "io.nvme.read"),
        row("wait", "read", 10, 20),
        row("wait", "wait", 50, 60),
    )
    assert (time.unbound.start.tolist(), time.unbound.end.tolist()) == ([50 * MS], [60 * MS])


def test_a_wait_by_corr_is_painted_with_what_that_lane_does_then() -> None:
    """The lane copies gradients to the host, steps there, copies weights back, and communicates; the wait is for the
    last copy, and goes on 2 ms after it."""
    assert budget(
        STEP,
        row("phase", "backward", 0, 30),
        row("phase", "optimizer", 30, 100),
        row("copy", "to_host", 25, 40, "offload.0"),
        row("phase", "optimizer", 40, 70, "offload.0"),
        row("phase", "forward", 70, 75, "offload.0"),
        comm(0, 75, 85, "comm.0", corr=8), comm(0, 80, 85, rank=1),
        row("copy", "to_device", 85, 98, "offload.0", corr=9),
        row("wait", "to_device", 35, 100, corr=9),
    ) == {"compute": 35, "optimizer": 5 + 30, "offload": 5 + 25}  # fmt: skip


def test_a_wait_by_corr_for_a_communication_is_as_if_it_had_its_number() -> None:
    assert budget(
        STEP,
        row("phase", "backward", 0, 100),
        comm(3, 10, 60, corr=5), comm(3, 40, 60, rank=1),
        row("wait", "all_reduce", 20, 70, corr=5),
    ) == {"compute": 50, "peer_wait": 20, "comm_exposed": 30}  # fmt: skip


def test_what_the_thread_copies_itself_is_offload() -> None:
    every = (
        STEP,
        row("phase", "forward", 0, 50),
        row("copy", "to_host", 10, 20, purpose="activation"),
        row("phase", "backward", 50, 90),
        row("copy", "to_device", 60, 65, "autograd", purpose="activation"),
        row("copy", "checkpoint_write", 92, 98, purpose="checkpoint"),
    )
    assert budget(*every) == {"compute": 75, "offload": 21, "other": 4}
    # Within a checkpoint it is part of that.
    saving = Intervals.union(np.array([91 * MS]), np.array([99 * MS]))
    rows, time = time_of(*every, outside_training={"checkpointing": saving})
    steps = step_budget({0: time}, completed_steps(rows))
    assert steps[["offload", "other", "checkpointing_ms"]].iloc[0].tolist() == [15, 10, 8]


# --- a device that ends the step ----------------------------------------------------------------


def kernel(number: int, launched: float, start: float, end: float, lane: str = "cuda.7", **more: Any) -> list[Any]:
    """A kernel, and its launch on the training thread."""
    what = {"kind": "kernel", "name": "gemm", **more}
    kind, name = what.pop("kind"), what.pop("name")
    return [
        row("launch", "launch", launched, launched + 0.01, corr=number),
        row(kind, name, start, end, lane, corr=number, **what),
    ]


AHEAD = [
    STEP,
    row("phase", "forward", 0, 10),
    row("phase", "backward", 10, 20),
    row("phase", "optimizer", 20, 22),
    *kernel(1, 1, 2, 30),
    *kernel(2, 11, 30, 60),
    comm(0, 50, 75, "cuda.20", corr=3), comm(0, 65, 75, rank=1),
    *kernel(4, 21, 75.02, 95),
]  # fmt: skip
"""The thread runs ahead; the optimizer's kernel waits on the device for the gradients."""


def test_a_stream_that_ends_the_step_is_the_critical_lane() -> None:
    assert budget(*AHEAD) == {
        # 0 to 2 and 95 to 100 the device has nothing to do: what the thread does then is labelled.
        "compute": 2 + 58, "peer_wait": 5, "comm_exposed": 10, "optimizer": 19.98, "other": 5 + 0.02,
    }  # fmt: skip


def test_a_thread_that_ends_the_step_is_the_critical_lane() -> None:
    """The same, with a thread that waits for the device and then works on."""
    synced = row("wait", "cudaStreamSynchronize", 22, 95.1, corr=4)
    assert budget(*AHEAD, synced, row("phase", "data", 95.1, 100)) == {
        "compute": 58, "optimizer": 2 + 19.98 + 0.1 + 0.02, "peer_wait": 5, "comm_exposed": 10, "data": 4.9,
    }  # fmt: skip


def test_a_gap_is_the_threads_where_it_launched_late() -> None:
    """The second kernel was launched at 70, after the communication had ended: the loop was loading."""
    assert budget(
        STEP,
        row("phase", "forward", 0, 10),
        row("phase", "data", 20, 65),
        row("phase", "forward", 65, 80),
        *kernel(1, 1, 5, 40),
        comm(0, 30, 60, "cuda.20"), comm(0, 50, 60, rank=1),
        *kernel(2, 70, 71, 100),
    ) == {"compute": 5 + 35 + 6 + 29, "data": 25}  # fmt: skip


def test_without_launches_a_gap_ends_with_what_it_waited_for() -> None:
    rows = [
        STEP,
        row("kernel", "gemm", 0, 40, "cuda.7"),
        row("copy", "memcpy", 35, 60, "cuda.9"),
        row("kernel", "gemm", 60.01, 80, "cuda.7"),
        row("copy", "memcpy", 75, 82, "cuda.9"),
        row("kernel", "gemm", 90, 100, "cuda.7"),
    ]
    assert budget(*rows) == {"compute": 69.99, "offload": 20, "other": 10.01}


def test_a_stream_that_communicates_last_ends_the_step() -> None:
    """What is gathered after the optimizer; what was gathered beside the computation cost nothing."""
    assert budget(
        STEP,
        row("phase", "forward", 0, 2),
        row("phase", "optimizer", 2, 4),
        *kernel(1, 1, 0, 60),
        *kernel(2, 3, 60, 70),
        comm(0, 10, 50, "cuda.20"), comm(0, 11, 50, rank=1),
        comm(1, 70, 100, "cuda.20"), comm(1, 90, 100, rank=1),
    ) == {"compute": 60, "optimizer": 10, "peer_wait": 20, "comm_exposed": 10}  # fmt: skip


def test_a_wait_row_of_a_stream_is_taken_at_its_word() -> None:
    assert budget(
        STEP,
        row("phase", "forward", 0, 2),
        row("kernel", "gemm", 0, 40, "cuda.7"),
        comm(0, 30, 60, "cuda.20"), comm(0, 50, 60, rank=1),
        row("wait", "all_reduce", 40, 60, "cuda.7", group="0", seq=0),
        row("kernel", "gemm", 70, 100, "cuda.7"),
    ) == {"compute": 70, "peer_wait": 10, "comm_exposed": 10, "other": 10}  # fmt: skip


def test_one_communication_of_the_computing_stream_itself() -> None:
    assert budget(
        STEP,
        row("kernel", "gemm", 0, 40, "cuda.7"),
        comm(0, 40, 60, "cuda.7"), comm(0, 55, 60, rank=1),
        row("kernel", "gemm", 60, 100, "cuda.7"),
    ) == {"compute": 80, "peer_wait": 15, "comm_exposed": 5}  # fmt: skip


def test_each_step_has_its_own_critical_lane() -> None:
    """The thread ends the first step, and the device, which works off what was launched, the second."""
    second = [row("step", "step", 100, 200), row("phase", "forward", 100, 110)]
    rows = [
        STEP,
        *kernel(1, 1, 2, 30),
        row("phase", "forward", 0, 20),
        row("phase", "data", 40, 100),
        *({**item, "step": 1} for item in (*second, *kernel(2, 101, 102, 190))),
    ]
    assert budget(*rows) == {"compute": 20, "data": 60, "other": 20}
    assert budget(*rows, step=1) == {"compute": 90, "other": 10}


# --- as the engine tells it ---------------------------------------------------------------------


def test_an_engine_that_waits_for_its_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = os.preadv

    def slowly(*args: Any) -> int:
        time.sleep(0.02)
        return read(*args)

    (tmp_path / "capture").mkdir()
    recorder = open_recorder("python", tmp_path / "capture")
    hooks, stop = Hooks(), dsprof_engine.watch(recorder, lambda: None)
    disk = Disk(tmp_path, AioConfig(), hooks)
    file = disk.open("a test")
    file.write(file.allocate(4096), aligned(4096), {"purpose": "optimizer"}).wait()
    monkeypatch.setattr(os, "preadv", slowly)
    with hooks.span("phase", "backward"):
        file.read(0, aligned(4096), {"purpose": "optimizer"}).wait()
    disk.close()
    stop()
    recorder.close()
    rows = trace_rows(read_capture(tmp_path / "capture"), 0, 0)
    waits = rows[(rows["kind"] == "wait") & (rows["name"] == "read")]
    begin, length = int(waits["start_ns"].iloc[0]), int(waits["dur_ns"].iloc[0])
    labelled = label_time(rows, match_collectives(rows), 0).before(np.array([begin, begin + length]))
    assert {part: int(np.diff(spent)[0]) for part, spent in labelled.items() if np.diff(spent)[0]} == {
        "offload": length
    }


def test_a_wait_without_a_number_is_for_what_was_issued_before_it() -> None:
    """The second read ends within the slack after the wait; it was issued only then."""
    _, time = time_of(
        STEP,
        row("phase", "optimizer", 0, 100),
        row("copy", "read", 10, 20, "io.nvme.read", issue_ns=9 * MS),
        row("wait", "read", 12, 20),
        row("copy", "read", 20.5, 21.5, "io.nvme.read", issue_ns=int(20.2 * MS)),
        row("wait", "read", 5, 6),
    )
    assert time.waits["lane_task"].tolist() == [-1, 0]


def test_a_wait_for_a_copy_that_was_not_captured_is_for_no_collective() -> None:
    _, time = time_of(
        STEP,
        row("phase", "optimizer", 0, 100),
        comm(0, 30, 51), comm(0, 31, 51, rank=1),
        row("wait", "read", 50, 50.5, corr=777),
    )  # fmt: skip
    assert time.waits["collective"].tolist() == [-1]
    assert time.unbound.start.tolist() == [50 * MS]
