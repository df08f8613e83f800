"""Input: the ranks get unequal amounts of it. (The loop waits for it: `data_stall`.)"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from ... import signals
from ...align.groups import EP
from ...arrays import Float
from ...finding import Evidence, Finding, Fix, Gain, Where
from ...price.calibration import ModelError
from ...study import Study, once
from ...text import percent
from ...whatif.work import Change
from ...work.micro_batches import LEAST_SPREAD, UnequalMicroBatches, can_tell, micro_batch_counts, unequal_micro_batches
from ..base import NotJudged, at, code_fix
from ..rule import Look, Rule, fault
from .every_rank import of_every_rank
from .loader import loader_site, training_loader
from .pieces import MOST_OF_WORK, Pieces, given_in_steps, pieces_that_follow
from .routed_tokens import routed_tokens
from .sequence import causal, causal_shards

SIZES_TELL: Final = 0.5
"""Correlation of what ranks compute beyond their peers, as their inputs' sizes say and as their micro-batches do, from
which on it is the sizes."""
MOST_PIECES: Final = 4_000_000
"""Of all ranks and steps, that are looked at one by one."""
MOST_OF_WHOLE: Final = 0.8
"""Of what whole steps say that unequal inputs cost, that the pieces which follow them have to have."""


@once
def explained_by_input(study: Study) -> Float | None:
    """The part of each rank's compute that its share of the input explains, ms above (+) or below (-) what an equal
    share would cost, [R, S]: by the sizes of inputs, or where these are unknown by how many micro-batches ranks have,
    or by what each of them takes. Of ranks that share sequences also by their place. None where none of it tells, or
    nothing differs."""
    in_order = causal(study)
    if in_order is not None:
        return in_order.excess
    by_time = cost_of_equal_inputs(study)
    if by_time is not None:
        return by_time.excess
    if study.input_sizes is not None:
        return explained_by_size(study)
    more = explained_by_count(study)
    if more is not None:
        return more
    found = unequal_micro_batches(study)
    return None if found is None else found.excess


@once
def explained_by_size(study: Study) -> Float | None:
    """The part of each rank's compute that its share of the input explains: ms above (+) or below (-) what an equal
    share would cost, [R, S]. None where sizes are unknown or never differ between ranks that are to do
    the same work.

    Compute is taken as linear in the input: each piece of it that follows the input, where these have most of what the
    whole step has, as not all of a step need grow with it; else the whole.
    """
    pieces = pieces_by_size(study)
    return _of_whole_steps(study) if pieces is None else pieces.excess


@once
def pieces_by_size(study: Study) -> Pieces | None:
    """The pieces of the work that follow a rank's input. None where none does, or they have but a part of what the
    whole steps say: of many micro-batches a step each may follow the step's input too little to be sure. None, too, of
    a job so large that each piece of each rank and step would take much memory."""
    whole, sizes = _of_whole_steps(study), study.input_sizes
    if whole is None or not whole.any() or sizes is None or study.graph is None:
        return None
    if sum(steps.work.shape[0] * steps.work.shape[1] for steps in study.graph.templates) > MOST_PIECES:
        return None
    teams = [study.ranks_where(peer_group) for peer_group in study.peer_groups]
    found = pieces_that_follow(study, teams, given_in_steps(_less_mean_of_team(study, sizes), sizes))
    if found is None or np.abs(found.excess).sum() < MOST_OF_WHOLE * np.abs(whole).sum():
        return None
    return found


@once
def _of_whole_steps(study: Study) -> Float | None:
    """The same as `explained_by_size`, with one slope for all of a step: by how a rank's own compute follows its own
    input; where a rank's input never varies, by the differences between ranks."""
    sizes = study.input_sizes
    if sizes is None:
        return None
    between = _less_mean_of_team(study, sizes)
    if not between.any():
        return None
    compute = study.work("compute")
    within = sizes - sizes.mean(axis=1, keepdims=True)
    if within.any():
        slope = float((within * (compute - compute.mean(axis=1, keepdims=True))).sum() / (within**2).sum())
    else:
        slope = float((between * _less_mean_of_team(study, compute)).sum() / (between**2).sum())
    excess: Float = np.minimum(max(slope, 0.0) * between, MOST_OF_WORK * compute)
    return excess


@once
def cost_of_equal_inputs(study: Study) -> UnequalMicroBatches | None:
    """Micro-batches that take unequally long and whose sizes, which are known, do not say why: as packed sequences of
    equally many tokens, whose attention goes with the squares of their lengths. None where sizes do explain it, or are
    unknown."""
    if study.input_sizes is None:
        return None
    found = unequal_micro_batches(study)
    if found is None:
        return None
    by_size = explained_by_size(study)
    if by_size is None or not by_size.any():
        return found
    told = float(np.corrcoef(by_size.ravel(), found.excess.ravel())[0, 1])
    return found if not told >= SIZES_TELL else None


