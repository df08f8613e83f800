"""Is what `dsprof run` says of a training on a GPU true? Pairs of a job with a fault and its mended twin, on one GPU.

    python benchmarks/gpu_pairs.py --output benchmarks/results/gpu_pairs.json     # ten minutes; goes on where it was
    python benchmarks/gpu_pairs.py --only TEXT --output FILE                      # the pairs whose names hold TEXT

Each job is `gpu_pairs_job.py` under `dsprof run`, as a user types it. Of each pair it is asked whether the first
finding is the right one, by how much the predicted saving misses what the mended twin's steps are shorter by the job's
own events, whether its interval holds that, and what is said of the twin, which has no fault. Jobs named healthy have
none from the beginning. Pairs were written down, and committed, before any of them ran.

The analysis of a job runs while the next one trains: only training needs the device.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
JOB: Final = ROOT / "benchmarks" / "gpu_pairs_job.py"
LIMIT_S: Final = 240


@dataclass(frozen=True)
class Pair:
    """fault, mended: arguments of the job; without `mended` there is no fault
    first: code of the finding that is to come first, above `info`; empty: none is to
    flags: of `dsprof run`, for both
    remark: the code stands among the findings, whatever its severity
    """

    fault: tuple[str, ...]
    mended: tuple[str, ...] = ()
    first: str = ""
    flags: tuple[str, ...] = ()
    remark: bool = False


SMALL: Final = ("--width=256", "--layers=24", "--length=64", "--batch=4")
DEEP: Final = ("--deep", "30:34")
FULL: Final = ("--level", "full")
LARGE: Final = ("--width=4096", "--layers=4", "--length=2048", "--batch=4")
PAIRS: Final = {
    "healthy: plain": Pair(()),
    "healthy: DDP": Pair(("--by=ddp",)),
    "healthy: FSDP2": Pair(("--by=fsdp2",)),
    "healthy: dsprof's engine": Pair(("--by=engine",)),
    "healthy: a loader that is hidden": Pair(("--workers=4", "--load-ms=40")),
    "healthy: the loss is read every ten steps": Pair(("--item-every=10",)),
    "a loader without workers": Pair(("--load-ms=60",), ("--load-ms=60", "--workers=8"), "data.stall"),
    "a loader with too few workers": Pair(
        ("--load-ms=150", "--workers=1"), ("--load-ms=150", "--workers=6"), "data.stall"
    ),
    "the loss is read in each step": Pair(
        ("--item-every=1", "--host-ms=25"), ("--item-every=20", "--host-ms=25"), "compute.host-sync"
    ),
    "pageable images": Pair(
        ("--image-mb=256", "--pinned=0", "--workers=4"), ("--image-mb=256", "--workers=4"), "compute.host-sync"
    ),
    "small kernels": Pair(SMALL, (*SMALL, "--graphed=1"), "compute.launch-bound", DEEP),
    "small kernels, by phases": Pair(SMALL, (*SMALL, "--graphed=1"), "compute.launch-bound"),
    "an optimizer in a loop": Pair(("--optimizer=loop", *SMALL), ("--optimizer=fused", *SMALL), "compute.optimizer"),
    "recomputed without need": Pair(("--recompute=1",), ("--recompute=0",), "compute.recompute", FULL),
    "garbage": Pair(
        ("--garbage=1500000", "--cycles=9000", "--item-every=1"), ("--cycles=0", "--item-every=1"), "pause.gc"
    ),
    "checkpoints": Pair(("--save-every=6", "--width=2048"), ("--width=2048",), "checkpoint.stall"),
    "layers for float8": Pair(
        ("--by=engine", *LARGE), ("--by=engine", *LARGE, "--fp8=1"), "precision.fp8", FULL, remark=True
    ),
}  # fmt: skip


@dataclass
class Running:
    process: subprocess.Popen[str]
    folder: Path


def begin(folder: Path, arguments: tuple[str, ...], flags: tuple[str, ...]) -> Running:
    """The job, once it has done with the device."""
    folder.mkdir(parents=True)
    done = folder / "done"
    launcher = () if not any(word.startswith("--by=") for word in arguments) else ("--nproc-per-node", "1")
    command = [
        sys.executable, "-m", "dsprof", "run", "-o", str(folder / "run"), "--no-report", *launcher, *flags, str(JOB),
        *arguments, "--done", str(done),
    ]  # fmt: skip
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    output = open(folder / "output", "w")  # noqa: SIM115 (the process has it until it ends)
    process = subprocess.Popen(command, cwd=folder, env=env, stdout=output, stderr=subprocess.STDOUT, text=True)
    begun = time.monotonic()
    while process.poll() is None and not done.exists() and time.monotonic() - begun < LIMIT_S:
        time.sleep(0.05)
    return Running(process, folder)


def end(running: Running) -> dict[str, Any]:
    """Its findings."""
    try:
        status = running.process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        running.process.kill()
        status = -1
    said = (running.folder / "output").read_text()
    path = running.folder / "run" / "findings.json"
    if status != 0 or not path.exists():
        return {"status": status, "output": said[-2000:]}
    found: dict[str, Any] = json.loads(path.read_text())
    return {"status": 0, "output": said[-6000:], **found, "own": json.loads((running.folder / "done").read_text())}


def brief(found: dict[str, Any]) -> dict[str, Any]:
    if found["status"] != 0:
        return {"failed": found["output"]}
    return {
        "own_step_ms": round(found["own"]["mean_ms"], 3),
        "own_longest_ms": found["own"]["longest"],
        "step_ms": round(found["run"]["step_ms"]["mean"], 3),
        "verdict": found["verdict"]["status"],
        "headline": found["verdict"]["headline"],
        "budget_ms": {part: round(value, 2) for part, value in found["budget"].items() if value},
        "findings": [
            {
                "code": one["code"], "severity": one["severity"], "title": one["title"],
                "gain_ms": [round(one["gain"][key], 3) for key in ("low", "ms", "high")],
                "fix": one["fixes"][0]["title"] if one["fixes"] else None,
            }
            for one in found["findings"][:5]
        ],
        "not_judged": found["not_judged"],
        "warnings": found["capture"]["warnings"],
    }  # fmt: skip


def judged(pair: Pair, fault: dict[str, Any], mended: dict[str, Any] | None) -> dict[str, Any]:
    """What was said, whether that is right, and the saving beside what was predicted."""
    result = {"fault": brief(fault), "mended": mended and brief(mended)}
    if any("failed" in one for one in result.values() if one):
        return {**result, "right": False}
    findings = fault["findings"]
    above = [one["code"] for one in findings if one["severity"] != "info"]
    first = above[0] if above else ""
    said = next((one for one in findings if one["code"] == pair.first), None)
    result["right"] = said is not None if pair.remark else first == pair.first
    if mended is None:
        return result
    saved = fault["own"]["mean_ms"] - mended["own"]["mean_ms"]
    result["saved_ms"] = round(saved, 3)
    result["twin_accused"] = [one["code"] for one in mended["findings"] if one["severity"] != "info"]
    if said is not None:
        gain = said["gain"]
        result["predicted_ms"] = [round(gain[key], 3) for key in ("low", "ms", "high")]
        result["error_percent_of_step"] = round(100 * abs(gain["ms"] - saved) / fault["own"]["mean_ms"], 2)
        result["holds"] = gain["low"] <= saved <= gain["high"]
    return result


def summary(pairs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    priced = [one for one in pairs.values() if "holds" in one]
    return {
        "pairs": len(pairs),
        "right": sum(one["right"] for one in pairs.values()),
        "twins accused": [name for name, one in pairs.items() if one.get("twin_accused")],
        "holds": f"{sum(one['holds'] for one in priced)} of {len(priced)}",
        "median_error_percent_of_step": (
            statistics.median(one["error_percent_of_step"] for one in priced) if priced else None
        ),
    }


def machine() -> dict[str, Any]:
    ask = (
        "import torch; gpu = torch.cuda.is_available(); "
        "print(torch.cuda.get_device_name() if gpu else 'cpu', torch.__version__, sep='\\n')"
    )
    device, torch = subprocess.run(
        [sys.executable, "-c", ask], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return {"device": device, "torch": torch, "python": platform.python_version(), "cores": os.cpu_count()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--keep", type=Path, help="a folder for the runs")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no pair after that")
    args = parser.parse_args()
    done: dict[str, Any] = json.loads(args.output.read_text())["each"] if args.output.exists() else {}
    about = machine()
    limit = time.monotonic() + args.seconds
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.keep or Path(temporary)
        running: dict[str, list[Running]] = {}

        def write(name: str) -> None:
            found = [end(one) for one in running.pop(name)]
            pair = PAIRS[name]
            done[name] = judged(pair, found[0], found[1] if len(found) > 1 else None)
            each = {one: done[one] for one in PAIRS if one in done}
            result = {"machine": about, "summary": summary(each), "each": each}
            args.output.write_text(json.dumps(result, indent=1) + "\n")
            short = {key: of for key, of in done[name].items() if key not in ("fault", "mended")}
            print(name, json.dumps(short), flush=True)
            for which in ("fault", "mended"):
                if done[name][which]:
                    print("   ", which, json.dumps(done[name][which])[:1800], flush=True)

        last = None
        for name, pair in PAIRS.items():
            if args.only not in name or (name in done and not args.only) or time.monotonic() > limit:
                continue
            place = folder / name.replace(" ", "-").replace(":", "").replace(",", "")
            running[name] = [begin(place / "fault", pair.fault, pair.flags)]
            if pair.mended:
                running[name].append(begin(place / "mended", pair.mended, pair.flags))
            if last is not None:
                write(last)
            last = name
        if last is not None:
            write(last)


if __name__ == "__main__":
    main()
