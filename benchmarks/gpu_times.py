"""What dsprof says that a GPU's streams did, against torch.profiler; and what it costs.

    python benchmarks/gpu_times.py --output benchmarks/results/gpu_times.json     # two minutes, one GPU

One process (a process group of one, over NCCL) trains a transformer under DDP, then under FSDP2, then without either,
while `torch.cuda.set_sync_debug_mode("error")` makes whatever waits for the device raise. Some steps are recorded by
torch.profiler too: how long each of them and its phases took by the kernels there is held against the rows of ours.
Cost: blocks of steps with the capture and without it, in turns, by CPU time and by wall time.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from dsprof.collectors.capture import session  # noqa: E402
from dsprof.run import RunFolder  # noqa: E402
from dsprof.trace import load  # noqa: E402
from dsprof.trace.derive.device_clock import clock_of  # noqa: E402
from dsprof.trace.derive.rows import completed  # noqa: E402

WARM, STEPS, PROFILED = 5, 30, 10
Step = Callable[[], None]


class Layers(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 16, 4 * width, batch_first=True, dropout=0.0) for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def trainer(kind: str, width: int, layers: int, batch: int) -> Step:
    torch.manual_seed(0)
    model: Any = Layers(width, layers).cuda()
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model, device_ids=[0])
    elif kind == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    inputs = torch.randn(batch, 512, width, device="cuda")

    def step() -> None:
        model(inputs).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def opened(folder: Path) -> session.Session:
    os.environ["DSPROF_RUN"] = str(folder)
    capture = session.start()
    assert capture is not None, "the collectors did not start: is DSPROF=0 set?"
    return capture


def compared(kind: str, size: tuple[int, int, int], folder: Path) -> dict[str, Any]:
    step = trainer(kind, *size)
    capture = opened(folder)
    for _ in range(WARM):
        step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    for _ in range(STEPS):
        step()
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    failures = capture.recorder.failures()  # a collector catches what it raises, for waiting too
    assert not failures, failures
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as profiler:
        for _ in range(PROFILED):
            step()
        torch.cuda.synchronize()
    for _ in range(WARM):
        step()
    torch.cuda.synchronize()
    session.stop()
    trace_file = folder / "kineto.json"
    profiler.export_chrome_trace(str(trace_file))
    rows = load(RunFolder(folder)).rows
    return {
        "kind": kind, **against(rows, json.loads(trace_file.read_text())), **communications(rows),
        "clock_error_us": clock_error_us(folder), "steps_in_which_to_wait_raises": STEPS,
        "errors_of_collectors": len(failures),
    }  # fmt: skip


def against(rows: pd.DataFrame, traced: dict[str, Any]) -> dict[str, Any]:
    """How far our ends of the optimizer's kernels on the stream are from those of the profiler."""
    events = [event for event in traced["traceEvents"] if event.get("ph") == "X"]
    launches = {
        event["args"]["correlation"]: event for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }  # fmt: skip
    kernels = [event for event in events if event.get("cat") == "kernel"]
    calls = sorted(
        (event["ts"], event["ts"] + event["dur"]) for event in events
        if event.get("cat") == "user_annotation" and event["name"].startswith("Optimizer.step#")
    )  # fmt: skip
    ends = []
    for begin, end in calls:
        launched = [
            kernel["ts"] + kernel["dur"] for kernel in kernels
            if begin <= launches.get(kernel["args"].get("correlation"), {"ts": -1})["ts"] <= end
        ]  # fmt: skip
        if launched:
            ends.append(max(launched))
    theirs = np.diff(np.array(ends)) / 1e3
    stream = rows[(rows["kind"] == "kernel") & rows["dur_ns"].notna()]
    ours = stream[stream["name"] == "optimizer"].sort_values("start_ns")
    over = (ours["start_ns"] + ours["dur_ns"]).to_numpy(np.int64) / 1e6
    count = len(ends)
    mine = np.diff(over[-WARM - count :][:count])  # those of the profiled steps
    error = 100 * np.abs(mine - theirs) / theirs
    ordinary = np.diff(over)[2 : -WARM - count]
    return {
        "profiled_steps": count,
        "step_ms_by_profiler": round(float(theirs.mean()), 4),
        "step_ms_by_events": round(float(mine.mean()), 4),
        "error_percent_of_mean": round(100 * abs(float(mine.mean() / theirs.mean()) - 1), 4),
        "error_percent_median": round(float(np.median(error)), 4),
        "error_percent_largest": round(float(error.max()), 4),
        "ordinary_step_ms": round(float(np.median(ordinary)), 4),
        "spans": {str(name): int(count) for name, count in stream["name"].value_counts().items() if count},
        "lanes": sorted(set(stream["lane"].astype(str))),
    }


