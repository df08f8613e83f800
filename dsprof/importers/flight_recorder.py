"""Dumps of torch's Flight Recorder, one file a rank: what each rank had issued, and which of it had not ended.

They are JSON (`_dump_nccl_trace_json`) or pickles (`_dump_nccl_trace`, TORCH_NCCL_DUMP_ON_TIMEOUT), which are read by
`plain_pickle`. Times are of the hosts' wall clocks. A collective has its number in the group as torch counts it.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import pandas as pd

from dsprof.live.frames import user_site
from dsprof.names import new_run_id
from dsprof.regular_files import read_bytes
from dsprof.run import RunError, RunInfo
from dsprof.schema import COLUMNS, STANDSTILL
from dsprof.trace import Trace
from dsprof.trace.plain_pickle import load
from dsprof.trace.room import room_for, taken_by_json

from .assemble import rank_info

DESCRIPTION: Final = "Flight Recorder dumps (JSON, or pickles)"

PICKLE: Final = ("a Flight Recorder dump", "TORCH_NCCL_DUMP_ON_TIMEOUT=1")
LARGEST: Final = 64 << 20
"""Bytes of a file that is read: those of 2,000 communications, torch's default, have five."""
ENTRY: Final = 64
"""Bytes of the file that a communication takes at least. Real ones take some 300 and more."""
HEAD: Final = 1 << 16
RANK: Final = re.compile(r"(\d+)(?:\.(?:json|pkl|pickle|bin))?$")
MOST_RANK: Final = 1_000_000
MOST_MEMBERS: Final = 100_000
LONGEST_NAME: Final = 200
DEFAULT: Final = "default_pg"
MESSAGE: Final = re.compile(r"(send|recv) (\d+)(->|<-)(\d+)$")
NAMES: Final = {
    "_all_gather_base": "all_gather", "all_gather_into_tensor_coalesced": "all_gather",
    "all_gather_single": "all_gather", "all_gather_v": "all_gather", "ALLGATHER_coalesced": "all_gather",
    "_broadcast_oop": "broadcast",
    "_reduce_oop": "reduce", "_reduce_scatter_base": "reduce_scatter", "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter", "reduce_scatter_v": "reduce_scatter",
    "REDUCE_SCATTER_coalesced": "reduce_scatter", "all_to_all_single": "all_to_all",
    "all_to_all_v_single": "all_to_all",
    "all_reduce_barrier": "barrier", "allreduce_coalesced": "all_reduce",
}  # fmt: skip
"""Its name of a collective -> ours; others are the same."""
SIZES: Final = {
    "Byte": ("uint8", 1), "Char": ("int8", 1), "Short": ("int16", 2), "Int": ("int32", 4), "Long": ("int64", 8),
    "Half": ("float16", 2), "Float": ("float32", 4), "Double": ("float64", 8), "BFloat16": ("bfloat16", 2),
    "Bool": ("bool", 1), "ComplexFloat": ("complex64", 8), "ComplexDouble": ("complex128", 16),
}  # fmt: skip
"""Its name of a type -> ours, and bytes of an element; of others the size is not known."""


