"""What the devices of a run told of themselves while the judged steps went on (NVML, `dsprof.gauges`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pandas as pd

from dsprof import gauges

from ..arrays import Float, Int

IDLE: Final = 0x1
"""Bit of `dsprof.gauges.CLOCK_REASONS`: nothing runs, so the clock is low."""
AT_WORK: Final = 50.0
"""Percent of utilization from which on a device is at work; between two steps it may look idle."""


@dataclass(frozen=True)
class Readings:
    """One gauge over time: when, ns of the common clock, and what."""

    when: Int
    value: Float

    def at(self, moments: Int) -> Float:
        """What it said last before each moment; before its first reading, that; NaN without any."""
        if not len(self.when):
            return np.full(len(moments), np.nan)
        last: Float = self.value[np.clip(np.searchsorted(self.when, moments, "right") - 1, 0, None)]
        return last

    @property
    def highest(self) -> float:
        return float(self.value.max()) if len(self.value) else float("nan")

    @property
    def rise(self) -> float:
        """By how much a counter rose."""
        return float(self.value[-1] - self.value[0]) if len(self.value) else 0.0


NONE: Final = Readings(np.empty(0, np.int64), np.empty(0))


@dataclass(frozen=True)
class WatchedDevice:
    """One rank's device. `index`: NVML's, on its host; `model`: its name, empty if not known."""

    rank: int
    host: str
    index: int
    model: str
    readings: Mapping[str, Readings] = field(repr=False)

    def of(self, gauge: str) -> Readings:
        return self.readings.get(gauge, NONE)

    @property
    def moments(self) -> Int:
        """When its clock was read while it was at work."""
        clock = self.of(gauges.SM_CLOCK)
        busy, reasons = (self.of(name).at(clock.when) for name in (gauges.UTILIZATION, gauges.CLOCK_REASONS))
        idle = (busy < AT_WORK) | (np.nan_to_num(reasons).astype(np.int64) & IDLE > 0)
        return clock.when[~idle]

    def __str__(self) -> str:
        return f"GPU {self.index} of {self.host}" if self.host else f"GPU {self.index}"


def devices_of(
    rows: pd.DataFrame, within: tuple[int, int], facts: Sequence[Mapping[str, Any]], hosts: Mapping[int, str]
) -> list[WatchedDevice]:
    """The devices of which `rows` hold gauges, by rank, with what they read in that time; of a gauge that is seldom
    read, the last reading before it as well.

    facts: those of kind `gpu`. hosts: by rank.
    """
    told = rows[["rank", "name", "start_ns", "value"]][rows["kind"] == "gauge"]
    told = told[told["name"].astype(str).str.startswith(gauges.DEVICE) & told["value"].notna()]
    told = told.sort_values(["rank", "start_ns"], kind="stable")
    about = {fact.get("rank"): fact for fact in facts}
    found = []
    for rank, mine in told.groupby("rank"):
        readings = {}
        for name, of_gauge in mine.groupby(mine["name"].astype(str)):
            when, value = of_gauge["start_ns"].to_numpy(np.int64), of_gauge["value"].to_numpy(np.float64)
            first = max(int(np.searchsorted(when, within[0])) - 1, 0)
            last = int(np.searchsorted(when, within[1], "right"))
            readings[str(name)] = Readings(when[first:last], value[first:last])
        fact = about.get(rank, {})
        model, index = str(fact.get("name") or ""), int(fact.get("index") or 0)
        found.append(WatchedDevice(int(str(rank)), hosts.get(int(str(rank)), ""), index, model, readings))
    return found
