"""Collectives and messages as arrays: which step each belongs to, what runs it, whom its end depends on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from dsprof.run import RunInfo

from .backends import backend_of
from .match import SEND_RECV
from .points import ISSUE, Points

Float = npt.NDArray[np.float64]
Int = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Communications:
    """The matched table as arrays, a row a task: see `match.COLLECTIVE_COLUMNS`.

    home: index of the step it belongs to; -1: none of the graph's
    end:  ns, when the first rank saw it end
    """

    lane: npt.NDArray[np.object_]
    kind: npt.NDArray[np.object_]
    gradient: npt.NDArray[np.bool_]
    workers: Int
    needs: npt.NDArray[np.object_]
    root: Int
    size: Float
    end: Int
    home: Int


def find_communications(
    collectives: pd.DataFrame, points: Points, ranks: tuple[int, ...], run: RunInfo | None
) -> Communications:
    """Those of the matched table. `ranks`: the threads of the graph."""
    count = len(collectives)
    issues = points.what == ISSUE
    target, step = points.target[issues], points.step[issues]
    home = np.full(count, -1, np.int64)
    np.maximum.at(home, target, step)
    # A rank that issues it after the steps of the graph: then who waited for whom there is not known.
    last_in = np.full(count, np.iinfo(np.int64).min)
    np.maximum.at(last_in, target[step >= 0], points.when[issues][step >= 0])
    late = points.when[issues] > last_in[target]
    home[target[(step < 0) & late]] = -1
    message = (collectives["name"] == SEND_RECV).to_numpy(bool)
    end = collectives["end_ns"].to_numpy(np.int64).copy()
    seen = points.ended[issues] >= 0
    earliest = np.full(count, np.iinfo(np.int64).max)
    np.minimum.at(earliest, target[seen], points.ended[issues][seen])
    known = earliest < np.iinfo(np.int64).max
    end[known] = np.maximum(earliest[known], collectives["last_ns"].to_numpy(np.int64)[known])
    transferred = collectives["last_ns"].to_numpy(np.int64) + collectives["transfer_ns"].to_numpy(np.int64)
    end[message] = transferred[message]
    lane = collectives["group"].astype(str).to_numpy(object)
    backends = {name: backend_of(name, run) for name in set(lane.tolist())}
    place = {rank: i for i, rank in enumerate(ranks)}
    return Communications(
        lane=lane,
        kind=(collectives["name"].astype(str) + " " + collectives["purpose"].astype(str)).to_numpy(object),
        gradient=(collectives["purpose"] == "gradient").to_numpy(bool),
        workers=np.array(
            [
                0 if sent and not backends[name].messages_queue else backends[name].workers or 0
                for name, sent in zip(lane.tolist(), message.tolist(), strict=True)
            ],
            np.int64,
        ),
        needs=collectives["needs"].to_numpy(object),
        root=np.array([place.get(int(rank), -1) for rank in collectives["root_rank"].tolist()], np.int64),
        size=collectives["bytes"].to_numpy(np.float64),
        end=end,
        home=home,
    )
