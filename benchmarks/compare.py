"""How often `dsprof compare` cries wolf, and whether it finds what is there; asv's statistics beside it.

    python benchmarks/compare.py --runs          # a session: a quarter of each job's runs; four of them, an hour apart
    python benchmarks/compare.py --planted 10    # ten more comparisons of a job with one that is 3 % slower
    python benchmarks/compare.py                 # says what the result file holds

Real jobs on a device that sleeps (tests/sleeping_device), so that what they do takes equally long however often it is
done. Three of them are run 25 times each, at four different times, so that what differs between runs and between hours
is in them: each of the 300 pairs of different runs of a job is compared, and whatever is called worse or better is an
alarm. Planted are 3 %, by sleep: ten pairs of runs of 50 steps that take turns, each comparison of runs of its own.

Beside each stands what asv says of the same series (`asv compare`: asv/statistics.py, is_different, at its p of 0.002):
the steps of the two runs, or of ten each, by Mann and Whitney's test. What was run is kept after each run, and a call
that was broken off goes on where it was.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from scipy.stats import mannwhitneyu

HERE: Final = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))

from sleeping_jobs import SleepingRanks, start  # noqa: E402

from dsprof.analyzer import analyze  # noqa: E402
from dsprof.atomic import write_atomically  # noqa: E402
from dsprof.compare import MeasuredRun, compare  # noqa: E402

RESULTS: Final = HERE / "results" / "compare.json"
RUNS: Final = 25
TIMES: Final = 4
APART_S: Final = 3600.0
"""From one session to the next."""
PAIRS: Final = 10
SLOWER: Final = 1.03
ASV_P: Final = 0.002
BUSY: Final = 5.0
"""So many threads wanted a core: a device that sleeps does not sleep as long as it should then."""
STEPS: Final = 66
"""Of which 50 are ordinary."""
FORWARD_MS: Final = 3.0
BACKWARD_MS: Final = 6.0
"""Of a block of four."""
JOBS: Final[dict[str, tuple[int, tuple[str, ...]]]] = {
    "ddp": (2, ("--latency-ms=1",)),
    "fsdp": (2, ("--shard", "--latency-ms=0.5")),
    "loader": (1, ("--load-ms=45", "--item-every=1")),
}
"""Ranks, and arguments of tests/sleeping_device/jobs/faults.py."""


def ran(ranks: SleepingRanks, job: str, slower: float = 1.0) -> MeasuredRun:
    """One real run of a job whose device takes so many times as long."""
    count, arguments = JOBS[job]
    lengths = (f"--forward-ms={FORWARD_MS * slower}", f"--backward-ms={BACKWARD_MS * slower}", f"--steps={STEPS}")
    started = datetime.datetime.now(datetime.UTC).isoformat()
    folder = Path(tempfile.mkdtemp(prefix="dsprof-compare-"))
    try:
        done = ranks.run(folder, "faults.py", *lengths, *arguments, ranks=count, without="nvml")
        return replace(MeasuredRun.of(analyze(done.trace), job), name=f"{job} {started}", started=started)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def kept(run: MeasuredRun) -> dict[str, Any]:
    """What of a run is written down: enough to compare it again."""
    return {"started": run.started, "waited": run.waited, "steps_ms": [round(step, 3) for step in run.steps_ms]}


def again(job: str, told: dict[str, Any]) -> MeasuredRun:
    """The same, without what it says of parts, ranks and findings, which the decision does not rest on."""
    return MeasuredRun(
        name=f"{job} {told['started']}", started=told["started"], steps_ms=tuple(told["steps_ms"]), parts_ms={},
        ranks_ms={}, collectives={}, modules_ms={}, findings={}, waited=told["waited"],
    )  # fmt: skip


def asv_says(before: list[float], after: list[float]) -> bool:
    """Whether asv would call the two series different."""
    return bool(mannwhitneyu(before, after, alternative="two-sided").pvalue < ASV_P)


def alarms(job: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Of all pairs of different runs of a job, by how many each cries wolf."""
    pairs = list(itertools.combinations(runs, 2))
    outcomes = [compare([again(job, a)], [again(job, b)]).decision.outcome for a, b in pairs]
    return {
        "runs": len(runs), "pairs": len(pairs), "alarms": sum(one in ("worse", "better") for one in outcomes),
        "asv_alarms": sum(asv_says(a["steps_ms"], b["steps_ms"]) for a, b in pairs),
        "mean_ms": [round(sum(run["steps_ms"]) / len(run["steps_ms"]), 3) for run in runs],
    }  # fmt: skip


