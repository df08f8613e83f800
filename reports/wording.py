"""The words and numbers that all reports share, so that one run reads the same everywhere."""

from __future__ import annotations

import datetime
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from dsprof.analyzer.analysis import Analysis
from dsprof.analyzer.finding import Evidence, Finding, Fix, Gain, Where
from dsprof.analyzer.text import clean, count, ms, number, percent, quantity, ranks, spans
from dsprof.run import RankExit, last_processes

# --- findings -----------------------------------------------------------------------------------


def is_problem(finding: Finding) -> bool:
    return finding.severity != "info" or finding.code.startswith("run.")


def where(place: Where) -> str:
    words = []
    if place.ranks:
        words.append(ranks(place.ranks))
    if place.stage is not None:
        words.append(f"stage {place.stage}")
    if place.op:
        words.append(clean(place.op))
    if place.group:
        words.append(f"group {clean(place.group)}")
    if place.module:
        words.append(f"module {clean(place.module)}")
    if place.steps:
        first, last = place.steps
        words.append(f"step {first}" if first == last else f"steps {first}-{last}")
    return ", ".join(words)


def gain(value: Gain) -> str:
    """`saves 38.2 ms a step (18 %) [31.0, 45.4]`, the brackets a 95 % interval; empty where no gain is predicted."""
    if value.ms <= 0:
        return ""
    return f"saves {ms(value.ms)} a step ({percent(value.percent)}) [{number(value.low)}, {number(value.high)}]"


def evidence(item: Evidence) -> str:
    text = f"{clean(item.metric)}: {quantity(item.value, item.unit)}"
    return text if item.expected is None else f"{text} (expected {quantity(item.expected, item.unit)})"


@dataclass(frozen=True)
class Change:
    """One concrete edit: `text` to write at `place` (empty where it is clear or not known)."""

    place: str
    text: str

    def __str__(self) -> str:
        return f"{self.place}  {self.text}" if self.place else self.text


def changes(fix: Fix, cwd: str = "") -> list[Change]:
    """A fix as edits to copy; file names are shortened to be relative to `cwd`."""
    return [_change(fix.kind, entry, cwd) for entry in fix.patch]


def _change(kind: str, entry: dict[str, Any], cwd: str) -> Change:
    value = clean(entry.get("value", ""))
    if kind == "env":
        return Change("", f"export {clean(entry.get('name', ''))}={value}")
    if kind == "config":
        key = clean(entry.get("path", "")).strip("/").replace("/", ".").replace("~1", "/").replace("~0", "~")
        return Change("", f"remove {key}" if entry.get("op") == "remove" else f"{key} = {value}")
    argument = clean(entry.get("argument") or "")
    called = argument.endswith(")")  # a call to write, not an argument to set
    code = f"{argument}={value}" if argument and value and not called else argument or value
    return Change(site(entry.get("file"), entry.get("line"), cwd), code)


def site(file: object, line: object, cwd: str = "") -> str:
    """`train.py:112`; empty where the file is not known."""
    if not file:
        return ""
    path = PurePath(clean(file))
    if cwd and path.is_relative_to(cwd):
        path = path.relative_to(cwd)
    return str(path) if line is None else f"{path}:{line}"


# --- the run ------------------------------------------------------------------------------------


def ended(item: RankExit) -> str:
    """`exit status 7`, `killed by SIGKILL (137)`."""
    return item.how if item.signal is None else f"killed by {item.how} ({item.status})"


def missing_ranks(analysis: Analysis) -> tuple[int, ...]:
    return tuple(sorted(set(range(analysis.ranks_expected)) - set(analysis.ranks_captured)))


def by_reason(not_judged: Mapping[str, str]) -> list[tuple[str, list[str]]]:
    """(reason, codes of the rules that could not be judged for it)."""
    reasons: dict[str, list[str]] = {}
    for code, reason in not_judged.items():
        reasons.setdefault(clean(reason), []).append(code)
    return list(reasons.items())


def capture_warnings(analysis: Analysis) -> list[str]:
    """What limits the trust in this capture, in whole sentences' worth each; empty when nothing does."""
    restarts = max((item.restart for item in analysis.run.exits), default=0)
    notes = [f"the job was restarted {count(restarts, 'time')}; this is the last attempt"] if restarts else []
    return notes + _bad_ends(analysis) + [clean(text) for text in analysis.capture.warnings]


def _bad_ends(analysis: Analysis) -> list[str]:
    """`ranks 1-3 killed by SIGTERM (143), last complete step 11`: of those that no `run.*` finding names."""
    broken = [finding for finding in analysis.findings if finding.code.startswith("run.")]
    told = {rank for finding in broken for rank in finding.where.ranks or ()}
    last_step = {info.rank: info.last_step for info in analysis.run.ranks}
    alike: dict[str, list[int]] = {}
    for item in last_processes(analysis.run.exits):
        if item.status != 0 and item.rank not in told:
            words = ended(item) if item.signal is not None else f"ended with {ended(item)}"
            step = last_step.get(item.rank)
            if step is not None:
                words += f", last complete step {step}" if step >= 0 else ", no complete step"
            alike.setdefault(words, []).append(item.rank)
    return [f"{ranks(who)} {words}" for words, who in alike.items()]


def capture_facts(analysis: Analysis) -> str:
    """The capture's quality in one line."""
    capture = analysis.capture
    missing = missing_ranks(analysis)
    words = [f"{len(analysis.ranks_captured)}/{analysis.ranks_expected} ranks"]
    if missing:
        words[0] += f" (missing {spans(missing)})"
    if capture.overhead_percent is not None:
        words.append(f"overhead est. {percent(capture.overhead_percent)}")
    words.append(f"{count(capture.dropped, 'record')} dropped")
    if len(analysis.ranks_captured) > 1:
        error = capture.clock_error_us
        words.append(f"clocks within {quantity(error, 'us')}" if error > 0 else "one clock")
    if analysis.step_ms is not None and math.isfinite(analysis.noise_ms):
        words.append(f"noise {ms(analysis.noise_ms)}")
    return ", ".join(words)


def moment(text: str) -> str:
    """An ISO time in UTC, to the second: `2026-11-20 10:15:00 UTC`; as it is where it is not one."""
    try:
        when = datetime.datetime.fromisoformat(text)
    except ValueError:
        return clean(text)
    return f"{when.astimezone(datetime.UTC):%Y-%m-%d %H:%M:%S} UTC"


def command(words: Sequence[str]) -> str:
    """A command as one line that a shell would read back."""
    return clean(shlex.join(words), 2000)
