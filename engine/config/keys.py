"""The first look at a configuration: which keys are there; and what pydantic finds wrong with values, in our words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Final, Literal, TypeVar, Union, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from dsprof.words import either, joined, nearest, similarity

from .deepspeed_keys import FOREIGN, RENAMED, REPLACED, Foreign
from .model import Complaint, Section, as_section, sections, shown

MISPLACED_ABOVE: Final = 0.8
"""How like a misspelt key a neighbour must be to be named although another section has that very key."""
FEW: Final = 12
"""Keys that fit into a line."""


@dataclass
class Notes:
    """What there is to say, in the order in which it was found. Each begins with the key it is about."""

    problems: list[str] = field(default_factory=list)
    """Errors."""
    warnings: list[str] = field(default_factory=list)
    """What is taken, but not as it stands."""


def known_keys(raw: Mapping[Any, Any], root: type[Section], notes: Notes) -> dict[str, Any]:
    """The keys of `raw` that `root` and its sections have, under today's names; about all others there is a note."""
    return _Look(root, notes).at(raw, root, "")


def known_paths(root: type[Section]) -> tuple[set[str], set[str]]:
    """Every key there is, with the sections that lead to it: those of `root`, and those that DeepSpeed alone has, below
    which there may be more."""
    own = {joined(where, key) for where, section in sections(root) for key in section.model_fields}
    return own, {joined(where, key) for where, keys in FOREIGN.items() for key in keys}


@dataclass(frozen=True)
class _Look:
    root: type[Section]
    notes: Notes

    def at(self, raw: Mapping[Any, Any], model: type[Section], where: str) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, value in self._today(raw, model, where).items():
            path = joined(where, key)
            if key in model.model_fields:
                section = model.section_of(key, raw)
                values[key] = self.at(value, section, path) if section and isinstance(value, Mapping) else value
            elif key in FOREIGN.get(where, {}):
                self._note_foreign(path, value, FOREIGN[where][key])
            else:
                self.notes.problems.append(f"{path}: {self._unknown(key, model, where)}")
        return values

    def _today(self, raw: Mapping[Any, Any], model: type[Section], where: str) -> dict[str, Any]:
        """`raw` with today's names in place of old ones."""
        values: dict[str, Any] = {}
        for key, value in raw.items():
            path = joined(where, key)
            today = RENAMED.get(where, {}).get(key)
            replacement = REPLACED.get(where, {}).get(key)
            if today is not None and today in raw:
                self.notes.problems.append(f"{path}: is another name of {today}, which is given too; remove it")
            elif today is not None:
                self.notes.warnings.append(f"{path}: is another name of {today}; write that")
                values[today] = value
            elif replacement is not None:
                if self._switched_on(path, value, replacement, raw):
                    values[replacement] = {"device": "cpu"}
            elif path == "zero_optimization" and isinstance(value, bool):
                self.notes.warnings.append(f'{path}: is an old way to write {{"stage": {int(value)}}}; write that')
                values[path] = {"stage": int(value)}
            else:
                values[str(key)] = value
        return values

    def _switched_on(self, path: str, value: object, replacement: str, raw: Mapping[Any, Any]) -> bool:
        """Whether an old switch asks for the section that has taken its place."""
        means = f'"{replacement}": {{"device": "cpu"}}'
        if not isinstance(value, bool):
            self.notes.problems.append(f"{path}: {shown(value)} is not true or false; write {means} instead")
        elif not value:
            self.notes.warnings.append(f"{path}: is an old way to write {means}, and is off; remove it")
        elif replacement in raw:
            self.notes.problems.append(f"{path}: means {means}, and {replacement} is given too; remove {path}")
        else:
            self.notes.warnings.append(f"{path}: is an old way to write {means}; write that")
            return True
        return False

    def _note_foreign(self, path: str, value: object, foreign: Foreign) -> None:
        if not foreign.refused:
            self.notes.warnings.append(f"{path}: has no effect; {foreign.says}")
        elif foreign.is_off(value):
            self.notes.warnings.append(f"{path}: has no effect; it is off, and this engine does not have it")
        else:
            self.notes.problems.append(f"{path}: DeepSpeed's key, which this engine does not have; {foreign.says}")

    def _unknown(self, key: str, model: type[Section], where: str) -> str:
        foreign = FOREIGN.get(where, {})
        near, theirs = nearest(key, model.model_fields, meanings=ALIASES), nearest(key, foreign)
        elsewhere = self._sections_with(key)
        if elsewhere and (near is None or similarity(key, near) < MISPLACED_ABOVE):
            return f"not a key here but of {' and of '.join(elsewhere)}; move it there"
        if theirs is not None and (
            near is None or similarity(key, theirs) > max(similarity(key, near), MISPLACED_ABOVE)
        ):
            return f"unknown key; the nearest is {theirs}, which DeepSpeed has and this engine has not"
        if near is not None:
            return f"unknown key; the nearest is {near}"
        meant = ALIASES.get(key.lower(), "")
        if elsewhere := self._sections_with(meant):
            return f"unknown key; {meant} is of {' and of '.join(elsewhere)}; move it there"
        if len(model.model_fields) <= FEW:
            return f"unknown key, and none here is like it; the keys are {', '.join(model.model_fields)}"
        return "unknown key, and none here is like it; docs/engine-config.md has all keys"

    def _sections_with(self, key: str) -> list[str]:
        """Sections that have a key of this name, unless half of all sections do."""
        found = [path or "the top" for path, section in sections(self.root) if key in section.model_fields]
        return [] if key in ("enabled", "type", "params") else list(dict.fromkeys(found))


ALIASES: Final = {
    "decay": "weight_decay",
    "epsilon": "eps",
    "grad_accum_steps": "gradient_accumulation_steps",
    "grad_clip": "gradient_clipping",
    "learning_rate": "lr",
    "l2": "weight_decay",
    "max_grad_norm": "gradient_clipping",
    "per_device_train_batch_size": "train_micro_batch_size_per_gpu",
    "wd": "weight_decay",
    "weightdecay": "weight_decay",
}
"""Word, in lower case -> the key of that meaning, however unlike."""


# --- What pydantic finds wrong with values, in our words: which key, what is wrong, and what to write instead


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
