"""What each layer of a model takes for one micro-batch, in the model's order: what stages can be divided at.

The engine times its layers in every run. Of torch's pipelines the modules are timed at level full: there a stage's
layers are the modules directly below the outermost one that calls several.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import pandas as pd

from dsprof.schema import SHARDING

from ..arrays import Int
from ..study import Study, once

COLUMNS: Final = ("step", "kind", "name", "lane", "stage", "start_ns", "dur_ns")


@dataclass(frozen=True)
class StageLayer:
    """A layer of the stage: mean over steps and micro-batches of its forward, and its part of the stage's backward (B
    and W together), which is divided as the forward is; ms."""

    name: str
    stage: int
    forward_ms: float
    backward_ms: float

    @property
    def ms(self) -> float:
        return self.forward_ms + self.backward_ms


@once
def stage_layers(study: Study) -> tuple[StageLayer, ...] | None:
    """The layers of all stages, in order, as the lowest rank of each stage had them; None where a stage's were not
    timed."""
    found: list[StageLayer] = []
    first: dict[int, int] = {}
    for rank, stages in sorted(study.topology.stage_of.items()):
        for stage in stages:
            first.setdefault(stage, rank)
    if sorted(first) != list(range(len(first))):
        return None
    tables: dict[int, pd.DataFrame] = {}
    for stage, rank in sorted(first.items()):
        if rank not in tables:
            tables[rank] = study.trace.read(rank, COLUMNS)
        layers = _of_stage(tables[rank], stage, study.step_numbers)
        if not layers:
            return None
        found += layers
    if len({layer.name for layer in found}) < len(found):  # each stage is a module of its own
        found = [replace(layer, name=f"{layer.name} of stage {layer.stage}") for layer in found]
    return tuple(found) or None


@once
def model_layers(study: Study) -> tuple[StageLayer, ...] | None:
    """The layers of the whole model: those of all stages; without a pipeline, of level full, those of the lowest rank,
    all of stage 0. None where they were not timed."""
    if study.topology.stage_of:
        return stage_layers(study)
    if not study.ranks:
        return None
    rows = study.trace.read(study.ranks[0], COLUMNS)
    done = rows[rows["dur_ns"].notna() & rows["step"].isin(study.step_numbers) & (rows["lane"] == "main")]
    passes = done[(done["kind"] == "phase") & done["name"].isin(["forward", "backward"])]
    forwards = passes[passes["name"] == "forward"].sort_values("start_ns")
    backward_ns = float(passes.loc[passes["name"] == "backward", "dur_ns"].sum())
    layers = _layers(done, forwards, backward_ns, 0)
    return tuple(layers) if len(layers) > 1 else None


def _of_stage(rows: pd.DataFrame, stage: int, steps: Int) -> list[StageLayer]:
    done = rows[rows["dur_ns"].notna() & rows["step"].isin(steps) & (rows["lane"] == "main")]
    acted = done[(done["kind"] == "pipe") & (done["stage"] == stage)]
    forwards = acted[acted["name"] == "F"].sort_values("start_ns")
    backward_ns = float(acted.loc[acted["name"].isin(["B", "W"]), "dur_ns"].sum())
    return _layers(done, forwards, backward_ns, stage)


def _layers(done: pd.DataFrame, forwards: pd.DataFrame, backward_ns: float, stage: int) -> list[StageLayer]:
    """Of these forwards. done: rows of their thread that ended; backward_ns: what all their backwards took."""
    if forwards.empty:
        return []
    modules = done[(done["kind"] == "module") & (done["name"] != SHARDING)].sort_values("start_ns")
    begin = modules["start_ns"].to_numpy(np.int64)
    end = begin + modules["dur_ns"].to_numpy(np.int64)
    names = modules["name"].astype(str).to_numpy(object)
    per_call: list[list[tuple[str, int]]] = []
    for start, length in zip(forwards["start_ns"].tolist(), forwards["dur_ns"].tolist(), strict=True):
        inside = slice(*np.searchsorted(begin, [start, start + length]))
        per_call.append(_directly_below(names[inside], begin[inside], end[inside]))
    order = max(({name: None for name, _ in call} for call in per_call), key=len)
    if not order:
        return []
    forward = {name: np.mean([sum(ns for n, ns in call if n == name) for call in per_call]) / 1e6 for name in order}
    total = float(forwards["dur_ns"].mean()) / 1e6
    backward = backward_ns / 1e6 / len(forwards)
    times = backward / total if total else 0.0
    return [StageLayer(name, stage, float(ms), float(ms) * times) for name, ms in forward.items()]


def _directly_below(names: Sequence[str], begin: Int, end: Int) -> list[tuple[str, int]]:
    """Name and ns of the calls at the first depth at which there are several; of one alone if there never are."""
    by_depth: dict[int, list[tuple[str, int]]] = {}
    open_ends: list[int] = []
    for name, start, stop in zip(names, begin.tolist(), end.tolist(), strict=True):
        while open_ends and open_ends[-1] <= start:
            open_ends.pop()
        by_depth.setdefault(len(open_ends), []).append((str(name), stop - start))
        open_ends.append(stop)
    several = [depth for depth, calls in sorted(by_depth.items()) if len(calls) > 1]
    return by_depth[several[0]] if several else by_depth.get(0, [])
