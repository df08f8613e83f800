"""Sizes, steps and ranks as people write them. Standard library only, as `schema` is."""

from __future__ import annotations

import re
from typing import Final

SIZES: Final = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
SMALLEST_LIMIT: Final = 4 << 20
LARGEST_LIMIT: Final = 1 << 40
SHORTEST_HANG_TIMEOUT: Final = 2.0
DEFAULT_LIMIT: Final = 2 << 30
"""Size limit of one rank's capture."""
EXIT_WAIT: Final = "5"
LONGEST_EXIT_WAIT: Final = 3600.0
MOST_DEEP: Final = 50
"""Steps that `--deep` profiles: a step is a megabyte or more of trace."""
NEVER: Final = "never"
"""`--deep never`: no steps are profiled on suspicion, either."""


def parse_ranks(text: str) -> list[range]:
    """The ranks that `0,2-3` names; nothing for an empty text, which means all. Raises ValueError on anything else."""
    chosen = []
    for part in text.split(",") if text.strip() else []:
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part, re.ASCII)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ValueError(f"{text!r} is not a list of ranks; write ranks and ranges, such as 0,2-3")
        chosen.append(range(int(match[1]), int(match[2] or match[1]) + 1))
    return chosen


def parse_steps(text: str) -> tuple[int, int | None]:
    """The steps that `20:50` names: from 20 on, before 50; either may be left out. Raises ValueError."""
    if not text.strip():
        return 0, None
    match = re.fullmatch(r"\s*(\d*):(\d*)\s*", text, re.ASCII)
    if match is None or (match[1] and match[2] and int(match[2]) <= int(match[1])):
        raise ValueError(f"{text!r} is no range of steps; write the first and the one after the last, such as 20:50")
    return int(match[1] or 0), int(match[2]) if match[2] else None


def parse_deep(text: str) -> tuple[int, int]:
    """The few steps that `20:23` names: 20, 21 and 22. Raises ValueError."""
    wanted = f"{text!r} is no range of at most {MOST_DEEP} steps; write a few, such as 20:23, or {NEVER} for none"
    try:
        first, last = parse_steps(text)
    except ValueError:
        raise ValueError(wanted) from None
    if last is None or last - first > MOST_DEEP or not text.strip():
        raise ValueError(wanted)
    return first, last


def parse_hang_timeout(text: str) -> float:
    """The seconds that `600` names; 0: none. Raises ValueError."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if seconds and not SHORTEST_HANG_TIMEOUT <= seconds < float("inf"):
        raise ValueError(
            f"{text!r} is no time-out; write seconds, {SHORTEST_HANG_TIMEOUT:g} or more, such as 600, or 0 for none"
        )
    return seconds


def parse_exit_wait(text: str) -> float:
    """The seconds for which a rank waits at its end until its capture is copied; an empty text is the default. Raises
    ValueError."""
    try:
        seconds = float(text or EXIT_WAIT)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= LONGEST_EXIT_WAIT:
        raise ValueError(f"{text!r} is no number of seconds from 0 to {LONGEST_EXIT_WAIT:g}; write one, such as 5")
    return seconds


def parse_size(text: str) -> int:
    """The bytes that `512MiB`, `2G` or `4194304` names. Raises ValueError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", text, re.ASCII | re.IGNORECASE)
    size = int(float(match[1]) * SIZES[match[2].upper()]) if match else 0
    if not SMALLEST_LIMIT <= size <= LARGEST_LIMIT:
        between = f"from {SMALLEST_LIMIT >> 20} MiB to {LARGEST_LIMIT >> 40} TiB"
        raise ValueError(f"{text!r} is no size {between}; write one, such as 512MiB or 2GiB")
    return size
