"""What rules take to be so, held against what benchmarks/constants.py has measured."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from dsprof.analyzer.rules.comm.volume import CAST_MS_PER_BYTE
from dsprof.analyzer.rules.compute.fused_optimizer import LOOPED, SAVED
from dsprof.analyzer.rules.compute.recompute import BESIDE_MS
from dsprof.analyzer.work.fixed_part import IN_A_JOB, UNTOLD, StageParameters, fixed_work

RESULT = Path(__file__).parent.parent / "benchmarks" / "results" / "constants.json"


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RESULT.read_text())
    return found


def test_what_a_fused_optimizer_spares(measured: dict[str, Any]) -> None:
    expected, least, most = SAVED
    spared = measured["fused"]
    assert {name.partition(" ")[0] for name in spared} == set(LOOPED)
    assert all(least <= part <= most for part in spared.values()), spared
    assert statistics.median(spared.values()) == pytest.approx(expected, abs=0.08)


def test_what_short_gradients_cost_to_make(measured: dict[str, Any]) -> None:
    """Half and twice as much are in the interval, which was chosen to one digit."""
    cast = measured["cast_ms_per_byte"].values()
    assert all(0.45 * CAST_MS_PER_BYTE <= one <= 2.05 * CAST_MS_PER_BYTE for one in cast), cast


def test_what_checkpointing_takes_beside_computing_again(measured: dict[str, Any]) -> None:
    assert all(0 < one <= BESIDE_MS for one in measured["recompute_ms"].values()), measured["recompute_ms"]


def test_what_a_micro_batch_takes_whatever_its_size(measured: dict[str, Any]) -> None:
    """Of 28 forwards and backwards of 14 models: all lie between the ends, and the middle is what is taken. Where
    nothing is known of a model, nine in ten do."""
    ratios, inside, inside_untold = [], 0, 0
    for model in measured["fixed"].values():
        work = fixed_work(StageParameters(model["tensors"], model["bytes"]))
        for op, name in (("F", "forward"), ("B", "backward")):
            ms, fixed = model[name]["ms"], model[name]["fixed_ms"]
            ratios.append(fixed / (work.typical.of(op).ms - IN_A_JOB))
            part = min(fixed / ms, 1.0)  # of the smallest actions all is fixed, as well as it can be measured
            inside += work.least.of(op).of(ms) <= part <= work.most.of(op).of(ms)
            inside_untold += UNTOLD.least.of(op).of(ms) <= part <= UNTOLD.most.of(op).of(ms)
    assert len(ratios) == 28
    assert inside == 28
    assert inside_untold >= 26
    assert statistics.median(ratios) == pytest.approx(1.0, abs=0.2)
