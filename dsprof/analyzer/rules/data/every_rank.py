"""Equal shares for all ranks of a job, of which some were not captured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from ...arrays import Float
from ...graph.step_graph import StepGraph
from ...study import Study
from ...whatif.uncaptured import waits_for_uncaptured
from ...whatif.work import Change


def of_every_rank(study: Study, change: Change) -> Change:
    """Equal shares of what ranks compute are those of ranks that were not captured, too: what others wait for these
    goes as well, as far as it comes and goes."""
    if not study.ranks_missing or study.led_by_devices:
        return change
    graph = study.need_graph()
    return replace(change, waits=waits_for_uncaptured(graph, partial(_members, study), _most_ms(graph, change)))


def _most_ms(graph: StepGraph, change: Change) -> Float:
    """What a captured rank computes beyond an equal share at most in each judged step: one that was not captured will
    not do more."""
    spans = change.spans
    if spans is None:
        most: Float = change.removed["compute"].max(axis=0)
        return most
    of_rank = np.zeros((len(graph.ranks), len(graph.judged_steps)))
    np.add.at(of_rank, (spans.rank, spans.step), np.clip(spans.share, 0.0, None) * spans.ms)
    found: Float = of_rank.max(axis=0)
    return found


def _members(study: Study, group: str) -> Sequence[int] | None:
    """The ranks of a process group; None: not known."""
    told = study.run.group(group).get("ranks")
    return told if isinstance(told, list) else None
