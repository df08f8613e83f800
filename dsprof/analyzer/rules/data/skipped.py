"""Two ranks that share causal sequences in contiguous pieces: the first skips the keys of the second, which the mask
hides, and the second attends to all of the first one's.

Any two ranks lie on a line, so that a difference between them alone tells nothing: one may be slow. What tells is where
they differ. Each layer exchanges keys and values, and between two exchanges of its backward there is nothing but the
attention to what came: there the first rank has next to nothing to do, and elsewhere in backward both have as much. In
forward nothing divides the attention from what is computed of it, so that the order explains no more of the difference
there than the backward allows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from ...arrays import Bool, Float
from ...graph.step_graph import StepGraph
from ...study import Study
from ...whatif.work import within
from ...work.passes import BACKWARD

SKIPPED: Final = 0.1
"""Of what the second rank computes between two events: the first has no more where it skips keys."""
LEAST_SKIPPED: Final = 0.8
"""Of what the second rank takes longer for in backward, that has to lie there."""
REAL_SHARE: Final = 0.5
"""Of what the first rank computes in backward, that has to lie elsewhere."""
EQUAL: Final = 1.25
"""Times what one rank computes there that the other may compute."""
FEWEST_EXCHANGES: Final = 2
"""Of keys and values, in one forward: what a rank does beside the sequence, such as a hook, may lie at one of them.
Where the engine says that pieces are contiguous, one is enough."""
SMALL: Final = 0.25
"""Of the most that is skipped at an exchange: with less, nothing is."""
WORK: Final = 0.1
"""The same of what is computed after an exchange in forward: after less, the exchange is the next one's other half."""
MOST_OF_TEAM: Final = 2.0
"""Times what the first rank computes that the second can have more: contiguous halves have 1 : 3 of the attention."""
FORWARD: Final = (0.25, 0.5)
"""Least and most of what attention takes in backward that it takes in forward: in operations, 2 to 5 or 1 to 2."""
LEAST_STEPS: Final = 0.8
"""Of the steps that train, in which it has to be seen."""
SLACK_MS: Final = 1e-3


@dataclass(frozen=True)
class Skipped:
    """What the first of two ranks skips.

    excess: [2, S] ms of each rank beyond the mean, as far as that makes it, by step
    fit:    of what the second takes longer for in backward, what lies where the first one skips keys
    """

    excess: Float
    fit: float


class PairsOfRanks:
    """Teams of two ranks, one after another; what steps have in common is looked up once for all.

    share: of each of the graph's templates, [W] `Skipped.share` of all teams so far; 1 for the segments of other ranks
    """

    def __init__(self, study: Study, graph: StepGraph, *, stated: bool) -> None:
        """stated: whether the engine says that pieces are contiguous."""
        self._study, self._fewest = study, 1 if stated else FEWEST_EXCHANGES
        self._threads = {rank: thread for thread, rank in enumerate(graph.ranks[: graph.leads])}
        self.share = tuple(np.ones(steps.structure.segments) for steps in graph.templates)
        kinds = (_Kind(study, graph, index) for index in range(len(graph.templates)))
        self._kinds = [kind for kind in kinds if len(kind.chosen)]

    def skipped(self, ranks: tuple[int, ...], groups: frozenset[str]) -> Skipped | None:
        """What the first of the two skips; None where that is seen in too few steps.

        groups: in which they exchange keys and values
        """
        threads = [self._threads[rank] for rank in ranks if rank in self._threads]
        if len(threads) != 2:
            return None
        excess, fits, seen, trained = np.zeros((2, len(self._study.step_numbers))), [], 0, 0
        for of_template, steps in zip(self.share, self._study.need_graph().templates, strict=True):
            for thread in threads:
                of_template[steps.structure.of_thread(thread)] = 0.0
        for kind in self._kinds:
            structure, share = kind.steps.structure, self.share[kind.index]
            one, other = (structure.of_thread(thread) for thread in threads)
            backwards = int(structure.backward[other].sum())
            if not backwards:  # as of a step that evaluates
                continue
            trained += len(kind.chosen)
            if structure.programs[threads[0]] != structure.programs[threads[1]]:
                continue
            work = np.stack([kind.compute(of) for of in (one, other)])
            told = _told(np.median(work, axis=2), self._fewest * backwards, *kind.phases(other, ranks[1], groups))
            if told is None:
                continue
            share[one], share[other] = told[0], told[0]
            fits.append(told[1])
            seen += len(kind.chosen)
            excess[:, kind.at] = ((work - work.mean(axis=0)) * told[0][:, None]).sum(axis=1)
        return Skipped(excess, min(fits)) if fits and seen >= LEAST_STEPS * trained else None


