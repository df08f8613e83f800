"""compute.throttle, compute.host-sync, what data.stall says of workers, and what is not judged without a collector."""

from __future__ import annotations

from typing import Any

import jsonpatch
import pytest
from device_rows import joined, kernels, readings, span_of, waits
from synthetic import Job, constant

from dsprof.analyzer import analyze
from dsprof.analyzer.analysis import Analysis
from dsprof.analyzer.finding import Finding
from dsprof.analyzer.rules.missing_collectors import EVERYTHING, NEEDED_FOR, NEEDED_TO_PASS, reasons
from dsprof.analyzer.rules.registry import all_rules
from dsprof.trace import Trace

FAST = {
    "sm_clock_mhz": 1965, "sm_clock_max_mhz": 1980, "utilization_percent": 99, "clock_reasons": 0, "power_w": 500,
    "power_limit_w": 700, "temperature_c": 60, "pcie_generation": 5, "pcie_generation_max": 5, "pcie_width": 16,
    "pcie_width_max": 16, "nvlinks": 18, "ecc_corrected": 0, "ecc_uncorrected": 0, "pcie_replays": 3,
    "nvlink_errors": 0,
}  # fmt: skip
HOT = {**FAST, "sm_clock_mhz": 1200, "clock_reasons": 0x60, "temperature_c": 91}


def job(**settings: Any) -> Job:
    return Job(**{"ranks": 3, "steps": 40, "forward": constant(20), "backward": constant(60), **settings})


def gpu(rank: int, model: str = "NVIDIA H100") -> dict[str, Any]:
    return {"fact": "gpu", "rank": rank, "index": rank, "name": model, "uuid": f"GPU-{rank}", "driver": "580.65"}


def watched(trace: Trace, *of_rank: dict[str, Any], facts: list[dict[str, Any]] | None = None) -> Trace:
    rows = [row for rank, told in enumerate(of_rank) for row in readings(trace, rank, **told)]
    return joined(trace, rows, [*(gpu(rank) for rank in range(len(of_rank))), *(facts or [])])


def throttles(analysis: Analysis) -> list[Finding]:
    return [finding for finding in analysis.findings if finding.code == "compute.throttle"]


def measured(finding: Finding) -> dict[str, Any]:
    return {item.metric: (item.value, item.expected) for item in finding.evidence}


# --- compute.throttle -----------------------------------------------------------------------------


@pytest.mark.plants("compute.throttle")
def test_one_that_is_too_hot_and_late_for_it() -> None:
    slow = job(forward=lambda rank, step: 50 if rank == 1 else 20)
    analysis = analyze(watched(slow.trace(), FAST, HOT, FAST))
    (finding,) = throttles(analysis)
    (late,) = [item for item in analysis.findings if item.code == "rank.straggler"]
    assert finding.title == (
        "GPU 1 of host (rank 1) runs at 1,200 MHz, 39 % below its peers: held down by heat (the driver lowers the "
        "clock) and heat (the hardware lowers the clock)"
    )
    assert finding.where.ranks == (1,)
    assert measured(finding) == {
        "SM clock at work, mean": (1200, 1965),
        "its maximum": (1980, None),
        "held down by heat (the driver lowers the clock)": (100.0, 0.0),
        "held down by heat (the hardware lowers the clock)": (100.0, 0.0),
        "temperature, highest": (91.0, None),
        "power, highest": (500.0, 700.0),
    }
    assert [fix.title for fix in finding.fixes] == [
        "GPU 1 of host: it is too hot: look at the air flow, the fans and its neighbours"
    ]
    assert finding.gain.ms == pytest.approx(late.gain.ms)
    assert (finding.severity, late.severity) == ("high", "high")
    assert late.fixes[0].title == f"see compute.throttle: {finding.title}"
    assert late.title.endswith(
        ": its GPU runs 39 % below the clock of its peers, held down by heat (the driver lowers the clock)"
    )
    assert measured(late)["cause"] == ("gpu-clock, probably", None)


def test_a_late_rank_of_another_device_is_another_matter() -> None:
    slow = job(forward=lambda rank, step: 50 if rank == 2 else 20)
    analysis = analyze(watched(slow.trace(), FAST, HOT, FAST))
    (finding,) = throttles(analysis)
    assert (finding.severity, finding.gain.ms, finding.where.ranks) == ("info", 0.0, (1,))
    (late,) = [item for item in analysis.findings if item.code == "rank.straggler"]
    assert not any("compute.throttle" in fix.title for fix in late.fixes)
    assert measured(late)["cause"][0].startswith("not known")


