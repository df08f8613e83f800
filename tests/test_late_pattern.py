"""When ranks are late: always, for a while, in turn, or now and then; and nothing of it by chance."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from synthetic import Job

from dsprof.analyzer import analyze
from dsprof.analyzer.arrays import Float
from dsprof.analyzer.finding import Finding
from dsprof.analyzer.rules.run.late import in_a_spell, late_ones
from dsprof.analyzer.rules.run.late_pattern import Pattern, find_pattern, stands_out, struck_steps
from dsprof.reports import wording

STEPS = 40


def late_in(*of_ranks: range | list[int]) -> Float:
    """50 ms late in these steps, and a little early or late in the others."""
    late = np.random.default_rng(7).normal(0, 0.5, (len(of_ranks), STEPS))
    for rank, struck in enumerate(of_ranks):
        late[rank, [*struck]] = 50.0
    return late


def pattern(*of_ranks: range | list[int], first_step: int = 5) -> Pattern:
    return find_pattern(late_in(*of_ranks), range(3, 3 + len(of_ranks)), np.arange(first_step, first_step + STEPS))


def test_a_rank_that_is_always_late() -> None:
    assert pattern(range(STEPS)) == Pattern("chronic", "50.0 ms late in every step", "chronic: in every step")
    assert pattern(range(4, STEPS)).when == "chronic: in 36 of 40 steps"


@pytest.mark.parametrize(("struck", "said", "steps"), [
    (range(15, 25), "from step 20 to 29", (20, 29)),
    ([15, 16, 18, 19, 20, 21, 22], "from step 20 to 27", (20, 27)),
    (range(30, 40), "since step 35", (35, 44)),
    (range(10), "until step 14", (5, 14)),
])  # fmt: skip
def test_a_rank_that_is_late_for_a_while(struck: range | list[int], said: str, steps: tuple[int, int]) -> None:
    found = pattern(struck)
    long = len(struck) > 7
    when = f"transient: {said}" + ("; how often such a time comes, one does not tell" if long else "")
    assert found == Pattern("transient", f"50.0 ms late in {len(struck)} of 40 steps, {said},", when, steps, long)


def test_a_rank_that_is_late_now_and_then() -> None:
    found = pattern([*range(0, STEPS, 5)])
    assert found == Pattern(
        "intermittent", "50.0 ms late in 8 of 40 steps", "now and then: in 8 of 40 steps, all over the run"
    )


def test_ranks_that_are_late_in_turn() -> None:
    found = pattern(*([*range(rank, STEPS, 3)] for rank in range(3)))
    assert found == Pattern(
        "rotating",
        "50.0 ms late in turn, in 40 of 40 steps,",
        "rotating: rank 3 in 14, rank 4 in 13, rank 5 in 13 of 40 steps",
    )


def test_two_ranks_that_are_late_together_are_not_late_in_turn() -> None:
    assert pattern(range(STEPS), range(STEPS)).kind == "chronic"
    assert pattern([*range(0, STEPS, 2)], [*range(0, STEPS, 2)]).kind == "intermittent"


def test_chance_is_hardly_ever_taken_for_a_spell_or_for_turns() -> None:
    drawn = np.random.default_rng(1)
    kinds = []
    for _ in range(300):
        ranks, share = int(drawn.integers(1, 4)), drawn.uniform(0.1, 0.6)
        struck = [np.flatnonzero(drawn.random(STEPS) < share).tolist() or [0] for _ in range(ranks)]
        kinds.append(pattern(*struck).kind)
    assert kinds.count("transient") + kinds.count("rotating") <= 6


def straggler(forward: Callable[[int, int], float], ranks: int = 5) -> Finding | None:
    findings = analyze(Job(ranks=ranks, steps=STEPS, forward=forward).trace()).findings
    return next((finding for finding in findings if finding.code == "rank.straggler"), None)


@pytest.mark.parametrize(("forward", "ranks", "title", "when"), [
    (lambda rank, step: 60 if rank == 2 else 40, (2,), "late in every step", "chronic: in every step"),
    (lambda rank, step: 90 if rank < 2 and step % 2 == rank else 40, (0, 1), "late in turn, in 30 of 30 steps,",
     "rotating: rank 0 in 15, rank 1 in 15 of 30 steps"),
    (lambda rank, step: 90 if rank == 2 and 18 <= step < 26 else 40, (2,), "from step 18 to 25, and the others wait",
     "transient: from step 18 to 25; how often such a time comes, one does not tell"),
])  # fmt: skip
def test_the_finding_says_when(
    forward: Callable[[int, int], float], ranks: tuple[int, ...], title: str, when: str
) -> None:
    found = straggler(forward)
    assert found is not None
    assert found.where.ranks == ranks
    assert title in found.title
    (said,) = (item.value for item in found.evidence if item.metric == "when")
    assert str(said).startswith(when)


def test_a_passing_straggler_is_a_remark_as_it_may_not_come_again() -> None:
    found = straggler(lambda rank, step: 90 if rank == 2 and 18 <= step < 25 else 40)
    assert found is not None
    assert found.severity == "info"
    assert found.where.steps == (18, 24)


def test_what_a_long_time_of_lateness_cost_is_told_of_this_run() -> None:
    """However often it comes again, that it was there in so many of the steps is sure, and what that cost."""
    found = straggler(lambda rank, step: 130 if rank == 2 and 18 <= step < 26 else 40)
    assert found is not None
    assert found.is_problem
    assert found.where.steps == (18, 25)
    assert found.gain.ms == pytest.approx(90 * 8 / 30, rel=0.1)
    assert 0.6 * found.gain.ms < found.gain.low < found.gain.high < 1.4 * found.gain.ms
    assert found.confidence is None  # no such prediction was tried on another run
    assert wording.saving(found).startswith("cost this run 23.8 ms a step (15 %) [")
    assert wording.saving_in_short(found) == "cost this run 23.8 ms a step (15 %)"


def test_what_lasts_for_a_second_is_a_long_time_in_fewer_steps() -> None:
    """As of long steps."""
    found = straggler(lambda rank, step: 310 if rank == 2 and 18 <= step < 24 else 130)
    assert found is not None
    assert (found.is_problem, found.where.steps) == (True, (18, 23))
    for first, ms in ((19, 420), (18, 280)):  # five steps of 1.4 s in all, six of 0.9 s
        found = straggler(lambda rank, step, first=first, ms=ms: ms if rank == 2 and first <= step < 24 else 130)
        assert found is None or not found.is_problem


def test_a_moment_is_no_long_time_however_many_steps_it_has() -> None:
    found = straggler(lambda rank, step: 12 if rank == 2 and 18 <= step < 26 else 4)
    assert found is None or not found.is_problem


def test_a_long_time_of_lateness_stands_out_of_a_noisy_run() -> None:
    drawn = np.random.default_rng(1)
    took = 40 + drawn.normal(0, 9, (2, STEPS))
    took[1, 18:28] += 90
    everyone = np.ones(2, bool)
    assert in_a_spell(took[1] - took[0], everyone, 1, took)
    took[1, 22:28] -= 90
    assert not stands_out(took[1] - took[0], struck_steps(took[1] - took[0]))


@pytest.mark.parametrize(("kept", "varies"), [(0.9, 0.08), (0.97, 0.05), (0.9, 0.2)])
def test_noise_that_drifts_is_no_long_time_of_lateness(kept: float, varies: float) -> None:
    """Of 300 healthy ranks, whose noise keeps so much of what it was in the step before (of 3,000 it is at most 2)."""
    drawn = np.random.default_rng(7)
    noise = np.zeros((300, STEPS))
    for step in range(1, STEPS):
        noise[:, step] = kept * noise[:, step - 1] + drawn.normal(0, varies * np.sqrt(1 - kept**2), 300)
    late = 1000 * (noise - np.median(noise, axis=0))  # of steps of 1 s, so that no spell is too short
    assert not [rank for rank in range(300) if stands_out(late[rank], struck_steps(late[rank]))]


@pytest.mark.parametrize("seed", range(8))
def test_ranks_that_are_disturbed_at_random_have_no_spell(seed: int) -> None:
    drawn = np.random.default_rng(seed)
    took = 40 + drawn.exponential(4, (5, STEPS)) + 30 * (drawn.random((5, STEPS)) < 0.04)
    late = took - np.median(took, axis=0)
    everyone = np.ones(5, bool)
    assert not any(in_a_spell(late[rank], everyone, rank, took) for rank in range(5))
    took = 40 + drawn.exponential(4, (5, STEPS))
    took[3, 20:26] += 60
    late = took - np.median(took, axis=0)
    assert [rank for rank in range(5) if in_a_spell(late[rank], everyone, rank, took)] == [3]


def test_a_healthy_job_has_no_late_rank_of_any_kind() -> None:
    found = straggler(lambda rank, step: 40 + (rank * 7 + step * 3) % 5)
    assert found is None or not found.is_problem


def names(late: Float) -> list[int]:
    share = late_ones(100.0 + late, late, [np.ones(len(late), bool)], 1.0)
    assert share is not None
    return np.flatnonzero(share.any(axis=1)).tolist()


def test_of_thousands_one_is_a_little_late_by_chance() -> None:
    """By as much as one of thousands may be: of eight that is late, and so it is if it is so in all steps alike."""
    late = np.random.default_rng(3).normal(0, 3.0, (4000, 15))
    late[7, ::3] += 110.0
    late[8, 1::3] += 110.0
    late[9] += 3.9 - late[9].mean()
    assert names(late) == [7, 8]
    assert names(late[[1, 2, 3, 9, 10, 11, 12, 13]]) == [3]
    late[9] += 8.0
    assert names(late) == [7, 8, 9], "which none is by chance"
    late[9] = np.random.default_rng(4).normal(3.9, 0.5, 15)
    assert names(late) == [7, 8, 9]


@pytest.mark.parametrize("faster", [10, 20, 28])
def test_who_is_late_among_hosts_of_two_speeds(faster: int) -> None:
    """How far the faster ones are from the others is not what ranks differ by by chance."""
    late = np.random.default_rng(5).normal(0, 2.0, (64, 15))
    late[:faster] -= 10.0
    late[63, ::3] += 60.0
    assert names(late) == [63]
