"""offload.exposed, on made-up steps of a rank that reads what it needs from a disk."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from dsprof.analyzer import analyze
from dsprof.analyzer.analysis import Analysis
from dsprof.analyzer.ask import ask
from dsprof.analyzer.finding import Finding
from dsprof.analyzer.study import study
from dsprof.knobs.predicted import turned
from dsprof.run import RankInfo, RunInfo
from dsprof.schema import COLUMNS
from dsprof.trace import Trace

MS = 1_000_000
MiB, GiB = 1 << 20, 1 << 30
STEPS = 60
BYTES = 64 * MiB
"""Of each of two reads in a step."""


def row(step: int, kind: str, name: str, start: float, end: float, **columns: Any) -> dict[str, Any]:
    return {"rank": 0, "restart": 0, "step": step, "kind": kind, "name": name, "lane": "main", "source": "measured",
            "start_ns": int(start * MS), "dur_ns": int((end - start) * MS), "ended": True, **columns}  # fmt: skip


def reading(
    read_ms: float,
    capacity: int | None = None,
    zero: dict[str, Any] | None = None,
    early: bool = False,
    update: float = 10,
) -> Trace:
    """A step computes for 40 ms, then issues two reads and needs them, one after the other, and updates for
    `update` ms.

    early: they are issued when the step begins. capacity: of the host, of which 1 GiB is in use.
    """
    rows: list[dict[str, Any]] = []
    begin = 1.0
    for step in range(STEPS):
        forward, backward = begin + 15, begin + 40
        issue = begin if early else backward
        over = issue + 2 * read_ms
        on = max(over, backward)
        rows += [
            row(step, "step", "step", begin, on + update),
            row(step, "phase", "forward", begin, forward, grad=True),
            row(step, "phase", "backward", forward, backward),
            row(step, "phase", "optimizer", backward, on + update),
            row(step, "wait", "read", backward + 0.02, max(on, backward + 0.02), corr=2 * step + 1),
        ]
        for number, start in enumerate((issue, issue + read_ms)):
            rows.append(
                row(step, "copy", "read", start, start + read_ms, lane="io.nvme.read", purpose="optimizer", bytes=BYTES,
                    issue_ns=int(issue * MS) + number, corr=2 * step + number)
            )  # fmt: skip
        begin = on + update
        if capacity is not None:
            named = {"resident": GiB, "resident_peak": GiB, "capacity": capacity}
            rows += [
                row(step + 1, "mem", name, begin, begin, lane="memory.host", bytes=number)
                for name, number in named.items()
            ]
    table = pd.DataFrame(rows).reindex(columns=list(COLUMNS)).astype(COLUMNS)
    facts: list[dict[str, Any]] = [{"fact": "process", "rank": 0, "cores": 8, "threads": 1}]
    if zero is not None:
        content = {"zero_optimization": {"stage": 1, "offload_optimizer": zero}}
        facts.append({"fact": "config", "rank": 0, "dialect": "engine", "path": "/c.json", "site": None,
                      "framework": None, "content": content})  # fmt: skip
    rank = RankInfo(0, 0, "host", 100, "rank00000.0.host.100", True, STEPS - 1, 0, 0, 0, 0, True)
    info = RunInfo(id="job", name="job", command=["dsprof", "run", "train.py"], world_size=1, ranks=[rank], facts=facts)
    return Trace.of(info, table.sort_values(["start_ns"], kind="stable", ignore_index=True))


def of(analysis: Analysis, code: str = "offload.exposed") -> Finding | None:
    return next((finding for finding in analysis.findings if finding.code == code), None)


NVME = {"device": "nvme", "nvme_path": "/disk"}


@pytest.mark.plants("offload.exposed")
def test_memory_would_hold_what_is_read_in_every_step() -> None:
    analysis = analyze(reading(10, 8 * GiB, NVME))
    first = analysis.findings[0]
    assert first.code == "offload.exposed"
    assert first.gain.ms == pytest.approx(20, rel=0.02)
    assert first.title.endswith(
        "(optimizer) is there, though memory would hold it: 128 MiB of 5.80 GiB that are surely free"
    )
    assert first.fixes[0].patch == (
        {"op": "add", "path": "/zero_optimization/offload_optimizer/device", "value": "none"},
    )
    assert of(analysis, "memory.headroom") is None


def test_memory_is_not_said_to_hold_states_that_are_never_brought() -> None:
    """The host's optimizer updates them where they are, and only new parameters are copied: a sixth of it all."""
    finding = of(analyze(reading(10, 8 * GiB, {"device": "cpu"})))
    assert finding is not None
    assert "memory would hold it" not in finding.title
    assert not any("device" in fix.title for fix in finding.fixes)


