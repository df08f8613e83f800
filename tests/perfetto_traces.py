"""Perfetto traces as torch's profiler writes them: tracks, names told by number, all begins of a kind before its ends,
no categories, arguments as annotations."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any

Event = dict[str, Any]


def varint(number: int) -> bytes:
    number &= (1 << 64) - 1
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])


def field(number: int, value: int | float | str | bytes) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    if isinstance(value, float):
        return varint(number << 3 | 1) + struct.pack("<d", value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def packet(*fields: bytes) -> bytes:
    return field(1, b"".join(fields))


def annotation(key: str, value: Any) -> bytes:
    if isinstance(value, list):
        inner = b"".join(field(12, annotation("", one)) for one in value)
    else:
        inner = field(4 if isinstance(value, int) else 5 if isinstance(value, float) else 6, value)
    return (field(10, key) if key else b"") + inner


def as_torch_writes(events: Iterable[Event], base_ns: int = 0) -> bytes:
    """Events of a Chrome trace (`kineto_traces`) that last; each (pid, tid) is a track."""
    lasting = [event for event in events if event["ph"] == "X"]
    tracks = {place: 100 + at for at, place in enumerate(dict.fromkeys((e["pid"], e["tid"]) for e in lasting))}
    names = {name: at for at, name in enumerate(dict.fromkeys(e["name"] for e in lasting), 1)}
    found = [packet(field(60, field(1, 1) + field(3, field(1, 7) + field(6, "python"))))]
    for (_, tid), uuid in tracks.items():
        thread = field(1, 7) + field(2, tid if isinstance(tid, int) else 0) + field(5, f"thread {tid}")
        found.append(packet(field(60, field(1, uuid) + field(5, 1) + field(4, thread))))
    interned = b"".join(field(2, field(1, at) + field(2, name)) for name, at in names.items())
    found.append(packet(field(10, 1), field(13, 1), field(12, interned)))
    for category in dict.fromkeys(event["cat"] for event in lasting):
        mine = [event for event in lasting if event["cat"] == category]
        for event in mine:
            told = b"".join(field(4, annotation(key, value)) for key, value in event.get("args", {}).items())
            begin = field(9, 1) + field(11, tracks[event["pid"], event["tid"]]) + field(10, names[event["name"]]) + told
            found.append(
                packet(field(8, base_ns + round(event["ts"] * 1000)), field(10, 1), field(13, 2), field(11, begin))
            )
        for event in mine:
            end = field(9, 2) + field(11, tracks[event["pid"], event["tid"]])
            when = base_ns + round((event["ts"] + event["dur"]) * 1000)
            found.append(packet(field(8, when), field(10, 1), field(11, end)))
    return b"".join(found)
