"""benchmarks/predictions.py: what it makes of the runs of a pair. No job is run."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from prediction_pair import Pair  # noqa: E402
from prediction_pairs import CALIBRATION, FRESH, PAIRS  # noqa: E402
from prediction_verdict import Run, came_true, interval_of, judge, median, problems, said_by, summary  # noqa: E402

PAIR = Pair(
    "a pair", "fresh", "ddp", "comm.small-messages", "tiny", False, "ddp.py", 2, 8,
    "--forward-ms 1", "--bucket-mb 0.1", "--bucket-mb {bucket_cap_mb}",
)  # fmt: skip
SAID = {"bucket_cap_mb": "25"}


def run(step_ms: float, *findings: dict[str, Any], wall_ms: float = 100.0) -> Run:
    ended_s = [wall_ms / 1e3 * step for step in range(1, 9)]
    return Run({"run": {"step_ms": {"mean": step_ms}}, "findings": list(findings)}, ended_s)


def finding(ms: float, low: float, high: float, code: str = PAIR.fault, **fix: Any) -> dict[str, Any]:
    gain = {"ms": ms, "low": low, "high": high, "method": "replay"}
    patch = [{"argument": "bucket_cap_mb", "value": 25}]
    return {"code": code, "severity": "high", "gain": gain, "fixes": [{"title": "", "patch": patch, **fix}]}


class TestPairs:
    def test_half_of_each_set_have_real_compute(self) -> None:
        assert Counter((pair.set, pair.real) for pair in PAIRS) == {
            ("calibration", True): 40, ("calibration", False): 40, ("fresh", True): 10, ("fresh", False): 10,
        }  # fmt: skip
        assert len({pair.name for pair in PAIRS}) == 100

    def test_both_sets_have_the_same_faults_and_no_job_in_common(self) -> None:
        calibration, fresh = (Counter(pair.fault for pair in of) for of in (CALIBRATION, FRESH))
        assert calibration == {fault: 4 * count for fault, count in fresh.items()}
        jobs = [{(pair.script, pair.planted_args()) for pair in of} for of in (CALIBRATION, FRESH)]
        assert not jobs[0] & jobs[1]

    def test_planted_and_mended_differ_and_their_scripts_exist(self) -> None:
        for pair in PAIRS:
            assert pair.planted_args() != pair.mended_args({})
            assert (BENCHMARKS / "prediction_jobs" / pair.script).exists()

    def test_real_jobs_have_a_core_for_each_rank(self) -> None:
        assert {pair.ranks for pair in PAIRS if pair.real} <= {1, 2}

    def test_the_mended_job_takes_what_the_fix_names(self) -> None:
        assert PAIR.mended_args(SAID) == ("--steps", "8", "--forward-ms", "1", "--bucket-mb", "25")


class TestWhatAFixNames:
    def test_arguments_of_a_patch(self) -> None:
        assert said_by(finding(1, 1, 1)) == {"bucket_cap_mb": "25"}

    def test_arguments_within_a_call(self) -> None:
        call = "DataLoader(..., num_workers=2, persistent_workers=True)"
        assert said_by(finding(1, 1, 1, patch=[{"argument": "training_data", "value": call}])) == {
            "num_workers": "2", "training_data": call,
        }  # fmt: skip

    def test_how_many_layers_to_wrap(self) -> None:
        title = "wrap 8 neighbouring layers in one fully_shard: 5 units instead of 40"
        assert said_by(finding(1, 1, 1, title=title, patch=[])) == {"together": "8"}

    def test_nothing(self) -> None:
        assert said_by(None) == {}


class TestJudgement:
    def test_the_first_prediction_against_the_median_of_the_differences(self) -> None:
        planted = [run(100, finding(30, 25, 36)), run(104, finding(33, 30, 36)), run(102, finding(20, 19, 21))]
        record = judge(PAIR, planted, [run(60), run(69), run(80)], SAID)
        assert record["measured_ms"] == [40, 35, 22]
        assert record["saving_ms"] == 35
        assert record["step_ms"] == 102
        assert record["gain_percent"] == 34.3
        assert record["error_percent"] == pytest.approx(100 * 5 / 35, abs=1e-3)
        assert record["width_to_saving"] == pytest.approx(11 / 35, abs=1e-3)
        assert record["holds"] is True
        assert record["of_all_hold"] == 2
        assert problems(record) == []

    def test_a_saving_outside_of_the_interval(self) -> None:
        record = judge(PAIR, [run(100, finding(30, 25, 36))], [run(60)], SAID)
        assert (record["saving_ms"], record["holds"]) == (40, False)
        assert record["saving_interval_ms"] is None

    def test_nothing_was_predicted(self) -> None:
        record = judge(PAIR, [run(100)], [run(60)], SAID)
        assert record["predicted"] == [None]
        assert (record["holds"], record["error_percent"], record["width_to_saving"]) == (False, 100.0, None)
        assert problems(record) == ["not found"]

    def test_nothing_was_saved(self) -> None:
        record = judge(PAIR, [run(100, finding(3, 1, 5))], [run(101)], SAID)
        assert (record["holds"], record["error_percent"], record["width_to_saving"]) == (False, None, None)
        assert problems(record) == ["gains little"]

    def test_another_finding_came_first_and_the_fault_is_still_there_when_mended(self) -> None:
        findings = finding(60, 50, 70, "rank.straggler"), finding(30, 25, 36)
        record = judge(PAIR, [run(100, *findings)], [run(60, finding(10, 9, 11))], SAID)
        assert problems(record) == ["not first", "still there when mended"]

    def test_a_prediction_for_another_fix_than_the_one_that_ran(self) -> None:
        record = judge(PAIR, [run(100, finding(30, 25, 36))], [run(70)], {"bucket_cap_mb": "5"})
        assert record["predicted"][0]["of_this_fix"] is False

    def test_faults_outside_of_ordinary_steps_go_by_the_time_of_all(self) -> None:
        pair = replace(PAIR, whole_run=True)
        record = judge(pair, [run(70, wall_ms=100)], [run(70, wall_ms=80)], SAID)
        assert (record["step_ms"], record["saving_ms"]) == (100, 20)

    def test_a_larger_batch_is_compared_per_planted_step(self) -> None:
        pair = replace(PAIR, mended="--micro-batches {n_microbatches}", work_of=("n_microbatches", 4))
        assert judge(pair, [run(100)], [run(280)], {"n_microbatches": "16"})["saving_ms"] == 30

    def test_warm_up_is_left_out(self) -> None:
        assert Run({}, [5.0, 9.0, 9.1, 9.2, 9.3, 9.4, 9.5, 9.6]).wall_ms() == pytest.approx(100)

    def test_interval_of_the_mean(self) -> None:
        assert interval_of([38, 40, 42]) == pytest.approx((35.03, 44.97), abs=0.01)


class TestSummary:
    def record(self, **changed: Any) -> dict[str, Any]:
        return {**judge(PAIR, [run(100, finding(30, 25, 36))], [run(70)], SAID), **changed}

    def test_of_a_set(self) -> None:
        records = [
            self.record(), self.record(error_percent=8.0, width_to_saving=0.1),
            self.record(error_percent=20.0, compute="real", holds=False, gain_percent=7.0, width_to_saving=None),
        ]  # fmt: skip
        assert summary(records) == {
            "pairs": 3, "found_first": 3, "hold": 2, "median_width_to_saving": 0.367,
            "median_error_percent": {"sleeping": 4.0, "real": 20.0}, "gain_over_10_percent": 2,
        }  # fmt: skip

    def test_a_width_that_nothing_has_is_the_widest(self) -> None:
        assert median([0.1, None, None]) is None
        assert median([0.1, 0.2, None]) == 0.2

    def test_how_many_came_true(self) -> None:
        records = [self.record(), self.record(of_all_hold=0)]
        assert came_true(records) == {"comm.small-messages": {"predictions": 2, "hold": 1}}
