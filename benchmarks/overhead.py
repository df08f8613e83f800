"""What the collectors cost the training job: CPU time and wall time a step, as ratios to the same job without them.

    python benchmarks/overhead.py --minutes 60    # goes on where it stopped; writes benchmarks/results/overhead.json

Four jobs (`overhead_jobs.py`) of about 150 ms a step, in these arms:

    off      collectors that were closed       off_again   the same: the A/A arm, what noise alone makes
    light    level light, native recorder      full        level full, native recorder
    python   level light, Python recorder
    torch_profiler, _stacks, _memory   torch.profiler, CPU activities: plain, with_stack, profile_memory; a window of a
             block, its stop included

What costs little (off, off_again, light, full) is measured by `overhead_turns.py`: each arm trains in processes of its
own, captured from the beginning as `dsprof run` does. Where it is `off`, the capture is closed before the steps that
count: so all have one layout (`overhead_turns.CAPTURED_TURNS`), and what is left of a capture (c10d's operators pass a
kernel that passes on) is not in the ratio. They take turns, step by step, in a random order, so that a host's pace is
much the same for all, and a rank has its core and its caches for itself as it has in a job. Processes differ, too
(where memory happens to lie), so each round has new ones, and the interval is over rounds. As many rounds are taken as
it takes until the A/A arm's CPU time is known to 0.5 %.

What costs much is measured in a few rounds of blocks (`overhead_blocks.py`): ranks take some steps with an arm and some
with the next, of which the first few do not count, since switching is itself a cost.

CPU time is the processes' (every thread of every rank; mean of the ranks), wall time the mean of the ranks'. Each round
is written when it is over, an interrupted run goes on from there, and jobs take turns. A job whose A/A interval is
wider than that when the time is up is `resolved: false`.

Memory that is free stays the processes' own, in every arm (`MALLOC`). With glibc as it is set by default, how often a
process gives the end of its heap back and takes it anew goes by where its tensors happen to lie: page faults a step of
the same job, with collectors and without, differ by hundreds from process to process, and a step's CPU time with them
by more than what is to be measured.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from overhead_jobs import JOBS
from overhead_result import Result, Round

HERE: Final = Path(__file__).parent
ROUNDS_OF_BLOCKS: Final = 4
"""That a job takes before it is the next one's turn, in one set of processes."""
MALLOC: Final = {"MALLOC_TRIM_THRESHOLD_": str(4 << 30), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}
"""glibc's settings, which keep it from giving free memory back."""


def run_turns(job: str, seed: int, turns: int) -> Round:
    """One round, in processes of its own."""
    with tempfile.TemporaryDirectory() as scratch:
        child = _start("overhead_turns.py", job, scratch, seed, turns)
        try:
            return {"job": job, "turns": _line_of(child, job)}
        finally:
            _end([child])


def run_blocks(job: str, seed: int, rounds: int, block: int, warm: int) -> Iterator[Round]:
    """Each round as it ends."""
    with tempfile.TemporaryDirectory() as scratch:
        ranks = [
            _start("overhead_blocks.py", job, scratch, seed, rounds, block, warm, rank)
            for rank in range(JOBS[job].ranks)
        ]
        try:
            for _ in range(rounds):
                told = [_line_of(rank, job) for rank in ranks]
                yield {"job": job, "steps": block, "blocks": {arm: [one[arm] for one in told] for arm in told[0]}}
        finally:
            _end(ranks)


def _start(script: str, *args: object) -> subprocess.Popen[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DSPROF")} | MALLOC
    command = [sys.executable, str(HERE / script), *map(str, args)]
    return subprocess.Popen(command, env=kept, stdout=subprocess.PIPE, text=True, start_new_session=True)


def _line_of(child: subprocess.Popen[str], job: str) -> Any:
    """What it prints next; RuntimeError where it ended instead."""
    assert child.stdout is not None
    line = child.stdout.readline()
    if not line:
        raise RuntimeError(f"a process of {job} ended before its time")
    return json.loads(line)


def _end(children: list[subprocess.Popen[str]]) -> None:
    for child in children:
        os.killpg(child.pid, signal.SIGKILL)  # with the processes that it has forked
        child.wait()
        if child.stdout is not None:
            child.stdout.close()


def measure(result: Result, jobs: list[str], until: float, args: argparse.Namespace) -> None:
    """Jobs take turns, until every one is resolved or it is `until` (time.monotonic)."""
    while True:
        due = [job for job in jobs if not result.resolved(job) or len(result.of(job, "blocks")) < args.rounds_of_blocks]
        if not due:
            return
        for job in due:
            if not result.resolved(job):
                result.add(run_turns(job, len(result.of(job, "turns")), args.turns))
                if time.monotonic() > until:
                    return
            done = len(result.of(job, "blocks"))
            rounds = min(ROUNDS_OF_BLOCKS, args.rounds_of_blocks - done)
            if rounds > 0:
                for measured in run_blocks(job, done, rounds, args.block, args.warm):
                    result.add(measured)
                    if time.monotonic() > until:
                        return


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60, help="after these, what is not resolved stays so")
    parser.add_argument("--jobs", default=",".join(JOBS))
    parser.add_argument("--turns", type=int, default=60, help="steps counted of each arm a round")
    parser.add_argument("--rounds-of-blocks", type=int, default=4, help="of the arms that cost much")
    parser.add_argument("--block", type=int, default=6, help="steps counted a block")
    parser.add_argument("--warm", type=int, default=4, help="steps before them")
    parser.add_argument("--anew", action="store_true", help="forget the rounds that the output has")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "overhead.json")
    args = parser.parse_args()
    until = time.monotonic() + 60 * args.minutes
    jobs = args.jobs.split(",")
    if set(jobs) - set(JOBS):
        parser.error(f"--jobs: a list out of {','.join(JOBS)}")
    from dsprof.collectors import native

    if native.load_or_build(wait=True, explain=print) is None:
        sys.exit("the native helper could not be built")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    result = Result(args.output, args.anew)
    measure(result, jobs, until, args)
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
