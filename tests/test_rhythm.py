"""What comes in a fixed rhythm is no noise, of the mean of the steps, or of what half of them tells of the others."""

from __future__ import annotations

import numpy as np
import pytest
from synthetic import Job

from dsprof.analyzer.ask import Without, ask
from dsprof.analyzer.budget.rhythm import period
from dsprof.analyzer.price.confidence_interval import interval
from dsprof.analyzer.study import study


def every(gap: int, count: int, ms: float = 10.0, first: int = 0) -> np.ndarray:
    found = np.zeros(count)
    found[first::gap] = ms
    return found


def noise(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 0.3, count)


@pytest.mark.parametrize(("gap", "first"), [(2, 0), (2, 1), (3, 2), (5, 3)])
def test_a_rhythm_is_found(gap: int, first: int) -> None:
    assert period(every(gap, 30, first=first) + noise(30)) == gap


@pytest.mark.parametrize(
    "values",
    [
        noise(30), np.zeros(30), np.zeros(0), np.ones(3), every(10, 30), every(1, 30),
        every(3, 30) + every(3, 30, first=1) * (np.arange(30) % 2),  # now and then two in a row
        np.concatenate([every(3, 18), np.zeros(12)]),  # it ended
        np.concatenate([np.zeros(12), every(3, 18)]),  # it began
        every(3, 30) * np.linspace(0.1, 1, 30),  # as unlike one another as they are unlike the rest
    ],
)  # fmt: skip
def test_what_is_none(values: np.ndarray) -> None:
    assert period(values) == 1


@pytest.mark.parametrize("seed", range(20))
def test_no_rhythm_is_seen_in_what_comes_at_random(seed: int) -> None:
    draw = np.random.default_rng(seed)
    assert period(10.0 * (draw.random(24) < 0.4) + draw.normal(0, 0.3, 24)) == 1


@pytest.mark.parametrize("gap", [2, 3])
def test_batches_have_as_many_of_it(gap: int) -> None:
    low, high = interval(every(gap, 21) + 0.1 * noise(21))
    assert low < 10 / gap < high
    assert high - low < 1.0  # by the steps it would be 2.5 and 3.5


def test_intervals_of_rhythms_hold_what_more_steps_have_in_the_mean() -> None:
    held = 0
    for seed in range(200):
        draw = np.random.default_rng(seed)
        steps = every(3, 21 + seed % 3, first=seed % 3)
        low, high = interval(steps * draw.normal(1, 0.1, len(steps)) + draw.normal(0, 0.5, len(steps)))
        held += low <= 10 / 3 <= high
    assert held >= 185


@pytest.mark.parametrize("gap", [2, 3])
def test_collections_of_every_few_steps_are_told_narrowly(gap: int) -> None:
    whole = study(Job(steps=51, gc=lambda rank, step: 30 if step % gap == 0 else 0).trace())
    assert whole.checked is not None
    assert whole.checked.held_out is not None
    assert whole.checked.held_out.differs < 0.02
    (row,) = ask(whole, [[Without("pause.gc")]]).rows
    assert row.gain is not None
    assert row.gain.low < 30 / gap < row.gain.high
    assert row.gain.high - row.gain.low < 0.8 * row.gain.ms
