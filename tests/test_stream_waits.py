"""Streams that are told to wait for an event of another one, as Kineto records it."""

from __future__ import annotations

from pathlib import Path

import kineto_traces as kt
import numpy as np
import pytest

from dsprof.analyzer.graph.chains import DEPENDS
from dsprof.analyzer.study import study
from dsprof.importers import import_trace


def told(corr: int, ts: float, stream: int, of: int, record: int) -> list[kt.Event]:
    """The call, and that of the event that it is about."""
    name = "Stream Wait Event"
    args = {"cuda_sync_kind": name, "stream": stream, "correlation": corr, "device": 0, "context": 1,
            "wait_on_stream": of, "wait_on_cuda_event_record_corr_id": record, "wait_on_cuda_event_id": 8}  # fmt: skip
    return [
        kt.call(record, ts - 4, 2, name="cudaEventRecord"),
        kt.call(corr, ts, 2, name="cudaStreamWaitEvent"),
        kt.complete("cuda_sync", name, ts + 1, 1, stream, **args),
    ]


def step(*more: kt.Event) -> list[kt.Event]:
    """Stream 7 computes from 60 to 160 and from 170 to 200; streams 20 and 21 from 160 on."""
    return [
        kt.note("ProfilerStep#3", 0, 400),
        kt.call(1, 10), kt.kernel("gemm", 1, 60, 100),
        kt.call(2, 40), kt.kernel("gemm", 2, 170, 30),
        kt.call(3, 50), kt.kernel("sum", 3, 160, 40, stream=20),
        kt.call(4, 56), kt.kernel("relu", 4, 160, 40, stream=21),
        *more,
    ]  # fmt: skip


def waits(folder: Path, events: list[kt.Event]) -> list[tuple[float, float]]:
    """Of each dependency between streams: when what it was for had ended, and who waited began, us."""
    found = study(import_trace(kt.write(folder, kt.as_kineto(events))))
    assert found.graph is not None
    assert found.checked is not None
    assert (found.checked.error, found.checked.contradicted) == (pytest.approx(0.0, abs=1e-4), 0.0)
    (steps,) = found.graph.templates
    structure, result = steps.structure, []
    for task, segment in structure.waits.tolist():
        if structure.tasks[task].kind == DEPENDS:
            result.append((1e3 * float(steps.ended[task, 0]), 1e3 * float(steps.began[segment, 0])))
    return np.round(result, 1).tolist() if result else []


def test_a_stream_waits_for_what_it_was_told_to_and_for_nothing_else(tmp_path: Path) -> None:
    """Stream 20 waits for the first kernel, after which the event was recorded; stream 21 begins as soon, but was told
    nothing."""
    assert len(waits(tmp_path / "untold", step())) == 2
    ((ended, began),) = waits(tmp_path / "told", step(*told(31, 34, 20, 7, 30)))
    assert (ended, began) == (160.0, 160.0)


def test_a_wait_that_was_over_in_time_is_an_edge_too(tmp_path: Path) -> None:
    """Stream 21 had to wait for the first kernel of stream 7, and was told so long before; its second kernel for the
    second one, which had ended."""
    later = [*told(41, 220, 21, 7, 40), kt.call(5, 240), kt.kernel("relu", 5, 260, 10, stream=21)]
    found = waits(tmp_path, step(*told(31, 34, 21, 7, 30), *later))
    assert found == [[160.0, 160.0], [200.0, 260.0]]


def test_a_wait_for_an_event_that_was_never_recorded_is_none(tmp_path: Path) -> None:
    events = [event for event in told(31, 34, 20, 7, 30) if event["name"] != "cudaEventRecord"]
    trace = import_trace(kt.write(tmp_path, kt.as_kineto(step(*events))))
    assert not (trace.read(0)["kind"] == "mark").any()
