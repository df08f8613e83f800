"""memory.growth, memory.headroom and memory.oom-risk of live runs, and how a rank that died of it is explained."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import allocations
import numpy as np
import pandas as pd
import pytest
from allocations import Device, MiB
from synthetic import Job, constant

from dsprof.analyzer import analyze
from dsprof.analyzer.analysis import Analysis
from dsprof.analyzer.finding import Finding
from dsprof.analyzer.memory.slope import climb
from dsprof.analyzer.memory.use_by_step import MemoryUse
from dsprof.importers import import_trace
from dsprof.reports import memory
from dsprof.run import RankExit
from dsprof.schema import COLUMNS
from dsprof.trace import Trace, concat_rows

GiB = 1 << 30
Level = Callable[[int, int], float]
"""(rank, step) -> bytes."""


def sampled(job: Job, place: str = "host", memory: Trace | None = None, **levels: Level | float) -> Trace:
    """The job's trace with `mem` rows after each step: name -> bytes, or, of counts, their number."""
    trace = job.trace()
    rows = trace.rows
    steps = rows[rows["kind"] == "step"]
    more = []
    for rank, step, start, took in zip(steps["rank"], steps["step"], steps["start_ns"], steps["dur_ns"], strict=True):
        for name, level in levels.items():
            value = level(int(rank), int(step)) if callable(level) else level
            counts = name in ("retries", "ooms")
            more.append(
                {"rank": rank, "restart": 0, "step": step + 1, "kind": "mem", "name": name, "lane": f"memory.{place}",
                 "start_ns": start + took, "dur_ns": 0, "ended": True, "source": "measured",
                 "bytes": None if counts else round(value), "value": value if counts else np.nan}
            )  # fmt: skip
    table = pd.DataFrame(more).reindex(columns=list(COLUMNS)).astype(COLUMNS)
    joined = concat_rows([rows, table]).sort_values(["rank", "start_ns"], kind="stable", ignore_index=True)
    return Trace.of(trace.run, joined, memory.memory if memory is not None else None)


def found(code: str, analysis: Analysis) -> Finding:
    (finding,) = [one for one in analysis.findings if one.code == code]
    return finding


def told(finding: Finding) -> dict[str, Any]:
    return {item.metric: item.value for item in finding.evidence}


# --- growth ---------------------------------------------------------------------------------------


def test_a_slope_that_goes_on() -> None:
    x = np.arange(60.0)
    noise = np.random.default_rng(0).normal(0, 3, 60)
    slope = climb(x, 100 + 2 * x + noise)
    assert slope is not None
    assert slope.low <= 2 <= slope.high
    assert slope.high - slope.low < 0.3
    assert slope.rise == pytest.approx(2 * 45, abs=4)


@pytest.mark.parametrize("series", [
    100 + 50 * (1 - np.exp(-np.arange(60) / 10)),  # a cache that fills up
    np.full(60, 100.0),
    100 + 10 * np.sin(np.arange(60)),
    100 - np.arange(60.0),
    np.where(np.arange(60) < 30, 100.0, 150.0),  # a step up
    100 + np.arange(10.0),  # too short
])  # fmt: skip
def test_what_levels_off_or_comes_and_goes_is_no_growth(series: np.ndarray[Any, Any]) -> None:
    assert climb(np.arange(len(series), dtype=float), series) is None


def leaks(rank: int, step: int) -> float:
    return 2 * GiB + (8 * MiB * step if rank == 1 else 0)


def test_memory_that_climbs_and_the_steps_that_are_left() -> None:
    job = Job(steps=80)
    analysis = analyze(sampled(job, "cuda.0", allocated=leaks, allocated_peak=leaks, capacity=4 * GiB))
    finding = found("memory.growth", analysis)
    assert finding.where.ranks == (1,)
    assert finding.title == (
        "memory of cuda.0 climbs by 8.00 MiB with every step; 1.38 GiB are left, enough for about 177 more"
    )
    assert finding.severity == "medium", "in less than ten times as many steps as were watched"
    assert told(finding)["climbs by, every step"] == 8 * MiB
    assert "appended or summed up with its graph" in finding.fixes[0].title
    assert analysis.verdict.status == "bottleneck"


