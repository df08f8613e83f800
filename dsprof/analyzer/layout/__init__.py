"""Another layout of a measured job: other numbers of stages, replicas and tensor-parallel ranks, another ZeRO stage,
other micro-batches, with activations computed again or not.

job_layout   what a layout is
layout_costs what a run tells of any layout: its stages, its layers, its links, and what it does once a step
stage_work   what the stages of another layout compute
step_lowered a layout -> the graph of the ranks of a replica, for replay
alternatives what a prediction assumes, to its ends and in words
held_bytes   what each rank holds
relayout     the what-if, and what a user asks about

The layout that ran, lowered, is what others are compared with: what the model lacks is in both.
"""

from __future__ import annotations

from dsprof.engine.schedule import DUAL_PIPE_V

from .job_layout import Layout
from .layout_costs import LayoutCosts, Wire, layout_costs
from .step_lowered import Assumed, lowered, step_of

__all__ = ["DUAL_PIPE_V", "Assumed", "Layout", "LayoutCosts", "Wire", "layout_costs", "lowered", "step_of"]
