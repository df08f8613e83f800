"""A made-up run and its Analysis: small, literal, and the same every time.

Every step is data, forward, backward with two overlapped all-reduces and a last one that is waited for, then
the optimizer. A slow rank computes longer, so the others wait for it in the last all-reduce. The first eighth of the
steps is warm-up; what a rank does besides (evaluation, a checkpoint, a stop) stands at the beginning of its step.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pandas as pd

from dsprof.analyzer.align.steps import StepTime
from dsprof.analyzer.analysis import Analysis, CaptureQuality, Verdict
from dsprof.analyzer.finding import Evidence, Finding, Fix, Gain, Where
from dsprof.run import RankExit, RankInfo, RunInfo
from dsprof.schema import BUDGET_PARTS, COLUMNS
from dsprof.trace import Trace
from dsprof.trace.packed_table import PackedTable

MS = 1_000_000
START_NS = 5_000_000_000
CWD = "/home/ada/gpt"
BUCKET_BYTES = 25 * 1024 * 1024


@dataclass(frozen=True)
class Job:
    """What the made-up job does; times in ms."""

    ranks: int = 2
    steps: int = 40
    data: float = 4.0
    forward: float = 50.0
    backward: float = 90.0
    transfer: float = 12.0
    optimizer: float = 16.0
    gap: float = 2.0
    slow: dict[int, float] = field(default_factory=dict)
    """Extra forward time of a rank, in every step."""
    pauses: dict[tuple[int, int], float] = field(default_factory=dict)
    """(rank, step) -> garbage collection within forward."""
    besides: dict[tuple[int, int], tuple[str, float]] = field(default_factory=dict)
    """(rank, step) -> kind of `Analysis.irregular` and how long, before the step's data."""
    captured: tuple[int, ...] | None = None
    dies: tuple[int, int] | None = None
    """(rank, step): the rank is killed in this step's forward, and nobody finishes the step."""
    name: str = "train_gpt"
    command: tuple[str, ...] = ("examples/train_gpt.py", "--steps", "40")


def wobble(rank: int, step: int) -> float:
    """0 to 0.8 ms, so that no two steps are quite alike."""
    return ((rank * 7 + step * 13) % 5) * 0.2


def build(job: Job, findings: tuple[Finding, ...] = (), passed: tuple[str, ...] = (), **changes: Any) -> Analysis:
    """The Analysis of `job`; `changes` replace fields of it. Findings and verdict are as made up as the job."""
    rows: list[dict[str, Any]] = []
    steps: list[dict[str, Any]] = []
    matched: list[dict[str, Any]] = []
    waits: list[dict[str, Any]] = []
    captured = job.captured if job.captured is not None else tuple(range(job.ranks))
    begin = START_NS
    complete = job.steps if job.dies is None else job.dies[1]
    for step in range(complete):
        ordinary = step >= complete // 8 and all(at != step for _, at in job.besides)
        begin = _step(job, step, begin, ordinary, captured, rows, steps, matched, waits)
    if job.dies is not None:
        _last_step(job, begin, captured, rows)

    table = pd.DataFrame(steps, columns=["rank", "step", "start_ns", "dur_ns", "ordinary", "apart_ms", *BUDGET_PARTS])
    ordinary_steps = table[table["ordinary"].astype(bool)]
    by_rank = ordinary_steps.groupby("rank")[list(BUDGET_PARTS)].mean()
    budget = {} if ordinary_steps.empty else {part: float(by_rank[part].mean()) for part in BUDGET_PARTS}
    times = ordinary_steps["dur_ns"] / MS
    analysis = Analysis(
        run=_run(job, captured, complete),
        ranks_expected=job.ranks,
        ranks_captured=captured,
        step_count=complete,
        step_ms=None if table.empty else StepTime(
            mean=float(times.mean()), median=float(times.median()),
            p10=float(times.quantile(0.1)), p90=float(times.quantile(0.9)),
        ),
        steps=table,
        irregular=irregular(job),
        budget=budget,
        budget_by_rank=by_rank,
        slowest_rank=None if table.empty or len(captured) < 2 else int(by_rank["peer_wait"].idxmin()),
        collectives=pd.DataFrame(matched, columns=[
            "group", "seq", "name", "step", "bytes", "ranks", "first_ns", "last_ns", "late_rank", "end_ns",
            "transfer_ns", "purpose",
        ]),
        packed_waits=PackedTable(
            pd.DataFrame(waits, columns=["rank", "start_ns", "end_ns", "arrival_ns", "group", "seq"])
        ),
        trace=Trace.of(_run(job, captured, complete), _table(rows)),
        findings=findings,
        passed=passed,
        not_judged={},
        noise_ms=0.6,
        notes=(),
        step_is="",
        time=_time(job, table),
        verdict=Verdict("inconclusive", "nobody asked"),
        capture=CaptureQuality(overhead_percent=0.21, dropped=0, clock_error_us=3.0),
    )  # fmt: skip
    return replace(analysis, **changes)


