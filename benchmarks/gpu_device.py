"""The collectors of devices and of waits for them, on one GPU.

    python benchmarks/gpu_device.py --output FILE        # less than a minute; writes FILE as JSON
    python benchmarks/gpu_device.py --device cpu ...     # the same without a GPU, to try the script: nothing to compare

`gauges`: a model trains under dsprof's collectors while nvidia-smi is asked every second. Each of its answers is held
against what the collector read within WITHIN_S of it: it agrees if it lies between the least and the most of these,
give or take a tolerance, since either looks at another moment of a second.

`sites`: calls that wait for the device, each behind a few ms of work that was queued for it: the row of each must name
its line, its call, and be as long as that work; calls that do not wait must have none.

`cost`: `.item()` of a tensor on an idle device, in blocks that take turns: before the hook was ever installed (once),
with it and nobody listening, and recording; the same for a copy within the device, which is not recorded, and for
`.item()` on the host. Differences are medians over pairs of blocks, with a bootstrap's interval.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

WITHIN_S = 1.6
FIELDS = {
    "utilization.gpu": ("device.utilization_percent", 1, 20),
    "utilization.memory": ("device.memory_utilization_percent", 1, 20),
    "memory.used": ("device.memory_used_bytes", 2**20, 64 * 2**20),
    "memory.total": ("device.memory_total_bytes", 2**20, 2**20),
    "power.draw": ("device.power_w", 1, 40),
    "enforced.power.limit": ("device.power_limit_w", 1, 0.5),
    "clocks.sm": ("device.sm_clock_mhz", 1, 60),
    "clocks.max.sm": ("device.sm_clock_max_mhz", 1, 0),
    "clocks.mem": ("device.memory_clock_mhz", 1, 30),
    "clocks.max.mem": ("device.memory_clock_max_mhz", 1, 0),
    "temperature.gpu": ("device.temperature_c", 1, 4),
    "ecc.errors.corrected.volatile.total": ("device.ecc_corrected", 1, 0),
    "ecc.errors.uncorrected.volatile.total": ("device.ecc_uncorrected", 1, 0),
    "pcie.link.gen.current": ("device.pcie_generation", 1, 0),
    "pcie.link.gen.max": ("device.pcie_generation_max", 1, 0),
    "pcie.link.width.current": ("device.pcie_width", 1, 0),
    "pcie.link.width.max": ("device.pcie_width_max", 1, 0),
    "clocks_event_reasons.active": ("device.clock_reasons", 1, None),
}
"""nvidia-smi's field -> gauge, what a unit of the field is in the gauge's, tolerance; None: one of the readings must be
the same."""
SELDOM = ("max", "total", "limit", "ecc", "pcie")
"""Parts of the names of what is read seldom, as it hardly changes: there the last reading counts."""
LEAST_AGREE = 0.9
FEWEST_COMPARED = 12
"""Of FIELDS, on a GPU that tells of itself."""


# --- gauges ---------------------------------------------------------------------------------------


def ask_smi(fields: list[str], index: str) -> tuple[float, dict[str, float]]:
    """The moment (s, monotonic) and the values that nvidia-smi gives; a field that it does not tell is left out."""
    before = time.monotonic()
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits", "-i", index]
    said = subprocess.run(command, capture_output=True, text=True, timeout=20)
    when = (before + time.monotonic()) / 2
    if said.returncode:
        raise RuntimeError(said.stdout.strip() or said.stderr.strip())
    return when, parse(fields, said.stdout)


def parse(fields: list[str], line: str) -> dict[str, float]:
    found = {}
    for field, text in zip(fields, line.strip().splitlines()[0].split(","), strict=True):
        try:
            found[field] = float(int(text, 16) if "0x" in text else float(text))
        except ValueError:  # [N/A], [Not Supported]
            continue
    return found


def known_fields(index: str) -> list[str]:
    """Those of FIELDS that this nvidia-smi knows."""
    try:
        ask_smi([*FIELDS], index)
        return [*FIELDS]
    except RuntimeError:
        known = []
        for field in FIELDS:
            try:
                ask_smi([field], index)
                known.append(field)
            except RuntimeError:
                continue
        return known


def agrees(
    said: float, when: float, times: np.ndarray, values: np.ndarray, tolerance: float | None, gauge: str
) -> bool:
    """Whether what nvidia-smi said then is what the collector read around it."""
    near = np.abs(times - when) <= WITHIN_S
    if any(part in gauge for part in SELDOM):
        near = near | (np.arange(len(times)) == max(int(np.searchsorted(times, when)) - 1, 0))
    around = values[near]
    if tolerance is None:
        return bool((around == said).any())
    return bool(len(around)) and bool(around.min() - tolerance <= said <= around.max() + tolerance)


def train(device: torch.device, seconds: float, width: int, capture: Any, index: str | None) -> list[Any]:
    """Train for so long; what nvidia-smi said meanwhile."""
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(4))).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    batch = torch.randn(width, width, device=device)
    said: list[Any] = []
    over = threading.Event()

    def ask() -> None:
        fields = known_fields(index or "0")
        while not over.wait(0.7):
            said.append(ask_smi(fields, index or "0"))

    asking = threading.Thread(target=ask)
    if index is not None:
        asking.start()
    until = time.monotonic() + seconds
    steps = 0
    while time.monotonic() < until:
        for _ in range(5):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            steps += 1
        if device.type == "cuda":
            torch.cuda.current_stream().synchronize()
    over.set()
    if index is not None:
        asking.join()
    return said


def compare(said: list[Any], rows: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field, (gauge, unit, tolerance) in FIELDS.items():
        mine = rows[(rows["kind"] == "gauge") & (rows["name"] == gauge)].sort_values("start_ns")
        times, values = mine["start_ns"].to_numpy(np.float64) / 1e9, mine["value"].to_numpy(np.float64)
        asked = [(when, told[field] * unit) for when, told in said if field in told]
        good = [agrees(value, when, times, values, tolerance, gauge) for when, value in asked]
        found[gauge] = {
            "field": field,
            "readings": len(values),
            "asked": len(asked),
            "agree": sum(good),
            "read": _range(values),
            "said": _range(np.array([value for _, value in asked])),
            "ok": sum(good) >= LEAST_AGREE * len(good),
        }
    return found


def _range(values: np.ndarray) -> list[float] | None:
    return [float(values.min()), float(values.max())] if len(values) else None


# --- sites ----------------------------------------------------------------------------------------


def sites(device: torch.device) -> list[dict[str, Any]]:
    """What each line should have recorded: call, line, least ms; call None: nothing."""
    x = torch.arange(1.0, 9.0, device=device)
    pinned, plain = torch.ones(1 << 20).pin_memory(), torch.ones(1 << 20)
    into = torch.empty(1 << 20, device=device)
    back = torch.empty(1 << 20).pin_memory()
    stream, event = torch.cuda.current_stream(), torch.cuda.Event()
    cycles = 40_000_000
    torch.cuda._sleep(cycles)
    bool(x[0] > 0)  # what runs for the first time is loaded, which waits by itself
    x.nonzero(), x[x > 3]
    torch.cuda.synchronize()
    began = time.perf_counter()
    torch.cuda._sleep(cycles)
    torch.cuda.synchronize()
    work_ms = (time.perf_counter() - began) * 1e3
    wanted: list[dict[str, Any]] = []

    def expect(call: str | None, least_ms: float = 0.8 * work_ms) -> None:
        """Of the line before."""
        wanted.append({"call": call, "line": sys._getframe(1).f_lineno - 1, "least_ms": least_ms})

    torch.cuda._sleep(cycles)
    x[2].item()
    expect("item")
    torch.cuda._sleep(cycles)
    x.cpu()
    expect("copy to host")
    torch.cuda._sleep(cycles)
    x.tolist()
    expect("copy to host")
    torch.cuda._sleep(cycles)
    bool(x[0] > 0)
    expect("item")
    torch.cuda._sleep(cycles)
    x.nonzero()
    expect("nonzero")
    torch.cuda._sleep(cycles)
    x[x > 3]
    expect("nonzero")
    torch.cuda._sleep(cycles)
    into.copy_(plain)
    expect("copy to device")
    torch.cuda._sleep(cycles)
    into.copy_(pinned, non_blocking=True)
    expect(None)
    back.copy_(into, non_blocking=True)
    expect(None)
    event.record()
    event.synchronize()
    expect("Event.synchronize")
    torch.cuda._sleep(cycles)
    stream.synchronize()
    expect("Stream.synchronize")
    torch.cuda._sleep(cycles)
    torch.cuda.synchronize()
    expect("torch.cuda.synchronize")
    torch.nn.utils.clip_grad_norm_([_with_gradient(x)], 1.0, error_if_nonfinite=True)
    expect("item", 0.0)
    return wanted


def _with_gradient(x: torch.Tensor) -> torch.Tensor:
    parameter = torch.nn.Parameter(torch.ones_like(x))
    parameter.grad = torch.ones_like(x)
    return parameter


def check_sites(wanted: list[dict[str, Any]], rows: Any) -> list[dict[str, Any]]:
    for expected in wanted:
        mine = rows[rows["site"].astype(str) == f"{__file__}:{expected['line']}"]
        expected["rows"] = [
            {"call": str(call), "ms": float(ns) / 1e6}
            for call, ns in zip(mine["purpose"], mine["dur_ns"].fillna(-1), strict=True)
        ]
        calls = [row["call"] for row in expected["rows"]]
        long_enough = any(row["ms"] >= expected["least_ms"] for row in expected["rows"])
        expected["ok"] = not calls if expected["call"] is None else expected["call"] in calls and long_enough
    return wanted


# --- cost -----------------------------------------------------------------------------------------


def block(call: Callable[[], Any], times: int) -> float:
    """us a call."""
    began = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - began) / times * 1e6


def calls_of(device: torch.device) -> dict[str, tuple[Callable[[], Any], int]]:
    x, host = torch.ones(1, device=device), torch.ones(1)
    one, other = torch.ones(64, device=device), torch.ones(64, device=device)

    def copy() -> None:
        one.copy_(other)

    return {"item": (x.item, 1000), "copy within the device": (copy, 1000), "item on the host": (host.item, 5000)}


def cost(device: torch.device, switch: Callable[[bool], None], before: dict[str, float], pairs: int) -> dict[str, Any]:
    found = {}
    for name, (call, times) in calls_of(device).items():
        arms: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(pairs):
            for on in random.sample([True, False], 2):
                switch(on)
                block(call, 20)
                arms[on].append(block(call, times))
                if device.type == "cuda":
                    torch.cuda.synchronize()
        differences = [on - off for on, off in zip(arms[True], arms[False], strict=True)]
        draws = sorted(statistics.median(random.choices(differences, k=len(differences))) for _ in range(2000))
        found[name] = {
            "before_us": before[name],
            "listening_to_nobody_us": statistics.median(arms[False]),
            "recording_us": statistics.median(arms[True]),
            "difference_us": {"median": statistics.median(differences), "low": draws[50], "high": draws[1949]},
        }
    switch(True)
    return found


# --- all of it ------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--seconds", type=float, default=15.0, help="how long the model trains")
    parser.add_argument("--pairs", type=int, default=15, help="pairs of blocks")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA GPU here; to try the script without one write --device cpu")
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from dsprof.collectors.capture import session
    from dsprof.collectors.native import NativeRecorder, build
    from dsprof.trace.capture import read_capture
    from dsprof.trace.derive import trace_rows

    said = []
    build.ensure(Path(sys.executable), said.append)
    device = torch.device(args.device)
    on_gpu = device.type == "cuda"
    properties = torch.cuda.get_device_properties(0) if on_gpu else None
    before = {
        name: statistics.median(block(call, times) for _ in range(5))
        for name, (call, times) in calls_of(device).items()
    }

    with tempfile.TemporaryDirectory() as scratch:
        os.environ["DSPROF_RUN"] = scratch
        began = time.monotonic()
        capture = session.start()
        assert capture is not None, "the collectors did not start"
        native = isinstance(capture.recorder, NativeRecorder)
        uuid = f"GPU-{properties.uuid}" if properties is not None else None
        answers = train(device, args.seconds, 6144 if on_gpu else 128, capture, uuid)
        wanted = sites(device) if on_gpu else []
        recorder: Any = capture.recorder

        def switch(on: bool) -> None:
            if not native or not on_gpu:
                return
            if on:
                recorder.install_syncs()
            else:
                recorder.uninstall_syncs()

        costs = cost(device, switch, before, args.pairs)
        session.stop()
        took = time.monotonic() - began
        (folder,) = (Path(scratch) / "capture").iterdir()
        read = read_capture(folder)
        rows = trace_rows(read, 0, 0)
        gauges = compare(answers, rows)
        looks = rows[(rows["kind"] == "gauge") & rows["name"].astype(str).str.startswith("device.")]
        names = rows.loc[rows["kind"] == "gauge", "name"].astype(str)
        apart = np.diff(np.sort(looks["start_ns"].to_numpy(np.int64)))
        edges = np.flatnonzero(apart > 400_000_000)
        inside = np.split(np.sort(looks["start_ns"].to_numpy(np.int64)), edges + 1)
        checked = check_sites(wanted, rows)
        result = {
            "device": properties.name if properties is not None else "cpu",
            "driver": next((fact["driver"] for fact in read.facts if fact["fact"] == "gpu"), None),
            "torch": torch.__version__,
            "python": sys.version.split()[0],
            "native": native,
            "build": said,
            "seconds": round(took, 1),
            "facts": [fact for fact in read.facts if fact["fact"] in ("gpu", "note", "host_sync", "device")],
            "errors": read.errors,
            "asked": len(answers),
            "gauges": gauges,
            "not_told": sorted(gauge for gauge, told in gauges.items() if not told["readings"]),
            "other_gauges": sorted(set(looks["name"].astype(str)) - set(gauges)),
            "ms_a_look": [round((int(look[-1]) - int(look[0])) / 1e6, 2) for look in inside if len(look) > 1],
            "host_gauges": sorted({name for name in names if name.startswith(("host.", "process."))}),
            "sites": checked,
            "cost": costs,
        }  # fmt: skip
    result["ok"] = {
        "gauges": all(told["ok"] for told in gauges.values()),
        "most gauges were compared": not on_gpu
        or sum(told["asked"] > 0 for told in gauges.values()) >= FEWEST_COMPARED,
        "sites": all(expected["ok"] for expected in checked),
        "item costs less than 1 us more": costs["item"]["difference_us"]["median"] < 1.0,
        "no errors inside": not result["errors"],
    }
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["ok"], indent=1))
    return 0 if all(result["ok"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
