"""Where the run goes, and where an ordinary step."""

from __future__ import annotations

from typing import Any

from dsprof.analyzer.analysis import WAITING, Analysis, RanksBelow
from dsprof.analyzer.text import clean, count, ms, percent, unit_of

from .. import palette, plots, wording
from .section import Block, Column, Figure, Heading, Maker, Row, Share, Stack, table

COLUMNS = (Column("part"), Column("time", number=True), Column("share", number=True), Column("what it is", soft=True))


# --- the run --------------------------------------------------------------------------------------


def _needs_time(analysis: Analysis) -> str:
    return "" if wording.kinds_of_time(analysis.time) else "how long the run took is not known"


def _time_lead(analysis: Analysis) -> str:
    return f"Its wall time, {wording.duration(sum(analysis.time.values()))}; mean over the ranks."


def _time(analysis: Analysis) -> list[Block]:
    codes = analysis.codes_by_time
    rows = [
        Row(
            (kind.look.label, wording.duration(kind.seconds), percent(kind.percent), kind.look.meaning),
            swatch=kind.look.color, codes=tuple(codes.get(kind.name, ())), share=kind.percent,
        )
        for kind in wording.kinds_of_time(analysis.time)
    ]  # fmt: skip
    label = "stacked bar of the run's wall time; the table below gives the numbers"
    return [Figure("time", label, lambda: _time_bar(analysis)), table(COLUMNS, rows, bare=True)]


def _time_bar(analysis: Analysis) -> Any:
    bar = plots.time_bar(analysis.time)
    return bar.update_layout(showlegend=False, height=86)  # the table below it has the colours


# --- the step -------------------------------------------------------------------------------------


def _needs_step(analysis: Analysis) -> str:
    return "" if sum(analysis.budget.values()) > 0 else "no complete step was captured"


def _step_lead(analysis: Analysis) -> str:
    return f"Mean over the ranks and {wording.steps_judged(analysis)}."


def _step(analysis: Analysis) -> list[Block]:
    total = sum(analysis.budget.values())
    codes = analysis.codes_by_part
    shares, rows = [], []
    for part, value in analysis.budget_shown.items():
        look, share = palette.part(part), 100 * value / total
        label = clean(look.label)
        shares.append(Share(label, round(share, 4), look.color, look.ink, f"{label} {ms(value)}"))
        cells = (label, of_a_step(value, total), f"{share:.1f} %", look.meaning)
        below = tuple(_below(analysis, part, who, total) for who in analysis.ranks_below(part))
        rows.append(Row(cells, look.color, codes=tuple(codes.get(part, ())), share=share, below=below))
    stack = Stack("shares of the step; the table below gives the numbers", tuple(shares))
    blocks: list[Block] = [stack, table(COLUMNS, rows, bare=True)]
    if len(analysis.ranks_captured) > 1:
        blocks += [
            Heading("By rank"),
            Figure("budget", "stacked bars of the budget by rank", lambda: _by_rank(analysis)),
        ]
    return blocks


def _by_rank(analysis: Analysis) -> Any:
    return plots.budget_bar(analysis.budget_by_rank, analysis.budget)


def of_a_step(value: float, step_ms: float) -> str:
    """A part of a step, ms, in the step's own unit and as many digits as its other parts, so that they compare; one
    that would have fewer than two digits left is told in a unit of its own."""
    unit, digits = unit_of(step_ms), 1 if step_ms >= 100 * unit_of(step_ms).ms else 2
    if unit.ms > 1 and 0 < abs(value / unit.ms) < 10 ** (1 - digits):
        return ms(value)
    return f"{value / unit.ms:,.{digits}f} {unit.name}"


def _below(analysis: Analysis, part: str, who: RanksBelow, step_ms: float) -> Row:
    label = f"rank {who.ranks[0]}" if len(who.ranks) == 1 else f"{count(len(who.ranks), 'other')} (median)"
    said = "own work" if analysis.delays is None else "others wait for it"
    own = f"{said} {of_a_step(who.own_ms, step_ms)}" if part in WAITING else ""
    return Row((label, of_a_step(who.ms, step_ms), "", own), marked=who.named)


TIME = Maker("time", "Where the run goes", _needs_time, _time_lead, _time)
STEP = Maker("step", "Where the step goes", _needs_step, _step_lead, _step)