@pytest.mark.plants("memory.growth")
def test_the_line_whose_allocations_are_kept_is_named(tmp_path: Path) -> None:
    device = Device()
    kept = []
    for _ in range(20):
        device.line = 12
        held = [device.alloc(30 * MiB), device.alloc(12 * MiB)]
        device.line = 40
        kept.append(device.alloc(3 * MiB))
        device.free(*held)
    device.line = 12
    device.alloc(30 * MiB)
    history = import_trace(device.write(tmp_path / "snapshot.pickle"))
    trace = sampled(Job(ranks=1, steps=80), "cuda.0", memory=history, allocated=lambda _, step: GiB + 3 * MiB * step)
    finding = found("memory.growth", analyze(trace))
    assert told(finding)["allocated again and again, and kept, at /home/me/train.py:40"] == 60 * MiB
    assert finding.fixes[0].patch == ({"file": "/home/me/train.py", "line": 40, "argument": "", "value": ""},)


def test_the_states_that_grow_are_named() -> None:
    def states(_: int, step: int) -> float:
        return 100 * MiB + 4 * MiB * step

    finding = found("memory.growth", analyze(sampled(
        Job(steps=80), "cuda.0", allocated=lambda r, s: GiB + states(r, s), optimizer_states=states,
    )))  # fmt: skip
    assert any(item.metric == "of which optimizer states" for item in finding.evidence)
    assert finding.fixes[0].title == "look for what adds optimizer states as it trains"


def test_a_steady_run_has_neither_growth_nor_risk_nor_headroom() -> None:
    draw = np.random.default_rng(1)
    levels = draw.normal(500 * MiB, 2 * MiB, (2, 200))
    trace = sampled(Job(steps=80), resident=lambda r, s: levels[r, s], capacity=16 * GiB)
    analysis = analyze(trace)
    assert {"memory.growth", "memory.oom-risk", "memory.headroom"} <= set(analysis.passed)
    assert not [one for one in analysis.findings if one.code.startswith("memory.")]


def test_a_little_that_settles_on_the_host_is_no_growth() -> None:
    trace = sampled(Job(steps=80), resident=lambda _, step: 500 * MiB + 0.2 * MiB * step)
    assert "memory.growth" in analyze(trace).passed


def test_arenas_that_grow_in_fits_and_starts_are_no_leak_on_a_short_run() -> None:
    """As of an FSDP2 job on CPU: 2.4 MiB a step, in between some more or less. A leak of 12 MiB a step is told."""
    comes_and_goes = np.random.default_rng(0).normal(0, 6, 41)

    def climbing(by: float) -> Trace:
        return sampled(Job(steps=40), resident=lambda _, step: (500 + by * step + comes_and_goes[step]) * MiB)

    assert "memory.growth" in analyze(climbing(2.4)).passed
    assert found("memory.growth", analyze(climbing(12.0))).is_problem


def test_a_run_that_is_too_short_is_not_judged() -> None:
    analysis = analyze(sampled(Job(steps=12), resident=500 * MiB))
    assert analysis.not_judged["memory.growth"].startswith("too short a run: memory was looked at ")


def test_what_is_written_only_when_it_changes_is_known_of_each_step() -> None:
    """Of what stays as it is the collector writes every 16th step: 30 steps of which two have a row, and then none."""
    whole = sampled(Job(steps=40), resident=500 * MiB)
    rows = whole.rows
    after = rows["step"] - 1
    kept = (rows["kind"] != "mem") | after.isin([0, 16]) & ((rows["rank"] == 0) | (after < 10))
    analysis = analyze(Trace.of(whole.run, rows[kept].reset_index(drop=True)))
    assert "memory.growth" in analysis.passed
    lines = dict(list(analysis.memory_steps.groupby("rank")))
    assert lines[0]["step"].tolist() == list(range(33)), "16 steps later another one would have been written"
    assert lines[1]["step"].tolist() == list(range(17))
    assert set(lines[0]["resident"]) == {500 * MiB}
    note = memory.over_steps(analysis.memory_steps, analysis.memory_uses).layout.meta["note"]
    assert "rank 1 until step 16, the last of which memory was told" in note


# --- what is used ---------------------------------------------------------------------------------


def test_what_each_rank_used() -> None:
    trace = sampled(
        Job(steps=40), resident=lambda rank, _: (1 + rank) * GiB, resident_peak=lambda rank, _: (2 + rank) * GiB,
        capacity=16 * GiB, parameters=300 * MiB,
    )  # fmt: skip
    first, second = analyze(trace).memory_uses
    assert first == MemoryUse(0, "host", 2 * GiB, 2 * GiB, 16 * GiB, 5 / 16, 0, 0, {"parameters": 300 * MiB})
    assert (second.rank, second.peak, second.share) == (1, 3 * GiB, 5 / 16), "they share the host's memory"
    assert analyze(trace).to_dict()["memory_use"][0]["peak"] == 2 * GiB


