"""Is the diagnosis right? 120 real jobs with a fault and 100 without, drawn from a seed (`diagnosis_cases.py`).

    python benchmarks/diagnosis.py                # two hours; writes benchmarks/results/diagnosis.json
    python benchmarks/diagnosis.py --minutes 10   # ends after the case that is under way then

Each case is real processes whose layers sleep, of 10 to 20 s. Of one with a fault it is asked whether the first finding
is of its code, and names its place (ranks, or stage); whether one of its first two fixes is the right one; and of two
faults, whether both codes are among the first three. Of one without a fault: whether anything stands above `info`
(`false_alarm`), and whether it is called healthy.

Beside it `slowest_rank`, the rule that a simple tool has: the rank that computes longest is to blame, where it is 5 %
longer than the median one. `right`: it names a rank where the fault is of a rank or a stage, and this one, whatever is
wrong with it (of all faults, and of those only that are of a rank or a stage); without a fault, it names none. And
`traceml`: what TraceML says of the same cases, each run under it alone (`beside_traceml.py`).

Written after each case; a run that was broken off goes on where it was. On a machine that others use, put `chrt -r 1`
in front of it: ranks that wait for a core lose time, truly. `load_before` is how many threads wanted one.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

HERE: Final = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))

from diagnosis_cases import FAULTY, HEALTHY, Case, cases, keep, share  # noqa: E402
from verdict_truth import Found, Outcome  # noqa: E402

from dsprof.analyzer.study import study  # noqa: E402
from dsprof.trace import load  # noqa: E402

SEED: Final = 33
FIRST_FIXES, FIRST_FINDINGS = 2, 3
SLOWER: Final = 1.05
BESIDE: Final = HERE / "results" / "beside_traceml.json"


def command(case: Case) -> str:
    job = case.job
    ranks = "" if job.ranks is None else f"--nproc-per-node {job.ranks} "
    return f"{ranks}{job.script} --steps {job.steps} {' '.join(job.args)}"


def run(case: Case) -> dict[str, Any]:
    """What is said of a case, and whether that is right."""
    job = case.job
    told = {"job": command(case), "framework": case.framework, "true": job.first, "second": case.second}
    with tempfile.TemporaryDirectory() as folder:
        outcome = job.run(Path(folder))
        if outcome.finished.status != 0:
            return {**told, "failed": outcome.finished.stderr[-2000:]}
        found = outcome.found
        above = [item for item in found["findings"] if item["severity"] != "info"]
        said = {
            "step_ms": round(outcome.step_ms, 2), "verdict": found["verdict"]["status"],
            "headline": found["verdict"]["headline"], "not_judged": found["not_judged"].get(job.first or ""),
            "said": [item["code"] for item in above], "first_fixes": first_fixes(above),
        }  # fmt: skip
        judged = of_healthy(found, above) if job.first is None else of_faulty(case, above)
        return {**told, **said, **judged, "slowest_rank": by_slowest_rank(case, outcome)}


def first_fixes(above: list[Found]) -> list[str]:
    return [fix["title"] for fix in (above[0]["fixes"] if above else [])][:FIRST_FIXES]


def of_healthy(found: Found, above: list[Found]) -> dict[str, Any]:
    return {"false_alarm": bool(above), "healthy": found["verdict"]["status"] == "healthy"}


def of_faulty(case: Case, above: list[Found]) -> dict[str, Any]:
    """code_and_place, fix, and of two faults, both."""
    first = above[0] if above else None
    right = first is not None and first["code"] == case.job.first
    placed = right and all(first["where"].get(key) == value for key, value in case.job.where.items())
    fixes = " ".join(first_fixes(above)).lower()
    both = {case.job.first, case.second} <= {item["code"] for item in above[:FIRST_FINDINGS]}
    judged = {"code_and_place": placed, "fix": right and any(word in fixes for word in case.fixes)}
    return judged if case.second is None else {**judged, "both": both}


def by_slowest_rank(case: Case, outcome: Outcome) -> dict[str, Any]:
    """What a rule says that looks for the rank whose own work of a step takes longest."""
    measured = study(load(outcome.finished.folder))
    own = sum(measured.work(part).mean(axis=1) for part in ("compute", "data", "optimizer", "other"))
    usual = float(np.median(own)) if len(own) > 2 else float(np.min(own))
    named = int(measured.ranks[int(np.argmax(own))]) if len(own) > 1 and own.max() > SLOWER * usual else None
    if case.job.first is None:
        return {"names": named, "right": named is None}
    return {"names": named, "right": named is not None and [named] == case.place}


JUDGED: Final = ("verdict", "code_and_place", "fix", "both", "false_alarm", "healthy")


def changed_since(earlier: Mapping[str, Any], now: Mapping[str, Any], note: str) -> dict[str, Any]:
    """Of a case that was run again: what was first said of it (`before`), if that was judged otherwise, and what was
    mended since."""
    first = earlier.get("before") or {name: earlier[name] for name in JUDGED if name in earlier}
    if first == {name: now[name] for name in JUDGED if name in now}:
        return {}
    return {"before": first, "mended": note or earlier.get("mended", "")}


# --- all of them ------------------------------------------------------------------------------------


def summary(done: Mapping[str, dict[str, Any]], drawn: Mapping[str, Case]) -> dict[str, Any]:
    """Of each case as it was run last; and beside it what was right when each was first run."""
    first = counted({name: {**case, **case.get("before", {})} for name, case in done.items()}, drawn)
    return {**counted(done, drawn), "when_first_run": {name: of for name, of in first.items() if isinstance(of, str)}}


def counted(done: Mapping[str, dict[str, Any]], drawn: Mapping[str, Case]) -> dict[str, Any]:
    placed = [case for name, case in done.items() if drawn[name].job.where and "failed" not in case]
    faulty = [case for case in done.values() if case["true"] is not None and "failed" not in case]
    healthy = [case for case in done.values() if case["true"] is None and "failed" not in case]
    double = [case for case in faulty if "both" in case]
    return {
        "cases": f"{len(faulty)} of {FAULTY} with a fault, {len(healthy)} of {HEALTHY} without",
        "failed": [name for name, case in done.items() if "failed" in case],
        "first_code_and_place": share(case["code_and_place"] for case in faulty),
        "right_fix_among_first_two": share(case["fix"] for case in faulty),
        "two_faults_among_first_three": share(case["both"] for case in double),
        "false_alarms": share(case["false_alarm"] for case in healthy),
        "called_healthy": share(case["healthy"] for case in healthy),
        "slowest_rank": {
            "right_of_faulty": share(case["slowest_rank"]["right"] for case in faulty),
            "right_of_those_with_a_place": share(case["slowest_rank"]["right"] for case in placed),
            "false_alarms": share(not case["slowest_rank"]["right"] for case in healthy),
        },
        "traceml": by_traceml(),
    }


def by_traceml() -> dict[str, Any] | str:
    """What was measured of TraceML, if it was."""
    if not BESIDE.exists():
        return "not run"
    beside = json.loads(BESIDE.read_text())
    return {"seed": beside["seed"], **beside["summary"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no case after so many")
    parser.add_argument("--only", metavar="TEXT", default="", help="cases whose name or command holds this, again")
    parser.add_argument("--note", default="", help="with --only: what was mended since, for the result")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "diagnosis.json")
    args = parser.parse_args()
    kept: dict[str, Any] = json.loads(args.output.read_text()) if args.output.exists() else {}
    done: dict[str, Any] = kept["each"] if kept.get("seed") == args.seed else {}
    end = time.monotonic() + 60 * args.minutes
    drawn = cases(args.seed)

    def write() -> None:
        what = "what `dsprof run` says of jobs with a known fault, and of jobs without one, drawn from a seed"
        keep(args.output, what, args.seed, summary(done, drawn), done, drawn)

    for name, case in drawn.items():
        if args.only not in f"{name} {command(case)}" or (not args.only and name in done) or time.monotonic() > end:
            continue
        load_before = round(os.getloadavg()[0], 1)
        earlier = done.get(name)
        done[name] = {**run(case), "load_before": load_before}
        if earlier is not None:
            done[name] |= changed_since(earlier, done[name], args.note)
        told = {
            key: value for key, value in done[name].items() if key not in ("job", "first_fixes", "step_ms", "headline")
        }
        print(f"{name}  {json.dumps(told)}", flush=True)
        write()
    write()
    print(json.dumps(summary(done, drawn), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
