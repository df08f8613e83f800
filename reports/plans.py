"""What `dsprof plan` prints."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from dsprof.analyzer.text import count, ms, percent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dsprof.plan.told import TableAnswer

MOST_ROWS: Final = 40
"""Predicted steps that are printed; all are in the JSON."""


def table(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Columns under each other, the first `left` of them and the last set left."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    return [
        "  ".join(
            [*(f"{cell:{'<' if i < left else '>'}{widths[i]}}" for i, cell in enumerate(row[:-1])), row[-1]]
        ).rstrip()
        for row in rows
    ]


def render_calibration(told: TableAnswer) -> str:
    """The hardware's figures, how well they predict, and the steps that were asked for."""
    lines = [f"learnt from {count(told.calibrated.rows, 'measured step')}", ""]
    rows = [("figure", "value", "90 % interval", "")]
    for one in told.figures():
        span = f"[{_short(one['low'])}, {_short(one['high'])}]"
        value = f"{_short(one['value'])} {one['unit']}".rstrip()
        rows.append((one["says"], value, span, "" if one["measured"] else "hardly measured: as is typical"))
    lines += table(rows)
    held = told.calibrated.held_out
    if not math.isnan(held):
        lines += [
            "",
            f"steps left out of the fit, with all that ran the same layer, were missed by {percent(100 * held)}",
        ]
    if told.predicted is not None and told.asked is not None:
        lines += ["", *_steps(told)]
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
        span = f"[{ms(found.low[i])}, {ms(found.high[i])}]"
        rows.append((*(f"{size:.0f}" for size in sizes), ms(found.ms[i]), span))
    more = len(steps) - MOST_ROWS
    return [*table(rows, 0), *([f"and {count(more, 'more step')}: see --json"] if more > 0 else [])]


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
