"""What ranks get unequal amounts of, told without the sizes of inputs: by what micro-batches take.

A long micro-batch is long in its forward and in its backward, on every stage that it passes, and it is another one each
step. A slow rank is slow with all of them, a slow stage with those of every replica, one that is slow for a while
with those that follow one another. So each computation is compared with what the same rank usually takes for the
micro-batch at that place in the step, which leaves nothing of a rank, a stage or a place that is always slow; then with
the mean of its step over all replicas, which leaves nothing of a step that is slow for all. What is left must be the
same in forward and backward, the same on all stages, and no single replica's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import pandas as pd

from ..align.match import PAIR, SEND_RECV
from ..arrays import Float, Int
from ..study import Study, once
from ..whatif.work import Spans
from .passes import BACKWARD, FORWARD

LEAST_SPREAD: Final = 0.05
"""Standard deviation, of the mean, that forwards and backwards have in common: what differs less is no input's doing
(of two production jobs with equal inputs 0.02 and 0.03, of one whose sequences differ in length 0.22)."""
LEAST_PASSES: Final = 0.9
"""Correlation of forward and backward (0.90 and 0.86; 0.99)."""
LEAST_STAGES: Final = 0.8
"""Correlation of the stages that a micro-batch passes (-0.01 and 0.74; 1.00)."""
STOPPED_IN_ONE: Final = 0.1
"""Of the micro-batches, those whose forward and backward are least alike are not asked."""
MOST_IN_TURN: Final = 0.5
"""Correlation of micro-batches that follow one another on a rank."""
MOST_OF_ONE: Final = 0.25
"""Of the squares of what differs, no replica has this share more than its part of the replicas."""
BY_CHANCE: Final = 4.0
"""Standard errors of the mean length of a replica's micro-batches that are no sign of a slow rank."""
FEWEST_STEPS: Final = 5
FEWEST: Final = 24
"""Micro-batches of which a correlation says something."""


@dataclass(frozen=True)
class UnequalMicroBatches:
    """Micro-batches that take unequally long since their inputs differ.

    excess:  [R, S] ms of each rank and ordinary step beyond what micro-batches of equal length would take
    lengths: [S] of each step's micro-batches, mean, in those of the run
    spans:   where that lies
    spread:  standard deviation of what they take, of the mean
    passes, stages: correlation of forward and backward, and of the stages (NaN: there is one)
    """

    excess: Float
    lengths: Float
    spans: Spans
    spread: float
    passes: float
    stages: float


def can_tell(study: Study) -> bool:
    """Whether enough forwards and backwards of micro-batches were seen."""
    return _computations(study) is not None


@once
def unequal_micro_batches(study: Study) -> UnequalMicroBatches | None:
    """None where micro-batches take equally long, differ for another reason, or were not seen."""
    table = _computations(study)
    if table is None:
        return None
    passes = table.groupby(["place", "batch"], sort=False).agg(
        ms=("ms", "sum"), usual=("usual", "sum"), name=("name", "first"), step=("step", "first"),
        replica=("replica", "first"), rank=("rank", "first"),
    ).reset_index()  # fmt: skip
    off = (passes["ms"] / passes["usual"]).to_numpy(np.float64)
    beside = off - passes.assign(off=off).groupby(["step", "name"])["off"].transform("mean").to_numpy(np.float64)
    passes = passes.assign(off=off, beside=beside)
    wide = passes.assign(at=passes["rank"].astype(str) + passes["place"].str.rpartition("/")[0]).pivot_table(
        index=["at", "batch"], columns="name", values="beside"
    )
    if not {FORWARD, BACKWARD} <= set(wide.columns):  # one of the two computes nothing
        return None
    wide = wide.dropna()
    # A stop of the machine's in one of the two passes says nothing of the micro-batch, and weighs much in a square.
    apart = (wide[FORWARD] - wide[BACKWARD]).abs()
    wide = wide[apart <= apart.quantile(1 - STOPPED_IN_ONE)]
    forward, backward = wide[FORWARD].to_numpy(np.float64), wide[BACKWARD].to_numpy(np.float64)
    common = float((forward * backward).mean()) if len(wide) else 0.0
    of_passes = common / max(float(np.sqrt((forward**2).mean() * (backward**2).mean())), 1e-12) if len(wide) else 0.0
    of_step = float(passes.groupby(["step", "name"])["batch"].nunique().mean())  # so many have their mean taken off
    spread = float(np.sqrt(max(common, 0.0) * of_step / max(of_step - 1, 1.0)))
    if len(wide) < FEWEST or spread < LEAST_SPREAD or of_passes < LEAST_PASSES:
        return None
    of_stages = _between_stages(passes)
    if of_stages < LEAST_STAGES or _of_one_replica(passes) or _in_turn(passes) > MOST_IN_TURN:
        return None
    return _excess(study, table, spread, of_passes, of_stages)


