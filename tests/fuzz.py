"""Traces of all formats as somebody hostile, or a bad disk, leaves them: seeded, each beside a good rank."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import random
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import kineto_traces as kt
from damage import damaged
from perfetto_traces import as_torch_writes, field
from test_import_chakra import message, node
from test_import_mapped import megascan
from test_import_nsight import report
from test_import_snapshot import tiny

BIG: Final = 1 << 62
HOSTILE: Final[tuple[Any, ...]] = (
    None, True, -1, 0, BIG, -BIG, 1 << 70, 1e308, -1e308, 0.5, "", "x", "9" * 5000, "\x1b[2J\x00\u202e" * 50,
    "../../etc/passwd", [], {}, [[]], [BIG] * 300, {"a": {"b": {"c": 1}}}, "[" * 3000, list(range(2000)),
)  # fmt: skip
"""What a value may be that is none."""

ARGS: Final = {"Collective name": "allreduce", "Process Group Name": "0", "In msg nelems": 1000, "dtype": "Float",
               "Group size": 2, "Process Group Ranks": "[0, 1]"}  # fmt: skip

Write = Callable[[Path, int, random.Random | None], None]
"""Writes a rank's file into a folder; with a Random one that is hostile."""


def json_of(told: Any, chance: random.Random | None) -> bytes:
    """As text; hostile: some values are others, or the text is damaged."""
    if chance is None:
        return json.dumps(told).encode()
    if chance.random() < 0.3:
        return damaged(chance, json.dumps(told).encode())
    told = json.loads(json.dumps(told))
    for _ in range(chance.randrange(1, 5)):
        told = spoiled(told, chance)
    text = json.dumps(told)
    if chance.random() < 0.1:
        text = text.replace("1", chance.choice(("NaN", "-Infinity", "1e999", "00", "0x1")), 3)
    if chance.random() < 0.05:
        text = text[:-1] + ', "deep": ' + "[" * 100_000 + "]" * 100_000 + text[-1]
    return text.encode()


def spoiled(told: Any, chance: random.Random) -> Any:
    """One value in it, anywhere, is another one, or is missing."""
    if isinstance(told, dict) and told and chance.random() < 0.95:
        key = chance.choice([*told])
        if chance.random() < 0.15:
            return {name: value for name, value in told.items() if name != key}
        return {**told, key: spoiled(told[key], chance)}
    if isinstance(told, list) and told and chance.random() < 0.95:
        at = chance.randrange(len(told))
        if chance.random() < 0.1:
            return told[:at] + told[at + 1 :]
        return [*told[:at], spoiled(told[at], chance), *told[at + 1 :]]
    return chance.choice(HOSTILE)


def kineto(folder: Path, rank: int, chance: random.Random | None) -> None:
    about = {"distributedInfo": {"rank": rank, "world_size": 2, "backend": "nccl"}}
    events = kt.training(steps=3, args=ARGS)
    name = f"rank{rank}.json"
    if chance is None:
        (folder / name).write_text(kt.as_kineto(events, **about))
        return
    if chance.random() < 0.5:
        content = json_of({"schemaVersion": 1, **about, "traceEvents": events}, chance)
    else:
        for _ in range(chance.randrange(1, 6)):
            events = spoiled(events, chance)
            events = events if isinstance(events, list) else []
        events = [event if isinstance(event, dict) else {"ph": event} for event in events]
        content = kt.as_kineto(events, **about).encode()
    if chance.random() < 0.4:
        packed = gzip.compress(content)
        (folder / f"{name}.gz").write_bytes(damaged(chance, packed) if chance.random() < 0.7 else packed[:-9])
    else:
        (folder / name).write_bytes(content)


def perfetto(folder: Path, rank: int, chance: random.Random | None) -> None:
    content = as_torch_writes(kt.training(steps=3, args=ARGS))
    if chance is not None:
        content = damaged(chance, content)
    (folder / f"rank{rank}.pftrace").write_bytes(content)


def mapped(folder: Path, rank: int, chance: random.Random | None) -> None:
    events = [event for event in megascan(slow=-1, steps=2) if event["pid"] == rank]
    (folder / f"benchmark-rank{rank}.json").write_bytes(json_of(events, chance))


