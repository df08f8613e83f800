"""What a device's streams did, from rows of events; what dsprof tells of a device is in test_sleeping_device.py."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from dsprof.schema import BACKWARD_DONE, DEVICE_CLOCK, HOST_SYNC
from dsprof.trace.derive import derive
from dsprof.trace.derive.device_clock import DeviceClock, align_clock, clock_of
from dsprof.trace.derive.rows import completed

MS = 1_000_000


def rows_of(*rows: dict[str, object]) -> pd.DataFrame:
    common = {"thread": 1, "source": "measured", "ended": True, "dur_ns": pd.NA, "device": False}
    return pd.DataFrame([{**common, **row} for row in rows])


def sample(device_ns: int, early: int, late: int) -> dict[str, object]:
    return {"kind": "gauge", "name": DEVICE_CLOCK, "start_ns": early, "dur_ns": late - early, "value": float(device_ns)}


def clock(told: pd.DataFrame) -> DeviceClock:
    return clock_of(completed(told))


def test_no_sample_contradicts_how_far_the_clocks_are_apart() -> None:
    told = rows_of(*(sample(at * MS, at * MS + 900, at * MS + 1100) for at in range(4)),
                   *(sample(at * MS, at * MS - 50_000, at * MS + 1040) for at in range(12)))  # fmt: skip
    offset, doubt = clock(told).offset(np.array([0.0, 3.0]) * MS)
    assert offset.tolist() == [970.0] * 2
    assert doubt == pytest.approx([70.0] * 2)


def test_clocks_that_drift_apart_are_followed() -> None:
    second = 1_000_000_000
    at = np.arange(0, 200, 5) * second
    drift = 5000 + at * 30e-6  # 30 ppm
    told = rows_of(*(sample(int(t), int(t + d) - 30_000, int(t + d) + 30_000) for t, d in zip(at, drift, strict=True)))
    assert np.abs(clock(told).offset(at.astype(float))[0] - drift).max() < 1_000


def test_a_clock_that_is_set_anew_is_another_one() -> None:
    """Recording stops for two minutes; nobody waits for what lies between."""
    first, second = ([sample(at * MS, at * MS + by - 5_000, at * MS + by + 5_000) for at in range(since, since + 4)]
                     for since, by in ((0, 50 * MS), (120_000, 0)))  # fmt: skip
    offset, _ = clock(rows_of(*first, *second)).offset(np.array([-5.0, 0.0, 2.0, 60_000.0, 120_001.0, 1e12]) * MS)
    assert offset[[1, 2, 4]] == pytest.approx([50.0 * MS, 50.0 * MS, 0.0], abs=1)
    assert np.isfinite(offset).all()


def phase(at: int, end: int, device_at: int, device_end: int) -> list[dict[str, object]]:
    """A phase that the host launches from `at` to `end`, and the device runs by its own clock."""
    return [
        {"kind": "phase", "name": "forward", "start_ns": at, "dur_ns": end - at},
        {"kind": "kernel", "name": "forward", "lane": "cuda.0", "device": True, "issue_ns": at,
         "start_ns": device_at, "dur_ns": device_end - device_at},
    ]  # fmt: skip


def wait(at: int, end: int, call: str = "item") -> dict[str, object]:
    return {"kind": "mark", "name": HOST_SYNC, "purpose": call, "start_ns": at, "dur_ns": end - at}


def moved_by(*rows: dict[str, object]) -> int:
    """What `align_clock` adds to the times of a device, whose only sample was taken 2 ms too late."""
    aligned = align_clock(completed(rows_of(sample(100 * MS, 100 * MS, 102 * MS), *rows)))
    of_device = aligned[aligned["device"]]
    asked = [row["start_ns"] for row in rows if row.get("device")]
    return int((of_device["start_ns"].to_numpy(np.int64) - np.array(asked, np.int64)).max())


def test_a_late_sample_is_made_good_by_a_launch_and_a_wait() -> None:
    """The device's clock is right. It begins 10 us after the launch; who waits for it goes on 30 us after its end."""
    began = phase(100 * MS, 105 * MS, 100 * MS + 10_000, 130 * MS)
    assert moved_by(*began) == MS  # a launch forbids only a clock that is early
    assert moved_by(*began, wait(106 * MS, 130 * MS + 30_000)) == pytest.approx(15_000, abs=1_500)  # drift
    early = phase(100 * MS, 105 * MS, 100 * MS - 40_000, 130 * MS - 50_000)
    assert moved_by(*early, wait(106 * MS, 130 * MS + 10_000)) == pytest.approx(50_000, abs=1_500)


def test_a_call_that_waited_for_less_is_no_bound() -> None:
    began = phase(100 * MS, 105 * MS, 100 * MS + 10_000, 130 * MS)
    assert moved_by(*began, wait(106 * MS, 107 * MS, "copy to device")) == MS
    assert moved_by(*began, wait(106 * MS, 107 * MS)) == MS  # of another stream, it seems
    assert moved_by(*began, wait(104 * MS, 107 * MS)) == MS  # the phase was not launched to its end


