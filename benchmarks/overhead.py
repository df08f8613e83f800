"""What the collectors cost the training job: CPU time and wall time a step, as ratios to the same job without them.

    python benchmarks/overhead.py --minutes 45    # goes on where it stopped; writes benchmarks/results/overhead.json

Four jobs (`overhead_jobs.py`) of about 150 ms a step. The ranks of one switch the collectors on and off between blocks
of steps, the arms in a random order within each round, the same on every rank, so that drift of the host falls on all
alike:

    off      no collectors                     off_again   the same: the A/A arm, what noise alone makes
    light    level light, native recorder      full        level full, native recorder
    python   level light, Python recorder
    torch_profiler, _stacks, _memory   torch.profiler, CPU activities: plain, with_stack, profile_memory; a window of a
             block, its stop included

What costs little is measured in rounds of its own (off, off_again, light, full), as many as it takes until the A/A
arm is known to 0.5 %; what costs much in a few rounds, in other processes, which leave nothing behind in those. Each
round is written when it is over, an interrupted run goes on from there, and jobs take turns. A job whose A/A interval
is wider than that when the time is up is `resolved: false`.

CPU time is the processes' (every thread of every rank; mean of the ranks), wall time the mean of the ranks'. A ratio
is that of a block to those without collectors in the same round; told are the mean over the rounds without the lowest
and highest fifth, its 95 % interval by the bootstrap over rounds, and the mean of all.

Memory that is free stays the processes' own, in every arm (`MALLOC`). As glibc is set by default, what a capture
allocates between the job's tensors has it give memory back and take it anew in each step, for some eighty steps after
the opening (and after the close) of one: 300 to 1000 page faults a step, 1 to 2 % of it, which a job pays once.

A block is a second, of steps that follow a few that are not counted, because switching is itself a cost: installing
or removing a hook makes Python forget what it had specialized and leaves caches cold, and a job pays that once. Longer
blocks lie further apart than this host's clock keeps its pace. What opening and closing a capture takes, with those
steps left out, is told beside.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from overhead_arms import ARMS
from overhead_jobs import JOBS

from dsprof.atomic import write_atomically
from dsprof.ondisk import RECORD_BYTES

HERE: Final = Path(__file__).parent
CHEAP: Final = ("off", "off_again", "light", "full")
DEAR: Final = ("off", "off_again", "python", "torch_profiler", "torch_profiler_stacks", "torch_profiler_memory")
A_TURN: Final = {CHEAP: 10, DEAR: 4}
"""Rounds that a job takes before it is the next one's turn, in processes of their own."""
MALLOC: Final = {"MALLOC_TRIM_THRESHOLD_": str(4 << 30), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}
"""glibc's settings, which keep it from giving free memory back."""
RESOLVED: Final = 0.005
"""Half the width of the A/A arm's interval."""
FEWEST: Final = 30
"""Rounds: of fewer, the bootstrap's interval means little."""

Round = dict[str, Any]
"""`job`, `rounds` of which arms, and for each arm what `overhead_arms.Block` has, of each rank."""


# --- running


def run_turn(job: str, arms: tuple[str, ...], seed: int, rounds: int, block: int, warm: int) -> Any:
    """Each round as it ends: for each arm, what each rank measured."""
    ranks = JOBS[job].ranks
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, str(HERE / "overhead_arms.py"), job, ",".join(arms), scratch, str(seed)]
        command += [str(rounds), str(block), str(warm)]
        kept = {name: value for name, value in os.environ.items() if not name.startswith("DSPROF")} | MALLOC
        started = [
            subprocess.Popen([*command, str(rank)], env=kept, stdout=subprocess.PIPE, text=True)
            for rank in range(ranks)
        ]
        try:
            for _ in range(rounds):
                lines = [child.stdout.readline() for child in started if child.stdout is not None]
                if not all(lines):
                    raise RuntimeError(f"a rank of {job} ended before its time")
                told = [json.loads(line) for line in lines]
                yield {arm: [one[arm] for one in told] for arm in arms}
        finally:
            for child in started:
                child.kill()
                child.wait()


