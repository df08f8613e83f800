"""The schedules, each a function from a rank and the sizes of a pipeline to what the rank does, and their names in the
configuration (`pipeline.schedule`). Micro-batches may be fewer than ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Final

from dsprof.words import did_you_mean

from .plan import Action, Plan


def gpipe(rank: int, ranks: int, microbatches: int, virtual_stages: int) -> Iterable[Action]:
    """GPipe (Huang et al. 2019, arXiv 1811.06965): all forwards, then all backwards, in the same order.

    A rank holds the activations of all micro-batches at once.
    """
    return [Action(op, rank, m) for op in "FB" for m in range(microbatches)]


def one_f_one_b(rank: int, ranks: int, microbatches: int, virtual_stages: int) -> Iterable[Action]:
    """1F1B (PipeDream-Flush, Narayanan et al. 2021, arXiv 2006.09503): one forward, one backward.

    As fast as GPipe, but rank r does only ranks - r - 1 forwards ahead, by which time the first backward comes back. So
    it holds no more activations than there are ranks from it to the last.
    """
    forwards, backwards = ([Action(op, rank, m) for m in range(microbatches)] for op in "FB")
    return _alternating(forwards, backwards, ahead=ranks - rank - 1)


def interleaved(rank: int, ranks: int, microbatches: int, virtual_stages: int) -> Iterable[Action]:
    """Interleaved 1F1B (Narayanan et al. 2021, arXiv 2104.04473): each rank holds several parts of the model.

    The pipeline fills and drains in steps of one part, so the bubble is smaller by the number of parts a rank holds; in
    return there are as many times more transfers, and more activations are held. With one part each it is 1F1B.

    Groups of as many micro-batches as there are ranks go through a rank's parts one after the other. Megatron-LM takes
    multiples of that only; here, what is missing of the last group is left out of the plan for the next multiple, whose
    time it then takes, about. Since micro-batches need nothing of each other, that plan can finish as the full one can.
    (With a last group that is simply shorter, a backward can come before a forward that it waits for around the ranks.)
    """
    if virtual_stages == 1:
        return one_f_one_b(rank, ranks, microbatches, virtual_stages)
    full = -(-microbatches // ranks) * ranks
    parts = range(rank, ranks * virtual_stages, ranks)

    def walk(op: str) -> list[Action]:
        return [
            Action(op, stage, m)
            for first in range(0, full, ranks)
            for stage in (parts if op == "F" else reversed(parts))
            for m in range(first, first + ranks)
        ]

    # Around the ranks for each part but the last, and twice the way to the last rank: there and back.
    ahead = (virtual_stages - 1) * ranks + 2 * (ranks - rank - 1)
    actions = _alternating(walk("F"), walk("B"), ahead)
    return (action for action in actions if action.microbatch < microbatches)


def zero_bubble(rank: int, ranks: int, microbatches: int, virtual_stages: int) -> Iterable[Action]:
    """ZB-H1 (Qi et al. 2023, arXiv 2401.10241): the backward in two parts, at the peak memory of 1F1B.

    The next rank waits for input gradients (B) alone. Weight gradients (W) nobody waits for: put off by r micro-batches
    on rank r, they fill the time in which the pipeline drains. So micro-batches between F and W are as many on every
    rank as there are ranks, and those between F and B are 1F1B's.
    """
    ahead = min(ranks - rank - 1, microbatches)
    actions = [Action("F", rank, m) for m in range(ahead)]
    for m in range(microbatches):
        if ahead + m < microbatches:
            actions.append(Action("F", rank, ahead + m))
        actions.append(Action("B", rank, m))
        if m >= rank:
            actions.append(Action("W", rank, m - rank))
    actions += [Action("W", rank, m) for m in range(max(0, microbatches - rank), microbatches)]
    return actions


def _alternating(forwards: Sequence[Action], backwards: Sequence[Action], ahead: int) -> Iterable[Action]:
    """`ahead` forwards, or all if there are fewer; then a forward and a backward in turn; then the other backwards."""
    ahead = min(ahead, len(forwards))
    steady = chain.from_iterable(zip(forwards[ahead:], backwards, strict=False))
    return (*forwards[:ahead], *steady, *backwards[len(forwards) - ahead :])


# --- by name

SCHEDULES: Final[dict[str, Callable[[int, int, int, int], Iterable[Action]]]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zero-bubble": zero_bubble,
}
"""Name -> what a rank does, of the rank and the numbers of ranks, of micro-batches and of stages each rank holds."""

VIRTUAL: Final = frozenset({"interleaved"})
"""Schedules in which a rank can hold several parts of the model."""

ALIASES: Final = {"zb": "zero-bubble", "zb-h1": "zero-bubble", "zbh1": "zero-bubble", "vpp": "interleaved"}
"""What papers and other frameworks call them, where that is unlike."""


def make_plan(schedule: str, ranks: int, microbatches: int, virtual_stages: int = 1) -> Plan:
    """The plan of a schedule, without transfers. Micro-batches may be fewer than stages.

    Raises ValueError for a schedule that there is not, a size below 1, and virtual stages that the schedule has not.
    """
    if schedule not in SCHEDULES:
        hint = did_you_mean(schedule, SCHEDULES, meanings=ALIASES)
        raise ValueError(f'there is no pipeline schedule "{schedule}"; write one of {", ".join(SCHEDULES)}{hint}')
    for name, size in (("ranks", ranks), ("microbatches", microbatches), ("virtual_stages", virtual_stages)):
        if size < 1:
            raise ValueError(f"{name} is {size}; a pipeline needs at least 1")
    if virtual_stages > 1 and schedule not in VIRTUAL:
        raise ValueError(
            f'virtual_stages is {virtual_stages}, and "{schedule}" knows one stage a rank; '
            f'write virtual_stages 1, or the schedule "interleaved"'
        )
    actions = tuple(tuple(SCHEDULES[schedule](rank, ranks, microbatches, virtual_stages)) for rank in range(ranks))
    return Plan(schedule, ranks, microbatches, virtual_stages, actions)
