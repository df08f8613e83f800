"""The floating-point operations of a step, of which facts tell (`dsprof.collectors.loop.flops`), as rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

from dsprof.schema import COUNTED, FLOPS, FLOPS_FACT, UNCOUNTED

Row = tuple[str, float, str | None, str | None]
"""Name, value, module, purpose."""


def counted_rows(facts: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """A `gauge` row for each number of each such fact, and one that spans them; facts that are damaged have none."""
    found = []
    for fact in facts:
        if fact.get("fact") != FLOPS_FACT:
            continue
        try:
            begin, end, thread = int(fact["begin_ns"]), int(fact["end_ns"]), int(fact["thread"])
            rows = _rows(fact)
        except (KeyError, TypeError, ValueError, AttributeError):  # one of an older version, without numbers, as well
            continue
        found += [(begin, end - begin, thread, *row) for row in rows if end > begin]
    if not found:  # as nearly always
        return pd.DataFrame()
    table = pd.DataFrame(found, columns=["start_ns", "dur_ns", "thread", "name", "value", "module", "purpose"])
    types = {"start_ns": "int64", "dur_ns": "Int64", "thread": "int64", "value": "float64"}
    table = table.astype(types).assign(kind="gauge", source="measured", ended=True)
    return table.assign(engine=False, device=False, taken=False)


def _rows(fact: Mapping[str, Any]) -> list[Row]:
    rows: list[Row] = [(COUNTED, float(fact["optimizer_steps"]), None, None)]
    for module, purpose, dtype, operations in fact["operations"]:
        rows.append((f"{FLOPS}{dtype}", float(operations), str(module) or None, str(purpose)))
    rows += [(f"{UNCOUNTED}{operator}", float(calls), None, None) for operator, calls in fact["uncounted"].items()]
    return rows
