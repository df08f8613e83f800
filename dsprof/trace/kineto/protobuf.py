"""Protobuf's wire format: a file's messages, and the fields of one by their numbers, without a schema."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from .stream import TraceError, TraceText

Fields = list[tuple[int, Any]]

MOST_NAME: Final = 512
MOST_MESSAGE: Final = 16 << 20
"""Bytes of a message of a file."""


class Messages:
    """The messages of a file, plain or gzipped, each behind its length, and that behind `tag`, if it is told. Raises
    TraceError and OSError. what: one of them is called in errors.

    breaks_off: within its last message; told when all have been gone through
    """

    def __init__(self, path: Path, what: str, tag: bytes = b"") -> None:
        self._path, self._what, self._tag = path, what, tag
        self.breaks_off = False

    def __iter__(self) -> Iterator[bytes]:
        rest = b""
        for block in TraceText(self._path).blocks():
            data = b"".join((rest, *block))
            at = 0
            while at < len(data):
                if not data.startswith(self._tag, at):
                    left = f"{len(data) - at:,} bytes before the next block"
                    raise TraceError(f"no {self._what} where one should be ({left})")
                length, begin = varint(data, at + len(self._tag))
                if length > MOST_MESSAGE:
                    raise TraceError(f"a {self._what} of {length:,} bytes, as no trace has")
                if begin < 0 or begin + length > len(data):
                    break
                yield data[begin : begin + length]
                at = begin + length
            rest = data[at:]
        self.breaks_off = bool(rest)


def varint(data: bytes, at: int) -> tuple[int, int]:
    """The number, and where it ends; -1: not within the data. Raises TraceError for one that never ends."""
    result = shift = 0
    while at < len(data):
        byte = data[at]
        at += 1
        result |= (byte & 0x7F) << shift
        if byte < 0x80:
            return result, at
        shift += 7
        if shift > 63:
            raise TraceError("a number of more than ten bytes")
    return 0, -1


def fields_of(data: bytes) -> Fields:
    """Number and value of each: an int, or bytes (also of fixed width). Raises TraceError."""
    found: Fields = []
    at, end = 0, len(data)
    while at < end:
        tag, at = varint(data, at)
        if at < 0:
            raise TraceError("a packet whose fields do not end with it")
        wire = tag & 7
        if wire == 0:
            value, at = varint(data, at)
            found.append((tag >> 3, value))
        elif wire in (1, 2, 5):
            length, at = varint(data, at) if wire == 2 else (8 if wire == 1 else 4, at)
            if at < 0 or at + length > end:
                raise TraceError("a packet whose fields do not end with it")
            found.append((tag >> 3, data[at : at + length]))
            at += length
        else:
            raise TraceError(f"a field of kind {wire}, which no trace has")
        if at < 0:
            raise TraceError("a packet whose fields do not end with it")
    return found


def number_of(value: Any) -> int:
    """A field's number; 0, which is what it is when it is not told: it has bytes, as a damaged one may."""
    return value if type(value) is int else 0


def double_of(value: Any) -> float:
    """A double of a field of fixed width; 0: it is none."""
    return float(struct.unpack("<d", value)[0]) if isinstance(value, bytes) and len(value) == 8 else 0.0


def signed(value: Any) -> int:
    """An int64 of a varint; 0: it is none."""
    if type(value) is not int:
        return 0
    return value - (1 << 64) if value >= 1 << 63 else value


def text_of(value: Any) -> str:
    """Text of a field of bytes, cut off after MOST_NAME characters; empty: it is none."""
    return value[: 4 * MOST_NAME].decode("utf-8", "replace")[:MOST_NAME] if isinstance(value, bytes) else ""
