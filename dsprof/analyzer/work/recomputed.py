"""What backward computes again of forward (activation checkpointing), and in how many pieces."""

from __future__ import annotations

import numpy as np
import pandas as pd

from ..arrays import Float
from ..columns import RankRows
from ..study import Study, once
from .stream_phases import outermost_rows

RECOMPUTE, BACKWARD = "recompute", "backward"


@once
def recomputed_ms(study: Study) -> Float | None:
    """ms of forward that backward computes again, [R, S]; None where there is none, or a device's time for it was not
    seen. On a device its own time counts: which thread of the autograd engine launches it is no matter."""
    if study.on_gpu:
        again = study.stream_phases
        again = again[again["name"] == RECOMPUTE]
    else:
        again = _phases(study, RECOMPUTE)
    if again.empty:
        return None
    rows = RankRows(again)
    ms = rows.real("ms") if study.on_gpu else rows.whole("dur_ns") / 1e6
    return np.nan_to_num(study.by_step(rows, ms, np.arange(len(rows))))


def _phases(study: Study, name: str) -> pd.DataFrame:
    """The phases of a name that lie in no other of that name: dsprof's engine records what it computes again, and
    within that, on the lane of the thread, the modules are recorded by their hooks."""
    rows = study.phase_rows
    there = rows.are("name", name) & rows.known("dur_ns") & np.isin(rows.whole("step"), study.step_numbers)
    phases = rows.table.take(np.flatnonzero(there))
    return phases[outermost_rows(phases, ("rank",))] if len(phases) else phases


def pieces_a_step(study: Study) -> float:
    """How many pieces a rank computes again in a step, mean."""
    return len(_phases(study, RECOMPUTE)) / max(len(study.ranks) * len(study.step_numbers), 1)


def pieces_at_once(study: Study) -> int:
    """How many pieces of a model (blocks) are computed again, at most, for what is kept at once without that: those of
    a backward; in a pipeline, where several micro-batches are under way, those of a whole step. 0: none."""
    again = _phases(study, RECOMPUTE)
    if again.empty:
        return 0
    of_step = again.groupby(["rank", "step"]).size()
    if study.in_stages:
        return int(of_step.max())
    backwards = _phases(study, BACKWARD).groupby(["rank", "step"]).size().reindex(of_step.index).fillna(1).clip(lower=1)
    return int(np.ceil((of_step / backwards).max()))
