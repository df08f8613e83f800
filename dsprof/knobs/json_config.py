"""Any key of a JSON configuration of DeepSpeed or of dsprof's engine, such as zero_optimization.reduce_bucket_size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from dsprof.words import did_you_mean

from .knob import DIFFERS, Facts, Json, Knob, KnobError, Stated

_CONFIG: Final = "deepspeed.initialize or dsprof.engine.initialize"
OPEN: Final = ("optimizer.params", "scheduler.params")
"""Sections whose keys are those of the optimizer or the schedule."""


def known_keys() -> set[str]:
    """Every key of a configuration, with its sections: `zero_optimization.reduce_bucket_size`."""
    from dsprof.engine.config import Config, known_paths

    own, of_deepspeed = known_paths(Config)
    return own | of_deepspeed


def _is_open(key: str) -> bool:
    """Whether it lies in a section that may have any keys."""
    from dsprof.engine.config import Config, known_paths

    _, of_deepspeed = known_paths(Config)
    return key.startswith(tuple(f"{section}." for section in (*OPEN, *of_deepspeed)))


def find(key: str) -> Knob | None:
    """The knob of a key; None: there is no such key. Raises KnobError for one at the wrong place, and for an unknown
    one of a section that there is."""
    known = known_keys()
    if key in known or _is_open(key):
        return Knob(key, "a key of the JSON configuration", Json(), DIFFERS, _CONFIG, states=_states(key))
    section, _, last = key.rpartition(".")
    if section and section not in known:
        section = ""
    elsewhere = sorted(one for one in known if one.rpartition(".")[2] == last)
    if elsewhere and last:
        raise KnobError(f"{key}: no such key in a configuration; did you mean {elsewhere[0]}?")
    if section:
        hint = did_you_mean(key, [one for one in known if one.startswith(f"{section}.")], show=str)
        raise KnobError(f"{key}: the section {section} has no such key{hint}")
    return None


def of_config(facts: Facts) -> list[Knob]:
    """A knob for each key that the configurations of a run have."""
    contents = [fact.get("content") for fact in facts.get("config", ())]
    keys = dict.fromkeys(key for content in contents for key in _leaves(content))
    return [Knob(key, "a key of the JSON configuration", Json(), DIFFERS, _CONFIG, states=_states(key)) for key in keys]


def _leaves(content: Any, above: str = "") -> Iterator[str]:
    if isinstance(content, Mapping):
        for key, value in content.items():
            yield from _leaves(value, f"{above}.{key}" if above else str(key))
    elif above:
        yield above


def _states(key: str) -> Any:
    def states(facts: Facts) -> Iterator[Stated]:
        for fact in facts.get("config", ()):
            place: Any = fact.get("content")
            for part in key.split("."):
                place = place.get(part) if isinstance(place, Mapping) else None
            if place is not None:
                path = fact.get("path")
                where = f"{path}#/{key.replace('.', '/')}" if path else fact.get("site")
                yield Stated(place, where)

    return states
