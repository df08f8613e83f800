"""Which pieces of the ranks' work, between two events of their program, follow what each rank is given to work on:
tokens for its experts, or inputs. So an equal share takes work from where it was, and not from all of a step alike."""

from __future__ import annotations

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
LEAST_TOLD: Final = 0.5
"""Correlation of a piece's deviation from the mean of the team with the share of what is given, from which on it is the
work of that."""
DENSE: Final = 0.25
"""Where shares hardly change, ranks are compared with each other: there must be other work, in which who has more
tokens is slower by less than this part of what he is among the experts; else it is a slow rank."""
MUCH: Final = 0.05
"""Of a step's compute, from which on pieces of it count as other work."""
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


OfPieces: TypeAlias = Callable[[Structure, list[int], list[int], Int], tuple[Float, Float, Bool | None]]
"""(structure, threads of a team, their places in [R, ..], steps in [.., S]) -> what each of these ranks is given beyond
the mean of the team for each of its pieces, and in all; [N, W, S], or [N, 1, S] where it is the same of all pieces.
And where it is only known to be no more than the mean, [N, W, S]; None: nowhere."""


def given_in_steps(beyond: Float, shares: Float) -> OfPieces:
    """Of what is given to each rank for a whole step, [R, S]."""
    return lambda _, __, places, at: (beyond[places][:, None, at], shares[places][:, None, at], None)


def pieces_that_follow(study: Study, teams: Iterable[Collection[int]], given: OfPieces) -> Pieces | None:
    """None: none does. teams: ranks that are to do the same work, each."""
    graph = study.need_graph()
    excess, found = np.zeros((len(study.ranks), len(study.step_numbers))), []
    told: list[tuple[Float, Float]] = []
    ranks = graph.ranks[: graph.leads]
    for index, steps in enumerate(graph.templates):
        columns = graph.columns_of(index)
        chosen = np.flatnonzero(graph.judged[columns])
        judged = (np.cumsum(graph.judged) - 1)[columns[chosen]]
        if not len(chosen):
            continue
        at = np.searchsorted(study.step_numbers, graph.judged_steps[judged])
        for team in teams:
            threads = [thread for thread, rank in enumerate(ranks) if rank in team]
            if len(threads) < 2 or len({steps.structure.programs[thread] for thread in threads}) > 1:
                continue
            places = [study.ranks.index(int(ranks[thread])) for thread in threads]
            above, share, unseen = given(steps.structure, threads, places, at)
            work = np.stack([_compute(steps, thread)[:, chosen] for thread in threads])
            gone = follows(work, above, share, unseen)
            if not gone.any():
                continue
            pieces: Bool = np.asarray(gone.any(axis=(0, 2)))
            told.append(_told(work, above, pieces))
            np.add.at(excess, (np.array(places)[:, None], at[None, :]), gone.sum(axis=1))
            for thread, mine, took in zip(threads, gone, work, strict=True):
                found.append(_spans(steps, thread, pieces, chosen, judged, mine / np.maximum(took, 1e-9)))
    if not found:
        return None
    spans = Spans(*(np.concatenate([getattr(one, name) for one in found]) for name in Spans.__dataclass_fields__))
    beside, beyond = (np.concatenate(each) for each in zip(*told, strict=True))
    return Pieces(Change({"compute": excess}, spans=spans), excess, float(np.corrcoef(beside, beyond)[0, 1]))


def _told(work: Float, beyond: Float, pieces: Bool) -> tuple[Float, Float]:
    """What ranks compute in these pieces beyond the mean of the team, and what they are given: together where that is
    the same of all pieces, else of each by itself."""
    beside = (work - work.mean(axis=0))[:, pieces]
    if beyond.shape[1] == 1:
        return beside.sum(axis=1).ravel(), beyond.ravel()
    return beside.ravel(), beyond[:, pieces].ravel()


def _compute(steps: Steps, thread: int) -> Float:
    """[segments of the thread, S] ms."""
    found: Float = steps.work[steps.structure.of_thread(thread)][..., within("compute")].sum(axis=-1, dtype=np.float64)
    return found


def follows(work: Float, beyond: Float, shares: Float, unseen: Bool | None = None) -> Float:
    """What of each piece a rank's share beyond the mean explains, [N, W, S] ms, of N ranks of a team.

    work: [N, W, S]; beyond, shares: [N, W, S], or [N, 1, S] of all pieces. Told by how a rank's own work follows its
    own share over the steps; where shares hardly change, by how ranks differ.
    unseen: [N, W, S] where a share is only known to be no more than the mean. How much less it is, the work tells.
    """
    beside = work - work.mean(axis=0)
    own = beyond - beyond.mean(axis=2, keepdims=True)
    slope, sure, error = _slope(beside - beside.mean(axis=2, keepdims=True), own)
    of_all, surely, _ = _slope(beside, beyond)
    if sure.any():
        # Where a rank is always ahead of the others the steps tell little, and the ranks much, if they say the same.
        alike = surely & (np.abs(of_all - slope) <= SAME * error)
        slope = np.where(alike, of_all, slope)
        if _in_some_only(beside, beyond, work):
            sure = sure | alike
    else:
        slope, sure = of_all, surely & _in_some_only(beside, beyond, work)
    gone = np.where(sure, slope, 0.0)[None, :, None] * beyond
    most = np.minimum(MOST_OF_SHARE * np.abs(beyond) / np.maximum(shares, 1.0), 0.95) * work
    found: Float = np.clip(gone, np.minimum(-most, beside), most)
    if unseen is not None:
        nothing = -np.where(sure, slope, 0.0)[None, :, None] * shares.mean(axis=0)  # what one without a share has less
        found = np.where(unseen, np.clip(beside, nothing, 0.0), found)
    return found


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
