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
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..align.match import PAIR, SEND_RECV
from ..arrays import Bool, Float, Int
from ..study import Study, once
from ..whatif.work import Spans
from .passes import BACKWARD, FORWARD, WEIGHTS

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
    told, _ = _looked_at(study)
    return told


@dataclass(frozen=True)
class _Computations:
    """Forwards and backwards of micro-batches in the ordinary steps, as arrays by row: of a backward in two parts (B
    and W) each is one.

    micro: which of the step's micro-batches of its replica
    replica: a number of the ranks that the same micro-batches pass
    back:  whether it is of a backward
    kind:  number of its stage, pass and micro-batch within the step, the same on all replicas; place: with its rank
    batch: number of its micro-batch (replica, step and place in it), in the order in which they are met
    ms, usual: what it computed, and the mean of its place; of a part of a backward, its part of that
    """

    rank: Int
    step: Int
    stage: Int
    micro: Int
    replica: Int
    back: Bool
    kind: Int
    place: Int
    batch: Int
    start_ns: Int
    dur_ns: Int
    ms: Float
    usual: Float


@dataclass(frozen=True)
class _Passes:
    """The same with both parts of a backward as one.

    off, beside: what it took of what is usual, and that less the mean of the step's forwards or backwards
    """

    rank: Int
    step: Int
    stage: Int
    replica: Int
    back: Bool
    batch: Int
    off: Float
    beside: Float


def unequal_micro_batches(study: Study) -> UnequalMicroBatches | None:
    """None where micro-batches take equally long, differ for another reason, or were not seen."""
    _, found = _looked_at(study)
    return found


@once
def _looked_at(study: Study) -> tuple[bool, UnequalMicroBatches | None]:
    """Whether enough was seen, and what was found. Of thousands of ranks the computations take more room than what
    is found in them, and are not kept."""
    each = _computations(study)
    return each is not None, None if each is None else _unequal(study, each)


def _unequal(study: Study, each: _Computations) -> UnequalMicroBatches | None:
    passes = _passes(each)
    both = _forwards_beside_backwards(passes)
    if both is None:  # one of the two computes nothing
        return None
    forward, backward = both
    # A stop of the machine's in one of the two passes says nothing of the micro-batch, and weighs much in a square.
    apart = np.abs(forward - backward)
    alike = apart <= np.quantile(apart, 1 - STOPPED_IN_ONE) if len(apart) else np.zeros(0, bool)
    forward, backward = forward[alike], backward[alike]
    common = float((forward * backward).mean()) if len(forward) else 0.0
    of_passes = common / max(float(np.sqrt((forward**2).mean() * (backward**2).mean())), 1e-12) if len(forward) else 0.0
    of_step = _batches_of_a_step(passes)  # so many have their mean taken off
    spread = float(np.sqrt(max(common, 0.0) * of_step / max(of_step - 1, 1.0)))
    if len(forward) < FEWEST or spread < LEAST_SPREAD or of_passes < LEAST_PASSES:
        return None
    of_stages = _between_stages(passes)
    if of_stages < LEAST_STAGES or _of_one_replica(passes) or _in_turn(passes) > MOST_IN_TURN:
        return None
    return _excess(study, each, spread, of_passes, of_stages)


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
    name = table["name"].to_numpy(object)
    if not (name == FORWARD).any() or not (name == BACKWARD).any():
        return None
    rank, step = (table[column].to_numpy(np.int64) for column in ("rank", "step"))
    there = np.isin(rank, study.ranks) & np.isin(step, study.step_numbers)
    shape = len(study.ranks), len(study.step_numbers)
    forward, backward = np.zeros(shape), np.zeros(shape)
    for wide, of_name in ((forward, FORWARD), (backward, BACKWARD)):
        mine = there & (name == of_name)
        at = np.searchsorted(study.ranks, rank[mine]), np.searchsorted(study.step_numbers, step[mine])
        np.add.at(wide, at, 1.0)
    return forward if (forward > 0).all() and (forward == backward).all() else None


def _computations(study: Study) -> _Computations | None:
    table = study.passes
    if study.on_gpu or table.empty:  # on devices their hosts' phases say nothing of what they take
        return None
    rank, step, stage, micro, start, length, own = (
        table[column].to_numpy(np.int64)
        for column in ("rank", "step", "stage", "micro", "start_ns", "dur_ns", "own_ns")
    )
    name = table["name"].to_numpy(object)
    chosen = _as_usual(study, rank, step, name)
    if chosen is None:
        return None
    ms = own / 1e6
    chosen &= np.isin(step, study.step_numbers) & np.isin(rank, study.ranks) & (ms > 0)
    there = np.flatnonzero(chosen)
    rank, step, stage, micro, ms = (of[there] for of in (rank, step, stage, micro, ms))
    if len(np.unique(step)) < FEWEST_STEPS:
        return None
    back = name[there] != FORWARD
    replicas = _replica_of(study)
    replica = np.array([replicas[one] for one in rank.tolist()], np.int64)
    kind = _numbered(stage, micro, back)
    place, batch = _numbered(kind, rank), _as_met(_numbered(replica, step, micro))
    if batch.max() + 1 < FEWEST:
        return None
    pair = _numbered(place, batch)
    parts = np.bincount(pair)  # B and W of one micro-batch
    of_place = np.zeros(len(parts), np.int64)
    of_place[pair] = place
    usual = np.bincount(place, ms) / np.bincount(of_place)
    when = start[there], length[there]
    return _Computations(
        rank, step, stage, micro, replica, back, kind, place, batch, *when, ms, usual[place] / parts[pair]
    )


