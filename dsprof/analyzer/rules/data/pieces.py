"""Which pieces of the ranks' work, between two events of their program, follow what each rank is given to work on:
tokens for its experts, or inputs. So an equal share takes work from where it was, and not from all of a step alike."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np

from ...arrays import Bool, Float, Int
from ...graph.step_graph import WAKE_UP_DELAY, Steps, Structure
from ...study import Study
from ...whatif.work import Change, Spans, within

SURELY: Final = 4.0
"""Standard errors that the slope of a piece of work over the tokens is above nothing."""
SAME: Final = 4.0
"""Standard errors by which what the steps say and what the ranks say may differ."""
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
    every = [_PiecesOfTemplate(study, index, given) for index in range(len(study.need_graph().templates))]
    for of_template in every:
        if len(of_template.chosen):
            of_template.find(teams)
    found = [spans for of_template in every for spans in of_template.spans]
    if not found:
        return None
    spans = Spans(*(np.concatenate([getattr(one, name) for one in found]) for name in Spans.__dataclass_fields__))
    told = [pair for of_template in every for pair in of_template.told]
    beside, beyond = (np.concatenate(each) for each in zip(*told, strict=True))
    excess: Float = np.sum([of_template.excess for of_template in every], axis=0)
    return Pieces(Change({"compute": excess}, spans=spans), excess, float(np.corrcoef(beside, beyond)[0, 1]))


class _PiecesOfTemplate:
    """Which pieces follow in the steps of one template.

    A team is compared by those of its ranks that have one program. What is not seen of a rank, as what it waits for
    comes from one that was not captured, makes its program another, of other pieces: of such a rank only its step as a
    whole is known to do more. And where the ranks of a team do not tell, since they are given as much, those of other
    teams with that program do.

    spans: whose work goes; told: `_told` of each team that tells; excess: [R, S] ms, what goes of each rank's step
    """

    def __init__(self, study: Study, index: int, given: OfPieces) -> None:
        graph = study.need_graph()
        self._steps, self._given_of = graph.templates[index], given
        columns = graph.columns_of(index)
        self.chosen = np.flatnonzero(graph.judged[columns])
        self._judged = (np.cumsum(graph.judged) - 1)[columns[self.chosen]]
        self._at = np.searchsorted(study.step_numbers, graph.judged_steps[self._judged])
        self._ranks = graph.ranks[: graph.leads]
        self._place = {rank: place for place, rank in enumerate(study.ranks)}
        self._slopes: dict[bytes, list[Float]] = defaultdict(list)
        self.spans: list[Spans] = []
        self.told: list[tuple[Float, Float]] = []
        self.excess = np.zeros((len(study.ranks), len(study.step_numbers)))

    def find(self, teams: Iterable[Collection[int]]) -> None:
        programs, thread_of = self._steps.structure.programs, {rank: at for at, rank in enumerate(self._ranks)}
        left: list[tuple[list[int], list[int], _Slopes | None]] = []
        for team in teams:
            threads = sorted(thread_of[rank] for rank in team if rank in thread_of)
            most = Counter(programs[thread] for thread in threads).most_common(1)
            alike = [thread for thread in threads if programs[thread] == most[0][0]]
            others, otherwise = threads, None
            if len(alike) >= 2:
                otherwise = self._compare(threads, alike)
                others = threads if otherwise is not None else sorted({*threads} - {*alike})
            if others:
                left.append((threads, others, otherwise))
        for threads, others, otherwise in left:
            self._as_elsewhere(threads, others, otherwise)

    def _compare(self, threads: list[int], alike: list[int]) -> _Slopes | None:
        """Take what goes of the pieces of a team's ranks that follow, by those of one program, `alike`. Where none
        follows, what they say of them."""
        of_team, program = np.isin(threads, alike), self._steps.structure.programs[alike[0]]
        above, share, unseen = self._given(threads, alike[0])
        work = np.stack([self._compute(thread) for thread in alike])
        gone, slope = follows(work, above[of_team], share[of_team], None if unseen is None else unseen[of_team])
        if not gone.any():
            beyond = above[of_team] - above[of_team].mean(axis=0)
            return _Slopes(program, *_slope(work - work.mean(axis=0), beyond)[::2])
        pieces: Bool = np.asarray(gone.any(axis=(0, 2)))
        self.told.append(_told(work, above[of_team], pieces))
        self._slopes[program].append(slope)
        for thread, mine, took in zip(alike, gone, work, strict=True):
            self._take(thread, mine, took, pieces)
        return None

    def _as_elsewhere(self, threads: list[int], others: list[int], otherwise: _Slopes | None) -> None:
        """What is told of some ranks of a team by the ranks, of any team, that have their program, or that of another
        one of them. otherwise: what the team's own ranks say, if nothing follows; where that disagrees nothing does."""
        programs = self._steps.structure.programs
        known = [thread for thread in threads if programs[thread] in self._slopes]
        if not known or (otherwise is not None and not otherwise.agrees(self._slopes.get(otherwise.program, ()))):
            return
        for thread in others:
            like = thread if thread in known else known[0]
            slope = np.mean(self._slopes[programs[like]], axis=0)
            every, shares, _ = self._given(threads, like)
            above, share = (of[threads.index(thread)] for of in (every, shares))
            took = self._compute(thread)
            gone = slope[:, None] * above
            if programs[thread] == programs[like]:
                most = most_of(took, above, share)
                self._take(thread, np.clip(gone, -most, most), took, slope > 0)
                continue
            whole = took.sum(axis=0)
            part = np.clip(gone.sum(axis=0) / np.maximum(whole, 1e-9), -MOST_OF_WORK, MOST_OF_WORK)
            self._take(thread, part * took, took, np.asarray(took.any(axis=1)))

    def _given(self, threads: list[int], thread: int) -> tuple[Float, Float, Bool | None]:
        places = [self._place[self._ranks[one]] for one in threads]
        return self._given_of(self._steps.structure, thread, places, self._at)

    def _compute(self, thread: int) -> Float:
        """[segments of the thread, S] ms."""
        work = self._steps.work[self._steps.structure.of_thread(thread)]
        found: Float = work[..., within("compute")].sum(axis=-1, dtype=np.float64)[:, self.chosen]
        return found

    def _take(self, thread: int, gone: Float, took: Float, pieces: Bool) -> None:
        """gone, took: [W, S] ms of each piece of a thread; pieces: [W], of which something goes."""
        self.excess[self._place[self._ranks[thread]], self._at] += gone.sum(axis=0)
        share = gone / np.maximum(took, 1e-9)
        self.spans.append(_spans(self._steps, thread, pieces, self.chosen, self._judged, share))


@dataclass(frozen=True)
class _Slopes:
    """What a team says of the pieces of a program. slope, error: [W] ms for one that is given one more, and the
    standard error of that."""

    program: bytes
    slope: Float
    error: Float

    def agrees(self, others: Sequence[Float]) -> bool:
        """Whether what other teams say of the same program, [W] each, may be so here, too: of the pieces that follow
        there, all together. Without any, it is not."""
        if not others:
            return False
        other = np.mean(others, axis=0)
        pieces = other > 0
        apart = abs(float((self.slope - other)[pieces].sum()))
        return apart <= SAME * float(np.sqrt((self.error[pieces] ** 2).sum()))


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
    beside, apart = work - work.mean(axis=0), beyond - beyond.mean(axis=0)  # these may be some of a team only
    own = apart - apart.mean(axis=2, keepdims=True)
    slope, sure, error = _slope(beside - beside.mean(axis=2, keepdims=True), own)
    of_all, surely, _ = _slope(beside, apart)
    if sure.any():
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
