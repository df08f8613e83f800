"""How fast step graphs are replayed: made-up jobs of data-parallel ranks and of groups of tensor-parallel ones.

    python benchmarks/replay.py          # a minute; writes benchmarks/results/replay.json

A rank's step is 400 segments and takes part in 100 collectives, so it counts for 500 operations. Compiling a structure
(its order of evaluation) is told apart: it is done once for all replays of like-shaped steps.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path

import numpy as np

from dsprof.analyzer.graph.replay import replay, replay_all
from dsprof.analyzer.graph.step_graph import PARTS, Costs, Edges, Measured, StepGraph, Steps, Structure, Task
from dsprof.analyzer.whatif import apply
from dsprof.analyzer.whatif.work import ScaleWork

HERE = Path(__file__).parent
SEGMENTS, COLLECTIVES, STEPS = 400, 100, 100
CASES = ((2, 1), (8, 1), (64, 1), (64, 32), (256, 1), (512, 1), (2, 32))
"""Ranks, variants."""


def make_graph(ranks: int, steps: int = STEPS, peer_group: int = 8) -> StepGraph:
    """Every second collective is one of all ranks, the others of peer_groups of neighbouring ranks."""
    draw = np.random.default_rng(ranks)
    thread = np.repeat(np.arange(ranks), SEGMENTS)
    segments = len(thread)
    tasks: list[Task] = []
    source: list[int] = []
    target: list[int] = []
    for c in range(COLLECTIVES):
        issued, waited = 4 * c + 1, min(4 * c + 3, SEGMENTS - 1)
        peer_groups = (
            [range(ranks)] if c % 2 else [range(r, min(r + peer_group, ranks)) for r in range(0, ranks, peer_group)]
        )
        for number, members in enumerate(peer_groups):
            task = segments + len(tasks)
            tasks.append(Task("all" if c % 2 else f"peer_group {number}", workers=2))
            source += [r * SEGMENTS + issued for r in members] + [task] * len(members)
            target += [task] * len(members) + [r * SEGMENTS + waited for r in members]
    structure = Structure(
        thread=thread,
        backward=np.zeros(segments, bool),
        action=np.full(segments, "", object),
        tasks=tuple(tasks),
        outside=0,
        edges=Edges(np.array(source), np.array(target)),
        threads=ranks,
    )
    work = np.zeros((segments, steps, len(PARTS)))
    work[..., 0] = draw.uniform(0.1, 0.3, (segments, steps))
    transfer = draw.uniform(0.05, 0.2, (len(tasks), steps))
    nothing = np.zeros(transfer.shape)
    measured = Measured(np.zeros((0, steps)), work[..., 0], nothing)
    alike = Steps(structure, np.arange(steps), Costs(work, transfer, nothing, nothing), measured)
    return StepGraph.of_one_template(alike, follow=True)


def measure(ranks: int, variants: int, rounds: int) -> dict[str, float | int]:
    graph = make_graph(ranks)
    began = time.process_time()
    _ = graph.templates[0].structure.plan
    compiled = time.process_time() - began
    taken = []
    for _ in range(rounds):
        graphs = (
            [apply(graph, [ScaleWork({"compute": 1 - 0.01 * i})]) for i in range(variants)] if variants > 1 else [graph]
        )
        began = time.process_time()
        replay_all(graphs) if variants > 1 else replay(graph)
        taken.append(time.process_time() - began)
    seconds = statistics.median(taken)
    operations = ranks * STEPS * (SEGMENTS + COLLECTIVES) * variants
    return {
        "ranks": ranks, "steps": STEPS, "variants": variants, "operations": operations,
        "compile_s": round(compiled, 4), "replay_s": round(seconds, 4),
        "million_operations_a_second": round(operations / seconds / 1e6, 1),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "replay.json")
    args = parser.parse_args()
    cases = []
    for ranks, variants in CASES:
        cases.append(measure(ranks, variants, args.rounds))
        print(cases[-1], flush=True)
    machine = {"cores": os.cpu_count(), "python": platform.python_version(), "numpy": np.__version__}
    result = {"what": "CPU seconds of one replay, median of rounds", "machine": machine, "cases": cases}
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
