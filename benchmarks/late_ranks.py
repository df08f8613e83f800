"""Why is a rank late? Jobs in which rank 1 is late for one known reason, and what is said of it.

    python benchmarks/late_ranks.py            # writes benchmarks/results/late_ranks.json after each job, and resumes
    python benchmarks/late_ranks.py --only gil --again  # the jobs of one cause that went wrong, once more

Each cause is planted three times. Needs two cores that nobody else uses: what others take of them is a cause of its
own, which is told as well, and a quota (that of cgroup v1) takes no process of a real-time class, so `chrt -r 1` does
not help. `load_before` is how many threads wanted a core. A quota and a limit of memory need leave to make a cgroup
(v1, /sys/fs/cgroup); where there is none the job is skipped, and so said. `of_thirty`: the ten causes of a late rank,
without a branch (whose cause is not to be known, but whose line is) and without a fault.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

HERE: Final = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))

from jobs import profile  # noqa: E402
from late_rank_job import CAUSES, LATE, LIMIT, QUOTA, own_cgroup  # noqa: E402

from dsprof.atomic import write_atomically  # noqa: E402

UNKNOWN: Final = "not known"
PROBABLY: Final = ", probably"


@dataclass(frozen=True)
class Truth:
    """What has to be said. code: of the first finding; causes: what its cause may be called; words: what its title, or
    its first fix, has to hold."""

    code: str | None
    causes: tuple[str, ...] = ()
    words: str = ""


STRAGGLER: Final = "rank.straggler"
TRUTHS: Final = {
    "quota": Truth(STRAGGLER, ("cpu-quota", "process-stopped")),
    "competitor": Truth(STRAGGLER, ("no-core",)),
    "affinity": Truth(STRAGGLER, ("affinity", "no-core")),
    "gil": Truth(STRAGGLER, ("python-thread",), "prefetcher"),
    "disk": Truth(STRAGGLER, ("disk",)),
    "paging": Truth(STRAGGLER, ("paging",)),
    "gc": Truth("pause.gc"),
    "compilation": Truth("compute.recompile"),
    "branch": Truth(STRAGGLER, (UNKNOWN,), "late_rank_job.py:"),
    "window": Truth(STRAGGLER, (UNKNOWN,), " of "),
    "work": Truth("data.imbalance"),
    "none": Truth(None),
}
NO_CAUSE: Final = ("branch", "none")
CGROUP_OF: Final = {"quota": QUOTA, "paging": LIMIT}
TIMES: Final = 3


def run(cause: str) -> dict[str, Any]:
    """What is said of a job, and whether that is right."""
    if cause in CGROUP_OF and not os.access(own_cgroup(CGROUP_OF[cause]), os.W_OK):
        return {"cause": cause, "skipped": f"no leave to make a cgroup ({CGROUP_OF[cause]})"}
    with tempfile.TemporaryDirectory() as folder:
        finished = profile(
            Path(folder), HERE / "late_rank_job.py", "--cause", cause, ranks=2, flags=("--no-report",), fresh=True
        )
        if finished.status != 0:
            return {"cause": cause, "failed": finished.stderr[-2000:]}
        return {"cause": cause, **judged(TRUTHS[cause], finished.findings)}


def judged(truth: Truth, findings: dict[str, Any]) -> dict[str, Any]:
    """right: the first finding, its rank and its cause are true; certain_and_wrong: another cause was stated, and as
    certain."""
    above = [item for item in findings["findings"] if item["severity"] != "info"]
    first = above[0] if above else None
    told = next((str(row["value"]) for row in (first or {}).get("evidence", []) if row["metric"] == "cause"), "")
    named = told.removesuffix(PROBABLY).partition(":")[0]
    result: dict[str, Any] = {
        "step_ms": round(findings["run"]["step_ms"]["mean"], 1), "first": first and first["code"],
        "title": first and first["title"], "told": told, "fix": first and [fix["title"] for fix in first["fixes"]][:1],
    }  # fmt: skip
    if truth.code is None:
        return {**result, "right": first is None, "certain_and_wrong": bool(named) and named != UNKNOWN}
    placed = first is not None and LATE in (first["where"]["ranks"] or [LATE])
    caused = not truth.causes or named in truth.causes
    said = truth.words in json.dumps((result["title"], result["fix"]))
    wrong = bool(named) and named != UNKNOWN and PROBABLY not in told and bool(truth.causes) and not caused
    return {**result, "right": placed and first["code"] == truth.code and caused and said, "certain_and_wrong": wrong}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=TIMES, help="how often each cause is planted")
    parser.add_argument("--only", metavar="CAUSE", choices=CAUSES)
    parser.add_argument("--again", action="store_true", help="run the jobs that went wrong again")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "late_ranks.json")
    args = parser.parse_args()
    done: dict[str, Any] = json.loads(args.output.read_text())["jobs"] if args.output.exists() else {}
    for number in range(args.times):
        for cause in CAUSES:
            name = f"{cause} {number + 1}"
            if args.only not in (None, cause) or (name in done and not (args.again and not done[name].get("right"))):
                continue
            load = os.getloadavg()[0]
            done[name] = {**run(cause), "load_before": round(load, 1)}
            told = {key: done[name].get(key) for key in ("right", "first", "told", "skipped")}
            print(f"{name:16s} {json.dumps(told)}", flush=True)
            ran = [job for job in done.values() if "right" in job]
            late = [job for job in ran if job["cause"] not in NO_CAUSE]
            result = {
                "what": "what `dsprof run` says of a rank that is late for one known reason",
                "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__},
                "run": len(ran),
                "right": sum(job["right"] for job in ran),
                "of_thirty": f"{sum(job['right'] for job in late)} of {len(late)}",
                "certain_and_wrong": sum(job["certain_and_wrong"] for job in ran),
                "jobs": done,
            }
            write_atomically(args.output, json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
