"""What a run would do on other ranks, as a notebook shows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import pandas as pd

from dsprof.plan.layouts import Wanted
from dsprof.plan.network import Network
from dsprof.plan.run_answer import RunAnswer, answer_run

if TYPE_CHECKING:
    from dsprof.analyzer.study import Study

COLUMNS: Final = ["ranks", "step_ms", "low_ms", "high_ms", "efficiency", "samples_per_s", "tokens_per_s"]


@dataclass(frozen=True)
class PlannedRun:
    """How long a step would take with more replicas, and which layouts are the fastest, as `dsprof plan RUN` has it:
    `answer` is all of it."""

    answer: RunAnswer

    @property
    def table(self) -> pd.DataFrame:
        """A row for each number of ranks: step_ms with the ends of its 95 % interval (low_ms, high_ms), efficiency (the
        throughput of a rank, by that of the run), samples_per_s and tokens_per_s of all ranks, missing where they are
        not known. None where more replicas cannot be told, for the reason that `answer.not_scaled` has."""
        rows = [
            {
                "ranks": step.ranks, "step_ms": step.ms, "low_ms": step.low, "high_ms": step.high,
                "efficiency": step.efficiency, "samples_per_s": step.samples, "tokens_per_s": step.tokens,
            }
            for step in (self.answer.scaled.curve if self.answer.scaled is not None else ())
        ]  # fmt: skip
        return pd.DataFrame(rows, columns=COLUMNS).set_index("ranks")

    def __repr__(self) -> str:
        from dsprof.reports.plans import render_run_answer

        return render_run_answer(self.answer).rstrip()

    def _repr_html_(self) -> str:
        from .in_cells import as_text

        return as_text(repr(self))


def plan(study: Study, ranks: int, bandwidth: str | None, latency: str | None, ranks_per_node: int) -> PlannedRun:
    """bandwidth: of a node's network, such as 400Gb; latency: such as 5us. Raises ValueError for what is neither, and
    dsprof.plan.from_run.CannotPlan where the run does not tell."""
    return PlannedRun(answer_run(study, ranks, Network.of_words(ranks_per_node, bandwidth, latency), Wanted()))