def _step(
    job: Job, step: int, begin: int, ordinary: bool, captured: tuple[int, ...],
    rows: list[dict[str, Any]], steps: list[dict[str, Any]], matched: list[dict[str, Any]],
    waits: list[dict[str, Any]],
) -> int:  # fmt: skip
    """Append one step of every rank; returns its end."""
    besides = {rank: job.besides.get((rank, step), ("", 0.0)) for rank in range(job.ranks)}
    apart = {rank: length if kind != "stop" else 0.0 for rank, (kind, length) in besides.items()}
    first = {rank: length for rank, (_, length) in besides.items()}
    data = {rank: first[rank] + job.data + wobble(rank, step) for rank in range(job.ranks)}
    paused = {rank: job.pauses.get((rank, step), 0.0) for rank in range(job.ranks)}
    forward = {rank: job.forward + job.slow.get(rank, 0.0) + paused[rank] for rank in range(job.ranks)}
    ready = {rank: data[rank] + forward[rank] + job.backward for rank in range(job.ranks)}
    last = max(ready.values())
    done = last + job.transfer
    end = done + job.optimizer + job.gap

    def row(rank: int, kind: str, name: str, lane: str, start: float, dur: float, **more: Any) -> None:
        start_ns = begin + round(start * MS)
        rows.append({
            "rank": rank, "restart": 0, "step": step, "kind": kind, "name": name, "lane": lane,
            "start_ns": start_ns, "dur_ns": round(dur * MS), "ended": True, "source": "measured", **more,
        })  # fmt: skip

    for rank in captured:
        back = data[rank] + forward[rank]
        row(rank, "step", "step", "main", 0, end)
        if besides[rank][0] == "evaluation":
            row(rank, "phase", "forward", "main", 0, apart[rank], depth=1, grad=False)
        elif besides[rank][0] == "checkpointing":
            row(rank, "phase", "checkpoint", "main", 0, apart[rank], depth=1)
        row(rank, "phase", "data", "main", first[rank], data[rank] - first[rank], depth=1)
        row(rank, "phase", "forward", "main", data[rank], forward[rank], depth=1, grad=True)
        row(rank, "phase", "backward", "main", back, job.backward + done - ready[rank], depth=1)
        row(rank, "phase", "optimizer", "main", done, job.optimizer, depth=1)
        row(rank, "wait", "all_reduce", "main", ready[rank], done - ready[rank], depth=2)
        if paused[rank]:
            row(rank, "pause", "gc", "main", data[rank] + 10, paused[rank], depth=2)
        for bucket in range(3):
            start = back + job.backward * (bucket + 1) / 3
            finish = max(data[r] + forward[r] + job.backward * (bucket + 1) / 3 for r in data) + job.transfer
            row(
                rank, "comm", "all_reduce", "comm.0", start, finish - start, group="0", seq=step * 3 + bucket,
                bytes=BUCKET_BYTES, dtype="float32", purpose="gradient",
            )  # fmt: skip
        wait = last - ready[rank]
        waits.append({
            "rank": rank, "start_ns": begin + round(ready[rank] * MS), "end_ns": begin + round(done * MS),
            "arrival_ns": begin + round(last * MS), "group": "0", "seq": step * 3 + 2,
        })  # fmt: skip
        steps.append({
            "rank": rank, "step": step, "start_ns": begin, "dur_ns": round(end * MS),
            "ordinary": ordinary, "apart_ms": apart[rank],
            "compute": forward[rank] - paused[rank] + job.backward, "comm_exposed": job.transfer,
            "peer_wait": wait, "bubble": 0.0, "data": data[rank] - first[rank], "optimizer": job.optimizer,
            "offload": 0.0, "pause": paused[rank], "other": job.gap + first[rank],
        })  # fmt: skip
    for bucket in range(3):
        arrivals = {r: data[r] + forward[r] + job.backward * (bucket + 1) / 3 for r in data}
        late = max(arrivals, key=lambda r: arrivals[r])
        last_ns = begin + round(arrivals[late] * MS)
        transfer_ns = round((job.transfer + wobble(bucket, step)) * MS)
        matched.append({
            "group": "0", "seq": step * 3 + bucket, "name": "all_reduce", "step": step,
            "bytes": BUCKET_BYTES if bucket < 2 else BUCKET_BYTES // 4, "ranks": len(captured),
            "first_ns": begin + round(min(arrivals.values()) * MS), "last_ns": last_ns, "late_rank": late,
            "end_ns": last_ns + transfer_ns, "transfer_ns": transfer_ns, "purpose": "gradient",
        })  # fmt: skip
    return begin + round(end * MS)


