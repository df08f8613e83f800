"""A small simulated data-parallel job, written as the records its ranks would have captured. No torch, no clock."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd

from dsprof.ondisk import USUAL_FAMILY, Family, Flag, State
from dsprof.run import RankExit, RankInfo, RunInfo
from dsprof.schema import Kind
from dsprof.trace import Trace
from dsprof.trace.capture import Capture
from dsprof.trace.derive import trace_rows
from dsprof.trace.records import ABSENT, FIELDS, Array, empty, encode

MS = 1_000_000
NAMES = {
    1: "data", 2: "forward", 3: "backward", 4: "optimizer", 5: "all_reduce", 6: "0", 7: "gc", 8: "cpu_seconds",
    9: "training_thread_cpu_seconds", 10: "core_wait_seconds", 11: "loader_start", 12: "broadcast", 13: "compile",
    14: "stack",
}  # fmt: skip
DATA, FORWARD, BACKWARD, OPTIMIZER, ALL_REDUCE, GROUP, GC, CPU, THREAD_CPU, CORE_WAIT, LOADER_START = [*NAMES][:11]
BROADCAST, COMPILE, STACK_SAMPLE = [*NAMES][11:]
FIRST_GAUGE = 100
"""Number of the name of the first gauge of `Job.gauges`."""

PerStep = Callable[[int, int], float]
"""(rank, step) -> ms."""


def constant(ms: float) -> PerStep:
    return lambda rank, step: ms


@dataclass
class Job:
    """What each rank does in each step, in ms; `jitter` is the relative noise of each piece of work."""

    ranks: int = 2
    steps: int = 40
    data: PerStep = lambda rank, step: 1
    forward: PerStep = lambda rank, step: 40
    backward: PerStep = lambda rank, step: 80
    optimizer: PerStep = lambda rank, step: 5
    optimizer_number: int | None = None
    """Of the optimizer, as the fact of it has it."""
    gc: PerStep = lambda rank, step: 0
    compiling: PerStep = lambda rank, step: 0
    """How long torch.compile takes in forward, beside what forward takes."""
    tokens: Callable[[int, int], int] = lambda rank, step: 1024
    buckets: tuple[int, ...] = (1 << 20, 4 << 20)
    """Bytes of each gradient bucket, in the order they become ready."""
    latency_ms: float = 0.2
    ms_per_mib: float = 1.0
    jitter: float = 0.01
    seed: int = 0
    cpu_share: float = 0.5
    """CPU time of a rank's training thread, as a share of its own work."""
    data_cpu_share: float | None = None
    """The same of its loading, where that differs."""
    core_wait: float = 0.0
    """How long it wants a core, as a share of its own work."""
    crowded: PerStep = lambda rank, step: 0
    """How long it wants a core beside that."""
    gauges: dict[str, PerStep] = field(default_factory=dict)
    """Other gauges, and by how many ms each rises in a step."""
    pause_before: float = 0.0
    """ms in which a rank does something before a step that no phase covers."""
    stacks: Callable[[int, int], Sequence[tuple[float, int]]] = lambda rank, step: ()
    """Samples of a step: how many ms after its begin, and the number of the stack."""
    cores: int = 64
    cpus: Callable[[int], list[int]] | None = None
    """Rank -> the cores it is bound to; None: any of `cores`, by a capture that tells only how many."""
    host_cores: int | None = None
    """How many its host has, as far as the capture tells."""
    loader: int | None = None
    """Number of its DataLoader, from 1."""
    restart: PerStep = lambda rank, step: 0
    """How long it takes to start the DataLoader, in the steps in which it does."""
    first_wait: float = 0.0
    """How much longer the first batch takes after such a start."""
    evaluation: PerStep = lambda rank, step: 0
    """How long it evaluates before the step, half of it in another DataLoader, whose number is the next."""
    threads: int = 1
    """With which torch computes."""
    beside: float = 0.0
    """CPU time of a rank's other threads, as a share of its training thread's."""
    facts: list[dict[str, Any]] = field(default_factory=list)
    exits: list[RankExit] = field(default_factory=list)

    def captures(self) -> dict[int, Capture]:
        draw = np.random.default_rng(self.seed)
        records: dict[int, list[tuple[int, ...]]] = {rank: [] for rank in range(self.ranks)}
        now = np.full(self.ranks, 1e6)  # ms
        cpu, wanted = np.zeros(self.ranks), np.zeros(self.ranks)
        others = np.zeros((len(self.gauges), self.ranks))
        seq = 0

        def work(ms: float) -> float:
            return ms * max(1 + self.jitter * draw.standard_normal(), 0.1)

        for step in range(self.steps):
            back_starts, ready = np.zeros(self.ranks), np.zeros((self.ranks, len(self.buckets)))
            for rank in range(self.ranks):
                add = records[rank].append
                begin, number = now[rank], self.loader
                for after, stack in self.stacks(rank, step):
                    add(_record(Kind.GAUGE, STACK_SAMPLE, begin + after, begin + after, value=float(stack)))
                now[rank] += self.pause_before
                begin = now[rank]
                if half := self.evaluation(rank, step) / 2:
                    add(_record(Kind.PHASE, DATA, begin, begin + half, value=(number or 0) + 1))
                    add(_record(Kind.PHASE, FORWARD, begin + half, begin + 2 * half, value=self.tokens(rank, step)))
                    begin = now[rank] = begin + 2 * half
                start = self.restart(rank, step)
                if start:
                    start = work(start)
                    add(_record(Kind.PHASE, LOADER_START, begin, begin + start, value=number))
                    begin += start
                spent = work(self.data(rank, step) + self.first_wait * bool(start))
                add(_record(Kind.PHASE, DATA, begin, begin + spent, value=number))
                begin += spent
                loading = begin - now[rank]
                pause = self.gc(rank, step)
                if pause:
                    add(_record(Kind.PAUSE, GC, begin, begin + pause, value=2.0))
                    begin += pause
                spent = work(self.forward(rank, step))
                compiled = self.compiling(rank, step)
                if compiled:
                    add(_record(Kind.PHASE, COMPILE, begin, begin + compiled))
                    spent += compiled
                add(_record(Kind.PHASE, FORWARD, begin, begin + spent, self.tokens(rank, step), Flag.GRAD))
                begin += spent
                back_starts[rank] = begin
                spent = work(self.backward(rank, step))
                share = np.cumsum(self.buckets) / sum(self.buckets) if self.buckets else np.ones(0)
                ready[rank] = begin + spent * share
                used = (begin - now[rank] - loading + spent) * self.cpu_share
                used += loading * (self.cpu_share if self.data_cpu_share is None else self.data_cpu_share)
                cpu[rank] += used
                wanted[rank] += (begin - now[rank] + spent) * self.core_wait + self.crowded(rank, step)
                now[rank] = begin + spent
            free, link = [0.0, 0.0], 0.0
            done = now.copy()
            for index, size in enumerate(self.buckets):
                begin = max(ready[:, index].max(), min(free))
                # Latencies overlap, bytes share the link.
                end = link = max(begin + self.latency_ms, link) + size / 2**20 * self.ms_per_mib
                free[free.index(min(free))] = end
                for rank in range(self.ranks):
                    records[rank].append(_collective(ready[rank, index], end, size, seq))
                done = np.maximum(done, end)
                seq += 1
            for rank in range(self.ranks):
                begin = done[rank]
                records[rank].append(_record(Kind.PHASE, BACKWARD, back_starts[rank], begin))
                spent = work(self.optimizer(rank, step))
                records[rank].append(_record(Kind.PHASE, OPTIMIZER, begin, begin + spent, value=self.optimizer_number))
                now[rank] = begin + spent
                cpu[rank] += spent * self.cpu_share
                for gauge, value in ((CPU, cpu * (1 + self.beside)), (THREAD_CPU, cpu), (CORE_WAIT, wanted)):
                    records[rank].append(_record(Kind.GAUGE, gauge, now[rank], now[rank], value=value[rank] / 1e3))
                for number, rises in enumerate(self.gauges.values()):
                    others[number, rank] += rises(rank, step)
                    value = others[number, rank] / 1e3
                    records[rank].append(_record(Kind.GAUGE, FIRST_GAUGE + number, now[rank], now[rank], value=value))
        return self._captures_of(records)

    def _captures_of(self, records: dict[int, list[tuple[int, ...]]]) -> dict[int, Capture]:
        meta = {"closed": True, "native": True, "world_size": self.ranks}
        names = {**NAMES, **{FIRST_GAUGE + number: name for number, name in enumerate(self.gauges)}}
        return {
            rank: Capture(Path(f"rank{rank:05d}.0.host.{rank + 100}"), array_of(rows), dict(names), meta)
            for rank, rows in records.items()
        }

    def trace(self) -> Trace:
        tables = [rows_of(capture, rank) for rank, capture in self.captures().items()]
        rows = pd.concat([table.astype({"name": object, "lane": object}) for table in tables], ignore_index=True)
        facts = [self._process(rank) for rank in range(self.ranks)]
        info = RunInfo(
            id="job",
            name="job",
            command=["dsprof", "run", "train.py"],
            world_size=self.ranks,
            ranks=[
                RankInfo(r, 0, "host", r + 100, f"rank{r:05d}.0.host.{r + 100}", True, self.steps - 1, 0, 0, 0, 0, True)
                for r in range(self.ranks)
            ],
            facts=[*facts, *self.facts],
            exits=self.exits,
        )
        return Trace.of(info, rows)

    def _process(self, rank: int) -> dict[str, Any]:
        of = {"fact": "process", "rank": rank, "threads": self.threads, "host_cores": self.host_cores}
        if self.cpus is None:
            return {**of, "cores": self.cores}
        cpus = self.cpus(rank)
        return {**of, "cores": len(cpus), "cpus": cpus}


