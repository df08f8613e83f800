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
import numpy.typing as npt
import orjson

from ..room import taken_by_json

Int = npt.NDArray[np.int64]

BLOCK: Final = 1 << 20
"""Bytes of text that are looked at together: no more than stays in a core's cache."""
READ: Final = 1 << 14
"""Compressed bytes that are unpacked at once: zlib copies what of them it has not come to, again and again."""
MOST_EVENT: Final = 4 << 20
"""Bytes of one event. Long ones are of a few hundred kB: the shapes of a model's parameters."""
MOST_AROUND: Final = 32 << 20
"""Bytes of all that stands before or behind the events."""
MOST_TAKEN: Final = 256 << 20
"""Bytes of memory that what stands before or behind them may take, and that lists in arguments may."""
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
EVENTS: Final = re.compile(rb'"traceEvents"\s*:\s*\[')
HEAD: Final = 4096


class TraceError(Exception):
    """The file is no trace, or not one that can be read; the message says what is wrong with it, and where."""


def looks_like_trace(path: Path) -> bool:
    """Whether a file begins like a trace of torch.profiler. Never raises."""
    try:
        with path.open("rb") as file:
            head = file.read(HEAD)
        if head[:2] == GZIP:
            head = zlib.decompressobj(31).decompress(head, 16 * HEAD)
    except (OSError, zlib.error):
        return False
    head = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    known = (b'"traceEvents"', b'"schemaVersion"', b'"deviceProperties"', b'"distributedInfo"', b'"ph"')
    return head[:1] in (b"{", b"[") and any(word in head for word in known)


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

    def pieces(self) -> Iterator[memoryview]:
        """Text of whole events with commas between them, as it would stand in a list. Raises TraceError, OSError."""
        blocks = self._blocks()
        rest, open_object = self._skip_head(blocks)
        for block in blocks:
            piece, rest, ended = _first_events(b"".join((rest, *block)))
            if piece:
                yield piece
            if ended:
                self._skip_tail(rest, blocks, open_object)
                return
            if len(rest) > MOST_EVENT:
                raise TraceError(f"an event of more than {MOST_EVENT >> 20} MiB, before byte {self._read:,}")
        piece, rest, ended = _first_events(rest, last=True)
        if piece:
            yield piece
        if ended:
            self._skip_tail(rest, iter(()), open_object)
        else:
            self.cut = f"breaks off after {self._read:,} bytes of text: its last events are missing"

    # --- bytes

    def _blocks(self) -> Iterator[Sequence[bytes]]:
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

    def _skip_head(self, blocks: Iterator[Sequence[bytes]]) -> tuple[bytes, bool]:
        """What follows the bracket that opens the events; whether they are in an object."""
        head = b""
        for block in blocks:
            head = b"".join((head, *block))
            if head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"[":
                return head[head.index(b"[") + 1 :], False
            found = EVENTS.search(head)
            if found:
                self._note(head[: found.start()].strip().rstrip(b",") + b"}", "its beginning")
                return head[found.end() :], True
            if len(head) > MOST_AROUND:
                break
        raise TraceError("holds no traceEvents")

    def _skip_tail(self, rest: bytes, blocks: Iterator[Sequence[bytes]], open_object: bool) -> None:
        if not open_object:
            return
        for block in blocks:
            rest = b"".join((rest, *block))
            if len(rest) > MOST_AROUND:
                return
        text = rest.strip()
        if not text.endswith(b"}"):
            self.cut = "breaks off behind its events"
            return
        text = text.removeprefix(b",").strip()
        self._note(b"{" + text, "its end")

    def _note(self, text: bytes, where: str) -> None:
        if taken_by_json(text) > MOST_TAKEN:
            raise TraceError(f"{where} would take more than {MOST_TAKEN >> 20} MiB of memory, as no trace's does")
        try:
            found = orjson.loads(text)
        except orjson.JSONDecodeError as error:
            raise TraceError(f"{where} is no JSON ({error})") from error
        for key, value in found.items():
            self.about.setdefault(key, value)


def _first_events(text: bytes, *, last: bool = False) -> tuple[memoryview, bytes, bool]:
    """As many whole events as `text` begins with, what follows them, and whether that is behind the last of all."""
    if not last:
        at = text.rfind(BETWEEN)
        if at >= 0 and text.rfind(b"\n  ]", 0, at) < 0:
            return memoryview(text)[: at + 4], text[at + 5 :], False
    end, bracket = _whole(text)
    if bracket >= 0:
        return memoryview(text[:bracket].strip(b", \t\r\n")), text[bracket + 1 :], True
    return memoryview(text[:end].strip(b", \t\r\n")), text[end:].lstrip(b", \t\r\n"), False


DEEPER: Final = np.zeros(256, np.int8)
DEEPER[[ord("{"), ord("[")]] = 1
DEEPER[[ord("}"), ord("]")]] = -1


def _whole(text: bytes) -> tuple[int, int]:
    """Where the last event ends that is there as a whole, and where the bracket is that ends the list (-1: not yet)."""
    every = np.frombuffer(text, np.uint8)
    quote = np.flatnonzero(every == ord('"'))
    backslash = np.flatnonzero(every == ord("\\"))
    if len(backslash):
        quote = quote[~_escaped(quote, backslash)]
    mark = np.flatnonzero(DEEPER[every])
    mark = mark[np.searchsorted(quote, mark) % 2 == 0]
    deeper = DEEPER[every[mark]]
    depth = np.cumsum(deeper, dtype=np.int64)
    below = np.flatnonzero(depth < 0)
    if len(below):
        place = int(mark[below[0]])
        if text[place : place + 1] != b"]":
            raise TraceError("brackets that do not match")
        return 0, place
    closed = mark[(depth == 0) & (deeper < 0)]
    return (int(closed[-1]) + 1 if len(closed) else 0), -1


def _escaped(quote: Int, backslash: Int) -> npt.NDArray[np.bool_]:
    """Which quotes an odd number of backslashes stands before."""
    first = np.append(True, np.diff(backslash) > 1)
    begin = backslash[np.maximum.accumulate(np.where(first, np.arange(len(backslash)), 0))]
    at = np.searchsorted(backslash, quote) - 1
    before = backslash[np.maximum(at, 0)]
    odd = (before - begin[np.maximum(at, 0)]) % 2 == 0
    found: npt.NDArray[np.bool_] = (at >= 0) & (before == quote - 1) & odd
    return found