def planted(ranks: SleepingRanks) -> dict[str, Any]:
    """Ten runs as they are and ten that are 3 % slower, in turns."""
    before, after = [], []
    for number in range(PAIRS):
        sides = [(before, 1.0), (after, SLOWER)]
        for side, slower in sides if number % 2 == 0 else reversed(sides):
            side.append(ran(ranks, "ddp", slower))
    decision = compare(before, after).decision
    steps = [[step for run in side for step in run.steps_ms] for side in (before, after)]
    return {
        "at": before[0].started, "outcome": decision.outcome, "percent": round(100 * decision.change, 2),
        "low": round(100 * decision.low, 2), "high": round(100 * decision.high, 2), "asv": asv_says(*steps),
        "load": round(os.getloadavg()[0], 1),
    }  # fmt: skip


def summary(runs: dict[str, list[dict[str, Any]]], comparisons: list[dict[str, Any]]) -> dict[str, Any]:
    quiet = [one for one in comparisons if one["load"] < BUSY]
    return {
        "without a difference": {job: alarms(job, of) for job, of in runs.items() if len(of) > 1},
        "3 % planted": {
            "comparisons": len(comparisons), "found": sum(one["outcome"] == "worse" for one in comparisons),
            "asv_found": sum(one["asv"] for one in comparisons),
            "on a machine with little else to do": {
                "comparisons": len(quiet), "found": sum(one["outcome"] == "worse" for one in quiet),
            },
        },
    }  # fmt: skip


def may_begin(sessions: list[str]) -> bool:
    """Whether the last session is long enough ago for another one."""
    if not sessions:
        return True
    last = datetime.datetime.fromisoformat(sessions[-1])
    return (datetime.datetime.now(datetime.UTC) - last).total_seconds() >= APART_S


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", action="store_true", help="make a session's runs, or what is left of it")
    parser.add_argument("--planted", type=int, default=0, metavar="N", help="make N comparisons more")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "dsprof-sleeping-device")
    options = parser.parse_args()
    told: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    runs: dict[str, list[dict[str, Any]]] = told.get("runs", {job: [] for job in JOBS})
    sessions: list[str] = told.get("sessions", [])
    comparisons: list[dict[str, Any]] = told.get("comparisons", [])

    def keep() -> None:
        found = {
            "torch": torch.__version__, "cpus": os.cpu_count(), "summary": summary(runs, comparisons),
            "sessions": sessions, "comparisons": comparisons, "runs": runs,
        }  # fmt: skip
        write_atomically(RESULTS, json.dumps(found).replace('"started"', '\n"started"').encode() + b"\n")

    options.cache.mkdir(parents=True, exist_ok=True)
    if options.runs or options.planted:
        ranks = start(options.cache)
        if options.runs:
            least = min(len(of) for of in runs.values())
            if least >= len(sessions) * RUNS // TIMES:
                if not may_begin(sessions):
                    raise SystemExit(f"the last session began at {sessions[-1]}: the next begins an hour later")
                sessions.append(datetime.datetime.now(datetime.UTC).isoformat())
            for _ in range(RUNS):
                for job, of in runs.items():
                    if len(of) < min(len(sessions) * RUNS // TIMES, RUNS):
                        of.append(kept(ran(ranks, job)))
                        keep()
        for _ in range(options.planted):
            comparisons.append(planted(ranks))
            keep()
        ranks.close()
    print(json.dumps(summary(runs, comparisons), indent=1))


if __name__ == "__main__":
    main()
