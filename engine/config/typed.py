"""What `optimizer` and `scheduler` have in common: a type, and parameters, a model for each type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field, SerializeAsAny, ValidationInfo, field_validator

from .keys import nearest
from .model import Complaint, Params, Section, SectionType, shown

ParamsTypes = Mapping[str, type[Params]]
"""Type, in the usual spelling -> its parameters."""


class TypedSection(Section):
    """A section whose `params` depend on its `type`; like DeepSpeed, we do not mind the type's case."""

    types: ClassVar[ParamsTypes] = {}
    unknown: ClassVar[str] = ""
    """What is said of another type, with places for the `types` and for the `nearest` of them."""

    type: str
    params: SerializeAsAny[Params] = Field(default={}, validate_default=True)

    @classmethod
    def section_of(cls, key: str, neighbours: Mapping[Any, Any]) -> SectionType | None:
        return cls.types.get(str(cls._in_usual_spelling(neighbours.get("type")))) if key == "params" else None

    @classmethod
    def sections_under(cls, key: str) -> tuple[SectionType, ...]:
        return tuple(cls.types.values()) if key == "params" else ()

    @field_validator("type", mode="before")
    @classmethod
    def _in_usual_spelling(cls, value: object) -> object:
        return next((name for name in cls.types if name.lower() == str(value).lower()), value)

    @field_validator("type")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in cls.types:
            near = nearest(value, cls.types)
            hint = "" if near is None else f" the nearest is {near};"
            raise Complaint(f"{shown(value)} {cls.unknown.format(types=', '.join(cls.types), nearest=hint)}")
        return value

    @field_validator("params", mode="before")
    @classmethod
    def _of_that_type(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, Mapping):
            return value
        return cls.types[info.data["type"]].model_validate(value) if "type" in info.data else Params()
