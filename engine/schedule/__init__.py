"""Pipeline schedules as data: what each rank does, in order, for the micro-batches of a step.

plan.py         actions and plans, and where transfers go; GPipe, 1F1B, interleaved 1F1B, and ZB-H1, which divides the
                backward, by name
dual_pipe_v.py  DualPipeV, with the first and the last stage on the first rank: for predictions, the engine runs none
check.py        whether a plan is whole and can finish, and what waits for whom where it cannot; when everything would
                happen, given what it costs, as text too; how much is held at once

The engine runs a plan, the analyzer simulates it. A schedule is one function and one line in `SCHEDULES`.
"""

from .check import ScheduleError, Simulation, check, peak_activations, render, simulate
from .dual_pipe_v import DUAL_PIPE_V, dual_pipe_v
from .plan import COMPUTE, SCHEDULES, TRANSFERS, Action, Plan, make_plan, with_transfers

__all__ = [
    "COMPUTE", "DUAL_PIPE_V", "SCHEDULES", "TRANSFERS", "Action", "Plan", "ScheduleError", "Simulation", "check",
    "dual_pipe_v", "make_plan", "peak_activations", "render", "simulate", "with_transfers",
]  # fmt: skip
