"""What each chain of a graph works in a step, and which chains are to do the same."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ..arrays import Bool, Float, Int
from .step_graph import PARTS, SHARDING_PART, StepGraph


def chain_work(graph: StepGraph, part: str) -> Float:
    """Own work of this part of each chain in each judged step, ms, [T, S]."""
    places = [PARTS.index(part), SHARDING_PART] if part == "compute" else [PARTS.index(part)]
    found = np.zeros((len(graph.ranks), len(graph.numbers)))
    for index, steps in enumerate(graph.templates):
        columns = graph.columns_of(index)
        spent = np.zeros((len(graph.ranks), len(columns)))
        np.add.at(spent, steps.structure.thread, steps.work[..., places].sum(axis=-1, dtype=np.float64))
        found[:, columns] = spent
    judged: Float = found[:, graph.judged]
    return judged


def hosts(graph: StepGraph) -> Int:
    """Of each rank the chain that is its training thread, [R]."""
    found = np.arange(graph.leads)
    beside = np.arange(graph.leads, len(graph.ranks))
    rank = {rank: i for i, rank in enumerate(graph.ranks[: graph.leads])}
    found[[rank[of] for of in graph.ranks[graph.leads :]]] = beside
    return found


def chain_groups(graph: StepGraph, peer_groups: Sequence[Bool]) -> list[Bool]:
    """Which chains are to do the same work, [T] each: those that lead the ranks of a peer group, [R], and those beside
    them."""
    of_host = hosts(graph)

    def members(chains: Iterable[int]) -> Bool:
        found = np.zeros(len(graph.ranks), bool)
        found[list(chains)] = True
        return found

    found = []
    for group in peer_groups:
        ranks = np.flatnonzero(group)
        found.append(members(ranks.tolist()))
        beside = of_host[ranks]
        if (beside >= graph.leads).any():
            found.append(members(beside[beside >= graph.leads].tolist()))
    return found
