"""Two runs, or two sets of runs, held against each other: is B slower than A, by how much, and where.

measured     what is kept of a run: its step, the parts of it, collectives, findings, what it ran on
sides        a side is one run or several; the differences between the two in what they ran and where
decide       worse, better, same or not certain: the statistics
comparison   all of it together
"""

from .comparison import RunComparison, compare
from .measured import MeasuredRun, NothingToCompare

__all__ = ["MeasuredRun", "NothingToCompare", "RunComparison", "compare"]
