"""Ordinary steps, and what the others cost: literal tables, literal numbers."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from dsprof.analyzer.align.steps import lasting_change
from dsprof.analyzer.budget.intervals import Intervals
from dsprof.analyzer.budget.irregular import Irregular, find_irregular, mark_ordinary, warm_up
from dsprof.analyzer.budget.wall_time import divide_time
from dsprof.schema import COLUMNS

MS = 1_000_000
NOTHING = pd.DataFrame(columns=list(COLUMNS))


def steps(count: int = 40, ranks: int = 2, **extra: dict[tuple[int, int], float]) -> pd.DataFrame:
    """Steps of 100 ms of compute; `extra`: column -> {(rank, step): ms}. Every rank's step lasts as the longest."""
    rows: list[dict[str, float]] = []
    for step in range(count):
        longest = max(sum(of.get((rank, step), 0.0) for of in extra.values()) for rank in range(ranks))
        for rank in range(ranks):
            own = dict.fromkeys(("evaluation_ms", "checkpointing_ms", "compilation_ms"), 0.0)
            own |= {column: of.get((rank, step), 0.0) for column, of in extra.items()}
            apart = own["evaluation_ms"] + own["checkpointing_ms"] + own["compilation_ms"]
            rows.append(
                {
                    **own, "rank": rank, "step": step,
                    "start_ns": step * 200 * MS, "dur_ns": round((100 + longest) * MS),
                    "compute": 100 + own.get("compute", 0.0), "data": own.get("data", 0.0), "optimizer": 0.0,
                    "other": apart + own.get("other", 0.0), "apart_ms": apart,
                }
            )  # fmt: skip
    return pd.DataFrame(rows, columns=list(rows[0]) if rows else ["rank", "step", "start_ns", "dur_ns"])


def kinds(found: Irregular) -> dict[int, str]:
    return dict(zip(found.table["step"].tolist(), found.table["kind"].tolist(), strict=True))


@pytest.mark.parametrize(("count", "left_out"), [(0, 0), (1, 0), (3, 0), (4, 1), (40, 10), (400, 100), (10_000, 100)])
def test_warm_up_is_a_quarter_but_no_more_than_a_hundred(count: int, left_out: int) -> None:
    assert warm_up(count) == left_out


def test_a_checkpoint_on_one_rank_costs_all_of_them() -> None:
    found = find_irregular(steps(checkpointing_ms={(0, step): 50.0 for step in range(0, 40, 4)}), NOTHING)
    assert list(found.steps[~found.ordinary]) == [12, 16, 20, 24, 28, 32, 36]
    assert found.excess_ms["checkpointing"].sum() == pytest.approx(7 * 50)
    assert found.table["rank"].unique().tolist() == [0]
    assert found.mean_ms == pytest.approx(100 + 7 * 50 / 30)


def test_what_every_other_step_does_is_irregular_and_what_most_do_is_not() -> None:
    every_other = find_irregular(steps(evaluation_ms={(0, step): 30.0 for step in range(0, 40, 2)}), NOTHING)
    assert (~every_other.ordinary).sum() == 15
    every_step = find_irregular(steps(evaluation_ms={(0, step): 30.0 for step in range(40)}), NOTHING)
    assert every_step.ordinary.all()


def test_two_kinds_in_one_step_share_its_excess_by_what_each_took() -> None:
    found = find_irregular(steps(checkpointing_ms={(0, 20): 30.0}, evaluation_ms={(0, 20): 90.0}), NOTHING)
    at = list(found.steps).index(20)
    assert found.excess_ms["checkpointing"][at] == pytest.approx(30)
    assert found.excess_ms["evaluation"][at] == pytest.approx(90)
    assert found.shares() == {20: {"checkpointing": pytest.approx(0.25), "evaluation": pytest.approx(0.75)}}


def test_a_stop_is_told_by_the_rank_that_stopped_and_not_by_those_that_waited() -> None:
    found = find_irregular(steps(other={(1, 25): 3_000.0}), NOTHING)
    assert kinds(found) == {25: "stop"}
    assert found.table["rank"].tolist() == [1]
    assert found.own_ms["stop"].max() == pytest.approx(3_000)


def test_a_rank_that_is_late_in_every_tenth_step_does_not_stop() -> None:
    found = find_irregular(steps(400, compute={(0, step): 400.0 for step in range(0, 400, 10)}), NOTHING)
    assert found.ordinary.all()


def test_a_long_stop_is_one_beside_many_short_ones() -> None:
    """Every fifth step rank 1 takes 250 ms longer, which is how the job runs; in step 33 it stands still for 4 s."""
    short = {(1, step): 250.0 for step in range(12, 40, 5)}
    irregular = find_irregular(steps(compute={(1, 33): 4000.0, **short}), NOTHING)
    assert irregular.table["step"].tolist() == [33]
    assert irregular.steps[~irregular.ordinary].tolist() == [33]
    assert find_irregular(steps(compute=short), NOTHING).ordinary.all()


