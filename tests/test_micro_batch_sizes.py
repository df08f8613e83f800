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


def with_optimizers(ran: MadeUpPipeline, tensors: int, elements: int) -> Trace:
    trace = ran.trace()
    told = [
        {"fact": "optimizer", "rank": rank, "number": 1, "parameters": tensors, "elements": elements}
        for rank in range(ran.stages)
    ]
    return Trace(replace(trace.run, facts=[*trace.run.facts, *told]), trace.source)


def test_small_stages_are_told_apart_from_large_ones() -> None:
    """By the tensors and bytes of what their optimizers step: the interval is a part of what it is without."""
    ran = job(2, 0.7)
    true = ran.step_ms() - job(8, 0.7).step_ms()
    small, large, untold = (
        ask(study(trace), [[turned("pipelining.microbatches", 8, "RUN")]]).rows[0]
        for trace in (with_optimizers(ran, 4, 2112), with_optimizers(ran, 48, 4_000_000), ran.trace())
    )
    assert small.gain is not None
    assert large.gain is not None
    assert untold.gain is not None
    assert small.gain.low < true < small.gain.high
    assert small.gain.ms == pytest.approx(true, abs=2)
    assert large.gain.ms < small.gain.ms - 5
    assert small.gain.high - small.gain.low < 0.6 * (untold.gain.high - untold.gain.low)
    assert any("by the 4 tensors and 8.25 KiB of a stage's parameters" in note for note in small.notes)


@pytest.mark.parametrize("shares", ["fsdp", "deepspeed"])
def test_of_parameters_that_are_shared_an_optimizer_does_not_tell(shares: str) -> None:
    trace = with_optimizers(job(2, 0.7), 4, 2112)
    whole = study(trace)
    parameters = stage_parameters(whole, 1)
    assert parameters is not None
    assert (parameters.tensors, parameters.bytes) == (4, 4 * 2112)
    assert fixed_work(stage_parameters(whole, 2)).typical.forward.ms < fixed_work(parameters).typical.forward.ms
    facts = [*trace.run.facts, {"fact": shares, "rank": 0}]
    assert stage_parameters(study(Trace(replace(trace.run, facts=facts), trace.source)), 1) is None


def test_what_the_engine_trains_is_told_of_the_whole_stage() -> None:
    trace = job(2, 0.7).trace()
    told = {"fact": "trained", "elements": 30, "frozen": 0, "of_parameters": [10, 20]}
    first, second = {**told, "rank": 0}, {**told, "rank": 1}

    def of(*facts: dict[str, Any]) -> StageParameters | None:
        return stage_parameters(study(Trace(replace(trace.run, facts=[*facts]), trace.source)), 1)

    assert of(first, second) == StageParameters(2, 120)
    assert of(first) is None  # of the other rank nothing is known
    assert of(first, {**second, "frozen": 10}) is None


def test_several_optimizers_may_step_the_same_parameters() -> None:
    trace = with_optimizers(job(2, 0.7), 4, 2112)
    again = trace.run.facts[-1]  # as after a restart
    for more, known in ((again, True), ({**again, "number": 2}, False)):
        told = stage_parameters(study(Trace(replace(trace.run, facts=[*trace.run.facts, more]), trace.source)), 1)
        assert (told == StageParameters(4, 4 * 2112)) is known


def test_of_models_larger_than_were_measured_nothing_is_known() -> None:
    assert fixed_work(StageParameters(48, 240e6)) is UNTOLD
    small = fixed_work(StageParameters(48, 24e6))
    assert small.least.of("B").ms == 0
    assert small.typical.of("F").ms < small.typical.of("B").ms < small.most.of("B").ms


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
