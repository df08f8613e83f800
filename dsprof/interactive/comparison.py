"""Two runs beside each other, as a notebook shows them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dsprof.analyzer.analysis import Analysis
from dsprof.analyzer.compare_runs import Difference, compare_runs
from dsprof.analyzer.text import clean, ms

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class RunComparison:
    """What is different in the second of two runs: `difference` has it all."""

    difference: Difference

    @property
    def table(self) -> pd.DataFrame:
        """Index part of the step; a_ms, b_ms, change_ms, most changed first. They sum to the steps'."""
        return self.difference.parts

    def __repr__(self) -> str:
        found = self.difference
        lines = [f"{found.says}: {ms(found.a_ms)} and {ms(found.b_ms)}"]
        lines += [
            f"  {part:14}{row['a_ms']:10.2f} ms{row['b_ms']:10.2f} ms  {round(row['change_ms'], 2) + 0.0:+.2f} ms"
            for part, row in found.parts.iterrows()
        ]
        for word, codes in (("gone", found.gone), ("came", found.came), ("still there", found.stayed)):
            lines += [f"{word}: {', '.join(codes)}"] if codes else []
        lines += [f"not the same: {clean(words)}" for words in found.unlike]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        from .in_cells import as_text

        return as_text(repr(self))


def compare(a: Analysis, b: Analysis) -> RunComparison:
    """Raises dsprof.analyzer.compare_runs.NothingToCompare where one has no complete step."""
    return RunComparison(compare_runs(a, b))
