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
    device_clock  how far its clock lies apart from the host's
    purpose  what a communication is for

Every row made here says `source = derived`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

import numpy as np
import pandas as pd

from dsprof.schema import COLUMNS, SMALL_GRADIENTS

from ..capture import Capture
from .counted import counted_rows
from .device_clock import align_clock
from .lanes import depths, lanes, training_thread
from .phases import main_phases, phases_between
from .purpose import purposes, reduced_by_hand
from .records import measured_rows
from .rows import Int, completed, integers, present, texts
from .steps import end_with_the_device, missing_steps, step_of, step_pattern, step_rows
from .streams import stream_rows, with_arrivals
from .waits import backward_waits, name_inner_waits

__all__ = ["derive", "missing_steps", "step_pattern", "trace_rows"]

_TYPES: Final = {name: pd.api.types.pandas_dtype(dtype) for name, dtype in COLUMNS.items()}
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
    of_host = ~rows["device"].to_numpy(bool) | (texts(rows, "kind") == "comm")
    if not of_host.all():
        rows = rows[of_host].reset_index(drop=True)
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
    rows = rows.take(_in_order(rows)).reset_index(drop=True)
    rows["depth"] = depths(rows)
    return pd.DataFrame({name: rows[name].array.astype(dtype) for name, dtype in _TYPES.items()}, copy=False)


def _in_order(rows: pd.DataFrame) -> Int:
    """By start; of those that begin together the longest first, and what never ended last."""
    kind = texts(rows, "kind")
    outer = np.select([kind == one for one in OUTER_FIRST], list(OUTER_FIRST.values()), len(OUTER_FIRST))
    shortest_last = np.where(present(rows, "dur_ns"), -integers(rows, "dur_ns"), np.iinfo(np.int64).max)
    return np.lexsort((outer, shortest_last, rows["start_ns"].to_numpy(np.int64)))
