"""What the devices' streams did, in words, where their kernels were traced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from dsprof.analyzer.analysis import Analysis
from dsprof.analyzer.device import DeviceTime
from dsprof.analyzer.text import clean, count, ms, number, percent

MOST_RANKS: Final = 8
MOST_BANDWIDTHS: Final = 3


def lines(analysis: Analysis) -> list[tuple[str, str]]:
    """What each line is about, and what it says; empty where no device was traced."""
    found = analysis.device
    if found is None:
        return []
    ranks = list(found.ranks.values())
    said = [("device", _times(ranks, "ranks" if len(ranks) > 1 else f"rank {ranks[0].rank}"))]
    if 1 < len(ranks) <= MOST_RANKS:
        said += [(f"rank {one.rank}", _times([one], "")) for one in ranks]
    if found.matched:
        said.append(("collectives", _late(analysis)))
    for one in found.bandwidths[:MOST_BANDWIDTHS]:
        least = "at least " if one.at_least else ""
        note = " (a rank is missing, so waiting for it is in the time)" if one.at_least else ""
        said.append(
            (clean(one.name), f"{least}{number(one.busbw_gbps)} GB/s bus bandwidth, {one.bytes:,} bytes each, "
                              f"{count(one.ranks, 'rank')}{note}")
        )  # fmt: skip
    return said


def _times(ranks: Sequence[DeviceTime], who: str) -> str:
    whole = max(sum(one.kernel_time_ns for one in ranks), 1)
    shares = [
        100 * sum(ns) / whole
        for ns in zip(*((one.compute_ns, one.non_compute_ns, one.idle_ns) for one in ranks), strict=True)
    ]
    communicating = sum(one.communication_ns for one in ranks)
    overlap = sum(one.overlap_ns for one in ranks)
    text = f"computes {percent(shares[0])}, only communicates or copies {percent(shares[1])}, idle {percent(shares[2])}"
    if communicating:
        text += f"; {percent(100 * overlap / communicating)} of its communication is beside computation"
    return text + (f" (all {who} together)" if who == "ranks" else "")


def _late(analysis: Analysis) -> str:
    found = analysis.device
    assert found is not None
    late = found.late()
    text = f"{found.matched} matched"
    shown = late[late["peer_ms"] > 0].head(3)
    if len(shown):
        last = [
            f"rank {rank} ({count(int(times), 'time')}, {ms(float(cost))} exposed)"
            for rank, times, cost in zip(shown["rank"], shown["times"], shown["peer_ms"], strict=True)
        ]
        text += f"; last to come: {', '.join(last)}"
    exposed = float(found.waits["transfer_ms"].sum()) / len(found.ranks)
    return f"{text}; transfers exposed {ms(exposed)} a rank"
