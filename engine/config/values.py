"""What pydantic finds wrong with values, in our words: which key, what is wrong, and what to write instead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Final, Literal, TypeVar, Union, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from dsprof.words import either, joined

from .model import Complaint, Section, as_section, shown

T = TypeVar("T", bound=Section)

KINDS: Final[dict[Any, str]] = {
    bool: "true or false", int: "a whole number", float: "a number", str: "a string", Path: "a path",
}  # fmt: skip
"""Type of a field -> what it is called."""

BOUNDS: Final = {
    "gt": "above", "ge": "at least", "lt": "below", "le": "at most", "multiple_of": "a multiple of",
}  # fmt: skip
"""Attribute of a field's metadata -> what it is called."""


def complaints(
    error: ValidationError, model: type[Section], raw: Mapping[str, Any]
) -> Iterator[tuple[tuple[str, ...], str, bool]]:
    """What pydantic complains of, a value at a time: the keys that lead to it, what is wrong, and whether it is that
    there is none."""
    for detail in error.errors(include_url=False):
        keys, field, value = _locate(detail["loc"], model, raw)
        yield keys, _says(detail, field, value), detail["type"] == "missing"


def checked(model: type[T], values: Mapping[str, Any], where: str) -> T:
    """The section with these values, which `where` leads to. Raises ValueError for those that it cannot have."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        wrong = [f"{joined(where, *keys)}: {says}" for keys, says, _ in complaints(error, model, values)]
        raise ValueError("\n".join(wrong)) from None


def _locate(
    loc: tuple[int | str, ...], model: type[Section], raw: Any
) -> tuple[tuple[str, ...], FieldInfo | None, Any]:
    """The keys that lead to the value, its field, and the value as it was written; places in a list are left out."""
    keys: list[str] = []
    field: FieldInfo | None = None
    section: type[Section] | None = model
    for part in map(str, loc):
        if section is None or part not in section.model_fields:
            break
        neighbours = raw if isinstance(raw, Mapping) else {}
        keys.append(part)
        field = section.model_fields[part]
        section = section.section_of(part, neighbours)
        raw = neighbours.get(part)
    return tuple(keys), field, raw


def _says(detail: Mapping[str, Any], field: FieldInfo | None, value: Any) -> str:
    cause = detail.get("ctx", {}).get("error")
    if isinstance(cause, Complaint):
        return str(cause)
    if detail["type"] == "missing":
        return f"missing, and it has no default; write {wanted(field)}"
    if value == "auto":
        return f'"auto" is for Hugging Face\'s Trainer to fill in; write {wanted(field)}{_default(field)}'
    return f"{shown(value)} is not {wanted(field)}{_default(field)}"


def wanted(field: FieldInfo | None) -> str:
    """What a key takes, such as `a whole number above 0`."""
    if field is None:
        return "an object of keys and values"
    bounds = [
        f"{words} {shown(getattr(part, name))}"
        for part in field.metadata
        for name, words in BOUNDS.items()
        if getattr(part, name, None) is not None
    ]
    example = f", such as {shown(field.examples[0])}" if field.examples else ""
    return " ".join(filter(None, (_kind(field.annotation), " and ".join(bounds)))) + example


def _kind(annotation: Any) -> str:
    origin, arms = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kind(arms[0])
    if origin is Literal:
        return either(map(shown, arms))
    if origin in (Union, UnionType):
        arms = tuple(arm for arm in arms if arm is not type(None))
        if len(arms) > 1 and str in arms:
            return "a string, or a list of whole numbers"
        if len(arms) > 1 and get_origin(arms[0]) is Literal:
            listed = "strings" if str in get_args(arms[1]) else "numbers"
            return f"{', '.join(map(shown, get_args(arms[0])))} or a list of {listed}"
        return _kind(arms[0]) if len(arms) == 1 else "a number at least 0, or a list with one for each parameter group"
    if origin is dict:
        return "an object of strings"
    if origin is tuple:
        return "two numbers, each at least 0 and below 1" if float in arms else "a list of strings"
    return "an object of keys and values" if as_section(annotation) else KINDS[annotation]


def _default(field: FieldInfo | None) -> str:
    if field is None or field.is_required() or field.default is None or as_section(field.annotation):
        return ""
    return f"; the default is {shown(field.default)}"
