"""benchmarks/overhead.py: what it makes of the rounds, and how it goes on. No job is run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import overhead  # noqa: E402
from overhead import CHEAP, DEAR, Result  # noqa: E402

CPU_S = {"off": 1.0, "off_again": 1.0, "light": 1.002, "full": 1.03, "python": 1.02, "torch_profiler": 1.3,
         "torch_profiler_stacks": 2.0, "torch_profiler_memory": 1.5}  # fmt: skip


def block(cpu_s: float) -> dict[str, Any]:
    return {"cpu_s": cpu_s, "wall_s": 2 * cpu_s, "faults": 0, "records": 60, "beside_s": 0.004, "opening_s": 0.005,
            "closing_s": 0.001}  # fmt: skip


def measured(arms: tuple[str, ...], ranks: int = 1, pace: float = 1.0) -> dict[str, Any]:
    """A round on a host that is `pace` times as slow as usual."""
    return {arm: [block(pace * CPU_S[arm])] * ranks for arm in arms}


def result(path: Path, cheap: int, dear: int, job: str = "ddp") -> Result:
    found = Result(path, anew=False)
    for number in range(cheap):
        found.add(job, CHEAP, 6, measured(CHEAP, pace=1 + 0.1 * (number % 3)))
    for _ in range(dear):
        found.add(job, DEAR, 6, measured(DEAR))
    return found


def test_a_ratio_is_of_blocks_of_one_round(tmp_path: Path) -> None:
    """The host's pace falls out."""
    summary = result(tmp_path / "o.json", cheap=30, dear=2).summary("ddp")
    assert summary["cpu"]["light"] == {"ratio": 1.002, "low": 1.002, "high": 1.002, "mean": 1.002}
    assert summary["cpu"]["torch_profiler"]["ratio"] == 1.3
    assert summary["resolved"]
    assert summary["times_what_light_costs"]["torch_profiler"] == {"ratio": 150.0, "at_least": 150.0}
    assert summary["captured"]["light"] == {
        "records_a_rank_a_step": 10.0, "bytes_a_rank_a_step": 640, "opening_cpu_ms": 5.0, "closing_cpu_ms": 1.0,
        "side_threads_cpu_ms_a_second": pytest.approx(1.814, abs=0.01),
    }  # fmt: skip


def test_all_but_the_arm_that_shows_the_noise_are_compared_with_both_arms_without_collectors(tmp_path: Path) -> None:
    found = Result(tmp_path / "o.json", anew=False)
    found.add("ddp", CHEAP, 6, {**measured(CHEAP), "off": [block(0.8)], "off_again": [block(1.25)]})
    cpu = found.summary("ddp")["cpu"]
    assert cpu["off_again"]["ratio"] == 1.5625
    assert cpu["full"]["ratio"] == 1.03


def test_cpu_time_is_the_mean_of_the_ranks(tmp_path: Path) -> None:
    found = Result(tmp_path / "o.json", anew=False)
    blocks = {arm: [block(1.0), block(3.0)] for arm in CHEAP}
    found.add("fsdp2", CHEAP, 10, blocks)
    assert found.summary("fsdp2")["step_ms"] == {"cpu": 200.0, "wall": 400.0}


def test_the_lowest_and_the_highest_fifth_do_not_count(tmp_path: Path) -> None:
    found = Result(tmp_path / "o.json", anew=False)
    for light in (0.1, 1.01, 1.01, 1.01, 9.0):
        found.add("ddp", CHEAP, 6, {**measured(CHEAP), "light": [block(light)]})
    assert found.summary("ddp")["cpu"]["light"]["ratio"] == 1.01


def test_light_that_costs_nothing_is_no_divisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CPU_S, "light", 0.999)
    summary = result(tmp_path / "o.json", cheap=2, dear=2).summary("ddp")
    assert summary["times_what_light_costs"]["torch_profiler"] == {"ratio": None, "at_least": None}


def test_rounds_are_wanted_until_the_noise_is_known(tmp_path: Path) -> None:
    found = result(tmp_path / "few.json", cheap=overhead.FEWEST - 1, dear=3)
    assert found.wants("ddp", CHEAP, dear=3)
    assert not found.wants("ddp", DEAR, dear=3)
    assert found.wants("fsdp2", DEAR, dear=3)
    found.add("ddp", CHEAP, 6, measured(CHEAP))
    assert not found.wants("ddp", CHEAP, dear=3)
    for again in (0.9, 1.1) * 40:
        found.add("engine", CHEAP, 6, {**measured(CHEAP), "off_again": [block(again)]})
    assert not found.summary("engine")["resolved"]
    assert found.wants("engine", CHEAP, dear=3)


def test_it_goes_on_from_the_rounds_that_were_written(tmp_path: Path) -> None:
    path = tmp_path / "o.json"
    result(path, cheap=2, dear=1)
    again = Result(path, anew=False)
    assert (len(again.of("ddp", CHEAP)), len(again.of("ddp", DEAR)), len(again.of("engine", CHEAP))) == (2, 1, 0)
    again.add("engine", CHEAP, 6, measured(CHEAP, ranks=2))
    assert [one["job"] for one in json.loads(path.read_text())["rounds"]] == ["ddp"] * 3 + ["engine"]
    assert Result(path, anew=True).rounds == []


def test_rounds_of_other_code_are_not_mixed_in(tmp_path: Path) -> None:
    path = tmp_path / "o.json"
    result(path, cheap=1, dear=0)
    path.write_text(path.read_text().replace('"collectors": "', '"collectors": "0'))
    with pytest.raises(SystemExit, match=r"o\.json was measured of other code or on another machine: --anew"):
        Result(path, anew=False)


def test_jobs_take_turns_and_no_round_is_begun_when_the_time_is_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[tuple[str, int, int]] = []
    now = 0.0

    def run_turn(job: str, arms: tuple[str, ...], seed: int, rounds: int, block: int, warm: int) -> Any:
        nonlocal now
        taken.append((job, seed, rounds))
        for _ in range(rounds):
            now += 1.0
            yield measured(arms)

    monkeypatch.setattr(overhead, "run_turn", run_turn)
    monkeypatch.setattr(overhead.time, "monotonic", lambda: now)
    found = Result(tmp_path / "o.json", anew=False)
    overhead.measure(found, ["ddp", "engine"], until=38.0, dear=6, block=6, warm=4)
    # Turns of the cheap arms, of ten rounds, and of the others, of four, until there are six of those.
    assert taken == [("ddp", 0, 10), ("ddp", 0, 4), ("engine", 0, 10), ("engine", 0, 4), ("ddp", 10, 10), ("ddp", 4, 2)]
    assert len(found.rounds) == 39
