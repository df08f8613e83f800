"""What the collectors add to a training step, in instructions: where noise hides it, they can still be counted.

    python benchmarks/instructions.py    # writes benchmarks/results/instructions.json, goes on where it stopped

Four jobs (`overhead_jobs.COUNTED`): DistributedDataParallel, FSDP2, a pipeline, and a plain loop of small operators
whose step takes 2 ms. callgrind (valgrind) counts what all threads of a rank execute from one step to a later one, so
that what comes once, start-up above all, is not in it. The arm without collectors had a capture that was closed before,
for the reason that `overhead.py` gives.

Each job is counted twice. valgrind computes a fused multiply-add in software, a thousand times as slowly as the
processor, and a matrix product consists of them: a step would take minutes. So the difference of the two arms, which
has no matrix product in it, is counted with kernels of SSE 4.2; and a step without collectors, by which it is divided,
over few steps with the kernels that the processor would take (AVX2: valgrind knows no wider ones). The step as SSE
executes it has more instructions, so the ratio to that one would flatter.

callgrind makes a step some fifty times as long, and what samples by the clock would do so after each step. So the
samplers' clock is given: it goes by as many steps as were taken, each as long as its processor time is without
callgrind, and by what a sample takes then; side threads wait for as many steps, and the helper's own (the pulse, 50
times a second, and the watch of the interpreter's lock) are slowed down as much as the steps are. callgrind does not
see the kernel: system time and page faults a step stand beside, measured without it.

Samples of stacks are left out: there is one in hundreds of steps, so that it would be chance whether one is among those
that count. Their thread keeps to 0.1 % of a core, by what it has used (`stack_samples.SHARE`), beside the rank's own.

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

HERE: Final = Path(__file__).parent
MALLOC: Final = {"MALLOC_TRIM_THRESHOLD_": str(4 << 30), "MALLOC_MMAP_THRESHOLD_": str(32 << 20), "PYTHONHASHSEED": "0"}
"""As in `overhead.py`."""
COPIES: Final = {
    "GLIBC_TUNABLES": "glibc.cpu.x86_rep_movsb_threshold=1000000000:glibc.cpu.x86_rep_stosb_threshold=1000000000"
}
"""Copies of over 2 KB by a loop, 32 bytes at once: of the one instruction by which glibc has the processor copy them
(rep movsb) callgrind counts every byte, a million where a loop of vectors has 94,000."""


@dataclass(frozen=True)
class Steps:
    """How many a job takes before those that count, and how many count: with SSE's kernels, natively, and without
    collectors with the processor's kernels."""

    warm: int
    counted: int
    natively: int
    of_processor: tuple[int, int]


STEPS: Final = {
    "launch-bound": Steps(300, 200, 2000, (20, 50)),
    "ddp": Steps(18, 12, 60, (3, 1)),
    "fsdp2": Steps(18, 12, 60, (3, 1)),
    "pipeline": Steps(18, 36, 60, (3, 1)),  # over 12, what comes once in a while made it 1.011, over 36 1.0045
}
FEW_INSTRUCTIONS: Final = {
    "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
    "DNNL_MAX_CPU_ISA": "SSE41",
    "ATEN_CPU_CAPABILITY": "default",
}
"""Kernels without fused multiply-adds."""
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


def run(
    command: list[str], job: str, folder: Path, arms: str, steps: tuple[int, int], marks: str, *clock: int,
    kernels: dict[str, str] | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """What each rank of each arm says; steps: before those that count, and those."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DSPROF")} | MALLOC
    script = [sys.executable, str(HERE / "instructions_job.py"), job, arms, str(folder), *map(str, steps), marks]
    words = [*command, *script, *map(str, clock or (0, 0))]
    child = subprocess.Popen(
        words, env=kept | (kernels or {}), stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        said, _ = child.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)  # with the ranks that it has forked
        child.communicate()
        sys.exit(f"{job}: not over after {LIMIT_S} s; leave it out with --jobs")
    if child.returncode:
        sys.exit(f"{job}: ended with {child.returncode}")
    return [json.loads(line) for line in said.splitlines() if line.startswith("{")]


def natively(job: str) -> dict[str, Any]:
    """Times of a step and a sample, and what the kernel does, of each arm."""
    with tempfile.TemporaryDirectory() as scratch:
        said = run([], job, Path(scratch), "off,light", (STEPS[job].warm, STEPS[job].natively), "-")
    arms = {
        arm: {key: round(mean(said, arm, key), 3) for key in ("wall_ns", "user_us", "system_us", "faults")}
        for arm in ("off", "light")
    }
    return {"sample_us": round(min(one["sample_ns"] for one in said if one["arm"] == "light") / 1e3, 1), **arms}


def count(
    job: str, arms: str, steps: tuple[int, int], library: Path, native: dict[str, Any], kernels: dict[str, str]
) -> tuple[dict[str, int], int]:
    """Instructions a step of all ranks, of each arm; and after how many steps a sample was taken."""
    step_us = native["off"]["user_us"] + native["off"]["system_us"]
    with tempfile.TemporaryDirectory() as scratch:
        callgrind = ["valgrind", "--tool=callgrind", "--instr-atstart=no", "--quiet",
                     f"--callgrind-out-file={scratch}/out.%p"]  # fmt: skip
        under = run(
            callgrind, job, Path(scratch), arms, steps, str(library), round(step_us * 1e3),
            round(native["sample_us"] * 1e3), kernels=kernels | COPIES,
        )  # fmt: skip
        totals = {(one["arm"], one["rank"]): total(Path(scratch), one["pid"]) / steps[1] for one in under}
    of_arms = {arm: round(sum(n for (of, _), n in totals.items() if of == arm)) for arm in arms.split(",")}
    return of_arms, max(one["every"] for one in under)


def conclude(found: dict[str, Any]) -> None:
    """Put the ratio first into a job's results, when all three are there."""
    added = found["with_sse"]["light"] - found["with_sse"]["off"]
    rest = {key: value for key, value in found.items() if key not in ("ratio", "added_a_step")}
    found.clear()
    found.update(ratio=round(1 + added / rest["instructions_a_step"], 5), added_a_step=added, **rest)


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
    parser.add_argument("--anew", action="store_true", help="measure again what is in the results")
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
            found = result["jobs"].setdefault(job, {})
            if args.anew:
                found.clear()
            steps = STEPS[job]
            if "natively" not in found:
                found["natively"] = natively(job)
                save(result, args.output)
            if "with_sse" not in found:
                both = count(
                    job, "off,light", (steps.warm, steps.counted), library, found["natively"], FEW_INSTRUCTIONS
                )
                found["with_sse"], found["sampled_every"] = both
                save(result, args.output)
            if "instructions_a_step" not in found:
                without, _ = count(job, "off", steps.of_processor, library, found["natively"], {})
                found["instructions_a_step"] = without["off"]
            conclude(found)
            save(result, args.output)
            of, every = found["instructions_a_step"], found["sampled_every"]
            print(f"{job}: {found['ratio']:.4f}, {found['added_a_step']:,} of {of:,} a step; a sample every {every}")
    return 0


def save(result: dict[str, Any], path: Path) -> None:
    result["machine"] = {"python": platform.python_version(), "processor": platform.machine()}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
