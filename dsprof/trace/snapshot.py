"""Memory snapshots of CUDA: what `torch.cuda.memory._dump_snapshot` writes, with or without a recorded history, as the
side tables of one rank.
"""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path
from typing import Any, Final, NamedTuple

from dsprof.regular_files import read_bytes
from dsprof.run import RunError

from .memory import ACTIONS, NO_STACK, Memory
from .plain_pickle import load

LARGEST: Final = 2 << 30
"""Bytes of a file that is read."""
STATES: Final = {
    "active_allocated": "allocated", "active_awaiting_free": "pending", "active_pending_free": "pending",
    "inactive": "free",
}  # fmt: skip
ENTRY: Final = 24
"""Bytes of the file that a segment, a block or an event takes at least. Real ones take 50 and more."""
NAMED: Final = 2
"""And a frame of a stack: mostly one of another stack again, named by its number."""


class Snapshot(NamedTuple):
    """What a file holds. `settings`: what it says of the allocator's; `warnings`: what is odd about it, in words."""

    memory: Memory
    settings: dict[str, Any]
    warnings: list[str]


def read_snapshot(path: Path) -> Snapshot:
    """A snapshot's file. Raises RunError for one that cannot be understood."""
    try:
        size = path.stat().st_size
        if size > LARGEST:
            raise RunError(
                f"{path}: {size:,} bytes, more than the {LARGEST:,} that are read; record fewer events "
                "(_record_memory_history(max_entries=100000))"
            )
        content = load(read_bytes(Path(os.path.realpath(path)), LARGEST), str(path))
    except OSError as error:
        raise RunError(f"{path}: cannot be read ({error.strerror}); make it readable") from error
    tables = SnapshotTables(path, size)
    memory = tables.of(content)
    return Snapshot(memory, _settings(content), tables.warnings)


