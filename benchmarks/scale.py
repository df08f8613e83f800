"""Jobs of up to 10,000 ranks with a known cause: whether it is found first, and what finding it takes.

    python benchmarks/scale.py                                   # 64 and 512 ranks, twenty jobs each
    python benchmarks/scale.py --ranks 4096,10000 --processes 2 --keep /data/made-up
    python benchmarks/scale.py --ranks 10000 --seeds 0,7 --processes 2

Each job is drawn (`draw`): its cause, who has it, clocks of hosts that are up to 50 ms apart and drift by up to 50 ppm,
paths that are unequal, ranks without a trace, and ranks whose trace is torn. It is made as `dsprof run` leaves it,
twenty steps of fifty rows a rank, and analyzed in a fresh process. `load` is what else the machine had to do when that
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
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import numpy as np
from analysis import peak_mb
from analysis_plot import draw as draw_plot
from made_up_run import FIRST_NS, LATER_OF_ALL, RANKS_A_HOST, Plant, make_run

RESULTS = Path(__file__).parent / "results" / "scale.json"
STEPS, ROWS = 20, 50
CAUSES = (
    "straggler", "two stragglers", "lengths", "slow loader", "garbage collector", "straggler for a while",
    "stragglers in turn", "slow link", "slow link for a while", "slow links in turn", "straggler and slow loader",
)  # fmt: skip
CODES = {
    "lengths": "data.imbalance", "slow loader": "data.stall", "garbage collector": "pause.gc",
    "slow link": "comm.slow-link", "slow link for a while": "comm.slow-link", "slow links in turn": "comm.slow-link",
}  # fmt: skip
"""Of the findings that are to come first; of the others it is rank.straggler."""
TAKING_TURNS = 3
"""Ranks that are slow one after the other."""
ONE_IN = 500
"""Ranks, of which one has no trace and one a torn one."""


@dataclass(frozen=True)
class Truth:
    """code: of the finding that is to come first; ranks: who it is to name, none: whoever, several: one of these; when:
    what it is to say of when, `transient` or `rotating`, empty: nothing, and steps: which it is to name; missing: ranks
    without a trace; torn: with half of one; tail_us: by how much one rank may leave what hosts share later than
    another, as paths are unequal, at most; others: codes of what else is wrong, which is to come next."""

    code: str
    ranks: tuple[int, ...] | tuple[tuple[int, ...], ...]
    when: str
    steps: tuple[int, int] | None
    missing: tuple[int, ...]
    torn: tuple[int, ...]
    tail_us: float
    others: tuple[str, ...] = ()


def draw(ranks: int, seed: int) -> tuple[Plant, Truth]:
    """A job of so many ranks."""
    drawn = np.random.default_rng([ranks, seed])
    cause = CAUSES[seed % len(CAUSES)]
    hosts = -(-ranks // RANKS_A_HOST)
    who = drawn.choice(ranks, TAKING_TURNS, replace=False)
    others = np.setdiff1d(drawn.permutation(ranks)[: 2 * (ranks // ONE_IN) + 2], who)[: 2 * (ranks // ONE_IN)]
    work, elements = np.ones((ranks, STEPS)), np.full((ranks, STEPS), 4096.0)
    data_ms, pause_ms = np.zeros((1, 1)), np.zeros((ranks, 1))
    link = np.ones((hosts, STEPS))
    named: tuple[int, ...] | tuple[tuple[int, ...], ...] = ()
    first = int(drawn.integers(5, 9))
    spell = first, first + int(drawn.integers(6, 9))  # a while: of the steps that are judged less than half
    while_ = slice(spell[0], spell[1] + 1)
    when, steps = "", None
    also: tuple[str, ...] = ()
    if cause == "straggler":
        work[who[0]], named = drawn.uniform(1.1, 1.4), (int(who[0]),)
    elif cause == "straggler for a while":
        work[who[0], while_], named, when, steps = drawn.uniform(1.3, 1.5), (int(who[0]),), "transient", spell
    elif cause == "two stragglers":
        work[who[:2]], named = drawn.uniform(1.2, 1.3, (2, 1)), tuple(sorted(who[:2].tolist()))
    elif cause == "stragglers in turn":
        work[who[np.arange(STEPS) % TAKING_TURNS], np.arange(STEPS)] = drawn.uniform(1.3, 1.4, STEPS)
        named, when = tuple(sorted(who.tolist())), "rotating"
    elif cause == "lengths":
        elements = 512.0 * drawn.integers(2, 16, (ranks, STEPS))
        work = elements / elements.mean()
    elif cause == "slow loader":
        data_ms = np.full((1, 1), drawn.uniform(40, 90))
    elif cause == "straggler and slow loader":
        work[who[0]], named, also = drawn.uniform(1.3, 1.4), (int(who[0]),), ("data.stall",)
        data_ms = np.full((1, 1), drawn.uniform(40, 60))
    elif cause == "garbage collector":
        pause_ms[who[0]], named = drawn.uniform(40, 90), (int(who[0]),)
    else:
        host = int(who[0]) // RANKS_A_HOST
        others = others[:0]  # without every rank's capture, waiting for a late peer looks like a slow link
        named = _ranks_of(host, ranks)
        if cause == "slow links in turn":
            turns = np.append(host, drawn.choice(np.setdiff1d(np.arange(hosts), host), TAKING_TURNS - 1, replace=False))
            link[turns[np.arange(STEPS) % TAKING_TURNS], np.arange(STEPS)] = drawn.uniform(100, 150, STEPS)
            named, when = tuple(_ranks_of(int(one), ranks) for one in turns), "rotating"
        elif cause == "slow link":
            link[host] = drawn.uniform(60, 120)
        else:
            link[host, while_], when, steps = drawn.uniform(100, 150), "transient", spell
    tail_ns = drawn.uniform(5e3, 40e3, (ranks, 1))
    offset, drift = drawn.uniform(-50e6, 50e6, hosts), drawn.uniform(-50, 50, hosts)
    offset[0] = drift[0] = 0.0  # what the others are compared with
    plant = Plant(work, elements, data_ms, pause_ms, offset, drift, tail_ns, link)
    half = len(others) // 2
    return plant, Truth(
        CODES.get(cause, "rank.straggler"), named, when, steps, tuple(others[:half].tolist()),
        tuple(others[half:].tolist()), LATER_OF_ALL * float(tail_ns.max()) / 1e3, also,
    )  # fmt: skip


def _ranks_of(host: int, ranks: int) -> tuple[int, ...]:
    return tuple(range(host * RANKS_A_HOST, min((host + 1) * RANKS_A_HOST, ranks)))


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

    load, before, wall = os.getloadavg()[0], spent_s(), time.perf_counter()
    analysis = reports.examine(RunFolder(folder), processes)
    wall = time.perf_counter() - wall
    forkserver._forkserver._stop()  # whose children the pool's processes are: they count when it was waited for
    cpu = spent_s() - before
    plant, truth = draw(ranks, seed)
    first = analysis.findings[0] if analysis.findings else None
    captured = ranks - len(truth.missing) - len(truth.torn)
    found = first is not None and finds(first, truth)
    found &= {one.code for one in analysis.findings[1 : 1 + len(truth.others)]} == {*truth.others}
    largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 1e6
    print(
        json.dumps(
            {
                "ranks": ranks, "seed": seed, "cause": CAUSES[seed % len(CAUSES)], "processes": processes,
                "right": bool(found and len(analysis.ranks_captured) == captured),
                "said": analysis.verdict.headline, "ranks_captured": len(analysis.ranks_captured),
                "wall_s": round(wall, 1), "cpu_s": round(cpu, 1), "peak_mb": round(peak_mb()),
                "largest_worker_mb": round(largest) if processes > 1 else 0,
                "together_mb": round(peak_mb() + (processes * largest if processes > 1 else 0)),
                "clock_error_us": clock_errors(analysis, trace.load(RunFolder(folder)), plant),
                "clock_error_stated_us": round(analysis.capture.clock_error_us or 0.0, 1),
                "unequal_paths_us": round(truth.tail_us, 1),
                "load": round(load, 1),
            }
        )
    )  # fmt: skip


def finds(finding: Any, truth: Truth) -> bool:
    """Whether a finding names the planted cause: its code, its ranks and, of one that is not there all along, when."""
    said = " ".join(str(one.value) for one in finding.evidence if one.metric == "when")
    return bool(
        finding.code == truth.code
        and (truth.ranks in ((), finding.where.ranks) or finding.where.ranks in truth.ranks)
        and said.startswith(truth.when)
        and truth.steps in (None, finding.where.steps)
    )


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


def plot(jobs: list[dict[str, Any]], processes: int, file: Path) -> None:
    """CPU seconds and memory over the number of ranks, the medians of the jobs of each that so many processes did."""
    chosen = [one for one in jobs if one["processes"] == processes]
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="64,512", help="numbers of ranks")
    parser.add_argument("--jobs", type=int, default=20, help="of each number of ranks")
    parser.add_argument("--seeds", help="these jobs, and not the first ones")
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
        for seed in map(int, args.seeds.split(",")) if args.seeds else range(args.jobs):
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
    plot(known, args.processes, args.output.with_suffix(".svg"))
    return 0 if all(one["right"] for one in known) else 1


if __name__ == "__main__":
    sys.exit(main())