KEPT: Final = 128
"""Tables of ranks that are kept: to make them takes almost half of what it takes to analyze a job, and tests of one
rule ask for the same job again and again."""
_tables: dict[Hashable, pd.DataFrame] = {}


def rows_of(capture: Capture, rank: int) -> pd.DataFrame:
    """What `trace_rows` makes of a capture, made once for all captures with the same content; the table is nobody
    else's."""
    told = repr((capture.names, capture.meta, capture.facts))
    key = (rank, told, capture.records.tobytes(), pd.get_option("mode.string_storage"))
    made = _tables.pop(key, None)
    if made is None:
        made = trace_rows(capture, rank, 0)
    _tables[key] = made  # the last to go
    if len(_tables) > KEPT:
        del _tables[next(iter(_tables))]
    return made.copy()


@dataclass
class Accumulating(Job):
    """Ranks in step: each micro-batch has a forward and a backward, and DistributedDataParallel broadcasts buffers
    before a forward and reduces gradients after a backward, whose end waits for that."""

    micro: int = 4
    buffer_bytes: int = 0
    pack_ms: float = 0.0
    """How long buffers are packed, and then unpacked, in each forward."""
    reduces: Callable[[int], bool] = lambda micro: True
    """Which micro-batches' gradients are reduced."""
    grad_bytes: Callable[[int], int] = lambda micro: 8 << 20

    def captures(self) -> dict[int, Capture]:
        draw = np.random.default_rng(self.seed)
        rows: list[tuple[int, ...]] = []
        now, seq = 1.0, 0

        def work(ms: float) -> float:
            return ms * (1 + self.jitter * draw.standard_normal())

        for step in range(self.steps):
            for micro in range(self.micro):
                begin = now
                if self.buffer_bytes:
                    issued = now + work(self.pack_ms)
                    now = issued + self.latency_ms + self.buffer_bytes / 2**20 * self.ms_per_mib
                    rows += [_collective(issued, now, self.buffer_bytes, seq, BROADCAST), _waited(issued, now, seq)]
                    seq, now = seq + 1, now + work(self.pack_ms)
                now += work(self.forward(0, step))
                rows.append(_record(Kind.PHASE, FORWARD, begin, now, None, Flag.GRAD))
                begin, now = now, now + work(self.backward(0, step))
                if self.reduces(micro):
                    issued, size = now, self.grad_bytes(micro)
                    now += self.latency_ms + size / 2**20 * self.ms_per_mib
                    rows.append(_collective(issued, now, size, seq))
                    seq += 1
                rows.append(_record(Kind.PHASE, BACKWARD, begin, now))
            begin, now = now, now + work(self.optimizer(0, step))
            rows.append(_record(Kind.PHASE, OPTIMIZER, begin, now))
            for gauge in (CPU, THREAD_CPU, CORE_WAIT):
                rows.append(_record(Kind.GAUGE, gauge, now, now, value=0.0 if gauge == CORE_WAIT else now / 2e3))
        captures = self._captures_of(dict.fromkeys(range(self.ranks), rows))
        for rank, capture in captures.items():
            capture.facts.extend(fact for fact in self.facts if fact.get("rank") == rank)
        return captures