def test_all_at_their_power_limit() -> None:
    capped = {**FAST, "sm_clock_mhz": 1600, "clock_reasons": 0x4, "power_w": 699}
    (finding,) = throttles(analyze(watched(job().trace(), capped, capped, capped)))
    assert finding.title == (
        "GPU 0 of host runs at 1,600 of 1,980 MHz: held down by power limit; so are the devices of all ranks 0-2"
    )
    assert (finding.severity, finding.gain.ms) == ("info", 0.0)
    assert "nvidia-smi -i 0 -pl WATTS" in finding.fixes[0].title


@pytest.mark.parametrize(
    "told",
    [
        FAST,
        {**FAST, "sm_clock_mhz": 345, "clock_reasons": 0x1, "utilization_percent": 0},  # idle between two steps
        {**FAST, "sm_clock_mhz": 1410, "clock_reasons": 0x2},  # somebody has set it so
        {**FAST, "sm_clock_mhz": lambda n: 1200 if n == 20 else 1965, "clock_reasons": lambda n: 4 if n == 20 else 0},
        {**FAST, "clock_reasons": 0x4},  # at its limit, and as fast as it can be
        {**FAST, "pcie_generation": lambda n: 1 if n % 5 else 5},  # a link that nobody uses saves power
        {name: value for name, value in FAST.items() if "clock" in name},
    ],
    ids=["fast", "idle", "set", "once", "no slower", "link at rest", "tells little"],
)
def test_nothing_is_held_down(told: dict[str, Any]) -> None:
    analysis = analyze(watched(job().trace(), FAST, told, FAST))
    assert throttles(analysis) == []
    assert "compute.throttle" in analysis.passed


def test_readings_before_the_judged_steps_do_not_count() -> None:
    trace = job().trace()
    begin, end = span_of(trace, 1)
    early = (end - begin) // 8 // 100_000_000
    hot = {**FAST, "sm_clock_mhz": lambda n: 1200 if n < early else 1965, "clock_reasons": lambda n: 4 * (n < early)}
    assert throttles(analyze(watched(trace, FAST, hot, FAST))) == []


