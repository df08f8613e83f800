"""What TraceML (PyPI `traceml-ai`) says of the cases of `diagnosis.py`, judged as dsprof is.

    pip install --target /tmp/traceml --no-deps traceml-ai==0.5.0 rich psutil nvidia-ml-py msgspec pyyaml \\
        markdown-it-py mdurl pygments
    python benchmarks/beside_traceml.py --installed /tmp/traceml      # 80 minutes; writes results/beside_traceml.json

Each case is run once more, under `traceml run` alone, with its steps marked as its documentation says
(`traceml_job.py`), and the first diagnosis of its `final_summary.json` is read. It is right of a case with a fault if
what it names is the fault in TraceML's words (`IN_ITS_WORDS`: `right_kind`) and, where the fault has a place, its rank;
of a case without one if nothing stands above `info`. `right_rank` asks only whether it names the right rank, whatever
it says is wrong with it, as `slowest_rank` of `diagnosis.py` does. TraceML is made for one device and DDP: `of_ddp` is
what is right of those jobs alone. Pipelines' idle time and small messages have no name in it, and it has no fixes to
judge.

Written after each case; a run that was broken off goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

HERE: Final = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))

from diagnosis_cases import Case, cases, keep, share  # noqa: E402
from verdict_truth import JOBS  # noqa: E402

SEED: Final = 33
LONGEST_S: Final = 180.0
LATE: Final = frozenset({"COMPUTE_STRAGGLER", "STRAGGLER"})
IN_ITS_WORDS: Final[Mapping[str, frozenset[str]]] = {
    "rank.straggler": LATE,
    "pipeline.imbalance": LATE,
    "moe.imbalance": LATE,
    "data.stall": frozenset({"INPUT_BOUND", "INPUT_STRAGGLER"}),
    "checkpoint.stall": frozenset({"RESIDUAL_HEAVY", "STRAGGLER"}),
    "eval.uneven": frozenset({"RESIDUAL_HEAVY", *LATE}),
    "pipeline.stall": frozenset({"RESIDUAL_HEAVY", "STRAGGLER"}),
    "pipeline.bubble": frozenset(),
    "comm.small-messages": frozenset(),
}
"""Of each fault: the diagnoses whose own advice leads to its cause. `residual` is what its phases do not hold: it
advises to look at checkpoints, evaluation and waits. An evaluation on one rank is forward work that it has alone."""
DDP: Final = ("DDP", "torch.optim")


def run(case: Case, installed: Path) -> dict[str, Any]:
    """What TraceML says of a case, and whether that is right."""
    with tempfile.TemporaryDirectory() as folder:
        status, said = started(case, installed, Path(folder))
        summaries = list(Path(folder).rglob("final_summary.json"))
        if status != 0 or not summaries:
            return {"failed": f"status {status}: {said[-2000:]}"}
        return said_in(json.loads(summaries[0].read_text()))


def started(case: Case, installed: Path, folder: Path) -> tuple[int, str]:
    """Its exit status, and what it wrote. What runs for too long is ended with all its processes."""
    job = case.job
    flags = ("--logs-dir", str(folder), "--run-name", "case", "--nproc-per-node", str(job.ranks or 1))
    ports = ("--aggregator-port", str(free_port()), "--master-port", str(free_port()))
    args = ("--args", str(JOBS / job.script), "--steps", str(job.steps), *job.args)
    command = [sys.executable, "-m", "traceml_ai.launcher.cli", "run", str(HERE / "traceml_job.py"), *flags, *ports]
    # TraceML stands after this project's own packages, so that it brings none of them in another version
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(installed)])}
    with subprocess.Popen(
        [*command, *args], cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    ) as process:  # fmt: skip
        try:
            said, _ = process.communicate(timeout=LONGEST_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            said, _ = process.communicate()
            return 124, said
        return process.returncode, said


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def said_in(summary: Mapping[str, Any]) -> dict[str, Any]:
    """The first diagnosis of a run, and the ranks that it names."""
    first = summary["primary_diagnosis"]
    return {
        "says": first["kind"], "severity": first["severity"], "summary": first["summary"],
        "ranks": summary["step_time"]["diagnosis"].get("ranks") or [],
        "steps": first["evidence"].get("steps_analyzed"),
    }  # fmt: skip


def judged(case: Case, told: Mapping[str, Any]) -> dict[str, bool]:
    """Whether what was said of a case is right."""
    job = case.job
    if "failed" in told:
        return {}
    if job.first is None:
        return {"false_alarm": told["severity"] != "info"}
    place = case.place
    at_place = told["says"].endswith("STRAGGLER") and told["ranks"] == place
    kind = told["says"] in IN_ITS_WORDS[job.first]
    right = {"right_kind": kind, "right": kind and (place is None or at_place)}
    return right if place is None else {**right, "right_rank": at_place}


# --- all of them ------------------------------------------------------------------------------------


def summary_of(done: Mapping[str, dict[str, Any]], drawn: Mapping[str, Case]) -> dict[str, Any]:
    ran = {name: case for name, case in done.items() if "failed" not in case}
    ddp = {name: case for name, case in ran.items() if drawn[name].framework in DDP}
    return {
        "cases": f"{sum('right' in case for case in ran.values())} with a fault, "
        f"{sum('false_alarm' in case for case in ran.values())} without",
        "failed": [name for name, case in done.items() if "failed" in case],
        **counted(ran.values()),
        "of_ddp": counted(ddp.values()),
    }


def counted(every: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    every = list(every)
    asked = {
        "right": "right_of_faulty",
        "right_kind": "right_kind_of_faulty",
        "right_rank": "right_rank_of_those_with_one",
        "false_alarm": "false_alarms",
    }
    return {name: share(case[key] for case in every if key in case) for key, name in asked.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--installed", type=Path, required=True, help="the folder TraceML was installed into")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no case after so many")
    parser.add_argument("--only", metavar="TEXT", default="", help="cases whose name or script holds this, again")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "beside_traceml.json")
    args = parser.parse_args()
    kept: dict[str, Any] = json.loads(args.output.read_text()) if args.output.exists() else {}
    done: dict[str, Any] = kept["each"] if kept.get("seed") == args.seed else {}
    end = time.monotonic() + 60 * args.minutes
    drawn = cases(args.seed)

    def write() -> None:
        found = {"version": version(args.installed), **summary_of(done, drawn)}
        keep(args.output, "what `traceml run` says of the jobs of diagnosis.json", args.seed, found, done, drawn)

    for name, told in done.items():  # by the present words
        told |= judged(drawn[name], told)
    for name, case in drawn.items():
        skipped = args.only not in f"{name} {case.job.script}" or (not args.only and name in done)
        if skipped or time.monotonic() > end:
            continue
        load_before = round(os.getloadavg()[0], 1)
        done[name] = {"script": case.job.script, "true": case.job.first, **run(case, args.installed.resolve())}
        done[name] |= {"load_before": load_before, **judged(case, done[name])}
        print(f"{name}  {json.dumps(done[name])}", flush=True)
        write()
    write()
    print(json.dumps(summary_of(done, drawn), indent=1))
    return 0


def version(installed: Path) -> str:
    """`traceml-ai 0.5.0`."""
    found = next(installed.glob("traceml_ai-*.dist-info"), None)
    return "unknown" if found is None else found.name.removesuffix(".dist-info").replace("traceml_ai-", "traceml-ai ")


if __name__ == "__main__":
    sys.exit(main())
