"""One key of a configuration by itself: what it does, what it takes, and whether it takes a value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from .config import Config
from .model import Section, as_section
from .values import complaints, wanted

OPEN: Final = ("optimizer.type", "scheduler.type")
"""Keys that DeepSpeed takes more values of than this engine does."""


def field_of(path: str) -> FieldInfo | None:
    """The field of a key, such as `zero_optimization.stage`; None for one that only DeepSpeed has, and in sections
    whose keys depend on a type."""
    model: type[Section] | None = Config
    field: FieldInfo | None = None
    for key in path.split("."):
        if model is None or key not in model.model_fields:
            return None
        field = model.model_fields[key]
        model = as_section(field.annotation)
    return field


def key_says(path: str) -> str:
    """What a key does, as its documentation has it; empty where it is not one of `Config`."""
    field = field_of(path)
    return "" if field is None else " ".join((field.description or "").split())


def key_takes(path: str) -> str:
    """What a key takes, in words, such as `a whole number above 0`."""
    field = field_of(path)
    return "a JSON value" if field is None else wanted(field)


def key_can_be(path: str, value: Any) -> bool:
    """Whether a key takes a value.

    What is not known here is taken: keys that only DeepSpeed has, the keys of a section that is given whole, names of
    optimizers and schedules, `"auto"`, which Hugging Face's Trainer fills in, and null, which is a key's default.
    """
    field = field_of(path)
    if field is None or path in OPEN or value is None or value == "auto":
        return True
    if as_section(field.annotation) is not None:
        return isinstance(value, Mapping)
    keys = tuple(path.split("."))
    content: Any = value
    for key in reversed(keys):
        content = {key: content}
    try:
        Config.model_validate(content)
    except ValidationError as error:
        return all(found != keys for found, _, _ in complaints(error, Config, content))
    return True
