"""Actions and plans: who does what, in which order; and where transfers go.

At the end: the schedules, by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Final, NamedTuple

from dsprof.words import did_you_mean

COMPUTE: Final = ("F", "B", "W")
"""Forward; backward; the backward's weight-gradient part, in plans that split it."""

TRANSFERS: Final = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
"""Of activations (F), to the stage after, and of their gradients (B), to the stage before."""

_OTHER_END: Final = {
    "SEND_F": ("RECV_F", 1),
    "RECV_F": ("SEND_F", -1),
    "SEND_B": ("RECV_B", -1),
    "RECV_B": ("SEND_B", 1),
}


class Action(NamedTuple):
    """One thing that the rank of `stage` does for one micro-batch."""

    op: str
    """One of `COMPUTE` or `TRANSFERS`."""
    stage: int
    """Part of the model it belongs to, from 0 to ranks * virtual_stages - 1. Of a transfer, the end it is done at."""
    microbatch: int
    """Number within the step."""

    @property
    def partner(self) -> Action:
        """Of a transfer, what the other end does: the receive of a send, the send of a receive."""
        op, step = _OTHER_END[self.op]
        return Action(op, self.stage + step, self.microbatch)

    def __str__(self) -> str:
        return f"{self.op}{self.microbatch}@{self.stage}"


@dataclass(frozen=True)
class Plan:
    """What each rank of a pipeline does in a step, in order. `check` says whether it can."""

    schedule: str
    ranks: int
    microbatches: int
    virtual_stages: int
    """Parts of the model that each rank holds."""
    actions: tuple[tuple[Action, ...], ...]
    """One tuple a pipeline rank."""
    v_shaped: bool = False
    """Whether every other round of stages is dealt out from the last rank back to the first: with two stages a rank,
    the first rank then has the first and the last. Otherwise all rounds begin at the first rank, as in Megatron-LM."""

    @property
    def stages(self) -> int:
        """Parts that the model is divided into."""
        return self.ranks * self.virtual_stages

    def owner(self, stage: int) -> int:
        """The rank that holds `stage`."""
        dealt, rank = divmod(stage, self.ranks)
        return self.ranks - 1 - rank if self.v_shaped and dealt % 2 else rank

    @property
    def places_its_actions(self) -> bool:
        """Whether each action is on the rank that holds its stage."""
        return all(self.owner(action.stage) == rank for rank, mine in enumerate(self.actions) for action in mine)

    @cached_property
    def splits(self) -> bool:
        """Whether B is the input-gradient part of the backward alone, and W the rest, of any stage and micro-batch."""
        return bool(self.split)

    @cached_property
    def split(self) -> frozenset[tuple[int, int]]:
        """(stage, micro-batch) of the backwards that are in two parts; the B of others is all of their backward."""
        return frozenset(action[1:] for actions in self.actions for action in actions if action.op == "W")

    def needs(self, action: Action) -> tuple[Action, ...]:
        """What must have been computed, on whichever rank, before `action` of `COMPUTE` can be."""
        op, stage, microbatch = action
        if op == "F":
            return (Action("F", stage - 1, microbatch),) if stage > 0 else ()
        if op == "W":
            return (Action("B", stage, microbatch),)
        own = Action("F", stage, microbatch)
        return (own, Action("B", stage + 1, microbatch)) if stage + 1 < self.stages else (own,)

    def transfers(self, action: Action) -> tuple[Action | None, Action | None]:
        """The receive that `action` of `COMPUTE` needs, and the send of what it makes, where they are to other ranks.

        Stages of one rank pass on without one.
        """
        op, stage, microbatch = action
        if op == "W":
            return None, None
        before, after = (stage - 1, stage + 1) if op == "F" else (stage + 1, stage - 1)

        def transfer(name: str, other: int) -> Action | None:
            away = 0 <= other < self.stages and self.owner(other) != self.owner(stage)
            return Action(f"{name}_{op}", stage, microbatch) if away else None

        return transfer("RECV", before), transfer("SEND", after)


def with_transfers(plan: Plan) -> Plan:
    """`plan` with a send right after what makes it, and a receive right before what needs it.

    So a rank computes as much as it can before it waits, given that sends do not hold it up; receives may be posted
    earlier. Transfers that `plan` has already are placed anew.
    """

    def placed(actions: tuple[Action, ...]) -> Iterator[Action]:
        for action in actions:
            if action.op in COMPUTE:
                receive, send = plan.transfers(action)
                yield from (each for each in (receive, action, send) if each is not None)

    return replace(plan, actions=tuple(tuple(placed(actions)) for actions in plan.actions))


# --- The schedules, each a function from a rank and the sizes of a pipeline to what the rank does, and their names in
# the configuration (`pipeline.schedule`). Micro-batches may be fewer than ranks.


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
