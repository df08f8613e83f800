"""Lowering: a plan, what each of its actions costs, and what lies before and after them -> the graph of all ranks.

program    what was measured: of each rank the prologue, its actions in order, the epilogue; and which message carries
           what from which action to which
messages   when receives are posted and sends waited for, told by how the measured steps did it
recipe     of which measured actions each action of another plan is made
assemble   operations of a new structure, each a copy of a measured one
lower      the what-if: other actions, in another order, on the same ranks

The plan that ran, lowered, takes what was measured: that is the test of it.
"""

from __future__ import annotations

from .lower import Lower
from .program import MeasuredPlan, NotLowered, measured_plan
from .recipe import Stages

__all__ = ["Lower", "MeasuredPlan", "NotLowered", "Stages", "measured_plan"]