def _as_usual(study: Study, rank: Int, step: Int, name: npt.NDArray[np.object_]) -> Bool | None:
    """Which computations are of a rank's step that has as many forwards and backwards as most; None where they are not
    of micro-batches, or not all ranks have any."""
    if set(rank.tolist()) != set(study.ranks):
        return None
    names = (FORWARD, BACKWARD, WEIGHTS)
    of_step, which = _numbered(rank, step), np.zeros(len(name), np.int64)
    for number, one in enumerate(names):
        which[name == one] = number
    counts = np.bincount(len(names) * of_step + which, minlength=len(names) * (of_step.max() + 1))
    counts = counts.reshape(-1, len(names))
    if not counts[:, 0].any() or not counts[:, 1].any():
        return None
    usual = np.array([np.bincount(of_name).argmax() for of_name in counts.T])
    return (counts == usual).all(axis=1)[of_step] if usual[0] == usual[1] else None


def _numbered(*columns: npt.NDArray[Any]) -> Int:
    """A number for each combination of values, from 0 on, in their order."""
    found = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        values, place = np.unique(column, return_inverse=True)
        _, found = np.unique(found * max(len(values), 1) + place, return_inverse=True)
    return found


def _as_met(numbers: Int) -> Int:
    """The same numbers in the order in which they are met."""
    _, first = np.unique(numbers, return_index=True)
    return np.argsort(np.argsort(first))[numbers]


def _mean_of(numbers: Int, values: Float) -> Float:
    """The mean of the values of each number, from 0 on."""
    found: Float = np.bincount(numbers, values) / np.maximum(np.bincount(numbers), 1)
    return found


