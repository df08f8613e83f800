"""Straggler tables of made-up pipeline jobs whose fault is known: slow ranks, slow stages, sequences of unequal length.

Every replica of a stage runs 1F1B; what a computation takes is drawn, and when it can begin follows from that. A
micro-batch is as long on every stage, forward and backward; the next step has others.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

SLOW_RANK, SLOW_STAGE, LENGTHS = "rank.straggler", "pipeline.imbalance", "data.imbalance"
KINDS = ((), (SLOW_RANK,), (SLOW_STAGE,), (LENGTHS,), (LENGTHS, SLOW_STAGE), (LENGTHS, SLOW_RANK))
SEND_S, SHARD_S, OPTIMIZER_S = 0.001, 0.02, 0.03


@dataclass(frozen=True)
class MadeUp:
    """faults: what is wrong with it. slow: its slow (replica, stage). spread: of lengths, standard deviation of the
    mean. times: by how much the slow rank, or stage, is slower. noise: the same of each computation."""

    faults: tuple[str, ...]
    replicas: int
    stages: int
    micro_batches: int
    steps: int
    slow: tuple[int, int]
    times: float
    spread: float
    noise: float
    seed: int

    @property
    def slow_rank(self) -> int:
        """As the import numbers it."""
        return self.slow[1] * self.replicas + self.slow[0]


def drawn(source: random.Random) -> MadeUp:
    """A job of any kind."""
    faults = source.choice(KINDS)
    replicas = source.choice((2, 3, 4, 8)) if SLOW_RANK in faults else source.choice((2, 2, 4, 8))
    stages = source.choice((2, 3, 4)) if SLOW_STAGE in faults else source.choice((1, 2, 3, 4))
    return MadeUp(
        faults, replicas, stages, stages * source.choice((2, 3, 4)), source.choice((16, 20, 30)),
        (source.randrange(replicas), source.randrange(stages)), source.uniform(1.35, 2.2), source.uniform(0.12, 0.4),
        source.uniform(0.005, 0.03), source.randrange(1 << 30),
    )  # fmt: skip


def table_of(job: MadeUp) -> pd.DataFrame:
    draw = np.random.default_rng(job.seed)
    rows: list[dict[str, Any]] = []
    for step in range(job.steps):
        mean = draw.lognormal(0.0, job.spread if LENGTHS in job.faults else 0.0, (job.replicas, job.micro_batches))
        ready = np.zeros((job.replicas, job.stages))
        for replica in range(job.replicas):
            of_stage = _pipeline(job, draw, step, replica, mean[replica], rows)
            ready[replica] = of_stage
        shared = ready.max(axis=0) + SHARD_S
        end = float(shared.max()) + SEND_S
        for replica in range(job.replicas):
            for stage in range(job.stages):
                add = _adder(rows, step, replica, stage)
                add("grads-reduce-scatter", 0, -1, ready[replica, stage], shared[stage])
                add("optimizer-clip-main-grad", 0, -1, shared[stage], end)
                add("optimizer", 0, -1, end, end + OPTIMIZER_S * (1 + 0.01 * draw.random()))
    return pd.DataFrame(rows)


def _adder(rows: list[dict[str, Any]], step: int, replica: int, stage: int) -> Any:
    def add(optype: str, seq: int, micro: int, start: float, end: float) -> None:
        rows.append(
            {"dp_rank": replica, "stage": stage, "step": step, "optype": optype, "start_ts": start,
             "duration": end - start, "seq_id": seq, "mb_id": micro, "mc": 0, "gmc": stage}
        )  # fmt: skip

    return add


Message = tuple[str, int, int]
"""Direction, the stage that sends, and the micro-batch."""


def _pipeline(
    job: MadeUp, draw: np.random.Generator, step: int, replica: int, length: np.ndarray, rows: list[dict[str, Any]]
) -> list[float]:
    """One replica's step; when each stage has done its last backward, seconds. Messages that are exchanged at once end
    together, when the other sides have come too."""
    programs = [_one_f_one_b(stage, job.stages, job.micro_batches) for stage in range(job.stages)]
    came: dict[tuple[Message, int], float] = {}
    now, done = [0.0] * job.stages, [0] * job.stages
    while any(done[stage] < len(programs[stage]) for stage in range(job.stages)):
        for stage in range(job.stages):
            if done[stage] == len(programs[stage]):
                continue
            add, action = _adder(rows, step, replica, stage), programs[stage][done[stage]]
            if isinstance(action, tuple):
                name, micro = action
                took = 0.05 * (1 if name == "forward" else 2) * length[micro] * (1 + job.noise * draw.standard_normal())
                slow = (SLOW_STAGE in job.faults and stage == job.slow[1]) or (
                    SLOW_RANK in job.faults and (replica, stage) == job.slow
                )
                took *= job.times if slow else 1
                add(f"{name}-compute", micro, micro, now[stage], now[stage] + took)
                now[stage] += took
                done[stage] += 1
                continue
            for message in action:
                came.setdefault((message, stage), now[stage])
            others = [(message, 1 if message[0] == "forward" else -1) for message in action]
            sides = [(m, m[1] + (toward if m[1] == stage else 0)) for m, toward in others]
            if any(side not in came for side in sides):
                continue
            end = max(now[stage], *(came[side] for side in sides)) + SEND_S
            for name, source, micro in action:
                add(f"{name}-{'send' if source == stage else 'recv'}", micro, -1, now[stage], end)
            now[stage] = end
            done[stage] += 1
    return now


def _one_f_one_b(stage: int, stages: int, micro_batches: int) -> list[tuple[str, int] | list[Message]]:
    """Computations, and the messages between them that are exchanged at once, as Megatron does."""
    warm = min(stages - stage - 1, micro_batches)
    program: list[tuple[str, int] | list[Message]] = []

    def exchange(*messages: Message) -> None:
        between = [m for m in messages if 0 <= m[1] < stages and 0 <= m[1] + (1 if m[0] == "forward" else -1) < stages]
        if between:
            program.append(between)

    for micro in range(warm):
        exchange(("forward", stage - 1, micro))
        program.append(("forward", micro))
        exchange(("forward", stage, micro))
    left = micro_batches - warm
    exchange(*[("forward", stage - 1, warm)] * (left > 0))
    for micro in range(left):
        program.append(("forward", warm + micro))
        exchange(("forward", stage, warm + micro), ("backward", stage + 1, micro))
        program.append(("backward", micro))
        more = [("forward", stage - 1, warm + micro + 1)] * (micro + 1 < left)
        exchange(("backward", stage, micro), *more)
    for micro in range(left, micro_batches):
        exchange(("backward", stage + 1, micro))
        program.append(("backward", micro))
        exchange(("backward", stage, micro))
    return program