def input_of_steps(study: Study) -> Float | None:
    """How much input each ordinary step was given, [S], mean over ranks, in any unit; None where nothing tells."""
    if study.input_sizes is not None:
        of_ranks: Float = study.input_sizes.mean(axis=0)
        return of_ranks
    found = unequal_micro_batches(study)
    return None if found is None else found.lengths


@once
def micro_batch_counts(study: Study) -> Float | None:
    """How many micro-batches each rank has in each ordinary step, [R, S]. None where that was not seen, or a rank has
    not as many forwards as backwards, which then are of something else."""
    table = study.passes
    counts = table.groupby(["name", "rank", "step"]).size()
    if not {FORWARD, BACKWARD} <= set(table["name"]):
        return None
    wide: list[Float] = []
    for name in (FORWARD, BACKWARD):
        of_name = counts[name].unstack(fill_value=0)
        of_steps = of_name.reindex(index=study.ranks, columns=study.step_numbers, fill_value=0)
        wide.append(of_steps.to_numpy(np.float64))
    forward, backward = wide
    return forward if (forward > 0).all() and (forward == backward).all() else None


def _computations(study: Study) -> pd.DataFrame | None:
    """Forwards and backwards of micro-batches in the ordinary steps: rank, step, name (F, or B with W), micro (its
    place in the step), replica, place (rank, stage, name and micro), batch (replica, step and micro), start_ns, ms,
    usual: the mean of its place."""
    table = _passed(study)
    if table is None or table.empty:
        return None
    table = table[table["step"].isin(study.step_numbers) & table["rank"].isin(study.ranks) & (table["ms"] > 0)]
    if table["step"].nunique() < FEWEST_STEPS:
        return None
    replica = _replica_of(study)
    table = table.assign(name=np.where(table["name"] == FORWARD, FORWARD, BACKWARD), replica=table["rank"].map(replica))
    micro = table["micro"].astype(str)
    table = table.assign(
        place=table["stage"].astype(str) + "." + table["rank"].astype(str) + "." + micro + "/" + table["name"],
        batch=table["replica"].astype(str) + "." + table["step"].astype(str) + "." + micro,
    )
    each = table.groupby(["place", "batch"], sort=False)["ms"].sum()
    usual = each.groupby(level="place").mean()
    parts = table.groupby(["place", "batch"])["ms"].transform("size")  # B and W of one micro-batch
    table = table.assign(usual=table["place"].map(usual).to_numpy(np.float64) / parts.to_numpy(np.float64))
    return table if table["batch"].nunique() >= FEWEST else None


def _passed(study: Study) -> pd.DataFrame | None:
    """`passes.PASS_COLUMNS` of all ranks, and ms, what each computed."""
    if study.on_gpu:  # there its host's phases say nothing of what the device takes
        return None
    table = study.passes
    if set(table["rank"]) != set(study.ranks):
        return None
    counts = table.groupby(["rank", "step", "name"]).size().unstack(fill_value=0)
    if not {FORWARD, BACKWARD} <= set(counts.columns):
        return None
    usual = counts.mode().iloc[0]
    if usual[FORWARD] != usual[BACKWARD]:
        return None
    alike = counts.index[(counts == usual).all(axis=1)]
    table = table[pd.MultiIndex.from_frame(table[["rank", "step"]]).isin(alike)]
    return table.assign(ms=table["own_ns"] / 1e6)


def _replica_of(study: Study) -> dict[int, int]:
    """Rank -> a number of the ranks that the same micro-batches pass: those joined by a pipeline's messages."""
    parent = {rank: rank for rank in study.ranks}

    def root(rank: int) -> int:
        while parent[rank] != rank:
            rank = parent[rank]
        return rank

    stage_of = study.topology.stage_of
    sent = study.collectives["name"] == SEND_RECV
    pairs = study.collectives["group"][sent].astype(str).drop_duplicates().str.extract(PAIR).dropna().astype("int64")
    for one, other in pairs.itertuples(index=False):
        if one in parent and other in parent and stage_of.get(one) != stage_of.get(other):
            parent[root(one)] = root(other)
    return {rank: root(rank) for rank in study.ranks}


