"""compute.optimizer: an optimizer that is a loop over many parameter groups of the same settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from ... import signals
from ...arrays import Float
from ...candidate import Between
from ...finding import Evidence, Finding, Fix, Gain, Where
from ...price.calibration import ModelError
from ...study import Study, once
from ...text import percent
from ...whatif.work import Change
from ..base import NotJudged, code_fix, script_of
from ..rule import Rule, fault
from .fused_optimizer import fused, fused_up_to, one_by_one, shares_of_time

OF_A_TENSOR: Final = (0.15, 0.05, 0.35)
"""What a tensor costs the host in a step of a fused or foreach optimizer, as a part of what a parameter group does: as
expected, at least and at most (torch 2.13's Adam, AdamW and SGD on a CPU: 0.07 to 0.13 fused, 0.07 to 0.24 foreach)."""
ELEMENT_MS: Final = (1.2e-6, 0.3e-6, 4e-6)
"""And what each of its elements does on the CPU: the states and the gradient are read, and most of them written."""
FEWEST: Final = 8
"""Groups that could be spared: fewer are no matter."""
TOGETHER: Final = ("fused", "foreach")
"""Implementations that update a group at once; else each tensor is updated by itself, whatever the groups."""


@dataclass(frozen=True)
class Divided:
    """An optimizer of more groups than settings. number: as its phases bear it, `value`."""

    number: int
    name: str
    groups: int
    settings: int
    tensors: int
    elements: int

    def spared(self, of_a_tensor: float, element_ms: float, spent_ms: float) -> float:
        """The part of its step that merging the groups of like settings spares, 0 to 1."""
        fixed = self.elements * element_ms
        if spent_ms <= fixed:
            return 0.0
        calls = (self.groups - self.settings) / (self.groups + of_a_tensor * self.tensors)
        return (1 - fixed / spent_ms) * calls


@once
def divided(study: Study) -> list[Divided]:
    """Those of all ranks, the one with most groups first; each number once."""
    found: dict[int, Divided] = {}
    for fact in study.facts.get("optimizer", []):
        groups, settings = fact.get("groups") or 0, fact.get("settings") or 0
        if fact.get("implementation") not in TOGETHER or groups - settings < FEWEST or groups < 2 * settings:
            continue
        one = Divided(
            int(fact["number"]), str(fact.get("class")), groups, settings, int(fact.get("parameters") or 0),
            int(fact.get("elements") or 0),
        )  # fmt: skip
        found.setdefault(one.number, one)
    return sorted(found.values(), key=lambda one: -one.groups)


def merged_groups(study: Study) -> Change | None:
    """One parameter group for each distinct setting."""
    every = divided(study)
    if not every:
        return None
    if study.on_gpu:
        raise NotJudged(
            f"the optimizer has {every[0].groups} parameter groups with {every[0].settings} distinct settings, which "
            "its host goes through one by one; what merging them saves is not predicted where devices compute: merge "
            "them and compare"
        )
    return Change({"optimizer": _spent(study) * _part(study, 0)})


def _spent(study: Study) -> Float:
    return study.work("optimizer")


def _part(study: Study, which: int) -> float:
    """The part of the time in optimizers that goes; which: of the constants (expected, least, most)."""
    spent = max(float(_spent(study).mean()), 1e-9)
    each = [(one, shares_of_time(study).get(one.number, 0.0)) for one in divided(study)]
    return sum(one.spared(OF_A_TENSOR[which], ELEMENT_MS[which], spent * share) * share for one, share in each)


def known_up_to(study: Study) -> Between | None:
    """A tensor and an element may cost more or less than expected."""
    expected = _part(study, 0)
    if expected <= 0:
        return None
    least, most = _part(study, 2) / expected, _part(study, 1) / expected
    return Between(min(least, 1.0), max(most, 1.0), float(_spent(study).mean()))


def many_groups(study: Study, change: Change, gain: Gain, share: Gain) -> Finding:
    """What the loop over groups costs, and how many there need be."""
    worst = divided(study)[0]
    spent = float(_spent(study).mean())
    evidence = (
        Evidence("parameter groups", worst.groups, "count", worst.settings),
        Evidence("tensors", worst.tensors, "count"),
        Evidence("optimizer a step", round(spent, 3), "ms", round(spent * (1 - _part(study, 0)), 3)),
        Evidence("share of the step", round(100 * spent / study.step_ms, 1), "%"),
    )
    title = (
        f"{worst.name} has {worst.groups} parameter groups of which {worst.settings} differ in their settings: their "
        f"loop takes {percent(100 * spent / study.step_ms)} of the step"
    )
    value: dict[str, Any] = {"groups": worst.settings}
    one = "one" if worst.settings == 1 else f"{worst.settings}"
    fix = (
        f"make {one} parameter group{'' if worst.settings == 1 else 's'}, one for each distinct "
        f"(lr, weight_decay, ...), with all its parameters, not {worst.groups}"
    )
    where = Where(op="optimizer", steps=study.step_range)
    fixes: tuple[Fix, ...] = (code_fix(fix, "params", value, script_of(study), gain),)
    return Finding("compute.optimizer", title, "info", where, evidence, gain, fixes, share=share)


RULES = (
    Rule(
        "compute.optimizer",
        "the optimizer goes through many parameter groups, or tensors, one by one",
        explains=("optimizer",),
        looks=(
            fault("compute.optimizer", merged_groups, many_groups, between=known_up_to),
            fault("compute.optimizer", fused, one_by_one, between=fused_up_to),
        ),
        needs=(signals.steps,),
        error=ModelError(of_gain=0.1, of_step=0.014, busy=0.014),
        place=215,
    ),
)
