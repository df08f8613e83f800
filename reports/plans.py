"""What `dsprof plan` prints."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from dsprof.analyzer.text import aligned, count, ms, percent, size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dsprof.plan.formulas import FormulaPlan
    from dsprof.plan.from_run import PlannedStep, RunPlan
    from dsprof.plan.ranked import RankedLayouts
    from dsprof.plan.run_answer import RunAnswer
    from dsprof.plan.spending import Spending
    from dsprof.plan.told import TableAnswer

MOST_ROWS: Final = 40
"""Predicted steps that are printed; all are in the JSON."""


def render_calibration(told: TableAnswer) -> str:
    """The hardware's figures, how well they predict, and the steps that were asked for."""
    lines = [f"learnt from {count(told.calibrated.rows, 'measured step')}", ""]
    rows = [("figure", "value", "90 % interval", "")]
    for one in told.figures():
        span = f"[{_short(one['low'])}, {_short(one['high'])}]"
        value = f"{_short(one['value'])} {one['unit']}".rstrip()
        rows.append((one["says"], value, span, "" if one["measured"] else "hardly measured: as is typical"))
    lines += aligned(rows)
    held = told.calibrated.held_out
    if not math.isnan(held):
        lines += [
            "",
            f"steps left out of the fit, with all that ran the same layer, were missed by {percent(100 * held)}",
        ]
    if told.predicted is not None and told.asked is not None:
        lines += ["", *_steps(told)]
    if told.learnt_too:
        lines += ["", _learnt_too(told)]
    if told.score is not None:
        lines += ["", _scored(told)]
    return "\n".join(lines) + "\n"


def _steps(told: TableAnswer) -> list[str]:
    assert told.predicted is not None
    assert told.asked is not None
    steps, found = told.asked.steps, told.predicted
    rows: list[tuple[str, ...]] = [("ranks", "tp", "dp", "pp", "micro-batch", "step", "90 % interval")]
    for i in range(min(len(steps), MOST_ROWS)):
        sizes = (steps.gpus[i], steps.tp[i], steps.dp[i], steps.pp[i], steps.micro_batch[i])
        rows.append((*(f"{one:.0f}" for one in sizes), ms(found.ms[i]), _span(found.low[i], found.high[i])))
    more = len(steps) - MOST_ROWS
    return [*aligned(rows, 0), *([f"and {count(more, 'more step')}: see --json"] if more > 0 else [])]


def _learnt_too(told: TableAnswer) -> str:
    assert told.asked is not None
    some = f"{told.learnt_too:,} of these {len(told.asked.ms):,} steps are also in the table that was learnt"
    if told.score is not None:
        return f"{some}: that they are met is no test, and they are not counted here"
    return f"{some}: that they are met is no test"


def _scored(told: TableAnswer) -> str:
    scored = told.score
    assert scored is not None
    text = (
        f"measured: missed by {percent(100 * scored.mape)} (mean), and {percent(100 * scored.held)} of "
        f"{count(scored.rows, 'step')} lie in their intervals"
    )
    if scored.near is not None:
        text += (
            f"; the layout predicted to be the fastest is within 2 % of the fastest in {percent(100 * scored.near)} of "
            f"{count(scored.groups, 'group')}"
        )
    return text


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


LAYOUT_HEAD: Final = ("tp", "dp", "pp", "micro-batch", "ZeRO", "recompute", "memory", "step", "90 % interval")


def render_plan(plan: FormulaPlan) -> str:
    """The best layouts, the curve over rank counts, what it costs, what was assumed, and what to measure next."""
    told = plan.to_dict()
    model, best = told["model"], told["layouts"]
    lines = [
        f"{model['parameters'] / 1e9:.3g} billion parameters ({model['layers']} layers of width {model['hidden']}), "
        f"{model['global_batch']:,} sequences of {model['sequence']:,} tokens a step, on "
        f"{count(plan.ranks, 'rank')} of {plan.cluster.gpu.name}",
        f"{count(plan.best.tried, 'layout')} looked at, {len(plan.best.shapes):,} fit into memory; the fastest:",
        "",
    ]
    rows: list[tuple[str, ...]] = [LAYOUT_HEAD]
    for one in best:
        names = ("tp", "dp", "pp", "micro_batch", "zero")
        rows.append(
            (
                *(str(one[name]) for name in names), "yes" if one["recompute"] else "no",
                f"{one['memory_gib']['total']:.3g} GiB", ms(one["step"]["ms"]), _span_of(one["step"]),
            )
        )  # fmt: skip
    first = best[0]
    says = f"{_rate(first['tokens_a_second'])} tokens a second, {first['tflops_a_gpu']:.3g} TFLOP/s a rank"
    lines += [*aligned(rows, 0), "", f"the first: {says}", "", *_curve(told["curve"])]
    return "\n".join([*lines, *_ending(plan)]) + "\n"


