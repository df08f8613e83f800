"""What a rank counted while it recorded (`ondisk.COUNTERS`): dropped records, and which of its hooks failed."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from dsprof import regular_files
from dsprof.ondisk import (
    COUNTERS,
    COUNTERS_BYTES,
    COUNTERS_HEADER,
    COUNTERS_MAGIC,
    COUNTERS_NAME,
    ERROR_ENTRY,
    ERROR_TABLE,
    MOST_ERRORS,
    counter_text,
    describe_failure,
)

VERSION = 1


@dataclass(frozen=True)
class CaptureCounters:
    """counts: by name; `failures`: a line for each hook that failed."""

    counts: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)


def read_counters(folder: Path, problems: list[str]) -> CaptureCounters | None:
    """Of a capture's folder; None where there are none, as of older captures, or they are damaged."""
    try:
        content = regular_files.read_bytes(folder / COUNTERS_NAME, COUNTERS_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        problems.append(f"{COUNTERS_NAME}: {error.strerror}")
        return None
    if len(content) < COUNTERS_BYTES:
        problems.append(f"{COUNTERS_NAME}: cut short")
        return None
    magic, version, unlisted = COUNTERS_HEADER.unpack_from(content)
    if (magic, version) != (COUNTERS_MAGIC, VERSION):
        problems.append(f"{COUNTERS_NAME}: not the counters of a capture, or of a newer dsprof")
        return None
    at = COUNTERS_HEADER.size
    counts = {name: int.from_bytes(content[at + 8 * i : at + 8 * i + 8], "little") for i, name in enumerate(COUNTERS)}
    table = [ERROR_ENTRY.unpack_from(content, ERROR_TABLE + i * ERROR_ENTRY.size) for i in range(MOST_ERRORS)]
    failures = [describe_failure(counter_text(hook), count, counter_text(said)) for count, hook, said in table if count]
    if unlisted:
        failures.append(f"{unlisted} errors of further hooks")
    return CaptureCounters(counts, failures)
