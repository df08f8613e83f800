"""Which senders go on before what they sent is there, as far as the times of a pair's messages tell."""

from __future__ import annotations

from typing import Final

import numpy as np
import pandas as pd

from dsprof.run import RunInfo

from ..arrays import Bool
from .backends import backend_name
from .participants import NOT_ENDED, Participants

EARLY_NS: Final = 1_000_000
"""Where senders go on so much sooner than what they sent is there, in the median of a pair's messages, they wait only
until they have handed it over, as gloo does with what fits into the socket's buffer."""
BOTH_MEET: Final = ("gloo", "nccl")
"""Backends of which a message is under way when both are there: gloo's sender waits to be asked; on a device's streams
what a sender seems to be through with early is not told from one that waits for its stream."""
FEWEST: Final = 8
"""Messages of a pair that tell so; and of those that were taken from their senders before the receivers had come, which
proves that these are not waited for."""


def handed_over(of: Participants, sends: Bool, informative: Bool) -> Bool:
    """Of which messages the senders do not wait until they are there, but until they have handed them over: of all of a
    pair, or of none. The arguments are of each participant; one for each message comes back."""
    ended = of.end != NOT_ENDED
    sent = np.maximum.reduceat(np.where(sends & ended, of.end, NOT_ENDED), of.begins)
    come = np.maximum.reduceat(np.where(~sends & ended & informative, of.end, NOT_ENDED), of.begins)
    known = (sent != NOT_ENDED) & (come != NOT_ENDED)
    sooner = pd.Series(np.where(known, come - np.where(known, sent, 0), 0)[known])
    by_pair = sooner.groupby(of.group[known])
    early = by_pair.median()[by_pair.size() >= FEWEST] > EARLY_NS
    found: Bool = np.isin(of.group, early.index[early].to_numpy(object))
    return found


def taken_without_receiver(of: Participants, sends: Bool, comm: pd.DataFrame, run: RunInfo | None) -> Bool:
    """Of which messages the senders were through before their receivers had come: of all of a pair, if so of many of
    them, and of those of the group's other pairs that are no larger, of which a receiver that comes first tells
    nothing. One for each message; the first two arguments are of each participant."""
    sent = np.maximum.reduceat(np.where(sends, of.end, NOT_ENDED), of.begins)
    asked = np.maximum.reduceat(np.where(sends, NOT_ENDED, of.came), of.begins)
    known = (sent != NOT_ENDED) & (asked != NOT_ENDED)
    messages = pd.DataFrame({
        "pair": of.group, "size": of.table(comm)["bytes"],
        "without": np.where(known, asked - np.where(known, sent, 0), 0) > EARLY_NS,
    })  # fmt: skip
    pairs = messages.groupby("pair").agg(without=("without", "sum"), size=("size", "median"))
    names = pairs.index.astype(str)
    group = names.str.partition(" ").get_level_values(0)
    may = np.array([backend_name(name, run) not in BOTH_MEET for name in group], bool)
    proven = may & (pairs["without"] >= FEWEST)
    largest = pairs["size"].where(proven).groupby(group).transform("max")
    found: Bool = np.isin(of.group, pairs.index[may & (pairs["size"] <= largest)].to_numpy(object))
    return found