def measure(result: Result, jobs: list[str], until: float, dear: int, block: int, warm: int) -> None:
    """Jobs take turns, until every one is resolved or it is `until` (time.monotonic)."""
    while True:
        due = [(job, arms) for job in jobs for arms in (CHEAP, DEAR) if result.wants(job, arms, dear)]
        if not due:
            return
        for job, arms in due:
            done = len(result.of(job, arms))
            rounds = min(A_TURN[arms], dear - done) if arms is DEAR else A_TURN[arms]
            for number, measured in enumerate(run_turn(job, arms, done, rounds, block, warm)):
                result.add(job, arms, block, measured)
                if sys.stderr.isatty():
                    print(f"\r{job} {arms[-1]}: round {done + number + 1}   ", end="", file=sys.stderr)
                if time.monotonic() > until:
                    return


# --- what comes out


class Result:
    """The rounds so far, in a file that is written anew after each."""

    def __init__(self, path: Path, anew: bool) -> None:
        """Raises SystemExit where the file has rounds of other code."""
        import torch

        self._path = path
        self._of = {
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "collectors": _hash_of("collectors", "*.py", "*.[ch]pp"),
            "jobs": _hash_of("benchmarks", "overhead_*.py"),
        }
        self.rounds: list[Round] = []
        if path.exists() and not anew:
            found = json.loads(path.read_bytes())
            if found.get("of") != self._of:
                raise SystemExit(f"{path} was measured of other code or on another machine: --anew, or --output")
            self.rounds = found["rounds"]

    def of(self, job: str, arms: tuple[str, ...]) -> list[Round]:
        return [one for one in self.rounds if one["job"] == job and tuple(one["blocks"]) == arms]

    def wants(self, job: str, arms: tuple[str, ...], dear: int) -> bool:
        """Whether more rounds are of use."""
        done = self.of(job, arms)
        return len(done) < dear if arms is DEAR else not resolved(done)

    def add(self, job: str, arms: tuple[str, ...], block: int, measured: dict[str, Any]) -> None:
        self.rounds.append({"job": job, "steps": block, "blocks": {arm: measured[arm] for arm in arms}})
        self.write()

    def write(self) -> None:
        jobs = dict.fromkeys(one["job"] for one in self.rounds)
        summary = {
            "what": "cost a step as a ratio to the same job without collectors: mean over rounds without the lowest "
            "and highest fifth, 95 % interval by the bootstrap, mean of all rounds; CPU time of all ranks, wall time",
            "of": self._of,
            "jobs": {job: self.summary(job) for job in jobs},
        }
        rounds = ",\n".join(json.dumps(one) for one in self.rounds)
        write_atomically(self._path, f'{json.dumps(summary, indent=1)[:-2]},\n "rounds": [\n{rounds}\n ]\n}}\n')

    def summary(self, job: str) -> dict[str, Any]:
        cheap, dear = self.of(job, CHEAP), self.of(job, DEAR)
        found: dict[str, Any] = {"ranks": JOBS[job].ranks, "rounds": len(cheap), "dear_rounds": len(dear)}
        found["resolved"] = resolved(cheap)
        found["step_ms"] = {
            what: round(1e3 * float(per_step(cheap or dear, "off", f"{what}_s").mean()), 1) for what in ("cpu", "wall")
        }
        measured = [(arm, cheap) for arm in CHEAP[1:] if cheap] + [(arm, dear) for arm in DEAR[2:] if dear]
        for what in ("cpu", "wall"):
            found[what] = {arm: ratio(rounds, arm, f"{what}_s") for arm, rounds in measured}
        if cheap and dear:
            light = found["cpu"]["light"]
            found["times_what_light_costs"] = {
                arm: _times(found["cpu"][arm], light) for arm in DEAR if arm.startswith("torch_profiler")
            }
        found["page_faults_a_step"] = {
            arm: round(float(per_step(rounds, arm, "faults").mean()), 1)
            for arm, rounds in [("off", cheap or dear), *measured]
        }
        found["captured"] = {arm: _captured(rounds, arm) for arm, rounds in measured if ARMS[arm].captures}
        return found


def per_step(rounds: list[Round], arm: str, what: str) -> NDArray[np.float64]:
    """Of each round, the mean of the ranks."""
    return np.array([np.mean([rank[what] for rank in one["blocks"][arm]]) / one["steps"] for one in rounds])


