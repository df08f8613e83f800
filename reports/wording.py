"""The words and numbers that all reports share, so that one run reads the same everywhere."""

from __future__ import annotations

import datetime
import math
import re
import shlex
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Final

from dsprof.analyzer.analysis import Analysis
from dsprof.analyzer.finding import Evidence, Finding, Fix, Gain, Where
from dsprof.run import RankExit, last_processes

_UNPRINTABLE: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]+")


def clean(text: object, limit: int = 300) -> str:
    """`text` on one line, without control characters or direction overrides, at most `limit` long.

    Names and commands come from the user's job: they must not move the cursor or reorder a line.
    """
    line = _UNPRINTABLE.sub(" ", str(text)).strip()
    return line if len(line) <= limit else line[: limit - 1] + "…"


# --- numbers ------------------------------------------------------------------------------------


def number(value: float) -> str:
    """Three significant digits where they matter: 1,234  212  38.2  4.21  0.43  0."""
    if not math.isfinite(value):
        return "?"
    size = abs(value)
    if size >= 99.95:
        return f"{value:,.0f}"
    if size >= 9.995:
        return f"{value:.1f}"
    return f"{value:.2f}" if size >= 0.005 else "0"


def ms(value: float) -> str:
    """A duration given in milliseconds: `38.2 ms`, `12.3 s`."""
    return f"{number(value / 1e3)} s" if abs(value) >= 9_999.5 else f"{number(value)} ms"


def percent(value: float) -> str:
    if not math.isfinite(value):
        return "? %"
    if 0 < abs(value) < 0.05:
        return "<0.1 %"
    return f"{value:.0f} %" if abs(value) >= 9.95 or value == 0 else f"{value:.1f} %"


def size(count: float) -> str:
    """A number of bytes: `25.0 MiB`."""
    value, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{value:,.0f} B" if unit == "B" else f"{value:.1f} {unit}"


def quantity(value: float | str, unit: str) -> str:
    """A measured value with its unit."""
    if isinstance(value, str):
        return clean(f"{value} {unit}")
    if unit == "ms":
        return ms(value)
    if unit in ("B", "bytes"):
        return size(value)
    if unit in ("%", "percent"):
        return percent(value)
    text = f"{value:,.0f}" if float(value).is_integer() else number(value)
    return clean(text if unit == "count" else f"{text} {unit}")


def spans(values: Iterable[int]) -> str:
    """0, 1, 2, 3, 7 -> `0-3, 7`."""
    runs: list[list[int]] = []
    for value in sorted(set(values)):
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def ranks(values: Sequence[int]) -> str:
    return f"rank {values[0]}" if len(values) == 1 else f"ranks {spans(values)}"


def count(value: int, noun: str) -> str:
    return f"{value:,} {noun}" if value == 1 else f"{value:,} {noun}s"


# --- findings -----------------------------------------------------------------------------------


def is_problem(finding: Finding) -> bool:
    return finding.severity != "info" or finding.code.startswith("run.")


INTERRUPTED: Final = (128 + signal.SIGINT, 128 + signal.SIGTERM)


HEALTHY: Final = "healthy: "


def is_healthy(analysis: Analysis) -> bool:
    """Whether the verdict is that nothing is wrong, and nothing large unexplained."""
    return headline(analysis).startswith(HEALTHY)


def headline(analysis: Analysis) -> str:
    """The verdict in one sentence."""
    step = analysis.step_ms
    for finding in filter(is_problem, analysis.findings):
        title, gain = clean(finding.title), finding.gain
        if step is None or gain.ms <= 0:
            return title
        return f"{title}; fixing it saves {ms(gain.ms)} of each {ms(step.mean)} step ({percent(gain.percent)})"
    if step is None:
        return "no complete step was captured, so nothing can be said about its speed"
    if not analysis.passed and not analysis.findings:
        return f"no rule could be judged on this capture; a step takes {ms(step.mean)}"
    if not math.isfinite(analysis.noise_ms):
        return f"too few steps to tell a gain from noise; a step takes {ms(step.mean)}"
    if analysis.run.status in INTERRUPTED:
        return f"the job was interrupted after step {analysis.step_count - 1}; {_unfinished(analysis)}"
    found = f"nothing found that is sure to shorten the {ms(step.mean)} step"
    lost = {
        "waiting for late ranks": analysis.budget.get("peer_wait", 0.0),
        "waiting for other stages of the pipeline": analysis.budget.get("bubble", 0.0),
        "outside the phases of the loop": analysis.budget.get("other", 0.0),
    }
    large = [f"{percent(100 * part / step.mean)} is {what}" for what, part in lost.items() if part > 0.1 * step.mean]
    if large:
        return f"{found}, but {' and '.join(large)}, which no rule here explains"
    if len(analysis.ranks_captured) < analysis.ranks_expected:
        return f"{found}, in {len(analysis.ranks_captured)} of {count(analysis.ranks_expected, 'rank')}"
    return HEALTHY + found


def _unfinished(analysis: Analysis) -> str:
    """What ranks had begun and not ended, for a job that somebody stopped: perhaps because it hung."""
    rows = analysis.rows
    open_rows = rows[(rows["kind"] == "comm") & ~rows["ended"].fillna(True).astype(bool)]
    if open_rows.empty:
        return "no collective was under way"
    last = open_rows.sort_values("start_ns").groupby("rank").tail(1)
    shown = zip(last["rank"].head(4), last["name"].head(4), last["seq"].head(4), strict=True)
    doing = [f"rank {rank} was in {clean(str(name))} number {seq}" for rank, name, seq in shown]
    idle = sorted(set(analysis.ranks_captured) - set(last["rank"]))
    if idle:
        doing.append(f"{ranks(tuple(idle))} was in no collective")
    return "; ".join(doing)


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


def by_reason(not_run: Mapping[str, str]) -> list[tuple[str, list[str]]]:
    """(reason, codes of the rules that could not be judged for it)."""
    reasons: dict[str, list[str]] = {}
    for code, reason in not_run.items():
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
