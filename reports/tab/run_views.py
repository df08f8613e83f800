"""What the tab shows of a run, as JSON. Each run is analyzed once, and again when more of it has come."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any, Final

from dsprof.analyzer.analysis import Analysis
from dsprof.compare import MeasuredRun, NothingToCompare, compare
from dsprof.run import RunError, RunFolder

from .. import comparison, examine
from ..sections import report_of
from ..sections.as_json import figure_json, report_json
from ..sections.over_steps import timeline_of
from .cannot_answer import CannotAnswer

KEPT: Final = 4
"""Analyses that are kept in memory."""


class RunViews:
    """Views of runs, for any number of threads."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, tuple[int, Analysis]] = OrderedDict()
        self._lock = threading.Lock()

    def report(self, folder: RunFolder) -> dict[str, Any]:
        """The whole report. Raises CannotAnswer."""
        analysis = self._analysis(folder)
        known = analysis.steps["step"]
        steps = [int(known.min()), int(known.max())] if len(known) else None
        return {**report_json(report_of(analysis)), "steps": steps, "ranks": sorted(analysis.ranks_captured)}

    def timeline(self, folder: RunFolder, step: int, ranks: tuple[int, ...]) -> dict[str, Any]:
        """The figure of a step. Raises CannotAnswer."""
        analysis = self._analysis(folder)
        if step not in set(analysis.steps["step"]):
            raise CannotAnswer(f"there is no complete step {step}")
        return figure_json(timeline_of(analysis, step, ranks=ranks))

    def comparison(self, before: RunFolder, after: RunFolder) -> dict[str, Any]:
        """What is different in the second run, in words. Raises CannotAnswer."""
        try:
            sides = [[MeasuredRun.of(self._analysis(folder), folder.path.name)] for folder in (before, after)]
        except NothingToCompare as error:
            raise CannotAnswer(str(error)) from error
        return {"text": comparison.text(compare(*sides))}

    def _analysis(self, folder: RunFolder) -> Analysis:
        """One at a time: it takes much memory, and all that wait for one run get the same."""
        with self._lock:
            key, changed = str(folder.path), folder.changed_ns
            kept = self._kept.get(key)
            if kept is None or kept[0] < changed:
                try:
                    kept = changed, examine(folder)
                except RunError as error:
                    raise CannotAnswer(str(error)) from error
                except Exception as error:  # its content may be damaged, or made up by somebody
                    raise CannotAnswer(f"it cannot be analyzed ({type(error).__name__}: {error})") from error
                self._kept[key] = kept
            self._kept.move_to_end(key)
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
            return kept[1]