def _curve(curve: Sequence[Mapping[str, Any]]) -> list[str]:
    rows: list[tuple[str, ...]] = [
        ("ranks", "efficiency", "tokens a second", "tp x dp x pp", "step", "90 % interval", "")
    ]
    for one in curve:
        layout = f"{one['tp']} x {one['dp']} x {one['pp']}"
        bar = "#" * round(20 * min(one["efficiency"], 1.5))
        shown = (f"{one['gpus']:,}", percent(100 * one["efficiency"]), _rate(one["tokens_a_second"]), layout)
        rows.append((*shown, ms(one["step"]["ms"]), _span_of(one["step"]), bar))
    return aligned(rows, 0)


def _ending(plan: FormulaPlan | RunPlan) -> list[str]:
    """What the training costs, what was assumed, and what to measure next."""
    cost = [] if plan.spending is None else ["", _spent(plan.spending)]
    assumed = ["", "assumed:", *(f"  {one}" for one in plan.assumptions)]
    return [*cost, *assumed, "", f"to know more: {plan.tells_most}"]


def _spent(spent: Spending) -> str:
    hours, low, high = spent.gpu_hours
    text = f"{_rate(spent.steps)} steps: {_short(hours)} GPU hours [{_short(low)}, {_short(high)}]"
    if spent.money is not None:
        most = [_short(value) for value in spent.money]
        text += f", which cost {most[0]} [{most[1]}, {most[2]}]"
    return text


def _span_of(step: dict[str, float]) -> str:
    return _span(step["low"], step["high"])


def _span(low: float, high: float) -> str:
    return f"[{ms(low)}, {ms(high)}]"


def _rate(value: float) -> str:
    for unit, many in (("million", 1e6), ("thousand", 1e3)):
        if value >= many:
            return f"{value / many:.3g} {unit}"
    return f"{value:,.0f}"


def render_run_plan(plan: RunPlan) -> str:
    """A row and a bar for each rank count, what a step is made of, what was assumed, and what to measure next."""
    now, then = plan.measured, plan.asked
    lines = [
        f"on {count(then.ranks, 'rank')} a step takes {ms(then.ms)} {_span(then.low, then.high)} (95 % interval), "
        f"and each rank does {percent(100 * then.efficiency)} of what it does on {now.ranks} ({ms(now.ms)} a step)",
        "",
    ]
    rates = [name for name in ("samples", "tokens") if getattr(now, name) is not None]
    head = ("ranks", "step", "95 % interval", "efficiency", *(f"{name} a second" for name in rates), "")
    rows: list[tuple[str, ...]] = [head]
    for one in plan.curve:
        cells = (f"{one.ranks:,}", ms(one.ms), _span(one.low, one.high), percent(100 * one.efficiency))
        rows.append((*cells, *(_rate(getattr(one, name)) for name in rates), "#" * round(20 * one.efficiency)))
    lines += [*aligned(rows, 0), "", *_parts(now, then)]
    if plan.memory_bytes is not None:
        lines += [
            "",
            f"memory: a rank had {size(plan.memory_bytes)} at most; it stays so, or shrinks where states are sharded",
        ]
    return "\n".join([*lines, *_ending(plan)]) + "\n"


def render_run_answer(answer: RunAnswer) -> str:
    """The run with more replicas, and the fastest layouts, or why there is none of them."""
    if answer.scaled is not None:
        text = render_run_plan(answer.scaled)
    else:
        text = f"more replicas of what the run does are not told: {answer.not_scaled}\n"
    if answer.layouts is None:
        return f"{text}\nother layouts are not ranked: {answer.no_layouts}\n"
    return f"{text}\n{_ranked(answer.layouts)}\n"


def _ranked(found: RankedLayouts) -> str:
    rows: list[tuple[str, ...]] = [
        ("tp", "dp", "pp", "ZeRO", "micro-batches", "size", "schedule", "recompute", "memory", "step", "95 % interval")
    ]
    for one in found.best:
        at = one.layout
        schedule = "-" if at.pp == 1 else f"{at.schedule} x{at.chunks}" if at.chunks > 1 else at.schedule
        cells = (str(at.tp), str(at.dp), str(at.pp), str(at.zero), str(at.micro_batches), f"{at.micro_batch:g}x")
        held = "?" if one.memory_bytes is None else size(one.memory_bytes)
        again = "yes" if at.recompute else "no"
        rows.append((*cells, schedule, again, held, ms(one.ms), _span(one.low, one.high)))
    few = f", of which {count(found.too_large, 'layout')} are too large" if found.too_large else ""
    head = f"{count(found.tried, 'layout')} looked at{few}, {found.replayed:,} replayed; the fastest:"
    return "\n".join([head, "", *aligned(rows, 0), "", *(f"  {one}" for one in found.notes)])


def _parts(now: PlannedStep, then: PlannedStep) -> list[str]:
    """The parts of a step that are not nothing, of the run and of the plan."""
    rows: list[tuple[str, ...]] = [("part of the step", f"on {now.ranks}", f"on {then.ranks}", "")]
    for part, value in now.parts.items():
        if max(value, then.parts[part]) >= 0.005 * now.ms:
            rows.append((part, ms(value), ms(then.parts[part]), ""))
    return aligned(rows)
