"""Editing the structure of like-shaped steps: edges, tasks and segments that come and go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from ..graph.step_graph import Crossings, StepGraph, Steps

Int = npt.NDArray[np.int64]

GONE: Final = -1


@dataclass(frozen=True)
class Edited:
    """`steps` as they are now; `operations`: what number each segment and task has that there was, or GONE."""

    steps: Steps
    operations: Int


def edit(graph: StepGraph, change: Callable[[Steps], Edited | None]) -> StepGraph:
    """The graph with each shape changed, where `change` does not return None; edges across steps follow."""
    edited = [change(steps) for steps in graph.shapes]
    shapes = tuple(new.steps if new is not None else old for old, new in zip(graph.shapes, edited, strict=True))
    crossings = graph.crossings
    if len(crossings):
        source = crossings.source.copy()
        for index, new in enumerate(edited):
            if new is not None:
                mine = crossings.source_shape == index
                source[mine] = new.operations[source[mine]]
        kept = source != GONE
        crossings = Crossings(
            crossings.source_shape[kept], source[kept], crossings.source_column[kept],
            crossings.target_shape[kept], crossings.target[kept], crossings.target_column[kept],
        )  # fmt: skip
    return replace(graph, shapes=shapes, crossings=crossings)
