"""Ranks that all wait for cores: said with what has them, never called healthy, and no stage is accused of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from jobs import profile
from made_up_pipeline import MadeUpPipeline
from synthetic import Job, constant

from dsprof import gauges
from dsprof.analyzer import analyze
from dsprof.analyzer.analysis import Analysis
from dsprof.analyzer.finding import Finding
from dsprof.collectors.system import proc
from dsprof.schema import COLUMNS
from dsprof.trace import Trace

JOBS = Path(__file__).parent / "verdict_jobs"
CODE = "compute.no-core"
CATEGORIES = [name for name, dtype in COLUMNS.items() if dtype == "category"]


def starved(analysis: Analysis) -> Finding:
    (found,) = [finding for finding in analysis.findings if finding.code == CODE]
    return found


def job(seen: bool = True, **changes: Any) -> Job:
    """Two ranks that wait for a core for a fifth of their work, on a host of two cores. seen: all quotas are"""
    usual: dict[str, Any] = {"steps": 24, "core_wait": 0.2, "cpu_share": 0.2, "cores": 2, "host_cores": 2}
    made = Job(**(usual | changes))
    made.gauges = {gauges.THROTTLED: constant(0), **made.gauges}
    made.facts += [{"fact": "cpu_cgroups", "rank": rank, "whole": seen} for rank in range(made.ranks)]
    return made


def busy(percent: float) -> dict[str, Any]:
    """The host's cores are busy for so much of the time, by the gauge of it."""
    return {gauges.CPU_BUSY: lambda rank, step: 0.0 if step else percent * 1e3}


@pytest.mark.plants("compute.no-core")
def test_other_processes_on_all_cores() -> None:
    analysis = analyze(job(gauges=busy(98)).trace())
    assert analysis.verdict.status == "bottleneck"
    found = starved(analysis)
    assert analysis.findings[0] is found
    assert found.where.ranks == (0, 1)
    # A fifth of 121 ms (loading, forward and backward) of a step of 131.
    assert found.title == (
        "ranks 0-1 wait 24.2 ms of each 131 ms step for a core, as other processes use 1.57 of the 2 cores, and the "
        "job 0.39"
    )
    assert found.gain.ms == pytest.approx(24.2, rel=0.05)
    assert found.gain.low < 0.6 * found.gain.ms
    assert found.gain.high > 1.5 * found.gain.ms
    assert [fix.title for fix in found.fixes] == [
        "see what else runs on the host (`top`), and stop it or move it; or give the job cores of its own: taskset, "
        "cpuset.cpus of a cgroup, --cpuset-cpus of Docker, --exclusive of Slurm"
    ]


def test_a_quota_that_is_not_seen_may_be_the_reason_beside_busy_cores() -> None:
    """As that of a pod on a busy host, from inside its container."""
    analysis = analyze(job(seen=False, gauges=busy(98)).trace())
    found = starved(analysis)
    assert not found.is_problem
    assert analysis.verdict.status == "inconclusive"
    assert "for a core, probably as other processes use 1.57 of the 2 cores" in found.title
    assert [item.value for item in found.evidence if item.metric == "cause"] == ["other-processes, probably"]
    assert any("nr_throttled" in fix.title for fix in found.fixes)


def test_more_ranks_and_threads_than_cores() -> None:
    found = starved(analyze(job(ranks=4, cpu_share=0.3, beside=1.0, threads=2).trace()))
    assert found.is_problem
    assert found.title.endswith("for a core, as the job itself fills the 2 cores that it may use")
    threads, more = found.fixes
    assert threads.title == (
        "OMP_NUM_THREADS=1, or torch.set_num_threads(1): 4 ranks with 2 threads each compute on 2 cores"
    )
    assert threads.patch == ({"name": "OMP_NUM_THREADS", "value": "1"},)
    assert more.title.startswith("more cores for the job, or fewer ranks on this host: 4 ranks on 2 cores")


@pytest.mark.parametrize(
    ("host_cores", "measured", "cause"),
    [(4, busy(99), "other-processes"), (64, {}, "not known")],
    ids=["seen", "on a part of a host, where it is not seen"],
)
def test_another_process_beside_a_rank_on_each_core(host_cores: int, measured: dict[str, Any], cause: str) -> None:
    """It uses a core of four; four ranks fill the rest, and want no more than four."""
    crowded = job(ranks=4, cores=4, host_cores=host_cores, cpu_share=0.83, core_wait=0.2, gauges=measured)
    found = starved(analyze(crowded.trace()))
    assert [item.value for item in found.evidence if item.metric == "cause"] == [cause]


def test_of_threads_that_hardly_compute_none_is_spared() -> None:
    found = starved(analyze(job(ranks=4, cpu_share=0.5, beside=0.05, threads=2).trace()))
    assert [fix.kind for fix in found.fixes] == ["code"]


