"""run.json of a trace that was imported: its ranks, process groups, warnings, and whose clocks its times are of."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from dsprof.names import new_run_id
from dsprof.run import RankInfo, RunInfo
from dsprof.schema import SYNCHRONIZING

Int = npt.NDArray[np.int64]

APART_NS: Final = 1_000_000
"""The ends of one collective lie microseconds apart where clocks are the same."""


@dataclass
class ImportedRank:
    """file: it was read from; count: events read; last_step: -1 without any; whole: nothing of it is missing."""

    rank: int
    file: str
    count: int
    last_step: int = -1
    whole: bool = True
    host: str = ""
    device: str = ""
    warnings: list[str] = field(default_factory=list)
    ends: dict[str, Int] = field(default_factory=dict)
    """When its synchronizing collectives ended, in order, by group and name (`collective_ends`)."""


def imported_run(
    format_name: str,
    named: Path,
    ranks: Sequence[ImportedRank],
    groups: Mapping[str, dict[str, Any]],
    clocks: Sequence[str],
    *,
    warnings: Sequence[str] = (),
    world_size: int = 0,
    versions: Mapping[str, str] | None = None,
) -> RunInfo:
    """What run.json says. `named`: what the run is called after. `clocks`: a name for the clock of each rank.
    `warnings`: of all of them together. A group is told of by its lowest rank that is there."""
    facts: list[dict[str, Any]] = [
        {"fact": "import", "rank": one.rank, "format": format_name, "file": one.file[:200],
         "warnings": list(one.warnings), "device": one.device}
        for one in ranks
    ]  # fmt: skip
    facts[0]["warnings"] += list(warnings)
    here = {one.rank for one in ranks}
    for name, about in groups.items():
        tells = min(here.intersection(about["ranks"]) or here)
        facts.append({"fact": "group", "rank": tells, "name": name, **about})
    name = run_name(named.name.split(".")[0])
    return RunInfo(
        id=new_run_id(name), name=name, level="", command=["dsprof", "import", str(named)],
        world_size=max(world_size, 1 + max(here)), facts=facts, versions=dict(versions or {}),
        groups={name: dict(about) for name, about in groups.items()},
        ranks=[
            rank_info(one.rank, one.count, one.last_step, host=one.host, whole=one.whole, clock=clock)
            for one, clock in zip(ranks, clocks, strict=True)
        ],
    )  # fmt: skip


def run_name(text: str, otherwise: str = "trace") -> str:
    """What a run is called after `text`."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", text)[:60] or otherwise


def rank_info(
    rank: int, count: int, last_step: int = -1, *, host: str = "", native: bool = True, whole: bool = True,
    clock: str = "",
) -> RankInfo:  # fmt: skip
    """Of a rank that no capture of dsprof's is behind. count: events read."""
    return RankInfo(
        rank=rank, restart=0, host=host, pid=0, capture="", native=native, last_step=last_step, records=count,
        dropped=0, damaged=0, errors=0, closed=whole, clock=clock,
    )  # fmt: skip


def collective_ends(rows: pd.DataFrame) -> dict[str, Int]:
    """When one rank's synchronizing collectives ended, in order of time, by group and name."""
    comm = rows[(rows["kind"] == "comm") & rows["group"].notna() & rows["name"].isin(SYNCHRONIZING)]
    comm = comm[comm["dur_ns"].notna()]
    end = comm["start_ns"] + comm["dur_ns"].astype("int64")
    keys = comm["group"].astype(str) + "/" + comm["name"].astype(str)
    return {str(key): of.to_numpy(np.int64) for key, of in end.groupby(keys)}


def clock_names(hosts: Sequence[str], ends: Sequence[Mapping[str, Int]]) -> list[str]:
    """A name for the clock of each rank: its host's, or where that is not told, the same, unless their collectives end
    at different times throughout."""
    if all(hosts):
        return [f"epoch of {host}" for host in hosts]
    apart = np.zeros(len(hosts))
    for at, mine in enumerate(ends[1:], 1):
        common = [key for key in mine if len(mine[key]) == len(ends[0].get(key, ()))]
        differences = [mine[key] - ends[0][key] for key in common]
        apart[at] = float(np.median(np.concatenate(differences))) if differences else 0.0
    order = np.argsort(apart, kind="stable")
    number = np.empty(len(hosts), np.int64)
    number[order] = np.cumsum(np.append(0, np.diff(apart[order]) > APART_NS))
    return [f"epoch {one}" if number.max() else "epoch" for one in number.tolist()]
