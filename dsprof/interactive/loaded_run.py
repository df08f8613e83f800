"""A run that is looked at: `run = dsprof.load(".")`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsprof.run import DEFAULT_PARENT, RunError, RunFolder, find_run, runs_below

if TYPE_CHECKING:
    from concurrent.futures import Executor

    import pandas as pd

    from dsprof.analyzer.analysis import Analysis, Verdict
    from dsprof.analyzer.study import Study

    from .comparison import ComparedRuns
    from .in_cells import Findings
    from .planned import PlannedRun
    from .questions import WhatIfAnswers
    from .run_plots import Plots


class Run:
    """A run: its verdict, tables, figures, and what changes would save.

    All of it is made when it is first asked for, and kept; `reload` forgets it. In a notebook a run shows its verdict.
    """

    def __init__(self, folder: RunFolder, executor: Executor | None = None) -> None:
        self.folder = folder
        self._executor = executor

    @property
    def path(self) -> Path:
        """The run folder."""
        return self.folder.path

    # --- what it says

    @property
    def verdict(self) -> Verdict:
        """`status` (healthy, bottleneck, inconclusive, failed) and `headline`."""
        return self.analysis.verdict

    @property
    def findings(self) -> Findings:
        """What holds the job back, worst first (`dsprof.analyzer.finding.Finding`); `.table` has a row for each."""
        from .in_cells import Findings

        return Findings(self.analysis.findings)

    def whatif(
        self, without: str | Sequence[str] = (), *, scale: Mapping[str, float] | None = None,
        set: Mapping[str, Any] | None = None, sweep: Mapping[str, Sequence[Any]] | None = None,
    ) -> WhatIfAnswers:  # fmt: skip
        """What changes would save, by a replay of the run's steps: each alone, and all together.

            run.whatif("rank.straggler:2")                       # without a finding's fault, of one rank or of all
            run.whatif(scale={"link": 10, "compute": 0.5})       # links ten times as fast, compute half as long
            run.whatif(set={"ddp.bucket_cap_mb": 50})            # with a knob turned
            run.whatif(sweep={"ddp.bucket_cap_mb": [1, 5, 25]})  # a row for each value

        Raises dsprof.knobs.KnobError for what is no such question, and dsprof.knobs.questions.NotAnswered where the
        steps do not tell.
        """
        from .questions import ask

        return ask(self.study, str(self.path), without, scale or {}, set or {}, sweep or {})

    def compare(self, other: Run | str | os.PathLike[str]) -> ComparedRuns:
        """What is different in `other`, as `dsprof compare` says it. Of two runs only large differences are certain."""
        from .comparison import compare

        second = other if isinstance(other, Run) else load(other)
        return compare(self.analysis, str(self.path), second.analysis, str(second.path))

    def plan(
        self, ranks: int, *, bandwidth: str | None = None, latency: str | None = None, ranks_per_node: int = 8
    ) -> PlannedRun:  # fmt: skip
        """How long a step would take with more replicas, as `dsprof plan` says it: every rank keeps its batch.

            run.plan(64, bandwidth="400Gb", latency="5us")  # of a node's network, which `ranks_per_node` ranks share

        A network that is not told is a guess, and widens the interval. Raises ValueError for what is no rate or time,
        and dsprof.plan.from_run.CannotPlan where the run does not tell.
        """
        from .planned import plan

        return plan(self.study, ranks, bandwidth, latency, ranks_per_node)

    @property
    def plot(self) -> Plots:
        """Its figures: `run.plot.timeline(step=5)`."""
        from .run_plots import Plots

        return Plots(lambda: self.analysis)

    # --- tables

    @property
    def events(self) -> pd.DataFrame:
        """All that was recorded, of all ranks on one clock. Read anew each time: keep it in a variable."""
        from . import run_tables

        return run_tables.events(self.analysis)

    @property
    def steps(self) -> pd.DataFrame:
        """A row for each rank and step, with where its time went."""
        from . import run_tables

        return run_tables.steps(self.analysis)

    @property
    def collectives(self) -> pd.DataFrame:
        """A row for each communication that was matched between ranks."""
        from . import run_tables

        return run_tables.collectives(self.analysis)

    @property
    def pipeline(self) -> pd.DataFrame:
        """A row for each action of a pipeline's schedule."""
        from . import run_tables

        return run_tables.pipeline(self.analysis)

    @property
    def memory(self) -> pd.DataFrame:
        """A row for each rank, place and step after which memory was sampled; bytes."""
        from . import run_tables

        return run_tables.memory(self.analysis)

    @property
    def modules(self) -> pd.DataFrame:
        """A row for each module; empty below `--level full`."""
        from . import run_tables

        return run_tables.modules(self.analysis)

    @staticmethod
    def describe(table: str) -> pd.DataFrame:
        """What the columns of a table are: `run.describe("steps")`."""
        from . import run_tables

        if table not in run_tables.COLUMNS:
            raise RunError(f"{table}: no such table; there are {', '.join(run_tables.COLUMNS)}")
        return run_tables.describe(table)

    # --- what it is made of

    @cached_property
    def analysis(self) -> Analysis:
        """Everything that was found, as the reports draw it. Raises RunError where the run cannot be read."""
        from dsprof import reports

        self._need()
        return reports.explain(self.study, self.folder)

    @cached_property
    def study(self) -> Study:
        """Everything that was measured. Raises RunError where the run cannot be read."""
        from dsprof import reports

        self._need()
        return reports.measure(self.folder, executor=self._executor, own_process=False)

    def _need(self) -> None:
        """Raises RunError where there is nothing to read."""

    def reload(self) -> Run:
        """Forget what was read: more of the run may have come since. Gives the run itself."""
        for name in ("analysis", "study"):
            self.__dict__.pop(name, None)
        return self

    def __repr__(self) -> str:
        from .in_cells import run_as_text

        return run_as_text(self.analysis)

    def _repr_html_(self) -> str:
        from .in_cells import run_as_html

        return run_as_html(self.analysis)


def load(path: str | os.PathLike[str] = ".", *, executor: Executor | None = None) -> Run:
    """The run at `path`: a run folder, or a folder that holds runs, itself or in its `dsprof-out`: then the newest.

    From the current directory (the default, and `"."`) the `dsprof-out` of the folders around it are looked through as
    well, as a notebook often lies below them. A folder that is named is not left: a run of somebody else's, around it,
    is not what was meant. `executor` does what is of one rank alone, such as a Dask client's
    (`client.get_executor()`). Raises dsprof.run.RunError where there is none.
    """
    folder = Path(path)
    if not folder.is_dir() or RunFolder(folder).is_run():
        found = find_run(folder)
        return Run(RunFolder(found.path.absolute()), executor)  # which is read later, maybe from another directory
    here, whole = folder == Path(), folder.resolve()
    above = whole.parents if here else ()
    for place in (whole, *(parent / DEFAULT_PARENT for parent in (whole, *above))):
        if runs_below(place):
            return Run(find_run(place), executor)
    raise RunError(
        f"{path}: no run in it, nor in a {DEFAULT_PARENT}/ there{' or above it' if here else ''}; make one with "
        "`dsprof run train.py`, or with dsprof.profile()"
    )
