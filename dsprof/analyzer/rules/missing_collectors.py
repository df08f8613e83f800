"""What cannot be judged since a collector was switched off (`--without`, the fact `without`), left out on a device
where there was no native helper (the fact `left_out`), or could not be installed (the fact `lost`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from dsprof.collectors.catalogue import COLLECTORS
from dsprof.collectors.catalogue import EVERYTHING as EVERYTHING
from dsprof.schema import LOST_FACT

NEEDED_FOR: Final = {name: collector.judges for name, collector in COLLECTORS.items()}
"""Collector -> codes of what cannot be judged without it."""

NEEDED_TO_PASS: Final = {name: collector.proves for name, collector in COLLECTORS.items()}
"""Collector -> codes that may be found without it, but where nothing is found, nothing is proved."""


def reasons(facts: Mapping[str, Sequence[Mapping[str, Any]]], codes: Iterable[str]) -> dict[str, str]:
    """Of these codes, and of EVERYTHING, those that cannot be judged -> why."""
    codes = tuple(codes)
    why = _reasons(facts, (*codes, EVERYTHING), NEEDED_FOR)
    for fact in facts.get(LOST_FACT, []):
        if fact.get("decisive"):
            for collector in fact.get("collectors", ()):
                for code in NEEDED_FOR.get(str(collector), ()):
                    why.setdefault(code, f"{fact.get('what')} ({fact.get('because')})")
    return {code: why[code] for code in (*codes, EVERYTHING) if code in why}


def unproved(facts: Mapping[str, Sequence[Mapping[str, Any]]], codes: Iterable[str]) -> dict[str, str]:
    """Of these codes, those that have not passed where nothing was found -> why."""
    return _reasons(facts, codes, NEEDED_TO_PASS)


def _reasons(
    facts: Mapping[str, Sequence[Mapping[str, Any]]], codes: Iterable[str], needed_for: Mapping[str, tuple[str, ...]]
) -> dict[str, str]:
    found: dict[str, dict[str, list[str]]] = {}
    for fact in SAID:
        for collector in sorted({str(name) for one in facts.get(fact, []) for name in one.get("collectors", ())}):
            for code in needed_for.get(collector, ()):
                found.setdefault(code, {}).setdefault(fact, []).append(collector)
    return {
        code: "; ".join(_said(fact, collectors) for fact, collectors in found[code].items())
        for code in codes
        if code in found
    }


SAID: Final = {
    "without": "the {} switched off (--without)",
    "left_out": (
        "of a job on a device only phases and steps are recorded without the native helper, which `dsprof build` makes"
    ),
}
"""Fact -> why its collectors were not there."""


def _said(fact: str, collectors: Sequence[str]) -> str:
    what = "collector {} was" if len(collectors) == 1 else "collectors {} were"
    return SAID[fact].format(what.format(", ".join(collectors)))
