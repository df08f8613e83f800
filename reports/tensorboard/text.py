"""The sections and the findings in the Markdown that TensorBoard's text tab shows."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Final

from dsprof.analyzer import text
from dsprof.analyzer.analysis import Analysis

from .. import wording
from ..sections import report_of
from ..sections.findings import FINDINGS
from ..sections.section import (
    Block,
    Codes,
    FindingCard,
    Folded,
    Head,
    Heading,
    Report,
    Said,
    Section,
    Table,
    Tiles,
    Words,
    without_figures,
)

_SPECIAL: Final = re.compile(r"([\\`*_{}\[\]<>()#+\-.!|~])")
MOST_ROWS: Final = 64
"""Of a table."""


def markdown_texts(analysis: Analysis) -> dict[str, str]:
    """Title -> text: the verdict with all sections, then each finding."""
    report = report_of(analysis)
    cards = [one for section in report.sections if section.id == FINDINGS.id for one in _cards(section.blocks)]
    named = {f"{at:02d} {card.code}": finding_markdown(card) for at, card in enumerate(cards, 1)}
    return {"00 verdict": verdict_markdown(analysis, report), **named}


def verdict_markdown(analysis: Analysis, report: Report | None = None) -> str:
    """The headline, the step, and all sections, the findings of them in one line each. report: of it, if there is one
    already."""
    report = report or report_of(analysis)
    lines = _head(report.head)
    step = analysis.step_ms
    if step is not None:
        lines += [
            f"Step {text.ms(step.mean)} ({wording.spread(step)}), {wording.steps_judged(analysis)}, "
            f"{text.count(len(analysis.ranks_captured), 'rank')}"
            + (f"; {_escape(report.head.step_is)}\\." if report.head.step_is else "."),
            "",
        ]
    for section in report.sections:
        lines += _section(section)
    return "\n".join(lines).rstrip() + "\n"


def finding_markdown(card: FindingCard) -> str:
    """One finding: place, gain, evidence, fixes."""
    facts = [_escape(fact) for fact in (card.gain, card.measured, card.confidence) if fact]
    lines = [f"### {_escape(card.title)}", "", "; ".join([f"**{card.severity}**", *facts]), ""]
    if card.where:
        lines += [f"Where: {_escape(card.where)}", ""]
    for fix in card.fixes:
        lines += [f"**Fix**: {_escape(fix.title)}" + (f" ({_escape(fix.gain)})" if fix.gain else ""), ""]
        if fix.edits:
            lines += [*(f"    {edit}" for edit in fix.edits), ""]
        if fix.applied_by:
            lines += [f"Without an edit: `{fix.applied_by}`; `dsprof fix RUN --verify` proves it", ""]
    for block in (card.evidence, card.also):
        lines += _BLOCKS[type(block)](block) if block is not None else []
    return "\n".join(lines).rstrip() + "\n"


def _head(head: Head) -> list[str]:
    lines = [f"## {_escape(head.headline)}", "", f"Verdict: **{head.status}**", ""]
    for label, notes in (("Note", head.notes), ("Warning", head.warnings)):
        for note in notes:
            lines += [f"{label}: {_escape(note)}", ""]
    return lines


def _section(section: Section) -> list[str]:
    """Empty where there is nothing but figures in it."""
    blocks = without_figures(section.blocks)
    if not blocks:
        return []
    lines = [f"### {_escape(section.title)}", ""] + ([_escape(section.lead), ""] if section.lead else [])
    if section.id == FINDINGS.id and (cards := _cards(blocks)):
        return [*lines, *(_in_a_line(at, card) for at, card in enumerate(cards, 1)), ""]
    return [*lines, *(line for block in blocks if type(block) in _BLOCKS for line in _BLOCKS[type(block)](block))]


def _cards(blocks: Sequence[Block]) -> list[FindingCard]:
    """The problems, then the remarks."""
    inside = [one for block in blocks for one in (block.blocks if isinstance(block, Folded) else (block,))]
    return [one for one in inside if isinstance(one, FindingCard)]


def _in_a_line(at: int, card: FindingCard) -> str:
    gain = f" ({_escape(card.gain)})" if card.gain else ""
    return f"{at}. **{card.severity}** `{card.code}` {_escape(card.title)}{gain}"


# --- blocks ---------------------------------------------------------------------------------------


def _table(block: Table) -> list[str]:
    """Codes of findings stand in a column of their own; a row that says more of another one is set in."""
    coded = any(row.codes for row in block.rows)
    titles = [("" if block.bare else _escape(column.title)) for column in block.columns] + [""] * coded
    rules = [("---:" if column.number else "---") for column in block.columns] + ["---"] * coded
    lines = [_cells(titles), f"|{'|'.join(rules)}|"]
    for row in block.rows[:MOST_ROWS]:
        codes = [", ".join(f"`{code}`" for code in row.codes)] * coded
        cells = [f"**{_escape(cell)}**" if cell and row.marked else _escape(cell) for cell in row.cells]
        lines.append(_cells([*cells, *codes]))
        for below in row.below:
            first, *others = map(_escape, below.cells)
            lines.append(_cells([f"&nbsp;&nbsp;{first}", *others, *[""] * coded]))
    more = len(block.rows) - MOST_ROWS
    return [*lines, *([_cells([f"and {text.count(more, 'more row')}", *titles[1:]])] if more > 0 else []), ""]


def _cells(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _codes(block: Codes) -> list[str]:
    reason = f" ({_escape(block.reason)})" if block.reason else ""
    return [f"{block.label}: {', '.join(f'`{code}`' for code in block.codes)}{reason}", ""]


def _pairs(pairs: Sequence[tuple[str, str]]) -> list[str]:
    return [*(f"- {_escape(label)}: {_escape(words)}" for label, words in pairs), ""]


def _folded(block: Folded) -> list[str]:
    inside = (line for one in block.blocks if type(one) in _BLOCKS for line in _BLOCKS[type(one)](one))
    return [f"{_escape(block.summary)}:", "", *inside]


_BLOCKS: Final[dict[type, Callable[[Any], list[str]]]] = {
    Words: lambda block: [_escape(block.text), ""],
    Heading: lambda block: [f"#### {_escape(block.text)}", ""],
    Table: _table,
    Said: lambda block: _pairs(block.lines),
    Tiles: lambda block: _pairs(block.values),
    Codes: _codes,
    Folded: _folded,
}
"""Those that Markdown has: no figure, and no bar, whose numbers are in the table that follows it."""


def _escape(value: object) -> str:
    return _SPECIAL.sub(r"\\\1", text.clean(value, 1000))