@pytest.mark.plants("memory.oom-risk")
def test_a_peak_close_to_what_there_is() -> None:
    trace = sampled(
        Job(steps=40), "cuda.0", allocated=60 * GiB, allocated_peak=78 * GiB, reserved_peak=79 * GiB, capacity=80 * GiB,
        optimizer_states=24 * GiB, gradients=6 * GiB, parameters=6 * GiB, activations=20 * GiB,
    )  # fmt: skip
    finding = found("memory.oom-risk", analyze(trace))
    assert finding.title == "ranks 0-1: the peak of cuda.0 is 78.0 GiB of 80.0 GiB (98 %)"
    assert finding.severity == "medium"
    assert told(finding)["optimizer states"] == 24 * GiB
    # The first that frees the 4.4 GiB by which it is too close.
    assert finding.fixes[0].title == (
        "ZeRO stage 1 (ZeroRedundancyOptimizer) over 2 ranks: frees about 12.0 GiB, of 4.40 GiB that are missing"
    )


@pytest.mark.parametrize(
    ("stage", "memory", "says"),
    [
        (1, None, "ZeRO stage 2 over 2 ranks: frees about 3.00 GiB, of 2.40 GiB that are missing"),
        (1, [80, 20], "half the micro-batch, and twice the gradient accumulation: frees about 10.0 GiB"),
        (1, [20, 80], "ZeRO stage 2 over 2 ranks: frees about 4.80 GiB, of 2.40 GiB that are missing"),
        (1, "measure", "half the micro-batch, and twice the gradient accumulation: frees about 10.0 GiB"),
        (3, None, "half the micro-batch, and twice the gradient accumulation: frees about 10.0 GiB"),
    ],
)
def test_what_a_higher_stage_frees_is_the_ranks_own_share_of_it(stage: int, memory: object, says: str) -> None:
    content = {"zero_optimization": {"stage": stage}, "heterogeneous": {"memory": memory}}
    job = Job(steps=40, facts=[{"fact": "config", "dialect": "dsprof", "content": content}])
    peaks = {0: 76 * GiB, 1: 10 * GiB}
    trace = sampled(
        job, "cuda.0", allocated=8 * GiB, allocated_peak=lambda rank, step: peaks[rank], capacity=80 * GiB,
        optimizer_states=6 * GiB, gradients=6 * GiB, parameters=6 * GiB, activations=20 * GiB,
    )  # fmt: skip
    assert found("memory.oom-risk", analyze(trace)).fixes[0].title.startswith(says)


def test_a_cache_that_was_given_back_for_want_of_memory() -> None:
    trace = sampled(Job(steps=40), "cuda.0", allocated=GiB, reserved_peak=70 * GiB, capacity=80 * GiB, retries=3)
    finding = found("memory.oom-risk", analyze(trace))
    assert finding.severity == "medium"
    assert "the cache was given back 3 times for want of memory" in finding.title


def oom(**more: Any) -> dict[str, Any]:
    usual = {
        "fact": "out_of_memory", "rank": 0, "place": "host", "asked": 200 * MiB, "capacity": 2 * GiB,
        "resident": 900 * MiB, "virtual": 1900 * MiB, "resident_peak": 950 * MiB, "step": 12, "error": "RuntimeError",
        "said": "RuntimeError: [enforce fail] can't allocate memory", "variables": [],
        "parts": {"parameters": 100 * MiB, "gradients": 100 * MiB, "optimizer_states": 200 * MiB},
        "stack": [
            ["linear", "/venv/lib/python3.12/site-packages/torch/nn/functional.py", 100],
            ["step", "/home/me/train.py", 21], ["<module>", "/home/me/train.py", 40],
        ],
    }  # fmt: skip
    return {**usual, **more}


def died(how: int | None = None) -> list[RankExit]:
    return [
        RankExit(0, "host", 100, None if how else 1, how, 10**12),
        RankExit(1, "host", 101, None, signal.SIGTERM, 10**12 + 1, stopped=True),
    ]


