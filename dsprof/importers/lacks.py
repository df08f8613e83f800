"""What an imported trace lacks, for which rules, and how to record it the next time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from dsprof.trace import Trace

FEWEST_STEPS: Final = 5
"""Of fewer, rules that compare steps are not judged."""
COLUMNS: Final = ("kind", "lane", "step", "seq", "group", "source")
DEVICE: Final = "cuda."
COMPARE_STEPS: Final = ("rank.straggler", "data.stall", "data.imbalance", "pause.gc", "checkpoint.stall")
OF_DEVICES: Final = ("compute.launch-bound", "comm.exposed", "compute.host-sync")
OF_MEMORY: Final = ("memory.fragmentation", "memory.headroom", "memory.growth", "memory.oom-risk")
OF_COLLECTIVES: Final = ("comm.small-messages", "comm.exposed", "rank.straggler")


@dataclass(frozen=True)
class Lack:
    """what is not there; codes: of the rules that need it; how to record it."""

    what: str
    codes: tuple[str, ...]
    how: str

    def __str__(self) -> str:
        return f"not in the trace: {self.what} (for {', '.join(self.codes)}); {self.how}"

    def to_dict(self) -> dict[str, object]:
        return {"what": self.what, "codes": list(self.codes), "how": self.how}


@dataclass(frozen=True)
class Contents:
    """imported: from which format. kinds: of rows. steps: of any rank, how many; marked: by the tool. device, memory:
    whether there is any; numbered: share of the collectives of a known group that have a number, None: there are none.
    captured, expected: ranks."""

    imported: str
    kinds: frozenset[str]
    steps: int
    marked: bool
    device: bool
    memory: bool
    numbered: float | None
    captured: int
    expected: int


def contents_of(trace: Trace) -> Contents:
    kinds: set[str] = set()
    steps: set[int] = set()
    marked, device, numbered, collectives = True, False, 0, 0
    for rank in trace.ranks:
        rows = trace.read(rank, COLUMNS)
        kinds |= set(rows["kind"].dropna().unique())
        of_steps = rows[rows["kind"] == "step"]
        steps |= set(of_steps["step"].to_numpy(np.int64).tolist())
        marked = marked and not (of_steps["source"] == "derived").any()
        device = device or any(str(lane).startswith(DEVICE) for lane in rows["lane"].unique())
        comm = rows[(rows["kind"] == "comm") & rows["group"].notna()]
        collectives += len(comm)
        numbered += int(comm["seq"].notna().sum())
    return Contents(
        trace.run.imported, frozenset(kinds), len(steps), marked, device, bool(trace.memory) or "mem" in kinds,
        numbered / collectives if collectives else None, len(trace.ranks), trace.run.world_size or len(trace.ranks),
    )  # fmt: skip


def lacking(contents: Contents) -> list[Lack]:
    """The most important first. Of a trace that has everything, and of what holds no steps by its nature (memory
    snapshots, Flight Recorder dumps), nothing."""
    how = HOW.get(contents.imported, {})
    return [Lack(what(contents), codes, how[key]) for key, (is_lacking, what, codes) in LACKS.items()
            if key in how and is_lacking(contents)]  # fmt: skip


LACKS: Final[Mapping[str, tuple[Callable[[Contents], bool], Callable[[Contents], str], tuple[str, ...]]]] = {
    "ranks": (
        lambda has: has.captured < has.expected,
        lambda has: f"{has.expected - has.captured} of {has.expected} ranks",
        ("rank.straggler", "comm.exposed"),
    ),
    "marks": (lambda has: not has.marked, lambda has: "where steps begin and end", COMPARE_STEPS),
    "steps": (
        lambda has: has.marked and has.steps < FEWEST_STEPS,
        lambda has: f"enough steps ({has.steps} of {FEWEST_STEPS})",
        COMPARE_STEPS,
    ),
    "numbers": (
        lambda has: has.numbered is not None and has.numbered < 1 and has.expected > 1,
        lambda has: "numbers of the collectives, so they are matched by their order",
        OF_COLLECTIVES,
    ),
    "collectives": (
        lambda has: has.numbered is None and has.expected > 1,
        lambda has: "collectives of a known group",
        OF_COLLECTIVES,
    ),
    "device": (lambda has: not has.device, lambda has: "what a device did", OF_DEVICES),
    "launches": (
        lambda has: has.device and "launch" not in has.kinds,
        lambda has: "launches of the host, so steps cannot be replayed",
        ("compute.launch-bound", "data.stall"),
    ),
    "memory": (lambda has: not has.memory, lambda has: "memory of the devices", OF_MEMORY),
}
SNAPSHOT: Final = "torch.cuda.memory._record_memory_history() and _dump_snapshot(), imported beside it"
CHAKRA: Final = "Chakra's format has none: import torch.profiler's own trace of the same run"
HOW: Final[Mapping[str, Mapping[str, str]]] = {
    "kineto": {
        "ranks": "export_chrome_trace on every rank, named rank<N>.json",
        "marks": "call profiler.step() after each step",
        "steps": "torch.profiler.schedule(wait=5, warmup=3, active=8)",
        "numbers": "record with torch 2.6 or later, whose collectives have numbers",
        "collectives": "record with ProfilerActivity.CUDA, which sees the kernels of NCCL",
        "device": "record with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]",
        "launches": "record with ProfilerActivity.CPU, too",
        "memory": f"record with profile_memory=True; or {SNAPSHOT}",
    },
    "nsight": {
        "ranks": "profile every rank: nsys profile -o rank%q{RANK}",
        "marks": "torch.cuda.nvtx.range_push(f'step {n}') and range_pop() around each step",
        "steps": "profile more steps",
        "collectives": "nsys profile --trace=cuda,nvtx",
        "launches": "nsys profile --trace=cuda",
        "memory": SNAPSHOT,
    },
    "chakra": {
        "ranks": "record on every rank: ExecutionTraceObserver and torch.profiler, then chakra_trace_link and "
        "chakra_converter, named so that each file has its rank",
        "marks": f"{CHAKRA}, with profiler.step() after each step",
        "steps": f"{CHAKRA}, of at least five steps",
        "numbers": f"{CHAKRA}, recorded with torch 2.6 or later",
        "collectives": "convert with a Chakra whose nodes have `pg_name` and `comm_size`",
        "device": "record torch.profiler with ProfilerActivity.CUDA before the traces are linked",
        "launches": CHAKRA,
        "memory": SNAPSHOT,
    },
    "chrome": {
        "ranks": "trace every rank, and name them all",
        "marks": "say with `step`, or a rule of kind step, in the mapping file where steps are",
        "steps": "trace more steps",
        "numbers": "say with `seq` in the mapping file where a collective's number is",
        "collectives": "add rules of kind comm, with `group` or `members`, to the mapping file",
        "memory": SNAPSHOT,
    },
}
"""Format -> what may be lacking -> how to record it."""
