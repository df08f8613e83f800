"""In words: why stages of a pipeline wait for each other (`price.bubble_shares`), and what to mend first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ...finding import Evidence, Fix
from ...price.bubble_shares import COMMUNICATION, DATA, IMBALANCE, SCHEDULE, STRAGGLER
from ...text import ms

WORDS: Final = {
    SCHEDULE: "filling and draining",
    STRAGGLER: "a rank that is slower than usual",
    IMBALANCE: "stages of unequal work",
    COMMUNICATION: "messages under way",
    DATA: "input that is not there",
}
FIRST: Final = {
    STRAGGLER: "find out what makes a rank slower than usual (`rank.straggler`, `pause.stop`)",
    IMBALANCE: "give the stages equal work (`pipeline.imbalance`)",
    COMMUNICATION: "have messages go faster or beside the computation (`pipeline.stall`)",
    DATA: "load input ahead (`data.stall`)",
}
"""What to do before anything about the schedule, where this is the largest part."""


def mostly(causes: Mapping[str, float] | None) -> str:
    """What most of the waiting is for, behind a title that speaks of the schedule; nothing where that is the schedule's
    too, or not known."""
    if causes is None:
        return ""
    cause, spent = next(iter(causes.items()))
    whole = sum(causes.values())
    if cause == SCHEDULE:
        return ""
    return f"; but of the {ms(whole)} that stages wait a step, {ms(spent)} are for {WORDS[cause]}"


def parts_of(causes: Mapping[str, float] | None) -> tuple[Evidence, ...]:
    """A row for each cause that takes any of it."""
    return tuple(
        Evidence(f"of the waiting, for {WORDS[cause]}", round(spent, 3), "ms")
        for cause, spent in (causes or {}).items() if spent >= 0.0005
    )  # fmt: skip


def first_of(causes: Mapping[str, float] | None) -> tuple[Fix, ...]:
    """What to mend first where most of the waiting is not the schedule's."""
    cause = next(iter(causes or {}), SCHEDULE)
    if causes is None or cause == SCHEDULE:
        return ()
    return (Fix("code", f"first {FIRST[cause]}: {ms(causes[cause])} of the waiting are for {WORDS[cause]}, which more "
                "micro-batches do not shorten"),)  # fmt: skip
