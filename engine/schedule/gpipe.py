"""GPipe (Huang et al. 2019, arXiv 1811.06965): all forwards, then all backwards.

A rank holds the activations of all micro-batches at once.
"""

from __future__ import annotations

from .plan import Action, Plan


def gpipe(ranks: int, microbatches: int) -> Plan:
    """The plan of GPipe; micro-batches go backward in the order in which they went forward."""
    actions = tuple(tuple(Action(op, rank, m) for op in "FB" for m in range(microbatches)) for rank in range(ranks))
    return Plan("gpipe", ranks, microbatches, 1, actions)
