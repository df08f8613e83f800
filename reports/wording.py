"""The words and numbers that all reports share, so that one run reads the same everywhere."""

from __future__ import annotations

import datetime
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from dsprof.analyzer.align.steps import StepTime
from dsprof.analyzer.analysis import Analysis, time_shown
from dsprof.analyzer.finding import MEASURED_EXCESS, MEASURED_ON_DEVICE, Evidence, Finding, Gain, Where
from dsprof.analyzer.memory.allocator_state import DeviceMemory, Holder
from dsprof.analyzer.rules.registry import ends_run
from dsprof.analyzer.text import clean, count, ms, number, percent, quantity, ranks, spans, unit_of
from dsprof.run import RankExit, last_processes

from . import palette
from .edits import settings, site

# --- the verdict --------------------------------------------------------------------------------


def steps_judged(analysis: Analysis) -> str:
    """`35 ordinary steps of 40`, which is what the step's mean, quantiles and budget are of; `40 steps` if all are."""
    ordinary = analysis.steps_judged
    if ordinary == analysis.step_count:
        return count(ordinary, "step")
    return f"{count(ordinary, 'ordinary step')} of {analysis.step_count:,}"


def step_is(analysis: Analysis) -> str:
    """`a step is an iteration of 6 optimizer steps`; empty where a step is one optimizer step after one backward."""
    return f"a step is {clean(analysis.step_is)}" if analysis.step_is else ""


def spread(step: StepTime) -> str:
    """`median 212, p10-p90 210-215`, in the unit in which `text.ms` gives the mean."""
    median, p10, p90 = (_beside(step.mean, value) for value in (step.median, step.p10, step.p90))
    return f"median {median}, p10-p90 {p10}-{p90}"


def between(low: float, high: float) -> str:
    """Two durations given in ms: `210 to 215 ms`."""
    return f"{_beside(high, low)} to {ms(high)}"


def _beside(reference: float, value: float) -> str:
    """A duration in ms as a number in the unit that `text.ms` chooses for the one it stands beside."""
    return unit_of(reference).number(value)


# --- kinds of time ------------------------------------------------------------------------------


@dataclass(frozen=True)
class KindOfTime:
    """A kind of the run's wall time."""

    name: str
    look: palette.Part
    seconds: float
    percent: float
    """Of the run."""

    def __str__(self) -> str:
        share = f" ({percent(self.percent)})" if self.name == "training" else ""
        return f"{self.look.label} {duration(self.seconds)}{share}"


def kinds_of_time(time: Mapping[str, float]) -> list[KindOfTime]:
    """What the run's wall time (kind -> s) went to, in schema.TIME_KINDS's order, without what is next to nothing."""
    total = sum(time.values())
    return [
        KindOfTime(name, palette.TIMES[name], seconds, 100 * seconds / total)
        for name, seconds in time_shown(time).items()
    ]


def time_spent(time: Mapping[str, float]) -> str:
    """`training 48.0 s (77 %), evaluation 6.1 s, start-up 8.0 s`; empty where it is not known."""
    return ", ".join(map(str, kinds_of_time(time)))


def duration(seconds: float) -> str:
    """`6.1 s`, `212 s`, `34.2 min`, `5.21 h`."""
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    if seconds < 599.5:
        return f"{seconds:.0f} s"
    return f"{number(seconds / 60)} min" if seconds < 7200 else f"{number(seconds / 3600)} h"


# --- findings -----------------------------------------------------------------------------------


def where(place: Where) -> str:
    words = []
    if place.ranks:
        words.append(ranks(place.ranks))
    if place.coordinate:
        words.append(" ".join(f"{clean(name)} {at}" for name, at in place.coordinate.items()))
    if place.stage is not None:
        words.append(f"stage {place.stage}")
    if place.op:
        words.append(clean(place.op))
    if place.dimension:
        words.append(f"dimension {clean(place.dimension)}")
    if place.group:
        words.append(f"group {clean(place.group)}")
    if place.module:
        words.append(f"module {clean(place.module)}")
    if place.steps:
        first, last = place.steps
        words.append(f"step {first}" if first == last else f"steps {first}-{last}")
    return ", ".join(words)


COST_THIS_RUN: Final = "cost this run"
"""In the place of `saves`, of what may not come again."""


def gain(value: Gain, said: str = "") -> str:
    """`saves 38.2 ms a step (18 %) [31.0, 45.4]`, the brackets a 95 % interval; empty where none is predicted. said: in
    the place of `saves`.

    A cost outside the ordinary step `saves 54.0 ms a step on average (56 % of the run's time per step) [31.0, 77.0]`.
    """
    if value.ms <= 0:
        return ""
    low, high = (_beside(value.ms, end) for end in (value.low, value.high))
    return predicted(value, said) + (f" [{low}, {high}]" if low != high else "")


