"""The changes that a run's findings offer and `--set` can make, as findings.json has them."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from dsprof.analyzer.finding import MEASURED_EXCESS
from dsprof.knobs import flags
from dsprof.redact import redact_data, redact_words


@dataclass(frozen=True)
class Proposal:
    """A change to try.

    code:     of the finding that offers it; empty: the user's own
    title:    what the user would change, in words
    knobs:    the same as `--set` takes it, by key
    gain:     what is predicted, as in findings.json: ms, low, high, percent; None: nothing is
    """

    code: str
    title: str
    knobs: Mapping[str, Any]
    gain: Mapping[str, Any] | None = field(default=None)

    @property
    def is_of_whole_run(self) -> bool:
        """Whether what it saves is time of irregular steps, which the mean of ordinary ones does not have."""
        return self.gain is not None and self.gain.get("method") == MEASURED_EXCESS

    @property
    def interval_ms(self) -> tuple[float, float] | None:
        """What it should save, low and high end, ms; None: nothing is predicted."""
        if self.gain is None or self.gain.get("method") == "none":
            return None
        return float(self.gain["low"]), float(self.gain["high"])

    @property
    def shown(self) -> str:
        """The knobs as one types them in a shell, without secrets."""
        return shlex.join(redact_words(flags(self.knobs.items())))


def proposals(findings: Mapping[str, Any]) -> Iterator[Proposal]:
    """The fixes that `--set` can make, those of the worst finding first. findings: a findings.json."""
    for finding in findings.get("findings", ()):
        for fix in finding.get("fixes", ()):
            if fix.get("set"):
                yield Proposal(
                    str(finding["code"]), str(fix["title"]), fix["set"], fix.get("gain") or finding.get("gain")
                )


def joint_proposals(findings: Mapping[str, Any]) -> Iterator[Proposal]:
    """Of two faults that hide each other, both fixes at once, as one alone saves little."""
    first = {one.code: one for one in reversed(list(proposals(findings)))}
    for finding in findings.get("findings", ()):
        together = finding.get("together")
        one, other = first.get(finding["code"]), first.get(together["code"]) if together else None
        if one is not None and other is not None and one.knobs.keys().isdisjoint(other.knobs):
            title = f"{other.title}; and {one.title}"
            yield Proposal(f"{other.code} and {one.code}", title, {**other.knobs, **one.knobs}, together["gain"])


def slug(knobs: Mapping[str, Any]) -> str:
    """A folder's name for a change; another change has another one."""
    text = "-".join(f"{key}-{value}" for key, value in knobs.items())
    shown = "-".join(f"{key}-{redact_data({key: value})[key]}" for key, value in knobs.items())
    name = "".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in shown)[:80]
    return name if name == text else f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
