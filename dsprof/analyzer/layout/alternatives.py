"""What a prediction for another layout rests on that the run does not tell: its ends, and in words."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from dsprof.engine.schedule import DUAL_PIPE_V

from ..text import percent
from .job_layout import Layout
from .layout_costs import LayoutCosts
from .step_lowered import Assumed, short_plan

UNEVEN: Final = (0.15, -0.15)
"""What the first part of a stage may take more than an even one."""
TENSOR: Final = (0.0, 0.2)
"""What of the computation tensor-parallel ranks may not share."""

WHOLE: Final = 0.95
"""Of a forward, from which on all of it is computed again: the rest is what checkpoints are set around."""

Ends = tuple[Assumed, Assumed]


def alternatives(costs: LayoutCosts, layout: Layout) -> list[Ends]:
    """Of each thing that is assumed, both ends of what it may be; and of the links, of what they were fitted to."""
    ran, base, found = costs.ran, Assumed(), list[Ends]()
    if layout.micro_batch != 1:
        found.append((replace(base, fixed=costs.fixed.least), replace(base, fixed=costs.fixed.most)))
    if short_plan(layout).splits:
        found.append((replace(base, weight=costs.weight.least), replace(base, weight=costs.weight.most)))
    if _uneven(costs, layout):
        found.append((replace(base, uneven=UNEVEN[0]), replace(base, uneven=UNEVEN[1])))
    if layout.tp != ran.tp:
        found.append((replace(base, tensor=TENSOR[0]), replace(base, tensor=TENSOR[1])))
    used = {"replicas": layout.dp > 1, "stages": layout.pp > 1, "tensor": layout.tp > 1}
    spreads = [getattr(costs, name).spread for name, is_used in used.items() if is_used]
    if spreads:
        spread = min(max(spreads), 1.0)
        found.append((replace(base, links=1 - spread), replace(base, links=1 + spread)))
    return found


def _uneven(costs: LayoutCosts, layout: Layout) -> bool:
    return costs.layers is None and layout.pp * layout.chunks != costs.stage_count


def in_words(costs: LayoutCosts, *layouts: Layout) -> list[str]:
    """What is assumed of these layouts, each in a sentence."""
    ran, said = costs.ran, list[str]()
    if any(_uneven(costs, one) for one in layouts):
        said.append("layers were not timed: stages are even parts of those that ran, give or take 15 %")
    if any(one.pp > 1 for one in layouts) and costs.activation_bytes is None:
        sizes = "are taken to take as long as in the run" if costs.stages.measured else "are taken to be small"
        said.append(f"how much layers hand on was not seen: messages between stages {sizes}")
    if any(one.dp > 1 for one in layouts) and not costs.replicas.measured:
        said.append("the run has no replicas: what they would exchange is taken to go over the link between stages")
    if any(one.tp != ran.tp for one in layouts):
        said.append(
            "other tensor parallelism was not measured: 5 % of the computation is taken not to be shared, and each "
            "layer to exchange what it hands on twice in forward and twice in backward"
        )
    if any(one.micro_batch != 1 for one in layouts):
        said.append(costs.fixed.says)
    if ran.recompute and costs.computed_again < WHOLE and any(one.recompute for one in layouts):
        said.append(f"{percent(100 * costs.computed_again)} of forward is computed again, as in the run")
    if any(short_plan(one).splits for one in layouts):
        said.append(costs.weight.says)
    if any(one.schedule == DUAL_PIPE_V for one in layouts):
        said.append(f"{DUAL_PIPE_V} is torch's ScheduleDualPipeV: neither dsprof's engine nor DeepSpeed runs it")
    return said
