"""A table of measured steps (CSV): a row a step, its sizes and its time.

Columns are found by their headings, whatever their case, order and units: `tensor parallelism`, `tp` and `TP size` are
one. Others are left alone. `vocabulary`, `recompute` (1 or 0), `gpus per node` and
`zero stage` (1) may be left out.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from dsprof.words import did_you_mean

from .steps import Column, StepShapes

HEADINGS: Final[Mapping[str, tuple[str, ...]]] = {
    "gpus": ("gpus", "ranks", "world size", "num gpus", "n gpus", "number of gpus"),
    "global_batch": ("global batch", "global batch size", "gbs"),
    "micro_batch": ("micro batch", "micro batch size", "mbs"),
    "hidden": ("hidden", "hidden size", "width", "d model"),
    "heads": ("heads", "attention heads", "num heads"),
    "layers": ("layers", "num layers", "number of layers"),
    "sequence": ("sequence", "sequence length", "seq", "seq length", "seq len"),
    "tp": ("tp", "tensor parallelism", "tensor parallel", "tp size", "tensor parallel size"),
    "dp": ("dp", "data parallelism", "data parallel", "dp size", "data parallel size"),
    "pp": ("pp", "pipeline parallelism", "pipeline parallel", "pp size", "pipeline parallel size"),
    "vocabulary": ("vocabulary", "vocab", "vocab size", "vocabulary size"),
    "recompute": ("recompute", "activation recomputation", "recomputed"),
    "gpus_per_node": ("gpus per node", "ranks per node"),
    "zero": ("zero", "zero stage"),
    "ms": ("ms", "iteration time", "step time", "step ms", "time", "iteration ms"),
}
"""Column -> what it may be called: without case, signs, and what stands in brackets."""
OPTIONAL: Final = ("gpus", "vocabulary", "recompute", "gpus_per_node", "zero")
NOT_WHOLE: Final = ("ms",)


class TableError(Exception):
    """A table cannot be read; the message says which, where in it, and why."""


@dataclass(frozen=True)
class Measurements:
    """What a table holds. ms: of each of `steps`, NaN where it is not told."""

    steps: StepShapes
    ms: Column


def read_table(path: Path, timed: bool = True) -> Measurements:
    """Read a CSV. timed: a table without times is refused. Raises TableError."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise TableError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise TableError(f"{path}: is not a text in UTF-8; write the table as CSV") from error
    lines = csv.reader(text.splitlines())
    try:
        heading = next(lines, None)
        if heading is None:
            raise TableError(f"{path}: is empty; its first line names the columns")
        columns = _columns(path, heading, timed)
        rows = list(_rows(path, lines, columns, heading))
    except csv.Error as error:
        raise TableError(f"{path}:{lines.line_num}: {error}") from error
    if not rows:
        raise TableError(f"{path}: has no step below its headings")
    ms = np.array([row.pop("ms", math.nan) for row in rows])
    return Measurements(StepShapes.of(rows), ms)


def _columns(path: Path, heading: list[str], timed: bool) -> dict[str, int]:
    """Column -> its place."""
    named = {word: name for name, words in HEADINGS.items() for word in words}
    found: dict[str, int] = {}
    for place, title in enumerate(heading):
        name = named.get(_plain(title))
        if name is None:
            continue
        if name in found:
            raise TableError(f"{path}:1: both {heading[found[name]]!r} and {title!r} are the column {name}")
        found[name] = place
    for name in HEADINGS:
        if name not in found and name not in OPTIONAL and (timed or name != "ms"):
            unknown = [title for title in heading if _plain(title) not in named]
            near = did_you_mean(name, unknown, otherwise=f"; call it {HEADINGS[name][0]!r}")
            raise TableError(f"{path}:1: there is no column for {name}{near}")
    return found


def _plain(title: str) -> str:
    """`# GPUs (A100)` as `gpus`."""
    without = re.sub(r"\(.*?\)|\[.*?\]", " ", title.lower())
    return " ".join(re.findall(r"[a-z0-9]+", without))


def _rows(
    path: Path, lines: Iterator[list[str]], columns: Mapping[str, int], heading: list[str]
) -> Iterator[dict[str, float]]:
    for line, cells in enumerate(lines, 2):
        if not any(cell.strip() for cell in cells):
            continue
        where = f"{path}:{line}"
        if len(cells) < len(heading):
            raise TableError(f"{where}: has {len(cells)} of {len(heading)} columns")
        row = {name: _number(where, name, heading[place], cells[place]) for name, place in columns.items()}
        ranks = row["tp"] * row["dp"] * row["pp"]
        if row.get("gpus", ranks) != ranks:
            sizes = f"tp {row['tp']:.0f} x dp {row['dp']:.0f} x pp {row['pp']:.0f}"
            raise TableError(f"{where}: {sizes} are {ranks:.0f} GPUs, and the line says {row['gpus']:.0f}")
        if row["global_batch"] % (row["dp"] * row["micro_batch"]):
            raise TableError(
                f"{where}: a global batch of {row['global_batch']:.0f} is not a whole number of micro-batches of "
                f"{row['micro_batch']:.0f} on each of {row['dp']:.0f} replicas"
            )
        yield row


def _number(where: str, name: str, title: str, cell: str) -> float:
    try:
        value = float(cell)
    except ValueError:
        raise TableError(f"{where}: {title} is {cell!r}, which is not a number") from None
    if name == "recompute":
        if value not in (0, 1):
            raise TableError(f"{where}: {title} is {cell!r}; write 1 where activations are computed again, else 0")
    elif name == "zero":
        if value not in (0, 1, 2, 3):
            raise TableError(f"{where}: {title} is {cell!r}; ZeRO stages are 0, 1, 2 and 3")
    elif not math.isfinite(value) or value <= 0 or (name not in NOT_WHOLE and value != int(value)):
        raise TableError(
            f"{where}: {title} is {cell!r}; it has to be {'' if name in NOT_WHOLE else 'whole and '}above 0"
        )
    return value
