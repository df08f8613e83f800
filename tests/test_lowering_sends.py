"""Pipelines whose senders wait for what they send at once: replayed, and lowered to other plans, as they would run."""

from __future__ import annotations

import pytest
from made_up_pipeline import MadeUpPipeline

from dsprof.analyzer.graph.replay import replay
from dsprof.analyzer.study import study
from dsprof.analyzer.whatif import apply
from dsprof.analyzer.whatif.lowering import Lower
from dsprof.engine.schedule import make_plan


def job(blocking: str, schedule: str, hand_over: float = 0.05, link: float = 6.0) -> MadeUpPipeline:
    return MadeUpPipeline(
        blocking=blocking,
        schedule=schedule,
        hand_over=hand_over,
        link=lambda source, target: link,
        jitter=0.0,
        steps=14,
    )


@pytest.mark.parametrize(
    ("ran", "schedule", "microbatches"),
    [
        # The next receive is posted when what was sent before is there: 1F1B would stand still.
        (job("rendezvous", "gpipe"), "gpipe", 12),
        (job("handed", "gpipe", hand_over=2.0), "gpipe", 12),
        # A copy is taken of what is sent, which is then under way whether the receiver has come or not.
        (job("eager", "1f1b"), "gpipe", 8),
        (job("eager", "gpipe"), "1f1b", 8),
        (job("eager", "1f1b", hand_over=2.0), "1f1b", 12),
        # Only of some pairs do the receivers come later than the copies are taken.
        (job("eager", "gpipe", hand_over=2.0, link=3.0), "1f1b", 8),
    ],
)
def test_senders_that_wait(ran: MadeUpPipeline, schedule: str, microbatches: int) -> None:
    measured = study(ran.trace())
    graph = measured.need_graph()
    assert replay(graph).durations.mean() == pytest.approx(measured.step_ms, rel=1e-3)
    assert replay(apply(graph, [Lower()])).durations.mean() == pytest.approx(measured.step_ms, rel=3e-3)
    lowered = apply(graph, [Lower(make_plan(schedule, 3, microbatches))])
    then = ran.with_(schedule=schedule, microbatches=microbatches).step_ms()
    assert replay(lowered).durations.mean() == pytest.approx(then, rel=3e-3)


def test_a_plan_in_which_senders_would_wait_for_ever_is_told_without_their_waits() -> None:
    """1F1B of sends that wait for their receivers stands still; who asks about it would send otherwise."""
    graph = study(job("rendezvous", "gpipe").trace()).need_graph()
    told = replay(apply(graph, [Lower(make_plan("1f1b", 3, 8))])).durations.mean()
    assert 8 * 15.0 < told < replay(graph).durations.mean()
