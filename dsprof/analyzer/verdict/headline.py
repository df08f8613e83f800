"""The answer to "what holds this job back?", in one sentence.

"Healthy" is a promise: it is said only where the rules that matter were judged, and what is neither compute nor
optimizer is small or explained. Explained is what every lever that there is was replayed for, and none gains anything.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise
from typing import Final

import numpy as np
import pandas as pd

from dsprof.run import INTERRUPTED
from dsprof.schema import BUDGET_PARTS
from dsprof.trace import concat_rows

from ..align.steps import early_ends
from ..analysis import Analysis, Verdict
from ..budget.irregular import ENOUGH_STEPS, FEWEST_JUDGED
from ..budget.label import PHASE_PART
from ..budget.parts import TRAINING
from ..finding import MEASURED_EXCESS, MEASURED_ON_DEVICE, Finding
from ..memory.allocator_state import STATE_COLUMNS
from ..rules.registry import all_rules, ends_run, explaining, with_
from ..rules.rule import Rule
from ..text import clean, count, ms, percent, ranks, size
from .next_step import AGAIN, DEEP, EVERY_RANK, HANG, ORDINARY, inconclusive, look_closer
from .overrides import shown

LARGE: Final = 0.1
"""Share of the step that may be lost unexplained in a healthy run."""
MATTERS: Final = 0.075
"""Share of the step from which on the rules that could explain a part must have been judged."""
MUCH: Final = 0.25
"""Share of training and evaluation together from which on the latter is named."""
LIKELY: Final = 3.0
"""Percent of the step that a remark most likely gains, from which on a job is not called healthy, where the whole
interval is above the noise."""
NOTHING_TO_GAIN: Final = 1.0
"""A lever that gains less, in percent, explains why the time stays lost."""

LAUNCHES: Final = "compute.launch-bound"
"""Where it concerns a job and was not judged, what counts as computing may be waiting for the host."""
LOST: Final = {
    "comm_exposed": "waiting for collectives",
    "peer_wait": "waiting for late ranks",
    "bubble": "waiting for other stages of the pipeline",
    "data": "waiting for input",
    "offload": "waiting for offloaded data",
    "pause": "garbage collection",
    "other": "outside the phases of the loop",
}
COSTS: Final = {"compilation": "compilation", "data": "starting loaders"}
"""Kinds of irregular steps that come again. Of a stop that came by chance its finding says what is sure."""


def verdict_of(
    analysis: Analysis,
    *,
    unknown: str = "",
    slowdown: str = "",
    missing: str = "",
    stood: str = "",
    crowded: str = "",
    outside: str = "",
    untold: str = "",
) -> Verdict:
    """The verdict on `analysis`, whose own `verdict` is not looked at.

    unknown: why not all chains of the job are known
    slowdown: what to say of a lasting one; missing: why there may well be no step: which part of the run was captured,
    where somebody asked for one, or that nothing was trained; stood: what to say of a hang that resolved itself;
    crowded: what to say of ranks that are late since they wait for a core; outside: the line that most of the time
    outside the phases lies in; untold: what counts as useful, and no rule could judge
    """
    verdict = _answer(analysis, unknown, slowdown, missing, crowded, outside, untold)
    if not stood or verdict.status == "failed" or stood in verdict.headline:
        return verdict
    return Verdict(verdict.status, f"{verdict.headline}; {clean(stood)}")


def _answer(
    analysis: Analysis, unknown: str, slowdown: str, missing: str, crowded: str, outside: str, untold_work: str
) -> Verdict:
    run, step, closer = analysis.run, analysis.step_ms, look_closer(analysis.run)
    if run.hints and run.status:
        return Verdict("failed", clean(run.hints[0], 500))
    worst = next((one for one in analysis.findings if one.is_problem or ends_run(one.code)), None)
    if worst is not None:
        return _of_finding(analysis, worst)
    if analysis.memory and not len(analysis.steps):
        return inconclusive(_of_memory(analysis), "`dsprof run` of the job does")
    if step is None and len(analysis.steps):
        return inconclusive("no step was completed on all captured ranks, so nothing can be compared", EVERY_RANK)
    if step is None and missing:
        return inconclusive(missing, "capture a part that trains, as `dsprof run --steps 10:30` does")
    if step is None:
        return Verdict("failed", "no complete step was captured, so nothing can be said about its speed")
    if not analysis.passed and not analysis.findings:
        return inconclusive(f"no rule could be judged on this capture; a step takes {ms(step.mean)}", closer)
    if analysis.device is not None:
        return inconclusive(f"{_of_devices(analysis)}; nothing found that surely shortens the step", ORDINARY)
    if unknown:
        return inconclusive(f"{unknown}; a step takes {ms(step.mean)}", DEEP)
    if not math.isfinite(analysis.noise_ms) or analysis.steps_judged < FEWEST_JUDGED:
        few = f"too few steps to tell a gain from noise; a step takes {ms(step.mean)}"
        return inconclusive(few, f"profile at least {ENOUGH_STEPS} with `dsprof run`")
    if run.status in INTERRUPTED:
        last = analysis.step_count - 1
        doing = f"; {_unfinished(analysis)}" if analysis.ranks_expected > 1 else ""
        return inconclusive(f"the job was interrupted after step {last}{doing}", HANG if doing else AGAIN)
    found = f"nothing found that is sure to shorten the {ms(step.mean)} step" + _beside(analysis)
    if len(analysis.budget_by_rank) < analysis.ranks_expected:
        captured = f"steps of {len(analysis.budget_by_rank)} of {count(analysis.ranks_expected, 'rank')} were captured"
        return inconclusive(f"{found}, but only {captured}", EVERY_RANK)
    early = early_ends(analysis.steps)
    if early:
        return inconclusive(f"{found}, but {clean(early[0])}", EVERY_RANK)
    untold = _why_not(analysis, with_("told_by_replay"))
    if untold is not None:
        return inconclusive(f"{found}: {clean(untold)}", closer)
    if LAUNCHES in analysis.not_judged:
        return inconclusive(f"{found}: {clean(analysis.not_judged[LAUNCHES])}", DEEP)
    if untold_work:
        return inconclusive(f"{found}, but {clean(untold_work)}", closer)
    likely = _likely(analysis)
    if likely is not None:
        return inconclusive(_of_likely(likely, step.mean), closer)
    lost = _lost(analysis)
    explained = {part for part in lost if _explained(analysis, part)}
    unexplained = sum(share for part, share in lost.items() if part not in explained)
    unjudged = [part for part, share in lost.items() if share > MATTERS and _unjudged(analysis, part)]
    if slowdown and unexplained < LARGE:
        return inconclusive(f"{found}, but {slowdown}; what changed there no rule here judges", closer)
    if unexplained < LARGE and not unjudged:
        spared = [f"{percent(100 * share)} is {_words(part)}" for part, share in lost.items() if share > LARGE]
        return Verdict(
            "healthy", found + (f"; {', '.join(spared)}, and no change that was tried shortens it" if spared else "")
        )
    large = [part for part in lost if part not in explained and lost[part] > LARGE / 2] or unjudged
    named = large or [part for part in lost if part not in explained and lost[part] > LARGE / 10]
    parts = [
        f"{percent(100 * lost[part])} is {_words(part)}{_more(analysis, part, crowded, outside)}" for part in named
    ]
    return inconclusive(f"{found}, but {' and '.join(parts)}", closer)


def _beside(analysis: Analysis) -> str:
    """How much goes to evaluation, where that is so much that the training step is not what matters most."""
    evaluating, training = analysis.time.get("evaluation", 0.0), analysis.time.get("training", 0.0)
    share = evaluating / (evaluating + training) if evaluating > 0 else 0.0
    if share < MUCH:
        return ""
    what = "evaluating, playing or sampling, all forwards without gradients,"
    return f" ({what} takes {percent(100 * share)} of the time)"


def _of_finding(analysis: Analysis, finding: Finding) -> Verdict:
    title, gain, step = clean(finding.title), finding.gain, analysis.step_ms
    if ends_run(finding.code):
        return Verdict("failed", title)
    if step is not None and finding.together is not None:
        return Verdict("bottleneck", f"{title}; {_hidden(finding, step.mean)}")
    if step is None or gain.ms <= 0:
        return Verdict("bottleneck", title)
    if gain.method == MEASURED_ON_DEVICE:
        return Verdict("bottleneck", f"{title}; that is {ms(gain.ms)} of the {ms(step.mean)} step")
    if gain.method == MEASURED_EXCESS:
        share = f"{percent(gain.percent)} of the run's time per step"
        saved = f"fixing it saves {ms(gain.ms)} a step on average ({share})"
    elif finding.of_this_run:
        saved = f"that cost {ms(gain.ms)} of each {ms(step.mean)} step of this run ({percent(gain.percent)})"
    else:
        saved = f"fixing {_what(finding)} saves {ms(gain.ms)} of each {ms(step.mean)} step ({percent(gain.percent)})"
        saved += _one_alone(finding)
    return Verdict("bottleneck", f"{title}; {saved}")


def _likely(analysis: Analysis) -> Finding | None:
    """The first remark that most likely gains so much that a job with it is not healthy, and surely something, but not
    surely so much as to be a problem."""
    return next(
        (
            one
            for one in analysis.findings
            if one.gain.method == "replay" and one.gain.percent >= LIKELY and one.gain.low > max(analysis.noise_ms, 0.0)
        ),
        None,
    )


def _of_likely(finding: Finding, step_ms: float) -> str:
    gain = finding.gain
    saved = f"fixing {_what(finding)} most likely saves {ms(gain.ms)} of each {ms(step_ms)} step "
    saved += f"({percent(gain.percent)}), at least {ms(gain.low)} and at most {ms(gain.high)}"
    knobs = any(fix.knobs for fix in finding.fixes)
    tells = _what_tells(finding) if knobs else "make the change and run it: `dsprof compare` of the two runs tells"
    return f"{clean(finding.title)}; {saved}: {tells}"


def _what(finding: Finding) -> str:
    """What must be fixed for the gain of a finding."""
    return "it" if len(finding.by_rank) < 2 else "both" if len(finding.by_rank) == 2 else f"all {len(finding.by_rank)}"


def _one_alone(finding: Finding) -> str:
    """What fixing one of the ranks of a finding gains: less than a part of it where the others hide it."""
    if len(finding.by_rank) < 2:
        return ""
    rank, most = max(finding.by_rank.items(), key=lambda one: one[1].ms)
    if most.ms >= finding.gain.ms / len(finding.by_rank):
        return f"; rank {rank} alone {ms(most.ms)}"
    gained = f"no more than {ms(most.ms)}" if most.percent >= NOTHING_TO_GAIN else "next to nothing"
    return f"; one of them alone {gained}, as the others hold the step up too"


def _hidden(finding: Finding, step_ms: float) -> str:
    """What fixing a finding gains that another one hides."""
    assert finding.together is not None
    alone, both = finding.gain, finding.together.gain
    gained = f"only {ms(alone.ms)}" if alone.percent >= NOTHING_TO_GAIN else "next to nothing"
    of = f"{ms(both.ms)} of each {ms(step_ms)} step ({percent(both.percent)})"
    return f"fixing it alone saves {gained}, as {finding.together.code} holds the step up too; fixing both saves {of}"


def _of_memory(analysis: Analysis) -> str:
    """Of a run of which only its devices' memory is known."""
    held = {name: sum(one.total(name) for one in analysis.memory) for name in ("reserved", *STATE_COLUMNS)}
    parts = [
        f"{size(held['allocated'])} in use",
        *([f"{size(held['pending'])} freed that another stream may still use"] if held["pending"] else []),
        f"{size(held['split'])} free between blocks in use",
        f"{size(held['releasable'])} free in whole segments",
    ]
    text = f"{size(held['reserved'])} of device memory reserved when the snapshot was taken: "
    text += f"{', '.join(parts[:-1])} and {parts[-1]}"
    reason = _why_not(analysis, with_("of_snapshot"))
    judged = "fragmentation costs next to nothing in its history" if reason is None else f"not judged: {clean(reason)}"
    return f"{text}; {judged}. How fast the job is, a snapshot does not tell"


