"""How what TraceML says of the cases of `benchmarks/diagnosis.py` is judged."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from beside_traceml import IN_ITS_WORDS, judged, said_in  # noqa: E402
from diagnosis_cases import RIGHT_FIX, Case  # noqa: E402
from verdict_truth import Job  # noqa: E402


def case(code: str | None, **where: Any) -> Case:
    return Case(Job("ddp.py", (), 3, 50, code, where), "DDP")


def told(says: str, ranks: list[int], severity: str = "crit") -> dict[str, Any]:
    return {"says": says, "ranks": ranks, "severity": severity}


def test_every_code_that_is_planted_has_its_words() -> None:
    assert IN_ITS_WORDS.keys() == RIGHT_FIX.keys()


@pytest.mark.parametrize(
    ("says", "ranks", "right", "right_rank"),
    [
        ("COMPUTE_STRAGGLER", [2], True, True),
        ("STRAGGLER", [1], False, False),
        ("INPUT_STRAGGLER", [2], False, True),
        ("COMPUTE_BOUND", [2], False, False),  # which names the slowest rank of whatever is said
    ],
)
def test_a_late_rank(says: str, ranks: list[int], right: bool, right_rank: bool) -> None:
    found = judged(case("rank.straggler", ranks=[2]), told(says, ranks))
    assert found == {"right_kind": says.endswith("STRAGGLER") and says != "INPUT_STRAGGLER", "right": right,
                     "right_rank": right_rank}  # fmt: skip


def test_a_stage_is_a_rank_and_what_has_no_place_is_judged_by_its_kind() -> None:
    assert judged(case("pipeline.imbalance", stage=1), told("STRAGGLER", [1]))["right"]
    assert judged(case("data.stall"), told("INPUT_BOUND", [0])) == {"right_kind": True, "right": True}
    assert judged(case("pipeline.bubble"), told("RESIDUAL_HEAVY", [0])) == {"right_kind": False, "right": False}


def test_a_job_without_a_fault_and_one_that_failed() -> None:
    assert judged(case(None), told("RESIDUAL_HEAVY", [0], "warn")) == {"false_alarm": True}
    assert judged(case(None), told("COMPUTE_BOUND", [0], "info")) == {"false_alarm": False}
    assert judged(case("data.stall"), {"failed": "it died"}) == {}


def test_its_first_diagnosis_is_read() -> None:
    first = {"kind": "INPUT_BOUND", "severity": "warn", "summary": "...", "evidence": {"steps_analyzed": 70}}
    summary = {"primary_diagnosis": first, "step_time": {"diagnosis": {"ranks": [0]}}}
    assert said_in(summary) == {
        "says": "INPUT_BOUND", "severity": "warn", "summary": "...", "ranks": [0], "steps": 70,
    }  # fmt: skip
