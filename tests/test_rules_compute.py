"""compute.recompile and compute.optimizer, on made-up records."""

from __future__ import annotations

import random
from typing import Any

import pytest
from findings import of
from synthetic import Job, PerStep, constant

from dsprof.analyzer import analyze


def recompiled(rank: int, reason: str, times: int = 40) -> dict[str, Any]:
    return {"fact": "recompiled", "rank": rank, "function": "forward", "site": "/home/me/train.py:18", "times": times,
            "spent_ms": 50.0 * times, "reason": reason}  # fmt: skip


SHAPE = "tensor 'x' size mismatch at index 1. expected 128, actual 100"


def compiling(ms: PerStep, *facts: dict[str, Any]) -> Job:
    return Job(ranks=3, steps=40, compiling=ms, facts=list(facts))


@pytest.mark.plants("compute.recompile")
def test_one_rank_compiles_in_every_step() -> None:
    draw = random.Random(1)
    takes = [draw.uniform(40, 60) for _ in range(40)]
    told = recompiled(1, SHAPE, 20), recompiled(1, SHAPE, 39)  # of the same function the last counts
    analysis = analyze(compiling(lambda rank, step: takes[step] if rank == 1 else 0.0, *told).trace())
    first = analysis.findings[0]
    assert (first.code, first.where.ranks) == ("compute.recompile", (1,))
    mean = sum(takes[10:]) / 30
    assert first.gain.ms == pytest.approx(mean, rel=0.05)
    assert first.gain.low <= mean <= first.gain.high
    evidence = {item.metric: item.value for item in first.evidence}
    assert evidence["the guard that failed last"] == SHAPE
    assert evidence["compiled again in the whole run"] == 39
    assert (
        first.title
        == f"rank 1 compiles the same code again in 30 of 30 steps: {mean:.1f} ms a step (forward (train.py:18))"
    )
    assert first.fixes[0].title.startswith("torch.compile(dynamic=True)")
    assert of(analysis, "rank.straggler") is None  # compiling is all that makes it late


def test_a_guard_on_a_value_is_not_mended_by_dynamic_shapes() -> None:
    job = compiling(constant(30.0), *[recompiled(rank, "L['step'] == 7") for rank in range(3)])
    found = of(analyze(job.trace()), "compute.recompile")
    assert found is not None
    assert found.title.startswith("every rank compiles the same code again in 30 of 30 steps")
    assert "keep what the guard is about (L['step'] == 7) the same in every step" in found.fixes[0].title


def test_steps_that_compile_now_and_then() -> None:
    job = compiling(lambda rank, step: 90.0 if rank == 2 and step % 6 == 5 else 0.0, recompiled(2, SHAPE, 6))
    found = of(analyze(job.trace()), "compute.recompile")
    assert found is not None
    assert found.where.ranks == (2,)
    assert found.gain.method == "measured excess"
    assert found.title == "rank 2 compiles again in 5 steps after warm-up, 90.0 ms each"


@pytest.mark.parametrize("ms", [lambda rank, step: 300.0 if step < 3 else 0.0, lambda rank, step: 90.0 * (step == 20)])
def test_compilation_that_is_over_is_no_finding(ms: PerStep) -> None:
    analysis = analyze(compiling(ms, recompiled(0, SHAPE, 1)).trace())
    assert of(analysis, "compute.recompile") is None
    assert "compute.recompile" in analysis.passed


def optimizer(**more: Any) -> list[dict[str, Any]]:
    fact = {"fact": "optimizer", "number": 1, "class": "AdamW", "parameters": 700, "elements": 44_800, "groups": 700,
            "settings": 2, "implementation": "fused", **more}  # fmt: skip
    return [{**fact, "rank": rank} for rank in (0, 1)]


def updating(facts: list[dict[str, Any]], number: int | None = 1) -> Job:
    return Job(steps=40, forward=constant(40), backward=constant(60), optimizer=constant(45), facts=facts,
               buckets=(1 << 16,), optimizer_number=number)  # fmt: skip


@pytest.mark.plants("compute.optimizer")
@pytest.mark.parametrize("number", [1, None], ids=["numbered", "of dsprof's engine"])
def test_a_parameter_group_for_each_tensor(number: int | None) -> None:
    first = analyze(updating(optimizer(), number).trace()).findings[0]
    assert first.code == "compute.optimizer"
    # 698 of 700 calls of 700 + 0.15 * 700, less what 44,800 elements take
    expected = 698 / 805 * (45 - 44_800 * 1.2e-6)
    assert first.gain.ms == pytest.approx(expected, rel=0.02)
    assert first.gain.low < 0.9 * expected < 1.04 * expected < first.gain.high < 46
    assert first.fixes[0].title == (
        "make 2 parameter groups, one for each distinct (lr, weight_decay, ...), with all its parameters, not 700"
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"groups": 2},
        {"settings": 700},  # such as a learning rate of its own for each layer
        {"implementation": None, "class": "SGD"},  # torch updates each tensor by itself, whatever the groups
        {"elements": 100_000_000, "parameters": 20, "groups": 12, "settings": 2},  # its elements take the time
    ],
)
def test_an_optimizer_whose_groups_are_no_matter(changes: dict[str, Any]) -> None:
    found = of(analyze(updating(optimizer(**changes)).trace()), "compute.optimizer")
    assert found is None or not found.is_problem


# --- a loop over tensors ------------------------------------------------------------------------------


def test_adam_on_a_cpu_updates_tensor_after_tensor() -> None:
    facts = optimizer(implementation=None, groups=1, settings=1, parameters=300)
    first = analyze(updating(facts).trace()).findings[0]
    assert first.code == "compute.optimizer"
    assert first.title == "AdamW updates 300 tensors one after the other, which takes 31 % of the step"
    assert first.gain.ms == pytest.approx(0.72 * 45, rel=0.05)
    assert first.gain.low < 0.5 * 45 < 0.88 * 45 < first.gain.high < 50
    assert dict(first.fixes[0].knobs) == {"optimizer.fused": True}


@pytest.mark.parametrize(
    ("facts", "takes"),
    [
        (optimizer(implementation=None, groups=1, settings=1), 3.0),  # not worth it
        (optimizer(implementation=None, groups=1, settings=1, **{"class": "SGD"}), 45.0),  # nobody measured it
        (optimizer(implementation="fused", groups=1, settings=1), 45.0),
        (optimizer(implementation=None, groups=1, settings=1, parameters=4), 45.0),
        ([*optimizer(implementation=None, groups=1, settings=1),
          {"fact": "deepspeed", "rank": 0, "zero_stage": 0}], 45.0),  # which makes the optimizer itself
    ],
)  # fmt: skip
def test_optimizers_that_are_not_told_to_be_fused(facts: list[dict[str, Any]], takes: float) -> None:
    job = Job(steps=40, forward=constant(40), backward=constant(60), optimizer=constant(takes), facts=facts,
              buckets=(1 << 16,), optimizer_number=1)  # fmt: skip
    assert of(analyze(job.trace()), "compute.optimizer") is None
