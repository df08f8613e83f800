"""Actions and plans: who does what, in which order; and where transfers go."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, NamedTuple

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