def ratio(rounds: list[Round], arm: str, what: str) -> dict[str, float]:
    """The A/A arm is compared with the other arm without collectors; every other with both."""
    off = np.log(per_step(rounds, "off", what))
    if arm != "off_again":
        off = (off + np.log(per_step(rounds, "off_again", what))) / 2
    paired = np.log(per_step(rounds, arm, what)) - off
    draw = np.random.default_rng(0).integers(0, len(paired), (4000, len(paired)))
    low, high = np.percentile(_trimmed(paired[draw]), [2.5, 97.5])
    found = {"ratio": float(_trimmed(paired)), "low": low, "high": high, "mean": float(paired.mean())}
    return {name: round(float(np.exp(value)), 4) for name, value in found.items()}


def _trimmed(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of the last axis, the mean of the three fifths in the middle."""
    cut = values.shape[-1] // 5
    kept: NDArray[np.float64] = np.sort(values, axis=-1)[..., cut : values.shape[-1] - cut]
    return kept.mean(axis=-1)


def resolved(rounds: list[Round]) -> bool:
    if len(rounds) < FEWEST:
        return False
    found = ratio(rounds, "off_again", "cpu_s")
    return (found["high"] - found["low"]) / 2 <= RESOLVED


def _times(theirs: dict[str, float], light: dict[str, float]) -> dict[str, float | None]:
    """How many times as much the one costs as the other. `at_least`: its lower end to light's upper end. None: light
    was not found to cost anything."""
    return {
        "ratio": _share(theirs["ratio"] - 1, light["ratio"] - 1),
        "at_least": _share(theirs["low"] - 1, light["high"] - 1),
    }


def _share(part: float, whole: float) -> float | None:
    return round(part / whole, 1) if whole > 0 else None


def _captured(rounds: list[Round], arm: str) -> dict[str, float]:
    """What a rank wrote a step, and what was not counted above."""
    records = float(np.mean(per_step(rounds, arm, "records")))

    def median_ms(what: str) -> float:
        values = [rank[what] for one in rounds for rank in one["blocks"][arm]]
        return round(1e3 * float(np.median(values)), 2)

    return {
        "records_a_rank_a_step": round(records, 1),
        "bytes_a_rank_a_step": round(records * RECORD_BYTES),
        "opening_cpu_ms": median_ms("opening_s"),
        "closing_cpu_ms": median_ms("closing_s"),
        "side_threads_cpu_ms_a_second": round(
            1e3
            * sum(rank["beside_s"] for one in rounds for rank in one["blocks"][arm])
            / sum(rank["wall_s"] for one in rounds for rank in one["blocks"][arm]),
            3,
        ),
    }


def _hash_of(folder: str, *patterns: str) -> str:
    """Of these files, so that rounds of different code do not mix."""
    found = hashlib.sha256()
    for path in sorted(path for pattern in patterns for path in (HERE.parent / folder).rglob(pattern)):
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=45, help="after these, what is not resolved stays so")
    parser.add_argument("--jobs", default=",".join(JOBS))
    parser.add_argument("--dear", type=int, default=8, help="rounds of the arms that cost much")
    parser.add_argument("--block", type=int, default=6, help="steps counted a block")
    parser.add_argument("--warm", type=int, default=4, help="steps before them")
    parser.add_argument("--anew", action="store_true", help="forget the rounds that the output has")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "overhead.json")
    args = parser.parse_args()
    until = time.monotonic() + 60 * args.minutes
    jobs = args.jobs.split(",")
    if set(jobs) - set(JOBS):
        parser.error(f"--jobs: a list out of {','.join(JOBS)}")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    result = Result(args.output, args.anew)
    measure(result, jobs, until, args.dear, args.block, args.warm)
    for job in dict.fromkeys(one["job"] for one in result.rounds):
        found = result.summary(job)
        print(f"{job}: {found['step_ms']['cpu']} ms a step, {'' if found['resolved'] else 'un'}resolved")
        for arm, cpu in found["cpu"].items():
            wall = found["wall"][arm]
            print(
                f"  {arm:22s} CPU {cpu['ratio']:.4f} [{cpu['low']:.4f}, {cpu['high']:.4f}]"
                f"  wall {wall['ratio']:.4f} [{wall['low']:.4f}, {wall['high']:.4f}]"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