def test_links_and_errors() -> None:
    poor = {**FAST, "pcie_generation": 3, "pcie_width": 8, "nvlinks": 12}
    failing = {**FAST, "ecc_uncorrected": lambda n: n // 20, "pcie_replays": lambda n: 3 + n}
    titles = [finding.title for finding in throttles(analyze(watched(job().trace(), FAST, poor, failing)))]
    assert titles[0] == (
        "GPU 1 of host (rank 1) is connected by PCIe generation 3 of 5 and PCIe lanes 8 of 16 and 12 NVLinks of 18"
    )
    assert titles[1].startswith("GPU 2 of host (rank 2) counts ")
    assert "memory errors that could not be corrected" in titles[1]
    assert "PCIe transfers repeated" in titles[1]


def test_devices_of_another_kind_are_no_peers() -> None:
    trace = job().trace()
    small = {**FAST, "sm_clock_mhz": 1400, "sm_clock_max_mhz": 1410, "nvlinks": 0}
    rows = [row for rank, told in enumerate((FAST, FAST, small)) for row in readings(trace, rank, **told)]
    analysis = analyze(joined(trace, rows, [gpu(0), gpu(1), gpu(2, "NVIDIA L4")]))
    assert throttles(analysis) == []


def test_without_readings_it_is_not_judged() -> None:
    plain = analyze(job().trace())
    assert "compute.throttle" not in plain.passed
    assert "compute.throttle" not in plain.not_judged
    on_gpu = analyze(joined(job().trace(), readings(job().trace(), 0, x=0)[:0] or [_nothing()], [_device()]))
    assert on_gpu.not_judged["compute.throttle"] == "what the devices' clocks and links did was not captured"
    trace = job().trace()
    few = [row for rank in range(3) for row in readings(trace, rank, every_ms=1500, **FAST)]
    seldom = analyze(joined(trace, few, [gpu(rank) for rank in range(3)]))
    assert seldom.not_judged["compute.throttle"] == (
        "the judged steps are too short for 5 looks, one a second, at a device at work"
    )


def _nothing() -> dict[str, Any]:
    return {"rank": 0, "kind": "mark", "name": "nothing", "lane": "main", "thread": 7, "start_ns": 1, "dur_ns": 0}


def _device() -> dict[str, Any]:
    return {"fact": "device", "rank": 0, "type": "cuda"}


# --- compute.host-sync ----------------------------------------------------------------------------

SEEN = {"fact": "host_sync", "rank": 0, "operators": True}


def syncs(trace: Trace, rows: list[dict[str, Any]], *facts: dict[str, Any]) -> Analysis:
    return analyze(joined(trace, rows, [_device(), *(facts or (SEEN,))]))


@pytest.mark.plants("compute.host-sync")
def test_what_the_device_stands_idle_after_a_wait_is_the_bound() -> None:
    """A step of 90 ms: kernels until 40, a wait until 41, the next kernel at 47; and one that waits for nothing."""
    trace = job(ranks=1, data=constant(0), jitter=0.0).trace()
    rows = kernels(trace, 0, (1, 40), (47, 80)) + waits(trace, 0, 10, 31)
    rows += waits(trace, 0, 50, 0.5, "copy to device", "/opt/lib/python3.11/site-packages/trainer/loop.py:8")
    analysis = syncs(trace, rows)
    (finding,) = [item for item in analysis.findings if item.code == "compute.host-sync"]
    assert finding.title == (
        "the host waits for the device 2.00 times a step, 31.5 ms in all, most of it in item at train.py:31; the "
        "device then stands idle for 7.00 ms at most"
    )
    assert measured(finding) == {
        "waiting for the device a step, the rank that does most": (31.5, None),
        "such waits a step": (2.0, None),
        "device idle after them a step, at most": (7.0, 0.0),
        "item at train.py:31, 1.00 a step": (31.0, None),
        "copy to device at trainer/loop.py:8, 1.00 a step": (0.5, None),
    }
    assert (finding.gain.ms, finding.gain.low, finding.gain.high) == pytest.approx((7.0, 0.0, 7.0))
    assert (finding.gain.method, finding.severity) == ("upper bound", "info")
    assert finding.fixes[0].patch == ({"file": "/home/me/train.py", "line": 31, "argument": "", "value": ""},)
    assert finding.fixes[1].title.startswith("copy to device at trainer/loop.py:8: pin_memory=True")
    assert "compute.host-sync" in analysis.passed


@pytest.mark.parametrize(
    ("content", "then"),
    [
        ({"bf16": {"enabled": True}}, {"bf16": {"enabled": True, "check_grad_overflow": False}}),
        ({"bf16": {"enabled": True, "check_grad_overflow": True}},
         {"bf16": {"enabled": True, "check_grad_overflow": False}}),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": False}},
         {"fp16": {"enabled": False}, "bf16": {"enabled": True, "check_grad_overflow": False}}),
        ({"bf16": {"enabled": True, "check_grad_overflow": False}}, None),
        ({"bf16": {"enabled": False}}, None),
        ({"bf16": {"enabled": True}, "zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, None),
        ({"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}, None),
        ({}, None),
    ],
)  # fmt: skip
def test_what_the_engine_waits_for_in_its_step_is_no_line_of_the_script(
    content: dict[str, Any], then: dict[str, Any] | None
) -> None:
    trace = job(ranks=1, data=constant(0), jitter=0.0).trace()
    config = {"fact": "config", "rank": 0, "dialect": "dsprof", "path": None, "content": content}
    first = trace.rows[trace.rows["step"] == trace.rows["step"].min()].set_index("name")
    step_ns = int(first.loc["step", "start_ns"])
    begins, lasts = (
        (int(first.loc["optimizer", "start_ns"]) - step_ns) / 1e6,
        int(first.loc["optimizer", "dur_ns"]) / 1e6,
    )
    end = begins + lasts
    rows = kernels(trace, 0, (1, begins), (end + 5, end + 8))
    rows += waits(trace, 0, begins + 0.5, lasts - 1) + waits(trace, 0, begins + lasts - 0.4, 0.2, "Event.synchronize")
    (finding,) = [item for item in syncs(trace, rows, SEEN, config).findings if item.code == "compute.host-sync"]
    assert [jsonpatch.apply_patch(content, list(fix.patch)) for fix in finding.fixes] == (
        [] if then is None else [then]
    )
    others = waits(trace, 0, begins + 0.5, lasts - 1, "item", "/home/me/optimizer.py:11")  # of a script's own optimizer
    for told in (syncs(trace, rows), syncs(trace, rows[: len(rows) // 2] + others, SEEN, config)):
        (own,) = [item for item in told.findings if item.code == "compute.host-sync"]
        assert {fix.patch[0]["argument"] for fix in own.fixes} == {""}


def test_kernels_of_a_few_steps_and_whole_phases() -> None:
    """What is idle is of the steps whose kernels were traced; what is measured of a device's phases are no kernels."""
    trace = job(ranks=1, data=constant(0), jitter=0.0).trace()
    rows = waits(trace, 0, 10, 31)
    phases = [{**row, "source": "measured"} for row in kernels(trace, 0, (1, 80))]
    steps = trace.rows.loc[trace.rows["kind"] == "step", "start_ns"].sort_values()
    traced = [row for row in kernels(trace, 0, (1, 40), (47, 80)) if row["start_ns"] > steps.iloc[-4]]
    (finding,) = [item for item in syncs(trace, rows + phases + traced).findings if item.code == "compute.host-sync"]
    assert measured(finding)["device idle after them a step, at most"] == (7.0, 0.0)
    unseen = syncs(trace, rows + phases)
    assert "kernels were not recorded" in unseen.not_judged["compute.host-sync"]


def test_kernels_of_steps_that_are_no_ordinary_ones() -> None:
    """As those that `--deep` looks at: how long and how often it waits is of the others."""
    trace = job(ranks=1, data=constant(0), jitter=0.0).trace()
    rows = waits(trace, 0, 10, 31)
    steps = trace.rows.loc[trace.rows["kind"] == "step", "start_ns"].sort_values()
    traced = [row for row in kernels(trace, 0, (1, 40), (47, 80)) if row["start_ns"] < steps.iloc[1]]
    (finding,) = [item for item in syncs(trace, rows + traced).findings if item.code == "compute.host-sync"]
    assert finding.title.endswith("the device then stands idle for 7.00 ms at most, in the steps that were traced")
    assert measured(finding)["such waits a step"] == (1.0, None)
    assert measured(finding)["item at train.py:31, 1.00 a step"] == (31.0, None)


def test_a_wait_now_and_then_is_divided_over_all_steps() -> None:
    trace = job(ranks=1, data=constant(0), jitter=0.0).trace()
    rows = kernels(trace, 0, (1, 40), (47, 80)) + waits(trace, 0, 10, 31)[::5]
    (finding,) = [item for item in syncs(trace, rows).findings if item.code == "compute.host-sync"]
    assert finding.gain.ms == pytest.approx(7 / 5)


def test_waits_of_an_imported_trace() -> None:
    trace = job(ranks=1, data=constant(0), jitter=0.0).trace()
    rows = kernels(trace, 0, (1, 40), (47, 80))
    for name in ("cudaStreamSynchronize", "all_reduce"):
        rows += [
            {**row, "kind": "wait", "name": name, "purpose": None, "site": None, "source": "imported"}
            for row in waits(trace, 0, 10, 31)
        ]
    analysis = analyze(joined(trace, rows, [_device()]))
    (finding,) = [item for item in analysis.findings if item.code == "compute.host-sync"]
    assert finding.title == (
        "the host waits for the device 1.00 times a step, 31.0 ms in all, most of it in cudaStreamSynchronize at an "
        "unknown line; the device then stands idle for 7.00 ms at most"
    )


def test_a_wait_that_was_watched_for_outside_of_steps_hides_none_of_an_imported_trace() -> None:
    """Both tell of the same waits, in the steps that are judged."""
    trace = job(ranks=1, data=constant(0), jitter=0.0).trace()
    rows = kernels(trace, 0, (1, 40), (47, 80))
    told = waits(trace, 0, 10, 31)
    rows += [
        {**row, "kind": "wait", "name": "cudaStreamSynchronize", "purpose": None, "site": None, "source": "imported"}
        for row in told
    ]
    before = {**told[0], "start_ns": told[0]["start_ns"] - 100_000_000, "purpose": "synchronize"}

    def said(*more: dict[str, Any]) -> str:
        (finding,) = [one for one in syncs(trace, [*rows, *more]).findings if one.code == "compute.host-sync"]
        return finding.title.partition("most of it in ")[2]

    assert said(before).startswith("cudaStreamSynchronize at an unknown line; the device then stands idle for 7.00 ms")
    assert said(*told).startswith("item at train.py:31; the device then stands idle for 7.00 ms")


def test_without_kernels_it_is_told_and_not_judged() -> None:
    trace = job().trace()
    rows = [row for rank in range(3) for row in waits(trace, rank, 10, 20 + 10 * (rank == 2))]
    rows += waits(trace, 0, 40, 50, lane="thread.9")  # no training thread
    analysis = syncs(trace, rows)
    (finding,) = [item for item in analysis.findings if item.code == "compute.host-sync"]
    assert (finding.gain.ms, finding.severity) == (0.0, "info")
    assert analysis.not_judged["compute.host-sync"] == (
        "the host waits 30.0 ms of each step for the device, and kernels were not recorded: whether the device then "
        "stands idle is not known"
    )
    assert "compute.host-sync" not in analysis.passed


def test_a_line_that_is_not_known() -> None:
    trace = job(ranks=1).trace()
    (finding,) = [
        item
        for item in syncs(trace, waits(trace, 0, 10, 20, "torch.cuda.synchronize", None)).findings
        if item.code == "compute.host-sync"
    ]
    assert "most of it in torch.cuda.synchronize at an unknown line" in finding.title
    assert finding.fixes[0].patch == ({"file": None, "line": None, "argument": "", "value": ""},)


def test_waits_that_were_not_watched_for() -> None:
    trace = job(ranks=1).trace()
    assert "compute.host-sync" not in analyze(trace).not_judged
    unseen = analyze(joined(trace, [_nothing()], [_device()]))
    assert unseen.not_judged["compute.host-sync"] == "what the host waits for the device in was not captured"
    none = syncs(trace, [_nothing()])
    assert "compute.host-sync" in none.passed
    half = syncs(trace, [_nothing()], {**SEEN, "operators": False})
    assert half.not_judged["compute.host-sync"] == (
        "without the native helper only synchronize is seen, not .item() and copies"
    )


# --- data.stall -----------------------------------------------------------------------------------


def test_what_workers_do_is_evidence() -> None:
    loader = {"fact": "dataloader", "rank": 0, "number": 1, "num_workers": 2, "site": "/home/me/train.py:12"}
    trace = job(ranks=1, data=constant(60), loader=1, facts=[loader]).trace()
    begin, end = span_of(trace, 0)
    workers = {"workers.alive": 4, "workers.busy": 1, "workers.on_disk": 3, "workers.in.folio_wait": 3}
    rows = [
        {"rank": 0, "kind": "gauge", "name": name, "lane": "main", "thread": 9, "start_ns": when, "dur_ns": 0,
         "value": float(value)}
        for when in range(begin, end, 200_000_000)
        for name, value in workers.items()
    ]  # fmt: skip
    (stall,) = [item for item in analyze(joined(trace, rows, [])).findings if item.code == "data.stall"]
    told = measured(stall)
    assert told["of the workers, computing when looked at"] == (25.0, None)
    assert told["of the workers, waiting for a disk, most in folio_wait"] == (75.0, None)
    (plain,) = [item for item in analyze(trace).findings if item.code == "data.stall"]
    assert not any("of the workers" in metric for metric in measured(plain))
    assert plain.gain == stall.gain


# --- without a collector --------------------------------------------------------------------------


def test_what_does_not_follow_without_a_collector() -> None:
    trace = job(gc=lambda rank, step: 30 if rank == 1 and step % 3 == 0 else 0).trace()
    assert "pause.gc" in [item.code for item in analyze(trace).findings if item.severity != "info"]
    told = [{"fact": "without", "rank": 0, "collectors": ["host", "nvml"]}]
    off = analyze(joined(job(buckets=(64 << 10,)).trace(), [_nothing()], told))
    assert "compute.throttle" not in off.not_judged  # there is no GPU that it could be about
    off = analyze(joined(job(buckets=(64 << 10,)).trace(), [_nothing()], [*told, gpu(0)]))
    assert off.not_judged["pause.gc"] == "the collector host was switched off (--without)"
    assert off.not_judged["data.stall"] == off.not_judged["pause.stop"] == off.not_judged["pause.gc"]
    assert off.not_judged["compute.throttle"] == "the collector nvml was switched off (--without)"
    assert not {"pause.gc", "data.stall", "pause.stop", "compute.throttle"} & {
        *off.passed, *(item.code for item in off.findings)
    }  # fmt: skip
    assert off.verdict.status == "inconclusive"
    assert "rank.straggler" in off.passed


def test_what_every_gain_rests_on() -> None:
    trace = job(forward=lambda rank, step: 50 if rank == 1 else 20).trace()
    off = analyze(joined(trace, [_nothing()], [{"fact": "without", "rank": 0, "collectors": ["phases", "modules"]}]))
    assert off.not_judged["rank.straggler"] == "the collectors modules, phases were switched off (--without)"
    assert [item.code for item in off.findings if item.is_problem] == []
    assert off.verdict.status == "inconclusive"


def test_what_collectors_are_needed_for_are_codes_of_rules() -> None:
    named = {code for codes in (*NEEDED_FOR.values(), *NEEDED_TO_PASS.values()) for code in codes}
    assert named - {EVERYTHING} <= {rule.code for rule in all_rules()}
    assert reasons({}, ["pause.gc"]) == {}
    assert reasons({"without": [{"collectors": ["flops"]}]}, ["pause.gc"]) == {}
