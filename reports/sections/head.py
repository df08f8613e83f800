"""What stands above all sections: the verdict, what limits the trust in it, and the main numbers."""

from __future__ import annotations

from dsprof.analyzer.analysis import Analysis
from dsprof.analyzer.text import clean, ms

from .. import wording
from .section import Head, Tiles


def head(analysis: Analysis) -> Head:
    """The head of a run's report."""
    run, verdict = analysis.run, analysis.verdict
    return Head(
        name=clean(run.name),
        run=clean(run.id),
        status=verdict.status,
        tone=analysis.tone,
        headline=clean(verdict.headline, 1000),
        notes=tuple(clean(note) for note in analysis.notes),
        warnings=tuple(wording.capture_warnings(analysis)),
        tiles=Tiles(_tiles(analysis)),
        step_is=wording.step_is(analysis),
    )


def _tiles(analysis: Analysis) -> tuple[tuple[str, str], ...]:
    step = analysis.step_ms
    if step is None:
        return ()
    captured, expected = len(analysis.ranks_captured), analysis.ranks_expected
    return (
        ("ordinary step", ms(step.mean)),
        ("median", ms(step.median)),
        ("p10 to p90", wording.between(step.p10, step.p90)),
        ("ordinary steps", f"{analysis.steps_judged:,} of {analysis.step_count:,}"),
        ("ranks", f"{captured:,}" if captured == expected else f"{captured:,} of {expected:,}"),
    )