def test_a_rank_that_ran_out_of_memory_is_explained() -> None:
    held = {"name": "kept", "function": "<module>", "file": "/home/me/train.py", "line": 40, "tensors": 37,
            "bytes": 500 * MiB}  # fmt: skip
    job = Job(steps=40, facts=[oom(variables=[held])], exits=died())
    analysis = analyze(sampled(job, resident=800 * MiB, capacity=16 * GiB))
    finding = found("memory.oom-risk", analysis)
    assert finding.title == ("rank 0 ran out of memory at train.py:21: 200 MiB more, with 1.86 GiB in use of 2.00 GiB")
    assert finding.severity == "high"
    assert told(finding)["optimizer states"] == 200 * MiB
    assert told(finding)["activations, libraries and all else, resident"] == 500 * MiB
    assert told(finding)["held by kept (train.py, <module>; 37 tensors)"] == 500 * MiB
    assert finding.fixes[0].title.startswith("kept (train.py, <module>; 37 tensors) keeps 500 MiB")
    assert "ZeRO stage 1" in finding.fixes[1].title
    first = analysis.findings[0]
    assert first.code == "run.rank-died"
    assert first.title == (
        "rank 0 ended by exit status 1 after step 39: out of memory: 200 MiB more were asked for, with 1.86 GiB in use"
    )
    assert first.fixes[0].title == "memory.oom-risk says what held the memory, and what makes room"


def test_what_the_step_had_made_until_then_is_told_apart() -> None:
    job = Job(steps=40, facts=[oom(resident_at_step=600 * MiB)], exits=died())
    finding = found("memory.oom-risk", analyze(sampled(job, resident=600 * MiB, capacity=16 * GiB)))
    assert told(finding)["activations and what else came since the last step, resident"] == 300 * MiB
    assert told(finding)["libraries, the script's own data and all else, resident"] == 200 * MiB


def test_a_device_that_ran_out_names_the_lines_that_held_it(tmp_path: Path) -> None:
    device = Device(device_bytes=1900 * MiB)
    with pytest.raises(allocations.OutOfMemory):
        allocations.pinned(device)
    history = import_trace(device.write(tmp_path / "snapshot.pickle"))
    fact = oom(
        place="cuda.0", asked=50 * MiB, capacity=1900 * MiB, allocated=780 * MiB, reserved=1880 * MiB, free=20 * MiB
    )  # fmt: skip
    trace = sampled(Job(steps=40, facts=[fact]), "cuda.0", memory=history, allocated=700 * MiB, capacity=1900 * MiB)
    finding = found("memory.oom-risk", analyze(trace))
    assert finding.title.startswith("rank 0 ran out of memory of cuda.0 at train.py:21: 50.0 MiB more, with 780 MiB")
    assert told(finding)["held by /home/me/train.py:30 (14 blocks)"] == 700 * MiB
    assert any("expandable_segments:True" in fix.title for fix in finding.fixes)


def test_a_rank_that_the_kernel_killed_for_want_of_memory() -> None:
    job = Job(steps=40, exits=died(signal.SIGKILL))
    trace = sampled(job, resident=3 * GiB, resident_peak=3 * GiB, capacity=8 * GiB, parameters=GiB)
    trace.run.oom_kills.append({"ranks": [0], "path": "/sys/fs/cgroup/job", "kills": 1})
    analysis = analyze(trace)
    finding = found("memory.oom-risk", analysis)
    assert finding.title == "rank 0 was killed for want of memory: 3.00 GiB resident at the most of 8.00 GiB"
    assert told(finding)["told by"] == "the kernel, which killed 1 of the processes of its cgroup for want of memory"
    assert told(finding)["parameters"] == GiB
    assert "killed for want of memory, says the kernel" in found("run.rank-died", analysis).title


def test_a_rank_that_was_killed_with_little_memory_in_use_was_not_killed_for_it() -> None:
    job = Job(steps=40, exits=died(signal.SIGKILL))
    analysis = analyze(sampled(job, resident=GiB, resident_peak=GiB, capacity=8 * GiB))
    assert not [one for one in analysis.findings if one.code == "memory.oom-risk"]
    assert "SIGKILL comes from outside" in found("run.rank-died", analysis).fixes[0].title


def test_a_rank_whose_last_sample_was_at_the_limit() -> None:
    job = Job(steps=40, exits=died(signal.SIGKILL))
    analysis = analyze(sampled(job, resident=4 * GiB, resident_peak=3.9 * GiB, capacity=8 * GiB))
    assert told(found("memory.oom-risk", analysis))["told by"] == "its last sample: 100 % of what there is were in use"


# --- headroom -------------------------------------------------------------------------------------


