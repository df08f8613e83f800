"""The events of a Chrome trace in a JSON file, plain or gzipped, in pieces that hold whole events.

Kineto writes an event as a block of lines, two blanks deep, so a piece ends where one such block ends and the next one
begins: a string in JSON holds no line break, so that is no text of the job's. In a file that is laid out in another way
the brackets are counted. What is held is one block of text, and what of an event reached into the next one.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from .around import EVENTS, MOST_TAKEN, Around, TraceError
from .brackets import brackets, quotes

__all__ = ["MOST_TAKEN", "TraceError", "TraceText", "looks_like_trace"]

BLOCK: Final = 1 << 20
"""Bytes of text that are looked at together: no more than stays in a core's cache."""
READ: Final = 1 << 14
"""Compressed bytes that are unpacked at once: zlib copies what of them it has not come to, again and again."""
MOST_EVENT: Final = 4 << 20
"""Bytes of one event. Long ones are of a few hundred kB: the shapes of a model's parameters."""
MOST_LOOKED: Final = 256 << 20
"""Bytes of a file that are looked through for events, to tell whether it is a trace at all."""
MOST_RATIO: Final = 200
"""So many times what a gzipped file holds it may become. Kineto's traces become 15 to 40 times as large."""
RATIO_FROM: Final = 64 << 20
"""Smaller ones may do as they like."""
GZIP: Final = b"\x1f\x8b"
BETWEEN: Final = b"\n  },\n  {\n"
"""Between two events, as Kineto writes them."""
FIRST: Final = re.compile(rb"\s*\{\n(?=    \")")
LAST: Final = b"\n  }"
"""Before the first of several, and behind the last."""
SPLIT: Final = re.compile(re.escape(BETWEEN))
"""A pattern goes through a text in half the time that `bytes.split` takes, which prepares anew after each hit."""
WRAPPED: Final = re.compile(
    rb'\s*\{\s*(?:"[^"]{0,64}"\s*:\s*(?:"[^"]{0,64}"|[^\[\]{}",]{0,64})\s*,\s*)*"traceEvents"\s*:'
)
"""The beginning of a list whose items are traces."""
EXPORT: Final = "record one with torch.profiler.profile, and write it with its export_chrome_trace"
HEAD: Final = 4096
SPACE: Final = b"\xef\xbb\xbf \t\r\n"
QUOTED: Final = b'"' + EVENTS + b'"'
KNOWN: Final = (QUOTED, b'"schemaVersion"', b'"deviceProperties"', b'"distributedInfo"', b'"ph"')
"""Of these one stands at the beginning of most traces."""


def beginning_of(path: Path, size: int) -> bytes:
    """The first bytes of a file, unpacked; empty where it cannot be read. Never raises."""
    try:
        return b"".join(next(TraceText(path).blocks(), ()))[:size]
    except (TraceError, OSError):
        return b""


def looks_like_trace(path: Path) -> bool:
    """Whether a file is like a trace of torch.profiler: by how it begins, else by a list of events that it holds.
    Never raises."""
    try:
        with path.open("rb") as file:
            head = file.read(HEAD)
        if head[:2] == GZIP:
            head = zlib.decompressobj(31).decompress(head, 16 * HEAD)
    except (OSError, zlib.error):
        return False
    head = head.lstrip(SPACE)
    if head[:1] not in (b"{", b"["):
        return False
    return any(word in head for word in KNOWN) or (head[:1] == b"{" and _holds_events(path))


def _holds_events(path: Path) -> bool:
    end, seen = b"", 0
    try:
        for block in TraceText(path).blocks():
            text = b"".join((end, *block))
            seen += len(text)
            if QUOTED in text:
                return True
            if seen > MOST_LOOKED:
                return False
            end = text[-len(QUOTED) :]
    except (TraceError, OSError):
        pass
    return False


