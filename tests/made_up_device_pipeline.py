"""A made-up GPipe on devices, whose times are computed: what dsprof captures of it with events on streams.

Hosts launch all steps at once, and are ahead. A stage does its forwards, each when the stage before has sent what it
needs, then its backwards, each when the stage behind it has; then the optimizer's step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from made_up_device import _row

from dsprof.run import RankInfo, RunInfo
from dsprof.schema import COLUMNS
from dsprof.trace import Trace

LAUNCH_MS = 0.1
SENT_MS = 0.5
UPDATE_MS = 1.0


@dataclass(frozen=True)
class PipelineJob:
    """forward: ms of a micro-batch, of each stage; a backward takes twice as long."""

    forward: tuple[float, ...] = (10.0, 10.0)
    microbatches: int = 4
    steps: int = 16
    timed: tuple[str, ...] = ("forward", "backward")

    def with_(self, **changes: Any) -> PipelineJob:
        return replace(self, **changes)

    def run(self) -> tuple[Trace, float]:
        """The trace, and the mean step of the devices after warm-up, ms."""
        stages, count = len(self.forward), self.microbatches
        rows: list[dict[str, Any]] = []
        device, host, ended = np.zeros(stages), np.zeros(stages), np.zeros((stages, self.steps))
        for step in range(self.steps):
            launched = {}
            for rank in range(stages):
                at = float(host[rank])
                _row(rows, rank, step, "phase", "data", "main", at, at + 0.05)
                at += 0.1
                for name in ("forward", "backward"):
                    for number in range(count):
                        launched[rank, name, number] = at
                        _row(rows, rank, step, "phase", name, "main", at, at + LAUNCH_MS, value=8.0)
                        at += 4 * LAUNCH_MS
                launched[rank, "optimizer", 0] = at
                _row(rows, rank, step, "phase", "optimizer", "main", at, at + LAUNCH_MS, value=1.0)
                host[rank] = at + LAUNCH_MS
            for name, order in (("forward", range(stages)), ("backward", range(stages - 1, -1, -1))):
                there = np.zeros(count)
                for rank in order:
                    there = self._pass(rows, rank, step, name, launched, device, there)
            for rank in range(stages):
                at = launched[rank, "optimizer", 0]
                begin = max(float(device[rank]), at)
                device[rank] = ended[rank, step] = begin + UPDATE_MS
                _row(rows, rank, step, "kernel", "optimizer", "cuda.0", begin, begin + UPDATE_MS, issue=at)
                begun = float(ended[rank, step - 1]) if step else 0.0
                _row(
                    rows,
                    rank,
                    step,
                    "step",
                    "step",
                    "main",
                    begun,
                    float(ended[rank, step]),
                    source="derived",
                    value=1.0,
                )
        return self._trace(rows), float((ended[:, -1] - ended[:, 3]).mean()) / (self.steps - 4)

    def _pass(
        self, rows: list[dict[str, Any]], rank: int, step: int, name: str, launched: dict[tuple[int, str, int], float],
        device: Any, there: Any,
    ) -> Any:  # fmt: skip
        """All forwards or backwards of a stage; when it sends what it makes of each micro-batch to the next one."""
        stages, sent = len(self.forward), np.zeros(len(there))
        back = 1 if name == "forward" else -1
        source, target = rank - back, rank + back
        took = self.forward[rank] * (1 if name == "forward" else 2)
        for number in range(len(there)):
            issue, seq = launched[rank, name, number], step * len(there) + number
            begin = max(float(device[rank]), issue)
            if 0 <= source < stages:
                of = {"peer": source, "seq": seq, "group": "0"}
                come = max(begin, float(there[number])) + SENT_MS  # it moves when both have come
                posted = issue - 0.2 * LAUNCH_MS
                _row(rows, rank, step, "comm", "recv", "comm.0", min(begin, come), come, issue=posted,
                     arrival=begin, **of)  # fmt: skip
                _row(rows, rank, step, "wait", "recv", "cuda.0", begin, come, issue=posted, **of)
                begin = come
            device[rank] = begin + took
            if name in self.timed:
                _row(rows, rank, step, "kernel", name, "cuda.0", begin, begin + took, issue=issue)
            if 0 <= target < stages:
                sent[number] = begin + took
                _row(rows, rank, step, "comm", "send", "comm.0", begin + took, begin + took + SENT_MS,
                     issue=issue + LAUNCH_MS, arrival=begin + took, peer=target, seq=seq, group="0")  # fmt: skip
        return sent

    def _trace(self, rows: list[dict[str, Any]]) -> Trace:
        stages = len(self.forward)
        table = pd.DataFrame(rows).reindex(columns=list(COLUMNS)).fillna({"restart": 0, "ended": True})
        table = table.sort_values(["rank", "start_ns"], kind="stable", ignore_index=True).astype(COLUMNS)
        every = list(range(stages))
        info = RunInfo(
            id="job", name="job", command=["dsprof", "run", "train.py"], world_size=stages,
            ranks=[RankInfo(r, 0, "host", r, f"rank{r:05d}.0.host.{r}", True, self.steps - 1, 0, 0, 0, 0, True)
                   for r in every],
            facts=[{"fact": "device", "rank": r, "type": "cuda"} for r in every]
            + [{"fact": "host_sync", "rank": r, "operators": True} for r in every],
            groups={"0": {"ranks": every, "size": stages, "backend": "nccl"}},
        )  # fmt: skip
        return Trace.of(info, table)
