"""Adam that updates one tensor after the other, where one kernel would update all: part of compute.optimizer.

On a CPU torch chooses a loop over tensors, on a device a script may: some dozen operations for each. What it costs is
the host's work for these, and that each of them goes through memory. `fused=True` does both once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from ...candidate import Between
from ...finding import Evidence, Finding, Gain, Where
from ...study import Study, once
from ...text import percent
from ...whatif.work import Change
from ..base import code_fix, script_of

LOOPED: Final = ("Adam", "AdamW")
"""Classes of which it was measured what fusing saves."""
SAVED: Final = (0.72, 0.5, 0.88)
"""The part of such a step that a fused one spares: as expected, at least, at most. Measured by benchmarks/constants.py:
0.55 of few tensors of 64 elements, 0.65 to 0.79 of hundreds, 0.86 of ten of 2,000,000."""
SAVED_ON_DEVICE: Final = (0.85, 0.7, 0.95)
"""The same on a device: 0.90 of 292 tensors on an H100, which the host launches in 25.6 ms one by one and in 2.5 fused
(benchmarks/results/gpu_pairs.json, "an optimizer in a loop"); of large tensors the dozen operations for each go through
memory four to six times as often as one does."""
WORTH_IT: Final = 0.1
"""Of the step, that must surely be spared."""
FEWEST: Final = 8
"""Tensors."""


@dataclass(frozen=True)
class Looped:
    """An optimizer that updates one tensor after the other. share: of the time that all optimizers take."""

    name: str
    tensors: int
    elements: int
    share: float


@once
def looped(study: Study) -> Looped | None:
    """The one that takes longest; None where there is none, or an engine makes the optimizer."""
    if study.facts.get("deepspeed") or study.facts.get("config"):
        return None
    found: dict[int, Looped] = {}
    for fact in study.facts.get("optimizer", []):
        tensors = int(fact.get("parameters") or 0)
        if (
            "implementation" not in fact
            or fact["implementation"]
            or fact.get("class") not in LOOPED
            or tensors < FEWEST
        ):
            continue
        number = int(fact["number"])
        share = shares_of_time(study).get(number, 0.0)
        found[number] = Looped(str(fact["class"]), tensors, int(fact.get("elements") or 0), share)
    return max(found.values(), key=lambda one: one.share, default=None)


@once
def shares_of_time(study: Study) -> dict[float, float]:
    """Number of an optimizer, as its phases bear it -> its share of the time that all take, 0 to 1."""
    phases = study.training_phases
    phases = phases[(phases["name"] == "optimizer") & phases["step"].isin(study.step_numbers)]
    whole = float(phases["dur_ns"].sum())
    spent = phases.groupby("value")["dur_ns"].sum()
    numbers = {float(fact["number"]) for fact in study.facts.get("optimizer", [])}
    if len(numbers) == 1 and not (spent.index > 0).any():  # a step of dsprof's engine does not say of which it is
        return dict.fromkeys(numbers, 1.0)
    return dict(zip(spent.index.astype(float), spent.astype(float) / whole, strict=True)) if whole else {}


def fused(study: Study) -> Change | None:
    """What one kernel for all tensors spares."""
    one, saved = looped(study), _saved(study)
    if one is None or float(study.work("optimizer").mean()) * one.share * saved[1] < WORTH_IT * study.step_ms:
        return None
    return Change({"optimizer": study.work("optimizer") * one.share * saved[0]}, launches=True)


def _saved(study: Study) -> tuple[float, float, float]:
    return SAVED_ON_DEVICE if study.on_gpu else SAVED


def fused_up_to(study: Study) -> Between | None:
    """It depends on how large tensors are, and on the CPU."""
    one = looped(study)
    if one is None:
        return None
    saved = _saved(study)
    return Between(saved[1] / saved[0], saved[2] / saved[0], float(study.work("optimizer").mean()) * one.share)


def one_by_one(study: Study, change: Change, gain: Gain, share: Gain) -> Finding:
    """What the loop over tensors costs."""
    one = looped(study)
    assert one is not None
    spent = float(study.work("optimizer").mean()) * one.share
    evidence = (
        Evidence("tensors that are updated one by one", one.tensors, "count"),
        Evidence("optimizer a step", round(spent, 3), "ms", round(spent * (1 - _saved(study)[0]), 3)),
        Evidence("share of the step", round(100 * spent / study.step_ms, 1), "%"),
    )
    title = (
        f"{one.name} updates {one.tensors} tensors one after the other, which takes "
        f"{percent(100 * spent / study.step_ms)} of the step"
    )
    knobs: dict[str, Any] = {"optimizer.fused": True}
    fix = code_fix(f"{one.name}(..., fused=True)", "fused", True, script_of(study), gain, knobs)
    where = Where(op="optimizer", steps=study.step_range)
    return Finding("compute.optimizer", title, "info", where, evidence, gain, (fix,), share=share)
