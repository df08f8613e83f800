"""tune.json: what was tried, with what was predicted before and measured after, so that tuning goes on after Ctrl-C."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from dsprof.atomic import write_atomically

from .corrections import Scored
from .proposals import Proposal

SCHEMA: Final = 1
PRIVATE: Final = 0o600


class Unreadable(Exception):
    """A journal is damaged; the message says which file."""


@dataclass
class Attempt:
    """A trial.

    knobs:     what was changed beside `base`, which had been kept before
    predicted: ms, low, high, percent as the findings have it; None: nothing was
    corrected: the same as trials before this one correct it; written before the first job runs
    measured:  as `Comparison.to_dict` has it, with the outcome; None: under way
    failed:    a job with the change failed
    newest:    a run folder with the change, whose findings say what is left; empty: none
    """

    code: str
    title: str
    knobs: dict[str, Any]
    base: dict[str, Any]
    predicted: dict[str, Any] | None
    corrected: dict[str, float] | None
    measured: dict[str, Any] | None = None
    newest: str = ""
    failed: bool = False

    @property
    def proposal(self) -> Proposal:
        """What was tried."""
        return Proposal(self.code, self.title, self.knobs, self.predicted)

    @property
    def outcome(self) -> str:
        """Empty: it is under way."""
        return "" if self.measured is None else str(self.measured["outcome"])

    @property
    def is_done(self) -> bool:
        """Whether it was compared to the end, and not cut short by the budget."""
        return self.measured is not None and not self.measured.get("cut")

    @property
    def hurt(self) -> bool:
        """Whether its jobs failed, or even the high end of what it saved is a cost."""
        return self.failed or (self.measured is not None and self.measured.get("high", 0.0) < 0)

    @property
    def scored(self) -> Scored | None:
        """Prediction and measure, where there are both."""
        if not self.predicted or not self.measured or "ms" not in self.measured:
            return None
        return Scored(self.code, float(self.predicted["ms"]), float(self.measured["ms"]))

    @property
    def held(self) -> bool | None:
        """Whether the measured mean lies in the interval that was predicted; None: one of them is not there."""
        if self.corrected is None or not self.measured or "ms" not in self.measured:
            return None
        return bool(self.corrected["low"] <= self.measured["ms"] <= self.corrected["high"])


@dataclass
class Journal:
    """path: of tune.json; attempts: in their order; spent_s: so far, by the clock; ended: why it is over."""

    path: Path
    attempts: list[Attempt] = field(default_factory=list)
    spent_s: float = 0.0
    ended: str = ""
    together: dict[str, Any] | None = None
    """All that was kept, beside the job as it was."""

    @staticmethod
    def read(path: Path) -> Journal:
        """That of a file; an empty one where there is none. Raises Unreadable."""
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return Journal(path)
        try:
            found = json.loads(text)
            attempts = [Attempt(**one) for one in found["attempts"]]
            return Journal(path, attempts, float(found["spent_s"]), str(found["ended"]), found["together"])
        except (ValueError, KeyError, TypeError) as error:
            raise Unreadable(f"{path}: cannot be read ({error}); move it away to begin anew") from None

    def write(self) -> None:
        """Raises OSError."""
        write_atomically(self.path, json.dumps(self.to_dict(), indent=1) + "\n", mode=PRIVATE)

    def to_dict(self) -> dict[str, Any]:
        """As the file has it, and `dsprof tune --json` prints it."""
        return {
            "schema": SCHEMA,
            "kept": self.kept,
            "spent_s": round(self.spent_s, 3),
            "ended": self.ended,
            "together": self.together,
            "attempts": [asdict(one) for one in self.attempts],
        }

    @property
    def kept(self) -> dict[str, Any]:
        """All knobs whose change pays, by key; none where all of them together do not."""
        if self.together is not None and self.together["outcome"] == "withdrawn":
            return {}
        return {key: value for one in self.which_kept for key, value in one.knobs.items()}

    @property
    def which_kept(self) -> list[Attempt]:
        return [one for one in self.attempts if one.outcome == "kept"]

    @property
    def scored(self) -> list[Scored]:
        return [one.scored for one in self.attempts if one.scored is not None]

    def was_tried(self, knobs: Mapping[str, Any], base: Mapping[str, Any]) -> bool:
        """Whether these values were, beside the same others; or beside any others, if it surely cost or failed there.
        What did nothing beside a fault may pay once that is fixed."""
        wanted = {**base, **knobs}
        return any({**one.base, **one.knobs} == wanted or (one.hurt and one.knobs == knobs) for one in self.attempts)
