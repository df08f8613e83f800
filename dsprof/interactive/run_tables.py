"""A run as tidy tables: a row for each thing that is observed, a column for each thing that is known of it.

Times are in ms and begin, where they are points of a run, in s at its first event. COLUMNS says what each column is.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import pandas as pd

from dsprof.analyzer.analysis import Analysis
from dsprof.analyzer.device.comparison import BUS_FACTOR, bus_factor
from dsprof.reports.tables import NS_PER_MS, own_work_ms, step_ms
from dsprof.schema import BUDGET_PARTS
from dsprof.trace import concat_rows

NS_PER_S: Final = 1e9

COLUMNS: Final[dict[str, dict[str, str]]] = {
    "steps": {
        "rank": "global rank",
        "step": "training step, from 0",
        "start_s": "when it began, s since the run's first event",
        "step_ms": "how long it took",
        "ordinary": "whether the budget and the findings are of it: no warm-up, evaluation, checkpoint or stop",
        "own_work_ms": "without what the rank stood still for others",
        "compute_ms": "forward, loss, backward",
        "comm_exposed_ms": "standing still while bytes move",
        "peer_wait_ms": "standing still until the last rank arrives",
        "bubble_ms": "standing still for another stage of the pipeline",
        "data_ms": "waiting for the next batch",
        "optimizer_ms": "gradient clipping and the optimizer's step",
        "offload_ms": "copies to and from the CPU or NVMe",
        "pause_ms": "garbage collection",
        "other_ms": "outside the phases of the loop",
    },
    "collectives": {
        "step": "training step in which it was issued",
        "name": "operator: all_reduce, all_gather, send_recv, ...",
        "purpose": "what it carries: gradient, parameter, activation, ...; missing where that is not known",
        "group": "process group",
        "seq": "its number in the group",
        "bytes": "the larger of a rank's total input and output, as nccl-tests count",
        "ranks": "how many captured ranks took part",
        "start_s": "when the first rank arrived, s since the run's first event",
        "skew_ms": "from the first rank's arrival to the last one's",
        "late_rank": "the last rank to arrive",
        "transfer_ms": "from the last rank's arrival to the end; missing where the end was not measured",
        "busbw_gbps": "bus bandwidth by nccl-tests' formula, GB/s; missing where that has none",
    },
    "pipeline": {
        "rank": "global rank",
        "step": "training step",
        "stage": "of the pipeline",
        "microbatch": "its number in the step",
        "action": "F: forward, B: backward, W: gradients of weights alone",
        "start_ms": "when it began, ms since the first action of its step on any rank",
        "ms": "how long it took",
    },
    "memory": {
        "rank": "global rank",
        "place": "host, or a device such as cuda.0",
        "step": "the step that had ended",
        "allocated": "bytes of tensors in the device's caching allocator",
        "reserved": "bytes that the allocator held",
        "active": "bytes of blocks in use, or that a stream may still use",
        "inactive_split": "bytes of free blocks that cannot go back to the device",
        "resident": "bytes of the process in the host's memory",
        "virtual": "bytes of its address space",
        "allocated_peak": "the most bytes so far, likewise",
        "reserved_peak": "the most bytes so far, likewise",
        "resident_peak": "the most bytes so far, likewise",
        "capacity": "bytes that there are at most for the process",
        "free": "bytes that the device had left",
        "largest_free": "bytes of the largest free block of the allocator's cache",
        "retries": "how often so far the allocator gave its cache back for want of memory",
        "ooms": "how often so far that was not enough",
        "parameters": "bytes of models' parameters; looked at in some steps only, missing in the others",
        "gradients": "bytes, likewise",
        "optimizer_states": "bytes, likewise",
        "buffers": "bytes, likewise",
        "activations": "bytes that were kept for backward when it began, likewise",
    },
    "events": {
        "rank": "global rank",
        "restart": "number of the elastic restart",
        "step": "training step; -1 before the first",
        "kind": "step, phase, module, comm, wait, pipe, copy, kernel, launch, mem, gauge, pause, mark",
        "name": "of what happened: forward, all_reduce, F, gc, ...",
        "lane": "where: main, autograd, comm.<group>, cuda.7, ...",
        "thread": "of the operating system",
        "depth": "nesting within the lane",
        "start_s": "s since the run's first event",
        "start_ns": "on the clock that all ranks share",
        "dur_ns": "how long it took; missing where it never ended, or its end was not measured",
        "ended": "False: it never ended",
        "issue_ns": "when the host asked for it",
        "arrival_ns": "of a communication, when the chain that runs it was ready for it",
        "host_ns": "how long the issuing thread was inside the call",
        "stage": "of the pipeline",
        "microbatch": "of the pipeline",
        "module": "owning module, such as blocks.3.mlp",
        "purpose": "gradient, parameter, activation, ...",
        "group": "process group",
        "seq": "number in the group",
        "peer": "other side of a message",
        "tag": "of a message",
        "root": "of a collective that has one",
        "bytes": "as nccl-tests count",
        "dtype": "of the tensor",
        "value": "of a sample",
        "grad": "of a forward, whether gradients were recorded",
        "corr": "joins a launch to its kernel, a wait to its stream",
        "site": "file:line of the user's code",
        "source": "measured, derived, imported",
    },
    "modules": {
        "module": "its name",
        "calls": "a step",
        "ms": "forward, with the modules called inside, ms a step",
        "own_ms": "without them",
        "backward_ms": "likewise, with the hooks on its gradients; missing where it was not seen",
        "backward_own_ms": "without the modules called inside",
        "recompute_ms": "computed again inside backward, ms a step",
        "gflop": "of its own, a step, in 1e9 floating-point operations; missing where they were not counted",
        "slowest_rank": "on which its own time is longest",
        "slowest_own_ms": "that time",
    },
}
"""Table -> column -> what it is."""


def describe(table: str) -> pd.DataFrame:
    """The columns of a table of this module, and what each is. Raises KeyError for no such table."""
    columns = COLUMNS[table]
    return pd.DataFrame({"column": list(columns), "meaning": list(columns.values())}).set_index("column")


def events(analysis: Analysis) -> pd.DataFrame:
    """All rows of all ranks, by rank and time."""
    rows = analysis.rows
    rows.insert(list(rows.columns).index("start_ns"), "start_s", (rows["start_ns"] - rows["start_ns"].min()) / NS_PER_S)
    return rows[list(COLUMNS["events"])]


def steps(analysis: Analysis) -> pd.DataFrame:
    """A row for each rank and step."""
    found = analysis.steps
    parts = {f"{part}_ms": found[part].astype(float) for part in BUDGET_PARTS}
    table = pd.DataFrame(
        {
            "rank": found["rank"], "step": found["step"],
            "start_s": (found["start_ns"] - _begin(analysis)) / NS_PER_S,
            "step_ms": step_ms(found), "ordinary": found["ordinary"].astype(bool),
            "own_work_ms": own_work_ms(found), **parts,
        }
    )  # fmt: skip
    return table.sort_values(["step", "rank"], ignore_index=True)


def collectives(analysis: Analysis) -> pd.DataFrame:
    """A row for each communication that was matched between ranks, by the last arrival."""
    found = analysis.collectives
    transfer = found["transfer_ns"].astype("float64")
    transfer_ms = (transfer / NS_PER_MS).where(transfer > 0)
    size = found["bytes"].astype("float64")
    table = pd.DataFrame(
        {
            **{name: found[name] for name in ("step", "name", "purpose", "group", "seq", "bytes", "ranks")},
            "start_s": (found["first_ns"] - _begin(analysis)) / NS_PER_S,
            "skew_ms": (found["last_ns"] - found["first_ns"]).astype("float64") / NS_PER_MS,
            "late_rank": found["late_rank"],
            "transfer_ms": transfer_ms,
            "busbw_gbps": size / transfer.where(transfer > 0) * _bus_factor(found, analysis),
        }
    )
    return table.reset_index(drop=True)


def _bus_factor(found: pd.DataFrame, analysis: Analysis) -> np.ndarray:
    """Bus bandwidth over that of the algorithm; NaN where nccl-tests define none, or the group's size is not known."""
    factors = np.full(len(found), np.nan)
    for at, (name, group, ranks) in enumerate(zip(found["name"], found["group"], found["ranks"], strict=True)):
        members = int(analysis.run.group(str(group)).get("size") or ranks)
        if str(name) in BUS_FACTOR and members > 0:
            factors[at] = bus_factor(str(name), members)
    return factors