def test_steps_of_varying_length_are_ordinary() -> None:
    draw = np.random.default_rng(1)
    lengths = draw.lognormal(0, 0.8, 200) * 50
    every_rank = {(rank, step): float(lengths[step]) for rank in range(2) for step in range(200)}
    assert find_irregular(steps(200, compute=every_rank), NOTHING).ordinary.all()


def test_a_larger_input_is_no_stop() -> None:
    slow = steps(compute={(0, 25): 400.0})
    forwards = pd.DataFrame(
        [
            {"kind": "phase", "name": "forward", "rank": rank, "step": step, "value": 500.0 if step == 25 else 100.0}
            for rank in range(2)
            for step in range(40)
        ]
    )
    assert kinds(find_irregular(slow, NOTHING)) == {25: "stop"}
    assert find_irregular(slow, forwards.reindex(columns=list(COLUMNS))).table.empty


def test_a_stop_is_one_beside_larger_inputs() -> None:
    """Five steps with three times the input take 250 ms longer; in step 33, with the usual one, rank 0 stops."""
    large = (12, 17, 22, 27, 32)
    longer = steps(compute={**{(0, step): 250.0 for step in large}, (0, 33): 300.0})
    forwards = pd.DataFrame(
        [
            {"kind": "phase", "name": "forward", "rank": rank, "step": step, "value": 300.0 if step in large else 100.0}
            for rank in range(2)
            for step in range(40)
        ]
    )
    assert kinds(find_irregular(longer, forwards.reindex(columns=list(COLUMNS)))) == {33: "stop"}


def test_a_loader_that_starts_anew_makes_its_step_irregular() -> None:
    slow = {(rank, step): 400.0 for rank in range(2) for step in (15, 25, 35)}
    started = pd.DataFrame(
        [{"kind": "phase", "name": "loader_start", "rank": rank, "step": step} for rank, step in slow]
    ).reindex(columns=list(COLUMNS))
    assert kinds(find_irregular(steps(data=slow), started)) == {15: "data", 25: "data", 35: "data"}
    assert find_irregular(steps(data=slow), NOTHING).ordinary.all()


def test_a_loader_that_starts_anew_after_an_evaluation_is_not_evaluating() -> None:
    table = steps(ranks=1, evaluation_ms={(0, 20): 100.0}, data={(0, 20): 900.0})
    started = pd.DataFrame([{"kind": "phase", "name": "loader_start", "rank": 0, "step": 20}])
    irregular = find_irregular(table, started.reindex(columns=list(COLUMNS)))
    evaluating = Intervals.union(np.array([20 * 200 * MS]), np.array([(20 * 200 + 100) * MS]))
    span = 0, 40 * 200 * MS
    divided = divide_time(span, mark_ordinary(table, irregular), {0: {"evaluation": evaluating}}, irregular)
    assert divided["evaluation"] == pytest.approx(0.1)
    assert divided["training"] == pytest.approx(40 * 0.1 + 0.9)


def test_a_rank_that_stops_half_way_leaves_the_steps_that_all_completed() -> None:
    table = steps(40)
    found = find_irregular(table[(table["rank"] == 0) | (table["step"] < 24)], NOTHING)
    assert (found.steps[0], found.steps[-1]) == (6, 23)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_hardly_any_steps(count: int) -> None:
    found = find_irregular(steps(count), NOTHING)
    assert len(found.steps) == count
    assert found.mean_ms == (100 if count else 0)


def test_a_long_run_is_judged_in_windows_over_all_of_it() -> None:
    table = steps(2_100, ranks=1)
    chosen = mark_ordinary(table, find_irregular(table, NOTHING))
    numbers = chosen.loc[chosen["ordinary"], "step"].to_numpy()
    assert len(numbers) == 400
    assert (numbers[0], numbers[-1]) == (100, 2_099)
    assert (np.diff(numbers) > 1).sum() == 7


def test_a_lasting_slowdown_is_told_with_its_first_step() -> None:
    draw = np.random.default_rng(0)
    durations = 50 + draw.standard_normal(300)
    durations[180:] += 20
    found = lasting_change(np.arange(100, 400), durations)
    assert found is not None
    assert found[0] == 280
    assert found[1:] == (pytest.approx(50, abs=0.5), pytest.approx(70, abs=0.5))


@pytest.mark.parametrize("shape", ["flat", "slope", "wave", "spike", "short"])
def test_what_is_no_lasting_slowdown(shape: str) -> None:
    draw = np.random.default_rng(0)
    at = np.arange(18 if shape == "short" else 300)
    durations = 50 + draw.standard_normal(len(at))
    added = {
        "flat": 0 * at,
        "slope": at / 6,
        "wave": 10 * np.sin(at / 5),
        "spike": 900 * (at == 200),
        "short": 20 * (at > 8),
    }
    durations += added[shape]
    assert lasting_change(at, durations) is None