def test_a_quota_that_stops_all_ranks_alike() -> None:
    limits = [{"fact": "cpu_limit", "rank": rank, "cores": 0.5, "cgroup": "/c"} for rank in range(2)]
    found = starved(analyze(job(gauges={gauges.THROTTLED: constant(30)}, facts=limits).trace()))
    assert found.is_problem
    assert found.title.endswith("for a core, as the CPU quota of their container (0.5 cores) stops them")
    assert found.fixes[0].title.startswith("raise the CPU limit of the container: resources.limits.cpu")


def test_a_quota_of_several_ranks_is_counted_once() -> None:
    """Its cgroup tells 28 ms of four ranks, each of which it stopped for 7 of 24."""
    limits = [{"fact": "cpu_limit", "rank": rank, "cores": 3.0, "cgroup": "/c"} for rank in range(4)]
    crowded = {"ranks": 4, "cores": 4, "host_cores": 4, "facts": limits}
    found = starved(analyze(job(gauges=busy(98) | {gauges.THROTTLED: constant(28)}, **crowded).trace()))
    assert "as other processes use" in found.title
    (quota,) = [item.value for item in found.evidence if item.metric == "of that, stopped by a CPU quota"]
    assert quota == pytest.approx(29, abs=1)


def test_a_quota_that_is_a_part_of_the_reason() -> None:
    """7 of 24 ms: other processes have the cores for the rest, and what these gain is less sure."""
    found = starved(analyze(job(gauges=busy(98) | {gauges.THROTTLED: constant(7)}).trace()))
    assert "as other processes use" in found.title
    assert found.fixes[-1].title.startswith("raise the CPU limit of the container")
    (quota,) = [item.value for item in found.evidence if item.metric == "of that, stopped by a CPU quota"]
    assert quota == pytest.approx(29, abs=1)
    assert found.gain.low < starved(analyze(job(gauges=busy(98)).trace())).gain.low


def test_processes_that_are_stopped_though_the_kernel_says_they_want_no_core() -> None:
    found = starved(analyze(job(core_wait=0.0, gauges={gauges.STOPPED: constant(30)}).trace()))
    assert not found.is_problem
    assert "as their processes are stopped, by what was not seen" in found.title
    assert any("nr_throttled" in fix.title for fix in found.fixes)


@pytest.mark.parametrize("measured", [{}, busy(60)])
def test_what_has_the_cores_is_not_guessed(measured: dict[str, Any]) -> None:
    """Nobody saw what has them: then what cores gain is not sure, and the job is not healthy."""
    analysis = analyze(job(gauges=measured).trace())
    assert not starved(analysis).is_problem
    assert analysis.verdict.status == "inconclusive"
    assert "18 % is waiting for a core, and what has theirs was not seen" in analysis.verdict.headline
    assert "`dsprof run` it where cores are free" in analysis.verdict.headline


def test_of_a_part_of_a_host_nothing_is_said_of_the_others() -> None:
    found = starved(analyze(job(host_cores=64, gauges=busy(98)).trace()))
    assert not found.is_problem
    assert found.title.endswith("and what has theirs was not seen")


@pytest.mark.parametrize("core_wait", [0.0, 0.04])
def test_little_waiting_is_healthy(core_wait: float) -> None:
    analysis = analyze(job(core_wait=core_wait, gauges=busy(98)).trace())
    assert analysis.verdict.status == "healthy"
    assert CODE in analysis.passed


@pytest.mark.parametrize(("wakes_ms", "told"), [(0.09, False), (0.3, True)])
def test_waking_up_in_a_short_step_is_no_want_of_cores(wakes_ms: float, told: bool) -> None:
    """Each thread waits some tens of microseconds whenever it wakes, on an idle host, too: 7 % of a step of 1.3 ms."""
    short: dict[str, Any] = {name: constant(ms) for name, ms in
                             {"data": 0.02, "forward": 0.3, "backward": 0.7, "optimizer": 0.1}.items()}  # fmt: skip
    analysis = analyze(
        job(core_wait=0.0, crowded=constant(wakes_ms), latency_ms=0.05, ms_per_mib=0.02, **short).trace()
    )
    assert (CODE in [finding.code for finding in analysis.findings]) == told


def test_that_one_rank_has_no_core_is_a_straggler() -> None:
    late = job(core_wait=0.0, forward=lambda rank, step: 70.0 if rank else 40.0,
               crowded=lambda rank, step: 30.0 if rank else 0.0, gauges=busy(98))  # fmt: skip
    analysis = analyze(late.trace())
    assert analysis.findings[0].code == "rank.straggler"
    assert CODE in analysis.passed


def test_a_capture_that_does_not_tell() -> None:
    trace = job().trace()
    rows = trace.rows[trace.rows["name"] != "core_wait_seconds"]
    analysis = analyze(Trace.of(trace.run, rows))
    assert analysis.not_judged[CODE] == "how long threads wait for a core was not measured"


# --- stages of a pipeline --------------------------------------------------------------------------