def _of_devices(analysis: Analysis) -> str:
    """What the devices did in the traced time, mean over ranks."""
    assert analysis.device is not None
    ranks = list(analysis.device.ranks.values())
    whole = sum(one.kernel_time_ns for one in ranks)
    compute, idle = (
        100 * sum(ns) / whole for ns in zip(*((one.compute_ns, one.idle_ns) for one in ranks), strict=True)
    )
    rest = max(100 - compute - idle, 0.0)
    does = f"the device computes {percent(compute)} of the time, only communicates or copies {percent(rest)}"
    return f"{does} and does nothing {percent(idle)}"


def _lost(analysis: Analysis) -> dict[str, float]:
    """Part, or kind of irregular step, -> its share of the step, largest first."""
    step = analysis.step_ms
    assert step is not None
    lost = {part: analysis.budget.get(part, 0.0) / step.mean for part in BUDGET_PARTS if part not in TRAINING}
    whole_ms = (analysis.whole_step_ms or step.mean) * analysis.steps_looked_at
    for kind, excess_ms in analysis.irregular.groupby("kind")["excess_ms"].sum().items():
        if kind in COSTS:
            lost[f"irregular {kind}"] = float(excess_ms) / whole_ms
    return dict(sorted(lost.items(), key=lambda item: -item[1]))


