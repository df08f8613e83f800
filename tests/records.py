"""Captures written by hand, record by record, and the rows that are derived from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
from synthetic import MS

from dsprof.ondisk import USUAL_FAMILY, Family, Flag, State
from dsprof.schema import Kind
from dsprof.trace.capture import Capture
from dsprof.trace.derive import trace_rows
from dsprof.trace.records import IDS, empty

Record = tuple[Kind, str, float, float | None, dict[str, Any]]


def family_of(kind: Kind, fields: dict[str, Any]) -> Family:
    """Where `fields` name a group the record is of a communication; with `p2p`, of a send or a receive."""
    if kind is Kind.COMM or (kind is Kind.WAIT and fields.get("group")):
        return Family.P2P if fields.get("p2p") else Family.COLLECTIVE
    return USUAL_FAMILY.get(kind, Family.SPAN)


def capture_of(*records: Record, facts: list[dict[str, Any]] | None = None) -> Capture:
    """One rank; kind, name, start and end in ms (None: never ended), and the fields that differ from the usual.

    Texts become ids of names. `p2p`: it is a send or a receive.
    """
    names: dict[str, int] = {}

    def intern(name: str) -> int:
        return names.setdefault(name, len(names) + 1)

    array = empty(len(records))
    for row, (kind, name, start, end, more) in zip(array, records, strict=True):
        usual: dict[str, Any] = {"thread": 7}
        if kind is Kind.COMM:
            usual |= {"issue_ns": round(start * MS), "group": "0", "seq": 0, "bytes": 8, "dtype": 7}
        fields = {**usual, **more}
        if kind is Kind.PHASE:
            fields.setdefault("grad", int(bool(fields.get("flags", 0) & Flag.GRAD)))
        fields |= {"kind": kind, "state": State.BEGUN if end is None else State.DONE}
        fields |= {"start_ns": round(start * MS), "end_ns": round((end or 0) * MS), "family": family_of(kind, fields)}
        fields.pop("p2p", None)
        for field, value in {**fields, "name": name}.items():
            row[field] = intern(value) if field in IDS and isinstance(value, str) else value
    meta = {"closed": True, "native": True, "world_size": 2}
    by_number = {number: name for name, number in names.items()}
    return Capture(Path("rank00000.0.host.1"), array, by_number, meta, facts or [])


def of(rows: pd.DataFrame, *columns: str) -> list[tuple[Any, ...]]:
    """Those columns, with None for null."""
    return [tuple(None if pd.isna(value) else value for value in row) for row in rows[list(columns)].to_numpy(object)]


def derive(*records: Record, facts: list[dict[str, Any]] | None = None) -> pd.DataFrame:
    return trace_rows(capture_of(*records, facts=facts), 0, 0)


def phase(name: str, start: float, end: float | None, **more: Any) -> Record:
    usual = {"flags": Flag.GRAD} if name == "forward" else {}
    return (Kind.PHASE, name, start, end, {**usual, **more})


def derived(rows: pd.DataFrame, kind: str = "phase") -> list[tuple[str, float, float]]:
    """Name, start and end in ms of the derived rows of this kind."""
    found = rows[(rows["kind"] == kind) & (rows["source"] == "derived")]
    end = found["start_ns"] + found["dur_ns"]
    return [
        (name, start / MS, stop / MS)
        for name, start, stop in zip(found["name"], found["start_ns"], end.astype(float), strict=True)
    ]