def _last_step(job: Job, begin: int, captured: tuple[int, ...], rows: list[dict[str, Any]]) -> None:
    """The step in which a rank dies: its forward and the others' all-reduce never end."""
    assert job.dies is not None
    dead, step = job.dies
    for rank in captured:
        common = {"rank": rank, "restart": 0, "step": step, "ended": False, "source": "measured"}
        main = {**common, "lane": "main"}
        rows.append({**main, "kind": "step", "name": "step", "start_ns": begin})
        rows.append(
            {**main, "kind": "phase", "name": "data", "start_ns": begin, "dur_ns": round(job.data * MS), "ended": True}
        )
        forward = begin + round(job.data * MS)
        if rank == dead:
            rows.append({**main, "kind": "phase", "name": "forward", "start_ns": forward})
            continue
        backward = forward + round(job.forward * MS)
        rows.append(
            {
                **main,
                "kind": "phase",
                "name": "forward",
                "start_ns": forward,
                "dur_ns": backward - forward,
                "ended": True,
            }
        )
        rows.append({**main, "kind": "phase", "name": "backward", "start_ns": backward})
        rows.append({
            **common, "lane": "comm.0", "kind": "comm", "name": "all_reduce", "group": "0", "seq": step * 3,
            "start_ns": backward + 30 * MS, "bytes": BUCKET_BYTES,
        })  # fmt: skip


def _time(job: Job, steps: pd.DataFrame) -> dict[str, float]:
    """Kind of time -> s; empty without a step."""
    if steps.empty:
        return {}
    apart = {
        kind: sum(length for of, length in job.besides.values() if of == kind) / job.ranks / 1e3
        for kind in ("evaluation", "checkpointing", "compilation")
    }
    training = float((steps["dur_ns"] / MS - steps["apart_ms"]).sum()) / steps["rank"].nunique() / 1e3
    return {"training": training, **apart, "startup": 4.02, "rest": 0.41}


def irregular(job: Job) -> pd.DataFrame:
    """`Analysis.irregular` of `job`: of each step the rank that spent most."""
    rows = [
        {"rank": rank, "step": step, "kind": kind, "start_ns": START_NS, "excess_ms": excess}
        for (rank, step), (kind, excess) in sorted(job.besides.items(), key=lambda item: -item[1][1])
    ]
    table = pd.DataFrame(rows, columns=["rank", "step", "kind", "start_ns", "excess_ms"])
    return table.drop_duplicates(["step", "kind"]).sort_values("step", ignore_index=True)


def _table(rows: list[dict[str, Any]]) -> pd.DataFrame:
    table = pd.DataFrame(rows, columns=list(COLUMNS))
    return table.astype(COLUMNS)


