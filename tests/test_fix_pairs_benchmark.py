"""benchmarks/fix_pairs.py and tune_jobs.py: what they are to run, and what they make of what was measured. No job is
run."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import fix_pairs  # noqa: E402
import tune_jobs  # noqa: E402
from fix_cases import CASES, DEVELOPED, FRESH  # noqa: E402

from dsprof.knobs import parse_settings  # noqa: E402
from dsprof.knobs.registry import flags  # noqa: E402


def settings(change: Any) -> dict[str, Any]:
    return parse_settings(flags(change.items())[1::2])


def test_forty_pairs_of_which_twenty_are_fresh() -> None:
    assert (len(DEVELOPED), len(FRESH)) == (20, 20)
    assert len({case.name for case in CASES}) == 40
    assert len({(case.script, case.args, case.ranks, str(case.config)) for case in CASES}) == 40
    families = Counter(case.family for case in CASES)
    assert set(families) == {"ddp", "fsdp2", "pipeline", "deepspeed", "engine", "trainer", "loader", "device"}
    for case in CASES:
        assert settings(case.change) == case.change
        assert (BENCHMARKS / "prediction_jobs" / case.script).exists()


def test_six_jobs_to_tune() -> None:
    assert len(tune_jobs.JOBS) == 6
    for job in tune_jobs.JOBS:
        assert len(job.faults) >= 2
        assert settings(job.by_hand) == job.by_hand
        assert (BENCHMARKS / "prediction_jobs" / job.script).exists()


def record(saved: float, predicted: tuple[float, float, float] | None, step: float = 100.0) -> dict[str, Any]:
    said = {} if predicted is None else {"predicted": dict(zip(("low", "ms", "high"), predicted, strict=True))}
    pairs = [[step, step - saved]] * 3
    return {"name": "a pair", **said, "measured": {"ms": saved, "outcome": "kept", "pairs": pairs}}


def test_a_pair_is_judged_by_its_saving() -> None:
    assert fix_pairs.judged(record(40.0, (30.0, 36.0, 42.0))) == {
        "gain_percent": 40.0, "error_percent": 10.0, "width_percent": 30.0, "right_sign": True, "holds": True,
    }  # fmt: skip
    assert fix_pairs.judged(record(4.0, (-9.0, -8.0, -7.0))) == {
        "gain_percent": 4.0, "error_percent": 300.0, "width_percent": 50.0, "holds": False,
    }  # fmt: skip
    assert fix_pairs.judged(record(40.0, None)) == {"gain_percent": 40.0, "holds": False}
    assert fix_pairs.judged({"measured": {"outcome": "undecided", "why": "it hung"}}) == {}


def test_what_was_not_predicted_counts_as_a_miss() -> None:
    found = fix_pairs.summary([record(40.0, (30.0, 36.0, 42.0)), record(40.0, None), record(-8.0, (1.0, 2.0, 3.0))])
    assert found == {
        "measured": 3, "predicted": 2, "holds": 1, "median_error_percent": 100.0, "median_width_percent": 27.5,
        "right_sign": "1 of 2 whose effect is above 5 % of the step", "gain_over_10_percent": 2,
    }  # fmt: skip


def test_tuning_is_judged_by_all_that_it_kept() -> None:
    one = {"measured": {"ms": 30.0, "low": 20.0, "high": 40.0, "outcome": "kept"}}
    by_hand = {"measured": {"ms": 40.0}}
    alone = {"attempts": [one], "kept": {"a": 1}, "together": None, "ended": "nothing is left"}
    assert tune_jobs.judged({"tuned": alone, "by_hand": by_hand}) == {
        "tried": 1, "kept": 1, "saved_ms": 30.0, "worse_than_it_began": False, "percent_of_by_hand": 75.0,
    }  # fmt: skip
    both = {**alone, "attempts": [one, one], "together": {"ms": 38.0, "low": 30.0, "high": 46.0}}
    assert tune_jobs.judged({"tuned": both, "by_hand": by_hand})["percent_of_by_hand"] == 95.0
    none = {**alone, "kept": {}}
    assert tune_jobs.judged({"tuned": none, "by_hand": by_hand})["saved_ms"] == 0.0
    assert tune_jobs.judged({"tuned": {**alone, "ended": ""}}) == {}