def _median_of(numbers: Int, values: Float) -> Float:
    """The median of the values of each number, from 0 on; there are some of each."""
    order, count = np.lexsort((values, numbers)), np.bincount(numbers)
    first = np.cumsum(count) - count
    found: Float = (values[order[first + (count - 1) // 2]] + values[order[first + count // 2]]) / 2
    return found


def _passes(each: _Computations) -> _Passes:
    pair = _as_met(_numbered(each.place, each.batch))
    _, first = np.unique(pair, return_index=True)
    off = np.bincount(pair, each.ms) / np.bincount(pair, each.usual)
    step, back = each.step[first], each.back[first]
    of_step = _numbered(step, back)
    beside = off - _mean_of(of_step, off)[of_step]
    return _Passes(each.rank[first], step, each.stage[first], each.replica[first], back, each.batch[first], off, beside)


def _forwards_beside_backwards(passes: _Passes) -> tuple[Float, Float] | None:
    """What a rank's forward and its backward of a micro-batch took beside others of their step, of all that have both.
    None where there are none of either."""
    if passes.back.all() or not passes.back.any():
        return None
    both = _numbered(passes.stage, passes.rank, passes.batch)
    wide = np.full((2, int(both.max()) + 1), np.nan)
    wide[passes.back.astype(np.int64), both] = passes.beside
    wide = wide[:, np.isfinite(wide).all(axis=0)]
    return wide[0], wide[1]


def _batches_of_a_step(passes: _Passes) -> float:
    """How many micro-batches have a forward, or a backward, in a step, mean."""
    of_step = _numbered(passes.step, passes.back)
    _, first = np.unique(_numbered(of_step, passes.batch), return_index=True)
    return float(np.bincount(of_step[first]).mean())


def _replica_of(study: Study) -> dict[int, int]:
    """Rank -> a number of the ranks that the same micro-batches pass: those joined by a pipeline's messages."""
    parent = {rank: rank for rank in study.ranks}

    def root(rank: int) -> int:
        while parent[rank] != rank:
            rank = parent[rank]
        return rank

    stage_of = study.topology.stage_of
    sent = (study.collectives["name"] == SEND_RECV).to_numpy(bool)
    if not sent.any():
        return parent
    pairs = study.collectives["group"][sent].astype(str).drop_duplicates().str.extract(PAIR).dropna().astype("int64")
    for one, other in pairs.itertuples(index=False):
        if one in parent and other in parent and stage_of.get(one) != stage_of.get(other):
            parent[root(one)] = root(other)
    return {rank: root(rank) for rank in study.ranks}


def _between_stages(passes: _Passes) -> float:
    """Intraclass correlation of what the ranks take that one micro-batch passes; NaN where each passes one only."""
    on_rank = _numbered(passes.batch, passes.rank)
    _, first = np.unique(on_rank, return_index=True)
    mean, batch = _mean_of(on_rank, passes.beside), passes.batch[first]
    count, total, squares = (np.bincount(batch, of) for of in (np.ones(len(mean)), mean, mean**2))
    several = count > 1
    if not several.any():
        return np.nan
    count, total, squares = count[several], total[several], squares[several]
    between = (total**2 - squares) / (count * (count - 1))
    return float(between.mean() / max(float((squares / count).mean()), 1e-12))


def _of_one_replica(passes: _Passes) -> bool:
    """Whether one replica has more than its part of what differs."""
    squares = np.bincount(_numbered(passes.replica), (passes.off - 1) ** 2)
    replicas = len(squares)
    return replicas > 1 and float(squares.max() / max(float(squares.sum()), 1e-12)) > 1 / replicas + MOST_OF_ONE


def _in_turn(passes: _Passes) -> float:
    """Correlation of micro-batches that follow one another on a replica."""
    each = _mean_of(passes.batch, passes.beside)  # in the order in which they are met
    replica = np.empty(len(each), np.int64)
    replica[passes.batch] = passes.replica
    order = np.argsort(replica, kind="stable")
    follows = replica[order][1:] == replica[order][:-1]
    one, next_one = each[order][:-1][follows], each[order][1:][follows]
    return float((one * next_one).mean() / max(float((each**2).mean()), 1e-12)) if len(one) else 0.0


def _by_chance(each: _Computations, spread: float) -> Float:
    """Of each computation, how much longer its replica's micro-batches were than the others' over the whole run, times,
    where that is no more than chance gives to so many: then it is not slow. 1.0: it was not told, or its ranks are slow
    or fast. The same of those at its place in the step, beside the others of its replica: of the few steps of a run
    these differ even more."""
    alike = _median_of(each.kind, each.usual)[each.kind]  # the same of all replicas
    every, of_replica = np.zeros_like(each.replica), _longer(each, alike, each.replica)
    of_place = _longer(each, alike, _numbered(each.replica, each.micro)) / of_replica
    return _if_by_chance(each, of_replica, spread, every) * _if_by_chance(each, of_place, spread, each.micro)


def _longer(each: _Computations, alike: Float, group: Int) -> Float:
    """How many times as long as `alike` the computations of the same group are. A rank may be slow by itself: the
    others of its replica tell how long its micro-batches were."""
    of_rank = _numbered(group, each.rank)
    times = np.bincount(of_rank, each.ms) / np.bincount(of_rank, alike)
    _, first = np.unique(of_rank, return_index=True)
    group = _numbered(group)
    order = np.lexsort((np.abs(times - 1), group[first]))
    count = np.bincount(group[first])
    least: Float = times[order[np.cumsum(count) - count + (count - 1) // 2]]
    return least[group]


def _if_by_chance(each: _Computations, times: Float, spread: float, place: Int) -> Float:
    """`times` where that many micro-batches, those of a replica at a place, differ by so much; else 1.0."""
    group = _numbered(each.replica, place)
    pair = _numbered(group, each.batch)
    _, first = np.unique(pair, return_index=True)
    count = np.bincount(group[first])[group]
    return np.where(np.abs(times - 1) <= BY_CHANCE * spread / np.sqrt(count), times, 1.0)


def _excess(study: Study, each: _Computations, spread: float, passes: float, stages: float) -> UnequalMicroBatches:
    usual = each.usual / _by_chance(each, spread)
    length = (np.bincount(each.batch, each.ms) / np.bincount(each.batch, usual))[each.batch]
    rank: Int = np.searchsorted(study.ranks, each.rank)
    step: Int = np.searchsorted(study.step_numbers, each.step)
    whole = np.bincount(step, usual, len(study.step_numbers))
    lengths = np.ones(len(whole))
    np.divide(np.bincount(step, length * usual, len(whole)), whole, out=lengths, where=whole > 0)
    share = 1 - lengths[step] / length
    begin = study.ordinary.groupby("step")["start_ns"].min().reindex(study.step_numbers).to_numpy(np.int64)
    excess = np.zeros((len(study.ranks), len(study.step_numbers)))
    np.add.at(excess, (rank, step), each.ms * share)
    return UnequalMicroBatches(
        excess=excess,
        lengths=lengths,
        spans=Spans(rank, step, (each.start_ns - begin[step]) / 1e6, each.dur_ns.astype(np.float64) / 1e6, share),
        spread=spread,
        passes=passes,
        stages=stages,
    )
