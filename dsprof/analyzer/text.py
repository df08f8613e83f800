"""Numbers and names in words and words in columns, the same in a verdict and in every report."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

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


class Unit(NamedTuple):
    """A unit of time, and how many milliseconds it has."""

    name: str
    ms: float

    def number(self, value_ms: float) -> str:
        """A duration given in milliseconds as a number of these units."""
        return number(value_ms / self.ms)


_UNITS: Final = (Unit("us", 1e-3), Unit("ms", 1.0), Unit("s", 1e3), Unit("min", 6e4), Unit("h", 3.6e6))
_UP_TO_MS: Final = (0.0995, 999.5, 999_500.0, 7.2e6)
"""Up to so many milliseconds each unit but the last is used."""


def unit_of(value_ms: float) -> Unit:
    """The unit in which a duration given in milliseconds has three digits."""
    if value_ms == 0 or not math.isfinite(value_ms):
        return _UNITS[1]
    return next((unit for unit, most in zip(_UNITS, _UP_TO_MS, strict=False) if abs(value_ms) < most), _UNITS[-1])


def ms(value: float) -> str:
    """A duration given in milliseconds, in the unit that fits: `43.0 us`, `38.2 ms`, `12.3 s`, `34.2 min`."""
    unit = unit_of(value)
    return f"{unit.number(value)} {unit.name}"


def with_interval(value: float, low: float, high: float, share: float | None = None) -> str:
    """A saving of a step in milliseconds, all numbers in one unit: `saves 20.7 ms a step (36 %) [18.6, 22.4]`, or
    `costs 3.10 ms a step (2.0 %) [1.20, 5.00]` where it is negative. share: percent of the step."""
    verb = "saves"
    if value < 0:
        verb, value, low, high, share = "costs", -value, -high, -low, None if share is None else -share
    unit = unit_of(max(abs(value), abs(low), abs(high)))
    of_step = "" if share is None else f" ({percent(share)})"
    return f"{verb} {unit.number(value)} {unit.name} a step{of_step} [{unit.number(low)}, {unit.number(high)}]"


def percent(value: float) -> str:
    if not math.isfinite(value):
        return "? %"
    if 0 < abs(value) < 0.05:
        return "<0.1 %"
    return f"{value:.0f} %" if abs(value) >= 9.95 or value == 0 else f"{value:.1f} %"


def size(count: float) -> str:
    """A number of bytes: `512 B`, `9.77 KiB`, `25.0 MiB`, `200 MiB`."""
    value, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 999.5 or unit == "TiB":
            break
        value /= 1024
    return f"{value:,.0f} B" if unit == "B" else f"{number(value)} {unit}"


_MS: Final = {"us": 1e-3, "ms": 1.0, "s": 1e3}
_BYTES: Final = {"B": 1, "bytes": 1, "KiB": 2**10, "MiB": 2**20}


def quantity(value: float | str, unit: str) -> str:
    """A measured value with its unit."""
    if isinstance(value, str):
        return clean(f"{value} {unit}")
    if unit in _MS:
        return ms(value * _MS[unit])
    if unit in _BYTES:
        return size(value * _BYTES[unit])
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


def count(value: int, noun: str, plural: str = "s") -> str:
    """`1 step`, `40 steps`; `plural` is what is added: `count(4, "micro-batch", "es")`."""
    return f"{value:,} {noun}" if value == 1 else f"{value:,} {noun}{plural}"


def aligned(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """A line for each row, columns under each other; the first `left` of them and the last are set left."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    return [
        "  ".join(
            [*(f"{cell:{'<' if i < left else '>'}{widths[i]}}" for i, cell in enumerate(row[:-1])), row[-1]]
        ).rstrip()
        for row in rows
    ]
