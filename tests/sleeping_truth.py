"""What dsprof tells of a device, compared with what the sleeping device did."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pandas as pd
from sleeping_jobs import Ran

Int = npt.NDArray[np.int64]

MS = 1_000_000
WITHIN_MS, WITHIN = 0.2, 0.01
"""Of a length: the larger one of the two."""
ALL = slice(None)
ALIGNED_MS = 30.0
"""How far the device's clock may be off the host's: the sleeping device says that an event is over when its data are
there, too, which on a busy machine is later than the computed time."""
CLOCKS_MS = 2.0
"""How far the times that the engine adds up over a day may be off."""


def close(found: Int, true: Int) -> npt.NDArray[np.bool_]:
    """Of each length, ns, whether it is what it was."""
    return np.abs(found - true) <= np.maximum(WITHIN_MS * MS, WITHIN * true)


def assert_communications(
    ran: Ran, name: str, ran_as: str, rank: int = 0, least: int = 1, *, told_at: slice = ALL, did_at: slice = ALL
) -> None:
    """dsprof's communications of this name last and arrive as the operations that the device calls `ran_as`, wherever
    the host was ahead of the device. `told_at`, `did_at`: which of both, where there are several in a step."""
    told = ran.communications(name, rank)
    did = ran.did(ran_as, rank)
    told, did = told[told_at], did[did_at].iloc[-len(told[told_at]) :]
    ahead = did["ahead"].to_numpy(bool)
    assert len(told) == len(did)
    assert ahead.sum() >= least, (name, len(told), ahead)
    assert told["dur_ns"].notna().all(), name
    assert (told["arrival_ns"] == told["start_ns"]).all(), name
    told, did = told[ahead], did[ahead]
    length, arrival = told["dur_ns"].to_numpy(np.int64), told["arrival_ns"].to_numpy(np.int64)
    arrived, ended = did["arrival_ns"].to_numpy(), did["end_ns"].to_numpy()
    assert close(length, ended - arrived).all(), (name, length / MS, (ended - arrived) / MS)
    assert_moments(arrival, arrived, name)


def assert_moments(found: Int, true: Int, what: str) -> None:
    """Moments on the device's clock: as far from each other as they were, and not far off together."""
    off = found - true
    assert np.abs(off).max() <= ALIGNED_MS * MS, (what, off / MS)
    assert np.ptp(off) <= WITHIN_MS * MS, (what, off / MS)


def told_phases(ran: Ran, name: str, rank: int = 0) -> pd.DataFrame:
    """The spans of this phase on the device's default stream, as dsprof tells them, in their order."""
    rows = ran.rows(rank)
    found = rows[
        (rows["kind"] == "kernel") & (rows["name"] == name) & (rows["lane"] == "cuda.0") & rows["dur_ns"].notna()
    ]
    return found.sort_values("issue_ns", kind="stable").reset_index(drop=True)


def assert_phases(ran: Ran, name: str, rank: int = 0, least: int = 1) -> None:
    """The phase lies on the device where it lay, wherever the host was ahead of it."""
    told = told_phases(ran, name, rank)
    phases = ran.phases(rank)
    true = phases[phases["name"] == name].iloc[-len(told) :].reset_index(drop=True)
    ahead = true["ahead"].to_numpy(bool)
    assert ahead.sum() >= least, (name, len(told), ahead)
    told, true = told[ahead], true[ahead]
    begin, end = true["begin_ns"].to_numpy(np.int64), true["end_ns"].to_numpy(np.int64)
    length = told["dur_ns"].to_numpy(np.int64)
    assert close(length, end - begin).all(), (name, length / MS, (end - begin) / MS)
    assert_moments(told["start_ns"].to_numpy(np.int64), begin, name)


def waits_by_step(ran: Ran, rank: int = 0) -> tuple[Int, Int]:
    """How long the default stream waited for others in each step that dsprof has seen whole and that the host was ahead
    in, ns: as it tells, and as it was."""
    rows = ran.rows(rank)
    waits = rows[(rows["kind"] == "wait") & (rows["lane"] == "cuda.0") & rows["dur_ns"].notna() & (rows["step"] >= 2)]
    told = waits.groupby("step")["dur_ns"].sum()
    log = ran.log(rank)
    stream = log[log["stream"] == 0]
    found, true = [], []
    for number, (begin, end) in enumerate(ran.told[rank]["host"]):
        did = stream[(stream["launch_ns"] >= begin) & (stream["launch_ns"] < end)]
        waited = did[did["name"] == "wait"]
        if number in told.index and (did["reached_ns"] > did["launch_ns"]).iloc[1:].all():
            found.append(told[number])
            true.append((waited["end_ns"] - waited["reached_ns"]).sum())
    return np.array(found, np.int64), np.array(true, np.int64)
