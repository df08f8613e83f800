"""Importing torch.profiler traces beside HTA (PyPI `traceinsight`), in one run, on the same files.

    python -m venv /tmp/hta && /tmp/hta/bin/pip install traceinsight
    python benchmarks/analysis.py --hta /tmp/hta/bin/python              # eight ranks of half a million events each

The files are real ones repeated (DLRM on eight V100, `$DSPROF_REAL_TRACES`): a step after the other, gzipped, without
the kernels whose launch was not traced (64 each on ranks 1 and 3), which HTA drops from a trace of several steps. HTA
loads them and gives its breakdown, overlap and idle time, and no more; dsprof imports them into a run and goes on to
the verdict. Each in fresh processes, interpreters and imports included; CPU time is that of all of a tool's
processes, memory the sum of what they hold at one moment (proportional set size, looked at ten times a second). HTA
is told to take the last step too, which it leaves out otherwise. Both must give the same times, rank by rank: `agree`
says whether they do, `differences` where not.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

TRACES = Path(os.environ.get("DSPROF_REAL_TRACES", Path(__file__).parents[2] / "shared" / "data" / "traces"))
DLRM = TRACES / "dlrm_8rank"
APART_US = 25_000
"""From one repetition to the next: the longest of the steps takes 20 ms."""
LOOK_EVERY_S = 0.1
TIMES = ("idle_time", "compute_time", "non_compute_time", "kernel_time")
"""Of a rank, us, as both tools call them."""
ROUNDING_US = 1.0

CATEGORY = re.compile(r'"cat": "(\w+)"')
CORRELATION = re.compile(r'"correlation": (\d+)')
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
SHIFTED = re.compile(r'"(ts|correlation|External id|id)": (\d+)|ProfilerStep#(\d+)')

HTA = """
import json, sys
from hta.trace_analysis import TraceAnalysis
traces = TraceAnalysis(trace_dir=sys.argv[1], include_last_profiler_step=True)
times = traces.get_temporal_breakdown(visualize=False)
overlap = traces.get_comm_comp_overlap(visualize=False)
idle = [traces.get_idle_time_breakdown(ranks=[rank], visualize=False) for rank in sorted(traces.t.traces)]
print(times.to_json(orient="records"))
"""


def repeat(source: Path, target: Path, times: int) -> int:
    """The trace `source` as if its step had been taken so many times; how many events that are."""
    text = gzip.decompress(source.read_bytes()).decode()
    head, _, rest = text.partition('"traceEvents": [')
    body, _, tail = rest.rpartition("\n  ]")
    events = [event for event in re.split(r"(?<=\n  \}),(?=\n  \{)", body) if '"ph": "M"' not in event]
    events = launched(events)
    one = ",".join(events)

    def moved(number: int) -> str:
        def shift(match: re.Match[str]) -> str:
            if match[3]:
                return f"ProfilerStep#{int(match[3]) + number}"
            by = number * (APART_US if match[1] == "ts" else 100_000)
            return f'"{match[1]}": {int(match[2]) + by}'

        return SHIFTED.sub(shift, one)

    with gzip.open(target, "wt", compresslevel=4) as file:
        file.write(head + '"traceEvents": [')
        for number in range(times):
            file.write(("," if number else "") + moved(number))
        file.write("\n  ]" + tail)
    return len(events) * times


def launched(events: list[str]) -> list[str]:
    """Without what ran on the device and has no launch among them."""
    categories, correlations = ([pattern.search(event) for event in events] for pattern in (CATEGORY, CORRELATION))
    told = [
        (category is not None and category[1] in ON_DEVICE, correlation[1] if correlation else None)
        for category, correlation in zip(categories, correlations, strict=True)
    ]
    launches = {correlation for on_device, correlation in told if not on_device}
    return [
        event
        for event, (on_device, correlation) in zip(events, told, strict=True)
        if not on_device or correlation in launches
    ]


def watched(command: list[str], **more: Any) -> tuple[dict[str, float], str]:
    """Run it; CPU and wall seconds, and peak memory in MB, of it and all that it starts; what it printed."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as said:
        job = subprocess.Popen(command, stdout=out, stderr=said, text=True, **more)
        peak = 0
        while job.poll() is None:
            peak = max(peak, held(job.pid))
            time.sleep(LOOK_EVERY_S)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        wall = time.perf_counter() - began
        out.seek(0)
        said.seek(0)
        if job.returncode:
            raise SystemExit(f"{command[0]}: ended with {job.returncode}\n{said.read()[-2000:]}")
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return {"cpu_s": round(cpu, 2), "wall_s": round(wall, 2), "peak_mb": round(peak / 1e6)}, out.read()


