"""pipeline.stall: stages wait for what is on its way to them, or until what they sent has been taken: beyond what the
schedule's bubble and unequal stages explain."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from ... import signals
from ...arrays import Float
from ...candidate import Between, Candidate, Price
from ...effect import Effect
from ...finding import Evidence, Finding, Fix, Gain, Where
from ...graph.link import LEAST_SPREAD
from ...graph.step_graph import WAKE_UP_DELAY
from ...price.calibration import BETWEEN_RUNS
from ...price.effects import parts_of_others, sure_gain
from ...study import Study, once
from ...text import ms, percent, size
from ...whatif.communications import ScaleLink
from ...whatif.lowering.messages import awaited
from ...whatif.lowering.program import is_message
from ...whatif.overlapped_messages import OverlappedMessages, pair_of
from ...whatif.select import Communications
from ...work.core_wait import lacks_cores
from ..base import NotJudged, at, hosts_of
from ..comm.slow_link import wants_cores
from ..rule import Found, Look, Rule
from .bubble_and_imbalance import need_every_stage

SLOWER: Final = 1.5
"""So many times what the messages of the other pairs take, in the median."""
FEWEST: Final = 8
"""Messages of a pair that someone waited for."""
MOST_SPREAD: Final = 0.9
"""Messages that differ by more than that tell next to nothing of the next ones."""
ALIKE: Final = 0.02
"""What is smaller by no more than this share is as large."""
SURE: Final = 0.25
"""All but this share of a slow pair's messages take longer than all but this share of what the others' usually do."""


@dataclass(frozen=True, eq=False)
class Pair:
    """What one rank sends to another in a pipeline's steps.

    lane:     of its messages in the graph
    took:     what those took that someone waited for, ms, each
    bytes:    of one, median
    count:    how many there are a step
    behind_ms: how much later than their ends those went on who waited for them, in a step: where a sender goes on as
              soon as a message is on its way, its end is not known better, and that may be what it took as well
    """

    lane: str
    source: int
    target: int
    took: Float
    bytes: float
    count: float
    behind_ms: float = 0.0

    @property
    def typical_ms(self) -> float:
        return float(np.median(self.took))

    @property
    def of_step_ms(self) -> float:
        """What they take a step."""
        return float(self.took.mean()) * self.count if len(self.took) else 0.0


@dataclass(frozen=True)
class SlowPair:
    """A pair whose messages take longer than those of the others of the pipeline do.

    usual_ms: what those take
    fast_ms, late_ms: all but a quarter of the messages of the fastest of the other pairs take longer, and all but a
              quarter of those of the slowest take less: a mended link may be like any of theirs
    """

    pair: Pair
    usual_ms: float
    fast_ms: float
    late_ms: float

    @property
    def times(self) -> float:
        return self.pair.typical_ms / max(self.usual_ms, 1e-3)

    def between(self, step_ms: float) -> Between:
        """Between which parts of what is taken from each message the true one lies: those of the others differ, and
        what comes behind the messages may go with them."""
        taken = self.pair.typical_ms - self.usual_ms
        least, most = (max(self.pair.typical_ms - of, 0.0) / taken for of in (self.late_ms, self.fast_ms))
        behind = self.pair.behind_ms / max(self.pair.of_step_ms, 1e-9)
        return Between(min(least, 1.0), max(most, 1.0) * (1 + behind), step_ms)


@once
def pairs_of(study: Study) -> tuple[Pair, ...]:
    """The pairs of ranks between which activations and their gradients go, by rank."""
    graph = study.need_graph()
    took: dict[str, list[Float]] = {}
    sizes: dict[str, list[Float]] = {}
    ends: dict[str, tuple[int, int]] = {}
    behind: dict[str, float] = defaultdict(float)
    for steps in graph.templates:
        judged = np.isin(steps.numbers, graph.judged_steps)
        waited = awaited(steps)
        for number, task in enumerate(steps.structure.tasks):
            pair = pair_of(task)
            if pair is None or not is_message(task) or not judged.any():
                continue
            ends[task.lane] = pair
            took.setdefault(task.lane, []).append(steps.transfer[number, judged & waited[number]])
            sizes.setdefault(task.lane, []).append(steps.size[number, judged])
            waiting = steps.structure.waits[steps.structure.waits[:, 0] == number, 1]
            behind[task.lane] += float(steps.work[waiting][:, judged, WAKE_UP_DELAY].sum(dtype=np.float64))
    found = [
        Pair(
            lane, *ends[lane], np.concatenate(took[lane]), float(np.median(np.concatenate(sizes[lane]))),
            sum(len(of) for of in sizes[lane]) / len(graph.judged_steps), behind[lane] / len(graph.judged_steps),
        )
        for lane in took
    ]  # fmt: skip
    return tuple(sorted(found, key=lambda pair: (pair.source, pair.target, pair.lane)))


def slow_pairs(study: Study) -> list[SlowPair]:
    """The pairs whose messages are slow beside those of the others that are as large or larger; the worst first."""
    every = [pair for pair in pairs_of(study) if len(pair.took) >= FEWEST and pair.bytes > 0]
    bytes_ = np.array([pair.bytes for pair in every])
    typical = np.array([pair.typical_ms for pair in every])
    quarters = np.array([np.quantile(pair.took, (SURE, 1 - SURE)) for pair in every]).reshape(-1, 2)
    short, long = quarters[:, 0], quarters[:, 1]
    found = []
    for size_ in np.unique(bytes_).tolist():
        large = np.flatnonzero(bytes_ >= (1 - ALIKE) * size_)
        if len(large) < 2:
            continue
        usual, longest = medians_of_others(typical[large]), medians_of_others(long[large])
        for place in np.flatnonzero(bytes_[large] == size_).tolist():
            pair, usual_ms = every[large[place]], float(usual[place])
            apart = pair.typical_ms - usual_ms > 2 * study.clock_error_ms  # from one rank's arrival to another's end
            surely = short[large[place]] > longest[place] and apart
            # A receiver that waits for a core goes on late after every message.
            if pair.typical_ms > SLOWER * usual_ms and surely and not wants_cores(study, (pair.target,)):
                least, most = np.delete(short[large], place).min(), np.delete(long[large], place).max()
                found.append(SlowPair(pair, usual_ms, min(usual_ms, float(least)), max(usual_ms, float(most))))
    found.sort(key=lambda slow: (slow.pair.source, slow.pair.target, slow.pair.lane))
    return sorted(found, key=lambda slow: -(slow.pair.typical_ms - slow.usual_ms) * slow.pair.count)


def medians_of_others(values: Float) -> Float:
    """Of each of at least two values the median of all the others, [n]."""
    order = np.argsort(values, kind="stable")
    place = np.empty(len(values), np.int64)
    place[order] = np.arange(len(values))
    ascending, others = values[order], len(values) - 1
    low, high = (np.where(middle < place, middle, middle + 1) for middle in ((others - 1) // 2, others // 2))
    found: Float = (ascending[low] + ascending[high]) / 2
    return found


def stall(study: Study) -> Found:
    """Each pair whose link is slow; where none is, what all stages lose by waiting for messages that could go beside
    the computation."""
    signals.stages(study)
    need_every_stage(study)
    if not pairs_of(study):
        raise NotJudged("no message between stages was seen on both of its ranks")
    slow = slow_pairs(study)
    if slow:
        return [_slow(study, one) for one in by_hosts(study, slow)]
    waited = lacks_cores(study)
    if waited is not None:
        raise NotJudged(
            f"ranks wait for a core for {percent(100 * waited.usual(study))} of a step, and the threads that send and "
            "take messages do, too: what their links would take is not seen"
        )
    return [
        Candidate(
            "pipeline.stall", OverlappedMessages(), lambda price: _blocked(study, price), between=_known_up_to(study),
            a_trade=True,
        )
    ]  # fmt: skip


def _if_beside(study: Study) -> Effect:
    """Messages beside the computation. Nobody has seen what a message takes there, so it may take longer or less than
    now by as much as messages of one pair do now."""
    spread = max(_spread(study), LEAST_SPREAD)
    slower = ScaleLink(latency=1 + spread, bandwidth=1 / (1 + spread), of=_messages(study))
    faster = ScaleLink(latency=1 - spread, bandwidth=1 / (1 - spread), of=_messages(study))
    others = tuple(((), (link, OverlappedMessages())) for link in (slower, faster))
    return Effect("pipeline.stall", (OverlappedMessages(),), others=others, counts_cores=True)


@once
def _known_up_to(study: Study) -> Between | None:
    """Between which parts of what they save the true saving lies; None where messages cannot go there."""
    return parts_of_others(study, _if_beside(study))


def _spread(study: Study) -> float:
    """By what share messages of one pair take longer, or less, than the typical one: half of them do by no more; the
    median of the pairs, below 1."""
    pairs = [pair for pair in pairs_of(study) if len(pair.took) >= FEWEST]
    quarters = [np.quantile(pair.took, (SURE, 1 - SURE)) for pair in pairs]
    each = [float((late - soon) / max(late + soon, 1e-9)) for soon, late in quarters]
    return min(float(np.median(each)), MOST_SPREAD) if each else 0.0


def _messages(study: Study) -> Communications:
    return Communications(groups=tuple(dict.fromkeys(pair.lane for pair in pairs_of(study))))


def by_hosts(study: Study, slow: list[SlowPair]) -> list[tuple[SlowPair, ...]]:
    """The slow pairs, those between the same two hosts together where all between these are slow: they have the link in
    common, and to mend it for one of them saves nothing as long as the others hold the step up."""
    lanes = {(one.pair.lane, one.pair.source) for one in slow}
    every: dict[tuple[str, str], bool] = {}
    for pair in pairs_of(study):
        if (between := _hosts_between(study, pair)) is not None and len(pair.took) >= FEWEST:
            every[between] = every.get(between, True) and (pair.lane, pair.source) in lanes
    found: dict[object, list[SlowPair]] = {}
    for one in slow:
        between = _hosts_between(study, one.pair)
        together = between is not None and every[between]
        found.setdefault(frozenset(between or ()) if together else id(one), []).append(one)
    return [tuple(each) if len(each) < 2 else _beside_others(study, each) for each in found.values()]


def _hosts_between(study: Study, pair: Pair) -> tuple[str, str] | None:
    """The hosts of a pair's source and target; None where they are on one, or it is not known."""
    source, target = (next(iter(hosts_of(study, (rank,))), "") for rank in (pair.source, pair.target))
    return (source, target) if source and target and source != target else None


