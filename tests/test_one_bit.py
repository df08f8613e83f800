"""What-ifs of 1-bit optimizers and of their warm-up, beside one another and where a run has one already."""

from __future__ import annotations

from typing import Any

import pytest
from test_zero_knobs import FREEZE, UNEQUAL, Layered, config, job, optimizer, reason, saved

from dsprof.analyzer.ask import ask
from dsprof.analyzer.study import study
from dsprof.knobs.predicted import turned

TYPE = "optimizer.type"


def reducing(facts: list[dict[str, Any]]) -> Layered:
    return job(facts, gathers=False, reduced=UNEQUAL)


def of_deepspeed(kind: str, stage: int = 0, **params: Any) -> Layered:
    facts = config("deepspeed", stage)
    for fact in facts:
        if "content" in fact:
            fact["content"]["optimizer"] = {"type": kind, "params": params}
    return reducing(facts)


@pytest.mark.parametrize("value", [100_000, 200_000])
def test_a_warm_up_that_is_no_shorter_leaves_its_steps_as_they_are(value: int) -> None:
    assert saved(reducing(optimizer("OneBitAdam")), FREEZE, value) == [0.0]
    behind = reducing(optimizer("OneBitAdam", freeze_step=2))
    assert saved(behind, FREEZE, 2) == [0.0]
    assert "steps of the run are behind the warm-up" in reason(behind, FREEZE, value)


def test_the_optimizer_and_its_warm_up_are_told_of_once() -> None:
    whole = study(reducing(optimizer("Adam")).sharded())
    settings = [turned(TYPE, "OneBitAdam", "RUN"), turned(FREEZE, 100, "RUN")]
    alone, both = ask(whole, [settings[:1], settings]).rows
    assert alone.gain is not None
    assert both.gain is not None
    assert both.gain.ms == pytest.approx(alone.gain.ms)
    assert [note for note in both.notes if "the first" in note] == [
        "of steps behind the warm-up: the first 100 (freeze_step) reduce whole gradients, as those of this run do"
    ]


def test_another_1_bit_optimizer_is_another() -> None:
    (other,) = saved(of_deepspeed("OnebitAdam"), TYPE, "OnebitLamb")
    assert other > 0
    assert saved(of_deepspeed("OnebitAdam"), TYPE, "OnebitAdam") == [0.0]
    behind = of_deepspeed("OnebitAdam", freeze_step=2)
    assert "steps of the run are behind the warm-up" in reason(behind, TYPE, "OnebitLamb")


def test_what_both_engines_refuse_beside_one() -> None:
    """DeepSpeed: "1bit-Adam is not compatible with ZeRO", of any stage."""
    assert "stage 0 of ZeRO, and the run has stage 1" in reason(of_deepspeed("Adam", 1), TYPE, "OnebitAdam")
    facts = optimizer("Adam")
    for fact in facts:
        fact["content"]["heterogeneous"] = {"speeds": [1, 2]}
    assert "the run has heterogeneous.speeds" in reason(reducing(facts), TYPE, "OneBitAdam")
