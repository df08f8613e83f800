"""What-ifs on own work: some of it gone, more of it, or all of it scaled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ..graph import LAG, PARTS, SHARDING_PART, StepGraph, Steps
from . import WhatIf

Float = npt.NDArray[np.float64]
Bool = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Change:
    """Own work that would go away if one fault were mended.

    removed: part of WORK -> ms, [R, S] over the judged steps in order; negative where a rank would get more to do.
              What FSDP does for its units is compute; what a thread stood still for in lanes of its own is its work.
    where_beyond_peers: it goes from where the rank takes longer than those that do the same work, between the same
              collectives; else from all of the step in proportion.
    """

    removed: Mapping[str, Float]
    where_beyond_peers: bool = False


def scale(factors: Mapping[str, float], threads: Sequence[int] | None = None) -> WhatIf:
    """Each part of the own work of these threads (all, by default), and of their own lanes, times its factor."""

    def change(graph: StepGraph) -> StepGraph:
        factor = np.ones(len(PARTS))
        for part, of_part in factors.items():
            factor[PARTS.index(part)] = of_part

        def scaled(steps: Steps) -> Steps:
            structure = steps.structure
            those = range(structure.threads) if threads is None else threads
            chosen = np.isin(structure.thread, those)
            of_task = [factors.get(task.part, 1.0) if task.owner in those else 1.0 for task in structure.tasks]
            return replace(
                steps,
                work=np.where(chosen[:, None, None], steps.work * factor, steps.work),
                transfer=steps.transfer * np.array(of_task)[:, None],
            )

        return graph.with_shapes(tuple(scaled(steps) for steps in graph.shapes))

    return change


def less(measured: StepGraph, change: Change, teams: Sequence[Bool]) -> WhatIf:
    """The work of `change` taken away, in the segments in which it was measured to lie; in judged steps only.

    teams: [R] each, ranks that are to do the same work.
    """
    amounts = [_amounts(measured, index, change, teams) for index in range(len(measured.shapes))]

    def apply(graph: StepGraph) -> StepGraph:
        return graph.with_shapes(tuple(
            replace(
                steps,
                work=np.maximum(steps.work - amount.work, 0.0),
                transfer=steps.transfer if amount.transfer is None else np.maximum(steps.transfer - amount.transfer, 0),
            )
            for steps, amount in zip(graph.shapes, amounts, strict=True)
        ))  # fmt: skip

    return apply


@dataclass(frozen=True)
class _Amount:
    """What goes from each segment of a shape, [W, S, PARTS] ms, and from each task, [C, S] ms; None: nothing."""

    work: Float
    transfer: Float | None


def _amounts(graph: StepGraph, index: int, change: Change, teams: Sequence[Bool]) -> _Amount:
    steps = graph.shapes[index]
    structure = steps.structure
    found = np.zeros(steps.work.shape)
    columns = graph.columns_of(index)
    chosen = np.flatnonzero(graph.judged[columns])
    judged = (np.cumsum(graph.judged) - 1)[columns[chosen]]
    if not len(chosen):
        return _Amount(found, None)
    removed = {part: of_part[:, judged] for part, of_part in change.removed.items()}
    stood = _stood_still(steps)
    transfer = np.zeros(steps.transfer.shape) if stood is not None else None
    owner, part_of = (np.array([getattr(task, name) for task in structure.tasks]) for name in ("owner", "part"))
    for part, of_part in removed.items():
        work = steps.work[:, chosen][..., _within(part)]
        total = np.zeros((structure.threads, len(chosen)))
        np.add.at(total, structure.thread, work.sum(axis=-1))
        if stood is not None and transfer is not None:
            mine = np.flatnonzero(part_of == part)
            np.add.at(total, owner[mine], stood[mine][:, chosen])
            share = np.minimum(of_part / np.maximum(total, 1e-9), 1.0)
            waited = stood[mine][:, chosen] * share[owner[mine]]
            transfer[np.ix_(mine, chosen)] = waited
            if change.where_beyond_peers:  # the rest of it lies in the segments
                removed[part] = of_part.copy()
                np.subtract.at(removed[part], owner[mine], waited)
        if not change.where_beyond_peers:
            share = np.minimum(of_part / np.maximum(total, 1e-9), 1.0)
            for i, k in enumerate(_within(part)):
                found[:, chosen, k] = work[..., i] * share[structure.thread]
    if change.where_beyond_peers:
        together = sum(removed.values(), np.zeros((structure.threads, len(chosen))))
        for r in np.flatnonzero(together.any(axis=1)).tolist():
            team = next(team for team in teams if team[r])
            peers = [p for p in np.flatnonzero(team).tolist() if not together[p].any()]
            mine_of = structure.of_thread(r)
            parts = [k for part in removed for k in _within(part)]
            found[mine_of, chosen] = _beyond_peers(steps, chosen, r, peers, together[r], parts)
    return _Amount(found, transfer)


def _stood_still(steps: Steps) -> Float | None:
    """For how long each task was under way while the thread that owns it waited for its lane, [C, S] ms; None without
    lanes of their own."""
    structure = steps.structure
    lane_of = np.array([task.lane if task.owner >= 0 else "" for task in structure.tasks], object)
    if not (lane_of != "").any():
        return None
    over = steps.began + steps.work.sum(axis=-1) - steps.work[..., LAG]
    found = np.zeros(steps.transfer.shape)
    for task, segment in structure.waits[lane_of[structure.waits[:, 0]] != ""].tolist():
        mine = np.flatnonzero(lane_of == lane_of[task])
        since = np.maximum(over[segment - 1], steps.ended[mine] - steps.transfer[mine])
        found[mine] += np.maximum(np.minimum(steps.began[segment], steps.ended[mine]) - since, 0.0)
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
