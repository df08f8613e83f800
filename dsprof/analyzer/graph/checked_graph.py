"""The graph of a run, and whether a replay of it is to be believed: of ranks that were not all captured, too."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from dsprof.run import RunInfo

from ..align.topology import Topology
from ..freed_memory import give_back
from .build_graph import build_graph
from .chains import RankChains
from .chains_of_ranks import without_unseen_waits
from .step_graph import StepGraph
from .validate import ReplayCheck, check


def checked_graph(
    chains: Mapping[int, RankChains],
    collectives: pd.DataFrame,
    steps: pd.DataFrame,
    run: RunInfo,
    topology: Topology,
    clock_error_ms: float,
) -> tuple[StepGraph | None, ReplayCheck | None]:
    """The graph (`build_graph`) and the check of it; None where no step is judged.

    Where ranks were not captured, waits for their messages are taken for nothing of a rank's own
    (`without_unseen_waits`), unless a replay then misses what was measured.

    chains: by rank
    """
    if (run.world_size or 0) > len(chains):
        held = without_unseen_waits(chains, topology)
        if held is not chains:
            graph, checked = _checked(held, collectives, steps, run, clock_error_ms)
            if checked is None or checked.refusal is None:
                return graph, checked
    return _checked(chains, collectives, steps, run, clock_error_ms)


def _checked(
    chains: Mapping[int, RankChains],
    collectives: pd.DataFrame,
    steps: pd.DataFrame,
    run: RunInfo,
    clock_error_ms: float,
) -> tuple[StepGraph | None, ReplayCheck | None]:
    graph = build_graph(chains, collectives, steps, run)
    give_back()
    return graph, check(graph, clock_error_ms) if graph is not None else None
