"""Values that the events of a mapped trace tell: numbers, groups of ranks, arguments by their path."""

from __future__ import annotations

import re
import zlib
from typing import Any, Final

from .mapping import NUMBERS
from .rank_names import rank_of

DIGITS: Final = re.compile(r"\d+")
MOST_MEMBERS: Final = 1 << 16
MOST_LISTED: Final = 5
"""Ranks of a group that are in its name."""
MOST_KEY: Final = 512
LIMITS: Final = {"stage": 1 << 15, "microbatch": 1 << 15, "bytes": 1 << 50, "corr": 1 << 62} | dict.fromkeys(
    [name for name in NUMBERS if name not in ("stage", "microbatch", "bytes", "corr")], 1 << 31
)
"""What a column's number is below."""


def whole_below(value: Any, limit: int) -> int | None:
    """A whole number, or its text, from 0 to below the limit; None: it is none."""
    if (isinstance(value, str) and len(value) < 20 and value.isdecimal()) or (
        type(value) is float and value.is_integer()
    ):
        value = int(value)
    return value if type(value) is int and 0 <= value < limit else None


def argument_at(args: dict[str, Any], path: str) -> Any:
    """`A.B` of the arguments: that of the whole name, else B in A."""
    if path in args:
        return args[path]
    first, dot, rest = path.partition(".")
    inner = args.get(first) if dot else None
    return argument_at(inner, rest) if isinstance(inner, dict) else None


def members_of(value: Any) -> list[int]:
    """Ranks from a list, or its text; empty: none."""
    if isinstance(value, str):
        value = [int(one) for one in DIGITS.findall(value[: 16 * MOST_MEMBERS]) if len(one) < 8]
    if not isinstance(value, list) or len(value) > MOST_MEMBERS:
        return []
    found = [rank_of(one) for one in value]
    return sorted({one for one in found if one is not None}) if None not in found else []


def group_of(members: list[int]) -> str:
    """A name for the group of these ranks."""
    if members[-1] - members[0] == len(members) - 1:
        return f"ranks {members[0]}-{members[-1]}"
    if len(members) <= MOST_LISTED:
        return f"ranks {','.join(map(str, members))}"
    return f"{len(members)} ranks from {members[0]} ({zlib.crc32(str(members).encode()):08x})"


def as_key(value: Any) -> Any:
    """A process's or thread's number or name, as a key."""
    return value if isinstance(value, (int, str)) else str(value)[:MOST_KEY]