def _between_stages(passes: pd.DataFrame) -> float:
    """Intraclass correlation of what the ranks take that one micro-batch passes; NaN where each passes one only."""
    each = passes.groupby(["batch", "rank"])["beside"].mean().unstack().to_numpy(np.float64)
    count = np.isfinite(each).sum(axis=1)
    each, count = each[count > 1], count[count > 1]
    if not len(each):
        return np.nan
    total, squares = np.nansum(each, axis=1), np.nansum(each**2, axis=1)
    between = (total**2 - squares) / (count * (count - 1))
    return float(between.mean() / max(float((squares / count).mean()), 1e-12))


def _of_one_replica(passes: pd.DataFrame) -> bool:
    """Whether one replica has more than its part of what differs."""
    squares = ((passes["off"] - 1) ** 2).groupby(passes["replica"]).sum()
    replicas = len(squares)
    return replicas > 1 and float(squares.max() / max(float(squares.sum()), 1e-12)) > 1 / replicas + MOST_OF_ONE


def _in_turn(passes: pd.DataFrame) -> float:
    """Correlation of micro-batches that follow one another on a replica."""
    each = passes.groupby(["replica", "batch"], sort=False)["beside"].mean()
    following = each.groupby(level="replica").shift(-1)
    known = following.notna()
    one, next_one = each[known].to_numpy(np.float64), following[known].to_numpy(np.float64)
    return float((one * next_one).mean() / max(float((each**2).mean()), 1e-12)) if len(one) else 0.0


def _by_chance(table: pd.DataFrame, spread: float) -> dict[int, float]:
    """Replica -> how much longer its micro-batches were than the others' over the whole run, times, where that is no
    more than chance gives to so many: then it is not slow. 1.0: it was not told, or its ranks are slow or fast."""
    kind = table["place"].str.replace(r"^(\d+)\.\d+\.", r"\1.", regex=True)  # the same of all replicas
    alike = table.groupby(kind)["usual"].transform("median")
    of_rank = table.assign(alike=alike).groupby(["replica", "rank"])[["ms", "alike"]].sum()
    times = of_rank["ms"] / of_rank["alike"]
    found = {}
    for replica, of_replica in times.groupby(level="replica"):
        # A rank may be slow by itself: the others of its replica tell how long its micro-batches were.
        off = of_replica.to_numpy(np.float64)
        least = float(off[np.argsort(np.abs(off - 1), kind="stable")[(len(off) - 1) // 2]])
        count = table["batch"][table["replica"] == replica].nunique()
        found[int(replica)] = least if abs(least - 1) <= BY_CHANCE * spread / np.sqrt(count) else 1.0
    return found


def _excess(study: Study, table: pd.DataFrame, spread: float, passes: float, stages: float) -> UnequalMicroBatches:
    chance = table["replica"].map(_by_chance(table, spread)).to_numpy(np.float64)
    table = table.assign(usual=table["usual"] / chance)
    of_batch = table.groupby("batch")[["ms", "usual"]].sum()
    length = table["batch"].map(of_batch["ms"] / of_batch["usual"]).to_numpy(np.float64)
    of_step = table.assign(length=length * table["usual"]).groupby("step")[["length", "usual"]].sum()
    lengths = of_step["length"] / of_step["usual"]
    mean = table["step"].map(lengths).to_numpy(np.float64)
    share = 1 - mean / length
    rank: Int = np.searchsorted(study.ranks, table["rank"].to_numpy(np.int64))
    step: Int = np.searchsorted(study.step_numbers, table["step"].to_numpy(np.int64))
    begin = study.ordinary.groupby("step")["start_ns"].min().reindex(study.step_numbers).to_numpy(np.int64)
    start_ms = (table["start_ns"].to_numpy(np.int64) - begin[step]) / 1e6
    excess = np.zeros((len(study.ranks), len(study.step_numbers)))
    np.add.at(excess, (rank, step), table["ms"].to_numpy(np.float64) * share)
    return UnequalMicroBatches(
        excess=excess,
        lengths=lengths.reindex(study.step_numbers, fill_value=1.0).to_numpy(np.float64),
        spans=Spans(rank, step, start_ms, table["dur_ns"].to_numpy(np.float64) / 1e6, share),
        spread=spread,
        passes=passes,
        stages=stages,
    )
