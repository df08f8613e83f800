"""What the CPU can compute at most: matrix products, measured when the job has ended, in a process of their own with as
many threads as a rank had in the step that was counted, and on the same cores. Each host measures for its own ranks.
Kept in run.json.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from typing import Any, Final

from dsprof import regular_files
from dsprof.names import host_name
from dsprof.ondisk import LARGEST_FACTS
from dsprof.run import RunFolder, RunInfo
from dsprof.schema import FLOPS_FACT

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
        [sys.executable, "-P", "-c", PROGRAM, asked],
        env={**kept, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True, text=True, timeout=PATIENCE_S, check=True,
    )  # fmt: skip
    return {str(name): float(flops) for name, flops in json.loads(done.stdout).items()}


def note_peaks(folder: RunFolder, info: RunInfo) -> None:
    """Put into run.json what the CPUs of a job's hosts can compute, once a run; the others have told theirs, this one
    is measured if it has not. Raises as `measure` does."""
    if info.cpu_peaks:
        return
    told = [peak for part in folder.read_hosts() for peak in part.cpu_peaks]
    here = [] if any(peak.get("host") == host_name() for peak in told) else measure_here(folder, info)
    info.cpu_peaks = [*told, *here]
    if info.cpu_peaks:
        folder.write_info(info)


def measure_here(folder: RunFolder, info: RunInfo) -> list[dict[str, Any]]:
    """What goes into `RunInfo.cpu_peaks` for the ranks of this host that counted operations on the CPU: at level full
    only, of a job that ended well. Raises as `measure` does."""
    if info.level != "full" or info.status:
        return []
    groups: dict[str, tuple[list[int], dict[str, Any]]] = {}
    for rank, facts in facts_told(folder).items():
        asked = _asked(facts)
        if asked is not None:
            groups.setdefault(json.dumps(asked), ([], asked))[0].append(rank)
    found = []
    alike: dict[str, dict[str, float]] = {}
    for ranks, asked in groups.values():
        # Cores of one host are taken to be alike: one measurement for all that ask for as many.
        key = json.dumps([asked["dtypes"], asked["threads"], len(asked["cpus"] or ())])
        if key not in alike:
            alike[key] = measure(asked["dtypes"], asked["threads"], asked["cpus"])
        entry = {"host": host_name(), "ranks": sorted(ranks), "threads": asked["threads"], "flops": alike[key]}
        found.append(entry)
    return found


def _asked(facts: list[dict[str, Any]]) -> dict[str, Any] | None:
    """What is to be measured for a rank that told these facts; None: nothing, it counted none or has a device."""
    last = {str(fact["fact"]): fact for fact in facts}
    counted = [row for fact in facts if fact["fact"] == FLOPS_FACT for row in fact.get("operations", ())]
    dtypes = sorted({str(dtype) for _, _, dtype, _ in counted} - {""})
    if "process" not in last or "device" in last or not dtypes:
        return None
    # A script may set its threads after the capture was opened: what counts is what it had in the step.
    threads = last[FLOPS_FACT].get("torch_threads") or last["process"]["threads"]
    return {"dtypes": dtypes, "threads": threads, "cpus": last["process"]["cpus"]}


def facts_told(folder: RunFolder) -> dict[int, list[dict[str, Any]]]:
    """rank -> what its captures on this host told."""
    found: dict[int, list[dict[str, Any]]] = {}
    for name, path in folder.captures():
        if name.host != host_name():
            continue
        with suppress(OSError):
            for line in regular_files.read_text(path / "facts.jsonl", LARGEST_FACTS).splitlines():
                with suppress(ValueError):  # the last line of one that was killed
                    found.setdefault(name.rank, []).append(regular_files.parse_json(line))
    return found
