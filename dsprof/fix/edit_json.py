"""Another value for a key of a JSON text, which otherwise stays as it is, with its order, spaces and comments."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Final

_TOKEN: Final = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\]:,]|//[^\n]*|#[^\n]*|/\*.*?\*/|[^\s{}\[\]:,"]+', re.DOTALL)
_COMMENT: Final = ("//", "#", "/*")
_BOM: Final = "\ufeff"


class CannotEdit(ValueError):
    """The text is not such that the change can be made; the message says why."""


class _Token:
    def __init__(self, found: re.Match[str]) -> None:
        self.text, self.start, self.end = found.group(), found.start(), found.end()


class _Object:
    """An object of the text: its members' keys with the spans of their values, and where its braces are."""

    def __init__(self, start: int) -> None:
        self.start, self.end = start, start
        self.members: dict[str, tuple[int, int, _Object | None]] = {}
        self.first_key: int | None = None
        self.last_end: int | None = None


def set_value(text: str, keys: Sequence[str], value: Any) -> str:
    """`text` with `value` under `keys`, sections on the way made where they are not there. Raises CannotEdit."""
    if text.startswith(_BOM):
        return _BOM + set_value(text[1:], keys, value)
    edited = _set(text, keys, value)
    try:
        before, after = json.loads(text), json.loads(edited)
    except ValueError:  # with comments
        return edited
    place = before
    for key in keys[:-1]:
        place = place.setdefault(key, {})
    place[keys[-1]] = value
    if before != after:
        raise CannotEdit("it is written in a way that cannot be edited")
    return edited


def _set(text: str, keys: Sequence[str], value: Any) -> str:
    place = _parse(text)
    for depth, key in enumerate(keys[:-1]):
        found = place.members.get(key)
        if found is None:
            inner: Any = value
            for name in reversed(keys[depth + 1 :]):
                inner = {name: inner}
            return _insert(text, place, key, inner)
        if found[2] is None:
            raise CannotEdit(f"{'.'.join(keys[: depth + 1])} is no section")
        place = found[2]
    found = place.members.get(keys[-1])
    if found is None:
        return _insert(text, place, keys[-1], value)
    return text[: found[0]] + json.dumps(value) + text[found[1] :]


def _insert(text: str, place: _Object, key: str, value: Any) -> str:
    """A new member at the end of an object, on a line of its own where the others are."""
    member = f"{json.dumps(key)}: {json.dumps(value)}"
    if place.last_end is None or place.first_key is None:
        return text[: place.start + 1] + member + text[place.end :]
    before = text[: place.first_key]
    line = before.rpartition("\n")[2]
    newline = "\r\n" if before.endswith(f"\r\n{line}") else "\n"
    gap = newline + line if "\n" in before and not line.strip() else " "
    return f"{text[: place.last_end]},{gap}{member}{text[place.last_end :]}"


def _parse(text: str) -> _Object:
    tokens = [token for found in _TOKEN.finditer(text) if not (token := _Token(found)).text.startswith(_COMMENT)]
    if not tokens or tokens[0].text != "{":
        raise CannotEdit("it is no JSON object")
    try:
        found, after = _object(tokens, 0)
    except (IndexError, ValueError):
        raise CannotEdit("it is no JSON that can be read") from None
    if after != len(tokens):
        raise CannotEdit("something follows its JSON object")
    return found


def _object(tokens: list[_Token], at: int) -> tuple[_Object, int]:
    """The object that begins at a token, and the place of the token after it."""
    found = _Object(tokens[at].start)
    at += 1
    while tokens[at].text != "}":
        key = tokens[at]
        if tokens[at + 1].text != ":":
            raise ValueError
        found.first_key = key.start if found.first_key is None else found.first_key
        start = tokens[at + 2].start
        inner, end, at = _value(tokens, at + 2)
        found.members[json.loads(key.text)] = (start, end, inner)
        found.last_end = end
        if tokens[at].text == ",":
            at += 1
    found.end = tokens[at].start
    return found, at + 1


def _value(tokens: list[_Token], at: int) -> tuple[_Object | None, int, int]:
    """A value: the object that it is, if it is one, where it ends, and the place of the token after it."""
    if tokens[at].text == "{":
        inner, after = _object(tokens, at)
        return inner, inner.end + 1, after
    if tokens[at].text == "[":
        depth = 0
        while True:
            depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(tokens[at].text, 0)
            at += 1
            if depth == 0:
                return None, tokens[at - 1].end, at
    json.loads(tokens[at].text)
    return None, tokens[at].end, at + 1
