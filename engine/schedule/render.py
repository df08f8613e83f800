"""A plan's timeline as text."""

from __future__ import annotations

from .plan import COMPUTE, Plan
from .simulate import Simulation


def render(plan: Plan, simulation: Simulation, width: int = 100) -> str:
    """A line a rank, `width` columns for the step: actions as in `F0==`, with the stage if ranks hold several; idle
    time as dots. A name that its action is too short for is cut off."""
    scale = width / simulation.makespan if simulation.makespan else 0.0
    lines = []
    for rank, actions in enumerate(plan.actions):
        line = ["."] * width
        for action in actions:
            if action.op in COMPUTE:
                start, end = (round(time * scale) for time in simulation.times[action])
                name = str(action) if plan.virtual_stages > 1 else f"{action.op}{action.microbatch}"
                line[start:end] = name[: end - start].ljust(end - start, "=")
        lines.append(f"rank {rank:<3} {''.join(line)}")
    return "\n".join(lines)