def held(pid: int) -> int:
    """Bytes that a process and its descendants hold, what they share counted once."""
    total = 0
    try:
        top = psutil.Process(pid)
        for process in [top, *top.children(recursive=True)]:
            try:
                total += process.memory_full_info().pss
            except psutil.Error:
                continue
    except psutil.Error:
        return total
    return total


def dsprof(*words: str) -> list[str]:
    return [sys.executable, "-m", "dsprof", *words]


def measure(python: Path, times: int, rounds: int) -> dict[str, Any]:
    """Both tools in turns."""
    folder = Path(tempfile.mkdtemp(prefix="dsprof-hta-"))
    try:
        traces = folder / "traces"
        traces.mkdir()
        events = sum(repeat(path, traces / path.name, times) for path in sorted(DLRM.glob("*.gz")))
        script = folder / "hta_job.py"
        script.write_text(HTA)
        found: dict[str, Any] = {"hta": [], "dsprof_import": [], "dsprof_analyze": []}
        expected: list[dict[str, float]] = []
        given: list[dict[str, float]] = []
        differences: list[str] = []
        for number in range(rounds):
            run = folder / f"run{number}"
            told, _ = watched(dsprof("import", str(traces), "-o", str(run)))
            found["dsprof_import"].append(told)
            told, text = watched(dsprof("analyze", str(run), "--json"))
            found["dsprof_analyze"].append(told)
            given = json.loads(text)["device"]["ranks"]
            told, text = watched([str(python), str(script), str(traces)])
            found["hta"].append(told)
            expected = json.loads(text.strip().splitlines()[-1])
            differences += unequal(expected, given)
            shutil.rmtree(run)
        told = summary(found, events, len(list(traces.iterdir())), sizes(traces), expected, given)
        return {**told, "agree": not differences, "differences": differences}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def unequal(expected: list[dict[str, float]], given: list[dict[str, float]]) -> list[str]:
    """Where HTA and dsprof give different times of a rank, or only one of them has it, in words."""
    hta = {int(one["rank"]): one for one in expected}
    ours = {int(one["rank"]): one for one in given}
    found = [
        f"rank {rank}: only {'HTA' if rank in hta else 'dsprof'} has it" for rank in sorted(hta.keys() ^ ours.keys())
    ]
    for rank in sorted(hta.keys() & ours.keys()):
        for name in TIMES:
            theirs, mine = hta[rank][f"{name}(us)"], ours[rank][f"{name}_us"]
            if abs(theirs - mine) > ROUNDING_US:
                found.append(f"rank {rank}: {name} of {theirs:,.0f} us by HTA, {mine:,.0f} us by dsprof")
    return found


def sizes(traces: Path) -> float:
    return round(sum(path.stat().st_size for path in traces.iterdir()) / 1e6, 1)


def summary(
    found: dict[str, Any], events: int, ranks: int, megabytes: float, expected: list[dict[str, float]],
    given: list[dict[str, float]],
) -> dict[str, Any]:  # fmt: skip
    """The best of the rounds, and ratios to HTA's."""
    best = {name: min(one["cpu_s"] for one in runs) for name, runs in found.items()}
    peak = {name: max(one["peak_mb"] for one in runs) for name, runs in found.items()}
    whole = best["dsprof_import"] + best["dsprof_analyze"]
    peak_mb = max(peak["dsprof_import"], peak["dsprof_analyze"])
    return {
        "ranks": ranks, "events": events, "gzipped_mb": megabytes, "runs": found,
        "events_per_cpu_second": {
            "hta": round(events / best["hta"]), "dsprof_import": round(events / best["dsprof_import"]),
            "dsprof_to_verdict": round(events / whole),
        },
        "peak_mb": {"hta": peak["hta"], "dsprof": peak_mb},
        "times_as_fast": {
            "import": round(best["hta"] / best["dsprof_import"], 1), "to_verdict": round(best["hta"] / whole, 1),
        },
        "share_of_memory": round(peak_mb / peak["hta"], 3),
        "compute_time_us": {
            "hta": [one["compute_time(us)"] for one in expected],
            "dsprof": [one["compute_time_us"] for one in given],
        },
    }  # fmt: skip
