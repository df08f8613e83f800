"""How far the analysis of a large run is, on a terminal."""

from __future__ import annotations

import sys
from typing import Final

FEWEST_RANKS: Final = 32
"""Of fewer the analysis takes a second or two."""


class ProgressLine:
    """Told by the analyzer: one line on stderr, written anew for each hundredth of the ranks."""

    def __init__(self) -> None:
        self._shown = ("", -1)

    def __call__(self, what: str, done: int, of: int) -> None:
        now = what, 100 * done // max(of, 1)
        if of < FEWEST_RANKS or now == self._shown:
            return
        self._shown = now
        end = "\n" if done == of else ""
        sys.stderr.write(f"\r[dsprof] {what}: {done:,} of {of:,} ranks{end}")
        sys.stderr.flush()


def progress() -> ProgressLine | None:
    """None where stderr is no terminal."""
    return ProgressLine() if sys.stderr.isatty() else None
