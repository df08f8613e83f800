"""In which order findings stand: one number says how severe each is and where it stands."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from synthetic import Job

from dsprof.analyzer import analyze
from dsprof.analyzer.finding import Finding, Gain, Severity, Where
from dsprof.analyzer.graph.step_graph import StepGraph
from dsprof.analyzer.judge import judge, ranked
from dsprof.analyzer.price.attribution import Attribution, attribute
from dsprof.analyzer.rules.registry import all_rules
from dsprof.analyzer.rules.rule import Look, Rule
from dsprof.analyzer.study import study
from dsprof.analyzer.whatif import WhatIf

RULES = {rule.code: rule for rule in all_rules()}


def finding(code: str, severity: Severity, ms: float, share: float | None = None, low: float | None = None) -> Finding:
    return Finding(
        code, code, severity, Where(), (), Gain(ms, ms, ms if low is None else low, ms),
        share=None if share is None else Gain(share, share, share, share),
    )  # fmt: skip


def order(*findings: Finding) -> list[tuple[str, str]]:
    return [(one.code, one.severity) for one in ranked(list(findings), RULES)]


def test_a_high_stands_above_a_medium_and_the_larger_of_two_above_the_other() -> None:
    given = finding("pause.gc", "medium", 9), finding("data.stall", "high", 20), finding("comm.exposed", "medium", 12)
    assert order(*given) == [("data.stall", "high"), ("comm.exposed", "medium"), ("pause.gc", "medium")]


def test_the_share_and_not_what_it_gains_alone_says_where_a_finding_stands() -> None:
    hidden = finding("rank.straggler", "high", 0, share=20)
    assert order(finding("pause.gc", "high", 16, share=16), hidden)[0] == ("rank.straggler", "high")


@pytest.mark.parametrize("fault", ["pipeline.imbalance", "rank.straggler"])
def test_a_bubble_weighs_no_more_than_the_fault_that_it_takes_to_be_fixed(fault: str) -> None:
    """Where the bubble gains 12 to 25, and the fault 13."""
    slow, bubble, other = (
        finding(fault, "medium", 13), finding("pipeline.bubble", "high", 25, low=12), finding("pause.gc", "low", 3),
    )  # fmt: skip
    assert order(bubble, other, slow) == [(fault, "medium"), ("pipeline.bubble", "medium"), ("pause.gc", "low")]
    said = ranked([bubble, slow], RULES)[1].evidence[-1]
    assert (said.metric, said.value) == ("counts only once this is fixed", fault)


@pytest.mark.parametrize("fault", ["pipeline.imbalance", "rank.straggler"])
def test_a_bubble_that_surely_gains_more_than_a_small_fault_stands_above_it(fault: str) -> None:
    given = finding(fault, "low", 4), finding("pipeline.bubble", "high", 25, low=12)
    assert order(*given) == [("pipeline.bubble", "high"), (fault, "low")]


def test_a_bubble_beside_stages_that_are_nearly_equal_stands_by_itself() -> None:
    given = finding("pipeline.imbalance", "info", 0.4), finding("pipeline.bubble", "high", 25)
    assert order(*given) == [("pipeline.bubble", "high"), ("pipeline.imbalance", "info")]


@pytest.mark.parametrize(("ms", "high", "listed"), [(-5.0, -1.0, False), (-5.0, 9.0, True), (0.0, 0.0, True)])
def test_what_surely_costs_time_by_itself_is_no_remark(ms: float, high: float, listed: bool) -> None:
    one = finding("pause.gc", "info", ms)
    one = replace(one, gain=replace(one.gain, high=high))
    rule = Rule("pause.gc", "", looks=(Look(lambda study: [one]),))
    judged = judge(study(Job(steps=12).trace()), [rule])
    assert [one.code for one in judged.findings] == (["pause.gc"] if listed else [])
    assert judged.passed == ("pause.gc",)


def test_what_ended_the_run_comes_first() -> None:
    assert order(finding("data.stall", "high", 50), finding("run.hang", "high", 0))[0] == ("run.hang", "high")


@pytest.mark.parametrize(
    ("saved", "together"),
    [
        # Two ranks that are late by 10 ms each: either alone gains nothing.
        ({"a": 0, "b": 0, "ab": 10}, {"a": ("b", 10.0), "b": ("a", 10.0)}),
        # Each costs its own.
        ({"a": 4, "b": 6, "ab": 10}, {}),
        # The smaller one is hidden by the larger, which gains most of it alone.
        ({"a": 8, "b": 0, "ab": 10}, {"b": ("a", 10.0)}),
    ],
)
def test_which_fault_hides_which(
    saved: dict[str, float], together: dict[str, tuple[str, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = _attributed(saved, monkeypatch)
    assert {name: (other, float(ms.mean())) for name, (other, ms) in found.together.items()} == together
    assert sum(float(share.mean()) for share in found.shares.values()) == pytest.approx(10)


def test_a_lone_fault_whose_fix_costs_time_hides_behind_none(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _attributed({"a": -5.0}, monkeypatch, faults="a")
    assert found.shares["a"].mean() == found.alone["a"].mean() == -5
    assert found.together == {}


def _attributed(saved: dict[str, float], monkeypatch: pytest.MonkeyPatch, faults: str = "ab") -> Attribution:
    """Faults of a graph that is the letters of the faults that are left, and whose replay looks up what that saves."""

    class Replayed:
        def __init__(self, fixed: str) -> None:
            self.durations = np.full(3, 100.0 - saved.get(fixed, 0.0))

    monkeypatch.setattr(
        "dsprof.analyzer.price.attribution.replay_all", lambda graphs: [Replayed("".join(sorted(g))) for g in graphs]
    )
    monkeypatch.setattr("dsprof.analyzer.price.attribution.apply", lambda graph, faults: graph + "".join(faults))
    start: StepGraph = ""  # type: ignore[assignment]
    named: dict[str, WhatIf] = {name: name for name in faults}  # type: ignore[misc]
    return attribute(start, named)


# --- what the headline promises -----------------------------------------------------------------


def headline(job: Job) -> tuple[Finding, str]:
    analysis = analyze(job.trace())
    return analysis.findings[0], analysis.verdict.headline


def test_two_slow_ranks_that_hide_each_other_are_to_be_fixed_both() -> None:
    """Ranks 1 and 3 take 20 and 19 ms more than the others: with one of them mended the other holds all up."""
    slow = {1: 60.0, 3: 59.0}
    first, said = headline(Job(ranks=6, steps=30, forward=lambda rank, step: slow.get(rank, 40.0)))
    assert (first.code, first.where.ranks) == ("rank.straggler", (1, 3))
    assert first.gain.ms == pytest.approx(18.5, abs=1.5)
    assert {rank: gain.ms for rank, gain in first.by_rank.items()} == {
        1: pytest.approx(1.0, abs=0.8), 3: pytest.approx(0.1, abs=0.8)
    }  # fmt: skip
    assert "fixing both saves 1" in said
    assert said.endswith("; one of them alone next to nothing, as the others hold the step up too")
    assert first.to_dict()["by_rank"]["1"]["ms"] == first.by_rank[1].ms


@pytest.mark.plants("rank.straggler")
def test_one_slow_rank_is_what_the_headline_promises() -> None:
    first, said = headline(Job(ranks=4, steps=30, forward=lambda rank, step: 60.0 if rank == 1 else 40.0))
    assert first.by_rank == {}
    assert f"fixing it saves {first.gain.ms:.1f} ms" in said


def test_of_two_that_weigh_about_as_much_the_surer_stands_first() -> None:
    """A tenth more is no more than predictions miss; beyond it, and among remarks, what weighs more does."""
    wide, sure = finding("pipeline.bubble", "medium", 69, low=31), finding("moe.imbalance", "medium", 67, low=60)
    assert [code for code, _ in order(wide, sure)] == ["moe.imbalance", "pipeline.bubble"]
    larger = replace(wide, gain=replace(wide.gain, ms=75.0))
    assert [code for code, _ in order(larger, sure)] == ["pipeline.bubble", "moe.imbalance"]
    surest = finding("pause.gc", "medium", 61, low=61)
    of_three = ["pipeline.bubble", "moe.imbalance", "pipeline.bubble"]
    assert [code for code, _ in order(larger, wide, sure)] == of_three
    assert [code for code, _ in order(larger, sure, surest)] == ["pipeline.bubble", "pause.gc", "moe.imbalance"]
    remarks = [replace(one, severity="info") for one in (wide, sure)]
    assert [code for code, _ in order(*remarks)] == ["pipeline.bubble", "moe.imbalance"]
