"""Which rank a file is of, by its name."""

from __future__ import annotations

import re
from typing import Any, Final

RANK_IN_NAME: Final = (
    re.compile(r"(?:^|[^a-z])ranks?[-_.=]?(\d+)", re.IGNORECASE), re.compile(r"worker[-_.]?(\d+)", re.IGNORECASE),
    re.compile(r"(?:^|[_.-])(?:r|gpu|device)[-_]?(\d+)(?=[_.-]|$)", re.IGNORECASE), re.compile(r"^(\d+)\."),
)  # fmt: skip
"""Of which the first that fits counts: rank3.json, trace_8_rank_1.json, worker0_step_12.1694.pt.trace.json, 3.json."""
LAST_NUMBER: Final = re.compile(r"(\d+)(?:\.[^.\d]*)?$")
MOST_RANK: Final = 1 << 20


def rank_of(value: Any) -> int | None:
    """A number, or its text, that can be one of a rank."""
    if isinstance(value, str) and value.isdecimal() and len(value) < 8:
        value = int(value)
    return value if type(value) is int and 0 <= value < MOST_RANK else None


def rank_in(name: str) -> int | None:
    """The rank that a file's name says it is of."""
    for pattern in RANK_IN_NAME:
        match = pattern.search(name)
        if match:
            return rank_of(match[1])
    return None


def last_number(name: str) -> int | None:
    """What a file's name ends with, if that can be a rank: snapshot_3.pickle."""
    match = LAST_NUMBER.search(name)
    return rank_of(match[1]) if match else None
