"""What `dsprof live` shows of a job that runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, TextIO

import numpy as np

from dsprof.analyzer.text import count, ms, number

from . import terminal

if TYPE_CHECKING:
    from dsprof.analyzer.analysis import Analysis
    from dsprof.run import RunFolder

RECENT: Final = 50
"""Steps that the rate is of."""


@dataclass(frozen=True)
class LiveLook:
    """What is seen of a job at one moment.

    analysis: of the newest steps; None before the first step has ended
    ended:    the job has ended
    """

    folder: RunFolder
    analysis: Analysis | None
    ended: bool


def examine(folder: RunFolder, written_first: tuple[Path, ...]) -> Analysis | None:
    """The analysis of the newest steps; None where no step has ended. written_first: see `load_recent`. Raises RunError
    where run.json cannot be read."""
    from dsprof import analyzer
    from dsprof.trace.recent import load_recent
    from dsprof.trace.strings import plain_strings

    with plain_strings():
        trace = load_recent(folder, written_first=written_first)
        if not trace.ranks:
            return None
        analysis = analyzer.analyze(trace)
    return analysis if analysis.step_ms is not None else None


def text(name: str, analysis: Analysis | None, file: TextIO, *, ended: bool, height: int | None) -> str:
    """The verdict so far below a line of how fast it goes, as `file` shows it. height: in lines, at most; None: all."""
    status = "the job has ended: dsprof report shows all of it" if ended else "q leaves; the job goes on"
    if analysis is None:
        waiting = "no step was captured" if ended else "waiting for the first steps to end"
        return f"dsprof live  {name}\n{waiting}; {status}\n"
    verdict = terminal.rendered(analysis, file, so_far=True).rstrip().splitlines()
    lines = [f"dsprof live  {_rate(analysis)}; {status}", *verdict]
    shown = lines if height is None or len(lines) <= height else [*lines[: max(height - 1, 1)], "..."]
    return "\n".join(shown) + "\n"


def _rate(analysis: Analysis) -> str:
    """`step 1,234, 4.1 steps/s (243 ms) in the last 50`."""
    steps = analysis.steps
    first = steps[steps["rank"] == steps["rank"].min()].sort_values("step").tail(RECENT)
    begin = int(first["start_ns"].min())
    end = int((first["start_ns"] + first["dur_ns"]).max())
    each = (end - begin) / 1e6 / len(first)
    last = int(np.max(steps["step"].to_numpy(np.int64)))
    return f"step {last:,}, {number(1e3 / each)} steps/s ({ms(each)}) in the last {count(len(first), 'step')}"