def pipeline(analysis: Analysis) -> pd.DataFrame:
    """A row for each action of a pipeline's schedule; empty without a pipeline whose schedule was seen."""
    columns = ("rank", "step", "kind", "stage", "microbatch", "name", "start_ns", "dur_ns")
    tables = [analysis.trace.read(rank, columns) for rank in analysis.trace.ranks]
    acted = [table[(table["kind"] == "pipe") & (table["step"] >= 0)] for table in tables]
    found = concat_rows(acted, columns)
    first = found.groupby("step")["start_ns"].transform("min")
    return pd.DataFrame(
        {
            "rank": found["rank"], "step": found["step"], "stage": found["stage"], "microbatch": found["microbatch"],
            "action": found["name"].astype(str),
            "start_ms": (found["start_ns"] - first).astype("float64") / NS_PER_MS,
            "ms": found["dur_ns"].astype("float64") / NS_PER_MS,
        }
    ).sort_values(["step", "start_ms"], kind="stable", ignore_index=True)  # fmt: skip


def memory(analysis: Analysis) -> pd.DataFrame:
    """A row for each rank, place and step after which memory was sampled."""
    return analysis.memory_steps[list(COLUMNS["memory"])].reset_index(drop=True)


def modules(analysis: Analysis) -> pd.DataFrame:
    """A row for each module; empty below level full."""
    return analysis.modules[list(COLUMNS["modules"])].reset_index(drop=True)


def _begin(analysis: Analysis) -> int:
    """When the run's first event began, ns."""
    found = [analysis.trace.read(rank, ("start_ns",))["start_ns"].min() for rank in analysis.trace.ranks]
    return int(min((value for value in found if pd.notna(value)), default=0))
