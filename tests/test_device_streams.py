"""What is said of devices whose kernels were traced: HTA's numbers, lateness, exposed time, findings."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import kineto_traces as kt
import numpy as np
import pandas as pd
import pytest

from dsprof.analyzer import analyze
from dsprof.analyzer.analysis import Analysis
from dsprof.analyzer.device import Devices, DeviceTime, StreamIdle
from dsprof.analyzer.device.stream_time import _steps
from dsprof.analyzer.rules.compute.device_kernels import _fewer_launches_of_the_optimizer
from dsprof.analyzer.study import Study
from dsprof.importers import import_trace
from dsprof.reports import html, plots, terminal


@pytest.fixture(scope="module")
def analysis(tmp_path_factory: pytest.TempPathFactory) -> Analysis:
    return analyze(import_trace(kt.two_ranks(tmp_path_factory.mktemp("traces"), args=kt.COLLECTIVE)))


def devices(analysis: Analysis) -> Devices:
    assert analysis.device is not None
    return analysis.device


def of(analysis: Analysis, rank: int) -> DeviceTime:
    return devices(analysis).ranks[rank]


def test_breakdown_and_overlap(analysis: Analysis) -> None:
    first, second = of(analysis, 0), of(analysis, 1)
    assert (first.kernel_time_ns, first.idle_ns, first.compute_ns, first.non_compute_ns) == (
        800_000, 350_000, 350_000, 100_000,
    )  # fmt: skip
    assert dict(first.types_ns) == {
        "COMPUTATION": 260_000, "COMMUNICATION": 100_000, "COMPUTATION overlapping COMMUNICATION": 90_000,
    }  # fmt: skip
    assert (first.communication_ns, first.overlap_ns) == (190_000, 90_000)
    assert first.to_dict()["comp_comm_overlap_pctg"] == 47.37
    assert dict(second.types_ns) == {"COMPUTATION": 350_000, "COMMUNICATION": 50_000}
    assert second.idle_ns == 400_000


def test_gaps_of_streams_by_their_cause(analysis: Analysis) -> None:
    """50, 100 and 300 us of stream 7, each launched after what was before it had ended."""
    assert of(analysis, 0).streams == (StreamIdle("20", 0, 0, 0), StreamIdle("7", 450_000, 0, 0))
    assert of(analysis, 0).delay_us == 30


@pytest.mark.parametrize(
    ("launched", "gap", "expected"),
    [(30, 29, (0, 29_000, 0)), (30, 30, (0, 0, 30_000)), (51, 10, (10_000, 0, 0)), (50, 10, (0, 10_000, 0))],
)
def test_kernel_wait_is_a_short_gap_that_was_launched_before(
    tmp_path: Path, launched: int, gap: int, expected: tuple[int, int, int]
) -> None:
    events = [kt.call(1, 5), kt.kernel("a", 1, 10, 40), kt.call(2, launched, 1), kt.kernel("b", 2, 50 + gap, 5)]
    (idle,) = of(analyze(import_trace(kt.write(tmp_path, kt.as_kineto(events)))), 0).streams
    assert (idle.host_wait_ns, idle.kernel_wait_ns, idle.other_ns) == expected


def test_what_the_device_waits_for_its_host_in_a_step(analysis: Analysis) -> None:
    """Of 350 us in which it does nothing 250 had the next kernel not launched, and the host went on launching; in the
    rest it had been launched, too late to be there in time, but for 30 us of a launch that took longer than they do."""
    (step,) = of(analysis, 0).steps.to_dict("records")
    assert (step["step"], step["idle_ms"], step["launching_ms"], step["data_ms"]) == (3, 0.35, pytest.approx(0.32), 0)


def test_a_host_that_stands_in_a_collective_is_not_slow_to_launch() -> None:
    """Between two kernels, at 10 and at 100, it waits for its peers from 20 to 80, in backward. It launches at 98; of
    the 2 ms that the kernel takes to begin, a launch is the reason for 30 us."""
    rows = pd.DataFrame(
        {
            "kind": ["step", "phase", "wait"], "name": ["step", "backward", "all_reduce"], "lane": ["main"] * 3,
            "step": [0] * 3, "start_ns": [0, 0, 20_000_000], "dur_ns": [110_000_000, 110_000_000, 60_000_000],
        }
    )  # fmt: skip
    start, end = np.array([0, 100_000_000]), np.array([10_000_000, 110_000_000])
    for waits, launching_ms in ((0, 88.03), (1, 28.03)):
        (step,) = _steps(rows[: 2 + waits], start, end, np.array([0, 98_000_000])).to_dict("records")
        assert (step["idle_ms"], step["launching_ms"]) == (90.0, launching_ms)


def test_launches_of_the_optimizer_are_told_apart() -> None:
    """Between two kernels, at 10 and at 100, which was launched at 98, the host is in the optimizer from 40 on."""
    rows = pd.DataFrame(
        {
            "kind": ["step", "phase", "phase"], "name": ["step", "backward", "optimizer"], "lane": ["main"] * 3,
            "step": [0] * 3, "start_ns": [0, 0, 40_000_000], "dur_ns": [110_000_000, 40_000_000, 70_000_000],
        }
    )  # fmt: skip
    start, end = np.array([0, 100_000_000]), np.array([10_000_000, 110_000_000])
    (step,) = _steps(rows, start, end, np.array([0, 98_000_000])).to_dict("records")
    assert (step["launching_ms"], step["in_optimizer_ms"]) == (88.03, 58.03)


@pytest.mark.parametrize(
    ("told", "title"),
    [
        ([], "a fused optimizer (fused=True, or foreach=True): one launch for many parameters"),
        ([("AdamW", None, 292)], "AdamW(..., fused=True): one launch for many of its 292 parameters"),
        ([("SGD", "foreach", 10)], "SGD(..., fused=True): one launch for many of its 10 parameters"),
        ([("AdamW", "fused", 292)], None),
        ([("Lion", None, 292)], None),
        ([("AdamW", "fused", 3), ("Adam", "foreach", 90)], "Adam(..., fused=True): one launch for many of its 90 parame"
         "ters"),
    ],
)  # fmt: skip
def test_an_optimizer_of_many_launches_is_to_be_fused(
    told: list[tuple[str, str | None, int]], title: str | None
) -> None:
    facts = [
        {"class": kind, "implementation": implementation, "parameters": parameters}
        for kind, implementation, parameters in told
    ]
    fix = _fewer_launches_of_the_optimizer(cast(Study, SimpleNamespace(facts={"optimizer": facts})))
    assert (fix and fix.title) == title


def test_who_was_late_and_what_of_it_was_exposed(analysis: Analysis) -> None:
    """Rank 0 comes at 410, computes until 500, and waits for rank 1, which comes at 550; the transfer ends at 600."""
    waits = devices(analysis).waits
    assert waits[["rank", "late_rank", "peer_ms", "saved_ms", "transfer_ms"]].to_numpy().tolist() == [
        [0, 1, 0.05, 0.05, 0.05], [1, 1, 0, 0, 0.05],
    ]  # fmt: skip
    assert devices(analysis).late().to_numpy().tolist() == [[1, 1, 0.025]]


def test_bandwidth_counts_from_the_last_arrival(analysis: Analysis) -> None:
    """4,000 bytes in 50 us."""
    (found,) = devices(analysis).bandwidths
    assert (found.name, found.group, found.ranks, found.count, found.bytes, found.at_least) == (
        "all_reduce", "0", 2, 1, 4000, False,
    )  # fmt: skip
    assert (found.algbw_gbps, found.busbw_gbps) == (pytest.approx(0.08), pytest.approx(0.08))


def test_a_rank_that_is_missing_makes_the_bandwidth_a_bound(tmp_path: Path) -> None:
    path = kt.write(tmp_path, kt.as_kineto(kt.training(args=kt.COLLECTIVE)))
    (found,) = devices(analyze(import_trace(path))).bandwidths
    assert found.at_least
    assert found.algbw_gbps == pytest.approx(4000 / 190_000)


def test_findings_are_ranked_and_say_that_one_step_was_traced(analysis: Analysis) -> None:
    assert [(found.code, found.severity, round(found.gain.ms, 6)) for found in analysis.findings] == [
        ("compute.launch-bound", "high", 0.32), ("rank.straggler", "medium", 0.05), ("comm.exposed", "info", 0.0),
    ]  # fmt: skip
    assert analysis.verdict.status == "bottleneck"
    assert "waits for its host between kernels for 32 % of the step, in the one step tr" in analysis.verdict.headline
    straggler = analysis.findings[1]
    assert straggler.where.ranks == (1,)
    assert "rank 1 comes late to most collectives (1 of 1)" in straggler.title
    assert "rank.straggler" not in analysis.not_judged
    assert "carry gradients" in analysis.not_judged["comm.exposed"]


def test_a_late_begin_of_the_first_traced_step_is_no_lateness_of_the_ranks(tmp_path: Path) -> None:
    """Of the 50 us that rank 0 stands still rank 1's step began 20 later: nobody knows what was before. The heat map
    and the line of the rank say the same number as the finding."""
    for rank, late in enumerate((0, 140)):
        events = kt.training(late_us=late, args=kt.COLLECTIVE)
        for event in events:
            if rank and event["name"].startswith("ProfilerStep"):
                event["ts"], event["dur"] = event["ts"] + 20, event["dur"] - 20
        kt.write(tmp_path, kt.as_kineto(events), f"rank{rank}.json")
    analysis = analyze(import_trace(tmp_path))
    straggler = next(found for found in analysis.findings if found.code == "rank.straggler")
    assert (straggler.where.ranks, straggler.gain.ms) == ((1,), pytest.approx(0.03))
    told = {item.metric: item.value for item in straggler.evidence}
    assert told["not counted: its step 3, the first traced, began later than any other's by"] == 0.02
    assert analysis.delays is not None
    assert analysis.delays.round(6).to_numpy().tolist() == [[0], [0.03]]
    cells = plots.heatmap(analysis.steps, analysis.delays).data[0]
    assert cells.z.round(2).tolist() == pytest.approx(np.float32([[0], [0.03]]))
    out = io.StringIO()
    terminal.render(analysis, out, width=100)
    assert "   cost   costs 30.0 us a step (3.0 %)" in out.getvalue()
    assert "<strong>Costs 30.0\xa0us a step (3.0\xa0%)</strong>" in html.render(analysis)
    assert "rank 1  0.00 ms          others wait for it 0.03 ms" in out.getvalue()


def test_the_budget_sums_to_the_step(analysis: Analysis) -> None:
    """The gap that ends at 800 is for the kernel's launch at 790, which the collective had nothing to do with."""
    assert analysis.step_ms is not None
    assert analysis.step_ms.mean == 1.0
    assert sum(analysis.budget.values()) == pytest.approx(1.0)
    assert analysis.budget["peer_wait"] == 0


