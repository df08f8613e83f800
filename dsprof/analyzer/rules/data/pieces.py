"""Which pieces of the ranks' work, between two events of their program, follow what each rank is given to work on:
tokens for its experts, or inputs. So an equal share takes work from where it was, and not from all of a step alike."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np

from ...arrays import Bool, Float, Int
from ...graph.step_graph import WAKE_UP_DELAY, Steps, Structure
from ...study import Study
from ...whatif.work import Change, Spans, within

SURELY: Final = 4.0
"""Standard errors that the slope of a piece of work over the tokens is above nothing."""
SAME: Final = 3.0
"""Standard errors by which what the steps say and what the ranks say may differ."""
LEAST_BY_STEPS: Final = 0.25
"""Of what the ranks say of all pieces, what the steps have to say of some to be asked."""
LEAST_TOLD: Final = 0.5
"""Correlation of a piece's deviation from the mean of the team with the share of what is given, from which on it is the
work of that."""
DENSE: Final = 0.25
"""Where shares hardly change, ranks are compared with each other: there must be other work, in which who has more
tokens is slower by less than this part of what he is among the experts; else it is a slow rank."""
MUCH: Final = 0.05
"""Of a step's compute, from which on pieces of it count as other work."""
MOST_OF_WORK: Final = 0.95
"""That equal shares can take away."""
MOST_OF_SHARE: Final = 2.0
"""Times the part by which a rank's exchange is above the mean, that its work in a piece can be more: an exchange is as
large as what was sent or what came, so a rank that gets little seems to have the mean."""


@dataclass(frozen=True)
class Pieces:
    """change: what equal shares would take away (or add), piece by piece; excess: the same, [R, S] ms, by rank and step
    told:   correlation of what ranks compute in those pieces, beyond their team's mean, and of their share
    """

    change: Change
    excess: Float
    told: float


OfPieces: TypeAlias = Callable[[Structure, int, list[int], Int], tuple[Float, Float, Bool | None]]
"""(structure, a thread, places of a team in [R, ..], steps in [.., S]) -> what each rank of the team is given beyond
the mean of the team for each of the pieces that the thread's program has, and in all; [N, W, S], or [N, 1, S] where it
is the same of all pieces. And where it is only known to be no more than the mean, [N, W, S]; None: nowhere."""


def given_in_steps(beyond: Float, shares: Float) -> OfPieces:
    """Of what is given to each rank for a whole step, [R, S]."""
    return lambda _, __, places, at: (beyond[places][:, None, at], shares[places][:, None, at], None)


def pieces_that_follow(study: Study, teams: Iterable[Collection[int]], given: OfPieces) -> Pieces | None:
    """None: none does. teams: ranks that are to do the same work, each."""
    graph = study.need_graph()
    excess = np.zeros((len(study.ranks), len(study.step_numbers)))
    every = [_Following(study, index, given, excess) for index in range(len(graph.templates))]
    for of_template in every:
        if len(of_template.chosen):
            of_template.find(teams)
    found, told = ([one for of in every for one in getattr(of, name)] for name in ("spans", "told"))
    if not found:
        return None
    spans = Spans(*(np.concatenate([getattr(one, name) for one in found]) for name in Spans.__dataclass_fields__))
    beside, beyond = (np.concatenate(each) for each in zip(*told, strict=True))
    return Pieces(Change({"compute": excess}, spans=spans), excess, float(np.corrcoef(beside, beyond)[0, 1]))


