"""What `dsprof tune` makes of six jobs with two to five faults each, against mending all of them by hand.

    python benchmarks/tune_jobs.py                   # all; writes benchmarks/results/tune_jobs.json
    python benchmarks/tune_jobs.py NAME ...          # those whose names begin so
    python benchmarks/tune_jobs.py --until 14:30     # begin no job after that

Each is run as a user would: `dsprof run`, `dsprof tune RUN`, and, for comparison, `dsprof fix RUN --set ... --verify`
of all that mends the job. The result is written after each change that tuning has tried, with its prediction, which
tuning writes before a job with it runs. What was broken off goes on there. Layers sleep, and links are paced, but for
the example, which computes.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fix_cases import zero
from forked_dsprof import Failed, dsprof, end_all

from dsprof.atomic import write_atomically
from dsprof.knobs.registry import flags

HERE: Final = Path(__file__).resolve().parent
RESULTS: Final = HERE / "results" / "tune_jobs.json"
EXAMPLE: Final = "../../examples/train_gpt.py"
PAIRS_BY_HAND: Final = 3
"""For what all changes save in the mean, of which it is not asked whether it is kept. `tune` takes its usual number."""
MOST_CHANGES: Final = 6
BUDGET_S: Final = 900

Record = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """faults: in words; by_hand: the knobs that mend all of them; script: of `prediction_jobs`"""

    name: str
    faults: tuple[str, ...]
    script: str
    args: str
    by_hand: Mapping[str, Any]
    ranks: int = 2
    config: Mapping[str, Any] | None = None


FIVE_BAD_KEYS: Final = {
    **zero(2, reduce_bucket_size=20_000, allgather_bucket_size=20_000, overlap_comm=False),
    "wall_clock_breakdown": True,
    "steps_per_print": 1,
}
JOBS: Final = (
    Job("t1 DDP, one bucket over a slow link and samples that take 5 ms", ("one bucket", "slow samples"), "ddp.py",
        "--steps 28 --forward-ms 30 --layers 8 --width 256 --bucket-mb 1000 --link-mb 40 --batch-size 8 --read-ms 5",
        {"ddp.bucket_cap_mb": 1, "loader.num_workers": 2, "loader.persistent_workers": True}),
    Job("t2 DeepSpeed, a configuration with five bad keys",
        ("reduce_bucket_size of 20,000", "allgather_bucket_size of 20,000", "overlap_comm", "wall_clock_breakdown",
         "steps_per_print"),
        "zero_json.py", "--steps 28 --forward-ms 12 --layers 40 --width 128",
        {"zero_optimization.reduce_bucket_size": 5_000_000, "zero_optimization.allgather_bucket_size": 500_000_000,
         "zero_optimization.overlap_comm": True, "wall_clock_breakdown": False, "steps_per_print": 1000},
        config=FIVE_BAD_KEYS),
    Job("t3 the example under torchrun, slow samples and small buckets", ("slow samples", "a bucket a layer"), EXAMPLE,
        "--steps 30 --layers 6 --context 64 --slow-loader --bucket-mb 0.001",
        {"loader.num_workers": 2, "loader.persistent_workers": True, "ddp.bucket_cap_mb": 25}),
    Job("t4 the engine, reductions in small buckets that are waited for", ("overlap_comm", "small buckets"),
        "zero_json.py", "--own --steps 28 --forward-ms 30 --layers 12 --width 192 --link 4e7",
        {"zero_optimization.overlap_comm": True, "zero_optimization.reduce_bucket_size": 200_000},
        config=zero(2, reduce_bucket_size=20_000, overlap_comm=False)),
    Job("t5 DDP, micro-batches that all reduce and buffers that are sent", ("no no_sync", "buffers"), "ddp.py",
        "--steps 28 --forward-ms 10 --layers 4 --width 192 --link-mb 40 --accumulate 3 --buffer-mb 0.8",
        {"ddp.accumulate": 3, "ddp.broadcast_buffers": False}),
    Job("t6 FSDP2, units of one layer that are gathered twice", ("small units", "parameters gathered twice"), "fsdp.py",
        "--steps 28 --forward-ms 16 --layers 16 --width 96 --link-mb 20",
        {"fsdp2.modules_per_unit": 4, "fsdp2.reshard_after_forward": False}),
)  # fmt: skip


def gained(journal: Mapping[str, Any]) -> Record | None:
    """What all that tuning kept saves, as measured beside the job as it was; None: it kept nothing."""
    if not journal["kept"]:
        return None
    if journal["together"] is not None and "ms" in journal["together"]:
        return dict(journal["together"])
    kept = [one["measured"] for one in journal["attempts"] if (one["measured"] or {}).get("outcome") == "kept"]
    return dict(kept[-1]) if len(kept) == 1 else None


def judged(record: Record) -> Record:
    """What tuning gained, and which part it is of mending all by hand."""
    journal, by_hand = record.get("tuned"), record.get("by_hand", {}).get("measured", {})
    if journal is None or not journal["ended"]:
        return {}
    found = gained(journal)
    saved = found["ms"] if found is not None else 0.0
    result: Record = {
        "tried": len(journal["attempts"]), "kept": len(journal["kept"]), "saved_ms": round(saved, 2),
        "worse_than_it_began": bool(found is not None and found.get("high", 0.0) < 0),
    }  # fmt: skip
    if by_hand.get("ms", 0.0) > 0:
        result["percent_of_by_hand"] = round(100 * saved / by_hand["ms"], 1)
    return result


def result(records: list[Record]) -> Record:
    done = [one for record in records if "percent_of_by_hand" in (one := judged(record))]
    return {
        "what": "`dsprof tune` of jobs with several faults, against mending all of them by hand",
        "cores": os.cpu_count(),
        "summary": {
            "jobs": len(JOBS),
            "done": len(done),
            "at_least_80_percent_of_by_hand": sum(one["percent_of_by_hand"] >= 80 for one in done),
            "worse_than_it_began": sum(one["worse_than_it_began"] for one in done),
        },
        "jobs": [{**record, "judged": judged(record)} for record in records],
    }


def run(job: Job, where: Path, record: Record, write: Any) -> None:
    """A job, from where it was broken off. Raises Failed."""
    where.mkdir(parents=True, exist_ok=True)
    if "step_ms" not in record:
        words = [str((HERE / "prediction_jobs" / job.script).resolve()), *job.args.split()]
        if job.config is not None:
            (where / "ds.json").write_text(json.dumps(job.config, indent=2) + "\n")
            words += ["--deepspeed_config", str(where / "ds.json")]
        ranks = ["--nproc-per-node", str(job.ranks)]
        done = dsprof(where, "run", "-o", "run", "--force", "--no-report", "-q", *ranks, *words)
        if done.returncode:
            raise Failed(f"the job ended with status {done.returncode}: {done.stderr[-600:]}")
        found = json.loads((where / "run" / "findings.json").read_text())
        record |= {"faults": list(job.faults), "job": f"{job.script} {job.args}"}
        record |= {"step_ms": round((found["run"]["step_ms"] or {"mean": 0.0})["mean"], 2)}
        record |= {"found": [one["code"] for one in found["findings"]], "load": round(os.getloadavg()[0], 1)}
        write()
    journal = where / "run-tune" / "tune.json"
    seen = 0.0

    def look() -> None:
        nonlocal seen
        with suppress(OSError, ValueError):
            written = journal.stat().st_mtime
            if written > seen:
                seen, record["tuned"] = written, json.loads(journal.read_text())
                write()

    limits = ("--changes", str(MOST_CHANGES), "--budget", str(BUDGET_S))
    if not record.get("tuned", {}).get("ended"):
        done = dsprof(where, "tune", "run", *limits, "--json", longest_s=2 * BUDGET_S, look=look)
        if done.returncode not in (0, 4):
            raise Failed(f"tuning ended with status {done.returncode}: {done.stderr[-600:]}")
    if "by_hand" not in record:
        turned = flags(job.by_hand.items())
        done = dsprof(where, "fix", "run", *turned, "--verify", "--pairs", str(PAIRS_BY_HAND), "--json")
        try:
            record["by_hand"] = {"set": dict(job.by_hand), "measured": json.loads(done.stdout)["measured"]}
        except ValueError:
            raise Failed(f"by hand: status {done.returncode}: {done.stderr[-600:]}") from None
        write()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    arguments.add_argument("names", nargs="*", help="how the names of jobs begin; default: all")
    arguments.add_argument("--until", default="", metavar="HH:MM", help="begin no job after that")
    arguments.add_argument("--results", type=Path, default=RESULTS)
    arguments.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "dsprof-tune-jobs")
    options = arguments.parse_args()
    records: list[Record] = json.loads(options.results.read_text())["jobs"] if options.results.exists() else []

    def write() -> None:
        write_atomically(options.results, json.dumps(result(records), indent=1) + "\n")

    try:
        for job in JOBS:
            late = options.until and time.strftime("%H:%M") >= options.until
            if late or (options.names and not any(job.name.startswith(name) for name in options.names)):
                continue
            record = next((one for one in records if one["name"] == job.name), None)
            if record is None:
                record = {"name": job.name}
                records.append(record)
            record.pop("why", None)
            try:
                run(job, options.work / job.name.partition(" ")[0], record, write)
            except Failed as failed:
                record["why"] = str(failed)
            write()
            print(job.name, json.dumps(judged(record)), record.get("why", ""), flush=True)
    finally:
        end_all()


if __name__ == "__main__":
    main()
