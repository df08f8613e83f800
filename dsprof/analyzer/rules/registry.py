"""All rules: the records of every module in the folders beside this file."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable
from functools import cache

from .rule import Rule


@cache
def all_rules() -> tuple[Rule, ...]:
    """In the order in which they are listed."""
    package = importlib.import_module(__package__)
    return find_rules(package.__path__, f"{package.__name__}.")


def find_rules(path: Iterable[str], prefix: str) -> tuple[Rule, ...]:
    """The records of the modules under `path`, whose names begin with `prefix`. Raises ValueError for two of one
    code."""
    found: dict[str, Rule] = {}
    for module in pkgutil.walk_packages(path, prefix):
        for rule in getattr(importlib.import_module(module.name), "RULES", ()):
            if found.setdefault(rule.code, rule) is not rule:
                raise ValueError(f"{module.name}: another rule has the code {rule.code}")
    return tuple(sorted(found.values(), key=lambda rule: (rule.place, rule.code)))


def rule_of(code: str) -> Rule | None:
    """The record of a code; None: there is none."""
    return next((rule for rule in all_rules() if rule.code == code), None)


def explaining(part: str) -> tuple[str, ...]:
    """The codes that can explain a part of the budget."""
    return tuple(rule.code for rule in all_rules() if part in rule.explains)


def ends_run(code: str) -> bool:
    """Whether a finding of this code says that the run has failed."""
    rule = rule_of(code)
    return rule is not None and rule.ends_run


def with_(mark: str) -> tuple[Rule, ...]:
    """The rules whose records have this mark: `told_by_replay`, `of_snapshot`."""
    return tuple(rule for rule in all_rules() if getattr(rule, mark))
