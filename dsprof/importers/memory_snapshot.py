"""Memory snapshots of CUDA: what `torch.cuda.memory._dump_snapshot` writes, with or without a recorded history.

The whole snapshot becomes the side tables of `dsprof.trace.Memory`, of rank 0. The trace's own rows are `mem` samples:
`reserved`, what the allocator holds, and `requested`, what tensors asked for, at each change.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd

from dsprof.run import RankInfo, RunError, RunInfo
from dsprof.schema import COLUMNS, new_run_id
from dsprof.trace import Memory, Trace
from dsprof.trace.memory import ACTIONS, NO_STACK

from .plain_pickle import load

DESCRIPTION: Final = "a CUDA memory snapshot (torch.cuda.memory._dump_snapshot)"

LARGEST: Final = 2 << 30
"""Bytes of a file that is read."""
HEAD: Final = 256
"""Bytes at its beginning in which a snapshot names its first table."""
STATES: Final = {
    "active_allocated": "allocated", "active_awaiting_free": "pending", "active_pending_free": "pending",
    "inactive": "free",
}  # fmt: skip
RESERVES: Final = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
REQUESTS: Final = {"alloc": 1, "free_requested": -1}


def recognizes(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            head = file.read(HEAD)
    except OSError:
        return False
    return head[:1] == b"\x80" and (b"segments" in head or b"device_traces" in head)


def read(path: Path) -> Trace:
    """The snapshot as a trace of one rank. Raises RunError for one that cannot be understood."""
    try:
        size = path.stat().st_size
        if size > LARGEST:
            raise RunError(
                f"{path}: {size:,} bytes, more than the {LARGEST:,} that are read; record fewer events "
                "(_record_memory_history(max_entries=100000))"
            )
        content = load(path.read_bytes(), str(path))
    except OSError as error:
        raise RunError(f"{path}: cannot be read ({error.strerror}); make it readable") from error
    tables = SnapshotTables(path, size)
    memory = tables.of(content)
    rows = _samples(memory)
    facts = [
        {"fact": "import", "rank": 0, "format": "memory_snapshot", "file": path.name, "warnings": tables.warnings},
        {"fact": "allocator", "rank": 0, "settings": _settings(content)},
    ]
    info = RunInfo(
        id=new_run_id(path.stem), name=path.stem, command=["dsprof", "import", str(path)], world_size=1,
        facts=facts,
        ranks=[
            RankInfo(
                rank=0, restart=0, host="", pid=0, capture="", native=True, last_step=-1, records=len(rows), dropped=0,
                damaged=0, errors=0, closed=True,
            )
        ],
    )  # fmt: skip
    return Trace.of(info, rows, {0: memory})


class SnapshotTables:
    """A snapshot's lists as columns. No list is gone through twice, and all together are no longer than the file."""

    def __init__(self, path: Path, size: int) -> None:
        self._path, self._left = path, size
        self._columns: dict[str, dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
        self._lists: dict[int, int] = {}
        """Identity of a list of frames -> its stack."""
        self._stacks: dict[tuple[tuple[str, str, int], ...], int] = {}
        self.warnings: list[str] = []

    def of(self, content: Any) -> Memory:
        if not isinstance(content, dict):
            raise self._wrong("the file", "no dictionary", "dump it with a torch of 2.1 or later")
        for number, segment in enumerate(self._list(content, "segments", "the file")):
            self._segment(number, segment)
        self._order_blocks()
        for device, trace in enumerate(self._list(content, "device_traces", "the file", missing=True)):
            self._history(device, trace)
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

    def _history(self, device: int, trace: Any) -> None:
        if not isinstance(trace, list):
            raise self._wrong(f"the history of device {device}", "no list")
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
        found = []
        for frame in self._list(holder, "frames", where):
            file, name = (self._text(frame, key, f"{where}, frames") for key in ("filename", "name"))
            found.append((name, file, self._number(frame, "line", f"{where}, frames", 0, most=2**31 - 1)))
        stack = tuple(found)
        number = self._stacks.get(stack)
        if number is None:
            number = self._stacks[stack] = len(self._stacks)
            for function, file, line in stack:
                self._add("stacks", stack=number, function=function, file=file, line=line)
        self._lists[id(frames)] = number
        return number

    def _add(self, table: str, **values: Any) -> None:
        columns = self._columns[table]
        for name, value in values.items():
            columns[name].append(value)

    def _list(self, holder: Any, key: str, where: str, *, missing: bool = False) -> list[Any]:
        found = holder.get(key) if isinstance(holder, dict) else None
        if found is None and missing:
            return []
        if not isinstance(found, list):
            raise self._wrong(where, f"no list `{key}`")
        self._left -= len(found)
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


def _samples(memory: Memory) -> pd.DataFrame:
    """`mem` rows: bytes reserved and requested after each change of them; the last one is the snapshot's own."""
    parts = [pd.DataFrame(columns=list(COLUMNS))]
    used = memory.blocks[memory.blocks["state"] == "allocated"]
    device = memory.segments["device"].to_numpy(np.int64)[used["segment"].to_numpy(np.int64)]
    last = {
        "reserved": memory.segments.groupby("device")["bytes"].sum(),
        "requested": used.groupby(device)["requested"].sum(),
    }
    devices = sorted({*memory.segments["device"], *memory.history["device"]})
    for number in devices:
        history = memory.history[memory.history["device"] == number]
        for name, signs in (("reserved", RESERVES), ("requested", REQUESTS)):
            events = history[history["action"].isin(list(signs))]
            change = events["bytes"].to_numpy(np.int64) * events["action"].astype(object).map(signs).to_numpy(np.int64)
            final = int(last[name].get(number, 0))
            value = final - int(change.sum()) + np.cumsum(change)
            when = events["time_us"].to_numpy(np.int64) * 1000
            if not len(when):
                value, when = np.array([final]), np.array([int(history["time_us"].max()) * 1000 if len(history) else 0])
            parts.append(
                pd.DataFrame({"name": name, "lane": f"cuda.{number}", "start_ns": when, "bytes": value, "step": -1})
            )
    rows = pd.concat([part for part in parts if len(part)] or parts, ignore_index=True).reindex(columns=list(COLUMNS))
    rows = rows.assign(rank=0, restart=0, kind="mem", dur_ns=0, ended=True, source="imported")
    return rows.sort_values("start_ns", kind="stable", ignore_index=True).astype(dict(COLUMNS))
