"""Fixes as unified diffs of the user's files, where these can be read and the change can be written."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from dsprof.analyzer.analysis import Analysis
from dsprof.analyzer.finding import Fix
from dsprof.redact import redact_text
from dsprof.run import RunFolder, RunInfo


def with_diffs(analysis: Analysis, folder: RunFolder) -> Analysis:
    """The analysis with a diff for each fix that files of this machine can be changed for.

    Only of a run that was started here by this user: the facts of a run from elsewhere could name any file.
    """
    if not folder.rerun_json.exists():
        return analysis
    findings = tuple(
        replace(finding, fixes=tuple(_with_diff(fix, analysis.run) for fix in finding.fixes))
        for finding in analysis.findings
    )
    return replace(analysis, findings=findings)


def _with_diff(fix: Fix, run: RunInfo) -> Fix:
    return replace(fix, diff=_diff(dict(fix.knobs), run)) if fix.knobs else fix


def _diff(knobs: Mapping[str, Any], run: RunInfo) -> str:
    """Empty where the files do not say how, or where something is left to be done by hand."""
    from dsprof.fix import changes

    cwd = Path(run.cwd or ".")
    with suppress(Exception):  # whatever the files or the facts hold: a verdict is not lost for want of a diff
        found = changes(knobs, run.facts_by_kind(), cwd, run.knobs)
        if not found.left:
            return redact_text(found.diff(cwd))
    return ""
