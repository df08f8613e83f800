"""What an analysis found, for the tests of rules."""

from __future__ import annotations

from dsprof.analyzer.analysis import Analysis
from dsprof.analyzer.finding import Finding


def of(analysis: Analysis, code: str) -> Finding | None:
    """The first finding of a code; None: there is none."""
    return next((finding for finding in analysis.findings if finding.code == code), None)
