"""What-ifs: functions from graph to graph. They compose, in any order; `replay` says what each gains.

work      own work taken away, scaled or added
tasks     collectives and messages removed, scaled, added, or issued earlier
recut     gradients in other buckets, neighbouring gathers in one
schedule  the graph of a pipeline's schedule
"""

from __future__ import annotations

from collections.abc import Callable

from ..graph import StepGraph

WhatIf = Callable[[StepGraph], StepGraph]

__all__ = ["WhatIf"]
