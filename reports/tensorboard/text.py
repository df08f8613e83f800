"""The verdict and the findings in the Markdown that TensorBoard's text tab shows."""

from __future__ import annotations

import re
from typing import Final

from dsprof.analyzer import text
from dsprof.analyzer.analysis import Analysis
from dsprof.analyzer.finding import Finding

from .. import edits, palette, wording

_SPECIAL: Final = re.compile(r"([\\`*_{}\[\]<>()#+\-.!|~])")


def verdict_markdown(analysis: Analysis) -> str:
    """Headline, status, kinds of time, budget, findings in one line each, what passed, and the capture's quality."""
    lines = [f"## {_escape(analysis.verdict.headline)}", "", f"Verdict: **{analysis.verdict.status}**", ""]
    spent = wording.time_spent(analysis.time)
    if spent:
        lines += [f"Run {wording.duration(sum(analysis.time.values()))}: {_escape(spent)}", ""]
    step = analysis.step_ms
    if step is not None:
        lines += [
            f"Step {text.ms(step.mean)} ({wording.spread(step)}), {wording.steps_judged(analysis)}, "
            f"{text.count(len(analysis.ranks_captured), 'rank')}"
            + (f"; {_escape(wording.step_is(analysis))}." if analysis.step_is else "."),
            "",
            "| part | time | of the step | |",
            "|---|---:|---:|---|",
        ]
        for part, value in analysis.budget.items():
            if value >= palette.LEAST_SHARE * step.mean:
                look = palette.part(part)
                lines.append(
                    f"| {look.label} | {text.ms(value)} | {text.percent(100 * value / step.mean)} | {look.meaning} |"
                )
        lines.append("")
    for index, finding in enumerate(analysis.listed, 1):
        saved = wording.saving(finding)
        lines.append(
            f"{index}. **{finding.severity}** `{finding.code}` {_escape(finding.title)}"
            + (f" ({_escape(saved)})" if saved else "")
        )
    lines += [""] if analysis.listed else []
    if analysis.passed:
        lines += [f"Passed: {', '.join(f'`{code}`' for code in analysis.passed)}", ""]
    for reason, codes in wording.by_reason(analysis.not_judged):
        lines += [f"Not judged: {', '.join(f'`{code}`' for code in codes)} ({_escape(reason)})", ""]
    for note in analysis.notes:
        lines += [f"Note: {_escape(note)}", ""]
    lines += [f"Capture: {_escape(wording.capture_facts(analysis))}", ""]
    lines += [f"- {_escape(warning)}" for warning in wording.capture_warnings(analysis)]
    return "\n".join(lines).rstrip() + "\n"


def finding_markdown(finding: Finding, cwd: str = "") -> str:
    """One finding: place, gain, evidence table, fixes."""
    lines = [f"### {_escape(finding.title)}", ""]
    place = wording.where(finding.where)
    facts = [_escape(fact) for fact in (wording.saving(finding), wording.confidence(finding)) if fact]
    lines += ["; ".join([f"**{finding.severity}**", *facts]), ""]
    if place:
        lines += [f"Where: {_escape(place)}", ""]
    if finding.evidence:
        lines += ["| evidence | measured | expected |", "|---|---:|---:|"]
        for item in finding.evidence:
            expected = "" if item.expected is None else _escape(text.quantity(item.expected, item.unit))
            value = _escape(text.quantity(item.value, item.unit))
            lines.append(f"| {_escape(item.metric)} | {value} | {expected} |")
        lines.append("")
    for fix in finding.fixes:
        lines += [f"**Fix**: {_escape(fix.title)}", ""]
        changes = edits.changes(fix, cwd)
        if changes:
            lines += [*(f"    {change}" for change in changes), ""]
        if tried := edits.applied_by(fix):
            lines += [f"Without an edit: `{tried}`; `dsprof fix RUN --verify` proves it", ""]
    return "\n".join(lines).rstrip() + "\n"


def _escape(value: object) -> str:
    return _SPECIAL.sub(r"\\\1", text.clean(value))
