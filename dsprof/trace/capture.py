"""Read one rank's capture folder back: records, names, facts. Whatever is damaged is left out and counted."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from dsprof import regular_files
from dsprof.live.frames import parse_stacks, user_site
from dsprof.names import CaptureName
from dsprof.ondisk import (
    CHUNK_HEADER,
    CHUNK_HEADER_BYTES,
    CHUNK_MAGIC,
    CHUNK_PLACE,
    FORMAT_VERSION,
    LARGEST_CHUNK,
    LARGEST_FACTS,
    LARGEST_META,
    LARGEST_NAMES,
    LARGEST_STACKS,
    MAX_NAMES,
    READABLE_FORMATS,
    RECORD_BYTES,
    chunk_name,
    unescape_name,
)
from dsprof.schema import COPYING_FILE, LOCKED, STACKS_FILE

from .counters import CaptureCounters, read_counters
from .records import Array, decode, empty, plausible

CHUNK_NAME = re.compile(r"chunk-(\d{5,10})\.bin")
MOST_CHUNKS = 2**32
"""A header that says more is damaged."""
DIGITS = 10
"""An id of a name has fewer."""
VANISHED = (
    "missing, and its records with it: something else removed it; keep cleaners of temporary files away from the run "
    "folder and from where captures are written (--scratch DIR)"
)
"""Of a chunk that was neither given up nor moved."""
MOST_PROBLEMS = 8
"""Lost chunks that are named."""


@dataclass(frozen=True)
class Gap:
    """Chunks in the middle of a capture that are not there."""

    before: int
    """How many of the capture's records were written before it."""
    steps: int
    """How many steps the process had counted at its end; 0: none, or it counts none."""
    chunks: int
    given_up: bool
    """The recorder gave them up for the size limit; else they were lost."""


@dataclass
class Capture:
    """One rank's capture, as found on disk."""

    path: Path
    records: Array
    """`records.DECODED`, in order of writing, only whole and plausible ones."""
    names: dict[int, str]
    meta: dict[str, Any]
    facts: list[dict[str, Any]] = field(default_factory=list)
    damaged: int = 0
    problems: list[str] = field(default_factory=list)
    """What could not be read, in words."""
    format_version: int = FORMAT_VERSION
    """Of the records (`ondisk.READABLE_FORMATS`); the oldest, should the chunks differ."""
    gaps: list[Gap] = field(default_factory=list)
    """In order."""
    counters: CaptureCounters | None = None
    """None where there are none: then `meta` says, if the capture was closed."""

    @property
    def dropped(self) -> int:
        """Records that could not be written."""
        counted = self.counters.counts.get("dropped") if self.counters else self.meta.get("dropped")
        return counted if isinstance(counted, int) else 0

    @property
    def errors(self) -> list[str]:
        """What failed inside the collectors."""
        if self.counters is not None:
            return self.counters.failures
        noted = self.meta.get("errors")
        return [str(line) for line in noted] if isinstance(noted, list) else []


def read_capture(path: Path, *, newest: int | None = None, moved_to: Path | None = None) -> Capture:
    """Everything that can still be read of the capture folder `path`. Never raises for damaged content.

    newest:   of the records only those of the first chunk and of so many at the end; None: all
    moved_to: another folder of the same capture, to which chunks are moved from `path` while it is written
    """
    problems: list[str] = []
    names = _read_names(path / "names.txt", problems)
    counters = read_counters(path, problems)
    counted = counters.counts["given_up"] if counters else 0
    chunks = {**(_chunks(moved_to) if moved_to else {}), **_chunks(path)}
    if newest is not None:
        chunks = {number: chunks[number] for number in sorted(chunks)[:1] + sorted(chunks)[1:][-newest:]}
    records, damaged, version, gaps = _read_chunks(chunks, names, counted, problems)
    meta = _read_json(path / "meta.json", problems)
    facts = _read_facts(path / "facts.jsonl", problems) + _read_stacks(path / STACKS_FILE)
    _look_for_a_copy(path / COPYING_FILE, problems)
    return Capture(path, records, names, meta, facts, damaged, problems, version, gaps, counters)


def _listed(folder: Path) -> list[Path]:
    """All that lies in it, also what is no plain file, of which it is said then that it is not read."""
    return [folder / entry.name for entry in regular_files.entries(folder)]


def _read_names(path: Path, problems: list[str]) -> dict[int, str]:
    names: dict[int, str] = {}
    try:
        lines = regular_files.read_bytes(path, LARGEST_NAMES).split(b"\n")
    except OSError as error:
        problems.append(f"names.txt: {error.strerror}")
        return names
    for line in lines[:-1]:  # a line that was cut short has no newline
        number, tab, text = line.partition(b"\t")
        if tab and len(number) < DIGITS and number.isdigit() and int(number) <= MAX_NAMES:
            names[int(number)] = unescape_name(text.decode("utf-8", "replace"))
    return names


def _chunks(folder: Path) -> dict[int, Path]:
    """The chunks of a capture by their number."""
    return {int(match[1]): path for path in _listed(folder) if (match := CHUNK_NAME.fullmatch(path.name))}


