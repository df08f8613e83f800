"""precision.overflow: steps in half precision that are skipped, since their gradients overflowed: their work is lost.

A dynamic scale of the loss overflows now and then by design, once in some thousand steps. Where it does so again and
again either the scale is raised too often, or the gradients do not fit into fp16's range.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pandas as pd

from dsprof.schema import OVERFLOW, SCALER_FACT

from ... import signals
from ...arrays import Float, Int
from ...budget.irregular import warm_up
from ...candidate import Candidate, Excess, Price
from ...columns import RankRows
from ...finding import Evidence, Finding, Fix, Gain, Where
from ...study import Study, once
from ...text import percent
from ..base import NotConcerned, NotJudged, at, configurations, place_fix, script_of, settings_fix
from ..rule import Found, Look, Rule

FEWEST: Final = 3
"""Skipped steps after warm-up: fewer are no habit."""
USUAL_WINDOW: Final = 2000
"""Steps without an overflow after which torch raises the scale."""
REGULAR: Final = 0.25
"""Standard deviation of the steps between two overflows, of their mean: so regular are those that come whenever the
scale was raised."""

NEARLY: Final = 0.9
"""Of the steps after which the scale is raised, that two overflows are apart at least."""


@dataclass(frozen=True)
class Overflows:
    """steps:   in which step each skipped one lies
    scales:  of the loss, at each
    wasted:  ms of each ordinary step that went into what was skipped, [S]
    every:   steps that were taken from one to the next, median
    regular: whether these are nearly the same
    taken:   steps after warm-up that were not skipped
    """

    steps: Int
    scales: Float
    wasted: Float
    every: float
    regular: bool
    taken: int


@once
def overflows(study: Study) -> Overflows | None:
    """After warm-up; None where there are next to none."""
    table = _marks(study)
    begin = warm_up(int(study.steps["step"].max()) + 1) if len(study.steps) else 0
    table = table[table["step"] >= begin]
    if len(table) < FEWEST or not len(study.step_numbers):
        return None
    steps = table["step"].to_numpy(np.int64)
    apart = np.diff(steps)
    wasted, of_their_own = _wasted(study, steps)
    numbers = study.steps["step"].unique()
    return Overflows(
        steps, table["value"].to_numpy(np.float64), wasted, float(np.median(apart)),
        float(apart.std()) <= REGULAR * max(float(apart.mean()), 1e-9) and float(apart.mean()) > 2,
        int((numbers >= begin).sum()) - len(steps) * of_their_own,
    )  # fmt: skip


def _marks(study: Study) -> pd.DataFrame:
    """step and value of each skipped step: ranks agree about them, as they have the same gradients."""
    if not study.ranks:
        return pd.DataFrame({"step": [], "value": []})
    rows = RankRows(study.trace.read(study.ranks[0], ("kind", "name", "step", "value")))
    skipped = np.flatnonzero(rows.are("kind", "mark") & rows.are("name", OVERFLOW))
    return rows.take(("step", "value"), skipped).sort_values("step", kind="stable")


def _wasted(study: Study, skipped: Int) -> tuple[Float, bool]:
    """ms of each ordinary step that went into what was skipped, [S], and whether what is skipped is a step of its own.

    A step ends where an optimizer stepped: what torch's scaler skips is part of the step that comes after it, which
    then has as many backwards more; what an engine skips ends a step of its own, all of which is lost. Of several
    optimizers that take turns in a step (a GAN) each has a part of it.
    """
    numbers = study.step_numbers
    times = pd.Series(skipped).value_counts().reindex(numbers, fill_value=0).to_numpy(np.float64)
    usual, each = _in_a_step(study, "backward", times)
    optimizers, _ = _in_a_step(study, "optimizer", times)
    rounds = np.maximum(each / usual, 1.0)
    times = times / optimizers
    lasts = study.ordinary.groupby("step")["dur_ns"].mean().reindex(numbers).to_numpy(np.float64) / 1e6
    found: Float = lasts * np.minimum(times / rounds, 1.0)
    return found, bool((rounds[times > 0] < 1.5).all())


def _in_a_step(study: Study, name: str, skipped: Float) -> tuple[float, Float]:
    """How many phases of a name a step has where nothing is skipped, 1 or more; how many each ordinary step has, [S].
    skipped: [S]"""
    phases = study.training_phases
    mine = phases[(phases["name"] == name) & (phases["rank"] == study.ranks[0])]
    each = mine.groupby("step").size().reindex(study.step_numbers, fill_value=1).to_numpy(np.float64)
    usual = float(np.median(each[skipped == 0])) if (skipped == 0).any() else float(each.min())
    return max(usual, 1.0), each


def skipped_steps(study: Study) -> Found:
    """What the work of skipped steps costs."""
    signals.steps(study)
    scalers = [fact for fact in study.facts.get(SCALER_FACT, []) if fact.get("enabled")]
    found = overflows(study)
    if found is None:
        if not scalers and not _fp16(study):
            raise NotConcerned
        if any(not fact.get("seen", True) for fact in scalers):
            raise NotJudged(
                "the optimizer is fused and looks at overflows on its device, so which steps are skipped is not seen"
            )
        return []

    def say(price: Price) -> Finding:
        return _finding(study, found, price.gain)

    return [Candidate("precision.overflow", Excess(found.wasted, per="step"), say)]


def _fp16(study: Study) -> Mapping[str, Any] | None:
    """The configuration that trains in fp16; None: none does."""
    for content in configurations(study):
        section = content.get("fp16")
        if isinstance(section, Mapping) and section.get("enabled") is True:
            return content
    return None


def _finding(study: Study, found: Overflows, gain: Gain) -> Finding:
    share = 100 * len(found.steps) / max(len(found.steps) + found.taken, 1)
    evidence = (
        Evidence("steps skipped after warm-up", len(found.steps), "count", 0),
        Evidence("steps from one to the next, median", found.every, "count"),
        *(
            Evidence(f"scale of the loss at the {which} of them", float(scale), "")
            for which, scale in (("first", found.scales[0]), ("last", found.scales[-1]))
            if np.isfinite(scale)
        ),
    )
    configured, scaler = _fp16(study), next(iter(study.facts.get(SCALER_FACT, [])), {})
    window = _window(configured, scaler)
    raised = _when_raised(found, window)
    why = f", one about every {found.every:g} steps, whenever the scale of the loss was raised" if raised else ""
    title = f"{percent(share)} of the steps are skipped as their gradients overflow in fp16{why}"
    where = Where(op="optimizer", steps=(int(found.steps[0]), int(found.steps[-1])))
    fixes = [_bf16(study, configured, scaler, gain)]
    if raised and window is not None and window < USUAL_WINDOW:
        fixes.insert(0, _longer(configured, scaler, window, gain))
    lower = "or find what makes gradients so large: a lower learning rate, gradient clipping, a longer warm-up"
    fixes.append(Fix("code", lower))
    return Finding("precision.overflow", title, "info", where, evidence, gain, tuple(fixes))


def _when_raised(found: Overflows, window: int | None) -> bool:
    """Whether steps are skipped whenever the scale was raised: as regularly, and as far apart as that takes at least.
    What comes sooner again, such as at the same samples of each epoch, has another reason."""
    return found.regular and window is not None and found.every >= NEARLY * window


def _window(configured: Mapping[str, Any] | None, scaler: Mapping[str, Any]) -> int | None:
    """Steps without an overflow after which the scale is raised; None: it is fixed, or that is not known."""
    if configured is not None:
        section = configured["fp16"]
        window = section.get("loss_scale_window", 1000)
        return None if section.get("loss_scale") or not isinstance(window, (int, float)) else int(window)
    interval = scaler.get("growth_interval")
    return None if interval is None else int(interval)


def _longer(configured: Mapping[str, Any] | None, scaler: Mapping[str, Any], window: int, gain: Gain) -> Fix:
    why = f", not {window}: the scale is raised less often"
    if configured is not None:
        op = "replace" if "loss_scale_window" in configured["fp16"] else "add"
        patch = ({"op": op, "path": "/fp16/loss_scale_window", "value": USUAL_WINDOW},)
        knobs = (("fp16.loss_scale_window", USUAL_WINDOW),)
        return Fix("config", f"fp16.loss_scale_window: {USUAL_WINDOW}{why}", patch, gain, knobs)
    site = scaler.get("site")
    title = f"GradScaler(growth_interval={USUAL_WINDOW}){why}{at(site)}"
    return place_fix(title, site, gain)


def _bf16(study: Study, configured: Mapping[str, Any] | None, scaler: Mapping[str, Any], gain: Gain) -> Fix:
    """bfloat16, which has the range of float32, in the job's own words."""
    needs = ", which has float32's range and needs no scale (GPUs from Ampere on)"
    if configured is not None:
        there = isinstance(configured.get("bf16"), Mapping)
        patch: tuple[dict[str, Any], ...] = (
            {"op": "replace", "path": "/fp16/enabled", "value": False},
            {"op": "replace", "path": "/bf16/enabled", "value": True} if there and "enabled" in configured["bf16"]
            else {"op": "add", "path": "/bf16", "value": {"enabled": True}},
        )  # fmt: skip
        knobs = (("fp16.enabled", False), ("bf16.enabled", True))
        return Fix("config", f"bf16.enabled: true, fp16.enabled: false{needs}", patch, gain, knobs)
    framework = scaler.get("framework")
    if framework == "transformers":
        return settings_fix(f"--bf16 True in the place of --fp16{needs}", {"--bf16": True}, None, gain)
    if framework == "accelerate":
        return settings_fix(f'Accelerator(mixed_precision="bf16"){needs}', {"mixed_precision": "bf16"}, None, gain)
    if framework == "lightning":
        return settings_fix(f'Trainer(precision="bf16-mixed"){needs}', {"precision": "bf16-mixed"}, None, gain)
    site = scaler.get("site") or script_of(study)
    title = f"torch.autocast(..., dtype=torch.bfloat16) without a GradScaler{needs}{at(scaler.get('site'))}"
    return place_fix(title, site, gain)


RULES = (
    Rule(
        "precision.overflow",
        "steps are skipped as their gradients overflow in fp16",
        explains=("compute",),
        looks=(Look(skipped_steps),),
        needs=(signals.steps,),
        place=295,
    ),
)
