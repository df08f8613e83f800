"""Contention for cores: literal steps, loads and waits."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from graphs import graph_of, steps_of

from dsprof.analyzer.effect import Fewer
from dsprof.analyzer.price.contention import (
    MOST_OF_GAIN,
    OF_ONE_MS,
    busy,
    freed_ms,
    kept_of_overlap,
    lost_by_waiting_less,
)
from dsprof.analyzer.work.taken_cores import TakenCores, taken_cores

BESIDE = ["5 I0 3 W0 2", "9 I0 W0 2"]
"""The first rank works for 3 ms between issuing the collective and waiting for it."""
ALL = Fewer(1.0)
BY_ITSELF = TakenCores("own-threads", "")
IN_TURNS = ["5 I0 W0 2", "9 I0 W0 2"]


def study(
    programs: list[str], *, load: float | None = 1.0, ranks: tuple[int, ...] = (0, 1), cores: int = 2,
    beside_ms: float | None = 20.0, core_wait_ms: float = np.nan, worker_ms: float = np.nan, waiting_ms: float = 10.0,
    step_ms: float = 100.0, taken: TakenCores = BY_ITSELF,
) -> Any:  # fmt: skip
    graph = graph_of(steps_of(programs, [4], steps=4))
    busiest = SimpleNamespace(ranks=ranks, cores=cores, absent=0)
    of_load = SimpleNamespace(busy=load, busiest=busiest, ranks_per_core=len(ranks) / cores, beside_ms=beside_ms)
    ordinary = pd.DataFrame({"peer_wait": [waiting_ms], "comm_exposed": [0.0], "bubble": [0.0]})
    spent = {"core_wait_seconds": core_wait_ms, "worker_cpu_seconds": worker_ms}
    gauges = SimpleNamespace(spent=lambda gauge: np.full((2, 4), spent[gauge]))
    return SimpleNamespace(
        graph=SimpleNamespace(**{**vars(graph), "measured": np.full(4, step_ms), "columns_of": graph.columns_of}),
        load=None if load is None else of_load, contended=None if load is None else of_load, ordinary=ordinary,
        gauges=gauges, step_ms=step_ms, ranks=graph.ranks, kept={inspect.unwrap(taken_cores): taken},
    )  # fmt: skip


def test_who_no_longer_waits_pays_for_what_goes_on_beside_its_work() -> None:
    # Two ranks on two cores, both at each end of one collective: one communication a core.
    assert lost_by_waiting_less(study(BESIDE), 10.0) == pytest.approx(OF_ONE_MS / 10)
    assert lost_by_waiting_less(study(BESIDE), 5.0) == pytest.approx(OF_ONE_MS / 10)  # half of the waiting goes
    assert lost_by_waiting_less(study(BESIDE), 20.0) == pytest.approx(OF_ONE_MS / 20)  # there is no more of it
    assert lost_by_waiting_less(study(IN_TURNS), 10.0) == 0.0
    assert lost_by_waiting_less(study(BESIDE, load=0.5), 10.0) == pytest.approx(OF_ONE_MS / 10 * (0.5 / 0.9) ** 2)
    assert lost_by_waiting_less(study(BESIDE, load=None), 10.0) == 0.0


def test_a_short_overlap_counts_in_part() -> None:
    short = study(["5 I0 0.1 W0 2", "9 I0 W0 2"])
    assert lost_by_waiting_less(short, 10.0) == pytest.approx(OF_ONE_MS / 20)


def test_only_the_ranks_on_the_busiest_cores_count() -> None:
    bound = study(BESIDE, ranks=(1,), cores=1)
    assert lost_by_waiting_less(bound, 10.0) == pytest.approx(OF_ONE_MS / 10)


def test_contention_never_takes_all_of_a_gain() -> None:
    assert lost_by_waiting_less(study(BESIDE, waiting_ms=0.1), 0.3) == MOST_OF_GAIN


def test_shorter_steps_are_busier_and_never_more_than_busy() -> None:
    assert busy(study(BESIDE, load=0.5)) == 0.5
    assert busy(study(BESIDE, load=0.5), 20.0) == pytest.approx(0.625)
    assert busy(study(BESIDE, load=0.5), 80.0) == 1.0
    assert busy(study(BESIDE, load=None)) == 0.0


def test_overlap_is_worth_what_both_leave_free() -> None:
    assert kept_of_overlap(study(BESIDE, load=0.0)) == 1.0
    assert kept_of_overlap(study(BESIDE, load=0.6)) == pytest.approx(0.64)
    assert kept_of_overlap(study(BESIDE, load=1.0)) == 0.0


def test_fewer_collectives_give_back_what_was_waited_for_a_core() -> None:
    modelled = np.full(4, 95.0)  # and what measured steps took longer, up to twice as much
    assert freed_ms(study(BESIDE, core_wait_ms=8.0), modelled, ALL) == pytest.approx(8.0 + 5.0)
    assert freed_ms(study(BESIDE, core_wait_ms=2.0), modelled, ALL) == pytest.approx(2.0 + 4.0)
    assert freed_ms(study(BESIDE, core_wait_ms=8.0), np.full(4, 105.0), ALL) == pytest.approx(8.0)
    # 5 MB at 2 ns a byte are half of the 20 ms that the backend computes: that half stays.
    assert freed_ms(study(BESIDE, core_wait_ms=8.0), modelled, Fewer(1.0, moved_bytes=5e6)) == pytest.approx(6.5)


def test_only_their_part_of_what_all_communications_cost_is_given_back() -> None:
    """Reductions beside as many exchanges of tokens, which stay: the backend's threads serve both."""
    modelled = np.full(4, 95.0)
    half = Fewer(1.0, part_of_all=0.5)
    assert freed_ms(study(BESIDE, core_wait_ms=8.0), modelled, half) == pytest.approx(4.0 + 5.0)
    assert freed_ms(study(BESIDE, core_wait_ms=2.0), modelled, half) == pytest.approx(1.0 + 2.0)
    # 5 MB at 2 ns a byte are half of the 20 ms that the backend computes: that half stays.
    half = Fewer(1.0, part_of_all=0.5, moved_bytes=5e6)
    assert freed_ms(study(BESIDE, core_wait_ms=8.0), modelled, half) == pytest.approx(4.5)