def _beside_others(study: Study, alike: list[SlowPair]) -> tuple[SlowPair, ...]:
    """Slow pairs over one link, of which each may become as the pairs over other links are, and not as its own are."""
    mine, least_bytes = {one.pair for one in alike}, (1 - ALIKE) * min(one.pair.bytes for one in alike)
    others = [pair.took for pair in pairs_of(study) if pair not in mine and len(pair.took) >= FEWEST
              and pair.bytes >= least_bytes]  # fmt: skip
    least = min((float(np.quantile(took, SURE)) for took in others), default=np.inf)
    most = max((float(np.quantile(took, 1 - SURE)) for took in others), default=0.0)
    return tuple(replace(one, fast_ms=min(one.usual_ms, least), late_ms=max(one.usual_ms, most)) for one in alike)


def _slow(study: Study, alike: tuple[SlowPair, ...]) -> Candidate:
    """Pairs over one link; the worst is the first."""
    slow, pair = alike[0], alike[0].pair
    spent = sum(one.pair.typical_ms * one.pair.count for one in alike)
    usual = sum(one.usual_ms * one.pair.count for one in alike)
    times = spent / max(usual, 1e-3)
    lanes = tuple(dict.fromkeys(one.pair.lane for one in alike))
    change = ScaleLink(latency=1 / times, bandwidth=times, of=Communications(groups=lanes))
    betweens = [one.between(study.step_ms) for one in alike]
    between = Between(min(of.part for of in betweens), max(of.multiple for of in betweens), study.step_ms)
    evidence = (
        Evidence(f"a message of {size(pair.bytes)}", round(pair.typical_ms, 3), "ms", round(slow.usual_ms, 3)),
        Evidence("such messages a step", round(sum(one.pair.count for one in alike), 1), "count"),
        Evidence("waiting for another stage, mean of the ranks", round(_bubble_ms(study), 3), "ms"),
    )

    elsewhere = "between the other stages" if len(study.topology.stage_of) > 2 else "the other way"

    def say(price: Price) -> Finding:
        title = (
            f"{_stage(study, pair.target)} waits for what {_stage(study, pair.source)} sends: {size(pair.bytes)} are "
            f"{ms(pair.typical_ms)} on their way, and {ms(slow.usual_ms)} {elsewhere}"
        )
        if len(alike) > 1:
            title += _of_others({(one.pair.source, one.pair.target) for one in alike})
        fixes = (_network(study, pair, price.gain), *_beside_if_sure(study), _smaller())
        return Finding(
            "pipeline.stall", title, "info", _where(study, *(one.pair for one in alike)), evidence, price.gain, fixes,
            share=price.share,
        )  # fmt: skip

    return Candidate("pipeline.stall", change, say, between=between)


