"""What is added to a gain's interval, and how often such predictions came true."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dsprof.analyzer.finding import Gain
from dsprof.analyzer.price.calibration import ModelError, with_model_error
from dsprof.analyzer.rules.registry import all_rules, rule_of


def error_of(code: str) -> ModelError | None:
    rule = rule_of(code)
    assert rule is not None
    return rule.error


def test_half_widths_add_as_independent_errors_do() -> None:
    error = ModelError(of_gain=0.1, of_step=0.02, busy=0.02)
    assert error.half_ms(30.0, 200.0, load=0.0) == pytest.approx(5.0)  # 3 and 4
    assert error.half_ms(0.0, 200.0, load=1.0) == pytest.approx(8.0)
    assert error.half_ms(0.0, 200.0, load=0.5) == pytest.approx(6.0)


def test_an_error_may_reach_further_up_than_down() -> None:
    error = ModelError(of_gain=0.0, of_step=0.02, busy=0.02, busy_above=0.05)
    assert error.half_ms(30.0, 200.0, load=0.5) == pytest.approx(6.0)
    assert error.half_ms(30.0, 200.0, load=0.5, above=True) == pytest.approx(11.0)
    gain = with_model_error(Gain(40.0, 20.0, 40.0, 40.0), error_of("comm.small-messages"), 200.0, 1.0)
    assert (gain.low, gain.high) == pytest.approx((40 - (10**2 + 8**2) ** 0.5, 40 + (10**2 + 18**2) ** 0.5))


def test_the_noise_of_the_steps_stays_in_the_interval() -> None:
    gain = with_model_error(Gain(20.0, 20.0, 17.0, 24.0), error_of("rank.straggler"), 100.0, 0.0)
    half = (1.68**2 + 2.4**2) ** 0.5
    assert (gain.ms, gain.percent) == (20.0, 20.0)
    assert gain.low == pytest.approx(20 - (3.0**2 + half**2) ** 0.5)
    assert gain.high == pytest.approx(20 + (4.0**2 + half**2) ** 0.5)


def test_what_gains_nothing_and_what_was_never_held_against_a_run_stay() -> None:
    nothing, other = Gain(0.0, 0.0, -1.0, 1.0), Gain(5.0, 5.0, 4.0, 6.0)
    assert with_model_error(nothing, error_of("rank.straggler"), 100.0, 1.0) is nothing
    assert with_model_error(other, error_of("run.rank-died"), 100.0, 1.0) is other


def test_what_busy_cores_took_off_is_not_sure_either() -> None:
    gain = with_model_error(Gain(20.0, 20.0, 20.0, 20.0), error_of("rank.straggler"), 100.0, 0.0, contention_ms=5.0)
    assert 20 - gain.low == pytest.approx((1.68**2 + 2.4**2 + 3.0**2) ** 0.5)
    assert gain.high - 20 == pytest.approx(5.0 + (1.68**2 + 2.4**2) ** 0.5)  # it may have cost nothing


def test_confidence_is_the_share_of_predictions_that_came_true() -> None:
    results = json.loads((Path(__file__).parent.parent / "benchmarks/results/predictions.json").read_text())
    counted: dict[str, tuple[int, int]] = {}
    for of_set in results["came_true"].values():
        for code, found in of_set.items():
            held, made = counted.get(code, (0, 0))
            counted[code] = held + found["hold"], made + found["predictions"]
    assert counted == {rule.code: rule.came_true for rule in all_rules() if rule.came_true is not None}
    sure = {rule.code: rule.confidence for rule in all_rules()}
    assert sure["rank.straggler"] == round(counted["rank.straggler"][0] / counted["rank.straggler"][1], 2)
    assert sure["run.rank-died"] is None
