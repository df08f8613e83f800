"""Jobs of up to 10,000 ranks with a known cause: whether it is found first, and what finding it takes.

    python benchmarks/scale.py                                   # 64 and 512 ranks, twenty jobs each
    python benchmarks/scale.py --ranks 4096,10000 --processes 2 --keep /data/made-up
    python benchmarks/scale.py --ranks 10000 --seeds 0,7 --processes 2
    python benchmarks/scale.py --layout mesh                     # pipelines, and experts: dp x tp x pp x ep

Each job is drawn (`scale_jobs`): its cause, who has it, clocks of hosts that are up to 50 ms apart and drift by up to
50 ppm, paths that are unequal, ranks without a trace, and ranks whose trace is torn. It is made as `dsprof run` leaves
it, twenty steps of fifty rows a rank (`--layout mesh`: of about 360), and analyzed in a fresh process. Of `saves` what
is true was told by making the job without its cause. `load` is what else the machine had to do when that
began: CPU seconds are more beside other work, and the clock's are worth nothing. What was measured is kept after each
job: a run that was interrupted goes on where it was, and with --keep the traces stay, too.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import numpy as np
from analysis import peak_mb
from analysis_plot import draw as draw_plot
from made_up_mesh import MeshPlant, make_mesh_run
from made_up_run import FIRST_NS, RANKS_A_HOST, Plant, make_run
from scale_jobs import FLAT, MESH, ROWS, STEPS, Job, Truth, draw

LAYOUTS = {"flat": FLAT, "mesh": MESH}
RESULTS = Path(__file__).parent / "results" / "scale.json"


def make(folder: Path, ranks: int, seed: int, layout: str = FLAT) -> None:
    """Where it is not made yet."""
    if (folder / "made").exists():
        return
    job = draw(ranks, seed, layout)
    if job.mesh is None:
        make_run(folder, ranks, STEPS, ROWS, seed, job.plant, job.truth.missing)
    else:
        assert isinstance(job.plant, MeshPlant)
        make_mesh_run(folder, job.mesh, STEPS, seed, job.plant, job.truth.missing)
    for rank in job.truth.torn:
        path = folder / "trace" / f"rank{rank:05d}.parquet"
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    (folder / "made").touch()


def analyze_and_tell(folder: Path, processes: int, ranks: int, seed: int, layout: str) -> None:
    """Runs in a fresh process: prints a JSON object."""
    from dsprof import reports, trace
    from dsprof.run import RunFolder

    load, before, wall = os.getloadavg()[0], spent_s(), time.perf_counter()
    analysis = reports.examine(RunFolder(folder), processes)
    wall, peak = time.perf_counter() - wall, peak_mb()  # what is true of the job takes more to tell
    forkserver._forkserver._stop()  # whose children the pool's processes are: they count when it was waited for
    cpu = spent_s() - before
    job = draw(ranks, seed, layout)
    truth = job.truth
    first = analysis.findings[0] if analysis.findings else None
    captured = ranks - len(truth.missing) - len(truth.torn)
    found = first is not None and finds(first, truth)
    found |= truth.may_decline and truth.code in analysis.not_judged
    found &= {one.code for one in analysis.findings[1 : 1 + len(truth.others)]} == {*truth.others}
    largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 1e6
    print(
        json.dumps(
            {
                "ranks": ranks, "layout": layout, "seed": seed, "cause": job.cause, "processes": processes,
                "right": bool(found and len(analysis.ranks_captured) == captured),
                "said": analysis.verdict.headline, "found": [one.code for one in analysis.findings if one.is_problem],
                "saves": saves(analysis, job, ranks, seed), "ranks_captured": len(analysis.ranks_captured),
                "wall_s": round(wall, 1), "cpu_s": round(cpu, 1), "peak_mb": round(peak),
                "largest_worker_mb": round(largest) if processes > 1 else 0,
                "together_mb": round(peak + (processes * largest if processes > 1 else 0)),
                "clock_error_us": clock_errors(analysis, trace.load(RunFolder(folder)), job.plant),
                "clock_error_stated_us": round(analysis.capture.clock_error_us or 0.0, 1),
                "unequal_paths_us": round(truth.tail_us, 1),
                "load": round(load, 1),
            }
        )
    )  # fmt: skip


def finds(finding: Any, truth: Truth) -> bool:
    """Whether a finding names the planted cause: its code, its ranks and, of one that is not there all along, when."""
    said = " ".join(str(one.value) for one in finding.evidence if one.metric == "when")
    ranks = finding.where.ranks or ()
    named = truth.ranks in ((), ranks) or ranks in truth.ranks or (truth.among and ranks and {*ranks} <= {*truth.ranks})
    return bool(
        finding.code == truth.code
        and named
        and said.startswith(truth.when)
        and truth.steps in (None, finding.where.steps)
        and truth.stage in (None, finding.where.stage)
    )


def saves(analysis: Any, job: Job, ranks: int, seed: int) -> dict[str, Any] | None:
    """What mending the first finding is said to save, and truly saves in the steps that were judged, ms; None where
    that is not told."""
    if job.mended is None or not analysis.findings or analysis.findings[0].code != job.truth.code:
        return None
    steps = np.sort(analysis.steps["step"][analysis.steps["ordinary"]].unique())
    now, then = (job.line(ranks, seed, plant).lasted_ms()[steps].mean() for plant in (job.plant, job.mended))
    gain = analysis.findings[0].gain
    return {
        "true": round(float(now - then), 1), "said": round(gain.ms, 1), "low": round(gain.low, 1),
        "high": round(gain.high, 1), "within": bool(gain.low <= now - then <= gain.high),
        "of_step": round(float(now), 1),
    }  # fmt: skip


def spent_s() -> float:
    """CPU time of this process and of those that it waited for."""
    every = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in every)


def clock_errors(analysis: Any, raw: Any, plant: Plant) -> dict[str, float]:
    """How far the hosts' clocks, as they were aligned, are from what was drawn: us, of the first rank of each."""
    found = []
    for host in range(len(plant.offset_ns if plant.offset_ns is not None else ())):
        mine = [rank for rank in analysis.ranks_captured if rank // RANKS_A_HOST == host][:1]
        if not mine:
            continue
        ahead, gains = plant.clock(host)
        aligned = analysis.trace.read(mine[0], ("start_ns",))["start_ns"].to_numpy(np.int64)
        seen = raw.read(mine[0], ("start_ns",))["start_ns"].to_numpy(np.int64)
        true = (seen - ahead + FIRST_NS * gains) / (1 + gains)
        found.append(float(np.abs(aligned - true).max()) / 1e3)
    within = float(np.mean(np.array(found) <= (analysis.capture.clock_error_us or 0.0)))
    return {
        "median": round(float(np.median(found)), 1),
        "p99": round(float(np.percentile(found, 99)), 1),
        "within_stated": round(within, 4),
    }


def measure(ranks: int, layout: str, seed: int, processes: int, keep: Path | None) -> dict[str, Any]:
    kind = "" if layout == FLAT else "-mesh"
    folder = (keep or Path(tempfile.mkdtemp())) / f"scale-{ranks}{kind}-{seed}"
    try:
        begun = time.perf_counter()
        make(folder, ranks, seed, layout)
        print(f"{folder.name}: made in {time.perf_counter() - begun:.0f} s", file=sys.stderr)
        child = [sys.executable, __file__, "--child", str(folder), "--ranks", str(ranks), "--seed", str(seed),
                 "--layout", "flat" if layout == FLAT else "mesh"]  # fmt: skip
        ended = subprocess.run(
            [*child, "--processes", str(processes)], stdout=subprocess.PIPE, text=True, check=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )  # fmt: skip
    finally:
        if keep is None:
            shutil.rmtree(folder.parent)
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def plot(jobs: list[dict[str, Any]], processes: int, file: Path) -> None:
    """CPU seconds and memory over the number of ranks, the medians of the jobs of each that so many processes did."""
    chosen = [one for one in jobs if one["processes"] == processes and one["layout"] == FLAT]
    if not chosen:
        return
    ranks = sorted({one["ranks"] for one in chosen})

    def medians(name: str) -> list[float]:
        return [float(np.median([one[name] for one in chosen if one["ranks"] == count])) for count in ranks]

    panels = {
        "CPU seconds, Parquet to verdict": medians("cpu_s"),
        "peak memory of all processes together, MB": medians("together_mb"),
    }
    busy = max(one.get("load", 0.0) for one in chosen)
    beside = f"; beside other work (load up to {busy:.0f})" if busy > len(os.sched_getaffinity(0)) else ""
    draw_plot(ranks, panels, f"ranks, of {STEPS} steps of {ROWS} rows each, in {processes} processes{beside}", file)


def key(job: dict[str, Any]) -> tuple[int, str, int, int]:
    return job["ranks"], job["layout"], job["seed"], job["processes"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="64,512", help="numbers of ranks")
    parser.add_argument("--layout", choices=LAYOUTS, default="flat", help="whether with pipelines and experts")
    parser.add_argument("--jobs", type=int, default=20, help="of each number of ranks")
    parser.add_argument("--seeds", help="these jobs, and not the first ones")
    parser.add_argument("--processes", type=int, default=1, help="that a job is analyzed in")
    parser.add_argument("--keep", type=Path, help="a folder to keep the made-up runs in, and to find them in")
    parser.add_argument("--force", action="store_true", help="measure again what the result file holds")
    parser.add_argument("--output", type=Path, default=RESULTS, help="the result file")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    layout = LAYOUTS[args.layout]
    if args.child:
        analyze_and_tell(args.child, args.processes, int(args.ranks), args.seed, layout)
        return 0
    known = json.loads(args.output.read_text())["jobs"] if args.output.exists() else []
    for ranks in map(int, args.ranks.split(",")):
        for seed in map(int, args.seeds.split(",")) if args.seeds else range(args.jobs):
            case = ranks, layout, seed, args.processes
            kept = [one for one in known if key(one) != case]
            if len(kept) < len(known) and not args.force:
                continue
            found = measure(*case, args.keep)
            known = sorted([*kept, found], key=key)
            result = {
                "what": f"made-up jobs of {STEPS} steps, from Parquet files to the ranking",
                "machine": {"cores": len(os.sched_getaffinity(0)), "python": platform.python_version()},
                "right": f"{sum(one['right'] for one in known)} of {len(known)}",
                "jobs": known,
            }
            args.output.write_text(json.dumps(result, indent=1) + "\n")
            print(json.dumps(found))
    plot(known, args.processes, args.output.with_suffix(".svg"))
    return 0 if all(one["right"] for one in known) else 1


if __name__ == "__main__":
    sys.exit(main())