def recognizes(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            head = file.read(HEAD)
            file.seek(0, 2)
            file.seek(max(file.tell() - HEAD, 0))
            ends = head + file.read(HEAD)
    except OSError:
        return False
    return head[:1] in (b"\x80", b"{") and b"entries" in ends and b"pg_config" in ends


def read(path: Path) -> Trace:
    """One rank's dump. Raises RunError for one that cannot be understood."""
    return read_all([path])


def read_all(paths: Iterable[Path]) -> Trace:
    """The dumps of several ranks. One that cannot be understood costs only itself, with a warning. Raises RunError
    where none can."""
    dumps: dict[int, Dump] = {}
    refused: list[RunError] = []
    listed = sorted(paths)
    for path in listed:
        try:
            dump = Dump(path)
            dump.rows()
            if dump.rank in dumps:
                raise RunError(f"{path}: of rank {dump.rank}, as {dumps[dump.rank].path.name} is; keep one of them")
            dumps[dump.rank] = dump
        except RunError as error:
            refused.append(error)
    if not dumps:
        raise refused[0]
    groups: dict[str, dict[str, Any]] = {}
    for dump in dumps.values():
        groups |= dump.groups
    warnings = [f"left out: {error}" for error in refused]
    expected = max([max(dumps) + 1, *(max(group["ranks"], default=0) + 1 for group in groups.values())])
    rows = pd.concat([pd.DataFrame(dump.rows(), columns=list(COLUMNS)) for dump in dumps.values()])
    name = listed[0].parent.name if len(listed) > 1 else listed[0].stem
    first = min(dumps)
    facts: list[dict[str, Any]] = [
        {"fact": "import", "rank": first, "format": "flight_recorder", "file": listed[0].name, "warnings": warnings}
    ]
    facts += [{"fact": "group", "rank": first, "name": group, **about} for group, about in groups.items()]
    facts += [fact for dump in dumps.values() if (fact := dump.standstill()) is not None]
    info = RunInfo(
        id=new_run_id(name), name=name, level="", command=["dsprof", "import", str(listed[0].parent)],
        world_size=expected, facts=facts, groups=groups,
        ranks=[rank_info(rank, len(dump.entries), whole=False) for rank, dump in sorted(dumps.items())],
    )  # fmt: skip
    return Trace.of(info, rows.sort_values(["rank", "start_ns"], kind="stable", ignore_index=True))


class Dump:
    """One rank's."""

    def __init__(self, path: Path) -> None:
        """Raises RunError."""
        self.path = path
        data = _data(path)
        content = _content(path, data)
        if not isinstance(content, dict):
            raise self._wrong("the file", "no dictionary")
        entries, config = content.get("entries"), content.get("pg_config")
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise self._wrong("entries", "no list of dictionaries")
        if len(entries) * ENTRY > len(data) + HEAD:  # in a pickle one may be named again and again
            raise self._wrong("entries", f"{len(entries):,} communications in {len(data):,} bytes")
        self.entries: list[dict[str, Any]] = entries
        self.groups = self._groups(config, len(data) + MOST_MEMBERS)
        self.rank = self._rank(content)

    def _rank(self, content: Mapping[str, Any]) -> int:
        found = content.get("rank")
        if not isinstance(found, int):
            match = RANK.search(self.path.name)
            if match is None:
                raise self._wrong("its name", "none that ends in the rank's number, such as nccl_trace_rank_3")
            found = int(match[1])
        if not 0 <= found <= MOST_RANK:
            raise self._wrong("its name", f"rank {found}, which is none")
        return found

    def _groups(self, config: Any, most: int) -> dict[str, dict[str, Any]]:
        """`most`: members of all of them together."""
        if not isinstance(config, dict):
            raise self._wrong("pg_config", "no dictionary of process groups")
        found = {}
        for name, about in config.items():
            ranks = about.get("ranks") if isinstance(about, dict) else None
            if isinstance(ranks, str):
                try:
                    ranks = json.loads(ranks) if len(ranks) <= 16 * MOST_MEMBERS else None
                except (ValueError, RecursionError):
                    ranks = None
            listed = ranks if isinstance(ranks, (list, tuple)) and len(ranks) <= MOST_MEMBERS else (None,)
            if not all(type(rank) is int and 0 <= rank <= MOST_RANK for rank in listed):
                raise self._wrong(f"process group {str(name)[:80]!r}", "no list of ranks")
            most -= len(listed)
            if most < 0:
                raise self._wrong("pg_config", "more members in its process groups than the file has room for")
            described = str(about.get("desc", ""))
            found[str(name)[:LONGEST_NAME]] = {"ranks": sorted(listed), "desc": described, "size": len(listed)}
        for entry in self.entries:  # of gloo the default group has no name in the configuration
            group = entry.get("process_group")
            if isinstance(group, (list, tuple)) and group[1:2] in ([DEFAULT], (DEFAULT,)) and "" in found:
                found.setdefault(str(group[0])[:LONGEST_NAME], found.pop("") | {"desc": DEFAULT})
        return found

    def rows(self) -> list[dict[str, Any]]:
        """A row a communication. Raises RunError.

        What was coalesced has one number: the last entry, which stands for all of it. Messages are numbered by the rank
        and not by the pair: here they are counted, if none of them had left the ring.
        """
        found: dict[tuple[Any, ...], dict[str, Any]] = {}
        counted: Counter[tuple[Any, ...]] = Counter()
        whole = not self.entries or self.entries[0].get("record_id") == 0
        for number, entry in enumerate(self.entries):
            row = self._row(number, entry)
            if row["peer"] is not None:
                pair = (row["group"], row["peer"], row["name"])
                row["seq"] = counted[pair] if whole else None
                counted[pair] += 1
                found["message", number] = row
            elif not entry.get("is_p2p"):
                found[row["group"], row["seq"]] = row
        return list(found.values())

    def _row(self, number: int, entry: Mapping[str, Any]) -> dict[str, Any]:
        where = f"entry {number}"
        group = self._group_of(entry, where)
        name, peer = self._name(entry, where)
        seq = None if peer is not None else self._number(entry, "collective_seq_id", where)
        created = self._number(entry, "time_created_ns", where)
        started = entry.get("time_discovered_started_ns")
        ended = entry.get("time_discovered_completed_ns")
        start = started if type(started) is int and started >= created else created  # 0 or None: not seen
        done = _is_done(entry)
        end = ended if type(ended) is int and ended >= start else None
        size, dtype = self._payload(entry)
        members = self.groups.get(group, {}).get("ranks") or []
        return {
            "rank": self.rank, "restart": 0, "step": -1, "kind": "comm", "name": name, "lane": f"comm.{group}",
            "depth": 0, "start_ns": start, "dur_ns": end - start if done and end is not None else None, "ended": done,
            "issue_ns": created, "group": group, "seq": seq, "bytes": size, "dtype": dtype,
            "peer": peer if peer is None or peer < len(members) or not members else None,
            "tag": 0 if peer is not None else None, "site": user_site(_frames(entry)), "source": "imported",
        }  # fmt: skip

    def standstill(self) -> dict[str, Any] | None:
        """Where the rank issued the last of what has not ended; None where all has."""
        left = [entry for entry in self.entries if not _is_done(entry)]
        if not left:
            return None
        frames = _frames(left[-1])
        at = self._number(left[-1], "time_created_ns", "the last entry")
        threads = [{"name": "", "task": None, "trains": True, "frames": frames}] if frames else []
        site = user_site(frames)
        return {"fact": STANDSTILL, "rank": self.rank, "since_ns": at, "at_ns": at, "site": site, "threads": threads}

    # --- fields

    def _group_of(self, entry: Mapping[str, Any], where: str) -> str:
        group = entry.get("process_group")
        if not isinstance(group, (list, tuple)) or not group or not isinstance(group[0], str):
            raise self._wrong(where, "no process_group (name, description)")
        return group[0][:LONGEST_NAME]

    def _name(self, entry: Mapping[str, Any], where: str) -> tuple[str, int | None]:
        """And the other side, a rank of the group."""
        text = entry.get("profiling_name")
        if not isinstance(text, str) or ":" not in text:
            raise self._wrong(where, "no profiling_name such as nccl:all_reduce")
        name = text.partition(":")[2]
        message = MESSAGE.match(name)
        if message is not None:
            return message[1], int(message[4])
        return NAMES.get(name, name)[:LONGEST_NAME], None

    def _number(self, entry: Mapping[str, Any], field: str, where: str) -> int:
        value = entry.get(field)
        if type(value) is not int or not 0 <= value < 2**62:
            raise self._wrong(where, f"no number as its {field}")
        return value

    def _payload(self, entry: Mapping[str, Any]) -> tuple[int | None, str | None]:
        """The larger side's bytes, and the type; None: not known."""
        totals, types = [], []
        for side in ("input", "output"):
            sizes, names = entry.get(f"{side}_sizes"), entry.get(f"{side}_dtypes")
            if not isinstance(sizes, (list, tuple)) or not isinstance(names, (list, tuple)):
                return None, None
            known = [SIZES.get(str(name)) for name in names]
            types += [one[0] for one in known if one is not None]
            if len(names) != len(sizes) or None in known:
                return None, types[0] if types else None
            for size in sizes:
                if not isinstance(size, (list, tuple)) or not all(type(n) is int and 0 <= n < 2**48 for n in size):
                    return None, types[0] if types else None
            totals.append(sum(math.prod(size) * one[1] for size, one in zip(sizes, known, strict=True) if one))
        largest = max(totals)
        return (largest if largest < 2**62 else None), types[0] if types else None

    def _wrong(self, where: str, what: str) -> RunError:
        return RunError(
            f"{self.path}: {where} has {what}, so it is no whole dump of the Flight Recorder; take it again "
            "(TORCH_FR_BUFFER_SIZE, TORCH_NCCL_DUMP_ON_TIMEOUT=1), or copy it again"
        )


def _data(path: Path) -> bytes:
    try:
        size = path.stat().st_size
        if size > LARGEST:
            raise RunError(
                f"{path}: {size:,} bytes, more than the {LARGEST:,} that are read; use a smaller TORCH_FR_BUFFER_SIZE"
            )
        return read_bytes(Path(os.path.realpath(path)), LARGEST)
    except OSError as error:
        raise RunError(f"{path}: cannot be read ({error.strerror}); make it readable") from error


def _content(path: Path, data: bytes) -> Any:
    if data[:1] == b"\x80":
        return load(data, str(path), PICKLE)
    most = room_for(len(data))
    if taken_by_json(data) > most:
        raise RunError(
            f"{path}: its {len(data):,} bytes would take more than {most >> 20:,} MiB of memory, which "
            f"{PICKLE[0]} never does; dump it again with {PICKLE[1]}"
        )
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        reason = (str(error).splitlines() or [""])[0][:100]
        raise RunError(f"{path}: damaged or cut short ({reason}); copy or dump it again") from error


def _is_done(entry: Mapping[str, Any]) -> bool:
    """Whether it has ended: gloo's stay "scheduled", and are retired when they end."""
    return entry.get("state") == "completed" or entry.get("retired") is True


def _frames(entry: Mapping[str, Any]) -> list[list[Any]]:
    """The innermost first; none where they were not recorded."""
    frames = entry.get("frames")
    if not isinstance(frames, (list, tuple)):
        return []
    return [
        [str(frame.get("filename", ""))[:1000], line if type(line := frame.get("line")) is int else 0,
         str(frame.get("name", ""))[:200]]
        for frame in frames[:100]
        if isinstance(frame, dict)
    ]  # fmt: skip