def communications(rows: pd.DataFrame) -> dict[str, Any]:
    comm = rows[rows["kind"] == "comm"]
    waits = rows[(rows["kind"] == "wait") & rows["lane"].astype(str).str.startswith("cuda.")]
    return {
        "communications": len(comm),
        "with_a_device_time": int(comm["dur_ns"].notna().sum()),
        "median_us": round(float(comm["dur_ns"].dropna().astype(float).median()) / 1e3, 2) if len(comm) else None,
        "stream_waits": len(waits),
        "stream_waits_named": int(waits["seq"].notna().sum()),
    }


def clock_error_us(folder: Path) -> float | None:
    from dsprof.trace.capture import read_capture
    from dsprof.trace.derive.records import measured_rows

    rows = measured_rows(read_capture(next((folder / "capture").iterdir())))
    samples = rows[(rows["kind"] == "gauge") & (rows["name"] == "device_clock")]
    doubt = clock_of(completed(rows)).offset(samples["value"].to_numpy(float))[1] if len(samples) else np.empty(0)
    return round(float(np.median(doubt)) / 1e3, 2) if len(samples) else None


def cost(size: tuple[int, int, int], folder: Path, blocks: int, steps: int) -> dict[str, Any]:
    step = trainer("ddp", *size)
    for _ in range(WARM):
        step()
    torch.cuda.synchronize()
    spent: dict[str, list[tuple[float, float]]] = {"off": [], "on": [], "again": []}
    for number in range(blocks):
        for arm in ("off", "on", "again") if number % 2 else ("again", "on", "off"):
            if arm == "on":
                opened(folder / str(number))
            step()
            torch.cuda.synchronize()
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(steps):
                step()
            host = time.process_time() - cpu
            torch.cuda.synchronize()
            spent[arm].append((host / steps, (time.perf_counter() - wall) / steps))
            if arm == "on":
                session.stop()

    def ratio(arm: str, at: int) -> dict[str, float]:
        pairs = [one[at] / other[at] for one, other in zip(spent[arm], spent["off"], strict=True)]
        low, middle, high = np.percentile(pairs, [25, 50, 75])
        return {"median": round(float(middle), 4), "q1": round(float(low), 4), "q3": round(float(high), 4)}

    return {
        "step_ms": round(1e3 * statistics.median(wall for _, wall in spent["off"]), 3),
        "host_ms_a_step": round(1e3 * statistics.median(host for host, _ in spent["off"]), 3),
        **{f"{arm}_to_off": {"cpu": ratio(arm, 0), "wall": ratio(arm, 1)} for arm in ("on", "again")},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--blocks", type=int, default=12)
    args = parser.parse_args()
    os.environ.setdefault("DSPROF_NATIVE", "on")
    store = torch.distributed.TCPStore("127.0.0.1", 0, 1, is_master=True)
    torch.cuda.set_device(0)
    torch.distributed.init_process_group("nccl", store=store, rank=0, world_size=1)
    result: dict[str, Any] = {
        "what": "a GPU's streams by events, against torch.profiler",
        "machine": {"device": torch.cuda.get_device_name(), "python": platform.python_version(),
                    "torch": torch.__version__},
    }  # fmt: skip
    size = (1024, 8, 16)
    with tempfile.TemporaryDirectory() as scratch:
        result["against_profiler"] = []
        for kind in ("plain", "ddp", "fsdp"):
            result["against_profiler"].append(compared(kind, size, Path(scratch) / kind))
            print(json.dumps(result["against_profiler"][-1]), flush=True)
        result["cost"] = cost(size, Path(scratch) / "cost", args.blocks, 40)
        print(json.dumps(result["cost"]))
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
