"""What was recorded, and what that implies but does not say: lanes, steps, the phases in between, waits inside C++.

    records  a record of a capture as a row
    counted  the operations of a step, of which facts tell, as rows
    rows     what rows consist of, before and after
    lanes    which thread trains; lanes, and nesting within them
    phases   the training thread's phases, how they nest, and what lies between them
    steps    where steps begin and end, and what they consist of
    period   the pattern in which several optimizers take turns
    waits    what DDP's reducer waits for
    streams  what a device's streams did
    purpose  what a communication is for

Every row made here says `source = derived`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import pandas as pd

from dsprof.schema import COLUMNS, SMALL_GRADIENTS

from ..capture import Capture
from .counted import counted_rows
from .lanes import depths, lanes, training_thread
from .phases import main_phases, phases_between
from .purpose import purposes, reduced_by_hand
from .records import measured_rows
from .rows import completed
from .steps import end_with_the_device, missing_steps, step_of, step_pattern, step_rows
from .streams import align_clock, stream_rows, with_arrivals
from .waits import backward_waits, name_inner_waits

__all__ = ["derive", "missing_steps", "step_pattern", "trace_rows"]

OUTER_FIRST = {"step": 0, "phase": 1}
"""Of rows that begin and end together, those that contain the others."""


def trace_rows(capture: Capture, rank: int, restart: int) -> pd.DataFrame:
    """The trace table of one rank (columns of `schema.COLUMNS`), ordered by start."""
    kinds = {fact["fact"] for fact in capture.facts}
    tensor_parallel = {str(fact.get("group")) for fact in capture.facts if fact["fact"] == "tensor_parallel"}
    small = [fact[SMALL_GRADIENTS] for fact in capture.facts if fact["fact"] == "optimizer" and SMALL_GRADIENTS in fact]
    rows = measured_rows(capture)
    counted = counted_rows(capture.facts)
    if len(counted):
        rows = pd.concat([rows, counted], ignore_index=True)
    return derive(rows, kinds, rank, restart, tensor_parallel=tensor_parallel, small_gradients=small)


def derive(
    rows: pd.DataFrame, facts: Collection[str], rank: int = 0, restart: int = 0, *,
    tensor_parallel: Collection[str] = (), small_gradients: Sequence[Sequence[int]] = (),
) -> pd.DataFrame:  # fmt: skip
    """The same from rows (columns of `rows.GIVEN`) of one process, whichever tool recorded them.

    facts: kinds of facts that are known of it, such as `ddp`, `fsdp` and `device`. tensor_parallel: groups that are
    for tensor parallelism. small_gradients: see `purpose.reduced_by_hand`. Raises KeyError for rows without a column
    that is required.
    """
    rows = with_arrivals(align_clock(completed(rows)))
    name_inner_waits(rows)
    streams = stream_rows(rows)
    rows = rows[~rows["device"] | (rows["kind"] == "comm")].reset_index(drop=True)
    main = training_thread(rows)
    rows["lane"] = lanes(rows, main)
    phases = main_phases(rows, main)
    steps = step_rows(rows, phases, main)
    by_hand = reduced_by_hand(rows, small_gradients)
    between = phases_between(rows, phases, main, on_gpu="device" in facts, gradients=by_hand)
    more = [part for part in (steps, between, backward_waits(rows), streams) if len(part)]
    rows = pd.concat([rows, *more], ignore_index=True)
    rows["step"] = step_of(rows, steps)
    rows = end_with_the_device(rows)
    rows["rank"], rows["restart"] = rank, restart
    rows["purpose"] = purposes(rows, facts, tensor_parallel, by_hand)
    rows["outer"] = rows["kind"].map(OUTER_FIRST).fillna(len(OUTER_FIRST))
    rows = rows.sort_values(
        ["start_ns", "dur_ns", "outer"], ascending=[True, False, True], kind="stable", ignore_index=True
    )
    rows["depth"] = depths(rows)
    return rows.reindex(columns=list(COLUMNS)).astype(COLUMNS)
