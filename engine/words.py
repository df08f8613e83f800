"""Names that people write: which of those there are a pattern means, and how they are listed."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable


def fits(name: str, pattern: str) -> bool:
    """Whether `name` is one that `pattern` means: part by part between dots, `*` stands for any text in one of them."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))


def joined(*names: object) -> str:
    """`zero_optimization` and `stage` as `zero_optimization.stage`, leaving out what is empty."""
    return ".".join(str(name) for name in names if name != "")


def either(words: Iterable[object]) -> str:
    """`1, 2 or 4`."""
    *others, last = map(str, words)
    return f"{', '.join(others)} or {last}" if others else last
