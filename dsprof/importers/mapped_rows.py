"""The rows of all ranks, of events that a mapping has told the kinds of: with steps, groups, numbers of communications,
waits, and the actions of a pipeline."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from dsprof.schema import COLUMNS
from dsprof.trace import concat_rows

Int = npt.NDArray[np.int64]

MAIN: Final = "main"
MESSAGES: Final = ("send", "recv", "send_recv")
PIPE_ACTIONS: Final = {"forward": "F", "backward": "B"}
DEVICE: Final = "cuda."
MOST_WAITED: Final = 0.9
"""Of the sends, that end after their receive has begun: by chance many may."""


@dataclass(frozen=True)
class FinishedRanks:
    """rows: by rank. groups: name -> {ranks, size, desc, backend}."""

    rows: dict[int, pd.DataFrame]
    groups: dict[str, dict[str, Any]]
    warnings: list[str]


def finish_ranks(
    tables: Mapping[int, pd.DataFrame], members: Mapping[str, list[int]], *, steps_together: bool = False
) -> FinishedRanks:
    """tables: of each rank its events as rows, each on the lane of its thread (`thread.<id>`) or what the mapping says.
    members: of the groups that are told. steps_together: a step begins on all ranks when it does on the first."""
    warnings: list[str] = []
    together = _numbered_spans(list(tables.values())) if steps_together else None
    rows = {rank: _steps(_on_lanes(table), together) for rank, table in tables.items()}
    unmarked = [rank for rank, table in rows.items() if not (table["kind"] == "step").any()]
    if unmarked:
        warnings.append(
            "no event is a step and none tells its number, so all of the trace counts as one: say with `step`, or a "
            "rule of kind step, in a mapping file where steps are"
        )
        rows |= {rank: _one_step(rows[rank]) for rank in unmarked}
    rows, groups = _groups(rows, members)
    rows, uneven = _numbers(rows, members)
    warnings += uneven
    if len({stage for table in rows.values() for stage in table["stage"].dropna().unique().tolist()}) > 1:
        rows = {rank: _pipeline(table) for rank, table in rows.items()}
    blocking = _sends_wait(rows)
    return FinishedRanks({rank: _with_waits(table, blocking) for rank, table in rows.items()}, groups, warnings)


def _on_lanes(table: pd.DataFrame) -> pd.DataFrame:
    """The thread that trains is `main`: the one with the steps, else the one that is longest in phases, else in
    anything."""
    lane = table["lane"].astype(object)
    threads = lane.str.startswith("thread.").to_numpy(bool, na_value=False)
    if (lane == MAIN).any() or not threads.any():
        return table
    length = table["dur_ns"].to_numpy(np.int64, na_value=0)
    for chosen in (table["kind"] == "step", table["kind"] == "phase", table["kind"] == "comm", table["kind"].notna()):
        mine = threads & chosen.to_numpy(bool)
        if mine.any():
            spent = pd.Series(length[mine]).groupby(lane[mine].to_numpy()).sum()
            return table.assign(lane=lane.mask(lane == spent.idxmax(), MAIN).astype("category"))
    return table


# --- steps ----------------------------------------------------------------------------------------


def _steps(table: pd.DataFrame, together: pd.DataFrame | None) -> pd.DataFrame:
    """With steps from the numbers that events tell, where no event is one; and each event in the step that it begins
    in, where none is told. `together`: the steps of all ranks, if they are the same."""
    number, kind = table["step"].to_numpy(np.int64).copy(), table["kind"]
    start = table["start_ns"].to_numpy(np.int64)
    marked = np.flatnonzero((kind == "step").to_numpy(bool))
    if len(marked):
        if (number[marked] < 0).any():
            number[marked] = np.arange(len(marked))
        table = table.assign(step=number.astype("int32"), name=_where(table["name"], marked, "step"))
        edges = number[marked], start[marked], (start + table["dur_ns"].to_numpy(np.int64, na_value=0))[marked]
    elif (number >= 0).any():
        each = _numbered_spans([table]) if together is None else together
        each = each[np.isin(each.index, number)]
        low = each["start"].to_numpy(np.int64)
        high = np.append(low[1:], each["end"].to_numpy(np.int64)[-1:])  # what no event is of belongs to the step before
        edges = each.index.to_numpy(np.int64), low, high
        table = concat_rows([_step_rows(*edges), table])
        number = np.concatenate([edges[0], number])
        start = np.concatenate([low, start])
    else:
        return table
    order = np.argsort(edges[1], kind="stable")
    numbers, low, high = (one[order] for one in edges)
    at = np.searchsorted(low, start, "right") - 1
    inside = (at >= 0) & (start < high[np.maximum(at, 0)])
    number = np.where(number >= 0, number, np.where(inside, numbers[np.maximum(at, 0)], -1))
    return _sorted(table.assign(step=number.astype("int32")))


def _numbered_spans(tables: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """`start` and `end` of what tells each step's number, by that, in order of time."""
    parts = []
    for table in tables:
        told = table[(table["step"] >= 0) & (table["kind"] != "step")]
        start = told["start_ns"].to_numpy(np.int64)
        end = start + told["dur_ns"].to_numpy(np.int64, na_value=0)
        parts.append(pd.DataFrame({"number": told["step"].to_numpy(np.int64), "start": start, "end": end}))
    each = pd.concat(parts).groupby("number").agg(start=("start", "min"), end=("end", "max"))
    return each.sort_values("start", kind="stable")


