"""Two runs beside each other, as a notebook shows them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dsprof.compare import MeasuredRun, RunComparison
from dsprof.compare import compare as compare_sides

if TYPE_CHECKING:
    import pandas as pd

    from dsprof.analyzer.analysis import Analysis


@dataclass(frozen=True)
class ComparedRuns:
    """What is different in the second of two runs, as `dsprof compare` has it: `comparison` is all of it."""

    comparison: RunComparison

    @property
    def outcome(self) -> str:
        """better, worse, same, or not certain: with one run a side only large differences are certain."""
        return self.comparison.decision.outcome

    @property
    def table(self) -> pd.DataFrame:
        """Index part of the step, most changed first; a_ms, b_ms, change_ms. They sum to the steps'."""
        import pandas as pd

        parts = [part for part in self.comparison.parts if part.before or part.after]
        parts.sort(key=lambda part: -abs(part.ms))
        rows = [(part.before, part.after, part.ms) for part in parts]
        index = pd.Index([part.name for part in parts], name="part")
        return pd.DataFrame(rows, columns=["a_ms", "b_ms", "change_ms"], index=index)

    def __repr__(self) -> str:
        from dsprof.reports.comparison import text

        return text(self.comparison).rstrip()

    def _repr_html_(self) -> str:
        from .in_cells import as_text

        return as_text(repr(self))


def compare(a: Analysis, a_name: str, b: Analysis, b_name: str) -> ComparedRuns:
    """Raises dsprof.compare.NothingToCompare where one has no complete step."""
    return ComparedRuns(compare_sides([MeasuredRun.of(a, a_name)], [MeasuredRun.of(b, b_name)]))
