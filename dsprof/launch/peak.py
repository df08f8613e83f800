"""What the CPU can compute at most: matrix products, measured when the job has ended, in a process of their own with as
many threads as a rank had and on the same cores. Kept in run.json.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any, Final

from dsprof.run import RunFolder, RunInfo
from dsprof.schema import FOLDER_NAME, host_name

SECONDS: Final = 0.6
"""For all formats together."""
PATIENCE_S: Final = 60
"""Until torch is imported, and all is measured."""

PROGRAM: Final = """
import json, os, sys, time
asked = json.loads(sys.argv[1])
if asked["cpus"]:
    os.sched_setaffinity(0, asked["cpus"])
import torch
torch.set_num_threads(asked["threads"])
found = {}
for name in asked["dtypes"]:
    end = time.perf_counter() + asked["seconds"] / len(asked["dtypes"])
    size, best = 256, 0.0
    with torch.no_grad():
        while True:
            a = torch.randn(size, size).to(getattr(torch, name))
            b = torch.randn(size, size).to(getattr(torch, name))
            a @ b  # sets up what this size and format need
            while True:
                began = time.perf_counter()
                a @ b
                took = time.perf_counter() - began
                best = max(best, 2 * size**3 / took)
                if time.perf_counter() > end or took < 0.02 and size < 2048:
                    break
            if time.perf_counter() > end:
                break
            size *= 2
    found[name] = best
print(json.dumps(found))
"""


def measure(dtypes: list[str], threads: int, cpus: list[int] | None, seconds: float = SECONDS) -> dict[str, float]:
    """Operations a second of the fastest product in each format. Raises OSError, ValueError or SubprocessError."""
    asked = json.dumps({"dtypes": dtypes, "threads": threads, "cpus": cpus, "seconds": seconds})
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("DSPROF", "OMP_", "MKL_"))}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, asked],
        env={**kept, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True, text=True, timeout=PATIENCE_S, check=True,
    )  # fmt: skip
    return {str(name): float(flops) for name, flops in json.loads(done.stdout).items()}


def note_peak(folder: RunFolder, info: RunInfo) -> None:
    """Measure for the ranks of this host that counted operations on the CPU, and put it into run.json. At level full
    only, of a job that ended well, and once a run. Raises as `measure` does."""
    if info.level != "full" or info.status or info.cpu_peaks:
        return
    told = facts_told(folder)
    groups: dict[str, tuple[list[int], dict[str, Any]]] = {}
    for rank, facts in told.items():
        process, counted = facts.get("process"), facts.get("flops")
        if process is None or counted is None or "device" in facts or not counted.get("dtypes"):
            continue
        asked = {"dtypes": counted["dtypes"], "threads": process["threads"], "cpus": process["cpus"]}
        groups.setdefault(json.dumps(asked), ([], asked))[0].append(rank)
    alike: dict[str, dict[str, float]] = {}
    for ranks, asked in groups.values():
        # Cores of one host are taken to be alike: one measurement for all that ask for as many.
        key = json.dumps([asked["dtypes"], asked["threads"], len(asked["cpus"] or ())])
        if key not in alike:
            alike[key] = measure(asked["dtypes"], asked["threads"], asked["cpus"])
        entry = {"host": host_name(), "ranks": sorted(ranks), "threads": asked["threads"], "flops": alike[key]}
        info.cpu_peaks.append(entry)
    if info.cpu_peaks:
        folder.write_info(info)


def facts_told(folder: RunFolder) -> dict[int, dict[str, dict[str, Any]]]:
    """rank -> kind -> the last fact of it that the rank's captures on this host told."""
    found: dict[int, dict[str, dict[str, Any]]] = {}
    for path in sorted(folder.capture.glob("rank*/facts.jsonl")):
        name = re.fullmatch(FOLDER_NAME, path.parent.name)
        if name is None or name["host"] != host_name():
            continue
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                fact = json.loads(line)
                found.setdefault(int(fact["rank"]), {})[str(fact["fact"])] = fact
            except (ValueError, KeyError, TypeError):  # the last line of one that was killed
                continue
    return found
