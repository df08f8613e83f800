"""What a communication of the device, or c10d's annotation of one, says of its collective: from the arguments of the
kernel, which newer traces have, from the annotation around its launch, else from its name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import orjson

from .events import UNKNOWN, Annotation, Events
from .names import ANNOTATIONS, MESSAGES, bytes_of, collective_name, dtype_of

Int = npt.NDArray[np.int64]

MOST_GROUP: Final = 128
NUMBERS: Final = ("seq_num", "Seq")
"""Arguments that number a collective within its group: NCCL's own, which traces have since 2026, and c10d's. The first
that is there counts."""
ELIDED: Final = "..."
"""In a list of ranks that Kineto found too long."""


class CollectiveReader:
    """groups: name -> {ranks, size, desc, backend}, as far as the file tells, of those that it names and those met."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self.groups: dict[str, dict[str, Any]] = _groups_told(events.about)

    def read(
        self, args: Mapping[str, Any], kernel: str, note: Annotation | None, is_always: str = ""
    ) -> dict[str, Any]:
        """name, group, seq, bytes, dtype of a communication, as far as its arguments and c10d's annotation tell.
        `is_always`: which collective kernels of that name are."""
        told = {**(note.args if note is not None else {}), **args}
        word = told.get("Collective name")
        name = (collective_name(word) if isinstance(word, str) else None) or is_always or None
        name = name or (collective_name(note.name) if note is not None else None) or collective_name(kernel)
        found: dict[str, Any] = {"name": name or "collective"}
        size = bytes_of(told)
        if size is None and note is not None:
            size = bytes_of(note.args)
        if size is not None:
            found["bytes"] = size
        kind = told.get("dtype")
        if isinstance(kind, str) and dtype_of(kind):
            found["dtype"] = dtype_of(kind)
        if name in MESSAGES or name is None:  # of a message its other side is not told
            return found
        group = told.get("Process Group Name")
        if isinstance(group, (str, int)) and not isinstance(group, bool) and str(group):
            found["group"] = str(group)[:MOST_GROUP]
            self._know_group(found["group"], told)
            seq = next((number for number in map(_number, map(told.get, NUMBERS)) if number is not None), None)
            if seq is not None:
                found["seq"] = seq
        else:
            found["group"] = f"{name} (group not told)"
            self.groups.setdefault(found["group"], {"ranks": [], "size": 0, "desc": "", "backend": "kernels"})
        return found

    def _know_group(self, group: str, told: Mapping[str, Any]) -> None:
        about = self.groups.setdefault(group, {"ranks": [], "size": 0, "desc": "", "backend": "kernels"})
        about["backend"] = "kernels" if len(self._events.device) else about.get("backend", "")
        if not about["ranks"]:
            about["ranks"] = _ranks(told.get("Process Group Ranks"))
        size = told.get("Group size")
        if type(size) is int and 0 < size < 1 << 24:
            about["size"] = size
        desc = told.get("Process Group Description")
        if isinstance(desc, str) and not about["desc"]:
            about["desc"] = desc[:MOST_GROUP]

    def notes_around(self, calls: Int) -> list[Annotation | None]:
        """c10d's annotation that each call was made within, if it has one."""
        by_thread: dict[int, list[Annotation]] = {}
        for note in self._events.annotations:
            if note.name.startswith(ANNOTATIONS):
                by_thread.setdefault(note.thread, []).append(note)
        begins = {}
        for thread, notes in by_thread.items():
            notes.sort(key=lambda note: note.start_ns)
            begins[thread] = np.array([note.start_ns for note in notes], np.int64)
        table, found = self._events.calls, list[Annotation | None]()
        for call in calls.tolist():
            thread = int(table["thread"][call]) if call != UNKNOWN else UNKNOWN
            around: Annotation | None = None
            if thread in by_thread:
                when = int(table["start_ns"][call])
                at = int(np.searchsorted(begins[thread], when, "right")) - 1
                last = by_thread[thread][at] if at >= 0 else None
                around = last if last is not None and when < last.start_ns + last.dur_ns else None
            found.append(around)
        return found


def _number(told: Any) -> int | None:
    if isinstance(told, str) and told.isdecimal() and len(told) <= 10:
        told = int(told)
    return told if type(told) is int and 0 <= told < 1 << 31 else None


def _groups_told(about: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The process groups that `distributedInfo` names."""
    told = about.get("distributedInfo")
    config = told.get("pg_config") if isinstance(told, dict) else None
    found = {}
    for one in config if isinstance(config, list) else ():
        if isinstance(one, dict) and isinstance(one.get("pg_name"), (str, int)):
            ranks, size = _ranks(one.get("ranks")), one.get("pg_size")
            found[str(one["pg_name"])[:MOST_GROUP]] = {
                "ranks": ranks, "size": size if type(size) is int and 0 < size < 1 << 24 else len(ranks),
                "desc": str(one.get("pg_desc", ""))[:MOST_GROUP], "backend": "kernels",
            }  # fmt: skip
    return found


def _ranks(told: Any) -> list[int]:
    """A list of ranks, or its text; nothing where it is cut short or none."""
    if isinstance(told, str) and ELIDED not in told:
        try:
            told = orjson.loads(told)
        except orjson.JSONDecodeError:
            return []
    if isinstance(told, list) and all(type(rank) is int and 0 <= rank < 1 << 24 for rank in told):
        return sorted(set(told))
    return []
