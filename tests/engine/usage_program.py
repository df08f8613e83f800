"""Programs of the random tester: one configuration, and what a script does, line by line; readable, and read again."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from pairwise import Pair, every_pair, pairs

SAMPLES: Final = 2
"""Of a micro-batch, until a script changes that."""
RATE: Final = 2.0**-3
MOMENTUM: Final = 0.5
LATE_RATE: Final = 2.0**-4
"""Of the layer that the optimizer gets later."""


class Configuration(NamedTuple):
    """What an engine is made with."""

    layout: str
    """`whole`, or the schedule of a pipeline of two stages."""
    stage: int
    accumulate: int
    """Micro-batches a step."""
    precision: str
    optimizer: str
    """Whose it is: the `config`'s or the `script`'s."""
    tied: str
    buckets: str
    """Of gradients, parameters and the optimizer's tiles: `small` ones hold a few dozen elements."""
    keep: str
    """What stage 3 keeps whole from one use to the next, and fetches ahead: `all` or `none`."""
    replicas: int
    """Data-parallel ranks."""

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self._asdict().items())

    @property
    def pipeline(self) -> bool:
        return self.layout != "whole"

    @property
    def world_size(self) -> int:
        return self.replicas * (2 if self.pipeline else 1)


WHOLE: Final[Mapping[str, Sequence[Any]]] = {
    "layout": ("whole",), "stage": (0, 1, 2, 3), "accumulate": (1, 3), "precision": ("fp32", "bf16"),
    "optimizer": ("config", "script"), "tied": ("yes", "no"), "buckets": ("small", "large"), "keep": ("all", "none"),
    "replicas": (2,),
}  # fmt: skip
PIPELINE: Final[Mapping[str, Sequence[Any]]] = {
    **WHOLE, "layout": ("1f1b", "gpipe", "interleaved", "zero-bubble"), "replicas": (1, 2),
}  # fmt: skip


def covering(axes: Mapping[str, Sequence[Any]]) -> list[Configuration]:
    """Configurations in which every two values of two of the `axes` are together at least once; the same each time."""
    missing = every_pair(list(axes.values()))
    chosen: list[Configuration] = []
    every = [Configuration(*values) for values in itertools.product(*axes.values())]
    random.Random(1).shuffle(every)
    found: dict[Configuration, set[Pair]] = {each: pairs(each) for each in every}
    while missing:
        best = max(every, key=lambda each: len(found[each] & missing))
        chosen.append(best)
        missing -= found[best]
    return chosen


@dataclass(frozen=True)
class Action:
    """One line of a program: a name, and what it is done with."""

    name: str
    settings: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return " ".join([self.name, *(f"{key}={value}" for key, value in self.settings)])

    def get(self, key: str, default: str = "") -> str:
        return dict(self.settings).get(key, default)


@dataclass(frozen=True)
class Program:
    """One engine, and what is done with it on all ranks alike."""

    configuration: Configuration
    actions: tuple[Action, ...]

    def __str__(self) -> str:
        return "\n".join([str(self.configuration), *map(str, self.actions)])


def action(name: str, **settings: object) -> Action:
    return Action(name, tuple((key, str(value)) for key, value in settings.items()))


def parsed(text: str) -> Program:
    """The program that prints as `text`: a line of configuration, then an action a line; after # is a comment."""
    lines = [line.split() for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]
    first, *rest = lines
    values = dict(word.split("=") for word in first)
    numbers = {name: int(values[name]) for name in ("stage", "accumulate", "replicas")}
    configuration = Configuration(**{**values, **numbers})  # type: ignore[arg-type]
    return Program(
        configuration, tuple(Action(name, tuple(_pair(word) for word in words)) for name, *words in rest)
    )  # fmt: skip


def _pair(word: str) -> tuple[str, str]:
    key, _, value = word.partition("=")
    return key, value


def shrunk(program: Program, fails: Callable[[Program], bool], tries: int = 60) -> Program:
    """`program` without the actions that it `fails` without, after at most so many `tries`."""
    size = max(1, len(program.actions) // 2)
    while tries > 0:
        at, before = 0, program
        while at < len(program.actions) and tries > 0:
            shorter = Program(program.configuration, program.actions[:at] + program.actions[at + size :])
            tries -= 1
            if fails(shorter):
                program = shorter
            else:
                at += size
        if size == 1 and program == before:
            break
        size = max(1, size // 2)
    return program
