"""Made-up pipelines of gloo: each rank's actions in order, what it sends and receives between them, and who waits for
whom by how long messages are under way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from dsprof.engine.schedule import Action, Plan, make_plan
from dsprof.run import RankInfo, RunInfo
from dsprof.schema import COLUMNS
from dsprof.trace import Trace

MS = 1_000_000


@dataclass(frozen=True)
class MadeUpPipeline:
    """Times are in ms. A stage asks for a message right before it needs it, and waits for what it sent before it sends
    the next in that direction, as torch's schedules of one stage a rank do; with `early` it has asked for every message
    before the step, and waits for nothing that it sent.

    forward, backward: (stage, step) -> what a micro-batch takes
    link:   (from stage, to stage) -> how long a message is under way
    handed: whether a sender goes on when its message is on its way, and not only when it is there
    blocking: whether it waits for what it sent at once, as `torch.distributed.send` does. None: it does not; else until
            the message is there ("rendezvous"), or is handed over, which takes `hand_over` ms from when both sides have
            come ("handed"), or from when the sender has, of which a copy is taken ("eager", by a backend that does so)
    bytes:  of a message; None: its tool does not tell
    captured: the ranks whose rows there are; None: all
    """

    stages: int = 3
    microbatches: int = 8
    steps: int = 24
    schedule: str = "1f1b"
    forward: Callable[[int, int], float] = lambda stage, step: 5.0
    backward: Callable[[int, int], float] = lambda stage, step: 10.0
    data: Callable[[int, int], float] = lambda stage, step: 0.0
    link: Callable[[int, int], float] = lambda source, target: 0.3
    handed: bool = True
    early: bool = False
    blocking: str | None = None
    hand_over: float = 0.05
    bytes: int | None = 1 << 20
    jitter: float = 0.02
    seed: int = 1
    hosts: tuple[str, ...] = ()
    captured: tuple[int, ...] | None = None

    @cached_property
    def plan(self) -> Plan:
        return make_plan(self.schedule, self.stages, self.microbatches)

    def with_(self, **changes: Any) -> MadeUpPipeline:
        return replace(self, **changes)

    def step_ms(self) -> float:
        rows = self.trace().rows
        steps = rows[(rows["kind"] == "step") & (rows["step"] >= 4)]
        return float(steps["dur_ns"].astype("int64").mean()) / MS

    def trace(self) -> Trace:
        ranks = [_Stage(self, rank) for rank in range(self.stages)]
        sent: dict[tuple[int, Action], float] = {}
        asked: dict[tuple[int, Action], float] = {}
        while any(not one.done for one in ranks):
            went_on = [one.run(sent, asked) for one in ranks]
            assert any(went_on), "the pipeline stands still"
        seen = range(self.stages) if self.captured is None else self.captured
        rows = pd.DataFrame([row for one in seen for row in ranks[one].rows])
        rows = rows.reindex(columns=list(COLUMNS)).astype(COLUMNS)
        names = self.hosts or ("host",) * self.stages
        run = RunInfo(
            id="p", name="p", command=[], world_size=self.stages,
            ranks=[
                RankInfo(r, 0, host, r + 100, f"rank{r:05d}.0.host.{r + 100}", True, self.steps - 1, 0, 0, 0, 0, True)
                for r, host in enumerate(names) if r in seen
            ],
            groups={"0": {
                "ranks": list(range(self.stages)), "size": self.stages, "desc": "",
                "backend": "mpi" if self.blocking == "eager" else "gloo",
            }},
            facts=[{
                "fact": "pipeline", "rank": rank, "schedule": "Schedule1F1B", "microbatches": self.microbatches,
                "stages": self.stages, "stage_indices": [rank], "trains": True, "site": "/job/train.py:29",
            } for rank in range(self.stages)],
        )  # fmt: skip
        return Trace.of(run, rows)


class _Stage:
    """A rank as it runs: a generator of what it needs before it can go on."""

    def __init__(self, job: MadeUpPipeline, rank: int) -> None:
        self.job, self.rank, self.rows = job, rank, list[dict[str, Any]]()
        self.now, self.done = 1.0, False
        self._numbers: dict[tuple[str, int], int] = {}
        self._draw = np.random.default_rng([job.seed, rank])
        self._step = 0
        self._moves = self._program()
        self._needs: tuple[str, tuple[int, Action]] | None = None

    def run(self, sent: dict[tuple[int, Action], float], asked: dict[tuple[int, Action], float]) -> bool:
        """As far as it gets; whether that is any further."""
        self.sent, self.asked = sent, asked
        moved = False
        while not self.done:
            if self._needs is not None:
                table = sent if self._needs[0] == "sent" else asked
                if self._needs[1] not in table:
                    return moved
            self._needs = next(self._moves, None)
            moved = True
            if self._needs is None:
                self.done = True
        return moved

    def _row(self, kind: str, name: str, start: float, end: float, **more: Any) -> None:
        lane = "comm.0" if kind == "comm" else "main"
        self.rows.append({
            "rank": self.rank, "restart": 0, "step": self._step, "kind": kind, "name": name, "lane": lane,
            "start_ns": int(start * MS), "dur_ns": int((end - start) * MS), "ended": True, "source": "measured", **more,
        })  # fmt: skip

    def _number(self, name: str, peer: int) -> int:
        key = name, peer
        self._numbers[key] = self._numbers.get(key, -1) + 1
        return self._numbers[key]

    def _message(self, name: str, peer: int, number: int, start: float, waits: float, end: float) -> None:
        about = {"group": "0", "seq": number, "peer": peer, "tag": 0}
        self._row("comm", name, start, end, issue_ns=int(start * MS), purpose="pipeline", bytes=self.job.bytes, **about)
        self._row("wait", name, waits, end, **about)

    def _there(self, key: tuple[int, Action], source: int, target: int) -> float:
        """When both sides have come, and how long it is under way from then."""
        alone = self.job.early or self.job.blocking == "eager"
        both = self.sent[key] if alone else max(self.sent[key], self.asked[key])
        return both + self.job.link(source, target)

    def _program(self) -> Any:
        job, rank = self.job, self.rank
        for step in range(job.steps):
            self._step, begin = step, self.now
            self.now += job.data(rank, step)
            if job.data(rank, step):
                self._row("phase", "data", begin, self.now)
            open_sends: dict[int, tuple[tuple[int, Action], int, float]] = {}
            for action in job.plan.actions[rank]:
                source = rank - 1 if action.op == "F" else rank + 1
                if 0 <= source < job.stages:
                    key = step, Action(action.op, source, action.microbatch)
                    asked = self.now
                    self.asked[key] = asked
                    number = self._number("recv", source)
                    yield "sent", key
                    self.now = max(self.now, self._there(key, source, rank))
                    self._message("recv", source, number, asked, asked, self.now + 0.001)
                    self.now += 0.001
                took = (job.forward if action.op == "F" else job.backward)(rank, step)
                took *= 1 + job.jitter * float(self._draw.standard_normal())
                self._row("pipe", action.op, self.now, self.now + took, stage=rank, microbatch=action.microbatch)
                name = "forward" if action.op == "F" else "backward"
                self._row("phase", name, self.now, self.now + took)
                self.now += took
                target = rank + 1 if action.op == "F" else rank - 1
                if not 0 <= target < job.stages:
                    continue
                if target in open_sends:
                    yield from self._wait(target, *open_sends.pop(target))
                key = step, Action(action.op, rank, action.microbatch)
                self.sent[key] = self.now
                if job.blocking is None:
                    open_sends[target] = key, self._number("send", target), self.now
                else:
                    yield from self._send(target, key)
            for target, one in open_sends.items():
                yield from self._wait(target, *one)
            self._row("phase", "optimizer", self.now, self.now + 2.0)
            self.now += 2.0
            self._row("step", "step", begin, self.now)

    def _send(self, target: int, key: tuple[int, Action]) -> Any:
        """Wait for a message at once."""
        began, number = self.now, self._number("send", target)
        if self.job.blocking != "eager":
            yield "asked", key
            self.now = max(self.now, self.asked[key])
        self.now += self.job.link(self.rank, target) if self.job.blocking == "rendezvous" else self.job.hand_over
        self._message("send", target, number, began, began, self.now)

    def _wait(self, target: int, key: tuple[int, Action], number: int, issued: float) -> Any:
        """For a message that was sent."""
        if not self.job.early:
            yield "asked", key
        began = self.now
        if not self.job.early:
            there = max(self.sent[key], self.asked[key])
            there += 0.05 if self.job.handed else self.job.link(self.rank, target)
            self.now = max(self.now, there)
        self._message("send", target, number, issued, began, self.now)