def _explained(analysis: Analysis, part: str) -> bool:
    """Whether every lever for this part was replayed, is listed among the findings, and gains next to nothing: at best
    no more than may be lost unexplained."""
    if not any(part in rule.exhausts for rule in all_rules()) or _unjudged(analysis, part):
        return False
    about = [finding for finding in analysis.findings if finding.code in explaining(part)]
    step = analysis.step_ms
    at_best = LARGE * step.mean if step is not None else math.inf
    return bool(about) and all(one.gain.percent < NOTHING_TO_GAIN and one.gain.high <= at_best for one in about)


def _why_not(analysis: Analysis, rules: Iterable[Rule]) -> str | None:
    """Why the first of these rules that was not judged was not."""
    return next((analysis.not_judged[rule.code] for rule in rules if rule.code in analysis.not_judged), None)


def _unjudged(analysis: Analysis, part: str) -> str | None:
    """Why a rule that could explain this part was not judged."""
    return next((analysis.not_judged[code] for code in explaining(part) if code in analysis.not_judged), None)


def _words(part: str) -> str:
    return LOST[part] if part in LOST else COSTS[part.removeprefix("irregular ")]


def _more(analysis: Analysis, part: str, crowded: str, outside: str) -> str:
    """Where such time lies, or what would tell."""
    if part == "other":
        place = _where_other(analysis)
        if place and outside:
            return f", mostly {place}, in {clean(outside)}"
        return f", mostly {place}: put dsprof.span around what runs there, and `dsprof run` names it" if place else ""
    reason = _unjudged(analysis, part)
    if reason is not None:
        return f" (not judged: {clean(reason)})"
    about = [finding for finding in analysis.findings if finding.code in explaining(part)]
    if part == "peer_wait" and not about:
        return f", none of which is late on the whole{crowded and f' ({crowded})'}"
    unsure = [finding for finding in about if finding.weight.ms > 0]
    if unsure:
        most = max(unsure, key=lambda finding: finding.weight.ms)
        return f" (how much of it could be gained is not certain: {_what_tells(most)})"
    return f" ({clean(about[0].title)})" if about else ""


