"""What is added to a gain's interval, and taken from the gain on busy cores."""

from __future__ import annotations

import pytest

from dsprof.analyzer.calibration import ModelError, kept_on_busy_cores, with_model_error
from dsprof.analyzer.finding import Gain


def test_half_widths_add_as_independent_errors_do() -> None:
    error = ModelError(of_gain=0.1, of_step=0.02, busy=0.02)
    assert error.half_ms(30.0, 200.0, load=0.0) == pytest.approx(5.0)  # 3 and 4
    assert error.half_ms(0.0, 200.0, load=1.0) == pytest.approx(8.0)
    assert error.half_ms(0.0, 200.0, load=0.5) == pytest.approx(6.0)


def test_the_noise_of_the_steps_stays_in_the_interval() -> None:
    gain = with_model_error(Gain(20.0, 20.0, 17.0, 24.0), "rank.straggler", 100.0, 0.0)
    half = (1.6**2 + 2.0**2) ** 0.5
    assert (gain.ms, gain.percent) == (20.0, 20.0)
    assert gain.low == pytest.approx(20 - (3.0**2 + half**2) ** 0.5)
    assert gain.high == pytest.approx(20 + (4.0**2 + half**2) ** 0.5)


def test_what_gains_nothing_and_what_was_never_held_against_a_run_stay() -> None:
    nothing, other = Gain(0.0, 0.0, -1.0, 1.0), Gain(5.0, 5.0, 4.0, 6.0)
    assert with_model_error(nothing, "rank.straggler", 100.0, 1.0) is nothing
    assert with_model_error(other, "run.rank-died", 100.0, 1.0) is other


def test_a_gain_is_smaller_where_cores_are_busy() -> None:
    assert kept_on_busy_cores("rank.straggler", 0.0) == 1.0
    assert kept_on_busy_cores("rank.straggler", 1.0) == pytest.approx(0.9)
    assert kept_on_busy_cores("data.stall", 1.0) == 1.0  # whose rule counts cores itself
