"""What the parts of a step's budget are: what training is for, a rank's own work, and waiting for others.

`step_budget.WORK` are all those that are a rank's own doing."""

from __future__ import annotations

from typing import Final

from .label import PHASE_PART
from .step_budget import WORK

TRAINING: Final = ("compute", "optimizer")
"""What a step is for: all else of it is lost, or could be."""
OWN_WORK: Final = tuple(part for part in WORK if part not in ("data", "pause"))
"""What makes a rank late that no fault of another kind is about: loading, and collector pauses."""
WAITING: Final = ("peer_wait", "comm_exposed", "bubble")
"""For other ranks, or for what they send."""
TRAINING_PHASES: Final = tuple(phase for phase, part in PHASE_PART.items() if part in TRAINING)
