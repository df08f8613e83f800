"""Straggler tables: one Parquet file a job, a row an operation of a pipeline-parallel step.

Of the paper 'Understanding Stragglers in Large Model Training Using What-if Analysis' (OSDI '25) and its artifact.
Times are seconds since the step began, on one clock; the steps are a sample. `meta-<name>.yaml` beside
`trace-<name>.parquet` has the sizes of the job; without it they are those of the table.

A rank is one (stage, dp_rank), numbered by stage and replica; of a tensor-parallel group such a table has one member.
Steps are laid one after the other, each as long as the last of its ranks takes. What a rank does is one chain, so
whatever it communicates between two computations is what it waited for.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from dsprof.names import new_run_id
from dsprof.run import RunInfo
from dsprof.schema import COLUMNS
from dsprof.trace import Trace
from dsprof.trace.derive.lanes import depths

from .assemble import rank_info
from .straggler_table import checked_table, job_name, sizes_beside

Int = npt.NDArray[np.int64]

DESCRIPTION: Final = "a straggler table (Parquet with dp_rank, stage, step, optype, start_ts, duration, seq_id, mb_id)"

TELLING: Final = frozenset({"dp_rank", "optype", "start_ts"})
"""Columns that tell such a table from any other Parquet file."""


@dataclass(frozen=True)
class Operation:
    """What rows of an operation become. `group` is the kind of its process group, `toward` where a message goes to or
    comes from: the next stage (1) or the one before (-1)."""

    kind: str
    name: str
    group: str = ""
    purpose: str = "other"
    toward: int = 0


UNRECORDED: Final = "unrecorded-all-reduce"
"""What replicas of a stage wait for in each other, and no row tells."""
CLIP: Final = "optimizer-clip-main-grad"
OPERATIONS: Final = {
    "forward-compute": Operation("pipe", "F"),
    "backward-compute": Operation("pipe", "B"),
    "forward-send": Operation("comm", "send", "pipeline", "pipeline", 1),
    "forward-recv": Operation("comm", "recv", "pipeline", "pipeline", -1),
    "backward-send": Operation("comm", "send", "pipeline", "pipeline", -1),
    "backward-recv": Operation("comm", "recv", "pipeline", "pipeline", 1),
    "params-all-gather": Operation("comm", "all_gather", "data", "parameter"),
    "grads-reduce-scatter": Operation("comm", "reduce_scatter", "data", "gradient"),
    "separate-grads-all-reduce": Operation("comm", "all_reduce", "data", "gradient"),
    UNRECORDED: Operation("comm", "all_reduce", "data"),
    "layernorm-grads-all-reduce": Operation("comm", "all_reduce", "tensor", "gradient"),
    "embedding-grads-all-reduce": Operation("comm", "all_reduce", "embedding", "gradient"),
    CLIP: Operation("comm", "all_reduce", "world", "norm"),
    "optimizer": Operation("phase", "optimizer"),
    "gc": Operation("pause", "gc"),
}
"""`optimizer-clip-main-grad` ends at one moment on all ranks: it holds the all-reduce of the gradient's norm."""

CLOCK_NS: Final = 200_000
"""Operations that follow one another overlap by so much: times are of different clocks and single precision."""
FEWEST_STEPS: Final = 3
"""Of fewer, no operation is inferred that the table does not have."""
MOST_NAMED: Final = 8


def recognizes(path: Path) -> bool:
    try:
        return frozenset(pq.read_schema(path).names) >= TELLING
    except (OSError, pa.ArrowException):
        return False