def test_reads_that_would_fit_beside_the_computation() -> None:
    """Memory is short; the lane is busy for 20 of 70 ms, and nobody stands still where it reads ahead."""
    analysis = analyze(reading(10, GiB + 128 * MiB, NVME))
    first = analysis.findings[0]
    assert first.code == "offload.exposed"
    assert first.gain.ms == pytest.approx(20, rel=0.02)
    assert first.gain.low <= 10 < first.gain.high < 25
    assert [fix.patch[0]["path"].rpartition("/")[2] for fix in first.fixes] == [
        "pipeline_read", "pipeline_write", "buffer_count",
    ]  # fmt: skip


def test_a_disk_that_is_busy_all_the_time_is_not_said_to_be_hidden() -> None:
    analysis = analyze(reading(45, GiB + 128 * MiB, NVME, early=True, update=0.05))
    assert of(analysis) is None
    assert "io.nvme.read copies for" in analysis.not_judged["offload.exposed"]


def test_reads_that_are_hidden_already_are_no_finding() -> None:
    analysis = analyze(reading(15, 8 * GiB, NVME, early=True))
    assert of(analysis) is None
    assert "offload.exposed" in analysis.passed


def test_offloading_whose_copies_nobody_recorded_is_not_judged() -> None:
    trace = reading(10, 8 * GiB, NVME)
    rows = trace.rows
    unseen = Trace.of(trace.run, rows[~rows["kind"].isin(["copy", "wait"])].reset_index(drop=True))
    assert "was not recorded" in analyze(unseen).not_judged["offload.exposed"]


def test_a_job_that_offloads_nothing_is_not_concerned() -> None:
    trace = reading(10)
    rows = trace.rows
    plain = Trace.of(trace.run, rows[~rows["kind"].isin(["copy", "wait"])].reset_index(drop=True))
    analysis = analyze(plain)
    assert "offload.exposed" not in {*analysis.passed, *analysis.not_judged}


@pytest.mark.parametrize(
    ("key", "value"),
    [("zero_optimization.offload_optimizer.device", "none"), ("zero_optimization.offload_optimizer", None)],
)
def test_what_is_no_longer_offloaded_is_not_waited_for(key: str, value: Any) -> None:
    """Two reads of 10 ms, and 50 of work."""
    (row,) = ask(study(reading(10, 8 * GiB, NVME)), [[turned(key, value, "RUN")]]).rows
    assert row.gain is not None, row.reason
    assert row.gain.ms == pytest.approx(20, rel=0.02)
    assert row.gain.low <= 20 <= row.gain.high


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("zero_optimization.offload_optimizer.device", "cpu", "offloads to nvme, and how fast cpu is was not measured"),
        ("zero_optimization.offload_param.device", "cpu", "is not told by a run that offloads nothing of it"),
        ("zero_optimization.offload_param", {"device": "nvme", "nvme_path": "/disk"}, "offloads nothing of it"),
    ],
)
def test_offloading_to_what_a_run_does_not_use_is_not_told(key: str, value: Any, why: str) -> None:
    (row,) = ask(study(reading(10, 8 * GiB, NVME)), [[turned(key, value, "RUN")]]).rows
    assert row.gain is None
    assert why in row.reason
