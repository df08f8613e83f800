"""Parts of the step that count as useful by their name, and may be lost all the same: what backward computes again, and
an optimizer that is mostly its host's overhead. Where no rule could judge a large one, a job is not called healthy."""

from __future__ import annotations

from typing import Final

from ..judge import Judged
from ..study import Study
from ..text import percent
from ..work.recomputed import recomputed_ms

MATTERS: Final = 0.075
"""Share of the step from which on such a part must have been judged."""


def untold_work(study: Study, judgement: Judged) -> str:
    """Which parts these are, and why they were not judged; empty: none."""
    if not study.step_ms or not len(study.ordinary):
        return ""
    again = recomputed_ms(study)
    shares = {
        "compute.recompute": ("computing activations again", 0.0 if again is None else float(again.mean())),
        "compute.optimizer": ("the optimizer", float(study.work("optimizer").mean())),
    }
    return " and ".join(
        f"{percent(100 * spent / study.step_ms)} is {words} (not judged: {judgement.not_judged[code]})"
        for code, (words, spent) in shares.items()
        if code in judgement.not_judged and spent > MATTERS * study.step_ms
    )
