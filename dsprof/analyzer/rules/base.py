"""What rules share: how a rule declines, and how a fix names a place in the user's code."""

from __future__ import annotations

from typing import Any, Final

from ..context import Context
from ..finding import Fix, Gain

LEAST_SHARE: Final = 0.001
"""What costs less than this share of the step is not worth a line, not even as `info`."""


class NotJudged(Exception):
    """The capture does not hold what the rule needs; the message says what is missing."""


def need_steps(context: Context) -> None:
    """Raises NotJudged without a completed step to judge."""
    if not context.programs:
        raise NotJudged("no step was completed on all captured ranks")


def code_fix(title: str, argument: str, value: Any, site: str | None, gain: Gain | None = None) -> Fix:
    """A change of one argument at `site` (`file:line`), or somewhere in the script where the call was not seen."""
    file, _, line = (site or "").rpartition(":")
    where = {"file": file or None, "line": int(line) if line.isdigit() else None}
    return Fix("code", title, ({**where, "argument": argument, "value": value},), gain)


def at(site: str | None) -> str:
    """` (train.py:12)` for a title, or nothing."""
    return f" ({site.rpartition('/')[2]})" if site else ""


def script_of(context: Context) -> str | None:
    """The training script, as a site without a line."""
    script = next((fact.get("script") for fact in context.facts.get("process", [])), None)
    return f"{script}:" if script else None


def confidence_of(gain: Gain) -> float:
    """How sure a rule is: 0.5 where the interval's low end is nothing, towards 1 as it nears the gain itself."""
    if gain.ms <= 0:
        return 0.5
    return round(min(max(0.5 + 0.5 * gain.low / gain.ms, 0.05), 0.99), 2)
