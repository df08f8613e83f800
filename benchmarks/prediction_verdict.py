"""What `predictions.py` makes of the runs of a pair, and of all pairs: pure functions from what runs left."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from prediction_pair import Pair
from scipy.special import stdtrit

Record = dict[str, Any]

LEAST_GAIN: Final = 10.0
"""Percent of the step."""
DISTURBED: Final = 0.3
"""Cores that others take of a host that is not quiet."""
ORDINARY_LEAVE_OUT: Final = 4
"""One of so many steps, at the beginning, is warm-up: as many as the analyzer leaves out."""


@dataclass(frozen=True)
class Run:
    """What a run left.

    found:   its findings.json
    ended_s: when each of its steps ended, as the job itself saw it on rank 0
    others_cores: that other processes of the host took while it ran
    """

    found: Mapping[str, Any]
    ended_s: Sequence[float]
    others_cores: float = 0.0

    def ordinary_ms(self) -> float:
        """Mean of the ordinary steps."""
        return float(self.found["run"]["step_ms"]["mean"])

    def wall_ms(self) -> float:
        """Wall time of all steps after warm-up, ordinary or not, divided by their number."""
        first = len(self.ended_s) // ORDINARY_LEAVE_OUT
        return 1e3 * (self.ended_s[-1] - self.ended_s[first - 1]) / (len(self.ended_s) - first)

    def finding(self, code: str) -> Mapping[str, Any] | None:
        return next((item for item in self.found["findings"] if item["code"] == code), None)

    def above_info(self) -> list[str]:
        return [item["code"] for item in self.found["findings"] if item["severity"] != "info"]


def said_by(finding: Mapping[str, Any] | None) -> dict[str, str]:
    """The values that the first fix of a finding names: argument -> value."""
    if finding is None or not finding["fixes"]:
        return {}
    fix = finding["fixes"][0]
    said = {"together": found[1]} if (found := re.search(r"wrap (\d+) neighbouring", fix["title"])) else {}
    for item in fix["patch"]:
        said |= dict(re.findall(r"(\w+)=([\d.]+)", str(item.get("value"))))
        if item.get("value") not in ("", None):
            said[str(item.get("argument"))] = f"{item['value']:g}" if _number(item["value"]) else str(item["value"])
    return said


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def interval_of(values: Sequence[float]) -> tuple[float, float] | None:
    """Student's 95 % interval of the mean."""
    if len(values) < 2:
        return None
    half = float(stdtrit(len(values) - 1, 0.975)) * statistics.stdev(values) / math.sqrt(len(values))
    mean = statistics.fmean(values)
    return mean - half, mean + half


def judge(pair: Pair, planted: Sequence[Run], mended: Sequence[Run], said: Mapping[str, str]) -> Record:
    """A pair's line in the result. `said`: the values of the fix that the mended runs ran with."""
    times = pair.times(said)

    def step_ms(run: Run) -> float:
        return run.wall_ms() if pair.whole_run else run.ordinary_ms()

    measured = [step_ms(one) - step_ms(other) / times for one, other in zip(planted, mended, strict=True)]
    walls = [one.wall_ms() - other.wall_ms() / times for one, other in zip(planted, mended, strict=True)]
    step, saving = statistics.median(map(step_ms, planted)), statistics.median(measured)
    predicted = [_prediction(pair, run, said) for run in planted]
    first, surely = predicted[0], interval_of(measured)
    return {
        "set": pair.set,
        "family": pair.family,
        "fault": pair.fault,
        "compute": "real" if pair.real else "sleeping",
        "magnitude": pair.magnitude,
        "ranks": pair.ranks,
        "planted": " ".join((pair.script, *pair.planted_args())),
        "mended": " ".join((pair.script, *pair.mended_args(said))),
        "compared": "all steps after warm-up" if pair.whole_run else "ordinary steps",
        "step_ms": round(step, 2),
        "predicted": predicted,
        "measured_ms": [round(value, 2) for value in measured],
        "measured_by_wall_ms": [round(value, 2) for value in walls],
        "saving_ms": round(saving, 2),
        "saving_interval_ms": surely and [round(end, 2) for end in surely],
        "gain_percent": round(100 * saving / step, 1),
        "error_percent": _share(100 * abs(first["ms"] - saving), saving) if first else 100.0,
        "width_to_saving": _share(first["high"] - first["low"], saving) if first else None,
        "holds": _holds(first, saving),
        "of_all_hold": sum(_holds(each, saving) for each in predicted),
        "others_cores": max(run.others_cores for run in (*planted, *mended)),
        "mended_has": sorted({code for run in mended for code in run.above_info()}),
    }


def _prediction(pair: Pair, run: Run, said: Mapping[str, str]) -> Record | None:
    finding = run.finding(pair.fault)
    if finding is None:
        return None
    gain = finding["gain"]
    return {
        **{end: round(gain[end], 3) for end in ("ms", "low", "high")},
        "method": gain["method"],
        "severity": finding["severity"],
        "is_first": run.found["findings"][0] is finding,
        "of_this_fix": {name: said_by(finding).get(name, value) for name, value in said.items()} == dict(said),
    }


def _holds(prediction: Record | None, saving: float) -> bool:
    return prediction is not None and bool(prediction["low"] <= saving <= prediction["high"])


def _share(value: float, of: float) -> float | None:
    """None where nothing was saved, so that there is no share of it."""
    return round(value / of, 3) if of > 0 else None


def median(values: Iterable[float | None]) -> float | None:
    """None counts as larger than any; the median may be None too."""
    counted = [math.inf if value is None else value for value in values]
    middle = statistics.median(counted) if counted else math.inf
    return round(middle, 3) if math.isfinite(middle) else None


def summary(pairs: Iterable[Record]) -> Record:
    """Of one set of pairs."""
    pairs = list(pairs)
    errors = {
        compute: median(pair["error_percent"] for pair in pairs if pair["compute"] == compute)
        for compute in ("sleeping", "real")
    }
    gaining = [pair for pair in pairs if pair["gain_percent"] > LEAST_GAIN]
    return {
        "pairs": len(pairs),
        "found_first": sum(bool(pair["predicted"][0] and pair["predicted"][0]["is_first"]) for pair in pairs),
        "hold": sum(pair["holds"] for pair in pairs),
        "median_width_to_saving": median(pair["width_to_saving"] for pair in pairs),
        "median_error_percent": errors,
        "gain_over_10_percent": len(gaining),
    }


def came_true(pairs: Iterable[Record]) -> dict[str, Record]:
    """Code -> of all predictions made for it, how many intervals held the pair's saving."""
    found: dict[str, Record] = {}
    for pair in pairs:
        of_code = found.setdefault(pair["fault"], {"predictions": 0, "hold": 0})
        of_code["predictions"] += len(pair["predicted"])
        of_code["hold"] += pair["of_all_hold"]
    return dict(sorted(found.items()))


def problems(record: Record) -> list[str]:
    """What is odd about a pair: its fault not found, or not mended, or too small to tell much."""
    first = record["predicted"][0]
    found = ["not found"] if first is None else []
    if first and not first["is_first"]:
        found.append("not first")
    if first and first["severity"] == "info":
        found.append("only info")
    if record["fault"] in record["mended_has"]:
        found.append("still there when mended")
    if record["gain_percent"] <= LEAST_GAIN:
        found.append("gains little")
    if record["others_cores"] > DISTURBED:
        found.append(f"others took {record['others_cores']:.1f} cores")
    return found
