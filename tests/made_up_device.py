"""A made-up data-parallel job on devices, whose times are computed: what dsprof captures of it with events on streams.

The host of a rank loads, launches a forward, a backward and an optimizer's step, and goes on; its device does each when
it has been launched and what was before is over. Gradients are reduced in buckets, spread evenly over the backward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd

from dsprof.run import RankInfo, RunInfo
from dsprof.schema import COLUMNS, HOST_SYNC
from dsprof.trace import Trace

MS = 1_000_000
Lengths = Callable[[int, int], float]
"""Rank and step -> ms."""


def always(ms: float) -> Lengths:
    return lambda rank, step: ms


@dataclass(frozen=True)
class DeviceJob:
    """Lengths in ms. load, late, collect: of the host, of a loader, outside of all phases and in the collector; launch:
    of each phase; forward, backward: of the device; transfer: of a bucket; item_every: steps, after which the host asks
    for the loss."""

    ranks: int = 2
    steps: int = 24
    load: Lengths = field(default_factory=lambda: always(0.5))
    late: Lengths = field(default_factory=lambda: always(0.0))
    collect: Lengths = field(default_factory=lambda: always(0.0))
    launch: Lengths = field(default_factory=lambda: always(2.0))
    forward: Lengths = field(default_factory=lambda: always(20.0))
    backward: Lengths = field(default_factory=lambda: always(40.0))
    transfer: float = 2.0
    buckets: int = 4
    item_every: int = 8

    def with_(self, **changes: Any) -> DeviceJob:
        return replace(self, **changes)

    def run(self) -> tuple[Trace, float]:
        """The trace, and the mean step of the devices over the last three quarters, ms."""
        rows: list[dict[str, Any]] = []
        host, device = np.zeros(self.ranks), np.zeros(self.ranks)
        link, ended = 0.0, np.zeros((self.ranks, self.steps))
        for step in range(self.steps):
            told: list[dict[str, float]] = []
            for rank in range(self.ranks):
                told.append(self._host(rows, rank, step, host, device))
            arrived = np.array([of["reached"] for of in told])  # [R, buckets]
            for bucket in range(self.buckets):
                begin = max(float(arrived[:, bucket].max()), link)
                for rank, of in enumerate(told):
                    came = max(float(arrived[rank, bucket]), link)
                    _row(rows, rank, step, "comm", "all_reduce", "comm.0", came, begin + self.transfer,
                         issue=of["issued"][bucket], arrival=came, seq=step * self.buckets + bucket)  # fmt: skip
                link = begin + self.transfer
            for rank, of in enumerate(told):
                self._device_ends(rows, rank, step, of, link, host, device)
                ended[rank, step] = device[rank]
                begun = ended[rank, step - 1] if step else 0.0
                _row(rows, rank, step, "step", "step", "main", begun, float(max(device[rank], of["host_end"])),
                     source="derived", value=1.0)  # fmt: skip
        first = self.steps // 4
        table = pd.DataFrame(rows).reindex(columns=list(COLUMNS)).fillna({"restart": 0, "ended": True})
        table = table.sort_values(["rank", "start_ns"], kind="stable", ignore_index=True).astype(COLUMNS)
        info = RunInfo(
            id="job", name="job", command=["dsprof", "run", "train.py"], world_size=self.ranks,
            ranks=[RankInfo(r, 0, "host", r, f"rank{r:05d}.0.host.{r}", True, self.steps - 1, 0, 0, 0, 0, True)
                   for r in range(self.ranks)],
            facts=[{"fact": "device", "rank": r, "type": "cuda"} for r in range(self.ranks)]
            + [{"fact": "host_sync", "rank": r, "operators": True} for r in range(self.ranks)],
            groups={"0": {"ranks": list(range(self.ranks)), "size": self.ranks, "backend": "nccl"}},
        )  # fmt: skip
        taken = (ended[:, -1] - ended[:, first - 1]) / (self.steps - first)
        return Trace.of(info, table), float(taken.mean())

    def _host(self, rows: list[dict[str, Any]], rank: int, step: int, host: Any, device: Any) -> dict[str, Any]:
        """Until it has launched the backward, whose kernels the device has begun by then or not."""
        at, done, launch = float(host[rank]), float(device[rank]), self.launch(rank, step)
        _row(rows, rank, step, "phase", "data", "main", at, at + self.load(rank, step))
        at += self.load(rank, step) + self.late(rank, step)
        begun = max(at, done)
        _row(rows, rank, step, "phase", "forward", "main", at, at + launch, value=100.0)
        # Kernels come as they are launched: the phase ends no earlier than the last of them.
        over = max(begun + self.forward(rank, step), at + launch)
        _row(rows, rank, step, "kernel", "forward", "cuda.0", begun, over, issue=at)
        at += launch
        collects = self.collect(rank, step)
        if collects:
            _row(rows, rank, step, "pause", "gc", "main", at, at + collects)
            at += collects
        backward_at, begun = at, max(at, over)
        part = self.backward(rank, step) / self.buckets
        issued = [at + launch * (bucket + 1) / (self.buckets + 1) for bucket in range(self.buckets)]
        reached = [max(begun + part * (bucket + 1), issued[bucket]) for bucket in range(self.buckets)]
        at += launch
        _row(rows, rank, step, "phase", "backward", "main", backward_at, at)
        return {
            "at": at,
            "backward_at": backward_at,
            "begun": begun,
            "issued": issued,
            "reached": reached,
            "host_end": at,
        }

    def _device_ends(
        self, rows: list[dict[str, Any]], rank: int, step: int, of: dict[str, Any], link: float, host: Any, device: Any
    ) -> None:
        over = max(of["reached"][-1], link, of["at"])
        _row(rows, rank, step, "kernel", "backward", "cuda.0", of["begun"], over, issue=of["backward_at"])
        if link > of["reached"][-1]:
            _row(rows, rank, step, "wait", "all_reduce", "cuda.0", of["reached"][-1], link, source="derived",
                 issue=of["backward_at"], seq=(step + 1) * self.buckets - 1)  # fmt: skip
        at = of["at"]
        _row(rows, rank, step, "phase", "optimizer", "main", at, at + 1.0, value=1.0)
        begun = max(at, over)
        _row(rows, rank, step, "kernel", "optimizer", "cuda.0", begun, max(begun + 2.0, at + 1.0), issue=at)
        of["host_end"] = at + 1.0
        device[rank], host[rank] = max(begun + 2.0, at + 1.0), at + 1.0
        if step % self.item_every == self.item_every - 1:
            asked = host[rank]
            host[rank] = max(asked, device[rank]) + 0.01
            _row(
                rows,
                rank,
                step + 1,
                "mark",
                HOST_SYNC,
                "main",
                asked,
                host[rank],
                purpose="item",
                site="/me/train.py:9",
            )


def _row(
    rows: list[dict[str, Any]], rank: int, step: int, kind: str, name: str, lane: str, start: float, end: float,
    issue: float | None = None, arrival: float | None = None, **columns: Any,
) -> None:  # fmt: skip
    moments = {"start_ns": start, "issue_ns": issue, "arrival_ns": arrival}
    found = {name: None if at is None else round(at * MS) + MS for name, at in moments.items()}
    if kind in ("comm", "wait"):
        columns = {"group": "0", "bytes": 4096, "dtype": "float32"} | columns
    if kind == "comm" and "peer" not in columns:
        columns |= {"purpose": "gradient"}
    rows.append({
        "rank": rank, "restart": 0, "step": step, "kind": kind, "name": name, "lane": lane, "thread": 1, "ended": True,
        "dur_ns": round(end * MS) - round(start * MS), "source": "measured", **found, **columns,
    })  # fmt: skip
