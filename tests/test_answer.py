"""The verdict on made-up analyses: which status, and what the headline names."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from functools import partial
from pathlib import Path

import factories
import pytest
import typer

import dsprof
from dsprof.analyzer.analysis import Analysis, Verdict
from dsprof.analyzer.finding import Finding
from dsprof.analyzer.rules.registry import with_
from dsprof.analyzer.verdict.headline import LAUNCHES, verdict_of
from dsprof.cli import build_app


def with_part(part: str, share: float) -> Analysis:
    """The healthy run, `share` of whose step is one part, at the cost of computing."""
    analysis = factories.healthy()
    assert analysis.step_ms is not None
    whole = analysis.step_ms.mean
    budget = {**analysis.budget, part: share * whole}
    budget["compute"] += whole - sum(budget.values())
    return replace(analysis, budget=budget)


def test_a_healthy_run() -> None:
    verdict = verdict_of(factories.healthy())
    assert verdict.status == "healthy"
    assert verdict.headline == "nothing found that is sure to shorten the 175 ms step"


def test_what_most_likely_saves_much_is_named_though_it_is_no_problem() -> None:
    """A rank that is 10 % slower than 63 others: the interval begins below 1 % of the step, and above the noise."""
    healthy = factories.healthy()
    assert healthy.step_ms is not None
    late = factories.straggler().findings[0]
    share = healthy.step_ms.mean / 100
    gain = replace(late.gain, ms=4.7 * share, percent=4.7, low=0.8 * share, high=8.6 * share)
    late = replace(late, severity="info", gain=gain, title="rank 32 arrives late", by_rank={}, together=None)

    def of(finding: Finding, noise: float) -> Verdict:
        return verdict_of(replace(healthy, findings=(finding, *healthy.findings), noise_ms=noise * share))

    verdict = of(late, 0.5)
    assert verdict.status == "inconclusive"
    assert verdict.headline == (
        "rank 32 arrives late; fixing it most likely saves 8.21 ms of each 175 ms step (4.7 %), at least 1.40 ms and "
        "at most 15.0 ms: make the change and run it: `dsprof compare` of the two runs tells"
    )
    assert of(late, 0.9).status == "healthy"  # the low end may be noise
    assert of(replace(late, gain=replace(gain, ms=2.9 * share, percent=2.9)), 0.5).status == "healthy"


@pytest.mark.parametrize("part", ["bubble", "peer_wait", "other"])
def test_a_large_loss_that_no_rule_explains_is_not_healthy(part: str) -> None:
    verdict = verdict_of(with_part(part, 0.4))
    assert verdict.status == "inconclusive"
    assert "40 % is " in verdict.headline


def test_much_that_is_done_beside_training_is_named() -> None:
    time = {**dict.fromkeys(factories.healthy().time, 0.0), "training": 4.0, "evaluation": 6.0}
    verdict = verdict_of(replace(factories.healthy(), time=time))
    assert verdict.status == "healthy"
    assert "all forwards without gradients, takes 60 % of the time" in verdict.headline
    little = verdict_of(replace(factories.healthy(), time={**time, "evaluation": 1.0}))
    assert little == verdict_of(factories.healthy())


def test_a_bottleneck_is_the_worst_finding_and_its_gain() -> None:
    verdict = verdict_of(factories.straggler())
    assert verdict.status == "bottleneck"
    assert verdict.headline == factories.straggler().verdict.headline


@pytest.mark.parametrize("finding", [factories.DIED, replace(factories.DIED, severity="info")])
def test_a_broken_run_has_failed(finding: Finding) -> None:
    verdict = verdict_of(replace(factories.dead_rank(), findings=(finding,)))
    assert (verdict.status, verdict.headline) == ("failed", "rank 1 was killed by SIGKILL in step 12, during forward")


def test_no_step() -> None:
    assert verdict_of(factories.empty()) == factories.empty().verdict


def test_missing_ranks() -> None:
    analysis = factories.build(factories.Job(ranks=4, captured=(0, 2)), passed=factories.RULES)
    verdict = verdict_of(analysis)
    assert verdict.status == "inconclusive"
    assert verdict.headline.endswith(
        "but only steps of 2 of 4 ranks were captured: run it again with `dsprof run`, all of its ranks on all of its "
        "hosts"
    )


def test_hardly_any_steps() -> None:
    verdict = verdict_of(replace(factories.healthy(), noise_ms=float("inf"), findings=()))
    assert verdict.status == "inconclusive"
    assert verdict.headline == (
        "too few steps to tell a gain from noise; a step takes 175 ms: profile at least 20 with `dsprof run`"
    )


def test_time_that_is_lost_in_many_small_parts_is_named() -> None:
    analysis = factories.build(factories.Job(), passed=factories.RULES)
    assert analysis.step_ms is not None
    step = analysis.step_ms.mean
    small = dict.fromkeys(("comm_exposed", "peer_wait", "other"), 0.04 * step)
    budget = {**dict.fromkeys(analysis.budget, 0.0), **small, "compute": 0.88 * step}
    verdict = verdict_of(replace(analysis, budget=budget))
    assert verdict.status == "inconclusive"
    assert "4.0 % is waiting for collectives and 4.0 % is waiting for late ranks" in verdict.headline


# --- an inconclusive verdict says what to type next


def commands(headline: str) -> list[str]:
    return [part for part in headline.split("`")[1::2] if part.startswith("dsprof ")]


BY_REPLAY = next(iter(with_("told_by_replay")))
INCONCLUSIVE = {
    "no step on all ranks": lambda: replace(factories.healthy(), step_ms=None),
    "some ranks": lambda: factories.build(factories.Job(ranks=4, captured=(0, 2)), passed=factories.RULES),
    "few steps": lambda: replace(factories.healthy(), noise_ms=float("inf"), findings=()),
    "no rule": lambda: replace(factories.healthy(), passed=(), findings=()),
    "not replayed": lambda: replace(factories.healthy(), not_judged={BY_REPLAY.code: "clocks are apart"}),
    "launches not judged": lambda: replace(factories.healthy(), not_judged={LAUNCHES: "nobody looked"}),
    **{part: partial(with_part, part, 0.4) for part in ("bubble", "peer_wait", "other")},
}


@pytest.mark.parametrize("job", INCONCLUSIVE)
@pytest.mark.parametrize("capture", ["light", "full", "imported", "device"])
def test_an_inconclusive_verdict_says_what_to_type(job: str, capture: str) -> None:
    analysis = INCONCLUSIVE[job]()
    facts = {"imported": [{"fact": "import", "format": "kineto"}], "device": [{"fact": "device"}]}.get(capture, [])
    level = "full" if capture == "full" else "light"
    run = replace(analysis.run, facts=[*analysis.run.facts, *facts], level=level)
    verdict = verdict_of(replace(analysis, run=run))
    assert verdict.status == "inconclusive"
    found = commands(verdict.headline)
    assert found, verdict.headline
    for command in found:
        assert is_command(command), command


@pytest.mark.parametrize("why", ["unknown", "slowdown", "missing", "untold"])
def test_other_reasons_say_what_to_type_too(why: str) -> None:
    healthy = factories.healthy()
    analysis = replace(healthy, step_ms=None, steps=healthy.steps[:0]) if why == "missing" else healthy
    verdict = verdict_of(analysis, **{why: "something was not seen"})
    assert verdict.status == "inconclusive"
    assert "something was not seen" in verdict.headline
    assert all(map(is_command, commands(verdict.headline)))
    assert commands(verdict.headline)


def is_command(text: str) -> bool:
    """Whether `dsprof` has this command with these options."""
    _, verb, *words = shlex.split(text)
    known = typer.main.get_command(build_app()).commands[verb].params  # type: ignore[attr-defined]
    options = {option for one in known for option in one.opts}
    return all(word in options for word in words if word.startswith("--"))


def test_no_other_place_concludes_nothing() -> None:
    """All go through the one function that asks for what would settle it."""
    makes = [
        path.name
        for path in (Path(dsprof.__file__).parent / "analyzer").rglob("*.py")
        if re.search(r"Verdict\(\s*\"inconclusive\"", path.read_text())
    ]
    assert makes == ["next_step.py"]
