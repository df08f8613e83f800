"""How much memory the content of a file may take: real ones take some five times the file, a made-up one may take a
hundred times as much, or more.
"""

from __future__ import annotations

from typing import Final

MOST_TIMES: Final = 24
"""So many times its file what is made of it may be."""
FREE: Final = 16 << 20
"""Bytes that a small file may do as it likes with."""
MOST: Final = 16 << 30
"""Bytes, whatever the size of the file."""

DICTIONARY: Final = 72
LIST: Final = 96
MEMBER: Final = 120
ITEM: Final = 40
QUOTE: Final = 28
"""Bytes that a mark of JSON stands for at most: a brace, a bracket, a colon, a comma, half of a text's quotes."""


def room_for(size: int) -> int:
    """Bytes that the content of a file of `size` bytes may take."""
    return min(FREE + MOST_TIMES * size, MOST)


def taken_by_json(text: bytes) -> int:
    """Bytes that `text` may take when it is parsed, told by its marks before it is."""
    marks = ((b"{", DICTIONARY), (b"[", LIST), (b":", MEMBER), (b",", ITEM), (b'"', QUOTE))
    return len(text) + sum(text.count(mark) * each for mark, each in marks)