def _of_others(pairs: set[tuple[int, int]]) -> str:
    """That the messages of all these (source, target) are as slow, of the worst of which the title has told."""
    between = {frozenset(pair) for pair in pairs}
    if len(between) == 1:
        return "; so are those the other way"
    both = ", both ways" if len(between) < len(pairs) else ""
    return f"; so are those of all {len(between)} pairs of ranks between these hosts{both}"


def _blocked(study: Study, price: Price) -> Finding:
    worst = max(pairs_of(study), key=lambda pair: pair.of_step_ms)
    evidence = (
        Evidence("waiting for another stage, mean of the ranks", round(_bubble_ms(study), 3), "ms"),
        Evidence(f"messages from {_stage(study, worst.source)} on their way a step", round(worst.of_step_ms, 3), "ms"),
        Evidence("messages of that pair a step", round(worst.count, 1), "count"),
        *([Evidence("bytes of one", round(worst.bytes), "B")] if worst.bytes > 0 else []),  # else they are not told
    )
    title = (
        f"stages stand still for {ms(price.gain.ms)} a step while messages are sent and received, most of all "
        f"from {_stage(study, worst.source)} to {_stage(study, worst.target)}: they could travel while stages compute"
    )
    fixes = (*_beside(study, price.gain), _smaller())
    return Finding("pipeline.stall", title, "info", _where(study, worst), evidence, price.gain, fixes)


