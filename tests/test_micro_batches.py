"""data.imbalance told by what micro-batches take: made-up tables of every kind, drawn, and two real ones."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from made_up_tables import KINDS, LENGTHS, SLOW_RANK, SLOW_STAGE, MadeUp, drawn, table_of
from meshes import Call, MeshJob, Phase, Work
from synthetic import Job

from dsprof.analyzer import analyze
from dsprof.analyzer.analysis import Analysis
from dsprof.analyzer.finding import Finding
from dsprof.importers import import_trace
from dsprof.trace import Trace

REAL = Path(os.environ.get("DSPROF_REAL_TRACES", Path(__file__).parents[2] / "shared" / "data" / "traces"))
TABLES = REAL / "straggler_analysis"
CODES = frozenset({SLOW_RANK, SLOW_STAGE, LENGTHS})
PLAIN = MadeUp((LENGTHS,), replicas=4, stages=2, micro_batches=6, steps=16, slow=(1, 1), times=1.6, spread=0.25,
               noise=0.02, seed=5)  # fmt: skip


def analyzed(job: MadeUp, folder: Path) -> Analysis:
    table_of(job).to_parquet(folder / "trace-made-up.parquet")
    return analyze(import_trace(folder / "trace-made-up.parquet"))


def of(analysis: Analysis, *, problems: bool = True) -> dict[str, Finding]:
    return {f.code: f for f in analysis.findings if f.code in CODES and (f.is_problem or not problems)}


def wrong(job: MadeUp, analysis: Analysis) -> str:
    """What is wrong with the answer: a fault that is not there, one that is not listed, another rank or stage. One that
    another hides may be listed without being a problem."""
    problems, listed = of(analysis), of(analysis, problems=False)
    if not problems.keys() <= set(job.faults) or not set(job.faults) <= listed.keys():
        return f"found {sorted(problems)}, listed {sorted(listed)}"
    if job.faults and not problems and not any(one.title in analysis.verdict.headline for one in listed.values()):
        return "nothing is a problem, and the headline names none"
    if SLOW_RANK in problems and problems[SLOW_RANK].where.ranks != (job.slow_rank,):
        return f"ranks {problems[SLOW_RANK].where.ranks}, not {job.slow_rank}"
    if SLOW_STAGE in problems and problems[SLOW_STAGE].where.stage != job.slow[1]:
        return f"stage {problems[SLOW_STAGE].where.stage}, not {job.slow[1]}"
    return ""


def check_drawn(seed: int, count: int, folder: Path) -> None:
    failures = []
    for number in range(count):
        job = drawn(random.Random(f"{seed}/{number}"))
        error = wrong(job, analyzed(job, folder))
        if error:
            failures.append(f"{seed}/{number} {job}: {error}")
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("faults", KINDS, ids=lambda faults: " and ".join(faults) or "nothing")
def test_made_up_tables_of_every_kind(faults: tuple[str, ...], tmp_path: Path) -> None:
    job = replace(PLAIN, faults=faults)
    assert wrong(job, analyzed(job, tmp_path)) == ""


def test_drawn_tables(tmp_path: Path) -> None:
    seed = int(os.environ.get("DSPROF_TEST_SEED", random.randrange(1 << 20)))
    print(f"DSPROF_TEST_SEED={seed}")
    check_drawn(seed, 3, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_hundred_drawn_tables(tmp_path: Path) -> None:
    check_drawn(2, 200, tmp_path)


def test_what_equal_micro_batches_save_is_what_the_table_says(tmp_path: Path) -> None:
    """The same job with lengths all alike takes so much less."""
    unequal = analyzed(PLAIN, tmp_path)
    equal = analyzed(replace(PLAIN, faults=()), tmp_path)
    found = of(unequal)[LENGTHS]
    assert unequal.step_ms is not None
    assert equal.step_ms is not None
    mean = np.exp(PLAIN.spread**2 / 2)  # of a length
    saved = unequal.step_ms.mean - mean * equal.step_ms.mean
    assert found.gain.low < saved < found.gain.high
    assert found.gain.ms == pytest.approx(saved, rel=0.3)
    told = {item.metric: item.value for item in found.evidence}
    assert told["standard deviation of what micro-batches take, of the mean"] == pytest.approx(25, abs=3)
    assert float(str(told["correlation of a micro-batch's forward and backward"])) > 0.95
    assert float(str(told["correlation of a micro-batch on one stage and another"])) > 0.95


def without_sizes(job: Job) -> Trace:
    trace = job.trace()
    rows = trace.rows
    rows.loc[rows["name"] == "forward", "value"] = np.nan
    return Trace.of(trace.run, rows)


def lengths(seed: int, spread: float = 0.3) -> np.ndarray:
    return np.random.default_rng(seed).lognormal(0, spread, (2, 200))


def test_data_parallel_ranks_without_sizes() -> None:
    """Forward and backward follow one another, and each rank is the longer one now and then."""
    drawn = lengths(3)
    job = Job(steps=80, forward=lambda r, s: 40 * drawn[r, s], backward=lambda r, s: 80 * drawn[r, s], jitter=0.02)
    assert list(of(analyze(without_sizes(job)))) == [LENGTHS]


@pytest.mark.parametrize("kind", ["for a while", "one rank", "backward only", "both at once"])
def test_what_is_no_input_is_not_taken_for_it(kind: str) -> None:
    """A rank that is slow for ten steps and then the other; one that is now and then; a backward that varies without
    its forward; steps that are slow on both ranks."""
    drawn = lengths(4)
    noise = np.ones((2, 200))
    if kind == "for a while":
        noise = 1 + 0.5 * ((np.arange(200) // 10 + np.arange(2)[:, None]) % 2)
    elif kind == "one rank":
        noise[1] = drawn[1]
    elif kind == "both at once":
        noise = np.stack([drawn[0]] * 2)
    back = drawn if kind == "backward only" else noise
    job = Job(steps=80, forward=lambda r, s: 40 * noise[r, s], backward=lambda r, s: 80 * back[r, s], jitter=0.02)
    assert LENGTHS not in of(analyze(without_sizes(job)), problems=False)


@pytest.mark.skipif(not TABLES.is_dir(), reason="the real tables are not here")
@pytest.mark.parametrize(("name", "code"), [("AR", SLOW_RANK), ("ST", SLOW_STAGE)])
def test_real_jobs_with_equal_inputs(name: str, code: str) -> None:
    analysis = analyze(import_trace(TABLES / f"trace-{name}.parquet"))
    assert LENGTHS not in of(analysis, problems=False)
    assert "data.imbalance" in analysis.passed
    assert code in of(analysis)


# --- ranks with unequal numbers of micro-batches, and a job that computes nothing


def accumulated(*counts: int, ms: float = 10.0) -> MeshJob:
    """A rank has so many micro-batches in a step; gradients are reduced in the last one's backward. Sizes of inputs
    were not captured."""

    def program(rank: int, step: int) -> tuple[object, ...]:
        parts: list[object] = []
        for micro in range(counts[rank]):
            reduce = [Call("w", "all_reduce", 1 << 18, "gradient")] if micro == counts[rank] - 1 else []
            parts += [Phase("forward", (Work(ms),)), Phase("backward", (Work(2 * ms), *reduce))]
        return (*parts, Phase("optimizer", (Work(1),)), Work(0.2))

    return MeshJob(len(counts), {"w": (tuple(range(len(counts))), "")}, program, steps=14)


@pytest.mark.parametrize(("counts", "equal"), [((4, 4, 4, 6), 4.5), ((2, 4), 3)])
def test_a_rank_with_more_micro_batches_is_not_slow(counts: tuple[int, ...], equal: float) -> None:
    found = of(analyze(accumulated(*counts).trace()))
    assert list(found) == [LENGTHS]
    finding = found[LENGTHS]
    assert finding.title == f"ranks get unequal numbers of micro-batches: {min(counts)} to {max(counts)} a step"
    assert "same number of micro-batches" in finding.fixes[0].title
    assert finding.gain.ms == pytest.approx(30 * (max(counts) - equal), rel=0.05)


def test_forwards_that_compute_nothing_are_no_error() -> None:
    def program(rank: int, step: int) -> tuple[object, ...]:
        reduce = Call("w", "all_reduce", 65536, "gradient")
        return (Phase("forward", ()), Phase("backward", (reduce,)), Phase("optimizer", ()), Work(10))

    analysis = analyze(MeshJob(2, {"w": ((0, 1), "")}, program, steps=14).trace())
    assert analysis.verdict.status == "inconclusive"
    assert not [why for why in analysis.not_judged.values() if "the rule failed" in why]