def nsight(folder: Path, rank: int, chance: random.Random | None) -> None:
    path = report(folder / f"rank{rank}.sqlite", steps=3)
    if chance is None:
        return
    if chance.random() < 0.5:
        path.write_bytes(damaged(chance, path.read_bytes()))
        return
    database = sqlite3.connect(path)
    tables = [name for (name,) in database.execute("select name from sqlite_master where type = 'table'")]
    for _ in range(chance.randrange(1, 4)):
        table = chance.choice(tables)
        columns = [row[1] for row in database.execute(f"pragma table_info({table})")]
        column = chance.choice(columns or ["x"])
        how = chance.randrange(4)
        try:
            if how == 0:
                database.execute(f"drop table {table}")
            elif how == 1:
                database.execute(f"alter table {table} drop column {column}")
            else:
                value = chance.choice(("x", -1, BIG, 1e300, None, b"\x00\xff" * 50, "9" * 900))
                where = "" if how == 2 else "where rowid % 3 = 0"
                database.execute(f"update {table} set {column} = ? {where}", (value,))
        except sqlite3.Error:
            pass
    database.commit()
    database.close()


def flight_recorder(folder: Path, rank: int, chance: random.Random | None) -> None:
    entries = [
        {"record_id": number, "process_group": ["0", "default_pg"], "collective_seq_id": number + 1,
         "profiling_name": "nccl:all_reduce", "time_created_ns": 1000 * number, "input_sizes": [[16]],
         "input_dtypes": ["Float"], "output_sizes": [[16]], "output_dtypes": ["Float"], "state": "completed",
         "time_discovered_started_ns": 1000 * number, "time_discovered_completed_ns": 1000 * number + 500,
         "is_p2p": False, "frames": [{"name": "f", "filename": "/home/me/t.py", "line": 3}]}
        for number in range(4)
    ]  # fmt: skip
    told = {"entries": entries, "pg_config": {"0": {"desc": "default_pg", "ranks": "[0, 1]"}}}
    (folder / f"trace_{rank}.json").write_bytes(json_of(told, chance))


def snapshot(folder: Path, rank: int, chance: random.Random | None) -> None:
    told = tiny()
    if chance is not None:
        for _ in range(chance.randrange(1, 4)):
            told = spoiled(told, chance)
    content = pickle.dumps(told)
    if chance is not None and chance.random() < 0.4:
        content = damaged(chance, content)
    (folder / f"rank{rank}.pickle").write_bytes(content)


def chakra(folder: Path, rank: int, chance: random.Random | None) -> None:
    """Hostile: fields of nodes are other ones or other numbers, and in half of them the bytes are damaged, too."""

    def number(told: int) -> int:
        return told if chance is None or chance.random() < 0.8 else chance.choice((0, 1 << 31, 1 << 62, (1 << 64) - 1))

    nodes = [
        node(number(4 * at + place), name, number(kind), number(start), number(length), **attributes)
        for at in range(3)
        for place, (name, kind, start, length, attributes) in enumerate([
            ("aten::linear", 4, 10 + 400 * at, 30, {"is_cpu_op": True}),
            ("gemm", 4, 50 + 400 * at, 100, {"is_cpu_op": False, "stream": number(7)}),
            ("c10d::all_reduce", 7, 160 + 400 * at, 40,
             {"is_cpu_op": False, "comm_type": number(0), "comm_size": number(4096), "pg_name": "dp"}),
        ])
    ]  # fmt: skip
    content = message(field(1, "0.0.4")) + b"".join(nodes)
    if chance is not None and chance.random() < 0.5:
        content = damaged(chance, content)
    (folder / f"et.{rank}.et").write_bytes(content)


FORMATS: Final[dict[str, Write]] = {
    "kineto": kineto, "perfetto": perfetto, "mapped": mapped, "nsight": nsight, "flight_recorder": flight_recorder,
    "snapshot": snapshot, "chakra": chakra,
}  # fmt: skip


def exported(chance: random.Random, folder: Path) -> Path:
    """An export of dsprof's, damaged; it holds all ranks."""
    from test_import_own_export import ENDINGS, original

    from dsprof.reports import export
    from dsprof.reports.export import Selection

    to = chance.choice(("parquet", "chrome", "perfetto"))
    file = io.BytesIO()
    export.write(to, original(), file, Selection((0, 1), (3, 5)))  # type: ignore[arg-type]
    path = folder / f"job{ENDINGS[to]}"
    path.write_bytes(damaged(chance, file.getvalue()))
    return path
