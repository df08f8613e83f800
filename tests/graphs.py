"""Step graphs written by hand.

A program is a row of points, each with the ms of own work before it: `5 I0 3 W0 2` works 5 ms, issues task 0, works
3 ms, waits for task 0, and works 2 ms to the end of the step. `B` begins a backward. `O0` waits for what another step
supplies. `A` begins the next action of a pipeline's schedule, and `E` ends it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dsprof.analyzer.graph.step_graph import (
    PARTS,
    Costs,
    CrossStepEdges,
    Edges,
    Measured,
    StepGraph,
    Steps,
    Structure,
    Task,
)

COMPUTE = PARTS.index("compute")


def steps_of(
    programs: Sequence[str],
    transfers: Sequence[float] = (),
    tasks: Sequence[Task] = (),
    steps: int = 1,
    wires: Sequence[float] = (),
    sizes: Sequence[float] = (),
    outside: int = 0,
    arrivals: Sequence[tuple[int, int]] = (),
    actions: Sequence[Sequence[tuple[str, int, int]]] = (),
) -> Steps:
    """Like-shaped steps of these programs, one a thread. `arrivals`: (outside, task) that other steps supply;
    `actions`: of each program, (name, stage, micro-batch) in order."""
    tasks = tasks or [Task("0", gradient=True)] * len(transfers)
    thread: list[int] = []
    work: list[float] = []
    backward: list[bool] = []
    acts: list[tuple[str, int, int]] = []
    edges: list[tuple[int, int]] = []  # tasks and outside are negative until the segments are counted
    for r, program in enumerate(programs):
        begins, waits, spent = False, list[int](), 0.0
        following, act = iter(actions[r] if actions else ()), ("", -1, -1)
        for item in [*program.split(), "end"]:
            if item[0].isdigit():
                spent += float(item)
                continue
            edges += [(source, len(work)) for source in waits]
            work.append(spent)
            thread.append(r)
            backward.append(begins)
            acts.append(act)
            act = next(following) if item == "A" else ("", -1, -1) if item == "E" else act
            begins, waits, spent = item == "B", [], 0.0
            if item[0] == "I":
                edges.append((len(work) - 1, -1 - int(item[1:])))
            elif item[0] == "W":
                waits = [-1 - int(number) for number in item[1:].split(",")]
            elif item[0] == "O":
                waits = [-1 - len(tasks) - int(item[1:])]
    segments = len(work)

    def operation(number: int) -> int:
        return number if number >= 0 else segments - 1 - number

    pairs = [(operation(a), operation(b)) for a, b in edges]
    pairs += [(segments + len(tasks) + o, segments + c) for o, c in arrivals]
    structure = Structure(
        thread=np.array(thread, np.int64),
        backward=np.array(backward, bool),
        action=np.array([op for op, _, _ in acts], object),
        place=np.array([of[1:] for of in acts], np.int64),
        tasks=tuple(tasks),
        outside=outside,
        edges=Edges(np.array([a for a, _ in pairs], np.int64), np.array([b for _, b in pairs], np.int64)),
        threads=len(programs),
    )
    parts = np.zeros((segments, steps, len(PARTS)))
    parts[..., COMPUTE] = np.array(work)[:, None]

    def column(values: Sequence[float]) -> np.ndarray:
        found = np.zeros((len(tasks), steps))
        found[: len(values)] = np.array(values, float).reshape(-1, 1)
        return found

    return Steps(
        structure=structure,
        numbers=np.arange(steps),
        costs=Costs(parts, column(transfers), column(wires), column(sizes or [1.0] * len(tasks))),
        measured=Measured(np.zeros((outside, steps)), np.zeros((segments, steps)), *np.zeros((2, len(tasks), steps))),
    )


def graph_of(steps: Steps, cross_step_edges: CrossStepEdges | None = None, follow: bool = True) -> StepGraph:
    """A graph of these steps alone, each of which follows the one before."""
    return StepGraph.of_one_template(steps, follow=follow, cross_step_edges=cross_step_edges)
