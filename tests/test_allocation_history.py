"""What a recorded history says was in use over time, and what its peak was made of, and how a report shows it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import factories
import pytest

from dsprof.analyzer.memory.allocated_over_time import AllocationHistory, allocation_history
from dsprof.analyzer.memory.allocator_state import Holder, summarize_memory
from dsprof.reports.memory import over_history
from dsprof.reports.sections import report_of
from dsprof.reports.sections.section import Figure, Table, Words
from dsprof.trace import Memory

SECOND = 1_000_000
EVENTS = [
    ("alloc", 100, 30, 0, 0), ("segment_alloc", 500, 999, 0, 0), ("alloc", 200, 50, 1, 1),
    ("free_requested", 100, 30, 2, 0), ("free_requested", 300, 7, 3, 0), ("alloc", 100, 5, 4, 1),
]  # fmt: skip
"""Action, address, bytes, second, stack. What lies at 300 was allocated before, and what lies at 400 is not touched."""
PLACES = {0: ("/job/train.py", 12, "forward"), 1: ("/job/train.py", 30, "step")}


def memory(events: list[tuple[str, int, int, int, int]] = EVENTS) -> Memory:
    """The snapshot after the events: what lies at 100 (5 B), 200 (50 B) and 400 (11 B) is in use in the end."""
    action, address, size, second, stack = zip(*events, strict=True) if events else [()] * 5
    count = len(events)
    return Memory.of(
        segments={"device": [0], "address": [0], "bytes": [1000], "stream": [0], "pool": ["0.0"], "small": [False],
                  "expandable": [False], "stack": [-1]},
        blocks={"segment": [0] * 3, "address": [100, 200, 400], "bytes": [16, 64, 16], "requested": [5, 50, 11],
                "state": ["allocated"] * 3, "stack": [1, 1, 0]},
        history={"device": [0] * count, "action": action, "address": address, "bytes": size, "stream": [0] * count,
                 "pool": [""] * count, "time_us": [9 * SECOND + one * SECOND for one in second], "stack": stack},
        stacks={"stack": list(PLACES), "function": [one[2] for one in PLACES.values()],
                "file": [one[0] for one in PLACES.values()], "line": [one[1] for one in PLACES.values()]},
    )  # fmt: skip


def test_what_is_in_use_and_what_the_peak_is_made_of() -> None:
    found = allocation_history(memory(), 0)
    assert found is not None
    assert found.in_use.tolist() == [48, 98, 68, 61, 66], "18 B before it began, 66 B in the end"
    assert found.seconds.tolist() == [0, 1, 2, 3, 4]
    assert found.peak == 1
    assert found.holders == (
        Holder("/job/train.py:30", "step", 50, 1), Holder("/job/train.py:12", "forward", 41, 2),
        Holder("no stack recorded", "", 7, 1),
    )  # fmt: skip
    assert sum(one.bytes for one in found.holders) == found.in_use[found.peak]


@pytest.mark.parametrize(("events", "device"), [([], 0), (EVENTS, 1)])
def test_without_a_history(events: Any, device: int) -> None:
    assert allocation_history(memory(events), device) is None


def test_many_events_are_drawn_by_the_largest_of_neighbours() -> None:
    found = allocation_history(memory(), 0)
    assert found is not None
    line, top = over_history(found, most=3).data
    assert [round(1024 * y) for y in line.y] == [98, 68, 66]
    assert list(line.x) == [0, 2, 4]
    assert (list(top.x), round(1024 * top.y[0])) == ([1], 98)
    assert over_history(found, most=3).layout.meta["note"] == "each point is the largest of 2 events"
    assert isinstance(found, AllocationHistory)


def test_a_report_shows_it() -> None:
    analysis = factories.healthy()
    analysis.trace.memory[0] = memory()
    (section,) = report_of(replace(analysis, memory=summarize_memory({0: memory()})), ["memory"]).sections
    assert "history-0" in [block.name for block in section.blocks if isinstance(block, Figure)]
    told = [block.text for block in section.blocks if isinstance(block, Words)]
    assert told[-1] == "Most was in use 1.00 s after the history began: 98 B."
    tables = [block for block in section.blocks if isinstance(block, Table)]
    (at_peak,) = [block for block in tables if block.columns[0].title.startswith("in use at the peak")]
    assert at_peak.rows[0].cells == ("job/train.py:30", "step", "50 B", "51 %", "1")