def _one_step(table: pd.DataFrame) -> pd.DataFrame:
    start = table["start_ns"].to_numpy(np.int64)
    end = start + table["dur_ns"].to_numpy(np.int64, na_value=0)
    step = _step_rows(np.array([0]), start.min(keepdims=True), end.max(keepdims=True))
    return _sorted(concat_rows([step.assign(source="derived"), table.assign(step=np.int32(0))]))


def _step_rows(number: Int, start: Int, end: Int) -> pd.DataFrame:
    return _table(
        {"step": number, "kind": "step", "name": "step", "lane": MAIN, "start_ns": start, "dur_ns": end - start}
    )


# --- communications -------------------------------------------------------------------------------


def _groups(
    tables: Mapping[int, pd.DataFrame], told: Mapping[str, list[int]]
) -> tuple[dict[int, pd.DataFrame], dict[str, dict[str, Any]]]:
    """Each communication in a group, and the groups. Of one that is not told the group is what its name says."""
    found, ranks = {}, defaultdict[str, set[int]](set)
    for rank, table in tables.items():
        comm = (table["kind"] == "comm").to_numpy(bool)
        group = table["group"].astype(object)
        message = table["name"].isin(MESSAGES).to_numpy(bool)
        lacks = comm & ~message & group.isna().to_numpy(bool)
        group = group.mask(lacks, table["name"].astype(object) + " (group not told)")
        issued = table["start_ns"].astype("Int64").where(comm)
        device = comm & table["lane"].astype(object).str.startswith(DEVICE).to_numpy(bool, na_value=False)
        found[rank] = table.assign(
            group=group.astype("category"), issue_ns=issued, arrival_ns=table["start_ns"].astype("Int64").where(device)
        )
        for name in group[comm].dropna().unique():
            ranks[str(name)].add(rank)
    return found, {
        name: {"ranks": told.get(name, sorted(of)), "size": len(told.get(name, of)), "desc": "", "backend": ""}
        for name, of in sorted(ranks.items())
    }


def _numbers(
    tables: Mapping[int, pd.DataFrame], members: Mapping[str, list[int]]
) -> tuple[dict[int, pd.DataFrame], list[str]]:
    """Collectives of a group are numbered in their order, where all ranks have the same ones; a message between the two
    ranks of a group is numbered by its direction. Others are left to the order of their names (`align.numbering`)."""
    names: dict[str, list[tuple[str, ...]]] = defaultdict(list)
    for table in tables.values():
        for group, of in _unnumbered(table, messages=False).groupby("group", observed=True):
            names[str(group)].append(tuple(of["name"].astype(str)))
    same = {group for group, of in names.items() if len(set(of)) == 1}
    pairs = {group: of for group, of in members.items() if len(of) == 2}
    found = {}
    for rank, table in tables.items():
        seq, peer = table["seq"].to_numpy(np.int64, na_value=-1).copy(), table["peer"].copy()
        mine = _unnumbered(table, messages=False)
        mine = mine[mine["group"].astype(str).isin(same)]
        seq[mine.index] = mine.groupby("group", observed=True).cumcount().to_numpy(np.int64)
        messages = _unnumbered(table, messages=True)
        messages = messages[messages["group"].astype(str).isin(pairs)]
        if len(messages):
            peer.loc[messages.index] = [1 - pairs[str(group)].index(rank) for group in messages["group"]]
            turn = messages.groupby(["group", "name"], observed=True).cumcount()
            seq[messages.index] = turn.to_numpy(np.int64)
        found[rank] = table.assign(seq=pd.arrays.IntegerArray(seq.astype("int32"), seq < 0), peer=peer)
    uneven = sorted(names.keys() - same)
    if not uneven:
        return found, []
    return found, [
        f"ranks of {', '.join(uneven[:3])} do not have the same collectives in the same order: those of one name are "
        "matched in their order, where all ranks have equally many"
    ]


