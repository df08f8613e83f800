"""The table of a straggler file, checked, and what lies beside it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import numpy as np
import pandas as pd
import pyarrow as pa

from dsprof import regular_files
from dsprof.ondisk import LARGEST_META, LARGEST_PLACE
from dsprof.run import RunError

INTEGERS: Final = ("dp_rank", "stage", "step", "seq_id", "mb_id")
TIMES: Final = ("start_ts", "duration")
LARGEST_S: Final = 2e9
"""Of times, in seconds, and of other numbers: so long runs no step, and so many ranks has no job."""


def checked_table(path: Path) -> pd.DataFrame:
    """The table, columns as `straggler` wants them; RunError says what is wrong with it."""
    try:
        table = pd.read_parquet(path)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise RunError(
            f"{path}: not readable as Parquet ({str(error).splitlines()[0][:200]}); copy it again"
        ) from error
    missing = [name for name in (*INTEGERS, *TIMES, "optype") if name not in table]
    if missing:
        raise RunError(f"{path}: no column {', '.join(missing)}; a straggler table has them (mb_id -1: no micro-batch)")
    if table.empty:
        raise RunError(f"{path}: an empty table; name one with operations")
    found = pd.DataFrame({"optype": table["optype"].astype(object)})
    _refuse(path, table, found["optype"].isna(), "without an optype")
    found["optype"] = found["optype"].astype(str)
    for name in (*INTEGERS, *TIMES):
        values = pd.to_numeric(table[name], errors="coerce").astype("float64")
        _refuse(path, table, ~np.isfinite(values), f"whose {name} is no number")
        _refuse(path, table, values.abs() > LARGEST_S, f"whose {name} is beyond {LARGEST_S:,.0f}")
        found[name] = values if name in TIMES else values.astype("int64")
    _refuse(path, table, found["duration"] < 0, "with a negative duration")
    for name in ("dp_rank", "stage", "step", "seq_id"):
        _refuse(path, table, found[name] < 0, f"with a negative {name}")
    for name in ("stage", "mb_id"):
        _refuse(path, table, found[name] > LARGEST_PLACE, f"whose {name} is over {LARGEST_PLACE}")
    again = found.duplicated(["dp_rank", "stage", "step", "optype", "seq_id"])
    what = "that are there twice (dp_rank, stage, step, optype, seq_id; keep one of each tensor-parallel group)"
    _refuse(path, table, again, what)
    if "mc" in table:
        found["mc"] = pd.to_numeric(table["mc"], errors="coerce").fillna(-1).astype("int64")
    found["file_rank"] = table.get("rank", -1)
    return found


def _refuse(path: Path, table: pd.DataFrame, wrong: pd.Series[bool], what: str) -> None:
    if wrong.any():
        at = int(np.flatnonzero(wrong.to_numpy())[0])
        row = ", ".join(f"{name}={table[name].iloc[at]}" for name in ("step", "stage", "dp_rank", "optype", "seq_id"))
        raise RunError(f"{path}: {int(wrong.sum())} rows {what}, the first is row {at} ({row}); mend or remove them")


def job_name(path: Path) -> str:
    return path.stem.removeprefix("trace-")


def sizes_beside(path: Path) -> tuple[dict[str, int], list[str]]:
    """The sizes in `meta-<name>.yaml` beside the table, or in the only `meta*.yaml` there, and warnings."""
    beside = path.with_name(f"meta-{job_name(path)}.yaml")
    others = sorted(path.parent.glob("meta*.yaml"))
    source = beside if beside.exists() else others[0] if len(others) == 1 and path.stem == "trace" else None
    if source is None:
        return {}, []
    found, warnings = {}, []
    try:
        lines = regular_files.read_text(source, LARGEST_META).splitlines()
    except OSError as error:
        return {}, [f"{source.name}: cannot be read ({error.strerror}); sizes are those of the table"]
    for number, line in enumerate(lines, 1):
        if line.partition("#")[0].strip() in ("", "---"):
            continue
        match = re.fullmatch(r"(\w+):\s*(.*?)\s*(#.*)?", line)
        if match is None:
            warnings.append(f"{source.name}, line {number}: not `key: value`, left out: {line[:80]}")
        elif match[1].endswith("_size"):
            if match[2].isdecimal() and int(match[2]) > 0:
                found[match[1]] = int(match[2])
            else:
                warnings.append(f"{source.name}, line {number}: {match[1]} is not a positive number, left out")
    return found, warnings
