"""In which line is the time lost? 20 jobs with one known line each, and the line that is told first.

    python benchmarks/lines.py     # half an hour; writes benchmarks/results/lines.json after each job, and resumes

The jobs are those of `line_job.py`: a branch of one rank, a lock, a pipe whose reader is slow, a hook, a compiled
function that calls back into Python, a transform of the loader, an average of the weights outside the phases. How much
is lost, and on which rank, is drawn from a seed. `right`: the first line of the script that the verdict, or the first
finding, names is within two of the true one. The layers sleep, but ranks that wait long for a core are late by that,
too: `load_before` is how many threads wanted one.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import torch

HERE: Final = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))

from jobs import profile  # noqa: E402
from line_job import KINDS, OF_ONE_RANK, lost_lines  # noqa: E402

from dsprof.atomic import write_atomically  # noqa: E402

SEED: Final = 33
JOBS: Final = 20
NEAR: Final = 2
SCRIPT: Final = HERE / "line_job.py"
NAMED: Final = re.compile(rf"{SCRIPT.name}:(\d+)")


def drawn(number: int) -> tuple[str, float, int]:
    """Of a job: its kind, how many ms a step are lost, and on which rank where it is one."""
    draw = random.Random(f"{SEED} {number}")
    return KINDS[number % len(KINDS)], round(draw.uniform(15, 60), 1), draw.randrange(2)


def run(number: int) -> dict[str, Any]:
    """What is said of a job, and whether the line is right."""
    kind, lost_ms, late = drawn(number)
    words = ("--kind", kind, "--ms", str(lost_ms), "--late", str(late))
    with tempfile.TemporaryDirectory() as folder:
        try:
            finished = profile(Path(folder), SCRIPT, *words, ranks=2, flags=("--no-report",), fresh=True)
        except subprocess.TimeoutExpired as error:
            return {"kind": kind, "failed": str(error)}
        if finished.status != 0:
            return {"kind": kind, "failed": finished.stderr[-2000:]}
        findings = finished.findings
    above = [item for item in findings["findings"] if item["severity"] != "info"]
    first = above[0] if above else None
    told = " ".join([first["title"] if first else "", json.dumps(first["fixes"]) if first else ""])
    # The headline is that of the first finding, or tells of time that no finding is about.
    named = [int(match) for match in NAMED.findall(f"{told} {findings['verdict']['headline']}")]
    true = lost_lines()[kind]
    return {
        "kind": kind, "lost_ms": lost_ms, "rank": late if kind in OF_ONE_RANK else None,
        "step_ms": round(findings["run"]["step_ms"]["mean"], 1), "first": first and first["code"],
        "title": first and first["title"], "headline": findings["verdict"]["headline"], "true": true,
        "told": named[0] if named else None, "right": bool(named) and abs(named[0] - true) <= NEAR,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--again", action="store_true", help="run the jobs that went wrong again")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "lines.json")
    args = parser.parse_args()
    done: dict[str, Any] = json.loads(args.output.read_text())["jobs"] if args.output.exists() else {}
    for number in range(JOBS):
        name = f"{number} {drawn(number)[0]}"
        if name in done and not (args.again and not done[name].get("right")):
            continue
        load = os.getloadavg()[0]
        done[name] = {**run(number), "load_before": round(load, 1)}
        print(f"{name:14s} {json.dumps({key: done[name].get(key) for key in ('right', 'true', 'told', 'first')})}",
              flush=True)  # fmt: skip
        result = {
            "what": "the line in which `dsprof run` says that time is lost, in jobs of which it is known",
            "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__},
            "seed": SEED,
            "run": len(done),
            "right": sum(bool(job.get("right")) for job in done.values()),
            "jobs": done,
        }
        write_atomically(args.output, json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
