"""Parameters that a stream of its own gathers for the stream that computes, as FSDP's do.

Such a gather does not begin where the computing stream has got to, in the order of launches: it begins when its own
stream has, which waits for the gather before it, and until what was gathered before has been taken over. The computing
stream waits for it by an event, of which nothing is known but when it was launched.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from ..arrays import Bool, Float, Int
from ..budget.lanes import on_stream
from ..budget.stream_waits import AT_ONCE_NS

QUEUED_NS: Final = 5_000
"""What begins so soon after what was before it on its own stream waited for nothing else."""
NONE: Final = -1
LONG_AGO: Final = -(1 << 62)


@dataclass(frozen=True)
class Gathers:
    """G of one rank, in order of launch.

    launched, end: ns
    at:            when each could have been issued at the latest
    target:        row of the matched table
    after, before: when the host launched the communications around it that its process group ran and that are no such
                   gathers: it takes them in order
    """

    launched: Int
    at: Int
    end: Int
    target: Int
    after: Int
    before: Int

    def __len__(self) -> int:
        return len(self.launched)

    @staticmethod
    def none() -> Gathers:
        return Gathers(*(np.empty(0, np.int64) for _ in range(6)))


def issued_from(rows: pd.DataFrame, comm: pd.DataFrame, computes: str) -> tuple[Float, npt.NDArray[np.object_]]:
    """When the stream that issued each communication had got to it, and which stream that was; NaN and empty where it
    was the one that computes, or that is not known. Who issues one from a stream has that stream wait for it at once.

    rows: of the rank; comm: those of them that are communications; computes: the lane of the computing stream
    """
    at, streams = np.full(len(comm), np.nan), np.full(len(comm), "", object)
    waits = rows[(rows["kind"] == "wait") & rows["seq"].notna() & rows["dur_ns"].notna() & rows["issue_ns"].notna()]
    waits = waits[on_stream(waits["lane"]) & (waits["lane"] != computes)]
    if waits.empty:
        return at, streams
    keys = ["group", "seq", "issue_ns"]
    place = {key: i for i, key in enumerate(waits[keys].astype(object).itertuples(index=False, name=None))}
    found = [place.get(key, NONE) for key in comm[keys].astype(object).itertuples(index=False, name=None)]
    which = np.array(found, np.int64)
    known = which != NONE
    at[known] = waits["start_ns"].to_numpy(np.float64)[which[known]]
    streams[known] = waits["lane"].astype(str).to_numpy(object)[which[known]]
    return at, streams


def ended_before(stream: npt.NDArray[np.object_], start: Int, end: Int) -> Int:
    """When what was before each on its own stream had ended, ns; long ago, of the first."""
    order = np.lexsort((start, stream.astype(str)))
    found = np.full(len(start), LONG_AGO)
    same = stream[order][1:] == stream[order][:-1]
    found[order[1:][same]] = end[order][:-1][same]
    return found


def find_gathers(
    gathers: Bool,
    issuer: npt.NDArray[np.object_],
    lane: npt.NDArray[np.object_],
    launched: Int,
    reached: Int,
    end: Int,
    target: Int,
    taken: Int,
) -> Gathers:
    """The gathers among communications (`gathers`), with the moments at which they could have been issued at the
    latest: one that its stream got to as soon as the one before had ended waited for that, and for what was taken over
    last before.

    issuer, lane:   of each, the stream that issues it, which `reached` it then, and the process group that runs it
    launched, end:  ns; target: row of the matched table
    taken:          when the computing stream went on with something that it had waited for, ns, ascending
    """
    mine = np.flatnonzero(gathers)
    at = reached[mine].copy()
    order = np.lexsort((reached[mine], issuer[mine].astype(str)))
    queued = np.abs(at - ended_before(issuer[mine], at, end[mine])) < QUEUED_NS
    for last, one in zip(order[:-1].tolist(), order[1:].tolist(), strict=True):
        if queued[one]:
            place = int(np.searchsorted(taken, reached[mine[one]], "right")) - 1
            at[one] = max(int(at[last]), int(taken[place]) if place >= 0 else LONG_AGO)
    after, before = np.full(len(launched), LONG_AGO), np.full(len(launched), -LONG_AGO)
    for name in dict.fromkeys(lane[mine].tolist()):
        of_lane = np.flatnonzero(lane == name)
        of_lane = of_lane[np.argsort(end[of_lane], kind="stable")]
        others = np.where(gathers[of_lane], LONG_AGO, launched[of_lane])
        after[of_lane] = np.maximum.accumulate(others)
        others = np.where(gathers[of_lane], -LONG_AGO, launched[of_lane])
        before[of_lane] = np.minimum.accumulate(others[::-1])[::-1]
    chosen = mine[np.argsort(launched[mine], kind="stable")]
    at = at[np.argsort(launched[mine], kind="stable")]
    return Gathers(launched[chosen], at, end[chosen], target[chosen], after[chosen], before[chosen])


def awaited(gathers: Gathers, launched: Int, start: Int, known: Int) -> Int:
    """Of waits that do not say what for, the gather that each one was for, as its target; -1: none. It is the first
    launched before it that had ended by then and that nobody had waited for.

    launched, start: [W] ns, in order of launch; known: [W] the target of those that are known, else -1
    """
    found = known.copy()
    of_target = {target: i for i, target in enumerate(gathers.target.tolist())}
    waited: Bool = np.zeros(len(gathers), bool)
    first = 0
    for wait in range(len(launched)):
        if found[wait] != NONE:
            if found[wait] in of_target:
                waited[of_target[int(found[wait])]] = True
            continue
        upto = int(np.searchsorted(gathers.launched, launched[wait]))
        while first < upto and waited[first]:
            first += 1
        if first < upto and gathers.end[first] <= start[wait] + AT_ONCE_NS:
            found[wait], waited[first] = gathers.target[first], True
    return found


def reductions_awaited(
    issue: Int, reduces: Bool, end: Int, target: Int, launched: Int, over: Int, known: Int
) -> Int:  # fmt: skip
    """Of waits that do not say what for, those that FSDP2 has before it reduces a unit's gradients: for the reduction
    before, whose buffer it lets go of. They are told by the reduction that is the next to be launched.

    issue, end: [N] of a rank's communications, when the host launched each and when it ended, ns; reduces: which
    reduce gradients; target: their rows. launched, over: [W] of the waits; known: [W] the target of those that are
    known, else -1. Returns known, with these
    """
    order = np.argsort(issue, kind="stable")
    issue, reduces, end, target = issue[order], reduces[order], end[order], target[order]
    last = np.maximum.accumulate(np.where(reduces, np.arange(len(issue)), NONE)) if len(issue) else issue
    found, waited = known.copy(), set(known.tolist())
    for wait in np.flatnonzero(known == NONE).tolist():
        following = int(np.searchsorted(issue, launched[wait], "right"))
        if not 0 < following < len(issue) or not reduces[following]:
            continue
        before = int(last[following - 1])
        if before != NONE and int(target[before]) not in waited and end[before] <= over[wait] + AT_ONCE_NS:
            found[wait] = target[before]
            waited.add(int(target[before]))
    return found


def places(gathers: Gathers, moments: Int, keys: Int, host: Int, ended: Int) -> tuple[Int, Int, Int]:
    """Where in the computing stream's program gathers belong: (place before which, moment, target), each [G] in order.

    They belong where the stream was when they were issued, in the step in which the host launched them, and between the
    communications between which their process group ran them.
    moments, keys: [N] ascending, when the stream got to each event of its program, and when that was launched
    host, ended: [S] when the host had launched each step, and when the stream was through with it
    """
    step = np.searchsorted(host, gathers.launched, "left")
    first = np.append(LONG_AGO, ended)[step] + 1
    last = np.append(ended, -LONG_AGO)[step] - 1
    at = np.clip(gathers.at, first, last)
    begins = np.searchsorted(keys, np.maximum(np.append(LONG_AGO, host)[step], gathers.after), "right")
    ends = np.searchsorted(keys, np.minimum(np.append(host, -LONG_AGO)[step], gathers.before), "left")
    place = np.clip(np.searchsorted(moments, at, "right"), begins, np.maximum(begins, ends))
    order = np.lexsort((gathers.launched, at, place))
    return place[order], at[order], gathers.target[order]