def _read_chunks(
    chunks: dict[int, Path], names: dict[int, str], counted: int, problems: list[str]
) -> tuple[Array, int, int, list[Gap]]:
    """The records of all chunks, in the order of their numbers, how many were left out, their format, and gaps.

    counted: chunks that were given up; one more, maybe, than the headers say, for one that was prepared in vain.
    """
    parts: list[Array] = []
    damaged, oldest = 0, FORMAT_VERSION
    written: dict[int, tuple[int, int]] = {}
    """Of each chunk that was read: how many records come before it, and how many steps."""
    given_up = range(0)
    before = len(problems)
    for number, path in sorted(chunks.items()):
        content = _read_chunk(path, problems, newest=number == max(chunks))
        if content is None:
            continue
        _, version, _, _, index, _ = CHUNK_HEADER.unpack_from(content)
        oldest = min(oldest, version)
        if index != number:
            problems.append(f"{path.name}: its header says that it is {chunk_name(index)}")
            if index in chunks:
                continue  # a copy: these records are there already
        kept, gone, steps = CHUNK_PLACE.unpack_from(content, CHUNK_HEADER.size)
        gone = max(gone, counted)
        if kept and len(given_up) < gone <= MOST_CHUNKS and kept <= MOST_CHUNKS:
            given_up = range(kept, kept + gone)
        written[number] = sum(len(part) for part in parts), steps
        records, bad = _read_records(content, names, path.name, problems)
        parts.append(records)
        damaged += bad
    lost = (number for number in range(max(chunks, default=0)) if number not in chunks and number not in given_up)
    problems += [f"{chunk_name(number)}: {VANISHED}" for number in islice(lost, MOST_PROBLEMS)]
    if not written and not problems[before:]:
        problems.append("no records were written")
    gaps = [
        Gap(*written[after], after - number - 1, all(gone in given_up for gone in range(number + 1, after)))
        for number, after in pairwise(written)
        if after > number + 1
    ]
    return np.concatenate(parts) if parts else empty(0), damaged, oldest, [gap for gap in gaps if gap.before]


def _read_chunk(path: Path, problems: list[str], newest: bool) -> bytes | None:
    """The bytes of a chunk with a good header. The newest may have none: the process ended while it made it."""
    try:
        content = regular_files.read_bytes(path, LARGEST_CHUNK)
    except OSError as error:
        problems.append(f"{path.name}: {error.strerror}")
        return None
    if newest and not any(content[: len(CHUNK_MAGIC)]):
        return None
    if len(content) < CHUNK_HEADER_BYTES:
        problems.append(f"{path.name}: cut short inside its header")
        return None
    magic, version, record_bytes, _, _, _ = CHUNK_HEADER.unpack_from(content)
    if magic != CHUNK_MAGIC:
        problems.append(f"{path.name}: not a dsprof capture")
        return None
    if version not in READABLE_FORMATS or record_bytes != RECORD_BYTES:
        problems.append(f"{path.name}: format {version}, this dsprof reads {FORMAT_VERSION}")
        return None
    return content


def _read_records(content: bytes, names: dict[int, str], where: str, problems: list[str]) -> tuple[Array, int]:
    """A chunk's records, and how many were left out."""
    _, version, *_ = CHUNK_HEADER.unpack_from(content)
    count, rest = divmod(len(content) - CHUNK_HEADER_BYTES, RECORD_BYTES)
    if rest:
        problems.append(f"{where}: cut short inside a record")
    raw = np.frombuffer(content, np.uint8, count * RECORD_BYTES, CHUNK_HEADER_BYTES)
    records = decode(raw.reshape(-1, RECORD_BYTES), version)
    whole = records[plausible(records, names)]
    return whole, len(records) - len(whole)


def _look_for_a_copy(path: Path, problems: list[str]) -> None:
    """Where the capture was first written elsewhere, and not all of it has been copied
    (`collectors/capture/copier.py`)."""
    if not regular_files.is_file(path):
        return
    state = _read_json(path, problems)
    why = "is copied until the rank has ended" if not state.get("error") else f"could not be copied ({state['error']})"
    where = f"{state.get('local')} on {state.get('host')}"
    if state.get("gone"):
        problems.append(f"{where} was removed before all of it was copied: the newest part of its capture is lost")
        return
    moved = "if it and its copier were killed, `dsprof doctor` there moves it here"
    problems.append(f"the newest part of its capture {why}; it lies in {where}; {moved}")


def _read_json(path: Path, problems: list[str]) -> dict[str, Any]:
    try:
        value = regular_files.read_json(path, LARGEST_META)
        return value if isinstance(value, dict) else {}
    except FileNotFoundError:
        problems.append(f"{path.name}: missing")
    except (OSError, ValueError) as error:
        problems.append(f"{path.name}: {getattr(error, 'strerror', None) or error}")
    return {}


def _read_stacks(path: Path) -> list[dict[str, Any]]:
    """What the native helper wrote where a thread held the interpreter's lock, as a fact."""
    try:
        threads = parse_stacks(regular_files.read_text(path, LARGEST_STACKS))
    except OSError:
        return []
    name = CaptureName.of(path.parent.name)
    if not threads or name is None:
        return []
    return [{"fact": LOCKED, "rank": name.rank, "threads": threads, "site": user_site(threads[0]["frames"])}]


def _read_facts(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    facts: list[dict[str, Any]] = []
    try:
        lines = regular_files.read_text(path, LARGEST_FACTS).splitlines()
    except FileNotFoundError:
        return facts
    except OSError as error:
        problems.append(f"{path.name}: {error.strerror}")
        return facts
    name = CaptureName.of(path.parent.name)
    for line in lines:
        try:
            fact = regular_files.parse_json(line)
        except ValueError:
            problems.append(f"{path.name}: a damaged line")
            continue
        if isinstance(fact, dict) and isinstance(fact.get("fact"), str):
            facts.append(fact if name is None else {**fact, "rank": name.rank})
    return facts
