"""What effects that a user asks about save together."""

from __future__ import annotations

from collections.abc import Sequence

from ..effect import Effect
from ..finding import Gain
from ..graph.step_graph import StepGraph
from ..study import Study
from .calibration import ModelError
from .certainty import negated, with_all_errors
from .joint import joint_gain


def gain_together(study: Study, graph: StepGraph, effects: Sequence[Effect], errors: Sequence[ModelError]) -> Gain:
    """What these effects save together, with all that makes a prediction miss in the interval. Raises Refused where
    they do not go together, or these steps do not allow one.

    errors: what predictions of these kinds are missed by
    """
    gain, lost_ms = joint_gain(study, graph, effects)
    worst = _worst(errors)
    if gain.ms < 0:
        return negated(with_all_errors(study, negated(gain), worst))
    return with_all_errors(study, gain, worst, lost_ms)


def _worst(errors: Sequence[ModelError]) -> ModelError | None:
    """The largest of each."""
    if not errors:
        return None
    names = ("of_gain", "of_step", "busy", "busy_above")
    return ModelError(*(max(getattr(error, name) for error in errors) for name in names))
