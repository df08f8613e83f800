"""The record's layout for the native helper: a C++ header made from `dsprof/ondisk.py`, which alone defines it."""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final

from dsprof import ondisk, schema

TYPES: Final = {
    "q": "int64_t",
    "d": "double",
    "f": "float",
    "I": "uint32_t",
    "i": "int32_t",
    "H": "uint16_t",
    "h": "int16_t",
    "B": "uint8_t",
}
"""struct code -> C++ type."""


def header() -> str:
    """The text of layout.hpp: enumerations, a struct for each family of records, and the union of them."""
    families = [_struct(_camel(family.name), _fields(family)) for family in ondisk.Family]
    members = [f"  {_camel(family.name)} {family.name.lower()};" for family in ondisk.Family]
    return "\n".join(
        [
            "// Made by collectors/native/layout.py from dsprof/ondisk.py.",
            "#pragma once",
            "#include <atomic>",
            "#include <cstddef>",
            "#include <cstdint>",
            "namespace dsprof {",
            *_constants(),
            f"enum Counter : size_t {{ {', '.join(f'k{_camel(name)}' for name in ondisk.COUNTERS)} }};",
            _enumeration("Kind", schema.Kind, "k{}"),
            _enumeration("State", ondisk.State, "k{}"),
            _enumeration("Flag", ondisk.Flag, "k{}"),
            _enumeration("Family", ondisk.Family, "k{}Family"),
            _struct("Head", _declared(ondisk.COMMON_FIELDS)),
            *families,
            "union Record {  // all of them begin like the head",
            "  Head head;",
            *members,
            "};",
            "static_assert(sizeof(Record) == kRecordBytes);",
            *_checks(),
            "}  // namespace dsprof",
            "",
        ]
    )


def _constants() -> list[str]:
    numbers = {
        "uint32_t kFormatVersion": ondisk.FORMAT_VERSION,
        "uint32_t kRecordBytes": ondisk.RECORD_BYTES,
        "uint64_t kChunkRecords": ondisk.CHUNK_RECORDS,
        "uint64_t kChunkHeaderBytes": ondisk.CHUNK_HEADER_BYTES,
        "uint64_t kChunkPlaceAt": ondisk.CHUNK_HEADER.size,
        "uint64_t kChunkFinishedAt": ondisk.CHUNK_FINISHED_AT,
        "uint64_t kKeptShare": ondisk.KEPT_SHARE,
        "size_t kCountersBytes": ondisk.COUNTERS_BYTES,
        "size_t kCountersHeaderBytes": ondisk.COUNTERS_HEADER.size,
        "size_t kErrorTable": ondisk.ERROR_TABLE,
        "size_t kErrorHookBytes": ondisk.ERROR_HOOK_BYTES,
        "size_t kErrorSaidBytes": ondisk.ERROR_SAID_BYTES,
        "size_t kMostErrors": ondisk.MOST_ERRORS,
        "uint32_t kNoSeq": f"{ondisk.NO_SEQ}u",
        "size_t kMaxNames": ondisk.MAX_NAMES,
        "int kDtypes": len(schema.DTYPES),
    }
    texts = {
        "kChunkMagic": ondisk.CHUNK_MAGIC.decode(),
        "kCountersMagic": ondisk.COUNTERS_MAGIC.decode(),
        "kCountersName": ondisk.COUNTERS_NAME,
        "kTooManyNames": ondisk.TOO_MANY_NAMES,
        "kBackwardDone": schema.BACKWARD_DONE,
        "kDeviceClock": schema.DEVICE_CLOCK,
        "kHostSync": schema.HOST_SYNC,
        "kCallSite": schema.CALL_SITE,
    }
    calls = ", ".join(f'"{call}"' for call in schema.SYNC_CALLS)
    return [
        *(f"constexpr {declared} = {value};" for declared, value in numbers.items()),
        *(f'constexpr char {name}[] = "{value}";' for name, value in texts.items()),
        f"constexpr const char* kSyncCalls[] = {{{calls}}};",
    ]


def _enumeration(name: str, values: type[IntEnum] | type[ondisk.Flag], pattern: str) -> str:
    listed = ", ".join(f"{pattern.format(_camel(item.name or ''))} = {int(item)}" for item in values)
    return f"enum {name} : uint8_t {{ {listed} }};"


def _fields(family: ondisk.Family) -> list[str]:
    return _declared((*ondisk.COMMON_FIELDS, *ondisk.FAMILY_FIELDS[family]))


def _declared(fields: tuple[ondisk.Field, ...]) -> list[str]:
    """A member a field."""
    members = []
    for number, (name, code) in enumerate(fields):
        if not name:
            members.append(f"uint8_t padding{number}[{struct.calcsize(code)}]")
        elif name == "state":
            members.append("std::atomic<uint8_t> state")
        else:
            members.append(f"{TYPES[code]} {name}")
    return members


def _struct(name: str, members: list[str]) -> str:
    return f"struct {name} {{ {'; '.join(members)}; }};"


def _checks() -> list[str]:
    return [
        f"static_assert(offsetof({_camel(family.name)}, {name}) == {ondisk.offset(family, name)});"
        for family in ondisk.Family
        for name, _ in (*ondisk.COMMON_FIELDS, *ondisk.FAMILY_FIELDS[family])
        if name
    ]


def _camel(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_"))