def with_recompute(trace: Trace, ms: float) -> Trace:
    """Backward begins with what forward computes again."""
    rows = trace.rows
    backward = rows[(rows["kind"] == "phase") & (rows["name"] == "backward")]
    again = backward.assign(name="recompute", dur_ns=round(ms * 1e6), depth=backward["depth"] + 1)
    joined = concat_rows([rows, again.astype(COLUMNS)]).sort_values(
        ["rank", "start_ns", "dur_ns"], ascending=[True, True, False], kind="stable", ignore_index=True
    )
    return Trace.of(trace.run, joined)


@pytest.mark.plants("memory.headroom")
def test_memory_that_is_unused_while_activations_are_computed_again() -> None:
    job = Job(steps=80, buckets=(1 << 10,), latency_ms=0.1)
    trace = with_recompute(sampled(job, resident=2 * GiB, capacity=16 * GiB), 20.0)
    finding = found("memory.headroom", analyze(trace))
    assert finding.title == "12.0 GiB of 16.0 GiB are unused while activations are computed again in backward"
    assert finding.gain.ms == pytest.approx(20.0, abs=1.0)
    assert finding.severity in ("medium", "high")
    assert told(finding)["recomputation a step"] == pytest.approx(20.0, abs=0.01)


def test_memory_that_is_used_is_no_headroom() -> None:
    trace = with_recompute(sampled(Job(steps=80), resident=6 * GiB, capacity=16 * GiB), 20.0)
    assert "memory.headroom" in analyze(trace).passed


def test_where_it_is_not_known_how_much_there_is_headroom_is_not_judged() -> None:
    trace = with_recompute(sampled(Job(steps=80), resident=6 * GiB), 20.0)
    assert analyze(trace).not_judged["memory.headroom"] == "it is not known how much memory there is"


def test_a_run_without_samples_is_not_concerned() -> None:
    analysis = analyze(Job(steps=40, forward=constant(10)).trace())
    assert not {"memory.headroom", "memory.growth", "memory.oom-risk"} & {*analysis.passed, *analysis.not_judged}


# --- recomputation that is not needed ---------------------------------------------------------------

