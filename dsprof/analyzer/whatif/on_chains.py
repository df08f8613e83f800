"""Changes of a rank's work as changes of the work of its chains."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np

from ..graph.chain_work import hosts
from ..graph.step_graph import StepGraph
from .work import Change

OF_DEVICE: Final = ("compute", "optimizer")
"""Parts of a rank's work that its device does where there is one; all else its training thread does."""


def on_chains(graph: StepGraph, change: Change) -> Change:
    """The same change with arrays of chains, [T, S], where it has arrays of ranks, [R, S]."""
    if len(graph.ranks) == graph.leads:
        return change
    of_host = hosts(graph)
    removed = {}
    for part, of_part in change.removed.items():
        if len(of_part) == len(graph.ranks):
            removed[part] = of_part
            continue
        removed[part] = np.zeros((len(graph.ranks), of_part.shape[1]))
        removed[part][np.arange(graph.leads) if part in OF_DEVICE else of_host] = of_part
    return replace(change, removed=removed)