def micro_batches_by_size(study: Study) -> UnequalMicroBatches | None:
    """Of several micro-batches a step, whose sizes say why they take unequally long: what each of them takes beyond an
    equal one. Ranks may wait for each other in each, of which what they are given in the whole step says little. None
    where there is one a step, or what they take tells nothing."""
    counts = micro_batch_counts(study)
    if study.input_sizes is None or counts is None or counts.max() < 2 or _has_experts(study):
        return None
    return unequal_micro_batches(study) if cost_of_equal_inputs(study) is None else None


@once
def explained_by_count(study: Study) -> Float | None:
    """The part of each rank's compute that it has more (+) or fewer (-) micro-batches for than the mean of those that
    are to do the same work, ms, [R, S], at what one takes it. None where that was not seen, or all have as many."""
    counts = micro_batch_counts(study)
    if counts is None:
        return None
    beyond = _less_mean_of_team(study, counts)
    return study.work("compute") * beyond / counts if beyond.any() else None


def _less_mean_of_team(study: Study, values: Float) -> Float:
    """`values` [R, S] without their mean over the ranks that are to do the same work."""
    found = np.zeros_like(values)
    for peer_group in study.peer_groups:
        found[peer_group] = values[peer_group] - values[peer_group].mean(axis=0)
    return found


def unequal(study: Study) -> Change | None:
    """Every rank given an equal share of the step's input, also those that were not captured."""
    change = _unequal(study)
    return None if change is None else of_every_rank(study, change)


def _unequal(study: Study) -> Change | None:
    signals.peers(study)
    routed = routed_tokens(study)
    if routed is not None:
        raise NotJudged(routed.reason)
    if causal(study) is not None:  # that is a finding of its own
        return None
    by_time = cost_of_equal_inputs(study)
    if by_time is not None:
        _need_no_experts(study)
        return Change({"compute": by_time.excess}, spans=by_time.spans)
    if study.input_sizes is None and (more := explained_by_count(study)) is not None:
        return Change({"compute": more})
    if study.input_sizes is None and can_tell(study):
        found = unequal_micro_batches(study)
        if found is not None:
            _need_no_experts(study)
        return None if found is None else Change({"compute": found.excess}, spans=found.spans)
    signals.input_sizes(study)
    if all(peer_group.sum() < 2 for peer_group in study.peer_groups):
        raise NotJudged("each rank is another stage of a pipeline, so their inputs differ")
    each = micro_batches_by_size(study)
    if each is not None:
        return Change({"compute": each.excess}, spans=each.spans)
    counts = micro_batch_counts(study)
    if counts is not None and counts.max() > 1 and unequal_micro_batches(study) is not None:
        _need_no_experts(study)  # of several micro-batches a step, what a whole step is given tells next to nothing
    pieces = pieces_by_size(study)
    if pieces is not None:
        return pieces.change
    explained = explained_by_size(study)
    return Change({"compute": explained}) if explained is not None else None


def _need_no_experts(study: Study) -> None:
    """Raises NotJudged where tokens are sent to experts: layer by layer another rank may get more of them, while each
    gets as many in a step, which no other input would mend."""
    if _has_experts(study):
        raise NotJudged(
            "micro-batches take unequally long, and tokens are exchanged with experts: whether that is the input's "
            "doing or the router's, what they take does not tell"
        )


def _has_experts(study: Study) -> bool:
    return any(dimension.role == EP for dimension in study.mesh.dimensions)


def imbalance(study: Study, change: Change, gain: Gain, share: Gain) -> Finding:
    """Ranks are given unequal amounts of work in the same step, so each step takes as long as its largest share."""
    where = Where(ranks=study.ranks, steps=study.step_range)
    if study.input_sizes is None and explained_by_count(study) is not None:
        title, evidence = _by_count(study, change)
        same = "give every rank the same number of micro-batches in a step (gradient accumulation)"
        fixes: tuple[Fix, ...] = (Fix("code", same, gain=gain),)
    else:
        by_time = unequal_micro_batches(study) if study.input_sizes is None else None
        equal = cost_of_equal_inputs(study)
        if equal is not None:
            title, evidence = _by_cost(study, equal)
            fixes = _fixes_of_cost(study, gain)
        else:
            title, evidence = _by_time(by_time) if by_time is not None else _by_size(study, change)
            fixes = _fixes(study, gain)
    return Finding("data.imbalance", title, "info", where, evidence, gain, fixes, share=share)


def _by_count(study: Study, change: Change) -> tuple[str, tuple[Evidence, ...]]:
    counts = micro_batch_counts(study)
    assert counts is not None
    each = counts.mean(axis=1)
    fewest, most = int(each.argmin()), int(each.argmax())
    evidence = (
        Evidence(f"micro-batches a step of rank {study.ranks[most]}", round(float(each[most]), 2), "count"),
        Evidence(f"micro-batches a step of rank {study.ranks[fewest]}", round(float(each[fewest]), 2), "count"),
        Evidence("extra compute of the rank with most", round(float(change.removed["compute"].max(axis=0).mean()), 3),
                 "ms", 0.0),
    )  # fmt: skip
    if each[most] > each[fewest]:
        between = f"{each[fewest]:g} to {each[most]:g} a step"
    else:
        between = "another rank has more of them each step"
    return f"ranks get unequal numbers of micro-batches: {between}", evidence