PARTS: dict[str, Level | float] = {"parameters": GiB // 2, "optimizer_states": GiB, "buffers": 0}


def recomputing(ms: float, peak: float, capacity: float, blocks: int = 4, **facts: Any) -> Trace:
    """Backward begins with `blocks` pieces that are computed again, of `ms` in all. None: not seen."""
    job = Job(steps=80, buckets=(1 << 10,), latency_ms=0.1, facts=facts.pop("facts", []))
    parts = {name: level for name, level in {**PARTS, **facts}.items() if level is not None}
    trace = sampled(job, "host", resident=peak, resident_peak=peak, capacity=capacity, **parts)
    rows = trace.rows
    backward = rows[(rows["kind"] == "phase") & (rows["name"] == "backward")]
    took = round(ms * 1e6 / blocks)
    pieces = [
        backward.assign(
            name="recompute", dur_ns=took, depth=backward["depth"] + 1, start_ns=backward["start_ns"] + one * took
        )
        for one in range(blocks)
    ]
    joined = concat_rows([rows, *(one.astype(COLUMNS) for one in pieces)]).sort_values(
        ["rank", "start_ns", "dur_ns"], ascending=[True, True, False], kind="stable", ignore_index=True
    )
    return Trace.of(trace.run, joined)


def codes(analysis: Analysis) -> set[str]:
    return {finding.code for finding in analysis.findings}


@pytest.mark.plants("compute.recompute")
def test_blocks_that_are_computed_again_though_memory_would_hold_them() -> None:
    """Two ranks share 16 GiB: 2.5 GiB at the peak, 1 GiB of it at most of one block, so four take 3 GiB more each."""
    checkpointed = {"fact": "activation_checkpointing", "rank": 0, "site": "/home/me/model.py:31", "framework": None,
                    "selective": False}  # fmt: skip
    analysis = analyze(recomputing(20.0, 2.5 * GiB, 16 * GiB, facts=[checkpointed]))
    first = analysis.findings[0]
    assert first.code == "compute.recompute"
    assert first.title.endswith("though memory would hold all of them: 4.30 GiB are surely left on rank 0")
    assert first.gain.ms == pytest.approx(20.0, abs=1.0)
    assert first.gain.high > 20.0 + 4 * 0.85  # checkpointing itself takes time, too
    assert first.fixes[0].title == (
        "call the blocks without torch.utils.checkpoint (model.py:31) (takes at most 4.00 GiB more on each rank)"
    )
    assert (first.fixes[0].patch[0]["file"], first.fixes[0].patch[0]["line"]) == ("/home/me/model.py", 31)
    assert "memory.headroom" not in codes(analysis)


def test_modules_within_what_an_engine_computes_again_do_not_count_twice() -> None:
    """dsprof's engine records a block on the lane of autograd, and hooks record its modules on that of their thread."""
    trace = recomputing(20.0, 2.5 * GiB, 16 * GiB)
    again = trace.rows[trace.rows["name"] == "recompute"]
    modules = again.assign(start_ns=again["start_ns"] + 1000, dur_ns=again["dur_ns"] - 2000, lane="thread.7")
    rows = concat_rows([trace.rows, modules.astype(COLUMNS)]).sort_values(
        ["rank", "start_ns", "dur_ns"], ascending=[True, True, False], kind="stable", ignore_index=True
    )
    finding = found("compute.recompute", analyze(Trace.of(trace.run, rows)))
    assert told(finding)["recomputation a step"] == pytest.approx(20.0, abs=0.01)
    assert told(finding)["blocks computed again in a backward"] == 4


def test_as_many_blocks_as_memory_surely_holds() -> None:
    """0.85 of 8 GiB less 5 GiB are 1.8 GiB, 0.9 GiB of it each rank's, and a block takes up to 0.25 GiB."""
    states = 0.75 * GiB
    analysis = analyze(recomputing(20.0, 2.5 * GiB, 8 * GiB, 8, parameters=1.5 * GiB, optimizer_states=states))
    finding = found("compute.recompute", analysis)
    assert told(finding)["a block's activations, at most"] == GiB // 4
    assert finding.gain.ms == pytest.approx(20.0 * 3 / 8, abs=1.0)
    assert finding.fixes[0].title.startswith("call torch.utils.checkpoint for 5 of the 8 blocks only")


def test_recomputation_that_memory_needs_is_no_finding() -> None:
    analysis = analyze(recomputing(20.0, 3.2 * GiB, 8 * GiB))
    assert not {"compute.recompute", "memory.headroom"} & codes(analysis)
    assert "compute.recompute" in analysis.passed


def test_an_optimizer_without_states_leaves_more_to_a_block() -> None:
    """As plain SGD is: nothing of the peak is its states, so a block may take up to 2 GiB."""
    analysis = analyze(recomputing(20.0, 2.5 * GiB, 32 * GiB, optimizer_states=None))
    assert told(found("compute.recompute", analysis))["a block's activations, at most"] == 2 * GiB


def test_of_a_framework_s_blocks_no_line_of_the_script_is_named() -> None:
    """The line is that of `trainer.train()`: no block is called there."""
    made = {"fact": "activation_checkpointing", "rank": 0, "site": "/me/train.py:3", "framework": "transformers",
            "selective": False}  # fmt: skip
    parts = {"parameters": 1.5 * GiB, "optimizer_states": 0.75 * GiB}
    finding = found("compute.recompute", analyze(recomputing(20.0, 2.5 * GiB, 8 * GiB, 8, facts=[made], **parts)))
    assert finding.fixes[0].title.startswith("have transformers checkpoint 5 of the 8 blocks only")
    assert finding.fixes[0].patch == ()


def test_where_nobody_looked_what_memory_is_for_it_is_not_judged() -> None:
    trace = with_recompute(sampled(Job(steps=80, buckets=(1 << 16,)), resident=6 * GiB, capacity=16 * GiB), 20.0)
    analysis = analyze(trace)
    assert "was not looked at" in analysis.not_judged["compute.recompute"]
    assert analysis.verdict.status == "inconclusive"  # so much of the step is computed twice
    assert "is computing activations again (not judged" in analysis.verdict.headline


@pytest.mark.parametrize(
    ("facts", "title"),
    [
        ([{"fact": "config", "dialect": "engine", "path": "/c.json", "site": None,
           "content": {"activation_checkpointing": {"policy": "full"}}}], 'activation_checkpointing.policy: "none"'),
        ([{"fact": "activation_checkpointing", "site": "/me/train.py:3", "framework": "transformers",
           "selective": False}], "leave out --gradient_checkpointing"),
    ],
)  # fmt: skip
def test_the_fix_is_in_the_words_of_the_job(facts: list[dict[str, Any]], title: str) -> None:
    told_of = [{"rank": 0, **fact} for fact in facts]
    finding = found("compute.recompute", analyze(recomputing(20.0, 2.5 * GiB, 16 * GiB, facts=told_of)))
    assert finding.fixes[0].title.startswith(title)
