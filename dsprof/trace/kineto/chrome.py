"""Events of any Chrome trace, in lists, as they stand in the file: for traces that are no torch.profiler's."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from .reader import parse_events
from .stream import GZIP, SPACE, TraceText

HEAD: Final = 1 << 16
"""Bytes of text by which a trace is told from another."""


def head_of(path: Path) -> bytes:
    """The first bytes of a JSON text, plain or gzipped; empty: the file is none, or cannot be read. Never raises."""
    try:
        with path.open("rb") as file:
            head = file.read(HEAD)
        if head[:2] == GZIP:
            head = zlib.decompressobj(31).decompress(head, HEAD)
    except (OSError, zlib.error):
        return b""
    return head if head.lstrip(SPACE)[:1] in (b"{", b"[") else b""


class ChromeEvents:
    """One file, which `lists` goes through once.

    about:  what stands beside the events, as far as it is known (`around.KEPT`); complete when `lists` has ended
    cut:    where the file breaks off, in words; empty: it is whole
    odd:    how many events were left out, since they are no objects
    """

    def __init__(self, path: Path) -> None:
        self._text = TraceText(path)
        self.about: dict[str, Any] = {}
        self.cut = ""
        self.odd = 0

    def lists(self) -> Iterator[list[dict[str, Any]]]:
        """Raises TraceError and OSError."""
        for piece in self._text.pieces():
            found = parse_events(bytes(piece))
            events = [event for event in found if isinstance(event, dict)]
            self.odd += len(found) - len(events)
            yield events
        self.about, self.cut = self._text.about, self._text.cut