def predicted(value: Gain, said: str = "") -> str:
    """`saves 38.2 ms a step (18 %)`, without an interval; empty where none is predicted."""
    return f"{said or verb(value)} {ms(value.ms)} {a_step(value)}" if value.ms > 0 else ""


def saving(finding: Finding) -> str:
    """What fixing a finding gains, as `gain` says it; of one that another hides also what fixing both does; of one that
    came once, and may not come again, `cost this run 12.3 ms a step (5.0 %) [8.10, 16.4]`."""
    if finding.together is None:
        return gain(finding.gain, COST_THIS_RUN if finding.of_this_run else "")
    both = gain(finding.together.gain)
    return f"alone it {gain(finding.gain) or 'saves nothing'}; together with {clean(finding.together.code)} it {both}"


def saving_in_short(finding: Finding) -> str:
    """The same, without an interval where that is one number."""
    if finding.together is not None:
        return saving(finding)
    return predicted(finding.gain, COST_THIS_RUN if finding.of_this_run else "")


def verb(value: Gain) -> str:
    """`saves`: what a change would gain; `costs`: what something took, of which what can be saved is not known."""
    return "costs" if value.method == MEASURED_ON_DEVICE else "saves"


def confidence(finding: Finding) -> str:
    """`confidence 93 %`: of such predictions so many came true; empty where nothing is predicted or none was tried."""
    if finding.confidence is None or finding.gain.ms <= 0:
        return ""
    return f"confidence {percent(100 * finding.confidence)}"


def a_step(value: Gain) -> str:
    """What a gain is of: `a step (18 %)`, `a step on average (56 % of the run's time per step)`."""
    if value.method == MEASURED_EXCESS:
        return f"a step on average ({percent(value.percent)} of the run's time per step)"
    return f"a step ({percent(value.percent)})"


def how(value: Gain) -> str:
    """`95 % interval 31.2 to 44.6 ms, predicted by replay`."""
    method = f"predicted by {clean(value.method)}"
    if value.method == MEASURED_EXCESS:
        method = "measured as excess over ordinary steps"
    if value.method == MEASURED_ON_DEVICE:
        return f"from {between(value.low, value.high)} by rank, {clean(value.method)}"
    wide = number(value.low) != number(value.high)
    return (f"95 % interval {between(value.low, value.high)}, " if wide else "") + method


def evidence(item: Evidence) -> str:
    text = f"{clean(item.metric)}: {quantity(item.value, item.unit)}"
    return text if item.expected is None else f"{text} (expected {quantity(item.expected, item.unit)})"


def next_commands(analysis: Analysis, run: str) -> list[tuple[str, str]]:
    """What to type next about a run's fixes, and what it does. run: as it is typed."""
    found = []
    if any(fix.knobs for finding in analysis.problems for fix in finding.fixes):
        found.append((f"dsprof fix {run}", "the change as a diff; --verify runs the job with and without it"))
    asked = next(filter(None, map(_asked, analysis.problems)), "")
    if asked:
        found.append((f"dsprof whatif {run} {asked}", "what other changes would save beside it"))
    return found


def _asked(finding: Finding) -> str:
    """How `dsprof whatif` is asked about a finding's change: without its fault, or with the first fix whose knobs are
    all predicted; empty where it would refuse."""
    if finding.gain.method != "replay" or finding.gain.ms <= 0:
        return ""
    if finding.replayed:
        return f"--without {finding.code}"
    from dsprof.knobs.predicted import is_predicted

    return next(
        (settings(fix) for fix in finding.fixes if fix.knobs and all(is_predicted(key) for key, _ in fix.knobs)), ""
    )


# --- device memory --------------------------------------------------------------------------------


def device(held: DeviceMemory) -> str:
    """`device 0 of rank 3`."""
    return f"device {held.device} of rank {held.rank}"


def memory_parts(held: DeviceMemory) -> list[tuple[str, int]]:
    """What a device's reserved memory is, in words and bytes; without what there is none of."""
    rounding = held.total("allocated") - held.total("requested")
    parts = [
        ("in use by tensors", held.total("requested")),
        ("rounding of their sizes", rounding),
        ("freed, another stream may still use it", held.total("pending")),
        ("free in whole segments", held.total("releasable")),
        ("free between blocks in use", held.total("split")),
    ]
    return [(label, value) for label, value in parts if value > 0]


def allocated_at(item: Holder, cwd: str = "") -> str:
    """`src/model.py:12`: file names are shortened to be relative to `cwd`, or to their last two parts."""
    file, _, line = item.site.rpartition(":")
    if not line.isdigit():
        return clean(item.site)
    place = site(file, int(line), cwd)
    if place.startswith("/"):
        place = "/".join(place.split("/")[-2:])
    return clean(place)


# --- the run ------------------------------------------------------------------------------------


