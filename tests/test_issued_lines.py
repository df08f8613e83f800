"""Lines that are said to have issued a collective that ranks disagree about."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from records import Record, derive
from synthetic import Job

from dsprof.analyzer.hang.issuing_lines import CallSite, call_sites
from dsprof.live.waiting import Communication
from dsprof.schema import CALL_SITE, CAPTURE_GAP, CAPTURE_OFF, DTYPES, Kind
from dsprof.trace import Trace

A, B, WAITS = "/home/me/train.py:10", "/home/me/train.py:20", "/home/me/train.py:30"
FLOAT = DTYPES.index("float32")


def mark(site: str, size: int = 400, name: str = "all_gather", at: float = 1) -> Record:
    return (Kind.MARK, CALL_SITE, at, at, {"purpose": name, "bytes": size, "value": FLOAT, "site": site})


def issued(seq: int, end: float | None = 3, size: int = 400, at: float = 2) -> Record:
    return (Kind.COMM, "all_gather", at, end, {"seq": seq, "bytes": size, "dtype": FLOAT})


def line(*records: Record, level: str = "light", stands: str | None = None, dropped: int = 0) -> CallSite | None:
    """The line of collective 0, of which another rank issued 400 bytes."""
    run = Job(ranks=1).trace().run
    run = replace(run, level=level, ranks=[replace(run.ranks[0], dropped=dropped)])
    operation = Communication("all_gather", "0", 0, bytes=400, dtype="float32")
    return call_sites(Trace.of(run, derive(*records)), [0], operation, {} if stands is None else {0: stands}).get(0)


def test_the_only_line_that_issues_alike() -> None:
    assert line(mark(A), mark(B, 800), issued(0)) == CallSite(A, certain=True)
    assert line(mark(A), mark(B), issued(0)) is None
    assert line(mark(A), mark(""), issued(0)) is None
    assert line(mark(A), mark("", -1, ""), issued(0)) is None


def test_the_size_is_the_ranks_own() -> None:
    assert line(mark(A), mark(B, 800), issued(0, size=800)) == CallSite(B, certain=True)


many = [issued(seq) for seq in range(17)]


@pytest.mark.parametrize(
    ("records", "more", "certain"),
    [
        (many[:16], {}, True),
        (many, {}, False),
        (many, {"level": "full"}, True),
        (many[:1], {"dropped": 1}, False),
        ([*many[:1], (Kind.MARK, CAPTURE_OFF, 4, 4, {})], {}, False),
        ([*many[:1], (Kind.MARK, CAPTURE_OFF, 4, 4, {})], {"level": "full"}, True),
        ([*many[:1], (Kind.MARK, CAPTURE_GAP, 4, 4, {})], {"level": "full"}, False),
    ],
)
def test_where_a_mark_may_be_missing_it_is_not_certain(
    records: list[Record], more: dict[str, Any], certain: bool
) -> None:
    assert line(mark(A), *records, **more) == CallSite(A, certain)


def test_lines_and_calls_that_come_later_are_others() -> None:
    later = [mark(B, at=3), *(issued(seq, end=5, at=4) for seq in range(1, 20))]
    assert line(mark(A), issued(0), *later) == CallSite(A, certain=True)
    assert line(mark(A), mark(B, at=1.5), issued(0), *later) is None
    assert line(mark(A), *many, *later) is None  # each of A and B may be the one that was not looked at


def test_where_a_rank_stands_is_where_it_issued_it_only_if_that_line_issues_such_ones() -> None:
    under_way = issued(0, None)
    assert line(mark(A), under_way, stands=WAITS) == CallSite(A, certain=True)
    assert line(mark(A), mark(B), under_way, stands=B) == CallSite(B, certain=True)
    assert line(mark(A), mark(B), under_way, stands=WAITS) is None
    assert line(mark(A), mark(B), issued(0), issued(1, None), stands=B) is None
    assert line(under_way, stands=WAITS) == CallSite(WAITS, certain=True)  # no line is marked
