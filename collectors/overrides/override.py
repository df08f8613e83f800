"""A key with the value that a user asked for, and what became of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from dsprof.words import nearest

from ..hooking.caller import caller
from ..hooking.statements import state

MOST_TOLD: Final = 20
"""Places of one key that facts tell of: a script may make hundreds of loaders."""


@dataclass(frozen=True)
class Override:
    """A key and its value. What became of it is a fact of kind `override`: `key`, `value`, and `was`, `site` and
    `framework` where it was applied, or `why` it was not."""

    key: str
    value: Any
    told: set[str] = field(default_factory=set, init=False, repr=False, compare=False)

    @property
    def name(self) -> str:
        """The key without its framework: `bucket_cap_mb`."""
        return self.key.partition(".")[2]

    def applied(self, was: Any, *, by_call: bool = True) -> None:
        """The job's own value was `was`. by_call: at the line that is calling now."""
        site, framework = caller() if by_call else (None, None)
        self._tell({"was": plain(was), "site": site, "framework": framework})

    def not_applied(self, why: str) -> None:
        self._tell({"why": why})

    def has_none(self, what: str, there: Iterable[str]) -> None:
        """It is not applied, as `what` has nothing of that name among what is `there`."""
        near = nearest(self.name, there)
        self.not_applied(f"{what} {self.name}" + (f"; it has {near}" if near else ""))

    def _tell(self, said: dict[str, Any]) -> None:
        once = repr(said)
        if once not in self.told and len(self.told) < MOST_TOLD:
            self.told.add(once)
            state({"fact": "override", "key": self.key, "value": plain(self.value), **said})


def plain(value: Any) -> Any:
    """A value as JSON has it."""
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
