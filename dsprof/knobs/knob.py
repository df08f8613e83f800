"""The record of a knob: what it is, which values it takes, and what a run states of it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

from dsprof.redact import redact_words

Facts = Mapping[str, Sequence[Mapping[str, Any]]]
"""What the ranks of a run said of themselves, by kind (`RunInfo.facts`)."""

SAME: Final = "same loss"
ROUNDING: Final = "same up to rounding"
DIFFERS: Final = "trains differently"
Numbers = Literal["same loss", "same up to rounding", "trains differently"]

TRUE: Final = ("true", "yes", "on", "1")
FALSE: Final = ("false", "no", "off", "0")


class KnobError(ValueError):
    """A knob that is not known, or a value that it cannot have; the message says what to write instead."""


@dataclass(frozen=True)
class Number:
    """A number from `low` to `high`, whole or not."""

    low: float = 0.0
    high: float = math.inf
    whole: bool = False

    def read(self, text: str) -> float:
        """Raises ValueError."""
        value = float(text)
        if math.isnan(value) or not self.low <= value <= self.high or (self.whole and value != int(value)):
            raise ValueError
        return int(value) if value == int(value) else value

    def __str__(self) -> str:
        kind = "a whole number" if self.whole else "a number"
        if math.isinf(self.high):
            return f"{kind} of {self.low:g} or more"
        return f"{kind} from {self.low:g} to {self.high:g}"


@dataclass(frozen=True)
class Choice:
    """One of a few words."""

    words: tuple[str, ...]

    def read(self, text: str) -> str:
        """Raises ValueError."""
        if text not in self.words:
            raise ValueError
        return text

    def __str__(self) -> str:
        return " or ".join(self.words) if len(self.words) < 3 else f"one of {', '.join(self.words)}"


@dataclass(frozen=True)
class TrueOrFalse:
    """True or false."""

    def read(self, text: str) -> bool:
        """Raises ValueError."""
        word = text.lower()
        if word not in TRUE + FALSE:
            raise ValueError
        return word in TRUE

    def __str__(self) -> str:
        return "true or false"


@dataclass(frozen=True)
class Either:
    """A value that one of several can read."""

    kinds: tuple[Number | Choice | TrueOrFalse, ...]

    def read(self, text: str) -> Any:
        """Raises ValueError."""
        for kind in self.kinds:
            try:
                return kind.read(text)
            except ValueError:
                continue
        raise ValueError

    def __str__(self) -> str:
        return ", or ".join(map(str, self.kinds))


@dataclass(frozen=True)
class Json:
    """Anything that JSON has; a word without quotes is a string, and 5e7 a whole number."""

    def read(self, text: str) -> Any:
        try:
            value = json.loads(text)
        except ValueError:
            lower = text.lower()
            return lower == "true" if lower in ("true", "false") else text
        if isinstance(value, float) and math.isfinite(value) and value == int(value) and "." not in text:
            return int(value)
        return value

    def __str__(self) -> str:
        return "a JSON value"


class Values(Protocol):
    """What a knob takes; `str` says it in words."""

    def read(self, text: str) -> Any:
        """The value that a text means. Raises ValueError."""
        ...


@dataclass(frozen=True)
class Stated:
    """What a knob is now. value: None where the framework chooses; where: `file:line`, a path with a JSON pointer, or
    None where it is not known."""

    value: Any
    where: str | None = None


@dataclass(frozen=True)
class Knob:
    """What a user can turn.

    key:      as `--set` takes it, such as `ddp.bucket_cap_mb`; with `*` in it, of any name
    says:     what it does, in words
    values:   which it takes
    unit:     of a number; empty: none
    numbers:  whether the training's numbers stay what they are
    of:       what in a job takes it, in words: `DistributedDataParallel`
    states:   what a run says that it is now, by the run's facts; None: no run says it
    """

    key: str
    says: str
    values: Values
    numbers: Numbers
    of: str
    unit: str = ""
    states: Callable[[Facts], Iterable[Stated]] | None = None

    def read(self, text: str, key: str | None = None) -> Any:
        """The value that `text` means. key: the knob's, where the record is of many. Raises KnobError."""
        try:
            return self.values.read(text.strip())
        except (ValueError, OverflowError):
            unit = f" ({self.unit})" if self.unit else ""
            typed = redact_words([f"{key or self.key}={text}"])[0]
            raise KnobError(f"{typed}: write {self.values}{unit}") from None

    def stated(self, facts: Facts) -> list[Stated]:
        """What it is now; several where the job has several of what takes it, and they differ."""
        found = [] if self.states is None else list(self.states(facts))
        return list({(repr(one.value), one.where): one for one in found}.values())


def of_fact(kind: str, name: str) -> Callable[[Facts], Iterable[Stated]]:
    """What facts of a kind say under a name, with the line that made what they tell of."""

    def states(facts: Facts) -> Iterable[Stated]:
        for fact in facts.get(kind, ()):
            if name in fact and not fact.get("by_engine"):
                yield Stated(fact[name], fact.get("site"))

    return states