def _bubble_ms(study: Study) -> float:
    return float(study.ordinary["bubble"].mean())


def _stage(study: Study, rank: int) -> str:
    held = study.topology.stage_of.get(rank, ())
    replicas = sum(stages == held for stages in study.topology.stage_of.values())
    if len(held) != 1:
        return f"rank {rank}"
    return f"stage {held[0]}" + (f" (rank {rank})" if replicas > 1 else "")


def _where(study: Study, pair: Pair, *others: Pair) -> Where:
    held = study.topology.stage_of.get(pair.target, ())
    ranks = {rank for one in (pair, *others) for rank in (one.source, one.target)}
    return Where(
        ranks=tuple(sorted(ranks)), stage=held[0] if len(held) == 1 else None, group=pair.lane,
        op="send_recv", steps=study.step_range,
    )  # fmt: skip


def _network(study: Study, pair: Pair, gain: Gain) -> Fix:
    between = _hosts_between(study, pair)
    whom = f"rank {pair.source} to rank {pair.target}"
    backend = str(study.run.group(pair.lane.partition(" ")[0]).get("backend") or "")
    if between is not None:
        name = "NCCL_SOCKET_IFNAME, NCCL_IB_HCA" if "nccl" in backend else "GLOO_SOCKET_IFNAME"
        title = (
            f"the network from {between[0]} to {between[1]}: which interface it goes over ({name}), "
            "its speed, lost packets; or place neighbouring stages on one host"
        )
    elif "nccl" in backend:
        title = f"the link of {whom} (`nvidia-smi topo -m`): place neighbouring stages on GPUs with NVLink between them"
    else:
        title = f"the link of {whom}, which are on one host: its interface (GLOO_SOCKET_IFNAME), a limit of its speed"
    return Fix("code", title, gain=gain)


def _beside_if_sure(study: Study) -> list[Fix]:
    """Messages beside the computation, where that is sure to save something."""
    known_up_to = _known_up_to(study)
    if known_up_to is None:
        return []
    gain = sure_gain(study, replace(_if_beside(study), others=(), between=known_up_to), BETWEEN_RUNS)
    return [] if gain is None else _beside(study, gain)


def _beside(study: Study, gain: Gain) -> list[Fix]:
    """What lets messages go beside the computation, in the words of who makes them."""
    facts: Sequence[dict[str, object]] = study.facts.get("pipeline", [])
    site = next((str(fact["site"]) for fact in facts if fact.get("site")), None)
    if not facts:
        title = (
            "ask for the next micro-batch (dist.irecv) before computing this one, and send with dist.isend, which you "
            "wait for only when its buffer is needed again; a process group of its own for each direction, so that "
            "neither waits for the other"
        )
    elif any(fact.get("framework") == "deepspeed" for fact in facts):
        title = (
            "DeepSpeed's pipeline sends and receives between its actions: larger micro-batches have fewer messages; a "
            "schedule of torch.distributed.pipelining with several stages a rank asks for what it receives early"
        )
    else:
        title = (
            f"a schedule with several stages a rank (ScheduleInterleaved1F1B){at(site)}: torch then asks for what it "
            "receives ahead, and waits for what it sends at the end of the step only"
        )
    return [Fix("code", title, gain=gain)]


def _smaller() -> Fix:
    return Fix("code", "send less: activations in bf16, or fewer layers' borders between hosts; micro-batches whose "
               "message takes less than their computation hide it")  # fmt: skip


RULES = (
    Rule(
        "pipeline.stall",
        "stages of a pipeline wait for messages longer than its schedule needs",
        explains=("bubble", "comm_exposed"),
        looks=(Look(stall, needs=(signals.replay,)),),
        needs=(signals.communications,),
        outranked_by=("pipeline.imbalance", "rank.straggler"),
        error=BETWEEN_RUNS,
        place=109,
    ),
)
