"""`@alive(...)`: the configuration's keys that a test proves alive, and which tests do.

Such a test runs the engine with two values of a key and asserts a difference in what runs. `test_config_coverage.py`
holds the list of them against the configuration's models. A key is written as in JSON, `zero_optimization.stage`; the
parameters of optimizers and schedules say of which, `optimizer.params[AdamW].lr`.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from dsprof.engine.config import Config
from dsprof.engine.config.model import Params, sections
from dsprof.words import joined

Test = TypeVar("Test", bound=Callable[..., Any])


def alive(*keys: str) -> Callable[[Test], Test]:
    """The decorated test sees these keys take effect."""

    def mark(test: Test) -> Test:
        vars(test)["alive"] = (*vars(test).get("alive", ()), *keys)
        return test

    return mark


def keys() -> Iterator[str]:
    """Every key that the configuration has. One that holds a section is alive if the section's are."""
    for where, section in sections(Config):
        kind = f"[{section.__name__.removesuffix('Params')}]" if issubclass(section, Params) else ""
        yield from (joined(where + kind, key) for key in section.model_fields if not section.sections_under(key))


def tests(folder: Path) -> Iterator[tuple[str, Callable[..., Any]]]:
    """(key, test) for each key of each decorated test in the test modules of `folder`, which can be imported."""
    for path in sorted(folder.glob("test_*.py")):
        if "@alive(" in path.read_text():
            for test in filter(inspect.isfunction, vars(importlib.import_module(path.stem)).values()):
                yield from ((key, test) for key in vars(test).get("alive", ()))