def test_a_gap_that_ends_with_a_collective_was_for_it(tmp_path: Path) -> None:
    """The next kernel begins at 605 and was launched at 595; from 500 to 600 the collective was all there was. The
    device goes on after the thread, so its stream is what the step is followed along."""
    for rank, late in enumerate((0, 140)):
        events = kt.training(late_us=late, adam=605)
        events[-1]["dur"] = 350
        kt.write(tmp_path, kt.as_kineto(events), f"rank{rank}.json")
    analysis = analyze(import_trace(tmp_path))
    of_first = analysis.budget_by_rank.loc[0]
    assert (of_first["peer_wait"], of_first["comm_exposed"]) == (pytest.approx(0.05), pytest.approx(0.05))
    assert sum(analysis.budget.values()) == pytest.approx(1.0)


def busy(ranks: int, folder: Path) -> Path:
    """Six steps in which the device is busy all the time and launches come long before."""
    events: list[kt.Event] = []
    for number in range(6):
        base = 1000 * (1 + number)
        events += [kt.note(f"ProfilerStep#{number}", base, 1000), kt.op("aten::linear", base + 1, 900)]
        for part in range(10):
            corr = 100 * number + part + 1
            events += [kt.call(corr, base + part - 50, 1), kt.kernel("gemm", corr, base + 100 * part, 100)]
    for rank in range(ranks):
        kt.write(folder, kt.as_kineto(events), f"rank{rank}.json")
    return folder


def test_a_busy_device_has_no_finding_and_is_not_called_healthy(tmp_path: Path) -> None:
    analysis = analyze(import_trace(busy(1, tmp_path)))
    assert [found for found in analysis.findings if found.is_problem] == []
    assert "compute.launch-bound" in analysis.passed
    assert analysis.verdict.status == "inconclusive"
    assert "the device computes 100 % of the time" in analysis.verdict.headline


def test_without_kernels_there_is_no_device(tmp_path: Path) -> None:
    events = [kt.note("ProfilerStep#0", 0, 100), kt.op("aten::linear", 1, 90)]
    analysis = analyze(import_trace(kt.write(tmp_path, kt.as_kineto(events))))
    assert analysis.device is None
    assert "device" not in analysis.to_dict()
    assert "compute.launch-bound" not in {*analysis.passed, *analysis.not_judged}
