"""The benchmark beside HTA: which events it repeats, and when the two tools' times are unequal."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from beside_hta import launched, unequal

TIMES = {"idle_time": 10.0, "compute_time": 20.0, "non_compute_time": 5.0, "kernel_time": 35.0}


def event(category: str, correlation: int | None) -> str:
    args = "" if correlation is None else f', "args": {{"correlation": {correlation}}}'
    return f'{{"ph": "X", "cat": "{category}", "name": "n"{args}}}'


def test_what_ran_on_the_device_without_a_launch_is_left_out() -> None:
    events = [
        event("cuda_runtime", 1),
        event("kernel", 1),
        event("kernel", 2),
        event("gpu_memcpy", 3),
        event("cpu_op", None),
    ]
    assert launched(events) == [events[0], events[1], events[4]]


@pytest.mark.parametrize(
    ("ours", "said"),
    [
        ({"rank": 0, "compute_time": 21.0}, []),
        ({"rank": 0, "compute_time": 22.0}, ["rank 0: compute_time of 20 us by HTA, 22 us by dsprof"]),
        ({"rank": 1}, ["rank 0: only HTA has it", "rank 1: only dsprof has it"]),
    ],
)
def test_times_that_are_unequal_beyond_rounding_are_told(ours: dict[str, float], said: list[str]) -> None:
    expected = {"rank": 0, **{f"{name}(us)": value for name, value in TIMES.items()}}
    given = {"rank": ours["rank"], **{f"{name}_us": ours.get(name, value) for name, value in TIMES.items()}}
    assert unequal([expected], [given]) == said