def _unnumbered(table: pd.DataFrame, *, messages: bool) -> pd.DataFrame:
    """Communications of a known group without a number. Of messages only sends and receives."""
    chosen = (table["kind"] == "comm") & table["group"].notna() & table["seq"].isna()
    chosen &= table["name"].isin(("send", "recv")) if messages else ~table["name"].isin(MESSAGES)
    return table[chosen]


def _pipeline(table: pd.DataFrame) -> pd.DataFrame:
    """Forwards and backwards are the actions of a stage; the micro-batch is their number in the step, if it is not
    told."""
    acts = (table["kind"] == "phase") & table["name"].isin(PIPE_ACTIONS) & table["stage"].notna()
    if not acts.any():
        return table
    mine = table[acts]
    turn = mine.groupby([mine["step"], mine["name"].astype(str)]).cumcount().astype("Int16")
    microbatch = table["microbatch"].copy()
    microbatch[acts] = microbatch[acts].fillna(turn)
    return table.assign(
        kind=_where(table["kind"], acts.to_numpy(bool), "pipe"),
        name=table["name"].astype(object).mask(acts, table["name"].astype(object).map(PIPE_ACTIONS)).astype("category"),
        microbatch=microbatch,
    )


def _sends_wait(tables: Mapping[int, pd.DataFrame]) -> bool:
    """Whether a send ends no earlier than its receive has begun. Where most end before, they hand their data over and
    wait for nobody."""
    sides = []
    for rank, table in tables.items():
        chosen = (table["kind"] == "comm") & table["name"].isin(("send", "recv")) & table["peer"].notna()
        mine = table[chosen]
        sides.append(
            pd.DataFrame(
                {
                    "group": mine["group"].astype(str), "seq": mine["seq"], "sends": mine["name"] == "send",
                    "target": mine["peer"].where(mine["name"] == "send", 1 - mine["peer"]),
                    "start": mine["start_ns"], "end": mine["start_ns"] + mine["dur_ns"].fillna(0), "rank": rank,
                }
            )
        )  # fmt: skip
    every = pd.concat(sides)
    send, recv = every[every["sends"]], every[~every["sends"]]
    both = send.merge(recv, on=["group", "seq", "target"], suffixes=("", "_recv"))
    return not len(both) or float((both["end"] >= both["start_recv"]).mean()) > MOST_WAITED


def _with_waits(table: pd.DataFrame, sends_wait: bool) -> pd.DataFrame:
    """The training thread waits in a communication that stands on its own track, but for sends that wait for nobody.
    The communication has a lane of its own."""
    comm = (table["kind"] == "comm").to_numpy(bool)
    lane = table["lane"].astype(object)
    group = table["group"].astype(object).fillna("messages").astype(str)
    waits = table[comm & (lane == MAIN).to_numpy(bool) & (table["dur_ns"].to_numpy(np.int64, na_value=0) > 0)]
    if not sends_wait:
        waits = waits[waits["name"] != "send"]
    off_device = comm & ~lane.str.startswith(DEVICE).to_numpy(bool, na_value=False)
    table = table.assign(lane=lane.mask(off_device, "comm." + group).astype("category"))
    if waits.empty:
        return table
    waits = waits.assign(kind=_where(waits["kind"], slice(None), "wait"), issue_ns=pd.NA, arrival_ns=pd.NA)
    return _sorted(concat_rows([table, waits.astype(COLUMNS)]))


# --- tables ---------------------------------------------------------------------------------------


def _where(column: pd.Series[Any], chosen: Any, word: str) -> pd.Series[Any]:
    found = column.astype(object).copy()
    found.iloc[chosen] = word
    return found.astype("category")


def _table(columns: dict[str, Any]) -> pd.DataFrame:
    rows = pd.DataFrame({"rank": 0, "restart": 0, "source": "imported", **columns})
    return rows.reindex(columns=list(COLUMNS)).astype(COLUMNS)


def _sorted(table: pd.DataFrame) -> pd.DataFrame:
    length = table["dur_ns"].to_numpy(np.int64, na_value=0)
    return table.iloc[np.lexsort((-length, table["start_ns"].to_numpy(np.int64)))].reset_index(drop=True)
