"""What holds the job back and what to do about it, worst first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dsprof.analyzer.analysis import Analysis, kind_of, part_of
from dsprof.analyzer.finding import Evidence, Finding, Fix
from dsprof.analyzer.text import clean, count, quantity, with_interval

from .. import edits, palette, wording
from .section import Block, Column, FindingCard, FixCard, Folded, Maker, Row, Said, Table, Words, always, table


def _blocks(analysis: Analysis) -> list[Block]:
    ids: dict[str, int] = {}
    problems = [_card(finding, analysis, ids) for finding in analysis.problems]
    remarks = [_card(finding, analysis, ids) for finding in analysis.remarks]
    blocks: list[Block] = [*problems] if problems else [Words(_nothing(analysis))]
    if remarks:
        summary = f"{count(len(remarks), 'remark')}, not sure to save more than noise"
        blocks.append(Folded(summary, tuple(remarks)))
    return blocks


def _nothing(analysis: Analysis) -> str:
    """What stands in the place of problems."""
    if analysis.step_ms is not None:
        healthy = analysis.verdict.status == "healthy"
        return "No fix is sure to shorten the step" + (", of all that dsprof can predict." if healthy else ".")
    if analysis.memory:
        return "None in what was recorded of the memory; no step was."
    return "None: no complete step was captured."


def _card(finding: Finding, analysis: Analysis, ids: dict[str, int]) -> FindingCard:
    code = clean(finding.code)
    ids[code] = ids.get(code, 0) + 1
    gain = finding.gain
    together = finding.together is not None
    return FindingCard(
        id=code if ids[code] == 1 else f"{code}-{ids[code]}",
        code=code,
        severity=finding.severity,
        title=clean(finding.title),
        color=_color(finding.code),
        saving=_capital(wording.saving_in_short(finding)),
        how="" if together or gain.ms <= 0 else wording.how(gain),  # its interval, too
        gain=wording.saving(finding),
        doubt=_doubt(finding, analysis.noise_ms),
        measured=_measured(analysis.run.verified.get(finding.code)),
        confidence=wording.confidence(finding),
        where=wording.where(finding.where),
        fixes=tuple(_fix(fix, finding, analysis.run.cwd) for fix in finding.fixes),
        evidence=_evidence([item for item in finding.telling if not isinstance(item.value, str)]),
        also=_in_words([item for item in finding.telling if isinstance(item.value, str)]),
    )


def _doubt(finding: Finding, noise_ms: float) -> str:
    """`not certain: the gain may be zero`, of a remark that says what it would save."""
    if finding.is_problem or not wording.saving(finding):
        return ""
    if finding.gain.low <= 0:
        return "not certain: the gain may be zero"
    return "not certain" + (": it may be no more than noise" if finding.gain.low <= noise_ms else "")


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]


def _color(code: str) -> str:
    """That of the part of the step, or of the run, that is lost to it."""
    part, kind = part_of(code), kind_of(code)
    if part is not None:
        return palette.part(part).color
    return palette.TIMES[kind].color if kind is not None else palette.HIGHLIGHT


def _measured(verified: Any) -> str:
    """What `dsprof fix --verify` measured; empty where it was not run."""
    if not isinstance(verified, dict) or "outcome" not in verified:
        return ""
    outcome = clean(verified["outcome"])
    numbers = [verified.get(name) for name in ("ms", "low", "high", "percent")]
    told = [float(number) for number in numbers if isinstance(number, (int, float))]
    return f"measured: {with_interval(*told)}, {outcome}" if len(told) == len(numbers) else f"tried: {outcome}"


def _fix(fix: Fix, finding: Finding, cwd: str) -> FixCard:
    other = fix.gain is not None and fix.gain != finding.gain
    return FixCard(
        title=clean(fix.title),
        edits=tuple(edits.changes(fix, cwd)),
        diff=fix.diff,
        applied_by=edits.applied_by(fix),
        gain=wording.gain(fix.gain) if other and fix.gain is not None else "",
    )


def _evidence(items: Sequence[Evidence]) -> Table | None:
    """What was measured beside what was to be expected."""
    if not items:
        return None
    expects = any(item.expected is not None for item in items)
    rows = [Row((clean(item.metric), _value(item), *((_expected(item),) if expects else ()))) for item in items]
    expected = (Column("expected", number=True),) if expects else ()
    return table((Column("evidence"), Column("measured", number=True, strong=True), *expected), rows)


def _in_words(items: Sequence[Evidence]) -> Said | None:
    return Said(tuple((clean(item.metric), _value(item)) for item in items)) if items else None


def _value(item: Evidence) -> str:
    return quantity(item.value, item.unit)


def _expected(item: Evidence) -> str:
    return "" if item.expected is None else quantity(item.expected, item.unit)


FINDINGS = Maker("findings", "What to do, worst first", always, lambda _: "", _blocks)
