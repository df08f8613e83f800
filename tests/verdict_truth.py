"""A job whose truth is known, run under `dsprof run`, and all that is wrong with what is said about it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from jobs import Finished, profile

JOBS: Final = Path(__file__).parent / "verdict_jobs"
OTHER: Final = 0.05
"""Of the step: what may be left unexplained."""

Found = dict[str, Any]
Truth = list[dict[str, Any]]
"""What the ranks wrote themselves (verdict_jobs/common.py: Log), by rank."""


@dataclass(frozen=True)
class Outcome:
    """A job that ended, and what it says itself about where its time went."""

    finished: Finished
    truth: Truth

    @property
    def found(self) -> Found:
        return self.finished.findings

    @property
    def first(self) -> Found:
        findings: list[Found] = self.finished.told
        return findings[0] if findings else {}

    @property
    def wants_cores(self) -> bool:
        """Whether the verdict is that its ranks wait for cores, and the kernel counts that they do: so a busy machine
        keeps a job from being healthy."""
        verdict = self.found["verdict"]
        return verdict["status"] != "healthy" and "for a core" in verdict["headline"] and self.finished.starved

    @property
    def step_ms(self) -> float:
        step: float = self.found["run"]["step_ms"]["mean"]
        return step

    def spent_ms(self, rank: int, kind: str) -> float:
        """What `rank` slept for `kind` in a step, mean over the steps after the first."""
        steps = self.truth[rank]["spent_s"][1:]
        return 1e3 * sum(step.get(kind, 0.0) for step in steps) / len(steps)

    def summary(self) -> dict[str, Any]:
        """What a result file keeps of it."""
        found = self.found
        return {
            "verdict": found["verdict"],
            "above_info": [
                {
                    "code": item["code"],
                    "severity": item["severity"],
                    "where": item["where"],
                    "gain_percent": round(item["gain"]["percent"], 1),
                }
                for item in found["findings"]
                if item["severity"] != "info"
            ],
            "step_ms": found["run"]["step_ms"] and round(found["run"]["step_ms"]["mean"], 2),
            "budget_ms": {part: round(value, 2) for part, value in found["budget"].items() if value},
            "time_s": {kind: round(value, 2) for kind, value in found["time"].items() if value},
        }


Check = Callable[[Outcome], Iterator[str]]
"""Says what is wrong, if anything is."""


@dataclass(frozen=True)
class Job:
    """A script with its arguments, and what is true of it.

    first: the code of the first finding, which stands above `info`; None: nothing does.
    also:  codes that are true of the job as well.
    ranks: None where the script is started by itself, without ranks.
    own_ranks: that a script which is started by itself makes.
    """

    script: str
    args: tuple[str, ...]
    ranks: int | None
    steps: int
    first: str | None
    where: dict[str, Any] = field(default_factory=dict)
    also: tuple[str, ...] = ()
    checks: tuple[Check, ...] = ()
    explained: bool = True
    """Nearly nothing of a step is unexplained."""
    own_ranks: int = 1

    def run(self, folder: Path) -> Outcome:
        args = ("--steps", str(self.steps), *self.args, "--results", str(folder / "results"))
        finished = profile(folder, JOBS / self.script, *args, ranks=self.ranks, flags=("--no-report",))
        files = sorted((folder / "results").glob("rank*.json"))
        return Outcome(finished, [json.loads(file.read_text()) for file in files])

    def run_undisturbed(self, folder: Path) -> Outcome:
        """`run`; once more if something is wrong with what was said. A machine that stops a rank for a third of a
        second makes a finding that is true, and a budget that no truth has: twice in a row that is ours. What fails is
        not run again."""
        outcome = self.run(folder)
        if outcome.finished.status == 0 and (said := self.wrong(outcome)):
            print(f"run once more, since the first time: {said}")
            again = folder / "again"
            again.mkdir()
            return self.run(again)
        return outcome

    def wrong(self, outcome: Outcome) -> list[str]:
        """All that is wrong with what was said about this job."""
        if outcome.finished.status != 0:
            return [f"exit status {outcome.finished.status}:\n{outcome.finished.stderr}"]
        said = [*_sound(outcome, self), *_findings(outcome, self)]
        for check in self.checks:
            said += check(outcome)
        return said


def _sound(outcome: Outcome, job: Job) -> Iterator[str]:
    """What holds of every run: all was captured, and the parts sum to the whole."""
    found = outcome.found
    captured, ranks = found["run"]["ranks"], job.ranks or job.own_ranks
    if captured != {"expected": ranks, "captured": ranks}:
        yield f"ranks: {captured}"
    if abs(found["run"]["steps"] - job.steps) > 1:
        yield f"{found['run']['steps']} steps, not {job.steps}"
    if found["capture"]["dropped"] or found["capture"]["warnings"]:
        yield f"capture: {found['capture']}"
    for code, reason in found["not_judged"].items():
        if "the rule failed" in reason:
            yield f"{code}: {reason}"
    if found["run"]["step_ms"] is None:
        yield "no step"
        return
    step_ms, budget, time = outcome.step_ms, found["budget"], found["time"]
    if not math.isclose(sum(budget.values()), step_ms, rel_tol=1e-6):
        yield f"the budget sums to {sum(budget.values())} ms, a step takes {step_ms}"
    if job.explained and budget["other"] > OTHER * step_ms:
        yield f"{budget['other']:.1f} of {step_ms:.1f} ms is other"
    run = json.loads((outcome.finished.folder.path / "run.json").read_text())
    if run.get("started_ns") is None or run.get("ended_ns") is None:
        yield "run.json: when the job was started and ended is not in it"
        return
    wall_s = (run["ended_ns"] - run["started_ns"]) / 1e9
    if not math.isclose(sum(time.values()), wall_s, rel_tol=0.01):
        yield f"the kinds of time sum to {sum(time.values()):.2f} s, the job took {wall_s:.2f} s: {time}"


def _findings(outcome: Outcome, job: Job) -> Iterator[str]:
    found = outcome.found
    above = [item for item in outcome.finished.told if item["severity"] != "info"]
    told = [(item["code"], item["where"], f"{item['gain']['percent']:.1f} %") for item in above]
    allowed = {job.first, *job.also}
    if [item["code"] for item in above if item["code"] not in allowed]:
        yield f"false above info: {told}"
    if job.first is None:
        return
    if not above or above[0]["code"] != job.first:
        infos = [(item["code"], item["gain"]) for item in found["findings"] if item["severity"] == "info"]
        yield f"{job.first} is not first: {told}, info: {infos}, not judged: {found['not_judged']}"
        return
    for key, value in job.where.items():
        if above[0]["where"].get(key) != value:
            yield f"{job.first}: {key} is {above[0]['where'].get(key)}, not {value}"
    if found["verdict"]["status"] != "bottleneck":
        yield f"verdict {found['verdict']}"


# --- what more may be known of a job -------------------------------------------------------------


def gains(code: str, ms: Callable[[Outcome], float], within: float) -> Check:
    """The gain predicted for `code` is that of the truth, and its interval holds it, give or take as much."""

    def check(outcome: Outcome) -> Iterator[str]:
        true_ms = ms(outcome)
        for item in outcome.found["findings"]:
            gain = item["gain"]
            if item["code"] == code and not abs(gain["ms"] - true_ms) <= within * true_ms:
                yield f"{code}: gains {gain['ms']:.1f} ms [{gain['low']:.1f}, {gain['high']:.1f}], true {true_ms:.1f}"

    return check


def gains_in_all(ms: Callable[[Outcome], float], least: float, most: float) -> Check:
    """The gain of the first finding is at least and at most so many times what is true. Where the kernel counts that
    the ranks lack cores, half of the least: what they wait for those hides some of it, and is in what they slept."""

    def check(outcome: Outcome) -> Iterator[str]:
        true_ms, gain_ms = ms(outcome), outcome.first.get("gain", {}).get("ms", 0.0)
        if not (least / 2 if outcome.finished.starved else least) * true_ms <= gain_ms <= most * true_ms:
            yield f"{outcome.first.get('code')} gains {gain_ms:.1f} ms, true is about {true_ms:.1f}"

    return check


def is_present(code: str, **where: Any) -> Check:
    def check(outcome: Outcome) -> Iterator[str]:
        places = [item["where"] for item in outcome.found["findings"] if item["code"] == code]
        if not any(all(place.get(key) == value for key, value in where.items()) for place in places):
            yield f"no {code} at {where}: {places}"

    return check


def first_fix_says(text: str) -> Check:
    def check(outcome: Outcome) -> Iterator[str]:
        fixes = outcome.first.get("fixes", [])
        if not fixes or text not in fixes[0]["title"] + json.dumps(fixes[0]["patch"]):
            yield f"the first fix does not say {text}: {fixes}"

    return check


def says(text: str) -> Check:
    """The first finding, all of it, holds `text`."""

    def check(outcome: Outcome) -> Iterator[str]:
        if text not in json.dumps(outcome.first):
            yield f"{text!r} is not in {outcome.first}"

    return check


def spends(kind: str, s: float) -> Check:
    """At least so many seconds of the run, all ranks together, are of this kind."""

    def check(outcome: Outcome) -> Iterator[str]:
        found_s = outcome.found["time"].get(kind, 0.0) * len(outcome.truth)
        if found_s < 0.9 * s:
            yield f"{found_s:.2f} s of all ranks is {kind}, true is {s:.2f} s or more"

    return check


def share(part: str, low: float, high: float = 1.0) -> Check:
    """Of the step."""

    def check(outcome: Outcome) -> Iterator[str]:
        found = outcome.found["budget"].get(part, 0.0) / outcome.step_ms
        if not low <= found <= high:
            yield f"{100 * found:.0f} % of the step is {part}, true is from {100 * low:.0f} to {100 * high:.0f} %"

    return check


def step_is(*words: str) -> Check:
    def check(outcome: Outcome) -> Iterator[str]:
        told = outcome.found["run"]["step_is"]
        if not told or not all(word in told for word in words):
            yield f"step_is: {told!r}"

    return check


def verdict_is(status: str, *words: str) -> Check:
    def check(outcome: Outcome) -> Iterator[str]:
        verdict = outcome.found["verdict"]
        if outcome.wants_cores and status == "healthy":
            return
        if verdict["status"] != status or not all(word in verdict["headline"] for word in words):
            yield f"verdict: {verdict}"

    return check


def line_of(script: str, code: str) -> str:
    """`script.py:12`, the one line of it that holds `code`."""
    lines = (JOBS / script).read_text().splitlines()
    (number,) = [number for number, line in enumerate(lines, 1) if code in line]
    return f"{script}:{number}"
