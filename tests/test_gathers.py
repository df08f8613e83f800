"""Parameters that a stream of its own gathers: when each could have been issued, and who waits for it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from sleeping_jobs import SleepingRanks

from dsprof.analyzer import analyze
from dsprof.analyzer.graph.gathers import Gathers, awaited, find_gathers, places, reductions_awaited

MS = 1_000_000


def ms(*moments: float) -> np.ndarray:
    return np.array([round(moment * MS) for moment in moments], np.int64)


def gathers(reached: np.ndarray, end: np.ndarray, taken: np.ndarray) -> Gathers:
    count = len(reached)
    launched, target = ms(*range(count)), np.arange(count)
    stream, group, every = np.full(count, "cuda.1", object), np.full(count, "comm.0", object), np.ones(count, bool)
    return find_gathers(every, stream, group, launched, reached, end, target, taken)


def test_a_gather_that_queued_could_have_been_issued_when_the_last_one_was_taken_over() -> None:
    """The third begins as soon as the second is over; the stream that computes had taken the first over at 12."""
    found = gathers(ms(0, 12, 30), ms(10, 30, 40), ms(12))
    assert found.at.tolist() == ms(0, 12, 12).tolist()


def test_a_gather_that_did_not_queue_was_issued_when_its_stream_had_got_to_it() -> None:
    found = gathers(ms(0, 12, 35), ms(10, 30, 40), ms(12))
    assert found.at.tolist() == ms(0, 12, 35).tolist()


def test_a_wait_that_takes_no_time_is_for_the_first_gather_that_nobody_has_waited_for() -> None:
    """Of three launched at 0, 1 and 2, the second is waited for by name; the third had not ended when its wait came."""
    found = gathers(ms(0, 10, 20), ms(10, 20, 40), ms())
    launched, start = ms(0.5, 1.5, 2.5), ms(15, 20, 30)
    assert awaited(found, launched, start, np.array([-1, 1, -1])).tolist() == [0, 1, -1]
    assert awaited(found, launched, ms(15, 20, 45), np.array([-1, 1, -1])).tolist() == [0, 1, 2]


def test_a_wait_before_a_reduction_is_launched_is_for_the_one_before() -> None:
    """As FSDP2 launches a backward: a wait for the next unit's gather (G), its gather, a wait for the reduction before
    (R), the reduction. Reductions are launched at 1, 4 and 7, gathers at 2 and 5."""
    issue, reduces = ms(1, 2, 4, 5, 7), np.array([True, False, True, False, True])
    end, rows = ms(110, 120, 130, 140, 150), np.array([10, 11, 12, 13, 14])
    launched = ms(1.5, 3, 4.5, 6, 8)  # G R G R, and one with no communication after it
    nobody = np.full(5, -1)

    def told(over: np.ndarray, known: np.ndarray = nobody) -> list[int]:
        return reductions_awaited(issue, reduces, end, rows, launched, over, known).tolist()

    assert told(ms(115, 125, 135, 145, 160)) == [-1, 10, -1, 12, -1]
    assert told(ms(115, 105, 135, 145, 160)) == [-1, -1, -1, 12, -1]  # it went on before that had ended
    assert told(ms(115, 125, 135, 145, 160), np.array([11, -1, -1, -1, 12])) == [11, 10, -1, -1, 12]  # waited for twice
    assert reductions_awaited(*(ms(),) * 4, launched, launched, nobody).tolist() == nobody.tolist()


def test_a_gather_is_put_where_the_stream_was_and_in_the_step_that_launched_it() -> None:
    """The stream's events are at 10, 20 and 30 of a step that ends at 40, and at 50 of the next. The host launched the
    events at 1, 2, 3 and 5, and the steps until 4 and 6."""
    host, ended, moments, keys = ms(4, 6), ms(40, 60), ms(10, 20, 30, 50), ms(1, 2, 3, 5)
    never, ever = np.array([-(1 << 62)]), np.array([1 << 62])
    one = Gathers(ms(2.5), ms(15), ms(18), np.array([7]), never, ever)
    assert [of.tolist() for of in places(one, moments, keys, host, ended)] == [[1], [15 * MS], [7]]
    early = Gathers(ms(4.5), ms(15), ms(45), np.array([7]), never, ever)  # of the second step, which begins at 40
    assert [of.tolist() for of in places(early, moments, keys, host, ended)] == [[3], [40 * MS + 1], [7]]
    queued = Gathers(ms(2.5), ms(15), ms(45), np.array([7]), ms(3), ever)  # behind what was launched at 3
    assert [of.tolist() for of in places(queued, moments, keys, host, ended)] == [[3], [15 * MS], [7]]


def test_shards_that_are_gathered_too_late_are_told_with_what_earlier_ones_gain(
    sleeping_ranks: SleepingRanks, tmp_path: Path
) -> None:
    """FSDP2: every second unit has parameters that take 46 ms to gather and as long to scatter, which one unit's 20 and
    40 ms hide in part."""
    arguments = ("--shard", "--blocks=6", "--large-every=2", "--bandwidth=0.1", "--steps=9")
    analysis = analyze(sleeping_ranks.run(tmp_path, "faults.py", *arguments, ranks=2, without="nvml").trace)
    steps = analysis.steps[analysis.steps["ordinary"].astype(bool)]
    assert steps["compute"].median() == pytest.approx(360, abs=3)
    assert steps["comm_exposed"].median() > 100
    if "comm.exposed" in analysis.not_judged:  # a busy machine stopped the hosts: then nothing is predicted
        return
    exposed = next(finding for finding in analysis.findings if finding.code == "comm.exposed")
    assert exposed.gain.ms > 40
    assert "set_modules_to_forward_prefetch" in exposed.fixes[0].title
