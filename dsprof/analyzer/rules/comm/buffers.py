"""comm.buffers: DistributedDataParallel sends rank 0's buffers to all ranks before each forward, changed or not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import pandas as pd

from ... import signals
from ...arrays import Float
from ...budget.activity import BUFFER
from ...candidate import Candidate, Price
from ...finding import Evidence, Finding, Fix, Gain, Where
from ...price.calibration import ModelError
from ...price.gains import sure_up_to
from ...study import Study
from ...text import ms, size
from ...whatif.needless import WithoutBuffers
from ...whatif.select import Communications
from ..base import ddp_argument_fix
from ..rule import Found, Look, Rule

SMALL: Final = 1 << 20
"""Bytes a step: running statistics of less are no finding, since ranks that do not share them train differently."""
MOST_MS_PER_BYTE: Final = 3e-6
"""No more than this is sure of what is gained: packing, sending and unpacking a byte take less on any machine. What few
bytes take longer is that ranks wait for one another, and without them they may do so at the next collective."""


def broadcast_buffers(study: Study) -> Found:
    """The broadcasts of buffers, and what is copied for them, gone."""
    rows = study.judged_collectives
    chosen = rows.are("purpose", BUFFER) & (rows.whole("ranks") > 1)
    if not chosen.any():
        return []
    table = rows.table.take(np.flatnonzero(chosen))
    moved = float(table["bytes"].sum()) / len(study.step_numbers)
    if _statistics(study) and moved < SMALL:  # to have them alike on all ranks costs a message
        return []
    graph = study.need_graph()
    packed: Float = np.zeros((len(graph.ranks), len(study.step_numbers)))
    if not study.led_by_devices:  # there the host only launches the copies
        packed = _packed_ms(study)
    replayed = np.isin(study.step_numbers, study.replayed_steps)
    change = WithoutBuffers(Communications(purposes=(BUFFER,)), packed[:, replayed])
    evidence = (
        Evidence("buffers broadcast a step", round(moved / 2**20, 3), "MiB", 0.0),
        Evidence("broadcasts of buffers a step", round(len(table) / len(study.step_numbers), 2), "count", 0),
        Evidence("packing before the first of a forward", round(float(packed.mean()), 3), "ms", 0.0),
    )
    where = Where(group=str(table["group"].mode().iloc[0]), op="broadcast", steps=study.step_range)

    def say(price: Price) -> Finding:
        title = f"{size(moved)} of buffers are broadcast before each forward: {ms(price.gain.ms)} of each step"
        return Finding(
            "comm.buffers", title, "info", where, evidence, _surely(price.gain, moved), _fixes(study, price),
            share=None if price.share is None else _surely(price.share, moved),
        )  # fmt: skip

    return [Candidate("comm.buffers", change, say)]


def _surely(gain: Gain, moved_bytes: float) -> Gain:
    return sure_up_to(gain, MOST_MS_PER_BYTE * moved_bytes)


def _statistics(study: Study) -> bool:
    """Whether some model is known to have running statistics among its buffers."""
    return any(fact.get("statistics") for fact in study.facts.get("ddp", []))


def _packed_ms(study: Study) -> Float:
    """From the beginning of a forward to the first broadcast in it, ms, [R, S]: DDP packs the buffers first of all.
    Mean over a step's forwards, of those that are trained."""
    forwards = study.training_phases
    forwards = forwards[(forwards["name"] == "forward") & forwards["step"].isin(study.step_numbers)]
    found = np.zeros((len(study.ranks), len(study.step_numbers)))
    broadcasts = study.issued(BUFFER)
    of_rank, issued_by = (dict(iter(table.groupby("rank"))) for table in (forwards, broadcasts))
    for place, rank in enumerate(study.ranks):
        mine = of_rank.get(rank, forwards[:0]).sort_values("start_ns")
        start = mine["start_ns"].to_numpy(np.int64)
        end = start + mine["dur_ns"].to_numpy(np.int64)
        issued = np.sort(issued_by.get(rank, broadcasts[:0])["issue_ns"].to_numpy(np.int64))
        if not len(issued) or not len(start):
            continue
        first = issued[np.minimum(np.searchsorted(issued, start), len(issued) - 1)]
        inside = (first >= start) & (first < end)
        gaps = pd.Series((first - start)[inside] / 1e6).groupby(mine["step"].to_numpy(np.int64)[inside]).mean()
        found[place] = gaps.reindex(study.step_numbers).fillna(0.0).to_numpy(np.float64)
    return found


def _fixes(study: Study, price: Price) -> tuple[Fix, ...]:
    facts = [fact for fact in study.facts.get("ddp", []) if fact.get("broadcast_buffers", True)]
    fact: Mapping[str, Any] = max(facts, key=lambda one: one.get("buffer_bytes", 0), default={})
    constants = Fix(
        "code",
        "keep what never changes (masks, tables of positions) out of the buffers: a plain attribute, or made in "
        "forward; register_buffer(persistent=False) alone does not help, as such buffers are broadcast, too",
    )
    if not fact.get("statistics", True):
        return (ddp_argument_fix(fact, "broadcast_buffers", False, price.gain), constants)
    note = "; running statistics (BatchNorm) are then each rank's own, and a checkpoint has the saving rank's"
    return (ddp_argument_fix(fact, "broadcast_buffers", False, price.gain, note), constants)


RULES = (
    Rule(
        "comm.buffers",
        "buffers are broadcast before each forward",
        explains=("comm_exposed",),
        looks=(Look(broadcast_buffers, needs=(signals.replay,)),),
        needs=(signals.communications,),
        error=ModelError(of_gain=0.105, of_step=0.014, busy=0.014),
        place=102,
    ),
)
