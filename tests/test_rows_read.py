"""Rules open the rows of a few ranks only: what is asked of all is measured when each rank's rows are read once."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from made_up_device import DeviceJob
from meshes import Call, MeshJob, Phase, Program, Work

from dsprof.analyzer import analyze
from dsprof.trace import Trace

FEW = 8
PASSES = 3
"""Calls of `Trace.read` for every rank: to align it, and to measure it, which the aligned trace passes on."""


def a_device() -> Trace:
    """One rank's device is slow, and all hosts ask for the loss in each step."""
    slow = DeviceJob(ranks=20, steps=16, item_every=1).with_(backward=lambda rank, step: 60.0 if rank == 5 else 40.0)
    return slow.run()[0]


def a_mesh() -> Trace:
    """Twenty ranks in ten pairs; what each pair adds up for a log is waited for."""
    groups = {"dp": (tuple(range(20)), "")} | {f"tp{of}": ((2 * of, 2 * of + 1), "") for of in range(10)}

    def program(rank: int, step: int) -> Program:
        return (
            Phase("data", (Work(1),)),
            Phase("forward", (Work(20 + 3 * ((step + rank) % 2)),)),
            Phase("backward", (Work(30), Call("dp", "all_reduce", 1 << 22, "gradient"))),
            Phase("optimizer", (Work(2),)),
            Work(0.2),
            Call(f"tp{rank // 2}", "all_reduce", 4),
            Call(f"tp{rank // 2}", "barrier", 0),
        )

    return MeshJob(20, groups, program, steps=16, latency_ms=2.0).trace()


@pytest.mark.parametrize(("job", "code"), [(a_device, "compute.host-sync"), (a_mesh, "comm.blocking")])
def test_few_ranks_are_read_again(job: Any, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trace, reads = job(), Counter[int]()
    read = Trace.read

    def counted(self: Trace, rank: int, *columns: Any) -> Any:
        reads[rank] += 1
        return read(self, rank, *columns)

    monkeypatch.setattr(Trace, "read", counted)
    answer = analyze(trace)
    assert code in {finding.code for finding in answer.findings}
    assert len(reads) == 20
    assert min(reads.values()) == PASSES
    again = [rank for rank, times in reads.items() if times > PASSES]
    assert len(again) <= FEW, reads
