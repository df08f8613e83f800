"""What torch.profiler saw of a few steps (`--deep`), as rows of the rank that was captured.

Its clock is the epoch's; meta.json has both clocks at one moment. Steps, phases and collectives are our own already. A
communication kernel of a device is the collective that this rank issued around its launch: that row gets its true
begin, which is its arrival, and its end. One that none can be found for stays a kernel, so that no collective is there
twice.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pandas as pd
from pandas.api.types import union_categoricals

from dsprof.regular_files import is_file
from dsprof.schema import COLUMNS, DEEP_FILE

from .capture import Capture
from .kineto import Events, TraceError, read_events, trace_rows_of

Int = npt.NDArray[np.int64]

ADDED: Final = ("kernel", "copy", "launch", "mem")
SAW_NO_DEVICE: Final = (
    "the profiler was to see the device and saw nothing of it; KINETO_LOG_LEVEL=0 dsprof run --deep 10:13 ... has its "
    "library say why, on stderr"
)
SLACK_NS: Final = 50_000
"""By so much the two clocks may be apart within the window."""


def add_deep(capture: Capture, rows: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """`rows` of the capture with what the profiler saw, by time, and what is wrong with that. The fact `deep` gets
    `profiled`, the numbers of the steps that it took part in, and `longer_ms`, by how much these were longer than as
    many of the others."""
    windows = [fact for fact in capture.facts if fact.get("fact") == "deep"]
    for fact in windows:
        fact["profiled"] = _steps_in(rows, fact)
        fact["longer_ms"] = _longer_ms(rows, fact["profiled"])
    path = capture.path / DEEP_FILE
    if not windows or not is_file(path):
        return rows, []
    clock = capture.meta.get("clock")
    try:
        offset = int(clock["monotonic_ns"]) - int(clock["epoch_ns"])  # type: ignore[index]
    except (TypeError, KeyError, ValueError):
        return rows, [f"{DEEP_FILE}: meta.json does not tell both clocks, so it is left out"]
    try:
        events = read_events(path)
        found = trace_rows_of(events).rows
    except (TraceError, OSError) as error:
        return rows, [f"{DEEP_FILE}: left out ({error})"]
    problems = [f"{DEEP_FILE}: {one}" for one in _wrong_with(events, any(fact.get("device") for fact in windows))]
    found = found.assign(**{name: found[name] + offset for name in ("start_ns", "issue_ns", "arrival_ns")})
    found = with_lanes_of(found, rows)
    rows, kernels = _joined(rows, found)
    return beside(rows, found, kernels), problems


def beside(rows: pd.DataFrame, found: pd.DataFrame, kernels: pd.DataFrame) -> pd.DataFrame:
    """`rows` of a rank with what a profiler saw of it besides, which is on the same clock: of `found` the kinds ADDED,
    and `kernels`; each in the step that it begins in."""
    added = pd.concat([found[found["kind"].isin(ADDED)], kernels], ignore_index=True)
    added = added.assign(
        rank=rows["rank"].iloc[0], restart=rows["restart"].iloc[0], step=_step_of(rows, added["start_ns"]),
        source="imported",
    )  # fmt: skip
    whole = pd.DataFrame({name: _one_behind_the_other(rows[name], added[name], kind) for name, kind in COLUMNS.items()})
    return whole.sort_values("start_ns", kind="stable", ignore_index=True)


def _wrong_with(events: Events, of_device: bool) -> list[str]:
    """`of_device`: the profiler was to see the device too. What Kineto says of an error is not on the job's stderr."""
    found = [events.cut] if events.cut else []
    if of_device and not len(events.device):
        found.append(SAW_NO_DEVICE)
    return found


def _one_behind_the_other(first: pd.Series[Any], second: pd.Series[Any], kind: str) -> Any:
    first, second = first.astype(kind), second.astype(kind)
    if kind == "category":  # of different categories concat would make objects
        alike = [one.cat.rename_categories(one.cat.categories.astype(object)) for one in (first, second)]
        return union_categoricals(alike)
    return pd.concat([first, second], ignore_index=True)