def ended(item: RankExit) -> str:
    """`exit status 7`, `killed by SIGKILL (137)`."""
    return item.how if item.signal is None else f"killed by {item.how} ({item.status})"


def by_reason(not_judged: Mapping[str, str]) -> list[tuple[str, list[str]]]:
    """(reason, codes of the rules that could not be judged for it)."""
    reasons: dict[str, list[str]] = {}
    for code, reason in not_judged.items():
        reasons.setdefault(clean(reason), []).append(code)
    return list(reasons.items())


def capture_warnings(analysis: Analysis) -> list[str]:
    """What limits the trust in this capture, and launch hints beside the headline's; empty when there are none."""
    restarts = max((item.restart for item in analysis.run.exits), default=0)
    notes = [f"the job was restarted {count(restarts, 'time')}; this is the last attempt"] if restarts else []
    hints = [hint for hint in (clean(text, 500) for text in analysis.run.hints) if hint != analysis.verdict.headline]
    return notes + hints + _bad_ends(analysis) + [clean(text) for text in analysis.capture.warnings]


def _bad_ends(analysis: Analysis) -> list[str]:
    """`ranks 1-3 killed by SIGTERM (143), last complete step 11`: of those that no `run.*` finding names."""
    broken = [finding for finding in analysis.findings if ends_run(finding.code)]
    told = {rank for finding in broken for rank in finding.where.ranks or ()}
    last_step = {info.rank: info.last_step for info in analysis.run.ranks}
    alike: dict[str, list[int]] = {}
    for item in last_processes(analysis.run.exits):
        if item.status != 0 and item.rank not in told:
            words = ended(item) if item.signal is not None else f"ended with {ended(item)}"
            if item.stopped and analysis.run.ended_for_hanging:
                words = f"ended by dsprof, since the job hung (--on-hang abort; {item.how})"
            step = last_step.get(item.rank)
            if step is not None:
                words += f", last complete step {step}" if step >= 0 else ", no complete step"
            alike.setdefault(words, []).append(item.rank)
    return [f"{ranks(who)} {words}" for words, who in alike.items()]


def capture_facts(analysis: Analysis, *, brief: bool = False) -> str:
    """The capture's quality in one line. brief: of one that is whole, without what is as it is to be."""
    capture = analysis.capture
    missing = analysis.missing_ranks
    if not analysis.ranks_expected:
        return "no rank was captured"
    words = [f"{len(analysis.ranks_captured)}/{count(analysis.ranks_expected, 'rank')}"]
    if missing:
        words[0] += f" (missing {spans(missing)})"
    if analysis.run.imported:
        words.append(f"imported from {imported_from(analysis.run.imported)}, of unknown overhead")
    elif capture.overhead_percent is not None:
        words.append(f"overhead {'' if capture.overhead_measured else 'est. '}{percent(capture.overhead_percent)}")
    if not brief and (not analysis.run.imported or capture.dropped):
        words.append(f"{count(capture.dropped, 'record')} dropped")
    if len(analysis.ranks_captured) > 1:
        error = capture.clock_error_us
        if error is None:
            words.append("clocks taken for one, as the trace does not name them")
        else:
            words += [] if brief else [f"clocks within {quantity(error, 'us')}" if error > 0 else "one clock"]
    if noise(analysis):
        words.append(f"noise {noise(analysis)}")
    if not brief and capture.replay is not None and capture.replay.held_out is not None:
        words.append(f"replay of held-out steps within {percent(max(100 * capture.replay.held_out.missed, 0.1))}")
    return ", ".join(words)


IMPORTED: Final = {
    "kineto": "torch.profiler",
    "chrome": "a Chrome trace, by a mapping file",
    "nsight": "Nsight Systems",
    "chakra": "a Chakra execution trace",
    "dsprof": "an export of dsprof's",
    "straggler": "a straggler table",
    "flight_recorder": "Flight Recorder dumps",
    "memory_snapshot": "a CUDA memory snapshot",
}


def imported_from(format_name: str) -> str:
    """What a format of `dsprof.importers` is called."""
    return IMPORTED.get(format_name, clean(format_name))


def noise(analysis: Analysis) -> str:
    """The run's own noise floor; empty where there are too few steps to tell."""
    known = analysis.step_ms is not None and math.isfinite(analysis.noise_ms)
    return ms(analysis.noise_ms) if known else ""


def unbroken(words: str, space: str = "\N{NO-BREAK SPACE}") -> str:
    """Numbers kept on one line with their units, and with what they are the number of, by `space`."""
    return _UNIT.sub(space, words)


_UNIT: Final = re.compile(
    r"(?<=\d) (?=%|(?:us|ms|s|min|h|[KMGT]?i?B)\b)|(?:(?<=\brank)|(?<=\branks)|(?<=\bstage)|(?<=\bstep)) (?=\d)"
)


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
