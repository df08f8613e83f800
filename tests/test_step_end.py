"""How often samples are taken after a step, on a clock that is injected."""

from __future__ import annotations

import pytest

from dsprof.collectors.capture.step_end import FIRST, SHARE, StepEnd

MS, US = 1_000_000, 1_000


class Job:
    """Takes steps of a given length; what a sample takes is given, too."""

    def __init__(self, sample_ns: int) -> None:
        self.now, self.sample_ns = 0, sample_ns
        self.end = StepEnd(lambda: self.now)
        self.sampled: list[int] = []

    def take(self, steps: int, step_ns: int, soon: bool = False) -> None:
        for _ in range(steps):
            self.now += step_ns
            self.end.taken += 1
            if self.end.taken >= self.end.due:
                self.sampled.append(self.end.taken)
                self.end.begin()
                self.now += self.sample_ns
                self.end.end(soon)


@pytest.mark.parametrize(
    ("step_ns", "every"), [(150 * MS, 1), (25 * MS, 1), (10 * MS, 3), (2 * MS, 13), (MS // 10, 250)]
)
def test_samples_take_a_fixed_share_of_the_steps(step_ns: int, every: int) -> None:
    job = Job(sample_ns=50 * US)
    job.take(2000, step_ns)
    assert job.sampled[:FIRST] == [1, 2, 3]
    assert {later - sooner for sooner, later in zip(job.sampled[FIRST:], job.sampled[FIRST + 1 :], strict=False)} == {
        every
    }
    steady = len(job.sampled) - FIRST
    assert steady * job.sample_ns <= SHARE * 2000 * step_ns * 1.001
    assert job.end.spent_ns == len(job.sampled) * job.sample_ns


def test_steps_that_become_shorter_or_longer_are_followed() -> None:
    job = Job(sample_ns=50 * US)
    job.take(100, 2 * MS)
    job.take(5, 100 * MS)
    job.take(20, 100 * MS)
    assert job.sampled[-10:] == list(range(116, 126)), "after each, as soon as that is known"


def test_one_sample_that_was_held_up_does_not_make_the_next_ones_rare() -> None:
    job = Job(sample_ns=50 * US)
    job.take(200, 2 * MS)
    job.sample_ns = 30 * MS
    seen = len(job.sampled)
    while len(job.sampled) == seen:
        job.take(1, 2 * MS)
    job.sample_ns = 50 * US
    held_up = job.sampled[-1]
    job.take(60, 2 * MS)
    assert job.sampled[seen + 1] == held_up + 13


@pytest.mark.parametrize("held_up", [2, 3])
def test_one_of_the_first_samples_that_was_held_up_does_not_make_the_next_ones_rare(held_up: int) -> None:
    job = Job(sample_ns=50 * US)
    for step in range(1, FIRST + 1):
        job.sample_ns = 30 * MS if step == held_up else 50 * US
        job.take(1, 2 * MS)
    job.sample_ns = 50 * US
    job.take(60, 2 * MS)
    assert len(job.sampled) >= FIRST + 2


def test_who_wants_the_next_step_gets_it() -> None:
    job = Job(sample_ns=50 * US)
    job.take(100, 2 * MS)
    job.take(20, 2 * MS, soon=True)
    assert job.sampled[-4:] == [117, 118, 119, 120]


def test_a_step_that_is_known_to_matter() -> None:
    job = Job(sample_ns=50 * US)
    job.take(100, 2 * MS)
    due = job.end.due
    job.end.no_later_than(due + 5)
    assert job.end.due == due
    job.end.no_later_than(102)
    assert job.end.due == 102
    job.end.no_later_than(40)
    assert job.end.due == 101, "the next one"