def read(path: Path) -> Trace:
    """The table as a trace. Raises RunError for one that cannot be understood."""
    table = checked_table(path)
    meta, warnings = sizes_beside(path)
    replicas = max(int(table["dp_rank"].max()) + 1, meta.get("dp_size", 1))
    stages = max(int(table["stage"].max()) + 1, meta.get("pp_size", 1))
    table["rank"] = table["stage"] * replicas + table["dp_rank"]
    warnings += _place(table)
    warnings += _one_at_a_time(table)
    table, inferred = _with_unrecorded(table)
    _before_next(table)
    warnings += inferred
    unknown = sorted(set(table["optype"]) - OPERATIONS.keys())
    if unknown:
        warnings.append(f"unknown operations are kept as they are, and explain nothing: {', '.join(unknown)}")
    chunks = max(int(table["mc"].max()) + 1 if "mc" in table else 1, meta.get("vpp_size", 1))
    if chunks > 1:
        warnings.append(
            f"{chunks} model chunks a stage: sends and receives are not matched, for they do not name theirs"
        )
    rows = _rows(table, replicas, matched=chunks == 1)
    groups, name = _groups(rows, replicas), job_name(path)
    info = RunInfo(
        id=new_run_id(name), name=name, level="", command=["dsprof", "import", str(path)], world_size=stages * replicas,
        ranks=[
            rank_info(int(rank), len(of_rank), int(of_rank.loc[of_rank["kind"] == "step", "step"].max()))
            for rank, of_rank in rows.groupby("rank")
        ],
        groups=groups, facts=_facts(table, groups, path, warnings, meta.get("tp_size", 1)),
    )  # fmt: skip
    return Trace.of(info, rows)


# --- the axis of time -----------------------------------------------------------------------------


def _place(table: pd.DataFrame) -> list[str]:
    """Add start and end in ns, with steps one after the other: `start`, `end`, `at` (its number among the steps).

    A step runs from the first start of any rank to the last end, which is what the paper takes for its duration.
    """
    start = np.rint(table["start_ts"].to_numpy() * 1e9).astype(np.int64)
    end = start + np.rint(table["duration"].to_numpy() * 1e9).astype(np.int64)
    numbers, at = np.unique(table["step"].to_numpy(), return_inverse=True)
    begin, finish = np.full(len(numbers), np.iinfo(np.int64).max), np.full(len(numbers), np.iinfo(np.int64).min)
    np.minimum.at(begin, at, start)
    np.maximum.at(finish, at, end)
    length = finish - begin
    offset = np.concatenate([[0], np.cumsum(length)])[:-1] - begin
    table["start"], table["end"], table["at"] = start + offset[at], end + offset[at], at
    table["step_start"], table["step_ns"] = (offset + begin)[at], length[at]
    here = table.groupby("rank")["step"].nunique()
    short = [f"{rank} ({len(numbers) - count})" for rank, count in here.items() if count < len(numbers)]
    return [f"ranks without operations in some of the {len(numbers)} steps: {', '.join(short)}"] if short else []


COMPUTING: Final = ("forward-compute", "backward-compute")
MESSAGES: Final = tuple(name for name, operation in OPERATIONS.items() if operation.toward)
BEFORE_LAST: Final = (*COMPUTING, *MESSAGES, "gc", "params-all-gather")


def _one_at_a_time(table: pd.DataFrame) -> list[str]:
    """Let a computation end where the next one of its rank begins: their times overlap by what the clocks differ."""
    main = table[table["optype"].isin((*COMPUTING, "optimizer"))].sort_values(["rank", "start", "end"])
    following = main.groupby("rank")["start"].shift(-1)
    over = (main["end"] - following).clip(lower=0).fillna(0).astype("int64")
    table.loc[main.index, "end"] -= over
    beyond = int((over > CLOCK_NS).sum())
    if not beyond:
        return []
    at = main.loc[over.idxmax()]
    return [
        f"{beyond} computations go on while their rank begins the next one, by up to {over.max() / 1e6:.3g} ms "
        f"({at['optype']} {at['seq_id']} of step {at['step']}, stage {at['stage']}, dp_rank {at['dp_rank']}); cut there"
    ]


def _before_next(table: pd.DataFrame) -> None:
    """Let an operation end where a later one of its rank begins, if they overlap by no more than the clocks differ."""
    for _, of_rank in table.groupby("rank"):
        begin = np.sort(of_rank["start"].to_numpy(np.int64))
        start, end = of_rank["start"].to_numpy(np.int64), of_rank["end"].to_numpy(np.int64)
        following = np.append(begin, np.iinfo(np.int64).max)[
            np.searchsorted(begin, np.maximum(end - CLOCK_NS, start + 1))
        ]
        table.loc[of_rank.index, "end"] = np.minimum(end, following)


