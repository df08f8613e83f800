"""Traces of torch.profiler, written by hand: events, and the layout that Kineto gives them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

Event = dict[str, Any]


def complete(cat: str, name: str, ts: float, dur: float, tid: int | str = 1, **args: Any) -> Event:
    """An event that has a duration; times in microseconds."""
    event = {"ph": "X", "cat": cat, "name": name, "pid": 9, "tid": tid, "ts": ts, "dur": dur}
    return {**event, "args": args} if args else event


def op(name: str, ts: float, dur: float, tid: int = 1) -> Event:
    return complete("cpu_op", name, ts, dur, tid, **{"External id": 1, "Ev Idx": 0})


def note(name: str, ts: float, dur: float, tid: int = 1, **args: Any) -> Event:
    return complete("user_annotation", name, ts, dur, tid, **args)


def call(corr: int, ts: float, dur: float = 5, tid: int = 1, name: str = "cudaLaunchKernel") -> Event:
    return complete("cuda_runtime", name, ts, dur, tid, correlation=corr, cbid=211)


def kernel(name: str, corr: int, ts: float, dur: float, stream: int = 7, **args: Any) -> Event:
    return complete("kernel", name, ts, dur, stream, device=0, stream=stream, correlation=corr, **args)


def copy(name: str, corr: int, ts: float, dur: float, stream: int = 7, size: int = 64) -> Event:
    return complete("gpu_memcpy", name, ts, dur, stream, device=0, stream=stream, correlation=corr, bytes=size)


def memory(ts: float, allocated: int, reserved: int, device: int = 0, kind: int = 1) -> Event:
    args = {"Device Type": kind, "Device Id": device, "Bytes": 512, "Total Allocated": allocated}
    args["Total Reserved"] = reserved
    return {"ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]", "pid": 9, "tid": 1, "ts": ts,
            "args": args}  # fmt: skip


def arrow(corr: int, ts: float, phase: str = "s") -> Event:
    return {"ph": phase, "id": corr, "pid": 9, "tid": 1, "ts": ts, "cat": "ac2g", "name": "ac2g"}


def as_kineto(events: list[Event], **about: Any) -> str:
    """The layout that the events of a real trace have."""
    blocks = []
    for event in events:
        head = [key for key in event if key not in ("ts", "dur", "args")]
        lines = [", ".join(f'"{key}": {json.dumps(event[key])}' for key in head)]
        lines.append(", ".join(f'"{key}": {json.dumps(event[key])}' for key in ("ts", "dur") if key in event))
        if isinstance(event.get("args"), dict):
            inner = ", ".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in event["args"].items())
            lines.append('"args": {\n      ' + inner + "\n    }")
        elif "args" in event:
            lines.append(f'"args": {json.dumps(event["args"])}')
        blocks.append("  {\n    " + ",\n    ".join(lines) + "\n  }")
    beside = "".join(f'  "{key}": {json.dumps(value)},\n' for key, value in about.items())
    text = '{\n  "schemaVersion": 1,\n' + beside + '  "traceEvents": [\n' + ",\n".join(blocks)
    return text + '\n  ],\n  "traceName": "../../etc/passwd"\n}\n'


def write(folder: Path, text: str | bytes, name: str = "rank0.json") -> Path:
    """Gzipped if its name says so."""
    folder.mkdir(parents=True, exist_ok=True)
    data = text if isinstance(text, bytes) else text.encode()
    path = folder / name
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return path


COLLECTIVE = {
    "Collective name": "allreduce", "In msg nelems": 1000, "Out msg nelems": 1000, "Group size": 2, "dtype": "Float",
    "Process Group Name": "0", "Process Group Description": "default_pg", "Process Group Ranks": "[0, 1]",
}  # fmt: skip


def training(
    first: int = 3, steps: int = 1, late_us: float = 0, args: dict[str, Any] | None = None, adam: float = 800
) -> list[Event]:
    """Steps of 1000 us: forward, backward with an all-reduce beside its second kernel, optimizer.

    Stream 7 computes from 50 to 150, 200 to 300, 400 to 500 and 800 to 850; stream 20 communicates from 410 (and
    `late_us`) to 600. All kernels of stream 7 are launched after the ones before them have ended. `adam`: when the last
    one begins.
    """
    events: list[Event] = []
    for number in range(first, first + steps):
        base, corr = 1000 * (1 + number - first), 10 * number
        events += [
            note(f"ProfilerStep#{number}", base, 1000),
            op("aten::linear", base + 10, 190), op("aten::addmm", base + 12, 60),
            call(corr + 1, base + 20), kernel("gemm", corr + 1, base + 50, 100), arrow(corr + 1, base + 20),
            call(corr + 2, base + 160), kernel("gemm", corr + 2, base + 200, 100), arrow(corr + 2, base + 200, "f"),
            op("autograd::engine::evaluate_function: AddmmBackward0", base + 300, 300, tid=2),
            call(corr + 3, base + 350, tid=2), kernel("gemm", corr + 3, base + 400, 100),
            note("nccl:all_reduce", base + 380, 40, 2, **{"Input Dims": [[1000]], "Input type": ["float"]}),
            call(corr + 4, base + 400, tid=2),
            kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*)", corr + 4, base + 410 + late_us,
                   190 - late_us, 20, **({**args, "Seq": number} if args else {})),
            note("Optimizer.step#SGD.step", base + 700, 200),
            call(corr + 5, base + adam - 10), kernel("adam", corr + 5, base + adam, 50),
        ]  # fmt: skip
    return events


def two_ranks(folder: Path, steps: int = 1, args: dict[str, Any] | None = None) -> Path:
    """Rank 1 comes to its all-reduce 140 us after rank 0."""
    for rank, late in enumerate((0, 140)):
        about = {"distributedInfo": {"backend": "nccl", "rank": rank, "world_size": 2}}
        write(folder, as_kineto(training(steps=steps, late_us=late, args=args), **about), f"t{rank}.pt.trace.json.gz")
    return folder
