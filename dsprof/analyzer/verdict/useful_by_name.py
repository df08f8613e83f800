"""Parts of the step that count as useful by their name, and may be lost all the same: what backward computes again, an
optimizer that is mostly its host's overhead, and what ranks wait for a core while they compute. Where no rule could
judge a large one, or it is not sure what it gains, a job is not called healthy."""

from __future__ import annotations

from typing import Final

from ..judge import Judged
from ..study import Study
from ..text import percent
from ..work.core_wait import lacks_cores
from ..work.recomputed import recomputed_ms
from ..work.taken_cores import taken_cores

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
    said = [
        f"{percent(100 * spent / study.step_ms)} is {words} (not judged: {judgement.not_judged[code]})"
        for code, (words, spent) in shares.items()
        if code in judgement.not_judged and spent > MATTERS * study.step_ms
    ]
    return " and ".join([*_without_cores(study), *said])


def _without_cores(study: Study) -> list[str]:
    waited = lacks_cores(study)
    if waited is None:
        return []
    share = percent(100 * waited.usual(study))
    return [
        f"{share} is waiting for a core, {taken_cores(study).words} (how much of it could be gained is not certain: "
        "`dsprof run` it where cores are free, and `dsprof compare` of the two runs tells)"
    ]
