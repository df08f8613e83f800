"""ZB-H1 (Qi et al. 2023, arXiv 2401.10241): the backward in two parts, at the peak memory of 1F1B.

The next rank waits for input gradients (B) alone. Weight gradients (W) nobody waits for: put off, they fill the time in
which the pipeline drains.
"""

from __future__ import annotations

from .plan import Action, Plan


def zero_bubble(ranks: int, microbatches: int) -> Plan:
    """The plan of ZB-H1: 1F1B, with W on rank r put off by r micro-batches.

    So micro-batches between F and W are as many on every rank as there are ranks, and those between F and B are 1F1B's.
    """

    def of(rank: int) -> tuple[Action, ...]:
        ahead = min(ranks - rank - 1, microbatches)
        actions = [Action("F", rank, m) for m in range(ahead)]
        for m in range(microbatches):
            if ahead + m < microbatches:
                actions.append(Action("F", rank, ahead + m))
            actions.append(Action("B", rank, m))
            if m >= rank:
                actions.append(Action("W", rank, m - rank))
        actions += [Action("W", rank, m) for m in range(max(0, microbatches - rank), microbatches)]
        return tuple(actions)

    return Plan("zero-bubble", ranks, microbatches, 1, tuple(of(rank) for rank in range(ranks)))