class _Kind:
    """The judged steps of one template. index: which; chosen: their columns; at: their places among the study's."""

    def __init__(self, study: Study, graph: StepGraph, index: int) -> None:
        self.index, self.steps = index, graph.templates[index]
        columns = graph.columns_of(index)
        self.chosen = np.flatnonzero(graph.judged[columns])
        numbers = graph.numbers[columns[self.chosen]]
        self.at = np.searchsorted(study.step_numbers, numbers)
        structure = self.steps.structure
        self._issues = structure.issues[np.argsort(structure.issues[:, 0], kind="stable")]
        self._waits = structure.waits[np.argsort(structure.waits[:, 1], kind="stable")]
        table = study.passes
        table = table[(table["name"] == BACKWARD) & table["step"].isin(numbers[:1])].reset_index(drop=True)
        ordinary = study.ordinary
        origin = ordinary.loc[ordinary["step"].isin(numbers[:1]), "start_ns"].min()
        begin = (table["start_ns"].to_numpy(np.int64) - (0 if table.empty else int(origin))) / 1e6
        self._backwards = np.stack([begin, begin + table["dur_ns"].to_numpy(np.float64) / 1e6], axis=1)
        self._of_rank = table.groupby("rank").indices

    def compute(self, segments: slice) -> Float:
        """[W, S] ms of a thread's segments."""
        found: Float = self.steps.work[segments][:, self.chosen][..., within("compute")].sum(axis=-1, dtype=np.float64)
        return found

    def phases(self, segments: slice, rank: int, groups: frozenset[str]) -> tuple[Bool, Bool, Bool]:
        """Which of a rank's segments, [W] each, begin in a backward, which as an exchange of forward has ended, and
        which as one of backward has, by where it was issued."""
        begin, end = self._backwards[self._of_rank.get(rank, [])].T[..., None]
        began = self.steps.began[segments, self.chosen[0]]
        in_backward = ((begin - SLACK_MS <= began) & (began < end - SLACK_MS)).any(axis=0)
        bounds = [segments.start, segments.stop]
        issues = self._issues[slice(*np.searchsorted(self._issues[:, 0], bounds))].tolist()
        waits = self._waits[slice(*np.searchsorted(self._waits[:, 1], bounds))].tolist()
        tasks = self.steps.structure.tasks
        # An exchange is issued where a segment ends and the next one begins.
        issued = {
            task: int(in_backward[segment + 1 - segments.start]) for segment, task in issues
            if tasks[task].lane.partition(" ")[0] in groups and not tasks[task].gradient
        }  # fmt: skip
        after = np.zeros((2, segments.stop - segments.start), bool)
        for task, segment in waits:
            if task in issued:
                after[issued[task], segment - segments.start] = True
        return in_backward, after[0], after[1]


def _told(
    work: Float, fewest: int, in_backward: Bool, after_forwards: Bool, after_backwards: Bool
) -> tuple[Float, float] | None:
    """Of each segment the share of the difference that the order explains, [W], and `Skipped.fit`. None: the two ranks
    differ in another way.

    work: [2, W] ms; fewest: exchanges of keys and values; the rest as of `_Kind.phases`
    """
    one, other = work
    more = np.maximum(other - one, 0.0)
    skips = in_backward & after_backwards & (one <= SKIPPED * other)
    most = float(more[skips].max(initial=0.0))
    skips &= more >= max(SMALL * most, SLACK_MS)
    of_skips, longer = float(more[skips].sum()), float(more[in_backward].sum())
    forward = ~in_backward & after_forwards
    exchanges = int((forward & (other >= WORK * most)).sum())
    if exchanges < fewest or int(skips.sum()) < exchanges or of_skips < LEAST_SKIPPED * longer:
        return None
    first, second = (float(each[in_backward & ~skips].sum()) for each in work)
    if first < REAL_SHARE * float(one[in_backward].sum()) or not first / EQUAL <= second <= first * EQUAL:
        return None
    least, at_most = FORWARD
    in_forward = np.minimum(np.where(forward, more, 0.0), at_most * most)
    explained = min(float(in_forward.sum()), at_most * of_skips)
    if of_skips > MOST_OF_TEAM * first or explained < least * of_skips:
        return None
    in_forward *= explained / max(float(in_forward.sum()), 1e-9)
    share = np.where(skips, 1.0, in_forward / np.maximum(more, 1e-9))
    return share, of_skips / max(longer, 1e-9)