def _run(job: Job, captured: tuple[int, ...], complete: int) -> RunInfo:
    exits = [
        RankExit(rank=rank, host="node0", pid=4000 + rank, code=0, signal=None, ended_ns=START_NS * 2)
        for rank in range(job.ranks)
    ]
    if job.dies is not None:
        exits = [replace(item, code=None, signal=15) for item in exits]
        exits[job.dies[0]] = replace(exits[job.dies[0]], signal=9)
    return RunInfo(
        id=f"{job.name}-20261120T101500Z-a1b2c3",
        name=job.name,
        command=list(job.command),
        cwd=CWD,
        started="2026-11-20T10:15:00Z",
        ended="2026-11-20T10:15:30Z",
        status=0 if job.dies is None else 137,
        world_size=job.ranks,
        versions={"dsprof": "0.1.0", "python": "3.11.2", "torch": "2.13.0"},
        exits=exits,
        ranks=[
            RankInfo(
                rank=rank,
                restart=0,
                host="node0",
                pid=4000 + rank,
                capture=f"rank{rank:05d}.0.node0.{4000 + rank}",
                native=True,
                last_step=complete - 1,
                records=complete * 9,
                dropped=0,
                damaged=0,
                errors=0,
                closed=job.dies is None,
            )
            for rank in captured
        ],
        groups={"0": {"ranks": list(captured), "size": job.ranks, "desc": "default_pg"}},
    )


RULES = (
    "comm.exposed", "comm.small-messages", "data.imbalance", "data.stall", "pause.gc", "rank.straggler",
    "run.rank-died",
)  # fmt: skip


def passed_but(*codes: str) -> tuple[str, ...]:
    return tuple(code for code in RULES if code not in codes)


STRAGGLER = Finding(
    code="rank.straggler",
    title="rank 1 arrives late in every step: its forward takes longer",
    severity="high",
    confidence=0.97,
    where=Where(ranks=(1,), group="0", op="all_reduce", steps=(0, 39)),
    evidence=(
        Evidence("forward on rank 1", 88.0, "ms", 50.0),
        Evidence("steps in which it is last", 40.0, "of 40", 20.0),
    ),
    gain=Gain(ms=37.9, percent=17.9, low=31.2, high=44.6),
    fixes=(
        Fix(
            kind="code", title="the slow part is called here; move it off the training thread",
            patch=({"file": f"{CWD}/examples/train_gpt.py", "line": 112, "argument": "slow_rank", "value": "None"},),
            gain=Gain(ms=37.9, percent=17.9, low=31.2, high=44.6),
        ),
        Fix(kind="env", title="or leave it the cores", patch=({"name": "OMP_NUM_THREADS", "value": "1"},)),
    ),
)  # fmt: skip

SMALL_MESSAGES = Finding(
    code="comm.small-messages",
    title="all-reduces of 9.8 KiB are bound by latency",
    severity="low",
    confidence=0.8,
    where=Where(group="0", op="all_reduce"),
    evidence=(Evidence("all-reduces a step", 310.0, "", 4.0), Evidence("median size", 10_000.0, "bytes", 26_214_400.0)),
    gain=Gain(ms=4.2, percent=2.0, low=2.6, high=5.9),
    fixes=(
        Fix(
            kind="code", title="larger buckets in DistributedDataParallel",
            patch=({"file": None, "line": None, "argument": "bucket_cap_mb", "value": "25"},),
        ),
    ),
)  # fmt: skip

EXPOSED_INFO = Finding(
    code="comm.exposed",
    title="the last all-reduce is not overlapped",
    severity="info",
    confidence=0.6,
    where=Where(group="0", op="all_reduce"),
    evidence=(Evidence("exposed", 1.4, "ms", 0.0),),
    gain=Gain(ms=1.1, percent=0.6, low=0.2, high=2.0),
)

DIED = Finding(
    code="run.rank-died",
    title="rank 1 was killed by SIGKILL in step 12, during forward",
    severity="high",
    confidence=1.0,
    where=Where(ranks=(1,), op="forward", steps=(12, 12)),
    evidence=(Evidence("exit status", 137.0, "", 0.0), Evidence("last complete step", 11.0, "", 39.0)),
    gain=Gain(ms=0.0, percent=0.0, low=0.0, high=0.0),
    fixes=(Fix(kind="env", title="the kernel log says whether memory ran out: dmesg | grep -i oom"),),
)


