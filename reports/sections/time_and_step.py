"""Where the run goes, and where an ordinary step."""

from __future__ import annotations

from dsprof.analyzer.analysis import Analysis, kind_of, part_of
from dsprof.analyzer.text import clean, ms

from .. import palette, plots, wording
from .section import Block, Column, Figure, Heading, Maker, Row, Share, Stack, table

COLUMNS = (Column("part"), Column("time", number=True), Column("share", number=True), Column("what it is", soft=True))


# --- the run --------------------------------------------------------------------------------------


def _needs_time(analysis: Analysis) -> str:
    return "" if wording.kinds_of_time(analysis.time) else "how long the run took is not known"


def _time_lead(analysis: Analysis) -> str:
    return f"Its wall time, {wording.duration(sum(analysis.time.values()))}; mean over the ranks."


def _time(analysis: Analysis) -> list[Block]:
    codes = wording.codes(analysis, kind_of)
    bar = plots.time_bar(analysis.time)
    bar.update_layout(showlegend=False, height=86)  # the table below it has the colours
    rows = [
        Row(
            (kind.look.label, wording.duration(kind.seconds), f"{kind.percent:.1f} %", kind.look.meaning),
            swatch=kind.look.color, codes=tuple(codes.get(kind.name, ())),
        )
        for kind in wording.kinds_of_time(analysis.time)
    ]  # fmt: skip
    label = "stacked bar of the run's wall time; the table below gives the numbers"
    return [Figure("time", label, bar), table(COLUMNS, rows, bare=True)]


# --- the step -------------------------------------------------------------------------------------


def _needs_step(analysis: Analysis) -> str:
    return "" if sum(analysis.budget.values()) > 0 else "no complete step was captured"


def _step_lead(analysis: Analysis) -> str:
    return f"Mean over the ranks and {wording.steps_judged(analysis)}."


def _step(analysis: Analysis) -> list[Block]:
    total = sum(analysis.budget.values())
    codes = wording.codes(analysis, part_of)
    shares, rows = [], []
    for part, value in analysis.budget.items():
        if value < palette.LEAST_SHARE * total:
            continue
        look, share = palette.part(part), 100 * value / total
        label = clean(look.label)
        shares.append(Share(label, round(share, 4), look.color, look.ink, f"{label} {ms(value)}"))
        cells = (label, f"{value:,.2f} ms", f"{share:.1f} %", look.meaning)
        rows.append(Row(cells, swatch=look.color, codes=tuple(codes.get(part, ()))))
    stack = Stack("shares of the step; the table below gives the numbers", tuple(shares))
    blocks: list[Block] = [stack, table(COLUMNS, rows, bare=True)]
    if len(analysis.ranks_captured) > 1:
        figure = plots.budget_bar(analysis.budget_by_rank, analysis.budget)
        blocks += [Heading("By rank"), Figure("budget", "stacked bars of the budget by rank", figure)]
    return blocks


TIME = Maker("time", "Where the run goes", _needs_time, _time_lead, _time)
STEP = Maker("step", "Where the step goes", _needs_step, _step_lead, _step)