def waiting(pipeline: MadeUpPipeline, wait_ms: dict[int, float]) -> Trace:
    """The same with the gauge, by which each rank waits so long for a core in a step."""
    trace = pipeline.trace()
    steps = trace.rows[trace.rows["kind"] == "step"]
    ends = steps["start_ns"].astype("int64") + steps["dur_ns"].astype("int64")
    spent = [(step + 1) * wait_ms[rank] / 1e3 for rank, step in zip(steps["rank"], steps["step"], strict=True)]
    read = steps.assign(kind="gauge", name="core_wait_seconds", start_ns=ends, dur_ns=0, value=spent)
    tables = [table.astype(dict.fromkeys(CATEGORIES, object)) for table in (trace.rows, read)]
    return Trace.of(trace.run, pd.concat(tables, ignore_index=True))


SLOW_BY_WAITING = MadeUpPipeline(
    stages=2, microbatches=16, forward=lambda stage, step: 6.5 if stage else 5.0,
    backward=lambda stage, step: 13.0 if stage else 10.0,
)  # fmt: skip
"""Stage 1 takes 16 * 4.5 = 72 ms a step longer."""


def test_a_stage_that_waits_for_a_core_has_not_too_many_layers() -> None:
    accused = analyze(waiting(SLOW_BY_WAITING, {0: 0.0, 1: 0.0}))
    assert "pipeline.imbalance" in [finding.code for finding in accused.findings if finding.is_problem]
    analysis = analyze(waiting(SLOW_BY_WAITING, {0: 0.0, 1: 72.0}))
    assert "pipeline.imbalance" not in [finding.code for finding in analysis.findings if finding.is_problem]


def test_a_stage_with_too_many_layers_is_told_without_its_waiting() -> None:
    uneven = SLOW_BY_WAITING.with_(forward=lambda stage, step: 11.5 if stage else 5.0)
    waited = analyze(waiting(uneven, {0: 0.0, 1: 72.0}))
    (found,) = [finding for finding in waited.findings if finding.code == "pipeline.imbalance"]
    # 5 + 10 ms against 10 + 10, which is what it computes itself.
    assert "stage 1 computes 1.3" in found.title
    assert any(item.metric == "beside that, this stage waits for a core" for item in found.evidence)


def test_messages_of_ranks_without_cores_are_not_called_slow() -> None:
    slow_messages = MadeUpPipeline(link=lambda source, target: 4.0)
    found = analyze(waiting(slow_messages, dict.fromkeys(range(3), 0.0)))
    assert "pipeline.stall" in [finding.code for finding in found.findings]
    starving = analyze(waiting(slow_messages, dict.fromkeys(range(3), 40.0)))
    assert "pipeline.stall" not in [finding.code for finding in starving.findings]
    assert starving.not_judged["pipeline.stall"].startswith("ranks wait for a core for ")


# --- quotas that are not seen ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "first", "whole"),
    [
        ("0::/job\n", True, True),
        ("4:cpu,cpuacct:/job\n0::/\n", True, True),
        ("0::/job\n", False, False),  # a container's namespace
        ("0::/docker/3f\n", True, False),  # of which only the container's own is mounted
        ("4:memory:/job\n", True, False),  # no cgroup of CPUs
    ],
)
def test_whether_all_cgroups_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: str, first: bool, whole: bool
) -> None:
    self = tmp_path / "self"
    (self / "ns").mkdir(parents=True)
    (self / "ns" / "cgroup").touch()
    (self / "cgroup").write_text(lines)
    for folder in ("job", "cpu/job"):
        (tmp_path / "cgroup" / folder).mkdir(parents=True)
    number = (self / "ns" / "cgroup").stat().st_ino
    monkeypatch.setattr(proc, "FIRST_CGROUP_NAMESPACE", number if first else number + 1)
    assert proc.sees_every_cgroup(proc.CPU, tmp_path, tmp_path / "cgroup") is whole


# --- a real job ------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores are chosen by Linux's affinity")
def test_two_ranks_beside_another_process_on_their_core(tmp_path: Path) -> None:
    """Each rank computes 6 ms a step, on the core that an endless loop wants, too."""
    core = min(os.sched_getaffinity(0))
    spin = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-S", "-c", spin, str(core)]) as competitor:
        try:
            finished = profile(tmp_path, JOBS / "spin.py", "--core", str(core), "--steps", "40", flags=("--no-report",))
        finally:
            competitor.kill()
    assert finished.status == 0, finished.stderr
    assert finished.starved
    assert CODE not in finished.above_info  # for tests that are about something else
    analysis = finished.analysis()
    assert starved(analysis).where.ranks == (0, 1)
    assert analysis.verdict.status in ("bottleneck", "inconclusive")
    assert "for a core" in analysis.verdict.headline
    told = {name: fact["whole"] for fact in analysis.run.facts if (name := fact["fact"]) == "cpu_cgroups"}
    assert told == {"cpu_cgroups": proc.sees_every_cgroup(proc.CPU)}
