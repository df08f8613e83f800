"""What a communication is for, as far as its place tells."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from dsprof.schema import FLOAT_BYTES, OF_A_NORM

from .rows import Int, ends, integers, issued, present, texts

Bool = npt.NDArray[np.bool_]

REDUCTIONS: Final = ("all_reduce", "reduce_scatter", "reduce")
GATHERS: Final = ("all_gather", "broadcast")
LEAST_DURING: Final = 0.9
"""Of what a thread communicates, where it is the autograd engine's: the rest is of backwards whose begin is not in the
capture."""
INTEGERS: Final = ("int16", "int32", "int64", "bool")
"""In backward DDP also reduces which parameters were used; gradients are not counted, though they may be quantized."""
ONE_NUMBER: Final = 8
"""Bytes of one at most."""
TENSOR_PARALLEL: Final = "tensor-parallel"
LEAST_EQUAL: Final = 0.8
"""Of what a group reduces in backward, by number and by bytes: as large as what it communicates in forward."""
OF_ONE_NORM: Final = 128
"""The same of what a script reduces itself between backward and optimizer: some numbers altogether. What is larger than
OF_A_NORM there is gradients; in between it may be a norm of each parameter, or the gradients of a tiny model, whose
sizes tell."""


def purposes(
    rows: pd.DataFrame, facts: Collection[str], tensor_parallel: Collection[str] = (), by_hand: Collection[int] = ()
) -> npt.NDArray[np.object_]:
    """Purpose of each row: as who recorded it says; else, of a communication, by where it was issued; else null.

    facts: kinds of facts that the rank stated. tensor_parallel: groups that are said to be for that. by_hand: index of
    rows that are known to carry gradients.

    Reductions issued inside backward carry gradients, small ones around the optimizer norms. What another thread issues
    meanwhile is none of that. With FSDP and DeepSpeed, what is gathered is parameters; with DDP, what is broadcast in
    forward is buffers.
    """
    comm, name, group = texts(rows, "kind") == "comm", texts(rows, "name"), texts(rows, "group")
    purpose = np.full(len(rows), None, object)
    purpose[comm] = "other"
    reduces, gathers = comm & np.isin(name, REDUCTIONS), comm & np.isin(name, GATHERS)
    forward, backward = _issued_in(rows, "forward"), _issued_in_backward(rows)
    updating = (_issued_in(rows, "optimizer") | _issued_in(rows, "clip")) & ~backward  # a closure's, in the optimizer
    if "ddp" in facts:
        purpose[forward & gathers & (name == "broadcast")] = "buffer"
    if not {"fsdp", "deepspeed"}.isdisjoint(facts):
        purpose[(forward | backward) & gathers & (name == "all_gather")] = "parameter"
    purpose[updating & gathers] = "parameter"
    purpose[backward & reduces & ~np.isin(texts(rows, "dtype"), INTEGERS)] = "gradient"
    purpose[updating & reduces & present(rows, "bytes") & (integers(rows, "bytes") <= OF_A_NORM)] = "norm"
    purpose[list(by_hand)] = "gradient"
    if tensor_parallel:
        purpose[(forward | backward) & comm & np.isin(group, list(tensor_parallel))] = TENSOR_PARALLEL
    purpose[activations_by_hand(rows, forward, backward)] = TENSOR_PARALLEL
    if "pipeline" in facts:
        purpose[comm & present(rows, "peer")] = "pipeline"
    purpose[comm & (name == "barrier")] = "barrier"
    return np.where(present(rows, "purpose"), texts(rows, "purpose"), purpose)


def activations_by_hand(rows: pd.DataFrame, forward: Bool, backward: Bool) -> Bool:
    """Which rows are of tensor parallelism that a script does itself: a group that reduces in forward, and in backward
    what is as large as that. Nobody reduces gradients in a forward, and what is averaged there, such as a loss or the
    statistics of a batch, is little beside the gradients of the same group.

    forward, backward: which rows were issued in one
    """
    name, group, size = texts(rows, "name"), texts(rows, "group"), integers(rows, "bytes").astype(np.float64)
    unknown = ~present(rows, "purpose") & (texts(rows, "kind") == "comm")
    large = (size > ONE_NUMBER) & ~np.isin(texts(rows, "dtype"), INTEGERS)
    layers = unknown & large & (forward | backward) & np.isin(name, [*REDUCTIONS, "all_gather"])
    reduces = layers & np.isin(name, REDUCTIONS)
    found = np.zeros(len(rows), bool)
    groups = group[reduces & forward]
    for one in pd.unique(groups[~pd.isna(groups)]):
        mine = group == one
        of_layers = mine & layers & np.isin(size, np.unique(size[mine & layers & forward]))
        reduced, equal = mine & reduces & backward, of_layers & reduces & backward
        if not equal.any() or (mine & reduces & forward).sum() < equal.sum() / 2:
            continue
        if min(equal.sum() / reduced.sum(), size[equal].sum() / size[reduced].sum()) >= LEAST_EQUAL:
            found |= of_layers
    return found


def _issued_in(rows: pd.DataFrame, phase: str) -> Bool:
    """Which rows were issued in a phase of this name by the thread that was in it."""
    of_phase, start, end = _phases(rows, phase)
    inside = np.zeros(len(rows), bool)
    if len(start):
        threads = integers(rows, "thread")
        for thread in np.unique(of_phase):
            inside |= (threads == thread) & _issued_during(rows, start[of_phase == thread], end[of_phase == thread])
    return inside


def _issued_in_backward(rows: pd.DataFrame) -> Bool:
    """Which rows were issued in a backward by the thread that was in it, or by one of the autograd engine's own: they
    communicate then only, but for backwards whose begin was not captured. One that does at other times, too, is a
    thread of the script's with business of its own."""
    _, start, end = _phases(rows, "backward")
    during = _issued_during(rows, start, end)
    threads, comm = integers(rows, "thread"), texts(rows, "kind") == "comm"
    communicate, index = np.unique(threads[comm], return_inverse=True)
    share = np.bincount(index, during[comm]) / np.bincount(index)
    inside: Bool = _issued_in(rows, "backward") | (during & np.isin(threads, communicate[share >= LEAST_DURING]))
    return inside


