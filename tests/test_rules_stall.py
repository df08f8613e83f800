"""pipeline.stall on made-up pipelines: a slow link between two stages, messages that nobody asks for early; and what is
neither."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from findings import of
from made_up_pipeline import MadeUpPipeline

from dsprof.analyzer import analyze
from dsprof.analyzer.finding import Finding
from dsprof.analyzer.rules.pipeline.stall import medians_of_others

SOUND = MadeUpPipeline()


def slow_link(source: int, target: int, ms: float = 20.0) -> MadeUpPipeline:
    return SOUND.with_(link=lambda a, b: ms if (a, b) == (source, target) else 0.3)


def first(job: MadeUpPipeline) -> Finding:
    return analyze(job.trace()).findings[0]


@pytest.mark.plants("pipeline.stall")
@pytest.mark.parametrize("handed", [True, False], ids=["sender goes on", "sender waits"])
def test_the_link_between_two_stages_is_slow(handed: bool) -> None:
    """Whether its sender waits for a message until it is there, or until it is on its way."""
    slow = slow_link(1, 2).with_(handed=handed, hosts=("a", "a", "b"))
    found = first(slow)
    assert (found.code, found.severity, found.where.ranks, found.where.stage) == ("pipeline.stall", "high", (1, 2), 2)
    assert found.title == (
        "stage 2 waits for what stage 1 sends: 1.00 MiB are 20.0 ms on their way, and 0.30 ms between the other stages"
    )
    true = slow.step_ms() - SOUND.step_ms()
    assert found.gain.ms == pytest.approx(true, rel=0.02)
    assert found.fixes[0].title.startswith("the network from a to b: which interface it goes over (GLOO_SOCKET_IFNAME)")
    beside = found.fixes[1]
    assert beside.title.startswith("a schedule with several stages a rank (ScheduleInterleaved1F1B) (train.py:29)")
    assert beside.gain is not None
    assert beside.gain.low < slow.step_ms() - slow.with_(early=True).step_ms() < beside.gain.high


def test_a_link_between_hosts_that_is_slow_both_ways_is_one() -> None:
    sound = SOUND.with_(stages=4, hosts=("a", "a", "b", "b"))
    slow = sound.with_(link=lambda a, b: 12.0 if {a, b} == {1, 2} else 0.3)
    found = [one for one in analyze(slow.trace()).findings if one.code == "pipeline.stall"]
    assert [one.where.ranks for one in found] == [(1, 2)]
    assert found[0].title.endswith("; so are those the other way")
    true = slow.step_ms() - sound.step_ms()
    assert found[0].gain.low <= true <= found[0].gain.high


def test_of_two_stages_the_other_way_is_what_it_is_compared_with() -> None:
    found = first(slow_link(0, 1, 12.0).with_(stages=2))
    assert found.title == (
        "stage 1 waits for what stage 0 sends: 1.00 MiB are 12.0 ms on their way, and 0.30 ms the other way"
    )


@pytest.mark.parametrize("count", range(2, 8))
def test_the_median_of_all_the_others(count: int) -> None:
    draw = np.random.default_rng(count)
    for values in (draw.random(count), draw.integers(0, 3, count).astype(float)):
        wanted = [float(np.median(np.delete(values, at))) for at in range(count)]
        assert medians_of_others(values).tolist() == wanted


def test_gradients_that_come_back_slowly() -> None:
    found = first(slow_link(2, 1).with_(schedule="gpipe"))
    assert (found.code, found.where.ranks, found.where.stage) == ("pipeline.stall", (1, 2), 1)


def test_messages_that_could_go_beside_the_computation() -> None:
    """All links are alike: what is lost is that a stage asks for a message only when it needs it."""
    job = SOUND.with_(link=lambda source, target: 6.0)
    found = first(job)
    assert (found.code, found.severity) == ("pipeline.stall", "medium")
    assert "they could travel while stages compute" in found.title
    assert found.gain.ms == pytest.approx(job.step_ms() - job.with_(early=True).step_ms(), rel=0.05)
    assert "torch then asks for what it receives ahead" in found.fixes[0].title


def noisy(seed: int, spread: float, slow: tuple[int, int] | None, ms: float) -> Callable[[int, int], float]:
    """Messages of a link take 0.8 ms, of a slow one `ms`, and each more or less than that."""
    draw = np.random.default_rng(seed)
    return lambda source, target: (ms if (source, target) == slow else 0.8) * math.exp(spread * draw.standard_normal())


@pytest.mark.parametrize(
    ("job", "slow", "ms", "spread"),
    [
        (SOUND.with_(stages=3, seed=1), (2, 1), 8.0, 0.38),
        (SOUND.with_(stages=4, seed=5), (3, 2), 13.2, 0.15),
        (SOUND.with_(stages=4, seed=6, schedule="gpipe", handed=False), (1, 2), 11.2, 0.18),
    ],
    ids=["three stages", "gradients", "gpipe"],
)
def test_the_interval_is_as_wide_as_what_was_measured_is_spread(
    job: MadeUpPipeline, slow: tuple[int, int], ms: float, spread: float
) -> None:
    """It holds what the job with a sound link saves, another time; and it says something."""
    job = job.with_(jitter=0.05)
    faulty = job.with_(link=noisy(job.seed, spread, slow, ms))
    sound = job.with_(link=noisy(job.seed + 100, spread, None, ms), seed=job.seed + 1000)
    found = first(faulty)
    assert (found.code, found.where.ranks) == ("pipeline.stall", tuple(sorted(slow)))
    assert found.gain.low < faulty.step_ms() - sound.step_ms() < found.gain.high
    assert found.gain.high - found.gain.low < found.gain.ms


def test_of_messages_whose_sizes_are_not_told_none_are_made_up() -> None:
    """As in traces of other tools: whether a pair's messages are the larger ones is not known, so no link is slow."""
    found = first(slow_link(1, 2).with_(bytes=None))
    assert (found.code, found.where.ranks) == ("pipeline.stall", (1, 2))
    assert "they could travel while stages compute" in found.title
    assert "bytes of one" not in {row.metric for row in found.evidence}


@pytest.mark.parametrize(
    "job",
    [
        SOUND,
        SOUND.with_(schedule="gpipe"),
        SOUND.with_(link=lambda source, target: 6.0, early=True, microbatches=16),  # nobody waits for them
        SOUND.with_(forward=lambda stage, step: 9.0 if stage == 1 else 5.0),
        SOUND.with_(link=lambda source, target: 0.4 if source else 0.3),
    ],
    ids=["sound", "gpipe", "early", "unequal stages", "a little"],
)
def test_what_is_no_stall(job: MadeUpPipeline) -> None:
    analysis = analyze(job.trace())
    found = of(analysis, "pipeline.stall")
    assert found is None or found.severity == "info"
    assert "pipeline.stall" in analysis.passed