def healthy() -> Analysis:
    verdict = Verdict("healthy", "nothing found that is sure to shorten the 175 ms step")
    return build(Job(), findings=(EXPOSED_INFO,), passed=RULES, verdict=verdict)


def straggler() -> Analysis:
    """Two ranks; rank 1 computes 38 ms longer."""
    return build(
        Job(slow={1: 38.0}),
        findings=(STRAGGLER, SMALL_MESSAGES),
        passed=passed_but("rank.straggler", "comm.small-messages"),
        verdict=Verdict(
            "bottleneck",
            "rank 1 arrives late in every step: its forward takes longer; "
            "fixing it saves 37.9 ms of each 212 ms step (18 %)",
        ),
    )


def dead_rank() -> Analysis:
    """Rank 1 of two is killed in step 12."""
    return build(
        Job(dies=(1, 12)), findings=(DIED,), passed=passed_but("run.rank-died"),
        capture=CaptureQuality(0.2, dropped=0, clock_error_us=3.0, warnings=("rank 1: 1 record torn",)),
        verdict=Verdict("failed", DIED.title),
    )  # fmt: skip


def wide(ranks: int = 8, steps: int = 200) -> Analysis:
    """Many ranks: rank 5 is slow, and rank 2 collects garbage now and then."""
    job = Job(ranks=ranks, steps=steps, slow={5: 21.0}, pauses={(2, step): 160.0 for step in range(17, steps, 50)})
    finding = replace(STRAGGLER, title="rank 5 arrives late in every step", where=Where(ranks=(5,), group="0"))
    verdict = Verdict("bottleneck", "rank 5 arrives late in every step; fixing it saves 37.9 ms of each step")
    return build(job, findings=(finding,), passed=passed_but("rank.straggler"), verdict=verdict)


EVALUATES = Job(
    steps=60,
    besides={
        **{(0, step): ("evaluation", 420.0) for step in range(9, 60, 10)},
        **{(rank, step): ("checkpointing", 95.0 + 10 * rank) for step in (14, 44) for rank in (0, 1)},
        (1, 33): ("stop", 900.0),
    },
)
"""Rank 0 alone evaluates in every tenth step, both save checkpoints, and rank 1 stops once."""

EVAL_UNEVEN = Finding(
    code="eval.uneven",
    title="rank 0 alone evaluates and the others wait",
    severity="high",
    confidence=0.98,
    where=Where(ranks=(0,), steps=(9, 59)),
    evidence=(Evidence("evaluation on rank 0", 420.0, "ms", 0.0), Evidence("steps with evaluation", 6.0, "of 60", 0.0)),
    gain=Gain(ms=42.0, percent=17.4, low=38.1, high=45.9, method="measured excess"),
    fixes=(Fix(kind="code", title="shard the evaluation over the ranks, or let it run in a job of its own"),),
)  # fmt: skip


def evaluates() -> Analysis:
    """Two ranks, of which one alone evaluates; steps that are not ordinary, and kinds of time."""
    return build(
        EVALUATES, findings=(EVAL_UNEVEN,), passed=passed_but("rank.straggler"),
        notes=("steps are slower from step 41 on",),
        verdict=Verdict("bottleneck", "rank 0 alone evaluates and the others wait; it takes 42.0 ms of each step"),
        step_is="an iteration of 6 optimizer steps: 5 of Adam 1, 1 of Adam 2",
        not_judged={"rank.straggler": "the ranks do different work"},
    )  # fmt: skip


def inconclusive() -> Analysis:
    """A third of the step is outside the phases, and nothing says why."""
    headline = "nothing found that is sure to shorten the 263 ms step, but 34 % is outside the phases of the loop"
    not_judged = {"comm.exposed": "no collective was seen to carry gradients"}
    return build(
        Job(gap=90.0), passed=passed_but("comm.exposed"), not_judged=not_judged,
        verdict=Verdict("inconclusive", headline),
    )  # fmt: skip


def empty() -> Analysis:
    """A job that ended before its first optimizer step."""
    verdict = Verdict("failed", "no complete step was captured, so nothing can be said about its speed")
    return build(Job(steps=0), not_judged=dict.fromkeys(RULES, "no complete step"), noise_ms=0.0, verdict=verdict)