class _Following:
    """What follows in the steps of one template.

    A team is compared by those of its ranks that have one program. What is not seen of a rank, as what it waits for
    comes from one that was not captured, makes its program another, of other pieces: of such a rank only its step as a
    whole is known to do more. And where a team's own ranks do not tell, those of other teams with that program do.

    spans: whose work goes; told: `_told` of each team that tells; excess: [R, S] ms, is added to
    """

    def __init__(self, study: Study, index: int, given: OfPieces, excess: Float) -> None:
        graph = study.need_graph()
        self.steps, self.given, self.excess = graph.templates[index], given, excess
        columns = graph.columns_of(index)
        self.chosen = np.flatnonzero(graph.judged[columns])
        self.judged = (np.cumsum(graph.judged) - 1)[columns[self.chosen]]
        self.at = np.searchsorted(study.step_numbers, graph.judged_steps[self.judged])
        self.ranks = graph.ranks[: graph.leads]
        self.place = {rank: place for place, rank in enumerate(study.ranks)}
        self.spans: list[Spans] = []
        self.told: list[tuple[Float, Float]] = []
        self._slopes: dict[bytes, list[Float]] = defaultdict(list)

    def find(self, teams: Iterable[Collection[int]]) -> None:
        programs = self.steps.structure.programs
        left: list[tuple[list[int], list[int]]] = []
        for team in teams:
            threads = [thread for thread, rank in enumerate(self.ranks) if rank in team]
            of_each = [programs[thread] for thread in threads]
            most = max(of_each, key=of_each.count, default=b"")
            alike = [thread for thread in threads if programs[thread] == most]
            told = len(alike) >= 2 and self._compare(threads, alike)
            others = [thread for thread in threads if not told or thread not in alike]
            if others:
                left.append((threads, others))
        for threads, others in left:
            known = [thread for thread in threads if programs[thread] in self._slopes]
            if known:
                self._as_elsewhere(threads, others, known[0])

    def _compare(self, threads: list[int], alike: list[int]) -> bool:
        """Whether the ranks of a team tell which of their pieces follow. alike: those of one program."""
        of_team = np.isin(threads, alike)
        above, share, unseen = self._given(threads, alike[0])
        work = np.stack([self._compute(thread) for thread in alike])
        gone, slope = follows(work, above[of_team], share[of_team], None if unseen is None else unseen[of_team])
        if not gone.any():
            return False
        pieces: Bool = np.asarray(gone.any(axis=(0, 2)))
        self.told.append(_told(work, above[of_team], pieces))
        self._slopes[self.steps.structure.programs[alike[0]]].append(slope)
        for thread, mine, took in zip(alike, gone, work, strict=True):
            self._take(thread, mine, took, pieces)
        return True

    def _as_elsewhere(self, threads: list[int], others: list[int], known: int) -> None:
        """Of some ranks of a team, what is told by the ranks of any team that have the program of one that is known."""
        program = self.steps.structure.programs[known]
        slope = np.mean(self._slopes[program], axis=0)
        above, share, _ = self._given(threads, known)
        for thread in others:
            place = threads.index(thread)
            took, gone = self._compute(thread), slope[:, None] * above[place]
            if self.steps.structure.programs[thread] == program:
                self._take(thread, np.minimum(gone, most_of(took, above[place], share[place])), took, slope > 0)
                continue
            whole = took.sum(axis=0)
            part = np.minimum(gone.sum(axis=0) / np.maximum(whole, 1e-9), MOST_OF_WORK)
            self._take(thread, part * took, took, np.asarray(took.any(axis=1)))

    def _given(self, threads: list[int], thread: int) -> tuple[Float, Float, Bool | None]:
        places = [self.place[self.ranks[one]] for one in threads]
        return self.given(self.steps.structure, thread, places, self.at)

    def _compute(self, thread: int) -> Float:
        """[segments of the thread, S] ms."""
        work = self.steps.work[self.steps.structure.of_thread(thread)]
        found: Float = work[..., within("compute")].sum(axis=-1, dtype=np.float64)[:, self.chosen]
        return found

    def _take(self, thread: int, gone: Float, took: Float, pieces: Bool) -> None:
        """gone, took: [W, S] ms of each piece of a thread; pieces: [W], of which something goes."""
        self.excess[self.place[self.ranks[thread]], self.at] += gone.sum(axis=0)
        share = gone / np.maximum(took, 1e-9)
        self.spans.append(_spans(self.steps, thread, pieces, self.chosen, self.judged, share))


def _told(work: Float, beyond: Float, pieces: Bool) -> tuple[Float, Float]:
    """What ranks compute in these pieces beyond the mean of the team, and what they are given: together where that is
    the same of all pieces, else of each by itself."""
    beside = (work - work.mean(axis=0))[:, pieces]
    if beyond.shape[1] == 1:
        return beside.sum(axis=1).ravel(), beyond.ravel()
    return beside.ravel(), beyond[:, pieces].ravel()


