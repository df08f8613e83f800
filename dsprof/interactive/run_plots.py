"""The figures of a run, as plotly makes them: `run.plot.timeline(step=5)`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsprof.analyzer.analysis import Analysis


class Plots:
    """Each gives a plotly Figure. Raises RunError where the run has nothing of the kind."""

    def __init__(self, analysis: Callable[[], Analysis]) -> None:
        self._read = analysis

    @property
    def _analysis(self) -> Analysis:
        return self._read()

    def timeline(self, step: int | None = None, ranks: Sequence[int] = ()) -> Any:
        """What each rank did in a step, and when; of a pipeline, its actions. step: the typical one where none is
        given; ranks: shown before others where there are more than eight."""
        from dsprof.reports.sections.over_steps import one_step
        from dsprof.run import RunError

        number, why = self._step(step)
        known = self._analysis.steps["step"]
        if step is not None and len(known) and step not in set(known):
            raise RunError(f"step {step}: none of this run; it has steps {int(known.min())} to {int(known.max())}")
        return one_step(self._analysis, number, why, tuple(ranks))

    def pipeline(self, step: int | None = None) -> Any:
        """What each stage of a pipeline did in a step, measured above ideal. step: the typical one where none is
        given."""
        from dsprof.analyzer.work.pipeline_step import pipeline_step
        from dsprof.reports import gantt
        from dsprof.run import RunError

        number, _ = self._step(step)
        found = pipeline_step(self._analysis.trace, number)
        if found is None:
            raise RunError(f"no action of a pipeline's schedule was recorded in step {number}")
        return gantt.pipeline(found)

    def time(self) -> Any:
        """What the run's wall time went to."""
        return self._drawn("time")

    def budget(self) -> Any:
        """Where each rank's mean ordinary step goes."""
        from dsprof.reports import plots

        self._need_steps()
        return plots.budget_bar(self._analysis.budget_by_rank, self._analysis.budget)

    def heatmap(self) -> Any:
        """Who was slower than the others, and when."""
        return self._drawn("heatmap")

    def steps(self) -> Any:
        """How long each step took, and how much of it each rank worked itself."""
        return self._drawn("steps")

    def collectives(self) -> Any:
        """Bytes against transfer time."""
        return self._drawn("collectives")

    def memory(self) -> Any:
        """What each rank had in use after each step."""
        return self._drawn("memory-use")

    def memory_parts(self) -> Any:
        """What the most that each rank had in use was for."""
        return self._drawn("memory-use", "memory-parts")

    def devices(self) -> Any:
        """Clock, power, temperature and utilization of each rank's device over time."""
        return self._drawn("devices")

    def _step(self, asked: int | None) -> tuple[int, str]:
        """The step that is asked for, else the one that is worth a look, and why it is."""
        from dsprof.run import RunError

        number, why = self._analysis.step_to_show if asked is None else (asked, "")
        if number is None:
            raise RunError("nothing to draw: no step was begun")
        return number, why

    def _need_steps(self) -> None:
        from dsprof.run import RunError

        if self._analysis.step_ms is None:
            raise RunError("no complete step was captured")

    def _drawn(self, section: str, name: str = "") -> Any:
        """The figure of this name, or the first one, of a section."""
        from dsprof.reports.sections import MAKERS
        from dsprof.reports.sections.section import Figure
        from dsprof.run import RunError

        maker = next(maker for maker in MAKERS if maker.id == section)
        why = maker.needs(self._analysis)
        made = None if why else maker.make(self._analysis)
        figures = [block for block in (made.blocks if made else ()) if isinstance(block, Figure)]
        figures = [figure for figure in figures if not name or figure.name == name]
        if not figures:
            raise RunError(f"nothing to draw: {why or 'it was not measured'}")
        return figures[0].drawn
