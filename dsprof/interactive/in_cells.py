"""How runs and what is found of them are shown in a notebook's cells, and where there is only text."""

from __future__ import annotations

import io
from html import escape
from typing import Final

import pandas as pd

from dsprof.analyzer.analysis import Analysis
from dsprof.analyzer.finding import Finding
from dsprof.analyzer.text import clean

SHOWN: Final = ("findings", "step")
"""Sections of the report that stand for a run."""
NO_STEP: Final = (
    "No step was seen. A step ends with an optimizer's step, or with a backward where no optimizer steps: what is "
    "profiled has to have several of them."
)


class Findings(tuple[Finding, ...]):
    """Findings, worst first."""

    __slots__ = ()

    @property
    def table(self) -> pd.DataFrame:
        """A row for each: severity, code, title, gain_ms a step with the ends of its 95 % interval (low_ms, high_ms),
        gain_percent of the step, confidence, and the first fix."""
        columns = ("severity", "code", "title", "gain_ms", "low_ms", "high_ms", "gain_percent", "confidence", "fix")
        rows = [
            (one.severity, one.code, clean(one.title), one.gain.ms, one.gain.low, one.gain.high, one.gain.percent,
             one.confidence, clean(one.fixes[0].title) if one.fixes else "")
            for one in self
        ]  # fmt: skip
        return pd.DataFrame(rows, columns=list(columns))

    def __repr__(self) -> str:
        from dsprof.reports.wording import saving

        lines = [
            f"{at}. {one.severity:6}  {one.code}  {clean(one.title)}" + (f"; {told}" if (told := saving(one)) else "")
            for at, one in enumerate(self, 1)
        ]
        return "\n".join(lines) or "no findings"

    def _repr_html_(self) -> str:
        from dsprof.reports.wording import saving

        rows = "".join(
            f"<tr><td>{one.severity}</td><td><code>{escape(clean(one.code))}</code></td>"
            f"<td style='text-align:left'>{escape(clean(one.title))}</td>"
            f"<td style='text-align:left'>{escape(saving(one))}</td>"
            f"<td style='text-align:left'>{escape(clean(one.fixes[0].title)) if one.fixes else ''}</td></tr>"
            for one in self
        )
        head = "<tr><th></th><th>code</th><th>what</th><th>gain</th><th>fix</th></tr>"
        return f"<table>{head}{rows}</table>" if self else "<p>no findings</p>"


def run_as_html(analysis: Analysis) -> str:
    """The verdict, what to do, and where the step goes."""
    from dsprof.reports.html import as_fragment

    return as_fragment(analysis, SHOWN, note=NO_STEP if analysis.step_ms is None else "")


def run_as_text(analysis: Analysis) -> str:
    """The verdict as the terminal has it."""
    from dsprof.reports import terminal

    file = io.StringIO()
    terminal.render(analysis, file, color=False)
    note = f"{NO_STEP}\n" if analysis.step_ms is None else ""
    return f"{file.getvalue()}{note}".rstrip()


def as_text(words: str) -> str:
    """Text as HTML, in lines and columns as it is."""
    return f"<pre style='white-space:pre-wrap'>{escape(words)}</pre>"
