"""Made-up jobs whose ranks form a mesh: what each rank does is written down, and who waits for whom follows from it.

No torch, no clock: a program is what a rank does in a step, simulated over all ranks, and written as the records that
they would have captured. What a job would take with a fault mended is told by simulating it without.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
from records import Record, capture_of

from dsprof.ondisk import Flag
from dsprof.run import RankInfo, RunInfo
from dsprof.schema import CALL_SITE, COLUMNS, Kind
from dsprof.trace import Trace, concat_rows
from dsprof.trace.derive import trace_rows

FLOAT32 = 7
HOST_NS = 20_000
"""Of issuing a collective."""


@dataclass(frozen=True)
class Work:
    """A rank computes."""

    ms: float


@dataclass(frozen=True)
class Phase:
    """A phase begins, which lasts until all of `parts` are over. inputs: elements that a forward is given."""

    name: str
    parts: tuple[Any, ...]
    inputs: int | None = None


@dataclass(frozen=True)
class Call:
    """A collective of a group, waited for at once; with `later` where a Wait of that name says."""

    group: str
    name: str
    bytes: int
    purpose: str = ""
    later: str = ""


@dataclass(frozen=True)
class Wait:
    later: str


Program = Sequence[Any]


@dataclass
class MeshJob:
    """groups: name -> (ranks, description); program: (rank, step) -> what it does."""

    ranks: int
    groups: Mapping[str, tuple[tuple[int, ...], str]]
    program: Callable[[int, int], Program]
    steps: int = 30
    latency_ms: float = 0.5
    ms_per_mib: float = 1.0
    jitter: float = 0.01
    seed: int = 0
    facts: list[dict[str, Any]] = field(default_factory=list)
    slower: Callable[[str, int], float] = lambda group, number: 1.0
    """(group, number) -> how many times as long a collective takes."""
    hosts: tuple[str, ...] = ()
    """Of each rank; empty: all are on one."""
    lines: Mapping[tuple[str, int], str] = field(default_factory=dict)
    """(name, bytes) of a collective -> the line that issues such, as marks tell."""
    parameters: int = 0
    """Bytes of them on each rank, as its memory tells after each step; 0: it was not captured."""

    capacity: int = 1 << 40
    """Bytes that the host has."""

    def _simulated(self) -> tuple[list[_Rank], dict[tuple[str, int], float]]:
        """The ranks at the end, and when each collective ended."""
        ranks = [_Rank(rank, self) for rank in range(self.ranks)]
        ends: dict[tuple[str, int], float] = {}
        free: dict[str, float] = {}
        arrived: dict[tuple[str, int], dict[int, float]] = {}
        while any(one.runs for one in ranks):
            went_on = [one.run(ends, arrived) for one in ranks]
            for key, came in list(arrived.items()):
                group, _ = key
                if key not in ends and len(came) == len(self.groups[group][0]):
                    size = next(one.sizes[key] for one in ranks if key in one.sizes)
                    begin = max(max(came.values()), free.get(group, 0.0))
                    taken = self.latency_ms + size / 2**20 * self.ms_per_mib
                    ends[key] = free[group] = begin + taken * self.slower(*key)
                    went_on.append(True)
            assert any(went_on), "the programs wait for each other"
        return ranks, ends

    def trace(self) -> Trace:
        ranks, ends = self._simulated()
        tables = []
        for one in ranks:
            facts = [fact for fact in self.facts if fact.get("rank", one.rank) == one.rank]
            marks: list[Record] = [
                (Kind.MARK, CALL_SITE, 1.0, 1.0, {"purpose": name, "bytes": size, "value": FLOAT32, "site": site})
                for (name, size), site in self.lines.items()
            ]
            tables.append(trace_rows(capture_of(*one.records(ends), *marks, facts=facts), one.rank, 0))
        rows = pd.concat([table.astype({"name": object, "lane": object}) for table in tables], ignore_index=True)
        if self.parameters:
            rows = concat_rows([rows, self._memory(rows)]).sort_values(
                ["rank", "start_ns"], kind="stable", ignore_index=True
            )  # fmt: skip
        processes = [{"fact": "process", "rank": rank, "cores": 64, "threads": 1} for rank in range(self.ranks)]
        info = RunInfo(
            id="job", name="job", command=["dsprof", "run", "train.py"], world_size=self.ranks,
            ranks=[
                RankInfo(r, 0, host, r + 100, f"rank{r:05d}.0.host.{r + 100}", True, self.steps - 1, 0, 0, 0, 0, True)
                for r, host in enumerate(self.hosts or ("host",) * self.ranks)
            ],
            groups={
                name: {"ranks": list(members), "size": len(members), "desc": desc, "backend": "gloo"}
                for name, (members, desc) in self.groups.items()
            },
            facts=[*processes, *({"rank": 0, **fact} for fact in self.facts)],
        )  # fmt: skip
        return Trace.of(info, rows)

    def _memory(self, rows: pd.DataFrame) -> pd.DataFrame:
        steps = rows[rows["kind"] == "step"]
        more = [
            {"rank": rank, "restart": 0, "step": step + 1, "kind": "mem", "name": name, "lane": "memory.host",
             "start_ns": end, "dur_ns": 0, "ended": True, "source": "measured", "bytes": held}
            for rank, step, end in zip(steps["rank"], steps["step"], steps["start_ns"] + steps["dur_ns"], strict=True)
            for name, held in (("resident", 1 << 30), ("parameters", self.parameters), ("capacity", self.capacity))
        ]  # fmt: skip
        return pd.DataFrame(more).reindex(columns=list(COLUMNS)).astype(COLUMNS)

    def step_ms(self) -> float:
        """The mean step, after the first few."""
        found = []
        for one in self._simulated()[0]:
            ends = [end for kind, name, _, end, _ in one.seen if (kind, name) == (Kind.PHASE, "optimizer") and end]
            found.append((ends[-1] - ends[4]) / (len(ends) - 5))
        return sum(found) / len(found)


class _Rank:
    """A rank that has come so far in its programs."""

    def __init__(self, rank: int, job: MeshJob) -> None:
        self.rank = rank
        self._draw = np.random.default_rng((job.seed, rank))
        self._jitter = job.jitter
        self._todo: list[Any] = []
        for step in range(job.steps):
            for part in job.program(rank, step):
                self._todo += self._flat(part)
        self._at = 0
        self._now = 1000.0
        self._open: list[tuple[str, float, int | None]] = []
        self.seen: list[Record] = []
        self._calls: dict[tuple[str, int], tuple[Call, float]] = {}
        self._later: dict[str, tuple[str, int]] = {}
        self._seq: dict[str, int] = {}
        self._blocked: tuple[str, int] | None = None
        self.sizes: dict[tuple[str, int], int] = {}

    @staticmethod
    def _flat(part: Any) -> list[Any]:
        if not isinstance(part, Phase):
            return [part]
        inside = [one for inner in part.parts for one in _Rank._flat(inner)]
        return [("begin", part.name, part.inputs), *inside, ("end", part.name)]

    @property
    def runs(self) -> bool:
        return self._at < len(self._todo) or self._blocked is not None

    def run(self, ends: Mapping[tuple[str, int], float], arrived: dict[tuple[str, int], dict[int, float]]) -> bool:
        """Go on as far as possible; whether that is anywhere."""
        moved = False
        while self.runs:
            if self._blocked is not None:
                if self._blocked not in ends:
                    return moved
                call, _ = self._calls[self._blocked]
                end = max(ends[self._blocked], self._now)
                named = {"group": call.group, "seq": self._blocked[1]}
                self.seen.append((Kind.WAIT, call.name, self._now, end, named))
                self._now, self._blocked, moved = end, None, True
                continue
            one = self._todo[self._at]
            self._at, moved = self._at + 1, True
            if isinstance(one, Work):
                self._now += one.ms * max(1 + self._jitter * self._draw.standard_normal(), 0.1)
            elif isinstance(one, Call):
                seq = self._seq[one.group] = self._seq.get(one.group, -1) + 1
                key = one.group, seq
                self._calls[key], self.sizes[key] = (one, self._now), one.bytes
                arrived.setdefault(key, {})[self.rank] = self._now
                self._now += HOST_NS / 1e6
                if one.later:
                    self._later[one.later] = key
                else:
                    self._blocked = key
            elif isinstance(one, Wait):
                self._blocked = self._later.pop(one.later)
            elif one[0] == "begin":
                self._open.append((one[1], self._now, one[2]))
            else:
                name, begin, inputs = self._open.pop()
                more: dict[str, Any] = {"flags": Flag.GRAD} if name == "forward" else {}
                if inputs is not None:
                    more["value"] = inputs
                self.seen.append((Kind.PHASE, name, begin, self._now, more))
        return moved

    def records(self, ends: Mapping[tuple[str, int], float]) -> list[Record]:
        """Everything, with the collectives as they ended."""
        found = list(self.seen)
        for key, (call, issued) in self._calls.items():
            more: dict[str, Any] = {
                "group": call.group, "seq": key[1], "bytes": call.bytes, "dtype": FLOAT32, "host_ns": HOST_NS,
                "flags": Flag.ASYNC | Flag.START_MEASURED,
            }  # fmt: skip
            if call.purpose:
                more["purpose"] = call.purpose
            found.append((Kind.COMM, call.name, issued, ends[key], more))
        return found
