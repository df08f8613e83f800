"""What the collectors add to a training step, in instructions: where noise hides it, they can still be counted.

    python benchmarks/instructions.py             # writes benchmarks/results/instructions.json

Four jobs (`overhead_jobs.COUNTED`): DistributedDataParallel, FSDP2, a pipeline, and a plain loop of small operators
whose step takes 2 ms. callgrind (valgrind) counts what all threads of a rank execute from one step to a later one, so
that what comes once, start-up above all, is not in it. The arm without collectors had a capture that was closed before,
for the reason that `overhead.py` gives.

callgrind makes a step some fifty times as long, and what samples by the clock would do so after each step. So the
samplers' clock is given: it goes by as many steps as were taken, each as long as it is without callgrind, and by what a
sample takes then; side threads wait as much longer as the steps take. callgrind does not see the kernel: system time
and page faults a step stand beside, measured without it.

Goals: 1.005 for the first three, 1.010 (better 1.005) for the small operators.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

HERE: Final = Path(__file__).parent
MALLOC: Final = {"MALLOC_TRIM_THRESHOLD_": str(4 << 30), "MALLOC_MMAP_THRESHOLD_": str(32 << 20), "PYTHONHASHSEED": "0"}
"""As in `overhead.py`."""
STEPS: Final = {"launch-bound": (300, 200, 2000), "ddp": (20, 8, 60), "fsdp2": (20, 8, 60), "pipeline": (20, 8, 60)}
"""Before those that count; that count under callgrind; that count natively. What tensors are for is looked at after
ever more steps, each time twice as many: of small operators none of these is among those that count."""
LIMIT_S: Final = 1800
TOTAL: Final = re.compile(r"^(?:totals|summary):\s+(\d+)", re.MULTILINE)


def make_marks(folder: Path) -> Path:
    """The library that asks callgrind. SystemExit without a C compiler or valgrind's header."""
    library = folder / "marks.so"
    built = subprocess.run(
        ["cc", "-O1", "-shared", "-fPIC", "-o", str(library), str(HERE / "instructions_marks.c")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if built.returncode:
        sys.exit(f"install valgrind with its headers, and a C compiler (apt install valgrind gcc):\n{built.stderr}")
    return library


def run(command: list[str], job: str, folder: Path, steps: int, marks: str, *clock: int) -> list[dict[str, Any]]:
    """What each rank of each arm says."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DSPROF")} | MALLOC
    script = [
        sys.executable,
        str(HERE / "instructions_job.py"),
        job,
        str(folder),
        str(STEPS[job][0]),
        str(steps),
        marks,
    ]
    words = [*command, *script, *map(str, clock or (0, 0))]
    child = subprocess.Popen(words, env=kept, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        said, _ = child.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)  # with the ranks that it has forked
        child.communicate()
        sys.exit(f"{job}: not over after {LIMIT_S} s; leave it out with --jobs")
    if child.returncode:
        sys.exit(f"{job}: ended with {child.returncode}")
    return [json.loads(line) for line in said.splitlines() if line.startswith("{")]


def count(job: str, library: Path) -> dict[str, Any]:
    """One job, first natively."""
    _, counted, natively = STEPS[job]
    with tempfile.TemporaryDirectory() as scratch:
        native = run([], job, Path(scratch), natively, "-")
    step_ns = round(mean(native, "off", "wall_ns"))
    sample_ns = round(mean(native, "light", "sample_ns"))
    with tempfile.TemporaryDirectory() as scratch:
        callgrind = ["valgrind", "--tool=callgrind", "--instr-atstart=no", "--quiet",
                     f"--callgrind-out-file={scratch}/out.%p"]  # fmt: skip
        under = run(callgrind, job, Path(scratch), counted, str(library), step_ns, sample_ns)
        totals = {(one["arm"], one["rank"]): total(Path(scratch), one["pid"]) / counted for one in under}
    instructions = {arm: sum(n for (of, _), n in totals.items() if of == arm) for arm in ("off", "light")}
    return {
        "step_ms": round(step_ns / 1e6, 3),
        "instructions_a_step": {arm: round(number) for arm, number in instructions.items()},
        "ratio": round(instructions["light"] / instructions["off"], 5),
        "added_a_step": round(instructions["light"] - instructions["off"]),
        "steps_counted": counted,
        "sample_us": round(sample_ns / 1e3, 1),
        "sampled_every": max(one["every"] for one in under if one["arm"] == "light"),
        "natively": {
            arm: {key: round(mean(native, arm, key), 3) for key in ("wall_ns", "user_us", "system_us", "faults")}
            for arm in ("off", "light")
        },
    }


def mean(said: list[dict[str, Any]], arm: str, key: str) -> float:
    """Of an arm's ranks."""
    values = [one[key] for one in said if one["arm"] == arm]
    return float(sum(values)) / len(values)


def total(folder: Path, pid: int) -> int:
    """Instructions of the one dump that a process asked for."""
    for path in sorted(folder.glob(f"out.{pid}*")):
        text = path.read_text(errors="replace")
        if "Client Request" in text.partition("fn=")[0]:
            found = TOTAL.search(text)
            if found:
                return int(found[1])
    raise RuntimeError(f"callgrind wrote nothing for process {pid}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", default=",".join(STEPS))
    parser.add_argument("--output", type=Path, default=HERE / "results" / "instructions.json")
    args = parser.parse_args()
    jobs = args.jobs.split(",")
    if set(jobs) - set(STEPS):
        parser.error(f"--jobs: a list out of {','.join(STEPS)}")
    if shutil.which("valgrind") is None:
        sys.exit("install valgrind (apt install valgrind)")
    import torch  # noqa: F401  (the helper is for the torch of this process)

    from dsprof.collectors import native

    if native.load_or_build(wait=True, explain=print) is None:
        sys.exit("the native helper could not be built")
    result = json.loads(args.output.read_text()) if args.output.exists() else {"jobs": {}}
    with tempfile.TemporaryDirectory() as scratch:
        library = make_marks(Path(scratch))
        for job in jobs:
            result["jobs"][job] = found = count(job, library)
            result["machine"] = {"python": platform.python_version(), "processor": platform.machine()}
            args.output.parent.mkdir(parents=True, exist_ok=True)
            args.output.write_text(json.dumps(result, indent=1) + "\n")
            of, every = found["instructions_a_step"]["off"], found["sampled_every"]
            print(f"{job}: {found['ratio']:.4f}, {found['added_a_step']:,} of {of:,} a step; a sample every {every}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