def _steps_in(rows: pd.DataFrame, fact: dict[str, Any]) -> list[int]:
    begin, end = fact.get("start_ns"), fact.get("end_ns")
    if not (isinstance(begin, int) and isinstance(end, int)):
        return []
    steps = rows[["step", "start_ns", "dur_ns"]][rows["kind"] == "step"]
    finish = steps["start_ns"] + steps["dur_ns"].fillna(0).astype("int64")
    return sorted(int(step) for step in steps["step"][(steps["start_ns"] < end) & (finish > begin)].unique())


def _longer_ms(rows: pd.DataFrame, profiled: list[int]) -> float | None:
    """None where there are no other steps."""
    steps = rows[["step", "dur_ns"]][(rows["kind"] == "step") & rows["dur_ns"].notna()]
    mine = steps["step"].isin(profiled)
    if mine.all():
        return None
    took = steps["dur_ns"].astype("float64") / 1e6
    return round(float(took[mine].sum() - int(mine.sum()) * took[~mine].median()), 3)


def _step_of(rows: pd.DataFrame, when: pd.Series[int]) -> Int:
    steps = rows[["step", "start_ns", "dur_ns"]][(rows["kind"] == "step") & rows["dur_ns"].notna()]
    steps = steps.sort_values("start_ns")
    begin = steps["start_ns"].to_numpy(np.int64)
    finish = begin + steps["dur_ns"].to_numpy(np.int64)
    at = np.searchsorted(begin, when.to_numpy(np.int64), "right") - 1
    inside = (at >= 0) & (when.to_numpy(np.int64) < np.append(finish, 0)[at])
    found: Int = np.where(inside, np.append(steps["step"].to_numpy(np.int64), -1)[at], -1)
    return found


def with_lanes_of(found: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    """Lanes of threads as they are called in `rows`, where they are."""
    threads = rows[rows["thread"].notna() & rows["kind"].isin(["phase", "module", "step"])]
    lanes = threads.groupby("thread")["lane"].agg(lambda lane: lane.astype(str).mode().iloc[0])
    own = found["thread"].notna()
    told = found["thread"].map(lanes).astype(object)
    other = "thread." + found["thread"].astype("Int64").astype(str)
    return found.assign(lane=found["lane"].astype(object).where(~own, told.where(told.notna(), other)))


def _joined(rows: pd.DataFrame, found: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """`rows` whose collectives have their kernels' times, and the kernels that belong to none of them."""
    on_device = found["corr"].notna() & (found["kind"] == "comm")
    kernels = found[on_device].sort_values("start_ns")
    if kernels.empty:
        return rows, kernels
    calls = found[(found["kind"] == "launch") & found["corr"].notna()].drop_duplicates("corr").set_index("corr")
    launched = kernels["corr"].map(calls["start_ns"])
    ours = rows[(rows["kind"] == "comm") & rows["issue_ns"].notna()].sort_values("issue_ns")
    issue = ours["issue_ns"].to_numpy(np.int64)
    until = issue + ours["host_ns"].fillna(0).to_numpy(np.int64) + SLACK_NS
    names = ours["name"].astype(str).to_numpy(object)
    groups = ours["group"].astype(object).to_numpy(object)
    taken: set[int] = set()
    rows = rows.astype({"lane": object})
    left = []
    for index, kernel in kernels.iterrows():
        when = launched[index]
        at = -1 if pd.isna(when) else int(np.searchsorted(issue, int(when) + SLACK_NS, "right")) - 1
        while at >= 0 and (at in taken or until[at] < int(when)) and issue[at] > int(when) - 1_000_000_000:
            at -= 1
        fits = at >= 0 and at not in taken and until[at] >= int(when) and names[at] == str(kernel["name"])
        told = kernel["group"]
        if not fits or (pd.notna(kernel["seq"]) and pd.notna(told) and str(groups[at]).partition("#")[0] != str(told)):
            left.append(index)
            continue
        taken.add(at)
        row = ours.index[at]
        rows.loc[row, ["start_ns", "dur_ns", "arrival_ns", "lane", "corr", "ended"]] = [
            kernel["start_ns"], kernel["dur_ns"], kernel["arrival_ns"], kernel["lane"], kernel["corr"], True,
        ]  # fmt: skip
    rest = kernels.loc[left].assign(kind="kernel", group=None, seq=pd.NA, arrival_ns=pd.NA)
    return rows.astype({"lane": "category"}), rest