def follows(work: Float, beyond: Float, shares: Float, unseen: Bool | None = None) -> tuple[Float, Float]:
    """What of each piece a rank's share beyond the mean explains, [N, W, S] ms, of N ranks of a team. And how much that
    is for one that is given one more, [W] ms.

    work: [N, W, S]; beyond, shares: [N, W, S], or [N, 1, S] of all pieces. Told by how a rank's own work follows its
    own share over the steps; where shares hardly change, by how ranks differ.
    unseen: [N, W, S] where a share is only known to be no more than the mean. How much less it is, the work tells.
    """
    beside, apart = work - work.mean(axis=0), beyond - beyond.mean(axis=0)  # of the team there may be others
    own = apart - apart.mean(axis=2, keepdims=True)
    slope, sure, error = _slope(beside - beside.mean(axis=2, keepdims=True), own)
    of_all, surely, _ = _slope(beside, apart)
    if sure.any() and slope[sure].sum() >= LEAST_BY_STEPS * of_all[surely].sum():  # a few pieces seem so by chance
        # Where a rank is always ahead of the others the steps tell little, and the ranks much, if they say the same.
        alike = surely & (np.abs(of_all - slope) <= SAME * error)
        slope = np.where(alike, of_all, slope)
        if _in_some_only(beside, beyond, work):
            sure = sure | alike
    else:
        slope, sure = of_all, surely & _in_some_only(beside, beyond, work)
    slope = np.where(sure, slope, 0.0)
    gone = slope[None, :, None] * beyond
    most = most_of(work, beyond, shares)
    found: Float = np.clip(gone, np.minimum(-most, beside), most)
    if unseen is not None:
        nothing = -slope[None, :, None] * shares.mean(axis=0)  # what one without a share has less
        found = np.where(unseen, np.clip(beside, nothing, 0.0), found)
    return found, slope


def most_of(work: Float, beyond: Float, shares: Float) -> Float:
    """The most of pieces of work that can be what a rank is given beyond the mean, ms."""
    most: Float = np.minimum(MOST_OF_SHARE * np.abs(beyond) / np.maximum(shares, 1.0), MOST_OF_WORK) * work
    return most


def _slope(beside: Float, given: Float) -> tuple[Float, Bool, Float]:
    """Slope of each piece over what is given, [W], whether it surely rises with that, and its standard error."""
    squares = np.maximum((given**2).sum(axis=(0, 2)), 1e-9)
    slope = (beside * given).sum(axis=(0, 2)) / squares
    left = beside - slope[None, :, None] * given
    of = np.maximum(beside.shape[0] * beside.shape[2] - beside.shape[0] - 1, 1)
    error = np.sqrt((left**2).sum(axis=(0, 2)) / of / squares)
    told = 1 - (left**2).sum(axis=(0, 2)) / np.maximum((beside**2).sum(axis=(0, 2)), 1e-12)
    return slope, (slope > SURELY * error) & (told >= LEAST_TOLD**2), error


def _in_some_only(beside: Float, beyond: Float, work: Float) -> bool:
    """Whether who is given most is slower in some pieces, and in others is not. A step of many micro-batches has many
    small ones: either has to have MUCH of its compute, in one piece or in several."""
    hot = np.broadcast_to(beyond.mean(axis=2).argmax(axis=0), work.shape[1])  # of each piece
    mean = work.mean(axis=(0, 2))
    slower = beside[hot, np.arange(len(hot))].mean(axis=1) / np.maximum(mean, 1e-9)
    order = np.argsort(-slower, kind="stable")
    enough = np.cumsum(mean[order]) >= MUCH * mean.sum()
    level = float(slower[order][enough].max(initial=0.0))
    return float(mean[slower < DENSE * level].sum()) >= MUCH * float(mean.sum()) > 0


def _spans(
    steps: Steps, thread: int, pieces: Bool, chosen: np.ndarray[Any, Any], judged: np.ndarray[Any, Any], share: Float
) -> Spans:
    """The pieces of a thread in which a share of the work goes. share: [W, S]."""
    mine = steps.structure.of_thread(thread)
    began = steps.began[mine][pieces][:, chosen]
    took = steps.work[mine][pieces][:, chosen]
    lasts = took.sum(axis=-1, dtype=np.float64) - took[..., WAKE_UP_DELAY]
    of_step = np.broadcast_to(judged, began.shape)
    return Spans(
        np.full(began.size, thread, np.int64), of_step.ravel().astype(np.int64), began.ravel(), lasts.ravel(),
        share[pieces].ravel(),
    )  # fmt: skip
