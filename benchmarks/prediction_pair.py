"""A pair of `predictions.py`: a job with one fault planted, and the same job with it mended.

A mended job is what the finding's first fix asks for. Where the fix names a value, as in `bucket_cap_mb=25`, the
mended job takes it from the first planted run: `{bucket_cap_mb}` in `mended`. Where it names none, mending means what
the finding says that its gain is of: for a straggler, that its extra work is gone; for a slow stage, that its extra
work is spread evenly over all stages; for unequal inputs, that every rank gets the mean of the step; for a checkpoint,
that a copy is saved by another thread; for evaluation, that the ranks share it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

Set = Literal["calibration", "fresh"]

OTHERWISE: Final = {
    "num_workers": "2", "bucket_cap_mb": "25", "together": "8", "n_microbatches": "16",
}  # fmt: skip
"""What a mended job takes where the planted run has no finding that would name it."""


@dataclass(frozen=True)
class Pair:
    """A planted and a mended job.

    args, planted, mended: of both jobs, and what each has besides; `{name}` in `mended` is a value of the fix.
    real:      layers compute; else they sleep.
    whole_run: the fault strikes outside of ordinary steps, so that the time of all steps is compared.
    work_of:   (name, value): a step of the mended job does the work of so many planted ones as the fix's value of that
               name is times this one.
    """

    name: str
    set: Set
    family: str
    fault: str
    magnitude: str
    real: bool
    script: str
    ranks: int
    steps: int
    args: str
    planted: str = ""
    mended: str = ""
    whole_run: bool = False
    work_of: tuple[str, int] | None = None

    def planted_args(self) -> tuple[str, ...]:
        return tuple(f"--steps {self.steps} {self.args} {self.planted}".split())

    def mended_args(self, said: Mapping[str, str]) -> tuple[str, ...]:
        mended = self.mended.format_map({**OTHERWISE, **said})
        return tuple(f"--steps {self.steps} {self.args} {mended}".split())

    def times(self, said: Mapping[str, str]) -> float:
        """How many planted steps' work a mended one does."""
        if self.work_of is None:
            return 1.0
        name, planted = self.work_of
        return float({**OTHERWISE, **said}[name]) / planted
