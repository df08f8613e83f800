"""Why stages of a made-up pipeline wait: parts that sum to the bubble, and which of them is the largest."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from made_up_pipeline import MadeUpPipeline

from dsprof.analyzer import analyze
from dsprof.analyzer.price.bubble_shares import bubble_shares
from dsprof.analyzer.rules.base import NotJudged
from dsprof.analyzer.rules.pipeline.bubble_and_imbalance import need_two_of
from dsprof.analyzer.study import study

SOUND = MadeUpPipeline(jitter=0.0, link=lambda source, target: 0.01)
"""Three stages, eight micro-batches of 5 and 10 ms: each stage stands still for two of both, 30 ms."""


@pytest.mark.parametrize(
    ("job", "largest", "ms"),
    [
        (SOUND, "schedule", 30.0),
        (SOUND.with_(forward=lambda s, _: 9.0 if s == 1 else 5.0, backward=lambda s, _: 18.0 if s == 1 else 10.0),
         "imbalance", None),
        (SOUND.with_(link=lambda a, b: 20.0 if (a, b) == (1, 2) else 0.01), "communication", None),
        # 100 ms on the first of three ranks, for which two of them wait.
        (SOUND.with_(data=lambda s, _: 100.0 if s == 0 else 0.0), "data", 200 / 3),
        (SOUND.with_(forward=lambda s, step: 30.0 if s == 1 and step % 3 == 0 else 5.0), "straggler", None),
    ],
    ids=["schedule", "imbalance", "communication", "data", "straggler"],
)  # fmt: skip
def test_what_stages_wait_for(job: MadeUpPipeline, largest: str, ms: float | None) -> None:
    of_job = study(job.trace())
    causes = bubble_shares(of_job)
    assert causes is not None
    assert next(iter(causes)) == largest
    assert sum(causes.values()) == pytest.approx(float(of_job.work("bubble").mean()))
    if ms is not None:
        assert causes[largest] == pytest.approx(ms, rel=0.03)


def test_the_largest_part_is_in_the_title_and_the_first_fix() -> None:
    uneven = SOUND.with_(forward=lambda s, _: 9.0 if s == 1 else 5.0, backward=lambda s, _: 18.0 if s == 1 else 10.0)
    (bubble,) = [one for one in analyze(uneven.trace()).findings if one.code == "pipeline.bubble"]
    assert "; but of the 85.2 ms that stages wait a step, " in bubble.title
    assert bubble.title.endswith("are for stages of unequal work")
    assert bubble.fixes[0].title.startswith("first give the stages equal work (`pipeline.imbalance`): ")
    rows = {row.metric: row.value for row in bubble.evidence if row.metric.startswith("of the waiting, for ")}
    assert sum(map(float, rows.values())) == pytest.approx(85.2, abs=0.1)


def test_of_a_schedule_that_is_the_reason_nothing_else_is_said() -> None:
    (bubble,) = [one for one in analyze(SOUND.trace()).findings if one.code == "pipeline.bubble"]
    assert bubble.title == "the pipeline fills and drains for 20 % of the step: 8 micro-batches for 3 stages"
    assert bubble.fixes[0].title.startswith("n_microbatches=32 (train.py:29) with 4 times the batch")


@pytest.mark.parametrize("captured", [(0, 1), (1, 2)])
def test_a_stage_that_was_not_captured_is_no_shorter_pipeline(captured: tuple[int, ...]) -> None:
    """Of two stages of three it is not known for how long the pipeline fills and drains."""
    analysis = analyze(SOUND.with_(captured=captured).trace())
    assert analysis.not_judged["pipeline.bubble"] == "only 2 of the 3 stages of the pipeline were captured"
    assert not [one for one in analysis.findings if one.code == "pipeline.bubble"]


@pytest.mark.parametrize(("world_size", "missing", "judged"), [(4, True, False), (3, True, True), (4, False, True)])
def test_one_rank_of_several_does_not_speak_for_its_stage(world_size: int, missing: bool, judged: bool) -> None:
    """It may be a straggler: of stage 1 one rank was captured. Of a job with one for each stage it is all there is."""
    held = [np.array([True, True, False]), np.array([False, False, True])]
    run = SimpleNamespace(world_size=world_size)
    seen = SimpleNamespace(peer_groups=held, ranks_missing=missing, run=run)
    need_two_of(seen, 0)  # type: ignore[arg-type]  # of stage 0 there are two
    if judged:
        need_two_of(seen, 1)  # type: ignore[arg-type]
    else:
        with pytest.raises(NotJudged, match="of the slowest stage one rank was captured"):
            need_two_of(seen, 1)  # type: ignore[arg-type]