def _what_tells(finding: Finding) -> str:
    """What to do to know how much a finding gains."""
    knobs = next((fix.knobs for fix in finding.fixes if fix.knobs), ())
    if knobs:
        return f"`dsprof fix {' '.join(f'--set {key}={shown(value)}' for key, value in knobs)} --verify` measures it"
    if finding.unknown:
        return f"{finding.unknown}; make the change and run it: `dsprof compare` of the two runs tells"
    return "run more steps with `dsprof run`"


def _where_other(analysis: Analysis) -> str | None:
    """Between which phases the rank with most of it spends what is outside of them."""
    other = analysis.budget_by_rank["other"]
    rank = int(other.idxmax())
    rows = analysis.trace.read(rank, ("kind", "name", "lane", "step", "start_ns", "dur_ns"))
    numbers = analysis.steps.loc[(analysis.steps["rank"] == rank) & analysis.steps["ordinary"], "step"]
    known = [name for name, part in PHASE_PART.items() if part != "other"]
    phases = rows[
        (rows["kind"] == "phase") & (rows["lane"] == "main") & rows["dur_ns"].notna() & rows["step"].isin(numbers)
        & rows["name"].isin(known)
    ].sort_values("start_ns")  # fmt: skip
    if len(phases) < 2:
        return None
    start = phases["start_ns"].to_numpy(np.int64)
    reached = np.maximum.accumulate(start + phases["dur_ns"].to_numpy(np.int64))
    waits = analysis.packed_waits.of_ranks(rank)
    gap = start[1:] - reached[:-1]
    step, names = phases["step"].to_numpy(np.int64), phases["name"].astype(str).to_numpy(object)
    waited_until = np.cumsum((waits["end_ns"] - waits["start_ns"]).to_numpy(np.int64), dtype=np.int64)
    order = np.concatenate([[0], waited_until])
    ends = waits["end_ns"].to_numpy(np.int64)
    gap = gap - (order[np.searchsorted(ends, start[1:], "right")] - order[np.searchsorted(ends, reached[:-1], "right")])
    close = (np.diff(step) <= 1) & (gap > 0)
    table = pd.DataFrame({"place": [f"between {a} and {b}" for a, b in pairwise(names)], "ms": gap / 1e6})
    total = table[close].groupby("place")["ms"].sum()
    return str(total.idxmax()) if len(total) else None


def _unfinished(analysis: Analysis) -> str:
    """What ranks had begun and not ended, for a job that somebody stopped: perhaps because it hung."""
    last = concat_rows([_last_open(analysis.trace.read(rank, OPEN)) for rank in analysis.ranks_captured])
    if last.empty:
        return "no collective was under way"
    last = last.sort_values("start_ns")
    shown = zip(last["rank"].head(4), last["name"].head(4), last["seq"].head(4), strict=True)
    doing = [f"rank {rank} was in {clean(str(name))} number {seq}" for rank, name, seq in shown]
    idle = sorted(set(analysis.ranks_captured) - set(last["rank"]))
    if idle:
        doing.append(f"{ranks(tuple(idle))} was in no collective")
    return "; ".join(doing)


OPEN: Final = ("rank", "kind", "name", "start_ns", "ended", "seq")


def _last_open(rows: pd.DataFrame) -> pd.DataFrame:
    """The communication that a rank issued last of those that did not end; none where there is none."""
    under_way = (rows["kind"] == "comm") & ~rows["ended"].fillna(True).astype(bool)
    return rows[under_way].sort_values("start_ns").tail(1)
