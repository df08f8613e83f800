"""JSON of the Trace Event Format: chrome://tracing, ui.perfetto.dev, and programs that read torch.profiler's traces.

Times are microseconds from the first row on. Each rank is a process, each track a thread. Steps, kernels, copies,
launches and a device's collectives have torch.profiler's names, categories and arguments, so that tools for these
traces read them, too. HTA takes a file a rank, and what it finds first as "rank" for its number.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, Any, Final

import pandas as pd

from dsprof.analyzer.text import clean
from dsprof.exported import ABOUT, COLLECTIVE, PROFILER_STEP

from .about import about_run
from .slices import Selection, details, lanes, marks, records, samples

if TYPE_CHECKING:
    from dsprof.analyzer.analysis import Analysis

CATEGORIES: Final = {"kernel": "kernel", "copy": "gpu_memcpy", "launch": "cuda_runtime"}
DEVICE: Final = "cuda."


def write(analysis: Analysis, file: IO[bytes], selection: Selection) -> int:
    """Write the run to `file`; how many events."""
    first = (analysis.trace.read(rank, ["start_ns"])["start_ns"].min() for rank in selection.ranks)
    begins = [int(begin) for begin in first if not pd.isna(begin)]
    zero = min(begins, default=0)
    told = json.dumps({**about_run(analysis), "zero_ns": zero}, default=str)
    about = {"rank": selection.ranks[0] if len(selection.ranks) == 1 else None, "world_size": analysis.ranks_expected}
    file.write(b'{"displayTimeUnit": "ms", "distributedInfo": %s,\n' % json.dumps(about).encode())
    file.write(b'"%s": %s,\n"traceEvents": [' % (ABOUT.encode(), told.encode()))
    count, begun = 0, False
    for rank in selection.ranks:
        for event in _events(rank, selection.of(analysis.trace.read(rank)), zero):
            file.write(b",\n" if begun else b"\n")
            file.write(json.dumps(event).encode())
            count += event["ph"] != "M"
            begun = True
    file.write(b"\n]}\n")
    return count


def _events(rank: int, rows: pd.DataFrame, zero: int) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
    yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
    for number, (name, spans) in enumerate(lanes(rows)):
        yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": {"name": clean(name)}}
        for row in records(spans):
            category, called, args = _as_torch_profiler(row)
            yield {
                "ph": "X", "cat": category, "name": called, "pid": rank, "tid": number,
                "ts": (int(row["start_ns"]) - zero) / 1e3, "dur": int(row["dur_ns"]) / 1e3,
                "args": {**details(row), **args, **_of_a_device(row)},
            }  # fmt: skip
    for row in records(marks(rows)):
        yield {
            "ph": "i", "s": "p", "cat": "mark", "name": clean(row["name"]), "pid": rank, "tid": 0,
            "ts": (int(row["start_ns"]) - zero) / 1e3, "args": details(row),
        }  # fmt: skip
    for name, values in samples(rows):
        for row in records(values):
            yield {
                "ph": "C", "name": clean(name), "pid": rank, "ts": (int(row["start_ns"]) - zero) / 1e3,
                "args": {"value": float(row["value"])},
            }  # fmt: skip


def _as_torch_profiler(row: dict[str, Any]) -> tuple[str, str, dict[str, Any]]:
    """Category, name, and what else it tells, in torch.profiler's words where it has any: a device's collective is a
    kernel of NCCL's, and a step is called by its number."""
    kind, name = str(row["kind"]), clean(row["name"])
    if kind == "comm" and str(row.get("lane") or "").startswith(DEVICE):
        return "kernel", f"ncclDevKernel_{name}", {COLLECTIVE: name}
    if kind == "step" and name == "step":
        return "user_annotation", f"{PROFILER_STEP}{int(row['step'])}", {}
    return CATEGORIES.get(kind, kind), name, {}


def _of_a_device(row: dict[str, Any]) -> dict[str, Any]:
    """`stream`, `device` and `correlation` as torch.profiler calls them."""
    found: dict[str, Any] = {}
    lane, corr = str(row.get("lane") or ""), row.get("corr")
    if lane.startswith(DEVICE):
        *device, stream = lane.removeprefix(DEVICE).split(".")
        found = {"stream": int(stream) if stream.isdigit() else 0, "device": int(device[0]) if device else 0}
    if corr is not None and corr is not pd.NA:
        found["correlation"] = int(corr)
    return found
