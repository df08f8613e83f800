"""Pipelines on devices: what is said of a made-up one is what the same job takes less without its fault."""

from __future__ import annotations

import pytest
from made_up_device_pipeline import PipelineJob

from dsprof.analyzer import analyze

EVEN = PipelineJob()


def test_a_slow_stage_costs_what_an_even_division_would_save() -> None:
    """Micro-batches take 10 ms on the first stage and 16 on the second; in the mean 13. In the first step that is
    replayed the second stage begins as late as it was seen to."""
    uneven = EVEN.with_(forward=(10.0, 16.0), steps=40)
    trace, step_ms = uneven.run()
    saved = step_ms - EVEN.with_(forward=(13.0, 13.0), steps=40).run()[1]
    assert saved > 20
    analysis = analyze(trace)
    first = next(finding for finding in analysis.findings if finding.is_problem)
    assert (first.code, first.where.ranks, first.where.stage) == ("pipeline.imbalance", (1,), 1)
    assert first.gain.method == "replay"
    assert first.gain.ms == pytest.approx(saved, rel=0.1)


def test_filling_and_draining_is_time_that_other_stages_are_waited_for() -> None:
    """Of four micro-batches of 10 and 20 ms on two stages, each stands still for one of both kinds."""
    analysis = analyze(EVEN.run()[0])
    ordinary = analysis.steps[analysis.steps["ordinary"].astype(bool)]
    assert ordinary["compute"].mean() == pytest.approx(120.0, abs=0.1)
    assert ordinary["bubble"].mean() == pytest.approx(30.0, abs=4.0)
    assert ordinary[["peer_wait", "comm_exposed"]].to_numpy().max() == 0.0
    bubble = next(finding for finding in analysis.findings if finding.code == "pipeline.bubble")
    # Of four times the micro-batches each takes 17/16 of the stages' time, and not 5/4.
    assert bubble.gain.percent == pytest.approx(100 * (1 - 17 / 16 / (5 / 4)), rel=0.1)


def test_backwards_that_were_not_timed_on_the_device_ask_for_kernels() -> None:
    analysis = analyze(EVEN.with_(timed=("forward",)).run()[0])
    assert "dsprof run --deep 10:13" in analysis.not_judged["pipeline.bubble"]
