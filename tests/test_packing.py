"""What tasks send back: bit for bit what they found, in few bytes."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import pytest
from synthetic import Job
from test_map_ranks import assert_equal

from dsprof.analyzer.align.aligned import ReadArrivals, align
from dsprof.analyzer.align.match import Matches, match_collectives
from dsprof.analyzer.graph.chains_of_ranks import PackedChains
from dsprof.analyzer.rank_summary import SummarizeRanks
from dsprof.trace.packing import ByRank, pack, unpack
from dsprof.trace.strings import plain_strings

RANKS, STEPS = 32, 24
MOST_BYTES = 256
"""A rank and step, of what a pass sends back."""
SECOND = 1_000_000_000


@dataclass(frozen=True)
class Of:
    """What a rank could return."""

    rank: int
    when: np.ndarray
    table: pd.DataFrame
    more: Any = None


def moments(rank: int, count: int = 50) -> np.ndarray:
    return np.cumsum(np.random.default_rng(rank).integers(1_000_000, 30_000_000, count)) + 1000 * SECOND


def of(rank: int, more: Any = None) -> Of:
    when = moments(rank)
    table = pd.DataFrame(
        {
            "start_ns": when[1::2],
            "dur_ns": pd.array([None if i % 5 == 0 else 7 + i for i in range(25)], "Int64"),
            "name": pd.Categorical(["step", "forward"] * 12 + ["step"]),
            "lane": pd.Categorical(["main", f"comm.{rank}"] * 12 + ["main"]),
            "value": np.where(when[1::2] % 4, np.nan, when[1::2] / 3e9),
            "told": pd.array([True, None, False, True, True] * 5, "boolean"),
        }
    )
    return Of(rank, when, table, more)


def assert_comes_back(found: Any) -> bytes:
    packed = pack(found)
    assert_equal(unpack(packed), found)
    return packed


def test_results_come_back_bit_for_bit() -> None:
    assert_comes_back(ByRank({rank: of(rank) for rank in (0, 1, 5, 6)}))


@pytest.mark.parametrize("value", [
    [True, 1, 0, -1, 2**62, -(2**63), 2**64, None, "one", 1.5, float("inf")],
    np.array([], np.int64), np.array(7), np.array([2**63], np.uint64), np.array([1.5, np.nan, -0.0], np.float32),
    np.array([[1, 2], [3, 4], [5, 6]], np.int16), np.asfortranarray(np.array([[1, 2], [3, 4], [5, 6]])),
    np.array([[0.1, 2], [3, 4], [5, 6]]).T, np.zeros((0, 3)), np.arange(24).reshape(2, 3, 4)[:, ::2],
    np.array(["a", None], object), np.array([1, 2], ">i8"), np.array([True, False]), np.arange(10)[::-2],
    np.array([-(2**63), 2**63 - 1, 0, -1]), np.array(["2026-01-01"], "M8[ns]"),
    pd.DataFrame({"a": [1, 2]}, index=pd.Index(["x", "y"], name="who")), pd.DataFrame(),
    pd.DataFrame({"a": [1.5, 2.5]}, index=pd.Index([1, None], dtype=object)), {1: {2: "3"}},
    pd.DataFrame({"a": [1.5]}, index=pd.MultiIndex.from_tuples([("a", 1)])),
    pd.DataFrame({"a": pd.Categorical([2, 1], [2, 1], ordered=True), "b": pd.Categorical([None, "x"])}),
])  # fmt: skip
def test_whatever_a_rank_returns(value: Any) -> None:
    found = ByRank({rank: of(rank, value) for rank in range(3)})
    assert_comes_back(found)
    assert_comes_back(value)


def test_arrays_lie_in_memory_as_they_did() -> None:
    columns = unpack(pack(np.asfortranarray(np.ones((3, 2)))))
    assert columns.flags.f_contiguous
    assert not columns.flags.c_contiguous
    columns[0, 0] = 2.0  # and may be written to


def test_ranks_that_differ_in_shape_keep_their_order() -> None:
    found = ByRank({4: of(4), 2: "torn", 7: of(7, np.arange(3)), 1: None, 9: of(9)})
    assert list(unpack(pack(found))) == [4, 2, 7, 1, 9]
    assert_comes_back(found)


def test_what_is_shared_within_a_result_stays_shared() -> None:
    when = moments(0)
    came = unpack(pack(ByRank({0: (when, when)})))
    assert came[0][0] is came[0][1]


def test_what_ranks_have_in_common_is_sent_once() -> None:
    one, many = (len(pack(ByRank({rank: of(rank) for rank in range(count)}))) for count in (1, 65))
    alone = len(pickle.dumps(of(0)))
    assert (many - one) / 64 < 450  # of which 160 are its fifty moments, and 60 the floats
    assert alone > 2_500


def test_what_cannot_be_pickled_is_said() -> None:
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pack(ByRank({0: lambda: None}))
    with pytest.raises(pickle.PicklingError, match="results of ranks"):
        pack(ByRank({0: ByRank({1: 2})}))


def test_both_passes_send_few_bytes_a_rank_and_step() -> None:
    """Of jobs whose work is as uneven as it is in truth: the last bytes of times are like noise."""
    rng = np.random.default_rng(0)
    trace = Job(ranks=RANKS, steps=STEPS, forward=lambda rank, step: 40 + float(rng.random())).trace()
    with plain_strings():
        first = ReadArrivals(trace, {item.rank: item.restart for item in trace.run.ranks})(range(RANKS))
        assert len(assert_comes_back(first)) / (RANKS * STEPS) <= MOST_BYTES
        aligned, arrivals = align(trace)
        collectives = match_collectives(arrivals, trace.run)
        measured = SummarizeRanks(aligned.trace, collectives, Matches(collectives))(range(RANKS))
        assert measured.measured is not None
        assert len(measured.measured.summaries) == RANKS
        assert len(assert_comes_back(measured)) / (RANKS * STEPS) <= MOST_BYTES
        whole = measured, dict(PackedChains(measured.measured.chains))
        assert len(pickle.dumps(whole)) / (RANKS * STEPS) > 3 * MOST_BYTES