def _with_unrecorded(table: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """With the synchronization after the last backward that no row tells: replicas of a stage (the last one, which
    averages the loss) go on together, although they came there at different times and none ever went on before the last
    had come. It is taken for an all-reduce of theirs, from where each came to where the first went on."""
    inner = table[table["optype"].isin(COMPUTING + MESSAGES)]
    ready = inner.groupby(["stage", "step", "dp_rank"])["end"].max()
    computed = inner[inner["optype"].isin(COMPUTING)].groupby(["stage", "step", "dp_rank"])["end"].max()
    last = table[~table["optype"].isin(BEFORE_LAST)]
    keys = pd.MultiIndex.from_frame(last[["stage", "step", "dp_rank"]])
    last = last[last["start"].to_numpy() >= computed.reindex(keys).fillna(np.inf).to_numpy() - CLOCK_NS]
    on = last.groupby(["stage", "step", "dp_rank"])["start"].min()
    added, warnings = [], []
    for stage in sorted(table["stage"].unique()):
        if stage not in ready.index.levels[0] or stage not in on.index.levels[0]:
            continue
        came, went = ready.loc[[stage]].unstack("dp_rank").dropna(), on.loc[[stage]].unstack("dp_rank")
        went = went.reindex(index=came.index, columns=came.columns).dropna()
        came = came.loc[went.index]
        if came.shape[1] < 2 or len(came) < FEWEST_STEPS:
            continue
        arrived, first = came.max(axis=1), went.min(axis=1)
        apart = arrived - came.min(axis=1)
        together = (went.max(axis=1) - first).median() < apart.median() / 2
        if not together or apart.median() < 5 * CLOCK_NS or (first < arrived - CLOCK_NS).any():
            continue
        found = came.stack().rename("start").reset_index()
        found["end"] = np.maximum(found["start"], first.loc[pd.MultiIndex.from_frame(found[["stage", "step"]])].array)
        added.append(found)
        warnings.append(
            f"stage {stage}: after their last backward its {came.shape[1]} ranks go on together, up to "
            f"{apart.max() / 1e9:.3g} s after some of them were ready, and no operation of the table says why; taken "
            "for an all-reduce of theirs, such as the average of the loss"
        )
    if not added:
        return table, []
    inferred = pd.concat(added, ignore_index=True).astype({"start": "int64", "end": "int64"})
    inferred = inferred.assign(optype=UNRECORDED, seq_id=0, mb_id=-1)
    same = table.drop_duplicates(["stage", "step", "dp_rank"])
    inferred = inferred.merge(same[["stage", "step", "dp_rank", "rank", "at", "step_start", "step_ns", "file_rank"]])
    return pd.concat([table, inferred], ignore_index=True), warnings


# --- rows of the trace ----------------------------------------------------------------------------


def _rows(table: pd.DataFrame, replicas: int, *, matched: bool) -> pd.DataFrame:
    """The trace's rows, by rank and time. `matched`: messages name the stage at their other end."""
    known = table["optype"].map(OPERATIONS)
    field = {
        name: known.map(lambda operation, name=name: getattr(operation, name), na_action="ignore")
        for name in ("kind", "name", "group", "purpose", "toward")
    }
    comm, message = field["kind"].eq("comm"), field["toward"].isin([1, -1])
    acted = field["kind"].eq("pipe")
    other_side = table["stage"] + field["toward"].where(message, 0).astype("int64")
    paired = message & (other_side >= 0) & (other_side <= table["stage"].max()) & matched
    group = _group_names(table, field["group"].where(comm))
    numbered = comm & (paired | ~message)
    lane = ("comm." + group).where(comm, ("imported." + table["optype"]).where(known.isna(), "main"))
    rows = pd.DataFrame(
        {
            "rank": table["rank"], "step": table["step"], "kind": field["kind"].fillna("phase"),
            "name": field["name"].fillna(table["optype"]),
            "lane": lane, "start_ns": table["start"], "dur_ns": table["end"] - table["start"],
            "issue_ns": table["start"].where(comm).astype("Int64"),
            "stage": table["stage"].astype("Int64"),
            "microbatch": table["mb_id"].where(acted & (table["mb_id"] >= 0)).astype("Int64"),
            "purpose": field["purpose"].where(comm), "group": group,
            "seq": _numbers(table, field["group"], message).where(numbered).astype("Int64"),
            "peer": other_side.where(paired).astype("Int64"),
            "source": np.where(table["optype"] == UNRECORDED, "derived", "imported"),
        }
    )  # fmt: skip
    rows.loc[message, "microbatch"] = _microbatches(table, message)
    clip = rows[table["optype"] == CLIP].assign(
        kind="phase", name="clip", lane="main", issue_ns=pd.NA, purpose=None, group=None, seq=pd.NA
    )
    steps = table.drop_duplicates(["rank", "step"])
    steps = pd.DataFrame(
        {
            "rank": steps["rank"], "step": steps["step"], "kind": "step", "name": "step", "lane": "main",
            "start_ns": steps["step_start"], "dur_ns": steps["step_ns"], "source": "imported",
        }
    )  # fmt: skip
    waits = [_waits(of_rank, arrival) for of_rank, arrival in _by_rank(rows)]
    every = pd.concat([steps, rows, clip, *waits], ignore_index=True)
    every = every.sort_values(["rank", "start_ns", "dur_ns"], ascending=[True, True, False], kind="stable")
    every = every.assign(restart=0, thread=0, ended=True).reset_index(drop=True)
    every["depth"] = 0
    for _, of_rank in every.groupby("rank"):
        every.loc[of_rank.index, "depth"] = depths(of_rank)
    return every.reindex(columns=list(COLUMNS)).astype(COLUMNS)


def _group_names(table: pd.DataFrame, family: pd.Series[str]) -> pd.Series[str]:
    """Name of each row's process group."""
    dp, stage = "dp" + table["dp_rank"].astype(str), "stage" + table["stage"].astype(str)
    names = {
        "data": "data." + stage, "pipeline": "pipeline." + dp, "embedding": "embedding." + dp,
        "tensor": "tensor." + stage + "." + dp, "world": "world",
    }  # fmt: skip
    found = pd.Series(None, index=table.index, dtype=object)
    for each, of_family in names.items():
        chosen = family == each
        found[chosen] = of_family if isinstance(of_family, str) else of_family[chosen]
    return found


def _numbers(table: pd.DataFrame, family: pd.Series[str], message: pd.Series[bool]) -> pd.Series[int]:
    """Number of each communication in its group, the same on all its ranks whatever else they lack.

    Messages count within (group, source, target), so by their own number in the step; collectives by the order in which
    those of a family come in a step.
    """
    within = table["seq_id"].copy()
    since = table["start"] - table["step_start"]
    for _, of_family in table[family.notna() & ~message].groupby(family):
        order = since[of_family.index].groupby([of_family["optype"], of_family["seq_id"]]).median().rank(method="first")
        keys = pd.MultiIndex.from_frame(of_family[["optype", "seq_id"]])
        within[of_family.index] = order.reindex(keys).to_numpy(np.int64) - 1
    each = family.map(within.groupby(family).max() + 1).fillna(0).astype("int64")
    return table["at"] * each + within


def _microbatches(table: pd.DataFrame, message: pd.Series[bool]) -> pd.Series[int]:
    """Micro-batch of each message: that of the computation with its number, forward or backward."""
    acted = table[table["optype"].isin(COMPUTING) & (table["mb_id"] >= 0)]
    keys = ["rank", "step", "direction", "seq_id"]
    of_action = acted.assign(direction=acted["optype"].str[0]).set_index(keys)["mb_id"]
    wanted = table[message]
    wanted = pd.MultiIndex.from_frame(wanted.assign(direction=wanted["optype"].str[0])[keys])
    return pd.Series(of_action.reindex(wanted).astype("Int64").array, index=table.index[message])


def _by_rank(rows: pd.DataFrame) -> list[tuple[pd.DataFrame, pd.Series[int]]]:
    """Each rank's rows, and when the last participant of each communication was there."""
    sends = rows["name"] == "send"
    source, target = rows["stage"].where(sends, rows["peer"]), rows["peer"].where(sends, rows["stage"])
    keys = [
        rows["group"].astype(str),
        rows["seq"],
        *(side.where(rows["peer"].notna(), -1) for side in (source, target)),
    ]
    arrival = rows.groupby(keys, dropna=False)["start_ns"].transform("max").where(rows["seq"].notna(), rows["start_ns"])
    return [(of_rank, arrival[of_rank.index]) for _, of_rank in rows.groupby("rank")]


def _waits(rows: pd.DataFrame, arrival: pd.Series[int]) -> pd.DataFrame:
    """Where one rank's computation stood still: what it communicates between two computations, until it ends.

    Of communications under way at once (a send and a receive in one batch) it is that whose other side came last, and
    then the one that ends last.
    """
    main = rows[(rows["lane"] == "main") & (rows["dur_ns"] > 0)].sort_values("start_ns")
    begin = main["start_ns"].to_numpy(np.int64)
    done = np.maximum.accumulate(begin + main["dur_ns"].to_numpy(np.int64)) if len(main) else begin
    comm = rows[rows["kind"] == "comm"]
    comm = comm.assign(end=comm["start_ns"] + comm["dur_ns"], came=arrival[comm.index], receives=comm["name"] == "recv")
    start, end = comm["start_ns"].to_numpy(np.int64), comm["end"].to_numpy(np.int64)
    # Which computation went before: one that began as this ended came after it, whatever the clocks say.
    before = np.searchsorted(begin, np.maximum(end - CLOCK_NS, (start + end) // 2), "right") - 1
    edges = np.concatenate([[np.iinfo(np.int64).min], done]), np.concatenate([begin, [np.iinfo(np.int64).max]])
    comm = comm.assign(low=np.maximum(start, edges[0][before + 1]), high=np.minimum(end, edges[1][before + 1]))
    comm = comm[comm["high"] > comm["low"]].sort_values(["low", "came", "high", "receives"])
    comm = comm.drop_duplicates("low", keep="last")
    high = comm["high"].cummax().shift(fill_value=np.iinfo(np.int64).min)
    comm = comm.assign(low=np.maximum(comm["low"], high))
    comm = comm[comm["high"] > comm["low"]]
    return comm.assign(
        kind="wait",
        lane="main",
        start_ns=comm["low"],
        dur_ns=comm["high"] - comm["low"],
        issue_ns=pd.NA,
        source="imported",
    ).drop(columns=["end", "came", "receives", "low", "high"])


# --- run.json -------------------------------------------------------------------------------------


def _facts(
    table: pd.DataFrame, groups: dict[str, dict[str, Any]], path: Path, warnings: list[str], tensor: int
) -> list[dict[str, Any]]:
    """Where the trace comes from, which rank of the file each rank is, and the process groups."""
    places = table.drop_duplicates("rank").sort_values("rank")
    first = int(places["rank"].iloc[0])
    facts: list[dict[str, Any]] = [
        {"fact": "import", "rank": first, "format": "straggler", "file": path.name, "warnings": warnings}
    ]
    for place in places.itertuples():
        facts.append(
            {"fact": "place", "rank": int(place.rank), "stage": int(place.stage), "replica": int(place.dp_rank),
             "file_rank": int(place.file_rank), "tensor_parallel": tensor}
        )  # fmt: skip
    here = set(places["rank"])
    for name, about in groups.items():
        facts.append({"fact": "group", "rank": min(here.intersection(about["ranks"])), "name": name, **about})
    return facts


def _groups(rows: pd.DataFrame, replicas: int) -> dict[str, dict[str, Any]]:
    """The process groups, as `RunInfo.groups`."""
    comm = rows[rows["kind"] == "comm"].drop_duplicates(["group", "rank"])
    stages = int(comm["stage"].max()) + 1 if len(comm) else 0
    found = {}
    for name, members in comm.groupby("group", observed=True)["rank"]:
        ranks = sorted(int(rank) for rank in members)
        if str(name).startswith("pipeline."):  # a peer is a stage, and one that is missing has its place
            ranks = [stage * replicas + ranks[0] % replicas for stage in range(stages)]
        found[str(name)] = {"ranks": ranks, "size": len(ranks), "desc": str(name)}
    return found
