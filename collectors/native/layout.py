"""The record's layout for the native helper: a C++ header made from `dsprof/schema.py`, which alone defines it."""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final

from dsprof import schema

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
    families = [_struct(_camel(family.name), _fields(family)) for family in schema.Family]
    members = [f"  {_camel(family.name)} {family.name.lower()};" for family in schema.Family]
    return "\n".join(
        [
            "// Made by collectors/native/layout.py from dsprof/schema.py.",
            "#pragma once",
            "#include <atomic>",
            "#include <cstddef>",
            "#include <cstdint>",
            "namespace dsprof {",
            *_constants(),
            f"enum Counter : size_t {{ {', '.join(f'k{_camel(name)}' for name in schema.COUNTERS)} }};",
            _enumeration("Kind", schema.Kind, "k{}"),
            _enumeration("State", schema.State, "k{}"),
            _enumeration("Flag", schema.Flag, "k{}"),
            _enumeration("Family", schema.Family, "k{}Family"),
            _struct("Head", _declared(schema.COMMON_FIELDS)),
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
        "uint32_t kFormatVersion": schema.FORMAT_VERSION,
        "uint32_t kRecordBytes": schema.RECORD_BYTES,
        "uint64_t kChunkRecords": schema.CHUNK_RECORDS,
        "uint64_t kChunkHeaderBytes": schema.CHUNK_HEADER_BYTES,
        "uint64_t kChunkPlaceAt": schema.CHUNK_HEADER.size,
        "uint64_t kKeptShare": schema.KEPT_SHARE,
        "size_t kCountersBytes": schema.COUNTERS_BYTES,
        "size_t kCountersHeaderBytes": schema.COUNTERS_HEADER.size,
        "size_t kErrorTable": schema.ERROR_TABLE,
        "size_t kErrorHookBytes": schema.ERROR_HOOK_BYTES,
        "size_t kErrorSaidBytes": schema.ERROR_SAID_BYTES,
        "size_t kMostErrors": schema.MOST_ERRORS,
        "uint32_t kNoSeq": f"{schema.NO_SEQ}u",
        "size_t kMaxNames": schema.MAX_NAMES,
        "int kDtypes": len(schema.DTYPES),
    }
    texts = {
        "kChunkMagic": schema.CHUNK_MAGIC.decode(),
        "kCountersMagic": schema.COUNTERS_MAGIC.decode(),
        "kCountersName": schema.COUNTERS_NAME,
        "kTooManyNames": schema.TOO_MANY_NAMES,
        "kBackwardDone": schema.BACKWARD_DONE,
        "kDeviceClock": schema.DEVICE_CLOCK,
        "kHostSync": schema.HOST_SYNC,
    }
    calls = ", ".join(f'"{call}"' for call in schema.SYNC_CALLS)
    return [
        *(f"constexpr {declared} = {value};" for declared, value in numbers.items()),
        *(f'constexpr char {name}[] = "{value}";' for name, value in texts.items()),
        f"constexpr const char* kSyncCalls[] = {{{calls}}};",
    ]


def _enumeration(name: str, values: type[IntEnum] | type[schema.Flag], pattern: str) -> str:
    listed = ", ".join(f"{pattern.format(_camel(item.name or ''))} = {int(item)}" for item in values)
    return f"enum {name} : uint8_t {{ {listed} }};"


def _fields(family: schema.Family) -> list[str]:
    return _declared((*schema.COMMON_FIELDS, *schema.FAMILY_FIELDS[family]))


def _declared(fields: tuple[schema.Field, ...]) -> list[str]:
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
        f"static_assert(offsetof({_camel(family.name)}, {name}) == {schema.offset(family, name)});"
        for family in schema.Family
        for name, _ in (*schema.COMMON_FIELDS, *schema.FAMILY_FIELDS[family])
        if name
    ]


def _camel(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_"))
