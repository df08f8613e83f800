"""A rank whose device is slow for good: samples by speed are offered, with what they would save."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from synthetic import Job

from dsprof.analyzer import analyze
from dsprof.analyzer.analysis import Analysis
from dsprof.analyzer.ask import ask
from dsprof.analyzer.finding import Fix, Gain
from dsprof.analyzer.rules.pipeline.structure_fixes import measured_fix
from dsprof.analyzer.study import study
from dsprof.fix import proposals
from dsprof.knobs import flags
from dsprof.knobs.predicted import turned

KEY = "heterogeneous.speeds"


def facts(**content: Any) -> list[dict[str, Any]]:
    """Of a job of the engine, which loads the data."""
    config = {"train_batch_size": 24, "gradient_accumulation_steps": 2, **content}
    return [
        {"fact": "config", "rank": 0, "dialect": "dsprof", "path": "/home/me/ds.json", "content": config},
        {"fact": "dataloader", "rank": 0, "by_engine": True, "num_workers": 0, "batch_size": 6},
    ]


def job(
    slow: float = 2.0,
    facts: list[dict[str, Any]] | None = None,
    shares: tuple[int, ...] = (6, 6),
    forward: Callable[[int, int], float] | None = None,
) -> Job:
    """Two ranks, of 120 ms for six samples each; the second is `slow` times as slow."""

    def of(ms: float) -> Callable[[int, int], float]:
        return lambda rank, step: ms * shares[rank] / 6 * (slow if rank == 1 else 1)

    return Job(ranks=2, forward=forward or of(40), backward=of(80), facts=facts or [], jitter=0.005)


def offered(analysis: Analysis) -> Fix | None:
    first = next(one for one in analysis.findings if one.code == "rank.straggler")
    return next((fix for fix in first.fixes if dict(fix.knobs)), None)


def step_ms(one: Job) -> float:
    found = analyze(one.trace()).step_ms
    assert found is not None
    return found.mean


def test_samples_by_speed_are_offered_with_what_they_save() -> None:
    planted = job(facts=facts())
    analysis = analyze(planted.trace())
    fix = offered(analysis)
    assert fix is not None
    assert fix.title == (
        "if the device is slow for good, heterogeneous.speeds: [1.0, 0.5]: of a micro-batch the ranks get [8, 4] "
        "samples, not [6, 6]"
    )
    assert fix.kind == "config"
    assert fix.patch == ({"op": "add", "path": "/heterogeneous", "value": {"speeds": [1.0, 0.5]}},)
    assert dict(fix.knobs) == {KEY: [1.0, 0.5]}
    assert fix.gain is not None
    saved = step_ms(planted) - step_ms(job(shares=(8, 4)))
    assert saved == pytest.approx(80, abs=3)
    assert fix.gain.low < saved < fix.gain.high
    assert fix.gain.ms == pytest.approx(saved, rel=0.05)
    (one,) = (one for one in proposals(analysis.to_dict()) if one.code == "rank.straggler")
    assert flags(one.knobs.items()) == ["--set", "heterogeneous.speeds=[1.0, 0.5]"]


@pytest.mark.parametrize(
    ("why", "planted"),
    [
        ("no engine", job()),
        ("DeepSpeed", job(facts=[{**facts()[0], "dialect": "deepspeed"}, facts()[1]])),
        ("batches of the script's own", job(facts=facts()[:1])),
        ("no sample to give away", job(facts=facts(train_batch_size=4))),
        ("a pause in forward", job(slow=1.0, facts=facts(), forward=lambda rank, step: 120 if rank else 40)),
        ("1-bit", job(facts=facts(optimizer={"type": "OneBitAdam"}))),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_where_it_would_not_help_it_is_not_offered(why: str, planted: Job) -> None:
    assert offered(analyze(planted.trace())) is None


def test_a_rank_that_is_late_now_and_then_keeps_its_share() -> None:
    def sometimes(rank: int, step: int) -> float:
        return 140.0 if rank == 1 and step % 3 == 0 else 40.0

    planted = Job(forward=sometimes, backward=lambda rank, step: 2 * sometimes(rank, step), facts=facts())
    assert offered(analyze(planted.trace())) is None


def answered(planted: Job, value: Any) -> Gain | str:
    (row,) = ask(study(planted.trace()), [[turned(KEY, value, "run")]]).rows
    return row.reason if row.gain is None else row.gain


def test_any_speeds_can_be_asked_about() -> None:
    found = answered(job(facts=facts()), [1, None])
    assert isinstance(found, Gain)  # the fast rank has twelve, and the slow one computes one that does not count
    assert found.ms == pytest.approx(0, abs=4)
    found = answered(job(facts=facts()), [2, 1])
    assert isinstance(found, Gain)
    assert found.low < 80 < found.high


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ([1, 2, 3], '3 speeds, and the job has 2 ranks; write one for each rank, or "measure"'),
        ([1, 0], "0 for rank 1 is not a number above 0"),
        ("measure", "what the ranks measure at the start is not known; give the speeds as a list"),
    ],
)
def test_speeds_that_cannot_be_say_why(value: Any, says: str) -> None:
    found = answered(job(facts=facts()), value)
    assert isinstance(found, str)
    assert says in found


def test_a_job_that_has_no_such_key_says_so() -> None:
    assert "no configuration of dsprof's engine" in str(answered(job(), [2, 1]))


# --- pipelines


def test_layers_and_ranks_of_a_pipeline_may_be_measured_at_the_start() -> None:
    """Beside other boundaries by this run's times, and saving what they do: more where a rank is slow."""
    exact = Fix("config", "pipeline.partition_method: [0, 4, 8]", gain=Gain(30.0, 10.0, 25.0, 35.0))
    ideal = Gain(50.0, 17.0, 45.0, 55.0)
    (found,) = measured_fix(study(job(facts=facts()).trace()), exact, ideal)
    assert found.gain == Gain(30.0, 10.0, 25.0, 50.0)
    assert dict(found.knobs) == {KEY: "measure", "pipeline.partition_method": "measured"}
    assert found.patch == (
        {"op": "add", "path": "/heterogeneous", "value": {"speeds": "measure"}},
        {"op": "add", "path": "/pipeline", "value": {"partition_method": "measured"}},
    )
    assert measured_fix(study(job(facts=facts()).trace()), None, ideal) == []
    assert measured_fix(study(job(facts=facts()[:1]).trace()), exact, ideal) == []
    assert measured_fix(study(job().trace()), exact, ideal) == []


def test_a_configuration_that_was_not_kept_is_not_patched() -> None:
    """A section that it may have would be replaced by one of a single key."""
    exact = Fix("code", "other boundaries", gain=Gain(30.0, 10.0, 25.0, 35.0))
    without = [{**one, "content": None} if one["fact"] == "config" else one for one in facts()]
    assert measured_fix(study(job(facts=without).trace()), exact, Gain(50.0, 17.0, 45.0, 55.0)) == []
