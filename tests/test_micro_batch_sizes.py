"""The same batch cut into other micro-batches: each action keeps a part of what it takes, whatever its size."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from made_up_layout import costs
from made_up_pipeline import MadeUpPipeline

from dsprof.analyzer.ask import Answered, ask
from dsprof.analyzer.layout import Layout
from dsprof.analyzer.layout.alternatives import in_words
from dsprof.analyzer.layout.stage_work import stage_work
from dsprof.analyzer.layout.step_lowered import Assumed, stage_times
from dsprof.analyzer.study import study
from dsprof.analyzer.work.fixed_part import (
    NOTHING,
    UNKNOWN,
    UNKNOWN_AT_MOST,
    UNTOLD,
    FixedPart,
    StageParameters,
    fixed_work,
    stage_parameters,
)
from dsprof.engine.schedule import make_plan
from dsprof.knobs.predicted import turned
from dsprof.trace import Trace

SCHEDULES = pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])


def job(microbatches: int, fixed: float, schedule: str = "1f1b") -> MadeUpPipeline:
    """A batch whose forwards take 40 ms together and whose backwards 80, and `fixed` ms more each."""
    return MadeUpPipeline(
        stages=2, microbatches=microbatches, schedule=schedule,
        forward=lambda stage, step: fixed + 40 / microbatches, backward=lambda stage, step: fixed + 80 / microbatches,
    )  # fmt: skip


def asked(ran: MadeUpPipeline, microbatches: Any) -> Answered:
    return ask(study(ran.trace()), [[turned("pipelining.microbatches", microbatches, "RUN")]]).rows[0]


@SCHEDULES
@pytest.mark.parametrize(("now", "then"), [(2, 8), (4, 8), (8, 2)])
def test_a_step_of_as_much_that_is_fixed_as_is_taken_is_told(schedule: str, now: int, then: int) -> None:
    fixed = UNKNOWN.ms if now <= then else UNKNOWN.ms / 2
    before, after = (job(count, fixed, schedule).step_ms() for count in (now, then))
    row = asked(job(now, fixed, schedule), then)
    assert row.gain is not None
    if fixed == UNKNOWN.ms:
        assert before - row.gain.ms == pytest.approx(after, rel=0.02)
    assert row.gain.low <= before - after <= row.gain.high
    assert UNTOLD.says in row.notes


@SCHEDULES
@pytest.mark.parametrize("fixed", [0.1, 1.0, 4.0, 6.0])
def test_what_a_run_does_not_tell_is_in_the_interval(schedule: str, fixed: float) -> None:
    before, after = (job(count, fixed, schedule).step_ms() for count in (2, 8))
    row = asked(job(2, fixed, schedule), 8)
    assert row.gain is not None
    assert row.gain.low <= before - after <= row.gain.high
    assert row.gain.low < 0 < row.gain.high


def with_facts(trace: Trace, *told: dict[str, Any]) -> Trace:
    return Trace(replace(trace.run, facts=[*trace.run.facts, *told]), trace.source)


def with_parameters(ran: MadeUpPipeline, tensors: int, elements: int) -> Trace:
    """What dsprof's engine tells of each rank."""
    each = {"fact": "trained", "elements": elements, "frozen": 0, "of_parameters": [elements // tensors] * tensors}
    return with_facts(ran.trace(), *({**each, "rank": rank} for rank in range(ran.stages)))


def test_small_stages_are_told_apart_from_large_ones() -> None:
    """By the tensors and bytes of their parameters: the interval is a part of what it is without."""
    ran = job(2, 0.7)
    true = ran.step_ms() - job(8, 0.7).step_ms()
    small, large, untold = (
        ask(study(trace), [[turned("pipelining.microbatches", 8, "RUN")]]).rows[0]
        for trace in (with_parameters(ran, 4, 2112), with_parameters(ran, 48, 4_000_000), ran.trace())
    )
    assert small.gain is not None
    assert large.gain is not None
    assert untold.gain is not None
    assert small.gain.low < true < small.gain.high
    assert small.gain.ms == pytest.approx(true, abs=2)
    assert large.gain.ms < small.gain.ms - 5
    assert small.gain.high - small.gain.low < 0.6 * (untold.gain.high - untold.gain.low)
    assert any("by the 4 tensors and 8.25 KiB of a stage's parameters" in note for note in small.notes)


def parameters_of(*told: dict[str, Any], stages_a_rank: int = 1) -> StageParameters | None:
    return stage_parameters(study(with_facts(job(2, 0.7).trace(), *told)), stages_a_rank)


ENGINES = {"fact": "trained", "elements": 30, "frozen": 0, "of_parameters": [10, 20]}
TORCHS = {"fact": "pipeline", "tensors": 2, "bytes": 120, "frozen": 0}


@pytest.mark.parametrize("of", [ENGINES, TORCHS], ids=["engine", "torch"])
def test_parameters_are_told_of_every_rank_or_of_none(of: dict[str, Any]) -> None:
    first, second = {**of, "rank": 0}, {**of, "rank": 1}
    assert parameters_of(first, second) == StageParameters(2, 120)
    assert parameters_of(first, second, second) == StageParameters(2, 120)  # as after a restart
    assert parameters_of(first, second, stages_a_rank=2) == StageParameters(1, 60)
    assert parameters_of(first) is None
    assert parameters_of(first, {**second, "frozen": 1}) is None
    assert parameters_of(first, second, {"fact": "fsdp", "rank": 0}) is None


def test_of_models_larger_than_were_measured_less_is_known() -> None:
    """Never less than of a little smaller ones, and it may be more."""
    below, above, large = (fixed_work(StageParameters(8, size)) for size in (29.9e6, 30.1e6, 240e6))
    for op in "FB":
        assert below.least.of(op).ms == above.least.of(op).ms == 0
        assert below.typical.of(op).ms == pytest.approx(above.typical.of(op).ms, rel=0.01)
        assert above.typical.of(op) == large.typical.of(op)
        for ms in (5.0, 60.0, 900.0):
            assert below.most.of(op).of(ms) <= 1.01 * above.most.of(op).of(ms)
            assert below.typical.of(op).of(ms) < below.most.of(op).of(ms)
    assert large.most.of("B").of(900.0) == pytest.approx(0.3)
    assert "so large ones were not measured" in large.says


def test_more_micro_batches_of_the_same_size_take_what_these_take() -> None:
    ran = job(2, 2.0)
    row = ask(study(ran.trace()), [[turned("gradient_accumulation_steps", 8, "RUN")]]).rows[0]
    assert row.gain is not None
    assert UNTOLD.says not in row.notes
    assert row.gain.low > 0


@pytest.mark.parametrize(
    ("fixed", "ms", "part"),
    [(UNKNOWN, 100, 0.02), (UNKNOWN, 10, 0.2), (UNKNOWN, 1, 0.5), (UNKNOWN, 0, 0.5), (NOTHING, 3, 0.0),
     (UNKNOWN_AT_MOST, 100, 0.3), (UNKNOWN_AT_MOST, 10, 0.6), (UNKNOWN_AT_MOST, 3, 1.0)],
)  # fmt: skip
def test_the_part_that_is_fixed(fixed: FixedPart, ms: float, part: float) -> None:
    assert fixed.of(ms) == pytest.approx(part)
    assert fixed.times(ms, 1.0) == pytest.approx(1.0)
    assert fixed.times(ms, 0.25) == pytest.approx(part + (1 - part) / 4)
    assert fixed.times(ms, 2.0) == pytest.approx(2 - part)


def test_other_layouts_assume_the_same() -> None:
    """10 ms forward and 20 ms backward of the whole model, of which 2 do not double."""
    layout, of = Layout(micro_batch=2.0, micro_batches=4), costs()
    plan = make_plan("1f1b", 1, 4)
    times = stage_times(of, layout, plan, stage_work(of, 1), Assumed())
    assert times.actions[0]["F"] == pytest.approx(2 + 2 * 8)
    assert times.actions[0]["B"] == pytest.approx(2 + 2 * 18)
    assert UNTOLD.says in in_words(of, layout)