def _phases(rows: pd.DataFrame, name: str) -> tuple[Int, Int, Int]:
    """Of each phase of this name, by when it begins: the thread that was in it, start and end. One that never ended
    lasts for good."""
    at = np.flatnonzero((texts(rows, "kind") == "phase") & (texts(rows, "name") == name))
    start = rows["start_ns"].to_numpy(np.int64)[at]
    order = np.argsort(start, kind="stable")
    at, start = at[order], start[order]
    lasts = rows["dur_ns"].array[at]
    end = np.where(lasts.isna(), np.iinfo(np.int64).max, start + lasts.to_numpy(np.int64, na_value=0))
    return rows["thread"].to_numpy(np.int64)[at], start, end


def reduced_by_hand(rows: pd.DataFrame, small_gradients: Sequence[Sequence[int]] = ()) -> list[int]:
    """Which rows are reductions that a script makes of its gradients itself: between a backward and the optimizer's
    step, on the thread that is in both, neither inside another phase. If one of them is too large for a norm, all are;
    so they are if, one by one, they are of the sizes of an optimizer's gradients. One number is something else, such as
    the loss or a norm.

    small_gradients: of each optimizer whose gradients are all smaller than norms may be, how many elements they have.
    """
    found: list[int] = []
    kind, name, thread = texts(rows, "kind"), texts(rows, "name"), integers(rows, "thread")
    size, dtype = integers(rows, "bytes"), texts(rows, "dtype")
    reduced = (kind == "comm") & np.isin(name, REDUCTIONS) & (size > ONE_NUMBER) & ~np.isin(dtype, INTEGERS)
    if not reduced.any():
        return found
    begins, stops = rows["start_ns"].to_numpy(np.int64), ends(rows)
    when_issued = issued(rows)
    phases = (kind == "phase") & (name != "clip") & present(rows, "dur_ns")
    for one in np.unique(thread[reduced]).tolist():
        mine, around = np.flatnonzero(reduced & (thread == one)), np.flatnonzero(phases & (thread == one))
        around = around[np.lexsort((begins[around] - stops[around], begins[around]))]
        reach = np.maximum.accumulate(stops[around])
        around = around[np.append(True, begins[around][1:] >= reach[:-1])[: len(around)]]
        if not len(around):
            continue
        start, end, names, when = begins[around], stops[around], name[around], when_issued[mine]
        after = np.searchsorted(start, when, side="right")
        inside = (after > 0) & (after < len(start))
        before = np.maximum(after - 1, 0)
        inside &= (names[before] == "backward") & (end[before] <= when)
        inside &= names[np.minimum(after, len(start) - 1)] == "optimizer"
        chosen = np.unique(after[inside & (size[mine] > OF_A_NORM)]).tolist()
        for place in np.unique(after[inside]).tolist() if small_gradients else ():
            there = mine[inside & (after == place)]
            if any(_are_of(size[there], dtype[there], sizes) for sizes in small_gradients):
                chosen.append(place)
        found += mine[inside & np.isin(after, chosen)].tolist()
    return found


def _are_of(size: Int, dtype: npt.NDArray[np.object_], sizes: Sequence[int]) -> bool:
    """Whether these reductions, of so many bytes, are of gradients of `sizes`, one each. Of a single one that may be
    chance."""
    items = {FLOAT_BYTES.get(one) for one in dtype.tolist()}
    item = items.pop()
    if items or item is None:
        return False
    expected = sorted(of_one for of_one in sizes if of_one * item > ONE_NUMBER)
    return len(expected) > 1 and sorted((size / item).tolist()) == expected


def _issued_during(rows: pd.DataFrame, start: Int, end: Int) -> Bool:
    """Which rows were issued while one of these phases, by when they begin, was under way."""
    if not len(start):
        return np.zeros(len(rows), bool)
    when = integers(rows, "issue_ns")
    at = np.searchsorted(start, when, side="right") - 1
    inside: Bool = (at >= 0) & (when <= end[at])
    return inside