def _by_time(found: UnequalMicroBatches) -> tuple[str, tuple[Evidence, ...]]:
    evidence = [
        Evidence("standard deviation of what micro-batches take, of the mean", round(100 * found.spread, 1), "%", 0.0),
        Evidence("correlation of a micro-batch's forward and backward", round(found.passes, 2), ""),
    ]
    if not math.isnan(found.stages):
        evidence.append(Evidence("correlation of a micro-batch on one stage and another", round(found.stages, 2), ""))
    everywhere = "in forward and backward" if math.isnan(found.stages) else "in forward and backward, on every stage"
    title = (
        f"micro-batches are of unequal length: what they take differs by {percent(100 * found.spread)}, {everywhere}"
    )
    return title, tuple(evidence)


def _by_cost(study: Study, found: UnequalMicroBatches) -> tuple[str, tuple[Evidence, ...]]:
    sizes = signals.input_sizes(study)
    spread = np.ptp(sizes, axis=0) / np.maximum(sizes.mean(axis=0), 1)
    of_size = Evidence(
        "largest less smallest input of a step, of the mean", round(100 * float(spread.mean()), 2), "%", 0.0
    )
    batches = "batches that are equally large"
    if float(spread.mean()) >= LEAST_SPREAD:
        batches = "batches, for a reason that their sizes do not tell,"
    title = (
        f"{batches} take unequally long: what they take differs by {percent(100 * found.spread)}, in forward and "
        "backward alike, and another rank is late each step"
    )
    return title, (of_size, *_by_time(found)[1])


def _fixes_of_cost(study: Study, alone: Gain) -> tuple[Fix, ...]:
    site = loader_site(study, training_loader(study))
    by_cost = (
        "share samples out by what they cost and not by tokens: of packed sequences the sum of the squared lengths "
        f"(what attention takes) is to be equal on all ranks of a step{at(site)}"
    )
    return (
        code_fix(by_cost, "batch_sampler", "sum of squared lengths", site, alone),
        Fix("code", "or cut long documents, or keep those of like length for the same step"),
    )


def _by_size(study: Study, change: Change) -> tuple[str, tuple[Evidence, ...]]:
    excess, compute = change.removed["compute"], study.work("compute")
    sizes = signals.input_sizes(study)
    spreads = [
        np.ptp(sizes[peer_group], axis=0) / np.maximum(sizes[peer_group].mean(axis=0), 1)
        for peer_group in study.peer_groups
    ]
    spread = np.max(spreads, axis=0)
    deviation = _less_mean_of_team(study, compute).ravel()
    together = np.corrcoef(excess.ravel(), deviation)[0, 1] if excess.any() and deviation.any() else 0.0
    evidence: tuple[Evidence, ...] = (
        Evidence("largest less smallest input of a step, of the mean", round(100 * float(spread.mean()), 1), "%", 0.0),
        Evidence("extra compute of the rank with most input", round(float(excess.max(axis=0).mean()), 3), "ms", 0.0),
        Evidence("correlation of a rank's extra compute with its extra input", round(float(together), 2), ""),
    )
    title = f"ranks get unequal inputs: {percent(100 * spread.mean())} between the largest and the smallest of a step"
    each = micro_batches_by_size(study)
    if each is not None:
        title += f", and what micro-batches take differs by {percent(100 * each.spread)}"
        evidence = (*evidence, *_by_time(each)[1])
    return title, evidence


def _fixes(study: Study, alone: Gain) -> tuple[Fix, ...]:
    loader = training_loader(study)
    if loader is not None and loader.get("framework") == "transformers":
        flag, value = "--train_sampling_strategy", "group_by_length"
        title = f"{flag} {value}, or the same of TrainingArguments (before transformers 5: --group_by_length True)"
        return (code_fix(title, flag, value, None, alone),)
    site = loader_site(study, loader)
    title = (
        f"give every rank batches of like length in a step: sort or bucket samples by length in the sampler{at(site)}"
    )
    other = "or fill batches up to a number of tokens, not of samples"
    if site is None:  # no DataLoader whose arguments could be changed
        return (
            Fix("code", title.replace(" in the sampler", " before they are shared out"), gain=alone),
            Fix("code", other),
        )
    return (
        code_fix(title, "sampler", "length-bucketed", site, alone),
        code_fix(other, "batch_sampler", "token budget", site),
    )


RULES = (
    Rule(
        "data.imbalance",
        "the ranks of a step get unequal amounts of input",
        explains=("peer_wait",),
        looks=(fault("data.imbalance", unequal, imbalance), Look(causal_shards, needs=(signals.replay,))),
        error=ModelError(of_gain=0.035, of_step=0.01, busy=0.01),
        came_true=(25, 25),
        place=30,
    ),
)
