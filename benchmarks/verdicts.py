"""Is the verdict true? Jobs with one known fault each, drawn from a seed, and jobs without one.

    python benchmarks/verdicts.py              # half an hour; writes benchmarks/results/verdicts.json
    python benchmarks/verdicts.py --healthy    # twenty minutes; writes benchmarks/results/healthy.json

On a machine that others use, put `chrt -r 1` in front of it: ranks that wait for a core lose time, truly.
Results are written after each job, and a run that was broken off goes on where it was. Each family of
`tests/verdict_cases.py` is run in its usual form and in three that are drawn: magnitude, place, number of ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))

from healthy_cases import HEALTHY, LEAST_HEALTHY, PLAIN_DDP, missing  # noqa: E402
from verdict_cases import FAMILIES, VARIANTS, Draw, variant  # noqa: E402
from verdict_reference import losses  # noqa: E402
from verdict_truth import Job  # noqa: E402

from dsprof.atomic import write_atomically  # noqa: E402


def faulty(seed: int) -> Iterator[tuple[str, Job]]:
    for family, draw in FAMILIES.items():
        yield f"{family}: usual", draw(Draw())
        for number in range(VARIANTS):
            yield f"{family}: {number + 1}", variant(family, number, seed)


def run(job: Job, compare: bool) -> dict[str, Any]:
    """What was said about `job`, and what is wrong with that. `compare`: its losses with those of it without dsprof."""
    ranks = "" if job.ranks is None else f"--nproc-per-node {job.ranks} "
    line = f"{ranks}{job.script} --steps {job.steps} {' '.join(job.args)}"
    with tempfile.TemporaryDirectory() as folder:
        outcome = job.run(Path(folder))
        wrong = job.wrong(outcome)
        if outcome.finished.status != 0:
            return {"job": line, "wrong": wrong}
        if compare and [rank["losses"] for rank in outcome.truth] != losses(job, Path(folder) / "reference"):
            wrong.append("the losses are not those without dsprof")
        return {"job": line, "true": job.first, "wrong": wrong, **outcome.summary()}


def write(path: Path, result: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(result, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--healthy", action="store_true", help="the jobs without a fault")
    parser.add_argument("--seed", type=int, help="that the jobs are drawn from; default: the clock")
    parser.add_argument("--only", metavar="TEXT", default="", help="jobs whose name holds this")
    parser.add_argument("--again", action="store_true", help="run the jobs that went wrong again")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    path = args.output or HERE / "results" / ("healthy.json" if args.healthy else "verdicts.json")
    result: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if args.seed is not None and args.seed != result.get("seed", args.seed):
        result = {}
    done: dict[str, Any] = result.get("jobs", {})
    seed = result.get("seed", args.seed) or time.time_ns() % 2**31
    jobs = dict(HEALTHY) if args.healthy else dict(faulty(seed))
    print(f"{len(jobs)} jobs" if args.healthy else f"seed {seed}", flush=True)

    for name, job in jobs.items():
        if args.only not in name or (name in done and not (args.again and done[name]["wrong"])):
            continue
        needed = missing(job)
        done[name] = (
            {"skipped": f"{needed} is not installed", "wrong": []} if needed else run(job, compare=not args.healthy)
        )
        verdict = done[name].get("verdict", {}).get("status", "")
        print(f"{name:45s} {verdict:12s} {'; '.join(done[name]['wrong']) or 'as is true'}", flush=True)
        done = {name: done[name] for name in jobs if name in done}
        statuses = [of["verdict"]["status"] for of in done.values() if "verdict" in of]
        result = {
            "what": "what `dsprof run` says about jobs whose truth is known",
            "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__},
            **({} if args.healthy else {"seed": seed}),
            "run": sum("skipped" not in of for of in done.values()),
            "wrong": sum(bool(of["wrong"]) for of in done.values()),
            "healthy": statuses.count("healthy"),
            "jobs": done,
        }
        write(path, result)
    if args.healthy and len(done) == len(jobs):
        plain = [name for name in PLAIN_DDP if done[name]["verdict"]["status"] != "healthy"]
        print(f"{result['healthy']} healthy, of {result['run']}; plain DDP that is not: {plain or 'none'}")
        return int(bool(result["wrong"] or plain or result["healthy"] < LEAST_HEALTHY))
    return int(bool(result.get("wrong")))


if __name__ == "__main__":
    sys.exit(main())
