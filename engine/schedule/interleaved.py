"""Interleaved 1F1B (Narayanan et al. 2021, arXiv 2104.04473): each rank holds several parts of the model.

The pipeline fills and drains in steps of one part, so the bubble is smaller by the number of parts a rank holds; in
return there are as many times more transfers, and more activations are held.
"""

from __future__ import annotations

from dataclasses import replace

from .one_f_one_b import alternating, one_f_one_b
from .plan import Action, Plan


def interleaved(ranks: int, microbatches: int, virtual_stages: int) -> Plan:
    """The plan of interleaved 1F1B, that of 1F1B if each rank holds one part.

    Groups of as many micro-batches as there are ranks go through a rank's parts one after the other. Megatron-LM takes
    multiples of that only; here, what is missing of the last group is left out of the plan for the next multiple, whose
    time it then takes, about. Since micro-batches need nothing of each other, that plan can finish as the full one can.
    (With a last group that is simply shorter, a backward can come before a forward that it waits for around the ranks.)
    """
    if virtual_stages == 1:
        return replace(one_f_one_b(ranks, microbatches), schedule="interleaved")
    full = -(-microbatches // ranks) * ranks

    def walk(op: str, rank: int) -> list[Action]:
        parts = range(rank, ranks * virtual_stages, ranks)
        return [
            Action(op, stage, m)
            for first in range(0, full, ranks)
            for stage in (parts if op == "F" else reversed(parts))
            for m in range(first, first + ranks)
        ]

    def of(rank: int) -> tuple[Action, ...]:
        # Around the ranks for each part but the last, and twice the way to the last rank: there and back.
        ahead = (virtual_stages - 1) * ranks + 2 * (ranks - rank - 1)
        actions = alternating(walk("F", rank), walk("B", rank), ahead)
        return tuple(action for action in actions if action.microbatch < microbatches)

    return Plan("interleaved", ranks, microbatches, virtual_stages, tuple(of(rank) for rank in range(ranks)))