NOTHING = {name: ABSENT.get(name, 0) for name in FIELDS}


def _record(
    kind: Kind, name: int, start_ms: float, end_ms: float, value: float | None = None, flags: int = 0
) -> tuple[Any, ...]:
    fields = {
        "kind": kind, "family": USUAL_FAMILY.get(kind, Family.SPAN), "state": State.DONE, "flags": int(flags),
        "name": name, "start_ns": round(start_ms * MS), "end_ns": round(end_ms * MS), "thread": 7,
        "value": np.nan if value is None else value,
        "grad": int(bool(flags & Flag.GRAD)) if name == FORWARD else 0 if kind is Kind.PHASE else -1,
    }  # fmt: skip
    return tuple({**NOTHING, **fields}.values())


def _collective(issue_ms: float, end_ms: float, size: int, seq: int, name: int = ALL_REDUCE) -> tuple[Any, ...]:
    issue, end = round(issue_ms * MS), round(end_ms * MS)
    fields = {
        "kind": Kind.COMM, "family": Family.COLLECTIVE, "state": State.DONE, "name": name, "thread": 7,
        "flags": int(Flag.ASYNC | Flag.START_MEASURED), "start_ns": issue, "end_ns": end, "issue_ns": issue,
        "bytes": size, "group": GROUP, "seq": seq, "dtype": 7,
    }  # fmt: skip
    return tuple({**NOTHING, **fields}.values())


