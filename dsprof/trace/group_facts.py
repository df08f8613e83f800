"""Process groups as ranks state them.

Each rank states the members of each of its groups, so in a job of R ranks a list of R numbers is stated R times. It is
stored and sent as ranges, and run.json holds it once.

    {"fact": "group", "name": "0", "ranks": [0, 1, 2, 3, 8, 10]}
    {"fact": "group", "name": "0", "ranges": [[0, 4, 1], [8, 12, 2]]}
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from dsprof.run import MOST_RANKS

GROUP: Final = "group"
FEW: Final = 8
"""Members that are stated one by one."""

Facts = list[dict[str, Any]]


def pack(facts: Iterable[dict[str, Any]]) -> Facts:
    """The same facts, the members of large process groups as ranges: first, end and step of each."""
    return [_packed(fact) if fact.get("fact") == GROUP else fact for fact in facts]


def _packed(fact: dict[str, Any]) -> dict[str, Any]:
    ranks = fact.get("ranks")
    if not isinstance(ranks, list) or len(ranks) <= FEW or not all(type(rank) is int for rank in ranks):
        return fact
    return {name: value for name, value in fact.items() if name != "ranks"} | {"ranges": _ranges(ranks)}


def _ranges(ranks: list[int]) -> list[list[int]]:
    found: list[list[int]] = []
    at = 0
    while at < len(ranks):
        step = ranks[at + 1] - ranks[at] if at + 1 < len(ranks) else 1
        end = at + 1
        while end < len(ranks) and ranks[end] - ranks[end - 1] == step:
            end += 1
        if step <= 0:  # no range goes down or stands still
            step, end = 1, at + 1
        found.append([ranks[at], ranks[end - 1] + step, step])
        at = end
    return found


class StatedGroups:
    """Leaves out what of a group was stated last in the same words. Members are listed one by one again."""

    def __init__(self) -> None:
        self._last: dict[str, dict[str, Any]] = {}
        """Name of a group -> what was stated of it last, but for who stated it."""

    def new(self, facts: Iterable[dict[str, Any]]) -> Facts:
        """Those of a rank's facts that are no repetition."""
        found = []
        for fact in facts:
            if fact.get("fact") != GROUP:
                found.append(fact)
                continue
            stated = {name: value for name, value in fact.items() if name != "rank"}
            if self._last.get(str(fact.get("name"))) != stated:
                self._last[str(fact.get("name"))] = stated
                found.append(_unpacked(fact))
        return found


def _unpacked(fact: dict[str, Any]) -> dict[str, Any]:
    if "ranges" not in fact:
        return fact
    rest = {name: value for name, value in fact.items() if name != "ranges"}
    members = _members(fact["ranges"])
    return rest if members is None else {**rest, "ranks": members}


def _members(ranges: Any) -> list[int] | None:
    """None where that is no list of ranges, or one of more ranks than any job has."""
    if not isinstance(ranges, list):
        return None
    found: list[int] = []
    for one in ranges:
        if not isinstance(one, list) or len(one) != 3 or not all(type(number) is int for number in one) or one[2] <= 0:
            return None
        members = range(*one)
        if members and not 0 <= members[0] <= members[-1] <= MOST_RANKS:
            return None
        if len(found) + len(members) > MOST_RANKS + 1:
            return None
        found += members
    return found
