"""SARIF 2.1.0: findings at the lines that they blame, for code scanning of GitHub and for editors.

Findings that blame no line are none of it: a result without a place is shown nowhere. A path below the folder in which
the file is written is relative to it, as code scanning wants paths of the repository.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from .slices import Selection

if TYPE_CHECKING:
    from dsprof.analyzer.analysis import Analysis
    from dsprof.analyzer.finding import Finding, Severity

LEVELS: Final[dict[Severity, str]] = {"high": "error", "medium": "warning", "low": "note", "info": "none"}


def write(analysis: Analysis, file: IO[bytes], selection: Selection) -> int:
    """Write the findings of the run to `file`; how many have a line."""
    from dsprof.analyzer.rules.registry import all_rules

    says = {rule.code: rule.says for rule in all_rules()}
    results = [result for finding in analysis.findings if finding.is_problem for result in _results(finding)]
    codes = sorted({result["ruleId"] for result in results})
    rules = [{"id": code, "shortDescription": {"text": says.get(code, code)}} for code in codes]
    driver = {"name": "dsprof", "version": version("dsprof"), "rules": rules}
    run = {"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": results}
    log = {"$schema": "https://json.schemastore.org/sarif-2.1.0.json", "version": "2.1.0", "runs": [run]}
    file.write((json.dumps(log, indent=1) + "\n").encode())
    return len(results)


def _results(finding: Finding) -> list[dict[str, Any]]:
    """One for a finding with lines: it stands at the first, and the others are related places."""
    places = _places(finding)
    if not places:
        return []
    return [
        {
            "ruleId": finding.code,
            "level": LEVELS[finding.severity],
            "message": {"text": "\n".join([finding.title, *(f"Fix: {fix.title}" for fix in finding.fixes)])},
            "locations": places[:1],
            "relatedLocations": [{**place, "id": number} for number, place in enumerate(places[1:], start=1)],
            "partialFingerprints": {"dsprof/v1": f"{finding.code}:{places[0]['physicalLocation']}"},
            "properties": {"gain": finding.gain.to_dict(), "where": finding.where.to_dict()},
        }
    ]


def _places(finding: Finding) -> list[dict[str, Any]]:
    """The lines that its fixes change or look at, each once, in their order."""
    found: dict[tuple[str, int], None] = {}
    for fix in finding.fixes:
        for entry in fix.patch if fix.kind == "code" else ():
            file, line = entry.get("file"), entry.get("line")
            if isinstance(file, str) and file and isinstance(line, int) and line > 0:
                found[file, line] = None
    return [
        {"physicalLocation": {"artifactLocation": _artifact(file), "region": {"startLine": line}}}
        for file, line in found
    ]


def _artifact(file: str) -> dict[str, str]:
    path = Path(file)
    try:
        return {"uri": path.resolve().relative_to(Path.cwd().resolve()).as_posix(), "uriBaseId": "%SRCROOT%"}
    except ValueError:
        return {"uri": path.as_uri() if path.is_absolute() else path.as_posix()}
