"""Where the brackets of a JSON text are, outside of its strings."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

Int = npt.NDArray[np.int64]

DEEPER: Final = np.zeros(256, np.int8)
DEEPER[[ord("{"), ord("[")]] = 1
DEEPER[[ord("}"), ord("]")]] = -1


def quotes(text: bytes) -> Int:
    """Places of the quotes that begin or end a string."""
    every = np.frombuffer(text, np.uint8)
    quote = np.flatnonzero(every == ord('"'))
    backslash = np.flatnonzero(every == ord("\\"))
    return quote[~_escaped(quote, backslash)] if len(backslash) else quote


def brackets(text: bytes, quote: Int, *, inside: bool = False) -> tuple[Int, Int]:
    """Places of the brackets outside of strings, and how much deeper each goes: 1 or -1.

    quote: those of `quotes`; inside: the text begins inside of a string.
    """
    every = np.frombuffer(text, np.uint8)
    mark = np.flatnonzero(DEEPER[every])
    mark = mark[np.searchsorted(quote, mark) % 2 == int(inside)]
    return mark, DEEPER[every[mark]].astype(np.int64)


def _escaped(quote: Int, backslash: Int) -> npt.NDArray[np.bool_]:
    """Which quotes an odd number of backslashes stands before."""
    first = np.append(True, np.diff(backslash) > 1)
    begin = backslash[np.maximum.accumulate(np.where(first, np.arange(len(backslash)), 0))]
    at = np.searchsorted(backslash, quote) - 1
    before = backslash[np.maximum(at, 0)]
    odd = (before - begin[np.maximum(at, 0)]) % 2 == 0
    found: npt.NDArray[np.bool_] = (at >= 0) & (before == quote - 1) & odd
    return found
