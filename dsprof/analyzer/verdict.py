"""The answer to "what holds this job back?", in one sentence."""

from __future__ import annotations

import math
import signal
from typing import Final

from .analysis import Analysis, Verdict
from .text import clean, count, ms, percent, ranks

INTERRUPTED: Final = (128 + signal.SIGINT, 128 + signal.SIGTERM)


def answer(analysis: Analysis) -> Verdict:
    """The verdict on `analysis`, whose own `verdict` is not looked at."""
    step = analysis.step_ms
    for finding in analysis.findings:
        if finding.severity == "info" and not finding.code.startswith("run."):
            continue
        title, gain = clean(finding.title), finding.gain
        if finding.code.startswith("run."):
            return Verdict("failed", title)
        if step is None or gain.ms <= 0:
            return Verdict("bottleneck", title)
        saved = f"fixing it saves {ms(gain.ms)} of each {ms(step.mean)} step ({percent(gain.percent)})"
        return Verdict("bottleneck", f"{title}; {saved}")
    if step is None:
        return Verdict("failed", "no complete step was captured, so nothing can be said about its speed")
    if not analysis.passed and not analysis.findings:
        return Verdict("inconclusive", f"no rule could be judged on this capture; a step takes {ms(step.mean)}")
    if not math.isfinite(analysis.noise_ms):
        return Verdict("inconclusive", f"too few steps to tell a gain from noise; a step takes {ms(step.mean)}")
    if analysis.run.status in INTERRUPTED:
        last = analysis.step_count - 1
        return Verdict("failed", f"the job was interrupted after step {last}; {_unfinished(analysis)}")
    found = f"nothing found that is sure to shorten the {ms(step.mean)} step"
    lost = {
        "waiting for late ranks": analysis.budget.get("peer_wait", 0.0),
        "waiting for other stages of the pipeline": analysis.budget.get("bubble", 0.0),
        "outside the phases of the loop": analysis.budget.get("other", 0.0),
    }
    large = [f"{percent(100 * part / step.mean)} is {what}" for what, part in lost.items() if part > 0.1 * step.mean]
    if large:
        return Verdict("inconclusive", f"{found}, but {' and '.join(large)}, which no rule here explains")
    if len(analysis.ranks_captured) < analysis.ranks_expected:
        captured = f"{len(analysis.ranks_captured)} of {count(analysis.ranks_expected, 'rank')}"
        return Verdict("inconclusive", f"{found}, in {captured}")
    return Verdict("healthy", f"healthy: {found}")


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
