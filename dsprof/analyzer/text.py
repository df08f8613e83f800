"""Numbers and names in words, the same in a verdict and in every report."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Final

_UNPRINTABLE: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]+")


def clean(text: object, limit: int = 300) -> str:
    """`text` on one line, without control characters or direction overrides, at most `limit` long.

    Names and commands come from the user's job: they must not move the cursor or reorder a line.
    """
    line = _UNPRINTABLE.sub(" ", str(text)).strip()
    return line if len(line) <= limit else line[: limit - 1] + "…"


# --- numbers ------------------------------------------------------------------------------------


def number(value: float) -> str:
    """Three significant digits where they matter: 1,234  212  38.2  4.21  0.43  0."""
    if not math.isfinite(value):
        return "?"
    size = abs(value)
    if size >= 99.95:
        return f"{value:,.0f}"
    if size >= 9.995:
        return f"{value:.1f}"
    return f"{value:.2f}" if size >= 0.005 else "0"


def ms(value: float) -> str:
    """A duration given in milliseconds: `38.2 ms`, `12.3 s`."""
    return f"{number(value / 1e3)} s" if abs(value) >= 9_999.5 else f"{number(value)} ms"


def percent(value: float) -> str:
    if not math.isfinite(value):
        return "? %"
    if 0 < abs(value) < 0.05:
        return "<0.1 %"
    return f"{value:.0f} %" if abs(value) >= 9.95 or value == 0 else f"{value:.1f} %"


def size(count: float) -> str:
    """A number of bytes: `25.0 MiB`."""
    value, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{value:,.0f} B" if unit == "B" else f"{value:.1f} {unit}"


def quantity(value: float | str, unit: str) -> str:
    """A measured value with its unit."""
    if isinstance(value, str):
        return clean(f"{value} {unit}")
    if unit == "ms":
        return ms(value)
    if unit in ("B", "bytes"):
        return size(value)
    if unit in ("%", "percent"):
        return percent(value)
    text = f"{value:,.0f}" if float(value).is_integer() else number(value)
    return clean(text if unit == "count" else f"{text} {unit}")


def spans(values: Iterable[int]) -> str:
    """0, 1, 2, 3, 7 -> `0-3, 7`."""
    runs: list[list[int]] = []
    for value in sorted(set(values)):
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def ranks(values: Sequence[int]) -> str:
    return f"rank {values[0]}" if len(values) == 1 else f"ranks {spans(values)}"


def count(value: int, noun: str) -> str:
    return f"{value:,} {noun}" if value == 1 else f"{value:,} {noun}s"
