"""What every section of the configuration is made of: a strict model, and the kinds of values in it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from decimal import Decimal, InvalidOperation
from numbers import Integral, Real
from types import UnionType
from typing import Annotated, Any, ClassVar, Final, Literal, Union, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializeAsAny,
    ValidationInfo,
    create_model,
    field_validator,
)

from dsprof.words import did_you_mean, joined

LARGEST: Final = 2**63 - 1
"""The largest whole number a key can have: also what DeepSpeed writes for "no limit"."""

TO_BE_SOLVED: Final[Any] = None
"""Default of a field that is never None once the configuration is loaded."""


class Complaint(ValueError):
    """A value that a key cannot have; the message says why and what to write instead."""


class Section(BaseModel):
    """Keys that stand together. Field names are DeepSpeed's; the docstring under a field is its documentation."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=())

    @classmethod
    def section_of(cls, key: str, neighbours: Mapping[Any, Any]) -> type[Section] | None:
        """The model of what stands under `key`, where that is a section; `neighbours` are this one's raw values."""
        return next(iter(cls.sections_under(key)), None)

    @classmethod
    def sections_under(cls, key: str) -> tuple[type[Section], ...]:
        """The models of what may stand under `key`: none where it takes a plain value."""
        field = cls.model_fields.get(key)
        section = None if field is None else as_section(field.annotation)
        return () if section is None else (section,)

    # DeepSpeed's `engine.config` is a dict, and so scripts read it.

    def __contains__(self, key: str) -> bool:
        return self.get(key) is not None

    def __getitem__(self, key: str) -> Any:
        if key not in self:
            raise KeyError(key)
        return getattr(self, key)

    def get(self, key: str, default: Any = None) -> Any:
        """The value of `key`, its default where the configuration has none; `default` if that is None too."""
        found = getattr(self, key) if key in type(self).model_fields else None
        return default if found is None else found


SectionType = type[Section]
"""For models with a key `type`, in which the name means that key."""


class Params(Section):
    """Parameters of an optimizer or of a schedule."""

    def arguments(self) -> dict[str, Any]:
        """The parameters as keyword arguments, with DeepSpeed's defaults; what is None is left out."""
        return self.model_dump(exclude_none=True)


class TorchParams(Params):
    """Parameters of one of torch's own: names are checked here, values by torch."""

    model_config = ConfigDict(use_attribute_docstrings=False)


def torch_params(**types: str) -> dict[str, type[TorchParams]]:
    """For each class of torch's a model with its parameters' names, none of them needed."""
    models = {}
    for type, names in types.items():
        fields: dict[str, Any] = dict.fromkeys(names.split(), (Any, None))
        models[type] = create_model(f"{type}Params", __base__=TorchParams, __module__=__name__, **fields)
    return models


ParamsTypes = Mapping[str, type[Params]]
"""Type, in the usual spelling -> its parameters."""


class TypedSection(Section):
    """A section whose `params` depend on its `type`; like DeepSpeed, we do not mind the type's case."""

    types: ClassVar[ParamsTypes] = {}
    unknown: ClassVar[str] = ""
    """What is said of another type, with a place for the `types`."""

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
            says = cls.unknown.format(types=", ".join(cls.types))
            raise Complaint(f"{shown(value)} {says}{did_you_mean(value, cls.types)}")
        return value

    @field_validator("params", mode="before")
    @classmethod
    def _of_that_type(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, Mapping):
            return value
        return cls.types[info.data["type"]].model_validate(value) if "type" in info.data else Params()


def sections(model: type[Section], where: str = "") -> Iterator[tuple[str, type[Section]]]:
    """Every section from `model` downwards with the keys that lead to it; those that may stand there, one by one."""
    yield where, model
    for key in model.model_fields:
        for section in model.sections_under(key):
            yield from sections(section, joined(where, key))


def as_section(annotation: Any) -> type[Section] | None:
    """The section that a field's type names, perhaps as one of a union with None."""
    if get_origin(annotation) in (Union, UnionType):
        found = [as_section(part) for part in get_args(annotation)]
        return next((section for section in found if section is not None), None)
    return annotation if isinstance(annotation, type) and issubclass(annotation, Section) else None


def shown(value: object) -> str:
    """A value as JSON writes it, shortened to what fits into a line."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:56]} ..."


def whole(value: object) -> int:
    """An integer, also when it is written 5e8 or "5e8", as bucket sizes are. Raises ValueError, or Complaint."""
    try:
        if isinstance(value, bool) or not isinstance(value, (str, Real)):
            raise ValueError
        number = Decimal(int(value) if isinstance(value, Integral) else value)  # type: ignore[arg-type]
    except (ValueError, InvalidOperation):
        raise ValueError("not a whole number") from None
    if number.is_finite() and not -LARGEST <= number <= LARGEST:  # before 1e999999999 is written out
        raise Complaint(f"{shown(value)} is too large; the largest number that can be written is {LARGEST}")
    if not number.is_finite() or number != number.to_integral_value():
        raise ValueError("not a whole number")
    return int(number)


def real(value: object) -> float:
    """A finite number, also when YAML or a template left it a string, as 1e-4 often is. Raises ValueError."""
    try:
        if isinstance(value, bool) or not isinstance(value, (str, Real)):
            raise ValueError
        number = float(value)
    except (ValueError, OverflowError):
        raise ValueError("not a number") from None
    if not math.isfinite(number):
        raise ValueError("not a finite number")
    return number


def fraction_pair(value: object) -> tuple[float, float]:
    """Two numbers, each at least 0 and below 1: Adam's betas. Raises ValueError."""
    if not isinstance(value, (list, tuple)) or len(value) != 2 or not all(0 <= real(beta) < 1 for beta in value):
        raise ValueError("not two such numbers")
    return real(value[0]), real(value[1])


def rates(value: object) -> float | tuple[float, ...]:
    """One number at least 0, or a list of them, one for each parameter group. Raises ValueError."""
    numbers = tuple(map(real, value)) if isinstance(value, (list, tuple)) else (real(value),)
    if not numbers or min(numbers) < 0:
        raise ValueError("not rates")
    return numbers if isinstance(value, (list, tuple)) else numbers[0]


def data_type(value: object) -> object:
    """One of the spellings DeepSpeed knows for a floating-point type, as fp32, fp16 or bf16."""
    spellings = {
        "fp32": ("float32", "float", "torch.float32"),
        "fp16": ("float16", "half", "torch.float16"),
        "bf16": ("bfloat16", "torch.bfloat16"),
    }
    text = str(value).lower()
    return next((name for name, others in spellings.items() if text in others), text if text in spellings else value)


Whole = Annotated[int, BeforeValidator(whole)]
Number = Annotated[float, BeforeValidator(real)]
Betas = Annotated[tuple[float, float], BeforeValidator(fraction_pair)]
Rates = Annotated[float | tuple[float, ...], BeforeValidator(rates)]
DataType = Annotated[Literal["fp32", "fp16", "bf16"], BeforeValidator(data_type)]
