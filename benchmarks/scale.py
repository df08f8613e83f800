"""Jobs of up to 10,000 ranks with a known cause: whether it is found first, and what finding it takes.

    python benchmarks/scale.py                                   # 64 and 512 ranks, ten jobs each
    python benchmarks/scale.py --ranks 4096,10000 --jobs 2 --processes 8 --keep /data/made-up

Each job is drawn (`draw`): its cause, who has it, clocks of hosts that are up to 50 ms apart and drift by up to 50 ppm,
paths that are unequal, ranks without a trace, and ranks whose trace is torn. It is made as `dsprof run` leaves it,
twenty steps of fifty rows a rank, and analyzed in a fresh process. What was measured is kept after each job: a run that
was interrupted goes on where it was, and with --keep the traces stay, too.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from analysis import peak_mb
from made_up_run import FIRST_NS, RANKS_A_HOST, Plant, make_run

RESULTS = Path(__file__).parent / "results" / "scale.json"
STEPS, ROWS = 20, 50
CAUSES = ("rank.straggler", "two stragglers", "data.imbalance", "data.stall", "pause.gc")
ONE_IN = 500
"""Ranks, of which one has no trace and one a torn one."""


@dataclass(frozen=True)
class Truth:
    """code: of the finding that is to come first; ranks: who it is to name, none: whoever; missing: ranks without a
    trace; torn: with half of one; tail_us: by how much paths are unequal, at most."""

    code: str
    ranks: tuple[int, ...]
    missing: tuple[int, ...]
    torn: tuple[int, ...]
    tail_us: float


def draw(ranks: int, seed: int) -> tuple[Plant, Truth]:
    """A job of so many ranks."""
    drawn = np.random.default_rng([ranks, seed])
    cause = CAUSES[seed % len(CAUSES)]
    hosts = -(-ranks // RANKS_A_HOST)
    who = drawn.choice(ranks, 2, replace=False)
    others = np.setdiff1d(drawn.permutation(ranks)[: 2 * (ranks // ONE_IN) + 2], who)[: 2 * (ranks // ONE_IN)]
    work, elements = np.ones((ranks, STEPS)), np.full((ranks, STEPS), 4096.0)
    data_ms, pause_ms = np.zeros((1, 1)), np.zeros((ranks, 1))
    named: tuple[int, ...] = ()
    if cause == "rank.straggler":
        work[who[0]], named = drawn.uniform(1.1, 1.4), (int(who[0]),)
    elif cause == "two stragglers":
        work[who], named = drawn.uniform(1.2, 1.3, (2, 1)), tuple(sorted(who.tolist()))
    elif cause == "data.imbalance":
        elements = 512.0 * drawn.integers(2, 16, (ranks, STEPS))
        work = elements / elements.mean()
    elif cause == "data.stall":
        data_ms = np.full((1, 1), drawn.uniform(40, 90))
    else:
        pause_ms[who[0]], named = drawn.uniform(40, 90), (int(who[0]),)
    tail_ns = drawn.uniform(5e3, 40e3, (ranks, 1))
    offset, drift = drawn.uniform(-50e6, 50e6, hosts), drawn.uniform(-50, 50, hosts)
    offset[0] = drift[0] = 0.0  # what the others are compared with
    plant = Plant(work, elements, data_ms, pause_ms, offset, drift, tail_ns)
    code = "rank.straggler" if cause == "two stragglers" else cause
    half = len(others) // 2
    return plant, Truth(
        code, named, tuple(others[:half].tolist()), tuple(others[half:].tolist()), float(tail_ns.max()) / 1e3
    )


def make(folder: Path, ranks: int, seed: int) -> None:
    """Where it is not made yet."""
    if (folder / "made").exists():
        return
    plant, truth = draw(ranks, seed)
    make_run(folder, ranks, STEPS, ROWS, seed, plant, truth.missing)
    for rank in truth.torn:
        path = folder / "trace" / f"rank{rank:05d}.parquet"
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    (folder / "made").touch()


def analyze_and_tell(folder: Path, processes: int, ranks: int, seed: int) -> None:
    """Runs in a fresh process: prints a JSON object."""
    from dsprof import reports, trace
    from dsprof.run import RunFolder

    before, wall = spent_s(), time.perf_counter()
    analysis = reports.examine(RunFolder(folder), processes)
    wall, cpu = time.perf_counter() - wall, spent_s() - before
    plant, truth = draw(ranks, seed)
    first = analysis.findings[0] if analysis.findings else None
    captured = ranks - len(truth.missing) - len(truth.torn)
    found = first is not None and first.code == truth.code and truth.ranks in ((), first.where.ranks)
    largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 1e6
    print(
        json.dumps(
            {
                "ranks": ranks, "seed": seed, "cause": CAUSES[seed % len(CAUSES)], "processes": processes,
                "right": bool(found and len(analysis.ranks_captured) == captured),
                "said": analysis.verdict.headline, "ranks_captured": len(analysis.ranks_captured),
                "wall_s": round(wall, 1), "cpu_s": round(cpu, 1), "peak_mb": round(peak_mb()),
                "largest_worker_mb": round(largest) if processes > 1 else 0,
                "clock_error_us": clock_errors(analysis, trace.load(RunFolder(folder)), plant),
                "clock_error_stated_us": round(analysis.capture.clock_error_us or 0.0, 1),
                "unequal_paths_us": round(truth.tail_us, 1),
            }
        )
    )  # fmt: skip


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
    return {"median": round(float(np.median(found)), 1), "p99": round(float(np.percentile(found, 99)), 1)}


def measure(ranks: int, seed: int, processes: int, keep: Path | None) -> dict[str, Any]:
    folder = (keep or Path(tempfile.mkdtemp())) / f"scale-{ranks}-{seed}"
    try:
        begun = time.perf_counter()
        make(folder, ranks, seed)
        print(f"{folder.name}: made in {time.perf_counter() - begun:.0f} s", file=sys.stderr)
        child = [sys.executable, __file__, "--child", str(folder), "--ranks", str(ranks), "--seed", str(seed)]
        ended = subprocess.run(
            [*child, "--processes", str(processes)], stdout=subprocess.PIPE, text=True, check=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )  # fmt: skip
    finally:
        if keep is None:
            shutil.rmtree(folder.parent)
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="64,512", help="numbers of ranks")
    parser.add_argument("--jobs", type=int, default=10, help="of each number of ranks")
    parser.add_argument("--processes", type=int, default=1, help="that a job is analyzed in")
    parser.add_argument("--keep", type=Path, help="a folder to keep the made-up runs in, and to find them in")
    parser.add_argument("--force", action="store_true", help="measure again what the result file holds")
    parser.add_argument("--output", type=Path, default=RESULTS, help="the result file")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        analyze_and_tell(args.child, args.processes, int(args.ranks), args.seed)
        return 0
    known = json.loads(args.output.read_text())["jobs"] if args.output.exists() else []
    for ranks in map(int, args.ranks.split(",")):
        for seed in range(args.jobs):
            case = ranks, seed, args.processes
            kept = [one for one in known if (one["ranks"], one["seed"], one["processes"]) != case]
            if len(kept) < len(known) and not args.force:
                continue
            found = measure(*case, args.keep)
            known = sorted([*kept, found], key=lambda one: (one["ranks"], one["seed"], one["processes"]))
            result = {
                "what": f"made-up jobs of {STEPS} steps of {ROWS} rows a rank, from Parquet files to the ranking",
                "machine": {"cores": len(os.sched_getaffinity(0)), "python": platform.python_version()},
                "right": f"{sum(one['right'] for one in known)} of {len(known)}",
                "jobs": known,
            }
            args.output.write_text(json.dumps(result, indent=1) + "\n")
            print(json.dumps(found))
    return 0 if all(one["right"] for one in known) else 1


if __name__ == "__main__":
    sys.exit(main())
