"""All knobs, and how `--set KEY=VALUE` is read and written."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from dsprof.redact import redact_setting
from dsprof.words import did_you_mean

from . import compilation, ddp, fsdp2, host, json_config, loader, optimizer, pipelining, trainers
from .knob import Knob, KnobError

KNOBS: Final[tuple[Knob, ...]] = (
    *ddp.KNOBS,
    *fsdp2.KNOBS,
    *loader.KNOBS,
    *pipelining.KNOBS,
    *optimizer.KNOBS,
    *compilation.KNOBS,
    *host.KNOBS,
    *trainers.KNOBS,
)
"""All that have a name here. Beside them there are the keys of JSON configurations (`json_config.find`)."""
_BY_KEY: Final = {knob.key: knob for knob in KNOBS}
FACT_OF: Final = {"ddp": "ddp", "fsdp2": "fsdp", "loader": "dataloader", "optimizer": "optimizer"}
"""What a key begins with -> the fact that tells of what takes it, and where it is made."""
OWN_VARIABLES: Final = "DSPROF"
"""What variables begin with that steer dsprof itself."""


def find(key: str) -> Knob:
    """The knob of a key. Raises KnobError, with the nearest there is."""
    first, _, name = key.partition(".")
    knob = _BY_KEY.get(key) or (_BY_KEY.get(f"{first}.*") if name else None)
    if knob is not None:
        if first == "env" and name.startswith(OWN_VARIABLES):
            raise KnobError(f"{key}: that steers dsprof; give `dsprof run` the flag for it")
        return knob
    found = json_config.find(key)
    if found is not None:
        return found
    elsewhere = [one for one in KNOBS if name and one.key.partition(".")[2] == name and "*" not in one.key]
    if elsewhere:
        raise KnobError(f"{key}: {first} has no such knob; {elsewhere[0].key} is one of {elsewhere[0].of}")
    names = [*(one.key for one in KNOBS if "*" not in one.key), *json_config.known_keys()]
    of_framework = ", ".join(one.partition(".")[2] for one in names if one.startswith(f"{first}."))
    there = f"; {first} has {of_framework}" if of_framework else "; `dsprof knobs` lists them"
    raise KnobError(f"{key}: no knob of this name{did_you_mean(key, names, otherwise=there, show=str)}")


@dataclass(frozen=True)
class _Exclusive:
    """Two knobs that a job cannot have turned so at once. `many`: the second has any value above 1."""

    one: str
    other: str
    why: str
    many: bool = False

    def clash(self, values: Mapping[str, Any]) -> bool:
        other = values.get(self.other)
        return values.get(self.one) is True and (other is True or (self.many and other not in (None, 1)))


EXCLUSIVE: Final = (
    _Exclusive("optimizer.fused", "optimizer.foreach", "torch refuses an optimizer that is both"),
    _Exclusive("bf16.enabled", "fp16.enabled", "a model trains in one of them"),
    _Exclusive("ddp.static_graph", "ddp.accumulate", "a static graph reduces in every backward", many=True),
)


def need_compatible(values: Mapping[str, Any]) -> None:
    """Raises KnobError where two settings contradict each other, or one is a section that has the other in it."""
    for key in values:
        inside = next((other for other in values if other.startswith(f"{key}.")), None)
        if inside is not None:
            raise KnobError(f"--set {key} and --set {inside}: the second is in the first; set one of them")
    for pair in EXCLUSIVE:
        if pair.clash(values):
            raise KnobError(f"--set {pair.one} and --set {pair.other}: {pair.why}; set one of them")


def parse_settings(words: Iterable[str]) -> dict[str, Any]:
    """Values by key, from words KEY=VALUE. Raises KnobError."""
    values: dict[str, Any] = {}
    for word in words:
        key, equals, text = (part.strip() for part in word.partition("="))
        if not equals or not key or not text:
            raise KnobError(f"--set {word}: write KEY=VALUE, such as ddp.bucket_cap_mb=50")
        value = find(key).read(text, key)
        if key in values and values[key] != value:
            both = (redact_setting(key, str(one)) for one in (values[key], value))
            raise KnobError(f"--set {key}: given twice, as {' and as '.join(both)}")
        values[key] = str(text) if key.startswith("env.") else value
    need_compatible(values)
    return values


def typed(key: str, value: Any) -> str:
    """A knob's value as it is typed, so that it is read as the same again."""
    if not isinstance(value, str):
        return json.dumps(value)
    try:
        same = find(key).read(value, key) == value or key.startswith("env.")
    except KnobError:
        same = True
    return value if same else json.dumps(value)


def flags(knobs: Iterable[tuple[str, Any]]) -> list[str]:
    """Knobs as they are typed: `--set`, `ddp.bucket_cap_mb=50`, ..."""
    return [word for key, value in knobs for word in ("--set", f"{key}={typed(key, value)}")]
