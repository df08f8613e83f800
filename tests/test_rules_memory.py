"""memory.fragmentation and memory.oom-risk, on histories that are made to fragment and on one that is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import allocations
import pytest
from allocations import Device, MiB, OutOfMemory

from dsprof.analyzer import analyze
from dsprof.analyzer.allocator import record
from dsprof.analyzer.analysis import Analysis
from dsprof.analyzer.finding import Finding, Where
from dsprof.analyzer.rules.memory import fragmentation
from dsprof.importers import import_trace

BASIS = "(the allocator twin's number; such numbers held on an H100)"


def analysis_of(device: Device, folder: Path) -> Analysis:
    return analyze(import_trace(device.write(folder / "snapshot.pickle")))


def found(code: str, analysis: Analysis) -> Finding:
    (finding,) = [one for one in analysis.findings if one.code == code]
    return finding


def measured(finding: Finding) -> dict[str, Any]:
    return {item.metric: item.value for item in finding.evidence}


def test_one_block_that_is_kept_in_each_segment(tmp_path: Path) -> None:
    device = Device()
    allocations.pinned(device)
    analysis = analysis_of(device, tmp_path)
    finding = found("memory.fragmentation", analysis)
    assert finding.severity == "high"
    assert finding.title == (
        "1.09 GiB of 2.15 GiB reserved (51 %) lie free between blocks in use, most of it beside what train.py:20 keeps"
    )
    assert analysis.verdict.status == "bottleneck"
    assert analysis.verdict.headline == finding.title
    told = measured(finding)
    assert told["reserved at the peak"] == 2200 * MiB
    assert told["free then, between blocks in use"] == 1120 * MiB
    assert told["kept by /home/me/train.py:20"] == 1120 * MiB
    assert told["asked for the last of it"] == "/home/me/train.py:30"
    setting, code = finding.fixes
    assert setting.patch == ({"name": "PYTORCH_CUDA_ALLOC_CONF", "value": "expandable_segments:True"},)
    assert "1.21 GiB reserved at the peak instead of 2.15 GiB" in setting.title
    assert setting.title.endswith(BASIS)
    assert code.patch == ({"file": "/home/me/train.py", "line": 20, "argument": "", "value": ""},)


@pytest.mark.plants("memory.fragmentation")
def test_blocks_smaller_than_any_page_are_kept_where_no_setting_helps_much(tmp_path: Path) -> None:
    device = Device()
    allocations.scattered(device)
    finding = found("memory.fragmentation", analysis_of(device, tmp_path))
    assert finding.title.startswith("720 MiB of 1.37 GiB reserved (51 %)")
    assert measured(finding)["kept by /home/me/train.py:20"] == 720 * MiB
    assert finding.fixes[-1].patch[0]["line"] == 20


def test_a_sequence_that_grows(tmp_path: Path) -> None:
    device = Device()
    allocations.growing(device)
    finding = found("memory.fragmentation", analysis_of(device, tmp_path))
    assert finding.severity == "low", "the allocator gives it back by itself when it has to"
    assert finding.title == (
        "7.09 GiB of 8.11 GiB reserved (88 %) are cached segments of sizes that no longer come, the last asked for at "
        "train.py:50"
    )
    (setting,) = finding.fixes
    assert setting.patch[0]["value"] == "expandable_segments:True"
    assert "1.02 GiB reserved at the peak instead of 8.11 GiB" in setting.title


def test_a_sequence_that_grows_on_a_full_device(tmp_path: Path) -> None:
    device = Device(device_bytes=3072 * MiB)
    allocations.growing(device)
    finding = found("memory.fragmentation", analysis_of(device, tmp_path))
    assert finding.severity == "medium"
    assert measured(finding)["times the cache was given back for want of memory"] == 3
    assert "the cache given back for want of memory 0 times instead of 3" in finding.fixes[0].title


@pytest.mark.parametrize(
    ("capacity", "stranded", "severity"),
    [(None, 51.0, "high"), (2300, 51.0, "high"), (2300, 7.0, "medium"), (4000, 51.0, "low"), (80_000, 51.0, "info")],
)
def test_what_is_lost_matters_as_the_device_is_short(
    tmp_path: Path, capacity: int | None, stranded: float, severity: str
) -> None:
    device = Device()
    allocations.pinned(device)  # reserves 2200 MiB
    memory = import_trace(device.write(tmp_path / "snapshot.pickle")).memory[0]
    recording = record(memory, 0, device.settings)
    assert fragmentation._severity(recording, stranded, True, capacity and capacity * MiB) == severity


def test_ranks_that_need_the_same_change_share_a_finding(tmp_path: Path) -> None:
    device = Device()
    allocations.pinned(device)
    finding = found("memory.fragmentation", analysis_of(device, tmp_path))
    evidence = tuple(replace(item, value=2 * item.value) if item.unit == "bytes" else item for item in finding.evidence)
    worse = replace(finding, evidence=evidence, where=Where(ranks=(3,)))
    other = replace(finding, fixes=finding.fixes[:1], where=Where(ranks=(5,)))
    joined = fragmentation._joined([finding, worse, other])
    assert joined == [replace(worse, where=Where(ranks=(0, 3))), other]


@pytest.mark.parametrize("seed", range(3))
def test_blocks_of_very_different_sizes_and_lives(tmp_path: Path, seed: int) -> None:
    device = Device()
    allocations.mixed(device, seed=seed)
    finding = found("memory.fragmentation", analysis_of(device, tmp_path))
    assert finding.severity in ("medium", "high")
    assert "beside what train.py:70 keeps" in finding.title
    assert finding.fixes[0].kind == "env"
    assert finding.fixes[0].title.endswith(BASIS)


def test_the_same_in_every_step_is_no_fragmentation(tmp_path: Path) -> None:
    device = Device()
    allocations.steady(device)
    analysis = analysis_of(device, tmp_path)
    assert "memory.fragmentation" in analysis.passed
    assert not analysis.findings
    assert analysis.verdict.status == "inconclusive"
    assert "fragmentation costs next to nothing" in analysis.verdict.headline


def test_out_of_memory_names_who_held_it_and_the_setting_under_which_it_fits(tmp_path: Path) -> None:
    device = Device(device_bytes=1900 * MiB)
    with pytest.raises(OutOfMemory):
        allocations.pinned(device)
    analysis = analysis_of(device, tmp_path)
    finding = found("memory.oom-risk", analysis)
    assert finding.severity == "high"
    assert finding.title == "out of memory at train.py:30: 50.0 MiB more, with 780 MiB in use"
    assert measured(finding) == {
        "asked for": 50 * MiB, "in use then": 780 * MiB, "the device had for this process": 1900 * MiB,
        "held by /home/me/train.py:30 (14 blocks)": 700 * MiB, "held by /home/me/train.py:20 (20 blocks)": 80 * MiB,
    }  # fmt: skip
    assert "out of memory 0 times instead of 1 as far as the recording goes" in finding.fixes[0].title
    assert found("memory.fragmentation", analysis).severity == "high"


def test_out_of_memory_of_a_job_that_is_too_large_offers_no_setting(tmp_path: Path) -> None:
    device = Device(device_bytes=300 * MiB)
    device.line = 8
    for _ in range(6):
        device.alloc(48 * MiB)
    with pytest.raises(OutOfMemory):
        device.alloc(48 * MiB)
    analysis = analysis_of(device, tmp_path)
    finding = found("memory.oom-risk", analysis)
    assert [fix.kind for fix in finding.fixes] == ["code"]
    assert finding.fixes[0].title.startswith("train.py:8 holds 288 MiB, 100 % of all: a smaller micro-batch")


def test_other_options_of_the_job_are_kept(tmp_path: Path) -> None:
    device = Device()
    allocations.pinned(device)
    told = device.snapshot()
    told["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"] = (
        "pinned_num_register_threads:4,roundup_power2_divisions:[256:1,>:1],max_split_size_mb:999"
    )
    device.snapshot = lambda: told  # type: ignore[method-assign]
    finding = found("memory.fragmentation", analysis_of(device, tmp_path))
    assert finding.fixes[0].patch[0]["value"] == "pinned_num_register_threads:4,expandable_segments:True"


def late(device: Device) -> None:
    """What fragments, before anything is recorded."""
    allocations.pinned(device)
    device.events.clear()
    device.alloc(50 * MiB)


def strange(device: Device) -> None:
    """Two blocks of one size that are each where torch would have put the other."""
    allocations.steady(device)
    last = device.events[-15:]
    one, other = last[0]["addr"], last[2]["addr"]
    for event in last:
        event["addr"] = {one: other, other: one}.get(event["addr"], event["addr"])


@pytest.mark.parametrize(
    ("program", "why"), [(late, "came about before its history"), (strange, "the allocator twin does not do what")]
)
def test_what_the_twin_cannot_tell_is_not_judged(tmp_path: Path, program: Callable[[Device], None], why: str) -> None:
    device = Device()
    program(device)
    analysis = analysis_of(device, tmp_path)
    assert why in analysis.not_judged["memory.fragmentation"]
    assert why in analysis.verdict.headline
    assert analysis.verdict.status == "inconclusive"


def test_a_history_that_is_too_long_is_not_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fragmentation, "MOST_EVENTS", 10)
    device = Device()
    allocations.pinned(device)
    assert "longer than 10" in analysis_of(device, tmp_path).not_judged["memory.fragmentation"]


def test_a_setting_that_is_hardly_better_is_not_named() -> None:
    """Of two that are about as good, the first that is tried."""
    outcome = fragmentation.Outcome(fragmentation.AllocatorSettings(), 1000, 900, 900, 50, 50, 1000, 9, 0, 0, 3)
    other = replace(outcome, settings=fragmentation.AllocatorSettings(expandable=True), peak_reserved=1005)
    assert fragmentation._best([other, outcome]) is other
    assert fragmentation._best([replace(other, retries=1), outcome]) is outcome