class SnapshotTables:
    """A snapshot's lists as columns. A pickle may name a list again and again: all that is gone through is no more than
    the file has room for."""

    def __init__(self, path: Path, size: int) -> None:
        self._path, self._left = path, size
        """Bytes of the file that no entry took yet."""
        self._columns: dict[str, dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
        self._lists: dict[int, int] = {}
        """Identity of a list of frames -> its stack."""
        self._frames: dict[int, tuple[str, str, int]] = {}
        """Identity of a frame -> its function, file and line."""
        self._stacks: dict[tuple[tuple[str, str, int], ...], int] = {}
        self.warnings: list[str] = []

    def of(self, content: Any) -> Memory:
        if not isinstance(content, dict):
            raise self._wrong("the file", "no dictionary", "dump it with a torch of 2.1 or later")
        for number, segment in enumerate(self._list(content, "segments", "the file")):
            self._segment(number, segment)
        self._order_blocks()
        for device, trace in enumerate(self._list(content, "device_traces", "the file", missing=True, each=NAMED)):
            if not isinstance(trace, list):
                raise self._wrong(f"the history of device {device}", "no list")
            self._history(device, self._room_for(trace, ENTRY, f"the history of device {device}"))
        if not self._columns["history"]:
            self.warnings.append(
                "no history was recorded, so only the last state is known: call "
                "torch.cuda.memory._record_memory_history() before training"
            )
        return Memory.of(**self._columns)

    def _segment(self, number: int, segment: Any) -> None:
        where = f"segment {number}"
        self._add(
            "segments", device=self._number(segment, "device", where, 0),
            stream=self._number(segment, "stream", where, 0),
            address=self._number(segment, "address", where), bytes=self._number(segment, "total_size", where),
            pool=_pool(segment.get("segment_pool_id")) or "0.0", small=segment.get("segment_type") == "small",
            expandable=segment.get("is_expandable") is True, stack=self._stack(segment, where),
        )  # fmt: skip
        at = first = self._columns["segments"]["address"][-1]
        for index, block in enumerate(self._list(segment, "blocks", where)):
            what = f"{where}, block {index}"
            state = STATES.get(self._text(block, "state", what))
            if state is None:
                raise self._wrong(what, "a state that is none of " + ", ".join(STATES))
            size = self._number(block, "size", what)
            address = self._number(block, "address", what, at)
            if address != at or size <= 0:
                raise self._wrong(what, "not where the one before it ends")
            at += size
            self._add(
                "blocks", segment=number, address=address, bytes=size, state=state, stack=self._stack(block, what),
                requested=self._number(block, "requested_size", what, size),
            )  # fmt: skip
        if at != first + self._columns["segments"]["bytes"][-1]:
            raise self._wrong(where, "longer or shorter than its blocks together")

    def _order_blocks(self) -> None:
        """Raises RunError where segments of a device lie on each other."""
        segments = self._columns["segments"]
        last: dict[int, int] = {}
        for address, size, device in sorted(
            zip(segments["address"], segments["bytes"], segments["device"], strict=True)
        ):
            if address < last.get(device, 0):
                raise self._wrong("the file", "two segments at one place")
            last[device] = address + size

    def _history(self, device: int, trace: list[Any]) -> None:
        unknown: set[str] = set()
        for index, event in enumerate(trace):
            where = f"event {index} of device {device}"
            action = self._text(event, "action", where)
            if action not in ACTIONS:
                unknown.add(action)
                continue
            place = "device_free" if action == "oom" else "addr"
            self._add(
                "history", device=device, action=action, address=self._number(event, place, where, 0),
                bytes=self._number(event, "size", where), stream=self._number(event, "stream", where, 0),
                pool=_pool(event.get("pool_id")), time_us=self._number(event, "time_us", where, 0),
                stack=self._stack(event, where),
            )  # fmt: skip
        if unknown:
            names = ", ".join(sorted(repr(name[:40]) for name in unknown)[:8])
            self.warnings.append(f"device {device}: unknown actions in its history are left out: {names}")

    # --- parts ------------------------------------------------------------------------------------

    def _stack(self, holder: dict[str, Any], where: str) -> int:
        frames = holder.get("frames")
        if not frames:
            return NO_STACK
        known = self._lists.get(id(frames))
        if known is not None:
            return known
        listed = self._list(holder, "frames", where, each=NAMED)
        stack = tuple([self._frames.get(id(frame)) or self._frame(frame, where) for frame in listed])
        number = self._stacks.get(stack)
        if number is None:
            number = self._stacks[stack] = len(self._stacks)
            for function, file, line in stack:
                self._add("stacks", stack=number, function=function, file=file, line=line)
        self._lists[id(frames)] = number
        return number

    def _frame(self, frame: Any, where: str) -> tuple[str, str, int]:
        file, name = (self._text(frame, key, f"{where}, frames") for key in ("filename", "name"))
        found = name, file, self._number(frame, "line", f"{where}, frames", 0, most=2**31 - 1)
        self._frames[id(frame)] = found
        return found

    def _add(self, table: str, **values: Any) -> None:
        columns = self._columns[table]
        for name, value in values.items():
            columns[name].append(value)

    def _list(self, holder: Any, key: str, where: str, *, missing: bool = False, each: int = ENTRY) -> list[Any]:
        found = holder.get(key) if isinstance(holder, dict) else None
        if found is None and missing:
            return []
        if not isinstance(found, list):
            raise self._wrong(where, f"no list `{key}`")
        return self._room_for(found, each, where)

    def _room_for(self, found: list[Any], each: int, where: str) -> list[Any]:
        """The list. Raises RunError where all that is gone through, at `each` bytes an entry, is more than the file."""
        self._left -= len(found) * each
        if self._left < 0:
            raise self._wrong(where, "more entries than the file has room for")
        return found

    def _number(self, holder: Any, key: str, where: str, default: int | None = None, most: int = 2**63 - 1) -> int:
        value = holder.get(key, default) if isinstance(holder, dict) else None
        if type(value) is not int or not 0 <= value <= most:
            raise self._wrong(where, f"`{key}` is no whole number from 0 to {most:,}")
        return value

    def _text(self, holder: Any, key: str, where: str) -> str:
        value = holder.get(key) if isinstance(holder, dict) else None
        if not isinstance(value, str):
            raise self._wrong(where, f"`{key}` is no text")
        return value

    def _wrong(self, where: str, what: str, instead: str = "dump the snapshot again") -> RunError:
        return RunError(f"{self._path}: {where}: {what}; {instead}")


def _pool(value: Any) -> str:
    """`0.0`, or nothing where it is not told."""
    if isinstance(value, tuple) and len(value) == 2 and all(type(part) is int for part in value):
        return f"{value[0]}.{value[1]}"
    return ""


def _settings(content: dict[str, Any]) -> dict[str, Any]:
    """What the snapshot says of `PYTORCH_CUDA_ALLOC_CONF`: numbers, texts, and numbers by name."""
    found = content.get("allocator_settings")
    plain = (bool, int, float, str)
    kept: dict[str, Any] = {}
    for name, value in found.items() if isinstance(found, dict) else ():
        if isinstance(value, plain):
            kept[str(name)] = value
        elif isinstance(value, dict):
            kept[str(name)] = {str(key): one for key, one in value.items() if isinstance(one, plain)}
    return kept
