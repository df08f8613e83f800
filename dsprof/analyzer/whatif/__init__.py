"""What-ifs: functions from graph to graph. They compose, in any order; `replay` says what each gains.

edit            the structure of equal steps edited: edges, tasks and segments that come and go
work            own work taken away, scaled or added
on_chains       of ranks' work, as of their chains' work
without_flows   no chain waits for another of its rank
communications  collectives and messages removed, scaled, added, or issued earlier
rebucket        gradients in other buckets, neighbouring gathers in one
typical         nothing slower than is typical of its kind
schedule        the graph of a pipeline's schedule
"""

from __future__ import annotations

from collections.abc import Callable

from ..graph.step_graph import StepGraph

WhatIf = Callable[[StepGraph], StepGraph]

__all__ = ["WhatIf"]