def _waited(start_ms: float, end_ms: float, seq: int) -> tuple[Any, ...]:
    """A wait for the broadcast of that number."""
    fields = {
        "kind": Kind.WAIT, "family": Family.COLLECTIVE, "state": State.DONE, "name": BROADCAST, "thread": 7,
        "start_ns": round(start_ms * MS), "end_ns": round(end_ms * MS), "group": GROUP, "seq": seq,
    }  # fmt: skip
    return tuple({**NOTHING, **fields}.values())


def array_of(rows: list[tuple[Any, ...]]) -> Array:
    """Records by their fields, in the order of FIELDS."""
    records = empty(len(rows))
    records[:] = rows
    return records


def write_capture(capture: Capture, parent: Path) -> Path:
    """The capture as the files a rank would have left; its folder."""
    import json

    from dsprof import ondisk

    folder = parent / capture.path.name
    folder.mkdir(parents=True)
    lines = (f"{number}\t{ondisk.escape_name(name)}\n" for number, name in capture.names.items())
    (folder / "names.txt").write_text("".join(lines))
    (folder / "meta.json").write_text(json.dumps(capture.meta))
    for index in range(0, max(len(capture.records), 1), ondisk.CHUNK_RECORDS):
        part = encode(capture.records[index : index + ondisk.CHUNK_RECORDS])
        number = index // ondisk.CHUNK_RECORDS
        header = ondisk.CHUNK_HEADER.pack(
            ondisk.CHUNK_MAGIC, ondisk.FORMAT_VERSION, ondisk.RECORD_BYTES, ondisk.CHUNK_RECORDS, number, os.getpid()
        )
        body = header.ljust(ondisk.CHUNK_HEADER_BYTES, b"\0") + part
        whole = ondisk.CHUNK_HEADER_BYTES + ondisk.CHUNK_RECORDS * ondisk.RECORD_BYTES
        (folder / ondisk.chunk_name(number)).write_bytes(body.ljust(whole, b"\0"))
    return folder