def test_nothing_is_given_back_where_nobody_was_seen_to_wait() -> None:
    modelled = np.full(4, 95.0)
    assert freed_ms(study(BESIDE), modelled, ALL) == 0.0  # the scheduler does not tell
    assert freed_ms(study(BESIDE, core_wait_ms=0.0), modelled, ALL) == 0.0
    assert freed_ms(study(BESIDE, core_wait_ms=8.0, beside_ms=None), modelled, ALL) == 0.0


def test_no_more_is_given_back_than_the_backend_computes() -> None:
    modelled = np.full(4, 50.0)
    assert freed_ms(study(BESIDE, beside_ms=2.0, core_wait_ms=30.0), modelled, ALL) == pytest.approx(2.0 + 2.0)


def test_loaders_workers_are_a_cause_too() -> None:
    loading = study(BESIDE, core_wait_ms=12.0, worker_ms=40.0)
    assert freed_ms(loading, np.full(4, 100.0), ALL) == pytest.approx(4.0)  # 20 of 60 ms beside the training thread


def test_other_processes_are_a_cause_where_they_leave_no_core_free() -> None:
    modelled = np.full(4, 100.0)
    full = TakenCores(
        "other-processes", "", ranks=(0, 1), job=1.2, others=0.8
    )  # 80 ms of CPU time a step, for two ranks
    free = TakenCores("not-known", "", ranks=(0, 1), job=0.6, others=0.8)
    assert freed_ms(study(BESIDE, core_wait_ms=12.0, taken=full), modelled, ALL) == pytest.approx(12.0 * 20 / 60)
    elsewhere = TakenCores("other-processes", "", ranks=(2, 3), job=1.2, others=0.8)
    for taken in (free, elsewhere):
        assert freed_ms(study(BESIDE, core_wait_ms=12.0, taken=taken), modelled, ALL) == pytest.approx(12.0)


def test_of_more_ranks_than_cores_the_other_training_threads_are_a_cause_too() -> None:
    # 2 ranks on a core that is always used: 100 ms a step, 20 of it each rank's backend, 30 each training thread.
    crowded = study(BESIDE, cores=1, core_wait_ms=14.0)
    assert freed_ms(crowded, np.full(4, 100.0), ALL) == pytest.approx(14.0 * 20 / (20 + 15))
