"""What became of the knobs that `dsprof run --set` turned, and of those that `dsprof fix --verify` tried."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from dsprof.run import RunInfo

from ..text import with_interval

MOST_SITES: Final = 3


def applied_knobs(run: RunInfo) -> Iterator[str]:
    """A sentence for each knob that the ranks applied."""
    for key, value in run.knobs.items():
        told = [fact for fact in _facts(run, key) if "why" not in fact]
        if not told:
            continue
        was = [shown(fact.get("was")) for fact in told]
        sites = [str(fact["site"]) for fact in told if fact.get("site")]
        before = "" if key.startswith("env.") else f" (without it: {', '.join(dict.fromkeys(was))})"
        where = f", {', '.join(list(dict.fromkeys(sites))[:MOST_SITES])}" if sites else ""
        yield f"this run had --set {key}={shown(value)}{before}{where}"


def lost_knobs(run: RunInfo) -> Iterator[str]:
    """A warning for each knob that was asked for and not applied, or not everywhere."""
    for key, value in run.knobs.items():
        told = _facts(run, key)
        why = list(dict.fromkeys(str(fact["why"]) for fact in told if "why" in fact))
        if not told:
            why = ["nothing in the job takes it"]
        for reason in why:
            part = " everywhere" if any("why" not in fact for fact in told) else ""
            yield f"--set {key}={shown(value)} was not applied{part}: {reason}"


def verified_fixes(run: RunInfo) -> Iterator[str]:
    """A sentence for each fix that was tried."""
    for code, found in run.verified.items():
        change = " ".join(f"{key}={shown(value)}" for key, value in found["set"].items())
        if "ms" in found:
            measured = with_interval(found["ms"], found["low"], found["high"])
            yield f"{code}: {change} was tried and {measured}: {found['outcome']}"
        else:
            yield f"{code}: {change} was tried: {found['outcome']}; {found.get('why', '')}"


def _facts(run: RunInfo, key: str) -> list[dict[str, Any]]:
    return [fact for fact in run.facts if fact.get("fact") == "override" and fact.get("key") == key]


def shown(value: Any) -> str:
    """As `--set` takes it; None: the framework chooses."""
    if value is None:
        return "not set"
    return str(value).lower() if isinstance(value, bool) else str(value)
