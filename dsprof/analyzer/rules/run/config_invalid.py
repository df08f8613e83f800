"""config.invalid: keys of the run's configuration that do nothing: at the wrong place, misspelt, or of another mode.

DeepSpeed passes over keys that it does not know, so what somebody meant to switch on stays off. The checks are those of
`dsprof doctor`; a key that they do not know, and that is like none they know, is left alone: it may be of a newer
version.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from ...finding import NOTHING, Evidence, Finding, Fix, Where
from ...study import Study
from ...text import count
from ..base import NotConcerned, NotJudged
from ..rule import Found, Look, Rule

MISPLACED: Final = re.compile(r"not a key here but of (?P<section>[\w.]+|the top); move it there")
ELSEWHERE: Final = re.compile(r"unknown key; (?P<key>\w+) is of (?P<section>[\w.]+|the top); move it there")
MISSPELT: Final = re.compile(r"unknown key; the nearest is (?P<key>\w+)")
IDLE: Final = "has no effect; "


@dataclass(frozen=True)
class Idle:
    """key: of the configuration, with its sections; why: it does nothing, in words; patch: a JSON Patch that mends it,
    whose last change is that of the key."""

    key: str
    why: str
    patch: tuple[dict[str, Any], ...]


def invalid(study: Study) -> Found:
    """One finding for each configuration that has such keys."""
    facts = study.facts.get("config", [])
    if not facts:
        raise NotConcerned
    contents = {str(fact.get("content")): fact for fact in facts}
    found = []
    for fact in contents.values():
        if fact.get("content") is None:
            raise NotJudged("the configuration was too long to be captured, or could not be read")
        idle = list(idle_keys(fact["content"], study.run.world_size or len(study.ranks)))
        if idle:
            found.append(_finding(fact, idle))
    return found


def idle_keys(content: Mapping[str, Any], world_size: int) -> Iterator[Idle]:
    """The keys that do nothing."""
    from dsprof.engine.config import Config, ConfigError, known_paths, load  # pydantic takes long to import

    try:
        remarks: list[str] = load(content, world_size=world_size).warnings
    except ConfigError as error:
        remarks = [*error.problems, *error.warnings]
    _, of_deepspeed = known_paths(Config)
    made: set[str] = set()
    for remark in remarks:
        key, _, says = remark.partition(": ")
        if key in of_deepspeed:  # which DeepSpeed has, and only this engine has not
            continue
        unknown = _unknown(key, says, content, made)
        if unknown is not None:
            yield unknown
        elif says.startswith(IDLE) and not _left_open(content, key):
            yield Idle(key, says.removeprefix(IDLE), ({"op": "remove", "path": _pointer(key)},))


def _left_open(content: Mapping[str, Any], key: str) -> bool:
    """Whether a value beside a key, or in it, is "auto", which is filled in before DeepSpeed reads it."""
    sections = (_under(content, key), _under(content, key.rpartition(".")[0]))
    return any("auto" in section.values() for section in sections if isinstance(section, Mapping))


def _under(content: Mapping[str, Any], key: str) -> Any:
    """What is under a key, with its sections; None: nothing."""
    found: Any = content
    for name in key.split(".") if key else ():
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _unknown(key: str, says: str, content: Mapping[str, Any], made: set[str]) -> Idle | None:
    """A key that is like one that there is; None: `says` is about something else.

    made: sections that patches so far make, to which this one may add.
    """
    misplaced, misspelt, elsewhere = (form.fullmatch(says) for form in (MISPLACED, MISSPELT, ELSEWHERE))
    if misplaced is not None:
        place, name = misplaced["section"], key.rpartition(".")[2]
        why = f"it belongs {_into(place)}, and is passed over where it is"
    elif misspelt is not None:
        place, name = key.rpartition(".")[0] or "the top", misspelt["key"]
        why = f"there is no such key; did you mean {name}?"
    elif elsewhere is not None:
        place, name = elsewhere["section"], elsewhere["key"]
        why = f"there is no such key; {name} belongs {_into(place)}"
    else:
        return None
    to = name if place == "the top" else f"{place}.{name}"
    if misspelt is not None and _under(content, to) is not None:
        return None  # it is there as it is spelt: this one is another, perhaps of a newer version
    if _under(content, to) is not None:  # to move it there would overwrite what is heeded
        return Idle(key, f"{why}; {to} is given too", ({"op": "remove", "path": _pointer(key)},))
    move = {"op": "move", "from": _pointer(key), "path": _pointer(to)}
    if place == "the top" or place in made or _under(content, place) is not None:
        return Idle(key, why, (move,))
    made.add(place)
    return Idle(key, why, ({"op": "add", "path": _pointer(place), "value": {}}, move))


def _into(section: str) -> str:
    return "to the top of the configuration" if section == "the top" else f"into {section}"


def _pointer(key: str) -> str:
    return "/" + key.replace(".", "/")


def _finding(fact: Mapping[str, Any], idle: list[Idle]) -> Finding:
    where = str(fact.get("path") or fact.get("site") or "")
    named = f" of {where.rpartition('/')[2]}" if where else ""
    first = idle[0]
    more = f", and {count(len(idle) - 1, 'other key')} like it" if len(idle) > 1 else ""
    title = f"{first.key}{named} does nothing: {first.why}{more}"
    evidence = tuple(Evidence(one.key, one.why, "") for one in idle)
    fixes = tuple(Fix("config", _typed(one), one.patch) for one in idle)
    return Finding("config.invalid", title, "info", Where(), evidence, NOTHING, fixes)


def _typed(one: Idle) -> str:
    change = one.patch[-1]
    if change["op"] == "remove":
        return f"remove {one.key}"
    return f"write {change['path'].strip('/').replace('/', '.')} in the place of {one.key}"


RULES = (Rule("config.invalid", "keys of the configuration that do nothing", looks=(Look(invalid),), place=300),)