def test_calls_that_waited_for_nothing_do_no_harm_in_a_long_capture() -> None:
    """Ten minutes, a phase of 30 ms each second and a sample each tenth; calls that come back 0.5 to 20 ms before the
    device was through, as if they had waited for it."""
    rows: list[dict[str, object]] = []
    for second in range(600):
        at = second * 1000 * MS
        rows += phase(at, at + MS, at + 10_000, at + 30 * MS)
        early = (second % 40 + 1) * MS // 2
        rows.append(wait(at + 2 * MS, at + 30 * MS - early))
        if second % 10 == 0:
            rows.append(sample(at + 30 * MS, at + 30 * MS - 5_000, at + 30 * MS + 5_000))
    found = clock(rows_of(*rows)).offset(np.arange(600.0) * 1000 * MS)[0]
    assert np.abs(found).max() < 300_000  # what the clocks may drift apart in the time between two samples


def test_a_streams_wait_bears_the_number_of_the_hosts_and_the_reducers_are_derived() -> None:
    comm = {"kind": "comm", "group": "0", "dtype": "float32", "device": True}
    stream = {"lane": "cuda.0", "device": True}
    rows = rows_of(
        {"kind": "phase", "name": "forward", "start_ns": 0, "dur_ns": 10},
        {"kind": "phase", "name": "backward", "start_ns": 10, "dur_ns": 20},
        {"kind": "phase", "name": "optimizer", "start_ns": 40, "dur_ns": 5},
        {"kind": "wait", "name": "all_gather", "start_ns": 5, "dur_ns": 1, "group": "1", "seq": 7},
        {"kind": "kernel", "name": "forward", "start_ns": 100, "dur_ns": 100, "issue_ns": 0, **stream},
        {"kind": "wait", "name": "wait", "start_ns": 150, "dur_ns": 10, "issue_ns": 5, **stream},
        {"kind": "kernel", "name": "backward", "start_ns": 200, "dur_ns": 400, "issue_ns": 10, **stream},
        {"kind": "kernel", "name": BACKWARD_DONE, "start_ns": 500, "dur_ns": 0, "issue_ns": 28, **stream},
        {"kind": "kernel", "name": "optimizer", "start_ns": 600, "dur_ns": 50, "issue_ns": 40, **stream},
        {"name": "all_reduce", "start_ns": 300, "dur_ns": 100, "issue_ns": 15, "seq": 0, **comm},
        {"name": "all_reduce", "start_ns": 450, "dur_ns": 120, "issue_ns": 25, "seq": 1, **comm},
    )
    derived = derive(rows, {"ddp", "device"})
    waits = derived[(derived["kind"] == "wait") & (derived["lane"] == "cuda.0")]
    told = waits[["name", "group", "seq", "start_ns", "dur_ns", "issue_ns", "source"]].values.tolist()
    assert told == [
        ["all_gather", "1", 7, 150, 10, 5, "measured"],
        ["all_reduce", "0", 1, 500, 70, 10, "derived"],
    ]
    assert waits["step"].tolist() == [0, 0]
    kernels = derived[derived["kind"] == "kernel"]
    assert kernels["name"].tolist() == ["forward", "backward", "optimizer"]
    assert kernels["step"].tolist() == [0, 0, 0]  # by when they were issued
    assert derived.loc[derived["kind"] == "comm", "purpose"].tolist() == ["gradient", "gradient"]
    # It ends when the device has done it, and not when the host has launched it.
    assert derived.loc[derived["kind"] == "step", ["start_ns", "dur_ns"]].values.tolist() == [[0, 650]]
    # The host did not wait for what its device communicates.
    assert not ((derived["kind"] == "wait") & (derived["lane"] == "main") & (derived["source"] == "derived")).any()


def test_a_step_whose_phases_end_was_not_seen_is_none_and_one_without_any_is_the_hosts() -> None:
    """Three steps that the host launches in 10 each; of the second the device's optimizer is not over; the third was
    replayed from a graph."""
    rows: list[dict[str, object]] = [
        {"kind": "phase", "name": name, "start_ns": step + at, "dur_ns": 3}
        for step in (0, 20, 500)
        for at, name in ((0, "forward"), (4, "backward"), (8, "optimizer"))
    ]
    stream = {"kind": "kernel", "lane": "cuda.0", "device": True}
    rows += [
        {"name": "backward", "start_ns": 50, "dur_ns": 40, "issue_ns": 4, **stream},
        {"name": "optimizer", "start_ns": 90, "dur_ns": 10, "issue_ns": 8, **stream},
        {"name": "backward", "start_ns": 100, "dur_ns": 40, "issue_ns": 24, **stream},
        {"name": "optimizer", "start_ns": 28, "dur_ns": pd.NA, "issue_ns": 28, "ended": False, **stream},
    ]
    derived = derive(rows_of(*rows), {"device"})
    steps = derived[derived["kind"] == "step"]
    ends = (steps["start_ns"] + steps["dur_ns"]).tolist()
    assert list(zip(steps["step"].tolist(), ends, strict=True)) == [(0, 100), (2, 511)]
