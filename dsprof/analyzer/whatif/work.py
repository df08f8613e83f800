"""What-ifs on own work: some of it gone, more of it, or all of it scaled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ..graph import PARTS, SHARDING_PART, StepGraph, Steps
from . import WhatIf

Float = npt.NDArray[np.float64]
Bool = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Change:
    """Own work that would go away if one fault were mended.

    removed: part of WORK -> ms, [R, S] over the judged steps in order; negative where a rank would get more to do.
              What FSDP does for its units is compute.
    where_beyond_peers: it goes from where the rank takes longer than those that do the same work, between the same
              collectives; else from all of the step in proportion.
    """

    removed: Mapping[str, Float]
    where_beyond_peers: bool = False


def scale(factors: Mapping[str, float], threads: Sequence[int] | None = None) -> WhatIf:
    """Each part of the own work of these threads (all, by default) multiplied by its factor."""

    def change(graph: StepGraph) -> StepGraph:
        factor = np.ones(len(PARTS))
        for part, of_part in factors.items():
            factor[PARTS.index(part)] = of_part

        def scaled(steps: Steps) -> Steps:
            chosen = np.isin(steps.structure.thread, range(steps.structure.threads) if threads is None else threads)
            return replace(steps, work=np.where(chosen[:, None, None], steps.work * factor, steps.work))

        return graph.with_shapes(tuple(scaled(steps) for steps in graph.shapes))

    return change


def less(measured: StepGraph, change: Change, teams: Sequence[Bool]) -> WhatIf:
    """The work of `change` taken away, in the segments in which it was measured to lie; in judged steps only.

    teams: [R] each, ranks that are to do the same work.
    """
    amounts = [_amounts(measured, index, change, teams) for index in range(len(measured.shapes))]

    def apply(graph: StepGraph) -> StepGraph:
        return graph.with_shapes(tuple(
            replace(steps, work=np.maximum(steps.work - amount, 0.0))
            for steps, amount in zip(graph.shapes, amounts, strict=True)
        ))  # fmt: skip

    return apply


def _amounts(graph: StepGraph, index: int, change: Change, teams: Sequence[Bool]) -> Float:
    """What goes from each segment of a shape, [W, S, PARTS] ms."""
    steps = graph.shapes[index]
    found = np.zeros(steps.work.shape)
    columns = graph.columns_of(index)
    chosen = np.flatnonzero(graph.judged[columns])
    judged = (np.cumsum(graph.judged) - 1)[columns[chosen]]
    if not len(chosen):
        return found
    if change.where_beyond_peers:
        removed = sum((of_part[:, judged] for of_part in change.removed.values()), np.zeros(()))
        for r in np.flatnonzero(np.asarray(removed).any(axis=1)).tolist():
            team = next(team for team in teams if team[r])
            peers = [p for p in np.flatnonzero(team).tolist() if not removed[p].any()]
            mine = steps.structure.of_thread(r)
            parts = [k for part in change.removed for k in _within(part)]
            found[mine, chosen] = _beyond_peers(steps, chosen, r, peers, removed[r], parts)
        return found
    thread = steps.structure.thread
    for part, of_part in change.removed.items():
        work = steps.work[:, chosen][..., _within(part)]
        total = np.zeros((steps.structure.threads, len(chosen)))
        np.add.at(total, thread, work.sum(axis=-1))
        share = np.minimum(of_part[:, judged] / np.maximum(total, 1e-9), 1.0)
        for i, k in enumerate(_within(part)):
            found[:, chosen, k] = work[..., i] * share[thread]
    return found


def _within(part: str) -> list[int]:
    """Places in PARTS of what a part of the budget consists of."""
    return [PARTS.index(part), SHARDING_PART] if part == "compute" else [PARTS.index(part)]


def _beyond_peers(
    steps: Steps, columns: npt.NDArray[np.int64], thread: int, peers: list[int], removed: Float, parts: list[int]
) -> Float:
    """`removed` ms of each step, [S], from where a thread takes longer for these parts than its peers do between the
    same points; where they do other things, from all of it in proportion. [segments, S, PARTS]."""
    structure = steps.structure
    mine = structure.of_thread(thread)
    work = steps.work[mine][:, columns]
    taken = work[..., parts].sum(axis=-1)
    alike = [p for p in peers if structure.programs[p] == structure.programs[thread]]
    share = taken / np.maximum(taken.sum(axis=0), 1e-9)
    if alike:
        each = [steps.work[structure.of_thread(p)][:, columns][..., parts].sum(axis=-1).mean(axis=1) for p in alike]
        more = np.clip(taken.mean(axis=1) - np.median(each, axis=0), 0, None)
        if more.any():
            share = np.broadcast_to((more / more.sum())[:, None], taken.shape)
    gone = np.clip(share * removed / np.maximum(taken, 1e-9), None, 1.0)
    amounts = np.zeros(work.shape)
    amounts[..., parts] = work[..., parts] * gone[..., None]
    return amounts