class TraceText:
    """One file. `pieces` goes through it once; then the rest is known.

    about:  what stands beside the events: distributedInfo, deviceProperties, ...
    cut:    where the file breaks off, in words; empty: it is whole
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.about: dict[str, Any] = {}
        self.cut = ""
        self._read = 0
        self._kinetos = False  # the events are laid out as Kineto writes them

    def pieces(self) -> Iterator[memoryview]:
        """Text of whole events with commas between them, as it would stand in a list. Raises TraceError, OSError."""
        blocks = self.blocks()
        rest, around = self._skip_head(blocks)
        for block in blocks:
            text = b"".join((rest, *block))
            self._kinetos = self._kinetos or FIRST.match(text) is not None
            piece, rest, ended = _first_events(text, quick=self._kinetos)
            if piece:
                yield piece
            if ended:
                self._skip_tail(rest, blocks, around)
                return
            if len(rest) > MOST_EVENT:
                raise TraceError(f"an event of more than {MOST_EVENT >> 20} MiB, before byte {self._read:,}")
        piece, rest, ended = _first_events(rest)
        if piece:
            yield piece
        if ended:
            self._skip_tail(rest, iter(()), around)
        else:
            self.cut = f"breaks off after {self._read:,} bytes of text: its last events are missing"

    # --- bytes

    def blocks(self) -> Iterator[Sequence[bytes]]:
        """The text in parts of BLOCK bytes at least, each as what it is to be joined of."""
        with self._path.open("rb") as file:
            head = file.read(2)
            file.seek(0)
            if head == GZIP:
                yield from self._inflated(iter(lambda: file.read(READ), b""))
                return
            while block := file.read(BLOCK):
                self._read += len(block)
                yield (block,)

    def _inflated(self, compressed: Iterator[bytes]) -> Iterator[Sequence[bytes]]:
        inflate, taken = zlib.decompressobj(31), 0
        parts: list[bytes] = []
        length = 0
        for data in compressed:
            taken += len(data)
            while data:
                try:
                    block = inflate.decompress(data, BLOCK)
                except zlib.error as error:
                    raise TraceError(f"damaged after {self._read:,} bytes of text ({error})") from error
                self._read += len(block)
                if self._read > max(RATIO_FROM, MOST_RATIO * taken):
                    raise TraceError(f"becomes more than {MOST_RATIO} times as large as it is, as no trace does")
                parts.append(block)
                length += len(block)
                if length >= BLOCK:
                    yield parts
                    parts, length = [], 0
                data = inflate.unconsumed_tail
                if inflate.eof:
                    data, inflate = inflate.unused_data.lstrip(b"\0"), zlib.decompressobj(31)
        if parts:
            yield parts

    # --- what stands around the events

    def _skip_head(self, blocks: Iterator[Sequence[bytes]]) -> tuple[bytes, Around | None]:
        """What follows the bracket that opens the events; and what they are in, None where they are the file."""
        around = Around()
        self.about = around.about
        for block in blocks:
            text = b"".join(block)
            if not around.begun and text.lstrip(SPACE)[:1] == b"[":
                head = text[text.index(b"[") + 1 :]
                if WRAPPED.match(head):
                    raise TraceError("is a list of traces", "write each into a file of its own, named rank<N>.json")
                return head, None
            if around.until_events(text):
                return around.rest, around
        if around.deeper > 1:
            levels = f"holds its traceEvents {around.deeper - 1} levels down"
            raise TraceError(levels, "write the object that holds them into a file of its own")
        raise TraceError("holds no traceEvents, neither at the top nor one level down", EXPORT)

    def _skip_tail(self, rest: bytes, blocks: Iterator[Sequence[bytes]], around: Around | None) -> None:
        if around is None:
            return
        around.rest = b""
        around.to_end(rest)
        for block in blocks:
            around.to_end(b"".join(block))
        if not around.whole:
            self.cut = "breaks off behind its events"


def _first_events(text: bytes, *, quick: bool = False) -> tuple[memoryview, bytes, bool]:
    """As many whole events as `text` begins with, what follows them, and whether that is behind the last of all.
    `quick`: where they are laid out as Kineto writes them, by its line breaks."""
    if quick:
        at = text.rfind(BETWEEN)
        if at >= 0 and text.rfind(b"\n  ]", 0, at) < 0:
            return memoryview(text)[: at + 4], text[at + 5 :], False
    end, bracket = _whole(text)
    if bracket >= 0:
        return memoryview(text[:bracket].strip(b", \t\r\n")), text[bracket + 1 :], True
    return memoryview(text[:end].strip(b", \t\r\n")), text[end:].lstrip(b", \t\r\n"), False


def _whole(text: bytes) -> tuple[int, int]:
    """Where the last event ends that is there as a whole, and where the bracket is that ends the list (-1: not yet)."""
    mark, deeper = brackets(text, quotes(text))
    depth = np.cumsum(deeper)
    below = np.flatnonzero(depth < 0)
    if len(below):
        place = int(mark[below[0]])
        if text[place : place + 1] != b"]":
            raise TraceError("brackets that do not match")
        return 0, place
    closed = mark[(depth == 0) & (deeper < 0)]
    return (int(closed[-1]) + 1 if len(closed) else 0), -1
